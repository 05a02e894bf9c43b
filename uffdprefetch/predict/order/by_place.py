# SPDX-License-Identifier: Apache-2.0
"""The units of an order in the order of the file: which of them overlap a place. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import overlapping, spread

_NONE: Array = np.zeros(0, np.int64)


class ByPlace:
    """``starts``, ``ends``: the units' file bytes, in reading order. ``by_place``: the units in the
    order of the file; ``first_page``, ``end_page`` of these, the latter of all up to it;
    ``nested``: whether extents lie within others."""

    def __init__(
        self, starts: Array, ends: Array, by_place: Array, first_page: Array, end_page: Array, *,
        page_bytes: int, nested: bool,
    ) -> None:  # fmt: skip
        self.starts, self.ends = starts, ends
        self.by_place, self.first_page, self.end_page = by_place, first_page, end_page
        self.page_bytes, self.nested = page_bytes, nested
        self._type: Any = end_page.dtype.type
        #: Of the file, as far as the order goes: one more than the last unit ends on.
        self.pages = int(end_page[-1]) + 1 if len(starts) else 2

    @classmethod
    def of(cls, starts: Array, ends: Array, page_bytes: int) -> ByPlace:
        """Sort units by their places."""
        most = int(ends.max(initial=0)) // page_bytes + 2
        page_type: Any = np.uint32 if most < 1 << 32 else np.int64
        by_place, first_page = _sorted(starts // page_bytes, page_type)
        last: Array = (-(-ends // page_bytes)).astype(page_type)
        # of all up to it in the file: ascending, so that what overlaps a place can be searched for
        last = last[by_place]
        end_page = np.maximum.accumulate(last)
        nested = bool((end_page != last).any())
        return cls(
            starts, ends, by_place, first_page, end_page, page_bytes=page_bytes, nested=nested
        )

    def within(self, start: int, end: int) -> Array:
        """The units with a byte in [start, end) of the file, ascending."""
        page = self.page_bytes
        first = self._type(min(max(0, start // page), self.pages))
        last = self._type(min(max(0, -(-end // page)), self.pages))
        low = int(np.searchsorted(self.end_page, first, "right"))
        high = int(np.searchsorted(self.first_page, last, "left"))
        if low >= high:
            return _NONE
        units: Array = self.by_place[low:high].astype(np.int64)
        units = units[(self.starts[units] < end) & (self.ends[units] > start)]
        units.sort()
        return units

    def within_each(self, starts: Array, ends: Array) -> tuple[Array, Array]:
        """(which range, unit) for each unit with a byte in each of these ranges of the file,
        ascending by both."""
        page, most = self.page_bytes, self.pages
        first: Array = (starts // page).clip(0, most).astype(self._type)
        last: Array = (-(-ends // page)).clip(0, most).astype(self._type)
        low, high = overlapping((self.first_page, self.end_page), first, last)
        owner, inner = spread(np.maximum(high - low, 0))
        units: Array = self.by_place[low[owner] + inner].astype(np.int64)
        inside = (self.starts[units] < ends[owner]) & (self.ends[units] > starts[owner])
        owner, units = owner[inside], units[inside]
        order = np.lexsort((units, owner))
        return owner[order], units[order]

    def candidates(self, blocks: Array, block_bytes: int) -> tuple[Array, Array]:
        """For each block of the file the places [low, high) among by_place of the units that may
        have a byte in it: those that have one in its pages."""
        page = self.page_bytes
        begin: Array = np.asarray(blocks, np.int64) * block_bytes
        upto = np.minimum(-(-(begin + block_bytes) // page), self.pages)
        first = np.minimum(begin // page, self.pages)
        pages = first.astype(self._type), upto.astype(self._type)
        return overlapping((self.first_page, self.end_page), *pages)

    def has(self, blocks: Array, block_bytes: int) -> Array:
        """For each block of the file whether a unit has a byte in it; bool. To the page."""
        low, high = self.candidates(blocks, block_bytes)
        return high > low


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
