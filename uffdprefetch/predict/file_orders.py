# SPDX-License-Identifier: Apache-2.0
"""The files of a directory that are wanted next, by the order in which it is read.

From when an order is proven (predict/name_orders.py), each stream through the directory (several
processes have a part each) has a window of names ahead of its front. It doubles as long as they are
opened; where they are not, all begins anew. What a program leaves out by its suffix is left out.
"""

from __future__ import annotations

from collections import deque

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.predict.bounds import LATELY_COUNT
from uffdprefetch.predict.name_orders import (
    GAP_NAMES,
    WINDOW_FILES,
    DirectoryPass,
    NameOrder,
    Names,
    OrderEvidence,
)

#: Files that are wanted ahead of a stream at most: as many as there are workers that read, four
#: times over. At first it is WINDOW_FILES.
WINDOW_MOST_FILES = 64
#: Names that a stream goes over at a time, of which most may be left out: a millisecond.
STEP_NAMES = WINDOW_FILES * WINDOW_MOST_FILES
#: Of the last WINDOW_FILES outcomes: names that were not expected, or expected and left out.
WRONG_MOST = 2


@dataclass(eq=False)
class FileCursor:
    """One stream through a directory, by places in its order. ``end``: of what it has wanted;
    ``before``: where it comes from, another directory, until it is here; ``has_left``: it has come
    to another one since."""

    front: int
    window: int = WINDOW_FILES
    end: int = 0
    last: int = 0  # when it moved (DirectoryPass.total)
    opens: int = 0
    right: int = 0  # since its window has its size
    outstanding: int = 0
    pending: deque[int] = field(default_factory=deque)  # places, of which some were opened
    before: FileCursor | None = None
    has_left: bool = False

    @property
    def short(self) -> int:
        """How many names more than it has wanted its window holds."""
        return self.window - self.outstanding

    def is_right(self) -> None:
        """What it has wanted was opened."""
        self.outstanding -= 1
        self.right += 1
        if self.right >= self.window and self.window < WINDOW_MOST_FILES:
            self.window, self.right = min(2 * self.window, WINDOW_MOST_FILES), 0

    def has_come(self) -> None:
        """It goes on here as it went there, if it has opened what it wanted there."""
        before, self.before = self.before, None
        if before is not None:
            before.has_left = True
            if before.outstanding <= GAP_NAMES:
                self.window = max(self.window, before.window)
                self.right += before.right


class DirectoryOrder:
    """The opens in one directory, and what is wanted of it."""

    def __init__(self, names: Names, evidence: OrderEvidence | None = None) -> None:
        """``evidence``: of the tree that it is in."""
        self.names = names
        self.evidence = evidence or OrderEvidence()
        self.opens = DirectoryPass(names)
        self.order: NameOrder | None = None
        self.cursors: list[FileCursor] = []
        self.used = 0  # of what was wanted
        self._wanted: dict[int, FileCursor] = {}
        self._given_up: set[int] = set()
        self._untold: list[int] = []  # of these
        self._outcomes: deque[bool] = deque(maxlen=WINDOW_FILES)
        self._began = 0, 0  # used and lost when the order was taken up ...
        self._trust = 0  # ... and what may be wanted before anything was used

    @property
    def lost(self) -> int:
        """How many names were wanted and given up, and not opened since."""
        return len(self._given_up)

    def given_up(self) -> list[str]:
        """Names that were wanted and were given up since the last time."""
        untold, self._untold = self._untold, []
        return [self.names.name(index) for index in untold]

    @property
    def wanted(self) -> int:
        """How many names are wanted, and neither opened nor given up."""
        return len(self._wanted)

    def opened(self, name: str) -> bool:
        """A name was opened; whether that is news. One that is not listed is none."""
        index = self.names.find(name)
        if index < 0:
            return False
        if self.opens.begins_anew(index):
            self._give_up(list(self._wanted))
            self.cursors.clear()
        elif index in self.opens:
            return False
        self.evidence.opens(name)
        if self.order is None:
            self.evidence.note(self.opens, index)
            self._given_up.discard(index)
        self.opens.add(index)
        if self.order is not None:
            self._follow(index)
        elif (order := self.evidence.best()) is not None:
            self._take_up(order)
            self._begin_streams(order, index)
        return True

    def begin(self, files: int, before: FileCursor | None = None) -> None:
        """Want the first ``files`` of a directory in which nothing was opened, in the order of the
        tree; nothing where that has none. ``before``: the stream that will come."""
        order = self.evidence.best()
        if order is None or self.opens.number:
            return
        if self.order is None:
            self._take_up(order)
            self.cursors.append(FileCursor(-1, window=0))
        # the stream that comes goes on with its window, of which this is the rest
        cursor = self.cursors[0]
        cursor.window = max(cursor.window, min(files, WINDOW_MOST_FILES))
        cursor.before = before or cursor.before
        self._trust = max(self._trust, cursor.window)

    def _begin_streams(self, order: NameOrder, last: int) -> None:
        """Of what was opened lately, the names from which the order went on."""
        lately = self.opens.lately().items()
        places = {self.names.place(order, index): when for index, when in lately}
        for place in sorted(places):
            around = range(place - GAP_NAMES, place + GAP_NAMES + 1)
            others = [each for each in around if each in places and each != place]
            if others and max(others) < place:
                self._cursor_at(place, max(places[each] for each in (place, *others))).opens = 2
        place = self.names.place(order, last)
        if self._near(place) is None:
            self._cursor_at(place, self.opens.total)

    def _take_up(self, order: NameOrder) -> None:
        self.order = order
        self._outcomes.clear()
        self._began, self._trust = (self.used, self.lost), WINDOW_FILES

    def _follow(self, index: int) -> None:
        assert self.order is not None
        place = self.names.place(self.order, index)
        cursor = self._wanted.pop(index, None)
        if cursor is not None:
            self.used += 1
            cursor.is_right()
            self._outcomes.append(True)
        elif index in self._given_up:
            self._given_up.discard(index)
            cursor = self._near(place)
        else:
            cursor = self._near(place)
            follows = self.evidence.bits_for(self.opens, self.order, index) > 0
            self._outcomes.append(cursor is not None or follows)
        if cursor is None:
            cursor = self._cursor_at(place, self.opens.total)
        self._advance(cursor, place)
        self._end_streams()
        if self._is_wrong():
            self._begin_anew()

    def _is_wrong(self) -> bool:
        """Whether the order holds no more, or too much is left out of it."""
        # whoever has taken a part of the walk begins at another place when that is done
        streams = sum(cursor.opens > 1 for cursor in self.cursors)
        most = min(max(WRONG_MOST, streams // 2), WINDOW_FILES - 1)
        used, lost = self._began
        in_vain = self.lost - lost - WINDOW_FILES
        return self._outcomes.count(False) >= most or in_vain > (self.used - used) // GAP_NAMES

    def _near(self, place: int) -> FileCursor | None:
        """Whose front is beside a place that nobody has wanted (yet: nobody may have asked)."""
        found = [c for c in self.cursors if abs(place - c.front) <= GAP_NAMES]
        return max(found, key=lambda c: c.front, default=None)

    def _cursor_at(self, place: int, when: int) -> FileCursor:
        cursor = FileCursor(place, end=place + 1, last=when)
        if len(self.cursors) >= LATELY_COUNT:
            silent = min(self.cursors, key=lambda c: c.last)
            self._give_up([index for index, by in self._wanted.items() if by is silent])
            self.cursors.remove(silent)
        self.cursors.append(cursor)
        return cursor

    def _advance(self, cursor: FileCursor, place: int) -> None:
        """Its front goes on; what lies far behind it was left out. Who opens what is far ahead of
        it is another stream, which has what is wanted there."""
        assert self.order is not None
        if place - cursor.front > GAP_NAMES:
            cursor = self._split(cursor, place)
        cursor.front = max(cursor.front, place)
        cursor.end = max(cursor.end, cursor.front + 1)
        cursor.last = self.opens.total
        cursor.opens += 1
        cursor.has_left = False
        if cursor.before is not None:
            cursor.has_come()
            self._trust = max(self._trust, cursor.window)
        passed = []
        while cursor.pending and cursor.pending[0] < cursor.front - 2 * cursor.window:
            index = self.names.index(self.order, cursor.pending.popleft())
            if index in self._wanted:
                passed.append(index)
        self._outcomes.extend(False for _ in passed)
        self._give_up(passed)

    def _split(self, cursor: FileCursor, place: int) -> FileCursor:
        assert self.order is not None
        ahead = self._cursor_at(place, self.opens.total)
        ahead.window, ahead.end = cursor.window, max(cursor.end, place + 1)
        while cursor.pending and cursor.pending[-1] > place:
            ahead.pending.appendleft(cursor.pending.pop())
            index = self.names.index(self.order, ahead.pending[0])
            if index in self._wanted:
                self._wanted[index] = ahead
                cursor.outstanding -= 1
                ahead.outstanding += 1
        cursor.end = min(cursor.end, place)
        return ahead

    def _end_streams(self) -> None:
        """Of those that did not go on while the others did."""
        assert self.order is not None
        for cursor in [c for c in self.cursors if self.opens.total - c.last > LATELY_COUNT]:
            indices = [self.names.index(self.order, place) for place in cursor.pending]
            wanted = [index for index in indices if index in self._wanted]
            self._outcomes.append(not wanted)
            self._give_up(wanted)
            self.cursors.remove(cursor)

    def _give_up(self, indices: list[int]) -> None:
        for index in indices:
            self._wanted.pop(index).outstanding -= 1
            self._given_up.add(index)
            self._untold.append(index)

    def _begin_anew(self) -> None:
        self._give_up(list(self._wanted))
        used, lost = self._began
        self.evidence.was_wrong(self.lost - lost > self.used - used)
        self.order = None
        self.cursors.clear()

    def ahead(self, most: int = STEP_NAMES, more: int = STEP_NAMES) -> list[str]:
        """What is wanted that was not before, the next first, ``more`` of it at most. ``most``:
        names that are wanted at a time, by all streams together."""
        found: list[str] = []
        used, _ = self._began
        room = min(most, self._trust + 2 * (self.used - used)) - len(self._wanted)
        room = min(room, more)
        each = max(1, most // max(1, len(self.cursors)))
        for cursor in sorted(self.cursors, key=lambda c: -c.last):
            if room <= 0:
                break
            names = self._extend(cursor, min(room, min(cursor.window, each) - cursor.outstanding))
            room -= len(names)
            found += names
        return found

    def _extend(self, cursor: FileCursor, room: int) -> list[str]:
        assert self.order is not None
        found: list[str] = []
        last = min(len(self.names), cursor.end + STEP_NAMES)
        while len(found) < room and cursor.end < last:
            index = self.names.index(self.order, cursor.end)
            if index in self._wanted:
                break  # another stream's
            cursor.end += 1
            name = self.names.name(index)
            if index in self.opens or index in self._given_up or self.evidence.leaves_out(name):
                continue
            self._wanted[index] = cursor
            cursor.pending.append(cursor.end - 1)
            cursor.outstanding += 1
            found.append(name)
        return found

    @property
    def leaving(self) -> FileCursor | None:
        """Of the streams that have wanted the last name, the one that would want most names more if
        the directory had them; None: none would."""
        here = [c for c in self.cursors if c.short > 0 and not c.has_left]
        ends = [c for c in here if c.end >= len(self.names)]
        return max(ends, key=lambda c: c.short, default=None)

    def leave(self) -> None:
        """Nobody reads there any more: what was wanted and not opened is lost."""
        self._give_up(list(self._wanted))
        self.cursors.clear()
