# SPDX-License-Identifier: Apache-2.0
"""Where a reader begins its file anew. Pure.

An epoch shows where new processes take over, where pages fault that had faulted before (they had
been unmapped), or where the position falls back to where the stream began. A second epoch over
pages that stay mapped makes no fault at all: nothing is seen of it, and nothing is said.
"""

from __future__ import annotations

import numpy as np

from uffdprefetch.base.arrays import Array

#: Blocks of accesses, by whose medians epochs are found: bounds the time for any trace.
BLOCKS = 8192
#: Fewer accesses are no epoch.
ACCESSES_MIN = 8
#: Largest shares of an epoch's accesses that do not fit: to pages visited more often than there
#: were epochs, and, in a later epoch, to pages visited for the first time.
EARLY, NEW = 0.15, 0.5
#: NEW where visits to 64 KiB are counted: records that end and begin within one visit it twice.
NEW_UNITS = 0.2
#: Most epochs: more are another pattern.
EPOCHS_MAX = 256
#: Accesses of a process, as a share of the mean, below which it is no worker of a DataLoader.
BUSY = 0.2
#: Largest share of its way that a stream with a direction goes back.
BACK = 0.15
#: log2 of the pages within which faults are one visit: 64 KiB, a fault-around.
UNIT_BITS = 4


def visits(unit: Array) -> Array:
    """Number of times that each value has come, up to its place, from 1; soon after the last time
    counts as one visit."""
    n = len(unit)
    order = np.argsort(unit, kind="stable")
    ordered = unit[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    # places within a value's group rise: a small step between two is one visit
    soon = np.r_[False, np.diff(order) <= ACCESSES_MIN] & ~first
    sums = np.cumsum(~soon)
    count: Array = np.empty(n, np.int64)
    count[order] = sums - np.maximum.accumulate(np.where(first, sums, 0)) + 1
    return count


def _blocks(values: Array, most: int = BLOCKS) -> tuple[Array, int]:
    """(median of each block, accesses per block) of at most about ``most`` blocks."""
    size = max(1, len(values) // most)
    whole = len(values) // size * size
    blocks = values[:whole].reshape(-1, size)
    return np.partition(blocks, size // 2, axis=1)[:, size // 2], size


def _smooth(values: Array) -> Array:
    """The median of each place and two on both sides: a B-tree's root is no way back."""
    if len(values) < 5:
        return values
    padded = np.pad(values, 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)


def _sharp(times: Array, bounds: list[int], new: float) -> bool:
    """Whether epochs explain how often pages were visited; a shuffle with replacement is none."""
    ends = [*bounds[1:], len(times)]
    for i, (a, b) in enumerate(zip(bounds, ends, strict=True)):
        part = times[a:b]
        if (part > i + 1).mean() > EARLY or (i and (part < 2).mean() > new):
            return False
    return True


def _by_visits(times: Array, new: float) -> list[int]:
    """Starts of epochs by how often pages had been visited, [0] when that tells nothing."""
    middle, size = _blocks(times)
    level = np.maximum.accumulate(_smooth(middle)).astype(np.int64)
    rises: Array = np.flatnonzero(np.diff(level)) + 1
    if not 0 < len(rises) < EPOCHS_MAX:
        return [0]
    bounds = [0]
    for rise in rises.tolist():
        near = slice(max(bounds[-1], (rise - 3) * size), (rise + 3) * size)
        # within the blocks around it: where fewest lie on the wrong side
        late = np.where(times[near] > len(bounds), 1, -1)
        at = near.start + int(np.argmin(np.r_[0, np.cumsum(late)]))
        if at - bounds[-1] >= ACCESSES_MIN and len(times) - at >= ACCESSES_MIN:
            bounds.append(at)
    return bounds if len(bounds) > 1 and _sharp(times, bounds, new) else [0]


def _one_way(place: Array, span: float) -> int:
    """1 or -1 if a stream goes one way but for falls over most of its span, else 0."""
    step = np.diff(place)
    step = step[np.abs(step) < 0.5 * span]
    up, down = float(step[step > 0].sum()), float(-step[step < 0].sum())
    if min(up, down) > BACK * max(up, down) or not up + down:
        return 0
    return 1 if up > down else -1


def _by_position(page: Array) -> list[int]:
    """Starts of epochs where a stream falls back from its end to its start, [0] when it does not.
    Several processes make a broad one: it is looked at ever more coarsely."""
    for most in (BLOCKS, 1024, 128, 32):
        middle, size = _blocks(page, most)
        place: Array = _smooth(middle).astype(float)
        span = float(place.max() - place.min())
        sign = _one_way(place, span)
        if sign and len(place) >= ACCESSES_MIN:
            return _falls(sign * place, sign * page, size)
    return [0]


def _falls(place: Array, page: Array, size: int) -> list[int]:
    """Where a stream upwards falls; ``place``: of blocks of ``size`` accesses."""
    low, span = place.min(), place.max() - place.min()
    high, bottom = place >= low + 0.75 * span, place <= low + 0.25 * span
    # from the last block near the top to the next one near the bottom, whatever lies between
    marks = np.flatnonzero(high | bottom)
    turns = np.flatnonzero(high[marks[:-1]] & bottom[marks[1:]])
    bounds = [0]
    for turn in turns.tolist()[: EPOCHS_MAX - 1]:
        start = max(bounds[-1], (int(marks[turn]) - 2) * size)
        near = page[start : (int(marks[turn + 1]) + 3) * size]
        # where the halves are told apart best: high before it against low after it
        late = np.where(near > low + span / 2, 1, -1)
        at = start + int(np.argmax(np.cumsum(late))) + 1
        if at - bounds[-1] >= ACCESSES_MIN and len(page) - at >= ACCESSES_MIN:
            bounds.append(at)
    return bounds


def _read_again(page: Array, bounds: list[int]) -> list[int]:
    """Of these starts, those from which on mostly known 64 KiB are read."""
    kept, unit = [0], page >> UNIT_BITS
    for i, at in enumerate(bounds[1:], 1):
        end = bounds[i + 1] if i + 1 < len(bounds) else len(page)
        known = np.isin(unit[at:end], unit[kept[-1] : at])
        if known.mean() >= 1 - NEW:
            kept.append(at)
    return kept


def _by_processes(page: Array, pid: Array) -> list[int]:
    """Starts of generations of processes that follow each other (a DataLoader's workers are new in
    each epoch), [0] when there are none. Of one process at a time only those that read again."""
    who, first, place, count = np.unique(
        pid, return_index=True, return_inverse=True, return_counts=True
    )
    last: Array = np.zeros(len(who), np.int64)
    np.maximum.at(last, place, np.arange(len(pid)))
    # a parent that looks at the file now and then belongs to no generation
    busy = count >= BUSY * len(pid) / len(who)
    order = np.argsort(first[busy], kind="stable")
    first, last = first[busy][order], last[busy][order]
    starts: Array = np.flatnonzero(first[1:] > np.maximum.accumulate(last)[:-1]) + 1
    if not 0 < len(starts) < EPOCHS_MAX:
        return [0]
    bounds = [0, *first[starts].tolist()]
    sizes = np.diff([*bounds, len(page)])
    if sizes.min() < ACCESSES_MIN:
        return [0]
    together = np.diff(np.r_[0, starts, len(first)]).min()
    return bounds if together > 1 else _read_again(page, bounds)


def epochs(page: Array, pid: Array) -> list[int]:
    """Indices at which a reader's epochs begin, the first of them 0; ``page`` and ``pid`` of its
    accesses in the order of time."""
    if len(page) < 2 * ACCESSES_MIN:
        return [0]
    bounds = _by_processes(page, pid)
    for unit, new in ((page, NEW), (page >> UNIT_BITS, NEW_UNITS)):
        if len(bounds) == 1:
            bounds = _by_visits(visits(unit), new)
    return bounds if len(bounds) > 1 else _read_again(page, _by_position(page))
