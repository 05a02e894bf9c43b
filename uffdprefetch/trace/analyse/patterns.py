# SPDX-License-Identifier: Apache-2.0
"""A reader's accesses become a pattern: of one stream or of several, with phases or without. Pure.

The names are those of streams.py, and *mixed*, when phases of a stream have different names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.analyse.runs import AccessStream, all_of, follows, weighted_median
from uffdprefetch.trace.analyse.streams import ACCESSES_MIN, StreamPattern, classify
from uffdprefetch.trace.analyse.strides import Stride

#: Least difference of their shares left out by which two forward streams are different phases.
SKIP_DIFFERS = 0.25
#: Least size of a phase: accesses, and share of all accesses or pages.
PHASE_ACCESSES = 16
PHASE_SHARE = 0.1
#: Least length of a phase in runs of its neighbour: a shorter one is that one's last record.
RUNS = 3
#: Share of the pages of one pattern from which several streams together are named by it.
MOST = 0.75
FORWARD = ("consecutive", "sequential", "strided")


def _turning_point(values: Array, least: float) -> int | None:
    """Where a series changes its mean most (CUSUM), None if by less than ``least``."""
    away = np.cumsum(values - values.mean())
    if len(away) < 2:
        return None
    at = int(np.abs(away[:-1]).argmax()) + 1
    return at if abs(values[:at].mean() - values[at:].mean()) >= least else None


def _differ(a: StreamPattern, b: StreamPattern) -> bool:
    if "unknown" in (a.name, b.name) or min(a.share, b.share) < 0.6:
        return False
    if a.name == b.name == "strided":
        differs = a.stride.differs(b.stride)
        if differs is not None:
            return differs
    if a.direction == b.direction and a.name in FORWARD and b.name in FORWARD:
        if max(a.blur, b.blur) >= min(w.step_pages or np.inf for w in (a, b)) / 2:
            return False  # large folios hide what one of them leaves out
        return abs(a.skipped - b.skipped) > SKIP_DIFFERS
    return (a.name, a.direction) != (b.name, b.direction)


def _is_one_run(left: StreamPattern, right: StreamPattern) -> bool:
    """Whether one half is only about as long as a run of the other: no phase, its last record."""
    for one, other in ((left, right), (right, left)):
        length = other.runs.sure - other.runs.start
        if len(length) >= ACCESSES_MIN and one.pages < RUNS * weighted_median(length, length):
            return True
    return False


def _series(stream: AccessStream, slack: int) -> list[tuple[Array, float]]:
    """(what changes from phase to phase, by how much at least): whether accesses join, which way
    they go, how far in powers of two."""
    jump = np.diff(stream.page)
    joined = follows(stream, slack) | follows(stream.mirrored(), slack)
    return [
        ((~joined).astype(float), 0.03),
        ((jump < 0).astype(float), 0.03),
        (np.log2(np.abs(jump) + 1.0), 0.05),
    ]


def describe(stream: AccessStream, slack: int = 0, depth: int = 3) -> StreamPattern:
    """The pattern of a stream; "mixed", with ``parts``, when its phases have different names."""
    whole = classify(stream, slack)
    n = len(stream)
    if depth == 0 or n < 2 * PHASE_ACCESSES:
        return whole
    for values, least in _series(stream, slack):
        turn = _turning_point(values, least)
        if turn is None:
            continue
        at = turn + 1
        if not PHASE_ACCESSES <= at <= n - PHASE_ACCESSES:
            continue
        halves = [stream.part(slice(0, at)), stream.part(slice(at, n))]
        left, right = (classify(half, slack) for half in halves)
        pages = max(1, left.pages + right.pages)
        part = min(max(w.accesses / n, w.pages / pages) for w in (left, right))
        if part < PHASE_SHARE or not _differ(left, right) or _is_one_run(left, right):
            continue
        left, right = (describe(half, slack, depth - 1) for half in halves)
        parts = [
            (a + shift, b + shift, w)
            for half, shift, size in ((left, 0, at), (right, at, n - at))
            for a, b, w in (half.parts or [(0, size, half)])
        ]
        fit = sum(w.share * w.accesses for _, _, w in parts) / n
        return StreamPattern(
            "mixed", 0, fit, n, whole.pages, whole.runs, whole.skipped, parts=parts
        )
    return whole


# ---- several streams ----------------------------------------------------------------------------


def combine(patterns: list[StreamPattern]) -> StreamPattern:
    """One pattern for the streams of several processes or epochs, by the pages that they read."""
    if len(patterns) == 1:
        return patterns[0]
    known = [w for w in patterns if w.name != "unknown"] or patterns
    if not known:
        return StreamPattern("unknown")

    def weight(some: list[StreamPattern]) -> float:
        return float(sum(max(1, w.pages) for w in some))

    def mean(some: list[StreamPattern], name: str) -> float:
        return sum(getattr(w, name) * max(1, w.pages) for w in some) / weight(some)

    by_name: dict[tuple[str, int], list[StreamPattern]] = {}
    for one in known:
        by_name.setdefault((one.name, one.direction), []).append(one)
    (name, direction), alike = max(by_name.items(), key=lambda item: weight(item[1]))
    most = weight(alike) / weight(known)
    whole = StreamPattern(
        "mixed", 0, mean(known, "share"), sum(w.accesses for w in patterns),
        sum(w.pages for w in patterns), all_of([w.runs for w in patterns]), mean(known, "skipped"),
        parts=[part for w in patterns for part in w.parts],
    )  # fmt: skip
    if most < MOST and not _one_kind(known):
        return whole
    return replace(
        whole,
        name=name,
        direction=direction,
        share=mean(alike, "share") * most,
        stride=Stride(
            pages=_agreed([w.stride.pages for w in alike], 0.05),
            records=_agreed([w.stride.records for w in alike], 0.0),
            indexed=all(w.stride.indexed for w in alike),
        ),
    )


def _one_kind(patterns: list[StreamPattern]) -> bool:
    """Whether they are phases of one way to read, by _differ()."""
    return all(w.name != "mixed" and not _differ(patterns[0], w) for w in patterns) and all(
        w.share >= 0.6 and w.direction == patterns[0].direction for w in patterns
    )


def _agreed(values: list[Any], tolerance: float) -> Any:
    """The value that all have, within a part of it; None when they have not."""
    found = sorted(v for v in values if v is not None)
    if not found or len(found) < 0.5 * len(values):
        return None
    middle = found[len(found) // 2]
    return middle if all(abs(v - middle) <= tolerance * abs(middle) for v in found) else None
