# SPDX-License-Identifier: Apache-2.0
"""Whether a plan is right, by what is touched: kept by predict/order/seen.SeenCursor. Pure.

A wrong plan is worse than none: it warms what nobody reads. A right one must never be dropped, so
out-of-order reading, records that show no touch and an epoch that stops early count for nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.units import MIB
from uffdprefetch.predict.order.guard import READ_BYTES
from uffdprefetch.predict.sequences import JUDGED, WAY, longest_increasing_subsequence
from uffdprefetch.predict.storage import BLOCK_BYTES

#: Of what is in no item READ_BYTES are too much, or this part of the order, ...
OUTSIDE_PART = 0.05
#: ... where hardly an item was ever touched: fewer than this.
MATCHED = 8
#: Share of what page-table scans find that is not due soon, from which on the order is wrong.
#: (Of a right order's, what a fault maps beside its record; of another order of the same records
#: three quarters.)
STRAY_PART = 0.4


class OrderValidator:
    """``wrong``: None, or since it was seen why, in one line."""

    def __init__(self, items: int, total_bytes: int) -> None:
        self._items, self._total_bytes = items, total_bytes
        self.wrong: str | None = None
        self._votes: deque[bool] = deque(maxlen=JUDGED)
        self._judged: Array = np.full(JUDGED, -WAY - 1, np.int64)
        self._count = 0
        self._latest = -1
        self._elsewhere = 0
        self._right = 0
        self._outside: set[int] = set()  # blocks
        self._looked_bytes = self._stray_bytes = 0

    def lately(self) -> list[int]:
        """The units that were judged last, in order of time."""
        units: list[int] = np.roll(self._judged, -(self._count % JUDGED)).tolist()
        return units[-self._count :] if self._count < JUDGED else units

    def follows(self, hits: Array) -> bool:
        """Whether one of these units comes soon after one that was judged lately: a worker goes on
        in its batch."""
        return self._after(hits) <= WAY

    def _after(self, hits: Array) -> int:
        """How many units after one judged lately the nearest of ``hits`` (ascending) is."""
        found: Any = hits.searchsorted(self._judged)
        found[found == len(hits)] = -1
        steps = hits[found] - self._judged
        return int(steps.min(initial=WAY + 1, where=steps >= 0))

    def outside(self, start: int, end: int, read: int) -> None:
        """A touch of what is in no item, when so many units are known to have been read. A B-tree's
        pages are, and what a job reads beside its epochs; but when nothing else is touched, the
        order is none of this reader's."""
        if max(read, self._right) >= MATCHED or self.wrong is not None:
            return
        self._outside.update(range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)))
        seen_bytes = len(self._outside) * BLOCK_BYTES
        if seen_bytes > max(READ_BYTES, OUTSIDE_PART * self._total_bytes):
            self._is_wrong(
                f"{seen_bytes / MIB:.0f} MiB were read, and {self._right} of its"
                f" {self._items:,} items"
            )

    def looked(self, found_bytes: int, stray_bytes: int, position: int) -> None:
        """A look has found so much mapped that was not before, so much of it not due soon."""
        self._looked_bytes += found_bytes
        self._stray_bytes += stray_bytes
        if self._stray_bytes <= READ_BYTES:
            return
        if self._stray_bytes > STRAY_PART * self._looked_bytes:
            self._is_wrong(
                f"of {self._looked_bytes / MIB:.0f} MiB that were read"
                f" {self._stray_bytes / MIB:.0f} were not to come near item {position:,}"
                f" of {self._items:,}"
            )
        self._looked_bytes = self._stray_bytes = 0

    def vote(self, hits: Array, unit: int, expected: bool, near: bool, position: int) -> bool:
        """A touch of the units ``hits``, taken for ``unit``; answers whether the readers have been
        elsewhere for so long that the position should go there. One vote a record: further touches
        of the same one count for nothing."""
        if near or not expected:
            self._elsewhere = 0
        self._right += expected
        if self._right == MATCHED:
            self._outside.clear()
        if unit == self._latest or self._after(hits) == 0:
            return False
        self._latest = unit
        self._judged[self._count % JUDGED] = unit
        self._count += 1
        self._votes.append(expected)
        self._elsewhere += not near
        right = sum(self._votes)
        if len(self._votes) == JUDGED and 2 * right < JUDGED:
            if (
                len(longest_increasing_subsequence(self.lately())) >= WAY
            ):  # in the order, but far from the position
                self._votes.clear()
                return True
            self._is_wrong(
                f"{right} of the last {JUDGED} records touched were to come near item"
                f" {position:,} of {self._items:,}"
            )
        return self._elsewhere >= JUDGED

    def _is_wrong(self, why: str) -> None:
        if self.wrong is None:
            self.wrong = why
