# SPDX-License-Identifier: Apache-2.0
"""An order cut into units, found by their place in it or in the file. Pure, arrays only.

A unit is an extent of the order, or a piece of a long one, that has bytes. It has a number (its
turn) and a plan coordinate: the bytes of all units before it, in whichever file (cursor.Order). 21
bytes a unit beside the order's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import spread
from uffdprefetch.base.units import MAX_BYTES
from uffdprefetch.predict.order.by_place import ByPlace
from uffdprefetch.predict.order.next_use import ENTRIES_MOST, NextUse

if TYPE_CHECKING:
    from uffdprefetch.predict.order.order import Order


#: Longer extents are cut at multiples of this, so that progress within a long item shows.
GRAIN_BYTES = 1 << 20


class OrderExtents:
    """``starts``, ``ends`` (file bytes), ``item``: int64, one element a unit, in reading order;
    ``coordinate``: int64, one more, the last is the order's length in plan bytes. ``places``: the
    units in the order of the file, ``next_use``: by their turns from now on. ``items``: how many
    the order has; ``here_bytes``: of the order in this file."""

    #: Whether it is known by blocks of what one fault maps: a page of one tells that its reader was
    #: there, as no fault elsewhere maps any.
    in_blocks = False

    def __init__(
        self, item: Array, coordinate: Array, places: ByPlace, items: int,
        here_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """``here_bytes``: None where all of it is here."""
        self.starts, self.ends, self.item = places.starts, places.ends, item
        self.coordinate = coordinate
        self.places, self.next_use = places, NextUse(places)
        self.items = items
        self.total_bytes = int(coordinate[-1])
        self.here_bytes = self.total_bytes if here_bytes is None else here_bytes

    @classmethod
    def of(cls, order: Order, file_bytes: int, page_bytes: int) -> OrderExtents:
        """An order's. What lies beyond ``file_bytes`` is left out. Raises ValueError when the
        order's bytes cannot be counted (2^62)."""
        starts, ends, item = order.starts, np.minimum(order.ends, file_bytes), order.item
        before = order.before
        some = ends > starts
        if not some.all():
            starts, ends, item = starts[some], ends[some], item[some]
            before = None if before is None else before[some]
        total = float((ends - starts).sum(dtype=np.float64))
        if max(total, float(order.whole_bytes)) >= MAX_BYTES / 2:
            raise ValueError(f"an order of {total:.3g} bytes: at most 2^62 can be counted")
        whole_starts = starts
        starts, ends, owner = _cut(starts, ends, grain_bytes(total))
        coordinate: Array = np.zeros(len(starts) + 1, np.int64)
        if before is None:
            np.cumsum(ends - starts, out=coordinate[1:])
        else:
            coordinate[:-1] = (
                before if owner is None else before[owner] + (starts - whole_starts[owner])
            )
            coordinate[-1] = order.whole_bytes
        item = item if owner is None else item[owner]
        places = ByPlace.of(starts, ends, page_bytes)
        return cls(item, coordinate, places, order.items, int(total))

    def __len__(self) -> int:
        return len(self.starts)

    def at(self, plan_bytes: int) -> int:
        """The first unit whose coordinate is ``plan_bytes`` or more."""
        return int(np.searchsorted(self.coordinate[:-1], np.int64(plan_bytes), "left"))

    def behind(self, unit: int) -> int:
        """The plan coordinate at which the unit before this one ends."""
        if not unit:
            return 0
        length = int(self.ends[unit - 1]) - int(self.starts[unit - 1])
        return int(self.coordinate[unit - 1]) + length

    def where(self, items: int) -> tuple[int, int]:
        """(the first unit of a later item, the plan coordinate) where so many items are behind.
        Between two units of this file the coordinate goes by the items that are in others."""
        unit = int(self.item.searchsorted(items))
        low, high = self.behind(unit), int(self.coordinate[unit])
        first = int(self.item[unit - 1]) + 1 if unit else 0
        after = int(self.item[unit]) if unit < len(self) else self.items
        share = (items - first) / (after - first) if after > first else 1.0
        return unit, low + int((high - low) * share)

    def items_before(self, unit: int) -> int:
        """How many items have all of their bytes in this file before a unit."""
        items = self.item[: unit + 1]
        return int(np.count_nonzero(items[1:] != items[:-1])) + (0 < unit == len(self))

    def bytes_of(self, first: int, end: int) -> int:
        """Of the units [first, end)."""
        return int((self.ends[first:end] - self.starts[first:end]).sum())

    def between(self, hits: Array, start: int, end: int, least_bytes: int) -> list[tuple[int, int]]:
        """The ranges of [start, end) of the file that are in none of these units, all that overlap
        it, and as long as ``least_bytes``."""
        by_place = hits[self.starts[hits].argsort()]
        ends: Array = np.maximum.accumulate(self.ends[by_place])
        lows: Array = np.concatenate(([start], ends))
        highs: Array = np.concatenate((self.starts[by_place], [end]))
        found = (highs - lows >= least_bytes).nonzero()[0]
        return [(int(lows[i]), int(highs[i])) for i in found]

    def pages(self, first: int, end: int) -> tuple[Array, Array]:
        """(first pages, end pages) of the units [first, end), int64."""
        page = self.places.page_bytes
        return self.starts[first:end] // page, -(-self.ends[first:end] // page)


def grain_bytes(total_bytes: float) -> int:
    """At what of an order of so much its extents are cut."""
    grain = GRAIN_BYTES
    while total_bytes / grain > ENTRIES_MOST:
        grain *= 2
    return grain


def _cut(starts: Array, ends: Array, grain: int) -> tuple[Array, Array, Array | None]:
    """What is longer than the grain in pieces that end at multiples of it; which extent each is of,
    None: as they were."""
    if not len(starts) or int((ends - starts).max()) <= grain:
        return starts, ends, None
    counts: Array = np.where(ends - starts > grain, (ends - 1) // grain - starts // grain + 1, 1)
    owner, inner = spread(counts)
    edges = (starts[owner] // grain + inner) * grain
    whole = counts[owner] == 1
    low = np.where(whole, starts[owner], np.maximum(starts[owner], edges))
    high = np.where(whole, ends[owner], np.minimum(ends[owner], edges + grain))
    return low, high, owner
