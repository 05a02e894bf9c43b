# SPDX-License-Identifier: Apache-2.0
"""The pattern of one stream: its name, in Darshan's words. Pure.

*Consecutive*: each access starts where the last one ended. *Sequential*: each starts at a higher
offset. *Strided*: sequential with a constant step, in bytes or in records (skipping in
[Stanovnik]). Besides: *backward* and *random*.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import Ranges, covered, union
from uffdprefetch.trace.analyse.runs import (
    NO_RUNS,
    AccessStream,
    Runs,
    follows,
    long_enough,
    main_runs,
    on_the_way,
    runs_of,
)
from uffdprefetch.trace.analyse.strides import NO_STRIDE, Stride, stride_of

#: Least accesses of a pattern.
ACCESSES_MIN = 4
#: Share of jumps in one direction from which a stream has that direction. A shuffle has a half.
ONE_WAY = 0.85
#: Pages of pieces that are no records: each is long enough to be read ahead of, so that what is
#: read forwards in it is not backward, though the last one comes first.
PIECE_PAGES = 256
#: Largest share of its way that a consecutive stream leaves out (a lost event, a hole).
SKIP_MIN = 0.02


@dataclass(frozen=True)
class StreamPattern:
    """How one stream, or several, go through a file. ``share``: part of the accesses that fit the
    ``name``. ``skipped``: part of the way that was left out. ``parts``: (first access, end,
    pattern) of each phase of a mixed one.
    """

    name: str
    direction: int = 0
    share: float = 0.0
    accesses: int = 0
    pages: int = 0
    runs: Runs = NO_RUNS
    skipped: float = 0.0
    stride: Stride = NO_STRIDE
    blur: float = 0.0  # pages of an access that are not known to be touched
    step_pages: float | None = None  # from one run to the next, of a stream that leaves pages out
    parts: list[tuple[int, int, StreamPattern]] = field(default_factory=list)


def classify(stream: AccessStream, slack: int = 0) -> StreamPattern:
    """The pattern of a stream, without regard to phases. ``accesses`` counts tree pages, too."""
    n = len(stream)
    kept = _not_tree(stream, slack)
    tree, stream = stream.part(~kept), _with_records(stream.part(kept))
    pages = int((stream.high - stream.page).sum())
    if len(stream) < ACCESSES_MIN:
        return StreamPattern("unknown", accesses=n, pages=pages, runs=runs_of(stream, slack))
    mirror = stream.mirrored()
    backward = int(follows(mirror, slack).sum()) > int(follows(stream, slack).sum())
    side = mirror if backward else stream
    joined = len(side) - len(runs_of(side, slack))
    straight = on_the_way(side, slack)
    main, visits = side.part(straight), side.part(~straight)
    all_runs = runs_of(main, slack)
    keep = long_enough(all_runs)
    short = all_runs.part(~keep)
    if backward:
        tree = tree.mirrored()
    others = (tree, visits, short)
    passed = union(*(np.concatenate([getattr(o, c) for o in others]) for c in ("low", "high")))
    runs = main_runs(all_runs, slack, keep)
    pattern = _named(runs, joined, len(side), slack, main.record, backward, passed)
    if backward:
        pattern = replace(pattern, direction=-pattern.direction)
        runs = runs.mirrored()
    if pattern.direction < 0 and pattern.name in ("consecutive", "sequential"):
        pattern = replace(pattern, name="backward")
    blur = float((side.high - side.sure).mean())
    return replace(pattern, accesses=n, pages=pages, runs=runs, blur=blur)


def _not_tree(stream: AccessStream, slack: int) -> Array:
    """All accesses but those to pages without a record that lie on nobody's way."""
    if stream.record is None:
        return np.ones(len(stream), bool)
    joins = follows(stream, slack) | follows(stream.mirrored(), slack)
    data = stream.record >= 0
    if int(data.sum()) < max(ACCESSES_MIN, len(stream) // 3):
        return np.ones(len(stream), bool)
    kept: Array = data | np.r_[False, joins] | np.r_[joins, False]
    return kept


def _with_records(stream: AccessStream) -> AccessStream:
    """Give the pages without a record that of the access before; no records if few have one."""
    if stream.record is None or int((stream.record >= 0).sum()) < max(
        ACCESSES_MIN, len(stream) // 3
    ):
        return replace(stream, record=None)
    place = np.where(stream.record >= 0, np.arange(len(stream)), -1)
    first = int(np.argmax(place >= 0))
    known = np.maximum(np.maximum.accumulate(place), first)
    return replace(stream, record=stream.record[known])


def _restarts(runs: Runs) -> Array:
    """Jumps from the end of a stream back to its start: a new epoch, no disorder."""
    low, top = int(runs.start.min()), int(runs.high.max())
    span = top - low
    return (runs.start[1:] <= low + 0.1 * span) & (runs.high[:-1] >= low + 0.9 * span)


def _named(
    runs: Runs,
    joined: int,
    n: int,
    slack: int,
    record: Array | None,
    mirrored: bool,
    passed: Ranges,
) -> StreamPattern:
    """``joined`` of the n accesses continue the one before; the runs are without accidents.
    ``passed``: what those accidents mapped, through which there is no fault."""

    def named(name: str, direction: int, fit: float, **more: Any) -> StreamPattern:
        return StreamPattern(name, direction, min(1.0, fit / max(1, n - 1)), **more)

    step = np.diff(runs.start)
    counted = ~_restarts(runs) if len(runs) > 1 else np.zeros(0, bool)
    ways = int(counted.sum())
    if not ways:
        return named("consecutive", 1, joined)
    forward = int((step[counted] > 0).sum())
    if max(forward, ways - forward) < ONE_WAY * ways:
        if ways < ACCESSES_MIN and joined >= 0.9 * (n - 1):
            return named("consecutive", 1, joined)
        return StreamPattern("random", 0, 2 * min(forward, ways - forward) / ways)
    sign = 1 if forward >= ways - forward else -1
    if sign < 0 and not mirrored and float(np.median(runs.high - runs.start)) >= PIECE_PAGES:
        return named("consecutive", 1, joined)
    fits = np.flatnonzero(counted & (sign * step > 0))
    if not len(fits):
        return named("consecutive", 1, joined)  # the same place again and again
    taken = sign * step[fits]
    # upwards, what was mapped below a run's start is passed; downwards it may be read
    below = runs.low if mirrored else runs.start
    start, end = runs.high[fits], below[fits + 1]
    if sign < 0:
        start, end = runs.high[fits + 1], runs.low[fits]
    end = np.maximum(start, end)
    gap = end - start - covered(passed, start, end)
    skipped = float(gap.sum() / taken.sum())
    usual = float(np.median(taken))
    stride = stride_of(runs, taken, gap, slack, None if record is None else sign * record)
    if stride is not None:
        return named(
            "strided", sign, joined + stride.share * len(taken), skipped=skipped, step_pages=usual,
            stride=replace(stride, indexed=record is not None),
        )  # fmt: skip
    if skipped <= SKIP_MIN:
        return named("consecutive", sign, joined + (len(taken) if sign < 0 else 0))
    return named("sequential", sign, joined + len(taken), skipped=skipped, step_pages=usual)
