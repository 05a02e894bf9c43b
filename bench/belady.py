# SPDX-License-Identifier: Apache-2.0
"""Belady's rule ([Belady]) with the readers' future accesses known."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from uffdprefetch.pool.eviction import (
    SLICE_ROWS,
    BlockReader,
    Residents,
    evictable,
    farthest_first,
    oldest_first,
    smallest,
)

#: Accesses from the cursor within which a touch counts as the block's nearest planned use. Touches
#: are reported late (threads, batches), and those of mapped blocks not at all.
REACH = 1024
#: Touches farther away, in a row and near each other, after which the cursor jumps there.
STRAYS = 8
#: "No further use" in the tables, and the least distance that means it.
NEVER = np.iinfo(np.int32).max
FAR = 1 << 30


class Belady:
    """Farthest next use first; of those never used again the least recently touched.

    ``futures`` maps each reader (any key) to an (n, 2) array of (file, block), n < 2^30: its
    accesses to come, all epochs. The next use of a block is the nearest of all readers', counted
    in accesses from the reader's cursor: readers of one speed. Tables take 4 bytes for each reader
    and block up to the last planned one of each file, and 16 for each access.
    """

    name = "belady"

    def __init__(self, futures: Mapping[Hashable, np.ndarray]) -> None:
        plans = {reader: np.asarray(plan).reshape(-1, 2) for reader, plan in futures.items()}
        files = max((int(plan[:, 0].max()) + 1 for plan in plans.values() if len(plan)), default=0)
        # an extra empty file, and an extra row of the tables, stand for everything not planned
        self._blocks: np.ndarray = np.zeros(files + 1, np.int64)
        for plan in plans.values():
            np.maximum.at(self._blocks, plan[:, 0], plan[:, 1] + 1)
        self._first = np.cumsum(self._blocks) - self._blocks
        self._size = int(self._blocks.sum())
        self._tracks = {
            reader: _Track(self._first[plan[:, 0]] + plan[:, 1], self._size + 1)
            for reader, plan in plans.items()
        }

    def progress(self, reader: Hashable, index: int) -> None:
        """The reader has done its first ``index`` accesses. Monotonic: late reports are ignored."""
        self._tracks[reader].advance(index)

    def touched(self, reader: Hashable, file: int, block: int) -> None:
        """The reader has used a block: its cursor moves past the block's nearest planned use ahead.
        A touch far from the cursor is ignored until STRAYS follow each other."""
        if 0 <= file < len(self._blocks) and 0 <= block < self._blocks[file]:
            self._tracks[reader].touch(int(self._first[file]) + block)

    def victims(
        self, residents: Residents, readers: Sequence[BlockReader], count: int
    ) -> np.ndarray:
        """See :class:`uffdprefetch.pool.eviction.Policy`."""
        free = evictable(residents, readers)
        distance = self._next_use(residents)
        never = free & (distance >= FAR)
        first = smallest(residents, oldest_first(residents, never), count)
        if len(first) >= count:
            return first
        keys = farthest_first(distance, free & ~never)
        return np.concatenate((first, smallest(residents, keys, count - len(first))))

    def _next_use(self, residents: Residents) -> np.ndarray:
        """Accesses (uint32) until each row is used, FAR or more for never."""
        distance: np.ndarray = np.full(len(residents.file), NEVER, np.int32)
        for start in range(0, len(distance), SLICE_ROWS):
            part = slice(start, start + SLICE_ROWS)
            files = np.minimum(residents.file[part], len(self._blocks) - 1)
            blocks = residents.block[part]
            place = np.where(blocks < self._blocks[files], self._first[files] + blocks, self._size)
            for track in self._tracks.values():
                ahead = track.next_use[place] - np.int32(track.cursor)
                np.minimum(distance[part], ahead, out=distance[part])
        return distance.view(np.uint32)


class _Track:
    """One reader's plan and cursor. ``next_use`` by block: the index of the first access to it at
    or after ``cursor``, NEVER if there is none."""

    def __init__(self, plan: np.ndarray, size: int) -> None:
        if len(plan) >= FAR:
            raise ValueError(f"a plan of {len(plan)} accesses: at most {FAR - 1} are possible")
        self.cursor = 0
        self.plan: np.ndarray = plan.astype(np.int64)
        # accesses sorted by block, then time
        self._order = np.argsort(self.plan, kind="stable").astype(np.int32)
        self._starts = np.concatenate(([0], np.cumsum(np.bincount(self.plan, minlength=size))))
        self._again: np.ndarray = np.full(len(plan), NEVER, np.int32)
        same = self.plan[self._order[1:]] == self.plan[self._order[:-1]]
        self._again[self._order[:-1][same]] = self._order[1:][same]
        self.next_use: np.ndarray = np.full(size, NEVER, np.int32)
        used = np.flatnonzero(np.diff(self._starts))
        self.next_use[used] = self._order[self._starts[used]]
        self._stray = 0  # where the last touch far from the cursor was
        self._strays = 0

    def advance(self, index: int) -> None:
        index = min(index, len(self.plan))
        if index <= self.cursor:
            return
        done = self.plan[self.cursor : index]
        # of repeated indices the last assignment stays (numpy's manual, "Assigning values to
        # indexed arrays"): that of the latest access
        self.next_use[done] = self._again[self.cursor : index]
        self.cursor = index

    def touch(self, block: int) -> None:
        found = self._nearest(block, self.cursor)
        if found is None:
            return
        if abs(found - self.cursor) <= REACH:
            self._strays = 0
            self.advance(found + 1)
            return
        near = self._nearest(block, self._stray) if self._strays else None
        if near is not None and abs(near - self._stray) <= REACH:
            self._strays, self._stray = self._strays + 1, near
        else:
            self._strays, self._stray = 1, found
        if self._strays >= STRAYS:
            self._strays = 0
            self._restart(self._stray + 1)

    def _nearest(self, block: int, index: int) -> int | None:
        """The access to the block nearest to an index, the later of two."""
        uses = self._order[self._starts[block] : self._starts[block + 1]]
        if not len(uses):
            return None
        after = int(np.searchsorted(uses, index))
        near = [int(use) for use in uses[max(0, after - 1) : after + 1]]
        return min(near, key=lambda use: (abs(use - index), -use))

    def _restart(self, index: int) -> None:
        """Move the cursor anywhere, backward too; rebuilds the tables."""
        self.cursor = index
        self.next_use.fill(NEVER)
        # backwards, so that the earliest access to each block is what stays
        self.next_use[self.plan[index:][::-1]] = np.arange(
            len(self.plan) - 1, index - 1, -1, dtype=np.int32
        )
