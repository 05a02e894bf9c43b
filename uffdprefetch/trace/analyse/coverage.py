# SPDX-License-Identifier: Apache-2.0
"""What of a file was filled, mapped, used; in what order. Pure.

Page numbers are int64, times int64 ns.
"""

from __future__ import annotations

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.analyse.accesses import MOMENT_NS, Accesses, distinct
from uffdprefetch.trace.analyse.pieces import Pieces

NEVER = np.iinfo(np.int64).max
#: log2 of the pages (2 MiB) around a page cached before the recording of which any may have been.
NEIGHBOURS_BITS = 9


class Coverage:
    """One file on one node. By piece: ``first_fill_ns``, when it came into the cache, NEVER if not
    while we looked; ``last_use_ns``, when a rank mapped or read it last."""

    def __init__(
        self,
        accesses: list[Accesses],
        filled: tuple[Array, Array, Array],
        edges: list[Array] | None = None,
    ) -> None:
        """``accesses`` by reader; ``filled``: start, end and time of each fill, by time;
        ``edges``: other pages at which the file is to be cut."""
        start, end, time_ns = filled
        columns = [start, end, *(edges or [])]
        for a in accesses:
            columns += [a.page, a.page + 1, a.mapped.low, a.sure, a.mapped.high]
        self.pieces = Pieces(columns)
        n = len(self.pieces)
        self.last_use_ns: Array = np.full(n, -1, np.int64)
        self.first_fill_ns: Array = np.full(n, NEVER, np.int64)
        # the earliest is written last
        for owner, piece in self.pieces.pairs(start[::-1], end[::-1]):
            self.first_fill_ns[piece] = time_ns[::-1][owner]
        self._was_cached = self._cached_before(accesses)

    def _cached_before(self, accesses: list[Accesses]) -> Array:
        """Neighbourhoods of pages that were found in the cache without having been filled: there,
        and only there, a page that nobody filled may have been mapped along."""
        found = []
        for a in accesses:
            seen = a.present & (self.first_fill_ns[self.pieces.at(a.page)] > a.mapped.at_ns)
            found.append(distinct(a.page[seen] >> NEIGHBOURS_BITS))
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def map(self, a: Accesses) -> tuple[Array, Array, Array]:
        """Take the accesses of a reader (or of an epoch of one) in, in the order of time.

        Returns (mapped, low, high): the pieces that they mapped or read, and by access the ends of
        what was mapped around its page without a gap.
        """
        mine: Array = np.zeros(len(self.pieces), bool)
        low, high = a.mapped.low.copy(), a.mapped.high.copy()
        piece_of = self.pieces.at(a.page)
        warm = np.isin(a.page >> NEIGHBOURS_BITS, self._was_cached)
        cut = self.pieces.cut
        for owner, piece in self.pieces.pairs(a.mapped.low, a.mapped.high):
            fill = self.first_fill_ns[piece]
            at = a.mapped.at_ns[owner]
            cached = (fill <= at) | ((fill == NEVER) & warm[owner]) | (piece == piece_of[owner])
            mine[piece[cached]] = True
            # the last written wins: the largest piece below the page, the smallest above it
            gap = np.flatnonzero(~cached & (piece < piece_of[owner]))
            low[owner[gap]] = cut[piece[gap] + 1]
            gap = np.flatnonzero(~cached & (piece > piece_of[owner]))[::-1]
            high[owner[gap]] = cut[piece[gap]]
            where, when = piece[cached], at[cached]
            self.last_use_ns[where] = np.maximum(self.last_use_ns[where], when)
        # a page that was waited for was used when it was there
        used_ns = np.where(a.present, a.until_ns, a.until_ns + MOMENT_NS)
        order = np.argsort(used_ns, kind="stable")
        where, when = piece_of[order], used_ns[order]
        self.last_use_ns[where] = np.maximum(self.last_use_ns[where], when)
        return mine, low, high

    @property
    def filled(self) -> Array:
        """The pieces that came into the cache while we looked."""
        return self.first_fill_ns != NEVER

    @property
    def useless(self) -> Array:
        """The pieces that were filled and that no rank had mapped or read since."""
        return self.filled & (self.last_use_ns < self.first_fill_ns)

    def used_since(self, start: Array, end: Array, time_ns: Array) -> int:
        """Pages of the ranges [start, end) that were in use after the time of each."""
        return sum(
            int(self.pieces.sizes[piece[self.last_use_ns[piece] >= time_ns[owner]]].sum())
            for owner, piece in self.pieces.pairs(start, end)
        )
