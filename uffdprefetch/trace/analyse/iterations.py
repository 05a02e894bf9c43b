# SPDX-License-Identifier: Apache-2.0
"""Batches: a job reads one, computes, reads the next ([Stanovnik] figure 9). Pure.

The pauses of a reader between two accesses are of two kinds: within a batch and between batches.
Where they do not fall apart clearly, and at a regular beat, nothing is said.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array

#: Least iterations of a beat.
ITERATIONS_MIN = 5
#: Least ratio of a pause between batches to one within.
APART = 2.0
#: Largest coefficient of variation of a beat's batches and pauses, without the outermost tenths.
VARIES = 0.35
#: Thresholds tried between the two kinds of pauses: at the widest gaps.
CANDIDATES = 8
#: Iterations that a report lists.
LISTED_MAX = 4096


def _core(values: Array) -> Array:
    """Without the smallest and the largest tenth."""
    cut = len(values) // 10
    return np.sort(values)[cut : len(values) - cut]


def _varies(values: Array) -> float:
    core = _core(values.astype(float))
    return float(core.std() / core.mean()) if len(core) and core.mean() > 0 else np.inf


def _thresholds(pause: Array) -> list[float]:
    """Where the pauses fall apart: the widest gaps between neighbours in size, longest first."""
    long = np.sort(pause[pause > 0])[-1_000_000:].astype(float)
    if len(long) < ITERATIONS_MIN:
        return []
    # a few exceptions on either side of a gap do not close it
    ratio = long[1:] / long[:-1]
    wide = np.flatnonzero(ratio >= 1.2)
    wide = wide[np.argsort(-ratio[wide], kind="stable")][:CANDIDATES]
    log_bins = np.histogram(np.log2(long), bins=48)
    valleys = np.flatnonzero(
        (log_bins[0][1:-1] < log_bins[0][:-2]) & (log_bins[0][1:-1] <= log_bins[0][2:])
    )
    found = {float(np.sqrt(long[i] * long[i + 1])) for i in wide.tolist()}
    found |= {float(2 ** log_bins[1][i + 1]) for i in valleys.tolist()}
    return sorted(found, reverse=True)


def starts_of(time_ns: Array, until_ns: Array) -> Array | None:
    """Indices of the accesses with which iterations begin; None when there is no clear beat.

    ``time_ns`` and ``until_ns``: when each access of one thread of control began and was over, in
    the order of time. A wait for storage is no pause.
    """
    if len(time_ns) < 2 * ITERATIONS_MIN:
        return None
    pause = np.maximum(0, time_ns[1:] - np.maximum.accumulate(until_ns)[:-1])
    best: tuple[int, int, Array] | None = None
    for threshold in _thresholds(pause):
        between = pause > threshold
        count = int(between.sum())
        if count < ITERATIONS_MIN - 1 or count >= 0.8 * len(pause):
            continue
        apart = np.percentile(pause[between], 2) / max(1.0, np.percentile(pause[~between], 98))
        first = np.r_[0, np.flatnonzero(between) + 1]
        sizes = np.diff(np.r_[first, len(time_ns)])
        if apart < APART or _varies(sizes[:-1]) > VARIES or _varies(pause[between]) > VARIES:
            continue
        # the clearest; of equally clear ones that which leaves no pause within an iteration
        clear = (int(np.log2(apart)), count, first)
        if best is None or clear[:2] > best[:2]:
            best = clear
    return None if best is None else best[2]


def listed(values: Array) -> list[float]:
    """At most LISTED_MAX of the values, evenly spaced."""
    step = -(-len(values) // LISTED_MAX) or 1
    return [round(float(v), 6) for v in values[::step]]


def report(first: Array, time_ns: Array, stall: Any, end_ns: int) -> dict[str, Any]:
    """The ``iterations`` of a reader. ``stall``: seconds_between() of its Stalls; ``end_ns``: the
    end of its last access."""
    start = time_ns[first]
    end = np.r_[start[1:], max(end_ns, int(start[-1]))]
    seconds = (end - start) / 1e9
    return {
        "count": len(first),
        "period_seconds": float(np.median(seconds[:-1])),
        "seconds": listed(seconds),
        "start_seconds": listed(start / 1e9),
        "stall_seconds": listed(stall(start, end)),
    }
