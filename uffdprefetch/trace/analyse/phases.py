# SPDX-License-Identifier: Apache-2.0
"""What a job was doing when ([Stanovnik] figure 4): training, testing, pauses. Pure.

By which data set was read when; the job's write calls are named beside it, as the paper reads
training from their clusters. A phase that reads only pages that are still mapped is not seen.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array

#: Bins of the run's time: the resolution of a phase's ends.
BINS = 400
#: Least share of the run of a pause, a time without any access.
PAUSE_SHARE = 0.05
#: The same at the run's beginning or end.
EDGE_SHARE = 0.02
#: Least accesses of a data set.
SET_ACCESSES = 8
#: Phases that a report lists.
PHASES_MAX = 256
#: Words in the path of a validation or test set.
TESTING = re.compile(r"(^|[^a-z])(val|valid|validation|test|testing|eval|dev)([^a-z]|$)")


def set_of(path: str) -> str:
    """The data set that a file belongs to: an LMDB's directory, or its name without numbers."""
    folder, name = os.path.split(path)
    return folder if name in ("data.mdb", "lock.mdb") else f"{folder}/{re.sub('[0-9]+', '#', name)}"


def _is_testing(name: str, times: Array, main: Array) -> str | None:
    """Why a data set is the one for testing, or None."""
    words = TESTING.search("/".join(name.lower().rsplit("/", 2)[1:]))
    if words:
        return f"its name holds '{words.group(2)}'"
    first, last = float(times.min()), float(times.max())
    if len(main) and main.min() < first and len(times) < len(main):
        inside = np.searchsorted(main, last) - np.searchsorted(main, first)
        if main.max() > first and inside < 0.5 * len(main):
            return "it is a second, smaller set, read in turns with the first"
    return None


def _labels(sets: dict[str, Array], seconds: float) -> tuple[Array, list[str], float]:
    """(number of the set that is read most in each bin, -1: none; names; width of a bin)."""
    names = list(sets)
    width = seconds / BINS
    counts = np.zeros((len(names), BINS))
    for i, name in enumerate(names):
        at = np.clip((sets[name] / width).astype(np.int64), 0, BINS - 1)
        # as a part of the set's own peak: a small set is not drowned by a large one
        found = np.bincount(at, minlength=BINS).astype(float)
        counts[i] = found / max(1.0, np.percentile(found[found > 0], 75))
    label = np.where(counts.max(axis=0) > 0, counts.argmax(axis=0), -1)
    return label, names, width


def _stretches(label: Array) -> list[tuple[int, int, int]]:
    """(label, first bin, end) of each stretch; a short one between two alike belongs to them."""
    cuts: Array = np.flatnonzero(np.diff(label)) + 1
    edges = [0, *cuts.tolist(), len(label)]
    found = [(int(label[a]), a, b) for a, b in pairwise(edges)]
    shortest = max(2, int(PAUSE_SHARE * len(label)))
    joined: list[tuple[int, int, int]] = []
    for which, a, b in found:
        if joined and which == joined[-1][0]:
            joined[-1] = (which, joined[-1][1], b)
        elif which == -1 and b - a < shortest and joined:
            joined[-1] = (joined[-1][0], joined[-1][1], b)
        else:
            joined.append((which, a, b))
    return joined


def phases(
    accesses: dict[int, tuple[str, Array]], writes: Array, seconds: float
) -> list[dict[str, Any]]:
    """The phases of a job, in order. ``accesses``: path and sorted times in seconds by file;
    ``writes``: times of write calls."""
    sets: dict[str, list[Array]] = {}
    ids: dict[str, list[int]] = {}
    for number, (path, times) in accesses.items():
        if len(times) and not path.endswith("lock.mdb"):
            sets.setdefault(set_of(path), []).append(times)
            ids.setdefault(set_of(path), []).append(number)
    merged = {name: np.sort(np.concatenate(parts)) for name, parts in sets.items()}
    merged = {name: times for name, times in merged.items() if len(times) >= SET_ACCESSES}
    if not merged or seconds <= 0:
        return []
    main = max(merged, key=lambda name: (_is_testing(name, merged[name], merged[name][:0]) is None,
                                         len(merged[name])))  # fmt: skip
    why = {name: _is_testing(name, times, merged[main]) for name, times in merged.items()}
    why[main] = None
    label, names, width = _labels(merged, seconds)
    found = _stretches(label)
    result = []
    for i, (which, a, b) in enumerate(found):
        edge = i in (0, len(found) - 1)
        start, end = a * width, b * width
        if which == -1:
            if end - start < (EDGE_SHARE if edge else PAUSE_SHARE) * seconds:
                continue
            name = "start" if i == 0 else "end" if edge else "pause"
            reason = "no data file is seen being read"
            if i:
                reason += " (pages that are still mapped are read unseen)"
            files: list[int] = []
        else:
            times = merged[names[which]]
            inside = times[(times >= start) & (times <= end)]
            if len(inside):
                start, end = float(inside[0]), float(inside[-1])
            name = "testing" if why[names[which]] else "training"
            reason = f"{os.path.basename(names[which])} is read"
            if why[names[which]]:
                reason += f": {why[names[which]]}"
            files = ids[names[which]]
        if len(writes):
            calls = int(((writes >= start) & (writes < end)).sum())
            reason += f"; {calls} of {len(writes)} write calls"
        result.append(
            {"start_seconds": start, "end_seconds": end, "name": name, "why": reason,
             "files": files}
        )  # fmt: skip
    return result[:PHASES_MAX]
