# SPDX-License-Identifier: Apache-2.0
"""A rank on its way through a known order: what to warm next, and by when. Pure.

predict/order/progress.py knows how far the rank has come as far as that is told,
predict/order/seen.py by what is touched, and whether the plan is right. See predict/order/order.py
for the plan coordinate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from uffdprefetch.predict import window
from uffdprefetch.predict.order.order import Order
from uffdprefetch.predict.order.progress import OrderProgress
from uffdprefetch.predict.storage import Storage

if TYPE_CHECKING:
    import numpy as np

    from uffdprefetch.predict.order.extents import OrderExtents

    Array = np.ndarray[Any, Any]


class OrderRange(NamedTuple):
    """A range of the file to warm, in whole pages but for the file's end, and the plan coordinate
    at which it is first needed."""

    start: int
    end: int
    need_bytes: int


class OrderCursor(OrderProgress):
    """One rank on its way through one Order: what is handed out up to unit ``_sent``.

    Raises ValueError for an order of more than 2^62 bytes; its OrderExtents may be given instead,
    which are of a file and a page size already.
    """

    #: Whether the order need not be seen to be right.
    exact = True

    def __init__(
        self,
        order: Order | OrderExtents,
        file_bytes: int,
        page_bytes: int = 4096,
        merge_gap_bytes: int = 64 << 10,
        slice_bytes: int = 4 << 20,
    ) -> None:
        from uffdprefetch.predict.order.extents import OrderExtents
        from uffdprefetch.predict.order.pieces import OutstandingPages

        units = (
            order
            if isinstance(order, OrderExtents)
            else OrderExtents.of(order, file_bytes, page_bytes)
        )
        super().__init__(units)
        self._file_bytes, self._page_bytes = file_bytes, units.places.page_bytes
        self._gap_pages, self._slice_bytes = merge_gap_bytes // self._page_bytes, slice_bytes
        self._held = OutstandingPages()
        self._sent = self._lookahead_bytes = 0
        self._ratio = 0.0
        self._pages_sent = 0
        self._units_sent_bytes = 0

    def _go(self, at: int, now_ns: int) -> None:
        self._sent = max(self._sent, at)
        super()._go(at, now_ns)

    @property
    def wrong(self) -> str | None:
        """Once the plan is known to be wrong: why, in one line."""
        return None

    @property
    def sent_bytes(self) -> int:
        """The plan coordinate up to which pieces have been handed out."""
        return int(self._units.coordinate[self._sent])

    @property
    def amplification(self) -> float:
        """Bytes of pages handed out for a byte of the order; of its first units before that."""
        if self._units_sent_bytes:
            return self._pages_sent * self._page_bytes / self._units_sent_bytes
        if not self._ratio:
            self._ratio = self._first_ratio()
        return self._ratio

    def _first_ratio(self) -> float:
        from uffdprefetch.base.ranges import total, union

        units = self._units
        upto = min(units.at(self._slice_bytes) + 1, len(units))
        needed_bytes = total(union(*units.pages(0, upto))) * self._page_bytes
        return needed_bytes / max(1, units.bytes_of(0, upto)) if upto else 1.0

    # ---- what to warm ---------------------------------------------------------------------------

    def due(self, lookahead_bytes: int) -> list[OrderRange]:
        """What to warm now so that [position, position + lookahead) of the plan is covered, the
        earliest need first; nothing once the plan is ``wrong``.

        It goes in slices of the order (of slice_bytes, or a quarter of the lookahead if that is
        less), each merged in itself, so it covers up to a slice more. A page of a record between
        position and sent is handed out once.
        """
        self._lookahead_bytes = lookahead_bytes
        units, coordinate = self._units, self._units.coordinate
        goal = self.position_bytes + lookahead_bytes
        pieces: list[OrderRange] = []
        if self.wrong or self._sent == len(units) or self.sent_bytes >= goal:
            return pieces
        self._held.forget(self._at)
        step = min(self._slice_bytes, max(1, lookahead_bytes // 4))
        while self._sent < len(units) and int(coordinate[self._sent]) < goal:
            end = max(self._sent + 1, units.at(int(coordinate[self._sent]) + step))
            pieces += self._slice(self._sent, end)
            self._sent = end
        pieces.sort(key=lambda piece: (piece.need_bytes, piece.start))
        return pieces

    def _slice(self, first: int, end: int) -> list[OrderRange]:
        import numpy as np

        low, high = self._units.pages(first, end)
        turns: Array = np.arange(first, end, dtype=np.int64)
        low, high, turns = self._held.add(low, high, turns, self._gap_pages)
        coordinate = self._units.coordinate
        self._pages_sent += int((high - low).sum())
        self._units_sent_bytes += self._units.bytes_of(first, end)
        starts: Array = low * self._page_bytes
        ends = np.minimum(high * self._page_bytes, self._file_bytes)
        needs = coordinate[turns]
        return list(map(OrderRange, starts.tolist(), ends.tolist(), needs.tolist()))

    def knows(self, blocks: Array, block_bytes: int) -> Array:
        """Whether the order, all of it, has a byte in each of these blocks of the file; bool."""
        return self._units.places.has(blocks, block_bytes)

    def future(self, blocks: Array, block_bytes: int = 64 << 10) -> Array:
        """Plan bytes until each of these blocks of the file (numbers) is needed next, float64; inf:
        not again in this order. 0: what was read last."""
        import numpy as np

        units = self._units
        turns = units.next_use.of(blocks, block_bytes, max(0, self._at - 1))
        away = np.maximum(units.coordinate[turns] - self.position_bytes, 0).astype(np.float64)
        away[turns == len(units)] = np.inf
        return away


def lookahead_bytes(
    cursor: OrderCursor, storage: Storage, allowed_bytes: int, boost: float = 1.0,
    ahead_items: int = 0,
) -> int:  # fmt: skip
    """How far ahead of a cursor to warm, in plan bytes: window.lookahead_bytes() for a known order,
    ``boost`` as of a stream. ``ahead_items``: so far beyond the position its reader may be. While
    the rate is not known, a reader whose order is exact may be as fast as the storage.

    The rate counts in pages of the file (small records need more of them than their bytes), its
    bounds and ``allowed_bytes`` too.
    """
    pages_for_a_byte = max(cursor.amplification, 1.0)
    rate = cursor.rate_bytes_per_second * pages_for_a_byte
    if not rate and cursor.exact:
        rate = storage.bandwidth_bytes_per_second
    reach = cursor.reach_bytes(ahead_items) * pages_for_a_byte if ahead_items else 0.0
    ahead = window.ahead_at_rate(rate, storage, boost) + reach
    return int(min(ahead, max(allowed_bytes, window.MIB)) / pages_for_a_byte)
