# SPDX-License-Identifier: Apache-2.0
"""Half-open ranges in two columns, (starts, ends): of bytes, of pages or of numbers, int64.

A *set of ranges* is ascending and disjoint, as union() makes it. What grows range by range is
base/intervals.py, which needs no numpy.
"""

from __future__ import annotations

import numpy as np

from uffdprefetch.base.arrays import Array, BoolArray, Int64Array

#: First columns: where they start, where they end.
Ranges = tuple[Array, Array]


def grouped(starts: Array, ends: Array) -> tuple[Array, Array]:
    """(order, first) of ranges of which none is empty: their order by start, and the places in it
    at which a range of their union begins. Ranges that touch are of one."""
    order = np.argsort(starts, kind="stable")
    ascending, reach = starts[order], np.maximum.accumulate(ends[order])
    apart: BoolArray = np.ones(len(order), np.bool_)
    apart[1:] = ascending[1:] > reach[:-1]
    return order, np.flatnonzero(apart)


def union(starts: Array, ends: Array) -> Ranges:
    """The set of ranges that holds what any of these holds; empty ones count for nothing, and what
    touches is one."""
    some = starts < ends
    if not some.all():
        starts, ends = starts[some], ends[some]
    order, first = grouped(starts, ends)
    return starts[order[first]], np.maximum.reduceat(ends[order], first)


def total(ranges: Ranges) -> int:
    """The sum of the lengths."""
    return int((ranges[1] - ranges[0]).sum())


def overlapping(ranges: Ranges, low: Array, high: Array) -> tuple[Array, Array]:
    """(first, after): the ranges from number ``first`` to before ``after`` overlap [low, high), for
    each of these; none does where ``after`` is no more than ``first``. Starts and ends of
    ``ranges`` ascend."""
    starts, ends = ranges
    first: Array = np.asarray(np.searchsorted(ends, low, "right"))
    return first, np.asarray(np.searchsorted(starts, high, "left"))


def holding(ranges: Ranges, at: Array) -> Array:
    """The number of the range that each place is in, -1: of none. Of ranges that overlap, with
    ascending starts and ends, the last that begins there or before."""
    starts, ends = ranges
    if not len(starts):
        return np.full(at.shape, -1, np.int64)
    index: Array = np.asarray(np.searchsorted(starts, at, "right")) - 1
    return np.where(at < ends[index], index, -1)


def covered(ranges: Ranges, low: Array, high: Array) -> Array:
    """How much of each [low, high) is in a set of ranges."""
    starts, ends = ranges
    if not len(starts):
        return np.zeros(len(low), np.int64)
    before: Int64Array = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(ends - starts, out=before[1:])

    def below(at: Array) -> Array:
        after: Array = np.asarray(np.searchsorted(starts, at, "right"))
        beyond = np.maximum(0, np.where(after > 0, ends[after - 1] - at, 0))
        return before[after] - beyond

    return below(high) - below(low)


def subtract(ranges: Ranges, less: Ranges) -> Ranges:
    """A set of ranges less another; what touches stays apart where the other set ends in it."""
    if not len(ranges[0]) or not len(less[0]):
        return ranges
    cuts = edges(*ranges, *less)
    low, high = cuts[:-1], cuts[1:]
    keep = (holding(ranges, low) >= 0) & (holding(less, low) < 0)
    return low[keep], high[keep]


def edges(*columns: Array) -> Array:
    """All of their numbers, ascending, each once. (np.unique() hashes since numpy 2.3, and takes
    ten times as long for few.)"""
    every = np.concatenate(columns)
    every.sort()
    first = np.ones(len(every), bool)
    first[1:] = every[1:] != every[:-1]
    return every[first]


def of_mask(mask: BoolArray) -> Ranges:
    """The set of ranges of the places at which a mask is true."""
    turns = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return turns[::2], turns[1::2]


def spread(counts: Array) -> tuple[Int64Array, Int64Array]:
    """For counts [2, 0, 3]: owners [0, 0, 2, 2, 2] and places among one's own [0, 1, 0, 1, 2]."""
    owner: Int64Array = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    ends = np.cumsum(counts, dtype=np.int64)
    inner = np.arange(len(owner), dtype=np.int64) - (ends - counts)[owner]
    return owner, inner
