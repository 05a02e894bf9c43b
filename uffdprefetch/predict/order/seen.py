# SPDX-License-Identifier: Apache-2.0
"""How far a rank has come in its order, by what it touches. Pure.

Touches do not say all: a record whose pages are mapped already is read without one, page-table
scans come late, several workers read several batches at a time. So no record is waited for: the
position is behind the foremost touch that is this order's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.units import HUGE_BYTES
from uffdprefetch.predict.bounds import LATELY_COUNT
from uffdprefetch.predict.order.cursor import OrderCursor
from uffdprefetch.predict.sequences import AGREE, JUDGED, WAY, longest_increasing_subsequence
from uffdprefetch.predict.window import LOOKAHEAD_MIN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from uffdprefetch.predict.order.extents import OrderExtents
    from uffdprefetch.predict.order.order import Order

    Array = np.ndarray[Any, Any]

#: A touch this far ahead of the foremost one (or of what was handed out) is the reader's, and the
#: position may follow. A stray one can skip no more.
NEAR_BYTES = LOOKAHEAD_MIN_BYTES
#: Farther ones, ahead or behind, by this part of the order are of another worker, or come late:
#: right, but the position waits. Of touches that have nothing to do with the plan it takes in a
#: quarter, which is far from half.
HORIZON_PART = 8
#: What is mapped is less sure than a touch, since a fault maps its neighbours too: the position
#: follows as far as MAPPED_PART of the units are mapped, and at most AGREE units beyond what was
#: handed out.
MAPPED_PART = 0.75
#: A stretch of them far ahead is looked for when so much more of what is ahead has come: all looks
#: together go over the order so many times.
LOOK_PART = 64
#: The most of what lies beyond a reader that is there all the same: faults map what lies beside.
BEYOND_PART = 0.5
#: A page that two records share is the one ahead's only where that is SHARED_TIMES as near.
SHARED_TIMES = 4

#: What is known of a unit: nothing; its pages were touched, perhaps for another one; a reader was
#: there.
_NEW, _TOUCHED, _READ = 0, 1, 2


class OrderPosition(NamedTuple):
    """A place in an order."""

    plan_bytes: int
    item: int
    items: int  # that lie there side by side, in the order and in the file


class SeenCursor(OrderCursor):
    """An OrderCursor that is told what is touched. ``judged``: whether it may be found ``wrong`` by
    that."""

    def __init__(
        self, order: Order | OrderExtents, file_bytes: int, *, judged: bool = True, **cut: int
    ) -> None:
        """``cut``: see OrderCursor."""
        import numpy as np

        from uffdprefetch.predict.order.validator import OrderValidator

        super().__init__(order, file_bytes, **cut)
        units = self._units
        self.exact = not judged
        #: Whether the last touch that saw() was told of is none of this order at this place: it may
        #: be one of the next epoch's.
        self.stray = False
        self._inside = (0, 0)
        self._near_ns = 0  # when the last touch that moves the position was
        self._far = 0  # the unit of the last one that lay beyond
        self._states: Array = np.zeros(len(units), np.uint8)
        self._front = 0  # the unit of the foremost reader
        #: Units found mapped beyond what was handed out, since _lead_far(): the first time is soon,
        #: as a reader may have begun long before its order came.
        self._beyond = max(0, len(units) // LOOK_PART - WAY)
        self._reading: dict[int, int] = {}
        self._mapped = IntervalSet()  # of the file, since this order began
        self._validator = OrderValidator(units.items, units.total_bytes)

    @property
    def wrong(self) -> str | None:
        """See OrderCursor: by what is touched, with the counts."""
        return None if self.exact else self._validator.wrong

    def reads_on(self, start: int) -> bool:
        """Whether a touch there is within the record that was touched foremost: it tells nothing
        new."""
        return self._inside[0] < start < self._inside[1]

    def is_near(self, spot: OrderPosition) -> bool:
        """Whether a touch there is near the position."""
        return spot.plan_bytes < self.position_bytes + NEAR_BYTES

    def spot(self, start: int, end: int) -> OrderPosition | None:
        """Where ahead of the position a touch of [start, end) of the file would be; None for
        nowhere."""
        units = self._units
        hits = units.places.within(start, end)
        ahead = hits[hits.searchsorted(self._at) :]
        if not len(ahead) or self._leads_in(hits):
            return None
        first = int(units.item[ahead[0]])
        items = int(units.item[self._last_of(ahead)]) - first + 1
        return OrderPosition(int(units.coordinate[ahead[0]]), first, items)

    def _leads_in(self, hits: Array) -> bool:
        """Whether all of these are pages by which records are found: a page of an item whose bytes
        are elsewhere. They stand where they are needed first, and are read again at any time."""
        units = self._units
        after = (hits + 1).clip(max=len(units) - 1)
        same = (units.item[after] == units.item[hits]) & (after > hits)
        sizes = units.ends[hits] - units.starts[hits]
        page = (sizes <= units.places.page_bytes) & (
            units.ends[after] - units.starts[after] > sizes
        )
        return bool((same & page & (units.starts[after] != units.ends[hits])).all())

    def saw(self, start: int, end: int, now_ns: int) -> int:
        """A touch of [start, end) of the file: how many items are now taken for read that were not
        (0: behind, being read already, or not in the plan here)."""
        hits = self._units.places.within(start, end)
        self._between_items(hits, start, end)
        self.stray = not len(hits)
        if not len(hits) or (int(hits[-1]) < self._at and self._leads_in(hits)):
            return 0
        over = self._at == len(self._units)
        first = int(hits.searchsorted(self._at))
        if 0 < first < len(hits) and self._rather_behind(int(hits[first - 1]), int(hits[first])):
            first = len(hits)
        nearest = int(hits[first]) if first < len(hits) else len(self._units)
        states = self._states[hits]
        self._settle(hits, states)
        new, read = nearest < len(self._units) and int(states[first]) == _NEW, 0
        near = nearest < self._near() or self._goes_on_far(nearest, now_ns)
        self._near_ns = now_ns if near else self._near_ns
        expected = near or self._expected(hits, nearest)
        if nearest < len(self._units) and not self._read_on(nearest, start, end):
            read = self._match(hits[first:], new, near)
        if self._at < len(self._units):  # else it is done, and what comes is another epoch's
            unit = nearest if nearest < len(self._units) else int(hits[-1])
            if self._validator.vote(hits, unit, expected, near, self.position):
                self._resume()
        self.stray = over or not expected
        self._move(now_ns)
        return read if expected else 0

    def mapped(
        self, ranges: Iterable[tuple[int, int]], now_ns: int, judge: bool = True
    ) -> list[tuple[int, int]]:
        """Ranges of the file that have been mapped since the last call, none told twice: which of
        them are of no item that is due soon (they may be another epoch's). Where they may be of the
        time before this order they are not to ``judge`` it by.

        A fault maps its neighbours too (fault-around), which come at any time in the order: so the
        position moves on only where hardly an item is missing. And so parts of an item may have
        been mapped before it is read: it is there when all of its parts are."""
        import numpy as np

        units = self._units
        ranges = list(ranges)
        for start, end in ranges:
            self._mapped.add(start, end)
        starts, ends = np.array(ranges, np.int64).reshape(-1, 2).T
        owner, hits = units.places.within_each(starts, ends)
        if judge:
            of_each = np.split(hits, owner.searchsorted(np.arange(1, len(ranges))))
            for (start, end), own in zip(ranges, of_each, strict=False):  # no ranges: one of none
                self._between_items(own, start, end)
        strays, front = self._not_due(ranges, owner, hits), self._front
        ahead = hits >= front
        self._lead_over(owner[ahead], hits[ahead], starts, ends, now_ns)
        if self._front - front >= WAY:  # they are of a way that had begun unseen
            strays = self._not_due(ranges, owner, hits)
        return strays

    def _not_due(
        self, ranges: list[tuple[int, int]], owner: Array, hits: Array
    ) -> list[tuple[int, int]]:
        """Those of the ranges that are of no unit near the position."""
        import numpy as np

        units = self._units
        horizon = units.at(self.position_bytes + self._horizon_bytes())
        expected: Array = np.zeros(len(ranges), np.bool_)
        if self._at < len(units):
            expected[owner[(hits >= self._behind()) & (hits < horizon)]] = True
        return [ranges[i] for i in np.flatnonzero(~expected).tolist()]

    def _lead_over(
        self, owner: Array, hits: Array, starts: Array, ends: Array, now_ns: int
    ) -> None:
        """The position follows over these units as far as hardly one before is not there: near
        what was handed out, or to the end of a stretch that is a reader's."""
        import numpy as np

        units = self._units
        lows, highs = units.starts[hits], units.ends[hits]
        inside = units.in_blocks | ((lows >= starts[owner]) & (highs <= ends[owner]))
        for i in np.flatnonzero(~inside).tolist():  # at an edge
            inside[i] = not self._mapped.missing(int(lows[i]), int(highs[i]))
        whole: Array = hits[inside]
        whole.sort()
        places = units.starts[whole]
        order = places.argsort(kind="stable")
        places = places[order]
        whole = whole[order[np.append(True, places[1:] != places[:-1])[: len(order)]]]  # the next
        self._settle(whole, self._states[whole])
        upto = max(self._sent, min(self._front + AGREE, len(units)))
        self._beyond += int((whole >= upto).sum())
        there = self._states[self._front : upto]
        read = (there == _TOUCHED) | (there == _READ)
        far = (read & (read.cumsum() >= MAPPED_PART * np.arange(1, len(read) + 1))).nonzero()[0]
        if len(far):
            self._lead(self._front + int(far[-1]) + 1)
        if self._beyond >= max(WAY, (len(units) - self._front) // LOOK_PART):
            self._beyond = 0
            self._lead_far()
        if self._front > self._at:
            self._move(now_ns)

    def _lead_far(self) -> None:
        """To the end of the stretch that most stands out of what is mapped ahead, if it is a
        reader's way, which nobody has followed: of many pieces of the file, of which hardly one is
        missing, as JUDGED of which none is, and after which the next ones are. Of a file of which
        half is mapped, anywhere, one order in 10^5 has such a stretch. Where most of the file is
        mapped that tells nothing, and neither does one fault that maps many units."""
        import numpy as np

        there = self._states[self._front :]
        read = (there == _TOUCHED) | (there == _READ)
        more: Array = read.cumsum() - MAPPED_PART * np.arange(1, len(read) + 1)
        least: Array = np.minimum.accumulate(np.append(0.0, more[:-1]))
        end = int((more - least).argmax()) + 1
        begin = int(np.append(0.0, more[: end - 1])[::-1].argmin())
        begin = end - 1 - begin
        rest = read[end : end + max(end - begin, 2 * WAY)]
        elsewhere = int(read.sum()) - int(read[begin:end].sum())
        places = np.sort(self._units.starts[self._front + begin : self._front + end] // HUGE_BYTES)
        apart = int((np.diff(places) != 0).sum()) + 1
        if (
            more[end - 1] - least[end - 1] >= (1 - MAPPED_PART) * JUDGED
            and apart >= WAY
            and len(rest) >= WAY
            and rest.mean() <= BEYOND_PART
            and elsewhere <= BEYOND_PART * (len(read) - (end - begin))
        ):
            self._lead(self._front + end)
            # it was not in the time since the last look that it came there
            self._place = max(self._place, self._units.behind(self._front))

    def looked(self, found: Iterable[tuple[int, int]], strays: Iterable[tuple[int, int]]) -> None:
        """What mapped() was told of, and which of it no order explains. What lies behind the
        position was read in time and is seen late; nothing follows where so much was found that
        the reader may have gone on far, nor at the order's end, where the next one may not be known
        yet."""
        found_bytes = sum(end - start for start, end in found)
        at_the_end = 4 * self.position_bytes > 3 * self.total_bytes
        if at_the_end or 2 * found_bytes > self._horizon_bytes():
            return
        ahead = [
            (start, end)
            for start, end in strays
            if not (self._units.places.within(start, end) < self._at).any()
        ]
        self._validator.looked(found_bytes, sum(b - a for a, b in ahead), self.position)

    def _between_items(self, hits: Array, start: int, end: int) -> None:
        """What of a range is in none of the units that overlap it goes to the validator."""
        if not len(hits):
            self._validator.outside(start, end, self._at)
        elif end - start > HUGE_BYTES:
            for low, high in self._units.between(hits, start, end, HUGE_BYTES):
                self._validator.outside(low, high, self._at)

    def _near(self) -> int:
        """The unit up to which a touch moves the position."""
        foremost = int(self._units.coordinate[self._front]) + NEAR_BYTES
        return max(self._sent, self._units.at(foremost))

    def _goes_on_far(self, unit: int, now_ns: int) -> bool:
        """Where not each touch shows, a reader may have gone far, at its pace, since one did, up to
        the horizon: two touches one after the other there tell."""
        if not self._near_ns or unit >= len(self._units):
            return False
        at = int(self._units.coordinate[unit])
        seconds = (now_ns - self._near_ns) / 1e9
        reach = NEAR_BYTES + int(self.rate_bytes_per_second * seconds)
        reach = min(reach, self._horizon_bytes())
        if at - int(self._units.coordinate[self._front]) > reach:
            return False
        before, self._far = self._far, unit
        return before < unit and at - int(self._units.coordinate[before]) <= NEAR_BYTES

    def _expected(self, hits: Array, nearest: int) -> bool:
        """Whether a touch that is not near the position is of its order all the same."""
        ahead_bytes = self.position_bytes + self._horizon_bytes()
        if nearest < len(self._units) and int(self._units.coordinate[nearest]) < ahead_bytes:
            return True
        behind = int(hits.searchsorted(self._at)) - 1
        if behind >= 0 and int(hits[behind]) >= self._behind():
            return True
        return self._validator.follows(hits)

    def _rather_behind(self, behind: int, ahead: int) -> bool:
        """Of a page that these two units share, whether the one behind the position is read, by a
        reader that is late: the foremost one is nearer to that."""
        at, front = self._units.coordinate, self._front
        return bool(at[front] - at[behind] < SHARED_TIMES * (at[ahead] - at[front]))

    def _horizon_bytes(self) -> int:
        return max(NEAR_BYTES, self._lookahead_bytes, self.total_bytes // HORIZON_PART)

    def _behind(self) -> int:
        return self._units.at(self.position_bytes - self._horizon_bytes())

    def _read_on(self, unit: int, start: int, end: int) -> bool:
        """Whether a touch goes on in a record that is being read, of which ``unit`` would be the
        next occurrence. One that does not is remembered as the one being read."""
        place = int(self._units.starts[unit])
        reached = self._reading.pop(place, None)
        goes_on = reached is not None and start >= reached
        self._reading[place] = max(end, reached or 0) if goes_on else end
        if len(self._reading) > LATELY_COUNT:
            del self._reading[next(iter(self._reading))]
        return goes_on

    def _match(self, ahead: Array, new: bool, near: bool) -> int:
        """The reader is at the first of these units, and at those that follow it in the order as
        well as in the touch; how many items that is."""
        units = self._units
        first, last = int(ahead[0]), self._last_of(ahead)
        self._states[first : last + 1] = _READ
        items = int(units.item[last] - units.item[first]) + 1
        if not near:
            return items if new else 0
        self._inside = (int(units.starts[first]), int(units.ends[first]))
        self._lead(last + 1)
        return items

    def _last_of(self, ahead: Array) -> int:
        """The unit up to which these follow each other in the order as well as in the touch."""
        starts = self._units.starts[ahead]
        breaks = ((ahead[1:] != ahead[:-1] + 1) | (starts[1:] == starts[:-1])).nonzero()[0]
        return int(ahead[breaks[0] if len(breaks) else -1])

    def _lead(self, front: int) -> None:
        """The foremost reader is here, or where others have read on from here."""
        front, states = max(front, self._front), self._states.data  # one by one: faster than numpy
        while front < len(states) and states[front] == _READ:
            front += 1
        self._front = front

    def _resume(self) -> None:
        """Readers are far ahead and nobody is here: on to the next place where one is; of several,
        WAY touches within so many units of another, the latest tell. A single touch is no reader:
        what lies beside a record is due anywhere."""
        lately = [unit for unit in self._validator.lately() if unit >= self._front]
        way = longest_increasing_subsequence(lately)
        if len(way) >= WAY:
            self._lead(way[-AGREE])
            return
        places = sorted(set(lately))
        beside = {unit for a, b in pairwise(places) if b - a <= WAY for unit in (a, b)}
        if len(beside) >= WAY:
            self._lead(min(beside.intersection(lately[-WAY:]), default=0))

    def _settle(self, hits: Array, states: Array) -> None:
        """They are touched."""
        states = states.copy()
        states[states != _READ] = _TOUCHED
        self._states[hits] = states

    def _move(self, now_ns: int) -> None:
        """On to where the foremost reader is."""
        self._go(self._front, now_ns)

    def _go(self, at: int, now_ns: int) -> None:
        self._front = max(self._front, at)
        super()._go(at, now_ns)
