# SPDX-License-Identifier: Apache-2.0
"""Readers of a file without an index ([LMDBIO-DM]), and their cost: for bench/lab/speculate.py, and
for the tests of orders/placement_estimator.py, which the service uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import subtract, total, union
from uffdprefetch.orders.placement_estimator import PlacementEstimator

#: Coming records that touched() considers: DataLoader workers take turns by batches.
AHEAD = 256


class Followed:
    """An order in record numbers that is read, and the offsets learned from its touches."""

    def __init__(self, guess: PlacementEstimator, records: Sequence[int] | Array) -> None:
        self._guess = guess
        self._records: Array = np.asarray(records, np.int64)
        self._seen: Array = np.zeros(len(self._records), bool)
        self._next = 0

    def touched(self, start: int, end: int) -> int | None:
        """Pages [start, end) were touched for the first time: returns the record that they are
        attributed to and learned for, or None. The k-th new run is the k-th record's, or that of
        another coming record within whose bounds it is. Runs shorter than half a record are ignored
        (tree pages)."""
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


# ---- the readers and counts of [LMDBIO-DM] ------------------------------------------------------


class Part:
    """One of ``readers`` processes, each of which reads its part of each batch: the ``reader``-th
    of its equal parts ([LMDBIO-DM] figure 6). It learns from its own touches only."""

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
    """The largest cluster [first, end) of these touched pages (ascending, at least one), with at
    most ``gap_pages`` between two of them. Tree pages and values in reused pages are elsewhere."""
    begins = np.flatnonzero(np.append(True, np.diff(pages) > gap_pages + 1))
    counts: Array = np.diff(np.append(begins, len(pages)))
    most = int(np.argmax(counts))
    return int(pages[begins[most]]), int(pages[begins[most] + counts[most] - 1]) + 1


class Count(NamedTuple):
    """Pages of one iteration ([LMDBIO-DM] section VI-D). ``missed``: needed and not warmed before;
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
