# SPDX-License-Identifier: Apache-2.0
"""A rank on its way through a sequence of records that was inferred (progress/records.Skipping)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from uffdprefetch.node.files import FileState
from uffdprefetch.node.planned import PlannedReader
from uffdprefetch.plan.order import Order
from uffdprefetch.progress.records import Seen, Skipping, fits

if TYPE_CHECKING:
    from uffdprefetch.formats.index import RecordIndex


class StridedReader(PlannedReader):
    """A rank on its way through ``skipping``, epoch after epoch. ``wrong``: since it is seen not to
    be what is read, why."""

    def __init__(self, file: FileState, rank: int, index: RecordIndex, skipping: Skipping) -> None:
        order, self._members = order_of(index, skipping)
        self.skipping = skipping
        self.wrong: str | None = None
        self.next_ns = 0
        self.begun_ns = 0  # this epoch
        super().__init__(file, rank, _Repeated(order, f"skipping, {skipping}"))

    def saw(self, start: int, end: int, now: int) -> None:
        """See PlannedReader. A guess that fails is no news for the user."""
        epoch = self.epoch
        super().saw(start, end, now)
        if self.epoch > epoch:
            self.begun_ns = now
        self.wrong, self.dropped = self.wrong or self.dropped, None

    def compare(self, seen: Seen, now: int) -> None:
        """With what is mapped. The last record of the sequence there has been read, and those
        before it: checkpoints alone, which are in a few records, would lose a reader that has
        overtaken them. One that reads all records would not touch the order anywhere else."""
        numbers: Any = seen.first + np.flatnonzero(seen.mapped)
        numbers = numbers[self.skipping.has(numbers)]
        if len(numbers):
            forward = self.skipping.direction > 0
            done = self._members <= numbers[-1] if forward else self._members >= numbers[0]
            self.said(int(np.count_nonzero(done)), now)
        if fits(self.skipping, seen) is False:
            self.wrong = "other records are read"

    def describe(self) -> dict[str, Any]:
        """For the summary."""
        return {**super().describe(), "dropped": self.wrong}


class _Repeated:
    """See planned.Source: the same order each epoch."""

    def __init__(self, order: Order, how: str) -> None:
        self._order, self.how = order, how
        self._next = 0  # the first epoch that it has not been given for

    def order(self, epoch: int) -> Order | None:
        if epoch < self._next:
            return None
        self._next = epoch + 1
        return self._order

    def over(self, epoch: int) -> bool:
        return False


def order_of(index: RecordIndex, skipping: Skipping) -> tuple[Order, Any]:
    """(the order of a sequence's records, their numbers), with an LMDB's leaf page before the
    first record of each: on the way to a record its reader touches that too."""
    members = skipping.members(len(index))
    starts, ends = index.extents(members)
    counts = index.extent_counts(members)
    item: Any = np.repeat(np.arange(len(members), dtype=np.int64), counts)
    leaf = index.columns.get("leaf_page")
    if leaf is not None and len(members):
        page_bytes = int(index.facts["page_bytes"])
        leaves: Any = leaf[members].astype(np.int64)
        new = np.flatnonzero(np.append(True, leaves[1:] != leaves[:-1]))
        at = np.searchsorted(item, new)
        starts = np.insert(starts, at, leaves[new] * page_bytes)
        ends = np.insert(ends, at, (leaves[new] + 1) * page_bytes)
        item = np.insert(item, at, new)
    return Order(starts, ends, item, len(members)), members
