# SPDX-License-Identifier: Apache-2.0
"""Paper 2's readers of a file without an index, and what they cost: for bench/speculate.py, and for
the tests of orders/placement_estimator.py, which the service uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import subtract, total, union
from uffdprefetch.orders.placement_estimator import PlacementEstimator

#: So many records to come does touched() look at: DataLoader workers take turns by batches.
AHEAD = 256


class Followed:
    """An order in record numbers that somebody reads, and what the touches tell of its places."""

    def __init__(self, guess: PlacementEstimator, records: Sequence[int] | Array) -> None:
        self._guess = guess
        self._records: Array = np.asarray(records, np.int64)
        self._seen: Array = np.zeros(len(self._records), bool)
        self._next = 0

    def touched(self, start: int, end: int) -> int | None:
        """A run of pages [start, end) was touched that was not before: the record that it is taken
        for, which is learned, or None. The k-th new run is of the k-th record; when it lies within
        the bounds of another one to come, of that. Of runs that are shorter than half of a record
        nothing is learned: tree pages are."""
        ahead: Array = np.flatnonzero(~self._seen[self._next : self._next + AHEAD]) + self._next
        if not len(ahead) or end - start < self._guess.mean_bytes() / 2:
            return None
        first, last = self._guess.ranges(self._records[ahead])
        inside = np.flatnonzero((first <= start) & (end <= last))
        i = int(ahead[inside[0]] if len(inside) else ahead[0])
        self._seen[i] = True
        while self._next < len(self._seen) and self._seen[self._next]:
            self._next += 1
        self._guess.learn(int(self._records[i]), start, end)
        return int(self._records[i])


# ---- the paper's readers and its counts ---------------------------------------------------------


class Part:
    """One of ``readers`` processes, each of which reads its part of each batch: the ``reader``-th
    of its equal parts (paper 2, figure 6). It learns from its own touches only."""

    def __init__(
        self, guess: PlacementEstimator, reader: int, readers: int, batch_records: int
    ) -> None:
        if batch_records % readers:
            raise ValueError(f"{batch_records} records a batch, in {readers} equal parts")
        self.guess = guess
        self.count = batch_records // readers
        self._batch = batch_records
        #: The first record of its next part.
        self.record = reader * self.count

    def next(self) -> tuple[int, int]:
        """What to warm for its part of the next batch: [start, end), bytes."""
        return self.guess.range(self.record, self.count)

    def read(self, start: int, end: int) -> None:
        """It was in [start, end)."""
        self.guess.learn(self.record, start, end, self.count)
        self.record += self._batch


def stretch(pages: Array, gap_pages: int = 16) -> tuple[int, int]:
    """Where most of these touched pages (ascending numbers, one at least) lie: pages [first, end)
    with no more than ``gap_pages`` between two of them. Tree pages lie elsewhere, and now and then
    a value in pages that were used again."""
    begins = np.flatnonzero(np.append(True, np.diff(pages) > gap_pages + 1))
    counts: Array = np.diff(np.append(begins, len(pages)))
    most = int(np.argmax(counts))
    return int(pages[begins[most]]), int(pages[begins[most] + counts[most] - 1]) + 1


class Count(NamedTuple):
    """Pages of one iteration (paper 2, section VI-D). ``missed``: needed and not warmed before;
    ``redundant``: warmed and not needed."""

    needed: int
    warmed: int
    missed: int
    redundant: int


def count(warmed: Sequence[tuple[int, int]], touched: Sequence[tuple[int, int]]) -> Count:
    """Of half-open page ranges in any order, which may overlap."""
    warm, needed = (
        union(*np.array(ranges, np.int64).reshape(-1, 2).T) for ranges in (warmed, touched)
    )
    return Count(
        total(needed), total(warm), total(subtract(needed, warm)), total(subtract(warm, needed))
    )
