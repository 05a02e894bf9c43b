# SPDX-License-Identifier: Apache-2.0
"""One reader's cursors in the orders of its epochs, and which of them is the present one. Pure.

Nobody says that an epoch has begun. What the present order does not explain, touched or found
mapped, is told to a cursor through the next order: the epoch has begun when that is past
AGREE items (OrderCursor.has_begun). A page of the last epoch that was evicted and is read
again, or a worker that is late, touches the next order too, by chance: a cursor follows the
foremost touch, so touches are held until several agree (_Held); of what is mapped it needs three
quarters anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from uffdprefetch.base.units import HUGE_BYTES
from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.predict.sequences import AGREE, JUDGED, WAY, longest_increasing_subsequence

if TYPE_CHECKING:  # they bring numpy, which a service without a plan spares
    import numpy as np
    import numpy.typing as npt

    from uffdprefetch.predict.order.extents import OrderExtents
    from uffdprefetch.predict.order.order import Order
    from uffdprefetch.predict.order.seen import OrderPosition, SeenCursor


class Source(Protocol):
    """Where the orders of a reader's epochs come from."""

    how: str  # for people
    #: Whether the job announces its orders itself, so that touches need not show them to be right.
    exact: bool

    def order(self, epoch: int) -> Order | OrderExtents | None:
        """An epoch's order; None: it is not known yet, or has been given, which is done once. A
        guess may come first, the order itself later. Asked for again and again."""

    def over(self, epoch: int) -> bool:
        """Whether it is known that there is no such epoch."""


class _Touch(NamedTuple):
    """A touch [start, end) of the file, and where it would be in the next order."""

    spot: OrderPosition
    start: int
    end: int
    now_ns: int


class _Held:
    """Touches that the present order does not explain here, until they are told to the next one."""

    def __init__(self) -> None:
        self._touches: list[_Touch] = []  # of different places

    def explained(self) -> None:
        """Another touch was of the present order: the oldest of these is forgotten."""
        self._touches = self._touches[1:]

    def touch(self, upcoming: SeenCursor, start: int, end: int, now_ns: int) -> None:
        """One more; all are told to ``upcoming`` when they agree, or are too many to be held."""
        spot = upcoming.spot(start, end)
        places = [touch.spot.plan_bytes for touch in self._touches]
        if spot is not None and spot.plan_bytes not in places:
            self._touches.append(_Touch(spot, start, end, now_ns))
        agree = self._at_the_beginning(upcoming) or self._on_a_way(upcoming)
        if agree or len(self._touches) >= JUDGED:
            for touch in self._touches:
                upcoming.saw(touch.start, touch.end, touch.now_ns)
            self._touches = []

    def _at_the_beginning(self, upcoming: SeenCursor) -> bool:
        """Whether they are several items there, which no single fault has mapped."""
        near = [touch for touch in self._touches if upcoming.is_near(touch.spot)]
        several = len(near) > 1 or any(touch.end - touch.start > HUGE_BYTES for touch in near)
        items = sum(touch.spot.items for touch in near)
        return several and items >= min(AGREE, upcoming.items)

    def _on_a_way(self, upcoming: SeenCursor) -> bool:
        """Whether they are a way through it, wherever that is: what comes first may be mapped
        still."""
        way = longest_increasing_subsequence([touch.spot.item for touch in self._touches])
        if len(way) < WAY:
            return False
        upcoming.said(way[0], self._touches[0].now_ns)
        return True


class Epochs:
    """One reader's cursors, see the module. The *coordinate* is that of OrderCursor, which goes on
    from epoch to epoch here; sizes in bytes, times in nanoseconds."""

    def __init__(self, source: Source, file_bytes: int) -> None:
        self._source, self._file_bytes = source, file_bytes
        self.number = 0  # of the present epoch
        self.cursor: SeenCursor | None = None  # in its order; None: that is not there yet
        self.following: SeenCursor | None = None  # in the next order, since that was asked for
        self._coming = 1  # the number of that
        self.base_bytes = 0  # the coordinate at which the present one begins
        self.done_items = 0  # read in those before
        self._held = _Held()
        self._strays: list[tuple[int, int]] = []  # found mapped, not for this epoch
        self._looked_in = 0  # the epoch in which the last look was

    @property
    def how(self) -> str:
        """How the orders are known, for people."""
        return self._source.how

    @property
    def over(self) -> bool:
        """Whether there is no order for the present one."""
        return self._source.over(self.number)

    @property
    def through(self) -> bool:
        """Whether the last order has been read to its end."""
        cursor = self.cursor
        at_its_end = cursor is not None and cursor.position_bytes >= cursor.total_bytes
        return at_its_end and self.following is None and self._source.over(self._coming)

    @property
    def position_bytes(self) -> int:
        """The coordinate of the reader."""
        return self.base_bytes + (0 if self.cursor is None else self.cursor.position_bytes)

    def look(self, now_ns: int) -> SeenCursor | None:
        """The cursor in the present order, made once there is one."""
        made = self._made(self.number)
        if made is not None and self.cursor is not None:  # what there was before was a guess
            made.pace_of(self.cursor)
            made.said(self.cursor.position, now_ns)
        self.cursor = made or self.cursor
        return self.cursor

    def _made(self, epoch: int) -> SeenCursor | None:
        from uffdprefetch.predict.order.seen import SeenCursor

        order = self._source.order(epoch)
        return (
            None
            if order is None
            else SeenCursor(order, self._file_bytes, judged=not self._source.exact)
        )

    def _upcoming(self) -> SeenCursor | None:
        last = self.number + ENTRIES_MAX
        while (
            self.following is None and self._coming <= last and not self._source.over(self._coming)
        ):
            made = self._made(self._coming)
            if made is None:
                break
            if made.total_bytes:
                self.following = made
            else:  # an epoch of nothing
                self._coming += 1
        return self.following

    def _go_on(self, upcoming: SeenCursor) -> bool:
        """To the next epoch, if it has begun; whether it has."""
        before = self.cursor
        if before is None or not upcoming.has_begun(AGREE):
            return False
        self.done_items += before.position
        self.base_bytes += before.total_bytes
        self.number, self._coming = self._coming, self._coming + 1
        upcoming.pace_of(before)
        self.cursor, self.following = upcoming, None
        self._held = _Held()
        return True

    # ---- progress -------------------------------------------------------------------------------

    def saw(self, start: int, end: int, now_ns: int) -> bool:
        """A touch of [start, end) of the file; whether the position may have moved."""
        cursor = self.look(now_ns)
        if cursor is None or cursor.reads_on(start):
            return False
        moved = cursor.saw(start, end, now_ns) > 0
        if moved:
            self._held.explained()
        upcoming = self._upcoming() if cursor.stray else None
        if upcoming is None:
            return moved
        self._held.touch(upcoming, start, end, now_ns)
        return self._go_on(upcoming) or moved

    def mapped(self, found: list[tuple[int, int]], now_ns: int, judge: bool) -> bool:
        """Ranges of the file that a look has found mapped, and no look before; whether that moved
        the position. ``judge``: whether the order may be found wrong by them."""
        cursor = self.look(now_ns)
        if cursor is None:
            return False
        before = self.position_bytes
        same_epoch = self._looked_in == self.number  # else some may be of the epoch before
        self._looked_in = self.number
        strays = cursor.mapped(found, now_ns, same_epoch)
        self._strays = [*self._strays, *strays][-ENTRIES_MAX:]
        upcoming = self._upcoming() if self._strays else None
        if upcoming is not None:
            unexplained = set(upcoming.mapped(self._strays, now_ns, judge=False))
            strays = [stray for stray in strays if stray in unexplained]
            self._strays = []
        begun = upcoming is not None and self._go_on(upcoming)
        if judge and same_epoch and not begun:
            cursor.looked(found, strays)
        return self.position_bytes != before

    # ---- what is needed -------------------------------------------------------------------------

    def due(self, ahead_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(start, end, coordinate) of what is to be warmed so that ``ahead_bytes`` of the order lie
        ahead of the reader; with the end of this epoch comes the next one's beginning."""
        cursor = self.cursor
        if cursor is None:
            return
        for piece in cursor.due(ahead_bytes):
            yield piece.start, piece.end, self.base_bytes + piece.need_bytes
        left = cursor.total_bytes - cursor.position_bytes
        upcoming = self._upcoming() if ahead_bytes > left and not cursor.wrong else None
        if upcoming is not None:
            base = self.base_bytes + cursor.total_bytes
            for piece in upcoming.due(ahead_bytes - left):
                yield piece.start, piece.end, base + piece.need_bytes

    @property
    def handed_out_bytes(self) -> int:
        """How much of the order ahead of the reader due() has given."""
        cursor, following = self.cursor, self.following
        if cursor is None:
            return 0
        beyond = 0 if following is None else following.sent_bytes
        return max(0, cursor.sent_bytes - cursor.position_bytes) + beyond

    def future(self, blocks: npt.NDArray[np.int64], block_bytes: int) -> npt.NDArray[np.float64]:
        """Plan bytes until each of these blocks of the file is needed, inf: not as far as is
        known."""
        import numpy as np

        assert self.cursor is not None
        away: npt.NDArray[np.float64] = self.cursor.future(blocks, block_bytes)
        upcoming = self._upcoming()
        never = np.flatnonzero(np.isinf(away))
        if upcoming is not None and len(never):
            left = self.cursor.total_bytes - self.cursor.position_bytes
            away[never] = left + upcoming.future(blocks[never], block_bytes)
        return away

    def knows(self, blocks: npt.NDArray[np.int64], block_bytes: int) -> npt.NDArray[np.bool_]:
        """Whether the present orders have a byte in each of these blocks."""
        assert self.cursor is not None
        known: npt.NDArray[np.bool_] = self.cursor.knows(blocks, block_bytes)
        upcoming = self._upcoming()
        return known if upcoming is None else known | upcoming.knows(blocks, block_bytes)
