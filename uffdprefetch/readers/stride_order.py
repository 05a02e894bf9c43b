# SPDX-License-Identifier: Apache-2.0
"""A rank on its way through a sequence of records that was inferred (predict/stride.Skipping)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.orders.stated import of_records
from uffdprefetch.predict.order.order import Order
from uffdprefetch.predict.stride import Seen, Skipping, fits
from uffdprefetch.readers.known_order import PlannedReader
from uffdprefetch.state.files import FileState

if TYPE_CHECKING:
    from uffdprefetch.formats.index import RecordIndex


class StridedReader(PlannedReader):
    """A rank on its way through ``skipping``, epoch after epoch. ``wrong``: since it is seen not to
    be what is read, why."""

    inferred = True

    def __init__(
        self, file: FileState, rank: int, index: RecordIndex, skipping: Skipping,
        clock: Clock = CLOCK,
    ) -> None:  # fmt: skip
        self._members = skipping.members(len(index))
        order = of_records("", self._members, index)
        self.skipping = skipping
        self.wrong: str | None = None
        self.next_ns = 0
        self.begun_ns = 0  # this epoch
        super().__init__(file, rank, _Repeated(order, f"skipping, {skipping}"), clock)

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
    """See predict/order/epochs.Source: the same order each epoch."""

    exact = False

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
