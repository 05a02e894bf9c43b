# SPDX-License-Identifier: Apache-2.0
"""How far a rank has come in its order, as it is told: exact. Pure; OrderCursor is made of it.

What is seen of a rank instead of being told is predict/order/seen.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from uffdprefetch.predict.streams import Rate

if TYPE_CHECKING:  # it brings numpy, which a service without a plan spares
    from uffdprefetch.predict.order.extents import OrderExtents


class OrderProgress:
    """The position in an order, which never goes back."""

    def __init__(self, units: OrderExtents) -> None:
        self._units = units
        self.items = units.items
        self._at = 0  # unit
        self._place = 0  # plan coordinate of the reader
        self._rate = Rate()

    @property
    def position(self) -> int:
        """Items known to have been read: all before this one."""
        units = self._units
        return self.items if self._at == len(units) else int(units.item[self._at])

    def has_begun(self, least: int) -> bool:
        """Whether so many items that have bytes are begun before the position; of an order of
        fewer, whether several of their pieces are behind it."""
        items, unit = self._units.item, 0
        for _ in range(least):
            if unit == len(items):
                return 0 < min(2, unit) <= self._at
            last = unit
            unit = int(items.searchsorted(items[unit], "right"))
        return last < self._at

    @property
    def position_bytes(self) -> int:
        """The plan coordinate of it; it moves within a long item too."""
        return self._place

    @property
    def total_bytes(self) -> int:
        """The plan coordinate of the order's end."""
        return self._units.total_bytes

    @property
    def items_here(self) -> tuple[int, int]:
        """(read, all) items of the order in this file."""
        units = self._units
        if units.here_bytes == units.total_bytes:
            return self.position, self.items
        return units.items_before(self._at), units.items_before(len(units))

    @property
    def here_bytes(self) -> int:
        """Of the order, all that is in this file."""
        return self._units.here_bytes

    @property
    def rate_bytes_per_second(self) -> float:
        """Of the plan coordinate."""
        return self._rate.bytes_per_second

    def reach_bytes(self, items: int) -> int:
        """How much of the plan lies between the position and a place so many items further on."""
        _, place = self._units.where(min(self.position + items, self.items))
        return max(0, place - self._place)

    def behind(self) -> list[tuple[int, int]]:
        """The ranges of the file, [start, end), that lie before the position."""
        from uffdprefetch.base.ranges import union

        starts, ends = union(self._units.starts[: self._at], self._units.ends[: self._at])
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def pace_of(self, before: OrderProgress) -> None:
        """The reader goes on as fast as in this order, which was before, until it is measured."""
        self._rate.bytes_per_second = before.rate_bytes_per_second

    def said(self, items: int, now_ns: int) -> None:
        """So many items of the order have been read, somebody has announced. It never goes back:
        when touches have shown more, that stays."""
        at, place = self._units.where(min(items, self.items))
        if at > self._at:
            self._go(at, now_ns)
        if place > self._place:  # in another file
            self._stands_at(place, now_ns)

    def _go(self, at: int, now_ns: int) -> None:
        """The reader is at this unit."""
        self._at = at
        self._stands_at(self._units.behind(at), now_ns)

    def _stands_at(self, place: int, now_ns: int) -> None:
        """So much of the plan is behind the reader; never back."""
        gone, self._place = max(0, place - self._place), max(self._place, place)
        self._rate.note(gone, now_ns)
