# SPDX-License-Identifier: Apache-2.0
"""A file cut at the ends of ranges of pages: time and memory go with the events that have them, and
not with the file. Pure. Page numbers are int64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import Ranges, of_mask, spread

#: Pairs of (range, piece) in one batch of pairs(): bounds the memory.
PAIRS = 1 << 22
#: Up to here (256 GiB of 4 KiB pages) boundaries are found by a table, four bytes a page: ten times
#: as fast as a search where accesses are random.
TABLE_PAGES = 1 << 26


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
            owner, inner = spread(n)
            owner += at
            yield owner, a[owner] + inner
            at = stop

    def pages(self, mask: Array) -> int:
        """Pages of the pieces in a mask."""
        return int(self.sizes[mask].sum())

    def ranges(self, mask: Array) -> Ranges:
        """The pieces in a mask as ranges."""
        first, end = of_mask(mask)
        return self.cut[first], self.cut[end]

    def holds(self, ranges: Ranges) -> Array:
        """The mask of the pieces in ranges between boundaries."""
        mask: Array = np.zeros(len(self), bool)
        for _, piece in self.pairs(*ranges):
            mask[piece] = True
        return mask

    def union(self, start: Array, end: Array) -> Ranges:
        """As union() of base/ranges.py, of ranges between boundaries: without sorting them."""
        return self.ranges(self.holds((start, end)))
