# SPDX-License-Identifier: Apache-2.0
"""Which unit of an order needs a block of the file next [Belady]. Pure, arrays only."""

from __future__ import annotations

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.predict.order.by_place import ByPlace

#: Entries of one array, 32 MiB: pieces that long extents are cut into in all (extents.py), (block,
#: unit) pairs that are looked at at a time, and blocks of a file for which an answer is remembered.
ENTRIES_MOST = 1 << 22


class NextUse:
    """Of the units of one order, by whose turns ``first`` goes on and never back."""

    def __init__(self, places: ByPlace) -> None:
        self._places, self._count = places, len(places.starts)
        self._next: Array | None = None  # by block: the turn, and one; 0: not asked for yet
        self._block_bytes = 0
        self._first = 0

    def of(self, blocks: Array, block_bytes: int, first: int) -> Array:
        """For each block of the file the first unit from ``first`` on that has a byte in it, or
        self._count. ``first`` never goes back: an answer is remembered until it has passed. To the
        page: a block that is not made of whole ones counts as those that it is in."""
        blocks = np.asarray(blocks, np.int64)
        self._first = first = max(first, self._first)
        most = self._places.pages * self._places.page_bytes // block_bytes + 1
        answer: Array = np.full(len(blocks), self._count, np.int64)
        inside = np.flatnonzero((blocks >= 0) & (blocks < most))
        if most > ENTRIES_MOST:
            answer[inside] = self._search(blocks[inside], block_bytes, first)
            return answer
        if self._next is None or self._block_bytes != block_bytes:
            # zeros: "not asked for yet", and no memory until then
            self._next = np.zeros(most, np.uint32 if self._count < (1 << 32) - 2 else np.int64)
            self._block_bytes = block_bytes
        known = self._next[blocks[inside]].astype(np.int64) - 1
        stale = np.flatnonzero(known < first)
        known[stale] = self._search(blocks[inside[stale]], block_bytes, first)
        self._next[blocks[inside[stale]]] = known[stale] + 1
        answer[inside] = known
        return answer

    def _search(self, blocks: Array, block_bytes: int, first: int) -> Array:
        """The same, from nothing."""
        begin: Array = blocks * block_bytes
        low, high = self._places.candidates(blocks, block_bytes)
        counts = np.maximum(high - low, 0)
        answer: Array = np.full(len(blocks), self._count, np.int64)
        sums: Array = np.cumsum(counts)
        at = 0
        while at < len(blocks):  # one block at least, else as many as make ENTRIES_MOST
            before = int(sums[at - 1]) if at else 0
            upto_block = max(at + 1, int(np.searchsorted(sums, before + ENTRIES_MOST, "right")))
            part = np.arange(at, upto_block)[counts[at:upto_block] > 0]
            if len(part):
                answer[part] = self._earliest(low[part], counts[part], begin[part], first)
            at = upto_block
        return answer

    def _earliest(self, low: Array, counts: Array, begin: Array, first: int) -> Array:
        """Of the units at places [low, low + counts) (counts > 0) the first one in turn, for each
        block that begins at ``begin``."""
        offsets = np.cumsum(counts) - counts
        steps: Array = np.repeat(low - offsets, counts)
        units: Array = self._places.by_place[np.arange(len(steps)) + steps].astype(np.int64)
        units[units < first] = self._count
        if self._places.nested:
            ends = self._places.ends[np.minimum(units, self._count - 1)]
            units[ends <= np.repeat(begin, counts)] = self._count
        earliest: Array = np.minimum.reduceat(units, offsets)
        return earliest
