# SPDX-License-Identifier: Apache-2.0
"""Ranges of pages: unions of them, and a file cut at their ends. Pure.

Cutting a file where something begins or ends lets time and memory go with the events, and not with
the file. Page numbers are int64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from uffdprefetch.base.arrays import Array

#: Sorted, disjoint ranges: first pages, ends.
Ranges = tuple[Array, Array]

#: Pairs of (range, piece) that are looked at in one go: bounds the memory.
PAIRS = 1 << 22
#: Up to here (256 GiB of 4 KiB pages) boundaries are found by a table, four bytes a page: ten times
#: as fast as a search where accesses are random.
TABLE_PAGES = 1 << 26


def union(start: Array, end: Array) -> Ranges:
    """The ranges [start, end) as sorted, disjoint ones."""
    keep = start < end
    order = np.argsort(start[keep], kind="stable")
    start, end = start[keep][order], end[keep][order]
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    first = np.r_[True, start[1:] > reach[:-1]]
    last = np.r_[np.flatnonzero(first)[1:] - 1, len(start) - 1]
    return start[first], reach[last]


def union_of(ranges: list[Ranges]) -> Ranges:
    """The union of several sets of ranges."""
    none: Array = np.zeros(0, np.int64)
    starts, ends = [s for s, _ in ranges] or [none], [e for _, e in ranges] or [none]
    return union(np.concatenate(starts), np.concatenate(ends))


def pages_of(ranges: Ranges) -> int:
    """How many pages they hold."""
    return int((ranges[1] - ranges[0]).sum())


def pages_within(ranges: Ranges, low: Array, high: Array) -> Array:
    """How many of their pages lie in each [low, high)."""
    start, end = ranges
    if not len(start):
        return np.zeros(len(low), np.int64)
    before = np.r_[0, np.cumsum(end - start)]

    def up_to(at: Array) -> Array:
        i = np.asarray(np.searchsorted(start, at, side="right"))
        beyond: Array = np.maximum(0, np.where(i > 0, end[i - 1], 0) - at) * (i > 0)
        return before[i] - beyond

    return up_to(high) - up_to(low)


class Pieces:
    """A file cut at each value of some columns; piece i is [cut[i], cut[i + 1])."""

    def __init__(self, columns: list[Array]) -> None:
        top = max((int(c.max()) for c in columns if len(c)), default=0)
        self._place: Array | None = None
        if top >= TABLE_PAGES:
            self.cut = np.unique(np.concatenate(columns))
        else:
            marked: Array = np.zeros(top + 1, bool)
            for column in columns:
                marked[column] = True
            self._place = np.cumsum(marked, dtype=np.int32) - np.int32(1)
            self.cut = np.flatnonzero(marked)
        self.sizes: Array = np.diff(self.cut)

    def __len__(self) -> int:
        return len(self.sizes)

    def at(self, page: Array) -> Array:
        """The piece that begins with each page; all of them are boundaries."""
        if self._place is not None:
            found: Array = self._place[page]
            return found
        return np.asarray(np.searchsorted(self.cut, page))

    def holding(self, page: Array) -> Array:
        """The piece that holds each page, of whatever page; -1 and len(self) beyond the ends."""
        return np.asarray(np.searchsorted(self.cut, page, side="right")) - 1

    def pairs(self, start: Array, end: Array) -> Iterator[tuple[Array, Array]]:
        """(index of the range, piece) of ranges between boundaries, in order, in parts."""
        a, b = self.at(start), self.at(end)
        count = (b - a).astype(np.int64)
        sums = np.cumsum(count)
        at = 0
        while at < len(a):
            done = sums[at - 1] if at else 0
            stop = max(at + 1, int(np.searchsorted(sums, done + PAIRS, side="right")))
            n = count[at:stop]
            owner: Array = np.repeat(np.arange(at, stop), n)
            within = np.arange(len(owner)) - np.repeat(np.cumsum(n) - n, n)
            yield owner, a[at:stop].repeat(n) + within
            at = stop

    def pages(self, mask: Array) -> int:
        """Pages of the pieces in a mask."""
        return int(self.sizes[mask].sum())

    def ranges(self, mask: Array) -> Ranges:
        """The pieces in a mask as ranges."""
        edge = np.flatnonzero(np.diff(np.r_[False, mask, False]))
        return self.cut[edge[::2]], self.cut[edge[1::2]]

    def union(self, start: Array, end: Array) -> Ranges:
        """As union(), of ranges between boundaries: without sorting them."""
        mask: Array = np.zeros(len(self), bool)
        for _, piece in self.pairs(start, end):
            mask[piece] = True
        return self.ranges(mask)
