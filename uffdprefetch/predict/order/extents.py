# SPDX-License-Identifier: Apache-2.0
"""An order cut into units, found by their place in it or in the file. Pure, arrays only.

A unit is an extent of the order, or a piece of a long one, that has bytes. It has a number (its
turn) and a plan coordinate: the bytes of all units before it, in whichever file (cursor.Order). 21
bytes a unit beside the order's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import overlapping, spread
from uffdprefetch.base.units import MAX_BYTES

if TYPE_CHECKING:
    from uffdprefetch.predict.order.order import Order


#: Longer extents are cut at multiples of this, so that progress within a long item shows.
GRAIN_BYTES = 1 << 20
#: Entries of one array, 32 MiB: pieces that long extents are cut into in all (the grain grows),
#: (block, unit) pairs that next_use() takes at a time, and blocks of a file for which it remembers
#: its answers.
ENTRIES_MOST = 1 << 22

_NONE: Array = np.zeros(0, np.int64)


class OrderExtents:
    """``starts``, ``ends`` (file bytes), ``item``: int64, one element a unit, in reading order;
    ``coordinate``: int64, one more, the last is the order's length in plan bytes. ``by_place``:
    the units in the order of the file; ``first_page``, ``end_page`` of these, the latter of all up
    to it. ``items``: how many the order has; ``nested``: whether extents lie within others;
    ``here_bytes``: of the order in this file."""

    #: Whether it is known by blocks of what one fault maps: a page of one tells that its reader was
    #: there, as no fault elsewhere maps any.
    in_blocks = False

    def __init__(
        self,
        arrays: dict[str, Array],
        items: int,
        page_bytes: int,
        nested: bool,
        here_bytes: int | None = None,
    ) -> None:
        """Of what of() has made of an order. ``here_bytes``: None where all of it is here."""
        self.starts, self.ends, self.item = arrays["starts"], arrays["ends"], arrays["item"]
        self.coordinate = arrays["coordinate"]
        self._by_place, self._first_page = arrays["by_place"], arrays["first_page"]
        self._end_page = arrays["end_page"]
        self.items, self.page_bytes, self.nested = items, page_bytes, nested
        self.total_bytes = int(self.coordinate[-1])
        self.here_bytes = self.total_bytes if here_bytes is None else here_bytes
        self._type: Any = self._end_page.dtype.type
        self._pages = int(self._end_page[-1]) + 1 if len(self) else 2
        self._next: Array | None = None
        self._next_block_bytes = 0
        self._next_from = 0

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
        starts, ends, owner = _cut(starts, ends, _grain_bytes(total))
        coordinate: Array = np.zeros(len(starts) + 1, np.int64)
        if before is None:
            np.cumsum(ends - starts, out=coordinate[1:])
        else:
            coordinate[:-1] = (
                before if owner is None else before[owner] + (starts - whole_starts[owner])
            )
            coordinate[-1] = order.whole_bytes
        item = item if owner is None else item[owner]
        most = int(ends.max(initial=0)) // page_bytes + 2
        page_type: Any = np.uint32 if most < 1 << 32 else np.int64
        by_place, first_page = _sorted(starts // page_bytes, page_type)
        last: Array = (-(-ends // page_bytes)).astype(page_type)
        # of all up to it in the file: ascending, so that what overlaps a place can be searched for
        last = last[by_place]
        end_page = np.maximum.accumulate(last)
        arrays = {
            "starts": starts, "ends": ends, "item": item, "coordinate": coordinate,
            "by_place": by_place, "first_page": first_page, "end_page": end_page,
        }  # fmt: skip
        nested = bool((end_page != last).any())
        return cls(arrays, order.items, page_bytes, nested, int(total))

    def arrays(self) -> dict[str, Array]:
        """What it is made of."""
        return {
            "starts": self.starts, "ends": self.ends, "item": self.item,
            "coordinate": self.coordinate, "by_place": self._by_place,
            "first_page": self._first_page, "end_page": self._end_page,
        }  # fmt: skip

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

    def overlapping(self, start: int, end: int) -> Array:
        """The units with a byte in [start, end) of the file, ascending."""
        page = self.page_bytes
        first = self._type(min(max(0, start // page), self._pages))
        last = self._type(min(max(0, -(-end // page)), self._pages))
        low = int(np.searchsorted(self._end_page, first, "right"))
        high = int(np.searchsorted(self._first_page, last, "left"))
        if low >= high:
            return _NONE
        units: Array = self._by_place[low:high].astype(np.int64)
        units = units[(self.starts[units] < end) & (self.ends[units] > start)]
        units.sort()
        return units

    def overlapping_each(self, starts: Array, ends: Array) -> tuple[Array, Array]:
        """(which range, unit) for each unit with a byte in each of these ranges of the file,
        ascending by both."""
        page, most = self.page_bytes, self._pages
        first: Array = (starts // page).clip(0, most).astype(self._type)
        last: Array = (-(-ends // page)).clip(0, most).astype(self._type)
        low, high = overlapping((self._first_page, self._end_page), first, last)
        owner, inner = spread(np.maximum(high - low, 0))
        units: Array = self._by_place[low[owner] + inner].astype(np.int64)
        inside = (self.starts[units] < ends[owner]) & (self.ends[units] > starts[owner])
        owner, units = owner[inside], units[inside]
        order = np.lexsort((units, owner))
        return owner[order], units[order]

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
        page = self.page_bytes
        return self.starts[first:end] // page, -(-self.ends[first:end] // page)

    def has(self, blocks: Array, block_bytes: int) -> Array:
        """For each block of the file whether a unit has a byte in it; bool. To the page."""
        page = self.page_bytes
        begin: Array = np.asarray(blocks, np.int64) * block_bytes
        upto = np.minimum(-(-(begin + block_bytes) // page), self._pages)
        first = np.minimum(begin // page, self._pages)
        pages = first.astype(self._type), upto.astype(self._type)
        low, high = overlapping((self._first_page, self._end_page), *pages)
        return high > low

    # ---- Belady ---------------------------------------------------------------------------------

    def next_use(self, blocks: Array, block_bytes: int, first: int) -> Array:
        """For each block of the file the first unit from ``first`` on that has a byte in it, or
        len(self). ``first`` never goes back: an answer is remembered until it has passed. To the
        page: a block that is not made of whole ones counts as those that it is in."""
        blocks = np.asarray(blocks, np.int64)
        self._next_from = first = max(first, self._next_from)
        most = self._pages * self.page_bytes // block_bytes + 1
        answer: Array = np.full(len(blocks), len(self), np.int64)
        inside = np.flatnonzero((blocks >= 0) & (blocks < most))
        if most > ENTRIES_MOST:
            answer[inside] = self._search(blocks[inside], block_bytes, first)
            return answer
        if self._next is None or self._next_block_bytes != block_bytes:
            # zeros: "not asked for yet", and no memory until then
            self._next = np.zeros(most, np.uint32 if len(self) < (1 << 32) - 2 else np.int64)
            self._next_block_bytes = block_bytes
        known = self._next[blocks[inside]].astype(np.int64) - 1
        stale = np.flatnonzero(known < first)
        known[stale] = self._search(blocks[inside[stale]], block_bytes, first)
        self._next[blocks[inside[stale]]] = known[stale] + 1
        answer[inside] = known
        return answer

    def _search(self, blocks: Array, block_bytes: int, first: int) -> Array:
        """The same, from nothing."""
        begin: Array = blocks * block_bytes
        page = self.page_bytes
        upto = np.minimum(-(-(begin + block_bytes) // page), self._pages)
        pages = (begin // page).astype(self._type), upto.astype(self._type)
        low, high = overlapping((self._first_page, self._end_page), *pages)
        counts = np.maximum(high - low, 0)
        answer: Array = np.full(len(blocks), len(self), np.int64)
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
        units: Array = self._by_place[np.arange(len(steps)) + steps].astype(np.int64)
        units[units < first] = len(self)
        if self.nested:
            before = self.ends[np.minimum(units, len(self) - 1)] <= np.repeat(begin, counts)
            units[before] = len(self)
        earliest: Array = np.minimum.reduceat(units, offsets)
        return earliest


def _grain_bytes(total_bytes: float) -> int:
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


def _sorted(pages: Array, page_type: Any) -> tuple[Array, Array]:
    """(numbers in the order of their pages, those pages); of one page the lower number first."""
    count = len(pages)
    number_type: Any = np.uint32 if count < 1 << 32 else np.int64
    bits = max(1, (count - 1).bit_length()) if count else 1
    if int(pages.max(initial=0)).bit_length() + bits > 63:
        order = np.argsort(pages, kind="stable")
        return order.astype(number_type), pages[order].astype(page_type)
    keys = (pages << bits) | np.arange(count)  # sorting values is faster than sorting an index
    keys.sort()
    return (keys & ((1 << bits) - 1)).astype(number_type), (keys >> bits).astype(page_type)
