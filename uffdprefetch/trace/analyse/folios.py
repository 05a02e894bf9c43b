# SPDX-License-Identifier: Apache-2.0
"""How much a fault really mapped where the page cache holds large folios. Pure.

mm_filemap_map_pages tells of 64 KiB. Since Linux 6.18 (mm/filemap.c, mm/memory.c: finish_fault) a
fault maps the whole folio that its page lies in, up to 2 MiB, and says nothing of it. Readahead
tells how large the folios are that it brings (page_cache_ra_order); of those that were cached
before, only the distance of one fault to the next one tells.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import of_mask
from uffdprefetch.trace.analyse.accesses import AROUND_PAGES, BPF, HUGE_PAGES, Accesses
from uffdprefetch.trace.analyse.pieces import Pieces
from uffdprefetch.trace.file.events import Kind, ReadaheadSite

#: log2 of the pages of a folio that fault-around maps anyway (64 KiB), and of the largest (2 MiB).
SMALL_BITS, HUGE_BITS = 4, 9
#: Share of large folios with the next fault, too, above which the kernel does not map them whole.
BROKEN = 0.1
#: Shares of faults that indicate large folios where no event does: faults in successive 64 KiB, and
#: faults at successive aligned offsets.
JOINED, OFTEN = 0.2, 0.02
#: Guesses in a row that are no accident.
IN_A_ROW = 4
UNKNOWN = -1


class Folios:
    """The sizes of one file's folios, as far as they are known."""

    def __init__(self, events: Array, page_bytes: int, pages: int) -> None:
        """``events`` of the file, by time; ``pages``: its size."""
        self._pages = pages
        kind, aux = events["kind"], events["aux"]
        ahead = _decided(events[kind == Kind.READAHEAD])
        filled = events[(kind == Kind.FILL) & (aux > 0)]
        low, high, bits = self._extents(ahead, page_bytes, (ahead["aux"] & 0xFF).astype(np.int64))
        each = filled["length"] // page_bytes // np.maximum(1, filled["aux"])
        size = np.log2(np.maximum(1, each)).astype(np.int64)
        fill_low, fill_high, _ = self._extents(filled, page_bytes, size)
        self._cuts = Pieces([low, high, fill_low, fill_high])
        self._bits: Array = np.full(len(self._cuts), UNKNOWN, np.int64)
        # of what a decision brought, where it began and ended: a folio lies within
        self._from: Array = np.zeros(len(self._cuts), np.int64)
        self._upto: Array = np.full(len(self._cuts), pages, np.int64)
        # the decision that brought a page is the first one that names it: it is written last
        for start, end, found in ((fill_low, fill_high, size), (low, high, bits)):
            for owner, piece in self._cuts.pairs(start[::-1], end[::-1]):
                # what was not filled was there before, in folios of any size
                decided = found is bits
                known = (self._bits[piece] != UNKNOWN) if decided else slice(None)
                self._bits[piece[known]] = found[::-1][owner[known]]
                if decided:
                    self._from[piece[known]] = low[::-1][owner[known]]
                    self._upto[piece[known]] = high[::-1][owner[known]]
        moved = events[np.isin(kind, (Kind.FILL, Kind.EVICT)) & (aux > 0)]
        around = events["length"][kind == Kind.AROUND]
        self.large = bool(
            (bits > SMALL_BITS).any()
            or (moved["length"] // np.maximum(1, moved["aux"]) >= 2 * page_bytes).any()
            or (len(around) and int(around.max()) >= HUGE_PAGES * page_bytes)
        )

    @staticmethod
    def _extents(events: Array, page_bytes: int, bits: Array) -> tuple[Array, Array, Array]:
        low: Array = events["offset"].astype(np.int64) // page_bytes
        high = low + np.maximum(1, events["length"].astype(np.int64) // page_bytes)
        return low, high, bits

    def _known(self, page: Array) -> Array:
        """Of each page's folio the log2 of its pages. Readahead fills what it has decided with the
        largest that are aligned and fit (mm/readahead.c, page_cache_ra_order)."""
        if not len(self._bits):
            return np.full(len(page), UNKNOWN)
        at = self._cuts.holding(page)
        inside = (at >= 0) & (at < len(self._bits))
        at = np.clip(at, 0, len(self._bits) - 1)
        bits = np.minimum(np.where(inside, self._bits[at], UNKNOWN), HUGE_BITS)
        for size in range(HUGE_BITS, 0, -1):
            start = page >> size << size
            fits = (start >= self._from[at]) & (start + (1 << size) <= self._upto[at])
            bits[(bits == size) & ~fits] = size - 1
        return bits

    def widen(self, a: Accesses) -> Accesses:
        """The accesses of one rank, with what their faults really mapped."""
        # what is mapped ends with the file, whatever the size of its last folio
        high = np.maximum(a.page + 1, np.minimum(a.mapped.high, self._pages))
        a = replace(a, mapped=replace(a.mapped, high=high))
        if not len(a):
            return a
        order = np.argsort(a.tid, kind="stable")
        page, tid, mapped = a.page[order], a.tid[order], a.mapped[order]
        low, high = mapped.low, mapped.high
        # where the same thread comes next
        upcoming: Array = np.r_[np.where(tid[1:] == tid[:-1], page[1:], -1), -1]
        faults = (a.sensor == BPF)[order]
        bits = np.where(faults, self._known(page), 0)
        unknown = bits == UNKNOWN
        guess = np.where(unknown, _guess(page, low, high, upcoming), 0)
        near = (upcoming >= high) & (upcoming < high + AROUND_PAGES)
        near |= (upcoming >= 0) & (upcoming < low) & (upcoming >= low - AROUND_PAGES)
        joined = float(near[unknown].mean()) if unknown.any() else 0.0
        shown = joined >= JOINED and (guess > 0).sum() >= OFTEN * len(a)
        bits[unknown] = guess[unknown] if self.large or shown else 0
        bits = np.clip(bits, 0, HUGE_BITS)
        start, end = page >> bits << bits, np.minimum((page >> bits) + 1 << bits, self._pages)
        wide = (end > high) | (start < low)
        again = (upcoming >= high) & (upcoming < end) | (upcoming >= start) & (upcoming < low)
        if again.sum() > BROKEN * wide.sum():
            return a
        low_there: Array = np.empty(len(a), np.int64)
        high_there: Array = np.empty(len(a), np.int64)
        low_there[order], high_there[order] = start, end
        low, high = np.minimum(low_there, a.mapped.low), np.maximum(high_there, a.mapped.high)
        return replace(a, mapped=replace(a.mapped, low=low, high=high))


def _decided(events: Array) -> Array:
    """Of READAHEAD events those that say in which folios a range is brought, by time; page by page,
    so of order 0, where it is UNBOUNDED: also what is left of an ORDER once a page was met that was
    there already."""
    rows = events[np.lexsort((events["time_ns"], events["tid"]))]
    how, offset = rows["aux"] >> 8 & 0xFF, rows["offset"]
    end = offset + rows["length"]
    rest = (how[1:] == ReadaheadSite.UNBOUNDED) & (how[:-1] == ReadaheadSite.ORDER)
    rest &= (rows["tid"][1:] == rows["tid"][:-1]) & (offset[1:] < end[:-1])
    rest &= offset[1:] >= offset[:-1]
    rows["length"][:-1][rest] = (offset[1:] - offset[:-1])[rest]
    rows["aux"][how == ReadaheadSite.UNBOUNDED] = 0
    found: Array = rows[
        ((how == ReadaheadSite.ORDER) | (how == ReadaheadSite.UNBOUNDED)) & (rows["length"] > 0)
    ]
    return found[np.argsort(found["time_ns"], kind="stable")]


def _guess(page: Array, low: Array, high: Array, upcoming: Array) -> Array:
    """The smallest folio that a thread came to at one end and left at the other, where several in a
    row are like that, else 0: what was passed over was perhaps mapped."""
    bits: Array = np.zeros(len(page), np.int64)
    for size in range(HUGE_BITS, SMALL_BITS, -1):
        start = page >> size << size
        end = start + (1 << size)
        upwards = (upcoming >= end) & (upcoming < end + AROUND_PAGES) & (end > high)
        upwards &= page < start + AROUND_PAGES
        downwards = (upcoming >= 0) & (upcoming >= start - AROUND_PAGES) & (upcoming < start)
        downwards &= (start < low) & (page >= end - AROUND_PAGES)
        bits[upwards | downwards] = size
    # one alone is an accident
    hit = bits > 0
    first, end = of_mask(hit)
    length = end - first
    bits[np.flatnonzero(hit)] *= np.repeat(length >= IN_A_ROW, length)
    return bits
