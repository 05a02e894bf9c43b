# SPDX-License-Identifier: Apache-2.0
"""Readers whose order is known: what they need next is warmed in that order.

plan/order.py knows where a reader is in its order and what it needs next; this knows which mapping
is whose, hands its pieces to the scheduler, and says when a plan was wrong. A reader with a plan
has no windows of its own streams. Where the orders come from: node/orders.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from uffdprefetch.node.client import Client, Region
from uffdprefetch.node.files import FileState
from uffdprefetch.node.ledger import Ledger
from uffdprefetch.node.wire import Verdict
from uffdprefetch.plan.checkpoints import DISTANCE_MIN_BYTES
from uffdprefetch.plan.place import HUGE_BYTES, NEAR_BYTES, WAY, Spot, longest_way
from uffdprefetch.plan.window import Storage
from uffdprefetch.progress.streams import Stream
from uffdprefetch.uffd import PAGE_BYTES
from uffdprefetch.warm.scheduler import Scheduler, now_ns

if TYPE_CHECKING:  # they bring numpy, which a service without a plan spares
    import numpy as np
    import numpy.typing as npt

    from uffdprefetch.plan.order import Order, Walk
    from uffdprefetch.plan.units import Units

#: Items near the beginning of the next epoch's order, which this one's does not have here: when so
#: many are touched that epoch has begun. (A single one is by chance, or of a worker that is late.)
BEGUN_ITEMS = 4
#: So many touches that tell nothing of that are given to the next order all the same.
EARLY_MAX = 32
#: Checkpoints ahead of a reader, one each DISTANCE_MIN_BYTES of its order.
MILESTONES_MAX = 16
#: A reader of which no checkpoint tells for so long is looked for in the page tables.
QUIET_NS = 100_000_000
#: Ranges that are kept for that.
SEEN_MAX = 4096
#: Readers that are told of one by one when they have ended.
ENDED_MAX = 256


class Source(Protocol):
    """Where the orders of a reader's epochs come from."""

    how: str  # for people

    def order(self, epoch: int) -> Order | Units | None:
        """An epoch's order; None: not yet, or it has been given. It may be given again: a guess
        first. Asked for again and again."""

    def over(self, epoch: int) -> bool:
        """Whether it is known that there is no such epoch."""


class _Early(NamedTuple):
    """A touch [start, end) of the file, and where it would be in the next order."""

    spot: Spot
    start: int
    end: int
    now: int  # ns


class PlannedReader:
    """One reader's way through one file, epoch after epoch. Sizes in bytes."""

    #: Whether the order was taken from how it walks, which has to be watched on.
    inferred = False

    def __init__(self, file: FileState, rank: int, source: Source) -> None:
        """``rank``: whose it is, for people."""
        self.file, self.rank, self._source = file, rank, source
        self.epoch = 0
        self.dropped: str | None = None  # why the plan is not followed any more
        self.ended = False  # nothing of it is read any more
        self.active_ns = self.touched_ns = self.said_ns = now = now_ns()
        self.done_items = 0  # of the epochs before
        self.seen: list[tuple[int, int]] = []  # found mapped, and not looked at yet
        self._strays: list[tuple[int, int]] = []  # found mapped, not for this epoch
        self._looked_in = 0  # the epoch in which the last look was
        self._early: list[_Early] = []  # touches that may be of the next epoch
        #: What the scheduler sees: a stream in the coordinate of the order.
        self.stream = Stream(-1, rank, 0, 0, 0, now, now, active=True)
        self.walk: Walk | None = None
        self._next: Walk | None = None
        self._base_bytes = 0  # where this epoch begins in the coordinate of all of them
        self._marks: dict[int, tuple[Walk, int]] = {}  # page -> coordinate, of the milestones
        self._laid: dict[int, dict[int, int]] = {}  # by mapping: milestones laid -> in which round
        self._rounds = 0

    @property
    def how(self) -> str:
        """How the order is known, for people."""
        return self._source.how

    @property
    def over(self) -> bool:
        """Whether there is no order for it, or none any more."""
        return self._source.over(self.epoch)

    @property
    def live(self) -> bool:
        """Whether its order is to be followed now."""
        return (
            not self.dropped and not self.ended and self.look() is not None
            and (not self._through() or not self._source.over(self.epoch + 1))
        )  # fmt: skip

    def _through(self) -> bool:
        return self.walk is not None and self.walk.position_bytes >= self.walk.total_bytes

    def look(self) -> Walk | None:
        """The walk through the present epoch; None while its order is not there."""
        made = self._made(self.epoch)
        if made is not None and self.walk is not None:  # what there was before was a guess
            made.pace_of(self.walk)
            made.said(self.walk.position, now_ns())
        self.walk = made or self.walk
        return self.walk

    def _made(self, epoch: int) -> Walk | None:
        from uffdprefetch.plan.order import Walk

        order = self._source.order(epoch)
        return None if order is None else Walk(order, self.file.size_bytes, armed=True)

    def _upcoming(self) -> Walk | None:
        if self._next is None and not self._source.over(self.epoch + 1):
            self._next = self._made(self.epoch + 1)
        return self._next

    # ---- progress -------------------------------------------------------------------------------

    def saw(self, start: int, end: int, now: int) -> None:
        """A touch of [start, end) of the file by one of its processes."""
        walk = self.look()
        if walk is None or walk.reads_on(start):
            return
        if walk.saw(start, end, now):
            self.active_ns = self.touched_ns = now
            self._early = self._early[1:]
            self._moved(now)
        upcoming = self._upcoming() if walk.stray else None
        if upcoming is not None and self._has_begun(upcoming, start, end, now):
            self._begin_next(now)
            return
        self.dropped = self.dropped or walk.wrong

    def _has_begun(self, upcoming: Walk, start: int, end: int, now: int) -> bool:
        """Whether, with this touch, the next epoch is seen to have begun; if so its walk is where
        the reader is."""
        marked, _ = self._marks.get(start // PAGE_BYTES, (None, 0))
        spot = upcoming.spot(start, end)
        if spot is not None and spot.item not in (early.spot.item for early in self._early):
            self._early.append(_Early(spot, start, end, now))
        near = [e for e in self._early if e.spot.plan_bytes < upcoming.position_bytes + NEAR_BYTES]
        items = sum(early.spot.items for early in near)
        some = len(near) > 1 or any(early.end - early.start > HUGE_BYTES for early in near)
        begun = marked is upcoming or (some and items >= BEGUN_ITEMS)
        if not begun and len(self._early) >= WAY:  # what comes first is mapped still, perhaps
            way = longest_way([early.spot.item for early in self._early])
            if len(way) >= WAY:
                upcoming.said(way[0], self._early[0].now)
                begun = True
        if not begun and len(self._early) < EARLY_MAX:
            return False
        for early in self._early:
            upcoming.saw(early.start, early.end, early.now)
        if marked is upcoming:
            upcoming.saw(start, end, now)
        self._early = []
        return begun or upcoming.position >= BEGUN_ITEMS

    def mapped(self, found: list[tuple[int, int]], now: int) -> bool:
        """What a look has found mapped, and no look before; whether that moved the position."""
        self.seen = [*self.seen, *found][-SEEN_MAX:]
        walk = self.look()
        if walk is None:
            return False
        at = self.epoch, walk.position_bytes
        found, self.seen = self.seen, []
        judge = self._looked_in == self.epoch  # else some of it may be of the epoch before
        self._looked_in = self.epoch
        strays = walk.mapped(found, now, judge)
        self._strays = [*self._strays, *strays][-SEEN_MAX:]
        self._moved(now)
        upcoming = self._upcoming() if self._strays else None
        if upcoming is not None:
            neither = set(upcoming.mapped(self._strays, now))
            strays = [stray for stray in strays if stray in neither]
            self._strays = []
        if upcoming is not None and upcoming.position >= BEGUN_ITEMS:
            self._begin_next(now)
            walk = upcoming
        elif judge and not self.inferred:  # which is compared with page tables anyway
            walk.looked(found, strays)
        self.dropped = self.dropped or walk.wrong
        moved = at != (self.epoch, walk.position_bytes)
        self.active_ns = now if moved else self.active_ns
        return moved

    def said(self, items: int, now: int) -> None:
        """So many items of the present epoch have been read."""
        walk = self.look()
        if walk is not None:
            self.active_ns = self.said_ns = now
            walk.said(items, now)
            self._moved(now)

    def _begin_next(self, now: int) -> None:
        before, upcoming = self.walk, self._next
        assert before is not None and upcoming is not None
        self.done_items += before.position
        self._base_bytes += before.total_bytes
        self.epoch += 1
        upcoming.pace_of(before)
        self.walk, self._next = upcoming, None
        self._early = []
        self._moved(now)

    def _moved(self, now: int) -> None:
        assert self.walk is not None
        at = self._base_bytes + self.walk.position_bytes
        self.stream.advance(self.stream.position_bytes, at, now)

    # ---- what is needed -------------------------------------------------------------------------

    def due(self, ahead_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(start, end, coordinate) of what is to be warmed so that ``ahead_bytes`` of the order lie
        ahead of the reader; with the end of this epoch comes the next one's beginning."""
        walk = self.walk
        if walk is None:
            return
        for piece in walk.due(ahead_bytes):
            yield piece.start, piece.end, self._base_bytes + piece.need_bytes
        left = walk.total_bytes - walk.position_bytes
        upcoming = self._upcoming() if ahead_bytes > left and not walk.wrong else None
        if upcoming is not None:
            base = self._base_bytes + walk.total_bytes
            for piece in upcoming.due(ahead_bytes - left):
                yield piece.start, piece.end, base + piece.need_bytes

    def milestones(self, region: Region) -> set[int]:
        """Pages of the region whose touch says how far the reader is: of what has been sent, the
        first page of an item each DISTANCE_MIN_BYTES of the order."""
        walk, step = self.walk, DISTANCE_MIN_BYTES
        if walk is None:
            return set()
        first = -(-walk.position_bytes // step) * step
        last = min(walk.sent_bytes, first + MILESTONES_MAX * step)
        self._marks = {}
        for at in range(first, last, step):
            for page in region.span.pages([walk.offset_at(at)]):
                self._marks[page] = walk, at
        upcoming = self._next
        if upcoming is not None:  # near the end: something of it has been sent
            last = min(upcoming.sent_bytes, MILESTONES_MAX * step)
            for at in range(0, last, step):
                for page in region.span.pages([upcoming.offset_at(at)]):
                    self._marks.setdefault(page, (upcoming, at))
        return set(self._marks)

    def note_laid(self, region: Region) -> None:
        """The agent has been told to lay what could be laid."""
        before = self._laid.get(id(region), {})
        self._rounds += 1
        laid = self._marks.keys() & region.laid
        self._laid[id(region)] = {page: before.get(page, self._rounds) for page in laid}

    def touched_mark(self, region: Region, page: int) -> None:
        """A checkpoint has told. What was laid with it or before is laid, then, since the agent
        does one thing after the other; and who was here has not been there yet: so a touch of what
        lies ahead will show. Of several processes that is not known."""
        rounds = self._laid.get(id(region), {})
        if len(self._laid) != 1 or page not in rounds or page not in self._marks:
            return
        walk, here = self._marks[page]
        for other, number in rounds.items():
            its, at = self._marks.get(other, (None, 0))
            if number <= rounds[page] and its is walk and at > here:
                walk.arm(at)

    def left(self, region: Region) -> None:
        """A mapping has gone."""
        self._laid.pop(id(region), None)

    def future(self, blocks: npt.NDArray[np.int64], block_bytes: int) -> npt.NDArray[np.float64]:
        """Plan bytes until each of these blocks of the file is needed, inf: not as far as is
        known."""
        import numpy as np

        assert self.walk is not None
        away: npt.NDArray[np.float64] = self.walk.future(blocks, block_bytes)
        upcoming = self._upcoming()
        never = np.flatnonzero(np.isinf(away))
        if upcoming is not None and len(never):
            left = self.walk.total_bytes - self.walk.position_bytes
            away[never] = left + upcoming.future(blocks[never], block_bytes)
        return away

    def knows(self, blocks: npt.NDArray[np.int64], block_bytes: int) -> npt.NDArray[np.bool_]:
        """Whether its present orders have a byte in each of these blocks."""
        assert self.walk is not None
        known: npt.NDArray[np.bool_] = self.walk.knows(blocks, block_bytes)
        upcoming = self._upcoming()
        return known if upcoming is None else known | upcoming.knows(blocks, block_bytes)

    def describe(self) -> dict[str, Any]:
        """For the summary."""
        walk = self.walk
        return {
            "file": self.file.path,
            "rank": self.rank,
            "how": self.how,
            "epoch": self.epoch,
            "items": None if walk is None else walk.items,
            "read_items": 0 if walk is None else self.done_items + walk.position,
            "sent_bytes": 0 if walk is None else self._base_bytes + walk.sent_bytes,
            "dropped": self.dropped,
        }


class Belongs(Protocol):
    """Which readers a mapping may have."""

    def readers(self, client: Client, region: Region) -> list[PlannedReader]: ...

    def pending(self, client: Client, region: Region) -> bool:
        """Whether one may still come."""

    def mapped(self, client: Client) -> None:
        """A process has mapped a file."""


class Plans:
    """All planned readers of a service."""

    def __init__(self, scheduler: Scheduler, ledger: Ledger) -> None:
        self._scheduler, self._ledger = scheduler, ledger
        self.sources: list[Belongs] = []
        self.all: list[PlannedReader] = []
        self._ended: list[dict[str, Any]] = []

    def add(self, reader: PlannedReader) -> None:
        """A reader is known of from now on."""
        self.all.append(reader)

    def remove(self, reader: PlannedReader) -> None:
        """Its order has ended, or another one has taken its place."""
        if reader in self.all:
            self.all.remove(reader)
            self._scheduler.forget(reader.stream)
            reader.ended = True
            self._ended = [*self._ended[-ENDED_MAX + 1 :], reader.describe()]

    def reader(self, client: Client, region: Region) -> PlannedReader | None:
        """Who reads a mapping in a known order now: by the first source that knows; of several (a
        training and a validation set in one file) the one that has gone on last."""
        for source in self.sources:
            found = [reader for reader in source.readers(client, region) if reader.live]
            if found:
                return max(found, key=lambda reader: reader.active_ns)
        return None

    def pending(self, client: Client, region: Region) -> bool:
        """Whether a mapping's order may become known soon."""
        return any(source.pending(client, region) for source in self.sources)

    def mapped(self, client: Client) -> None:
        """A process has mapped a file."""
        for source in self.sources:
            source.mapped(client)

    def left(self, region: Region) -> None:
        """A mapping has gone."""
        for reader in self.all:
            reader.left(region)

    def touch(self, client: Client, region: Region, start: int, end: int, at_ns: int) -> bool:
        """A touch of [start, end) of the file by a reader that may have a plan; whether it has."""
        reader = self.reader(client, region)
        if reader is None or reader.walk is None:
            return False
        reader.saw(start, end, at_ns)
        reader.touched_mark(region, start // PAGE_BYTES)
        self._judge(reader, region)
        return True

    def _judge(self, reader: PlannedReader, region: Region) -> None:
        if reader.dropped:
            self._scheduler.forget(reader.stream)
            self._ledger.degrade(
                f"{region.file.path}: rank {reader.rank}: the order known from {reader.how} is not "
                f"followed any more: {reader.dropped}"
            )

    def looked(
        self, client: Client, region: Region, found: list[tuple[int, int]], now: int
    ) -> bool:
        """Ranges that a look into a page table has found mapped, and no look before; whether the
        reader has moved. They come in the order of the file and long after: where checkpoints
        tell, those tell more, unless none does."""
        reader = self.reader(client, region)
        if reader is None:
            return False
        quiet = now - reader.touched_ns >= QUIET_NS
        if region.verdict != Verdict.PAGE_TABLES and not quiet:
            reader.seen = [*reader.seen, *found][-SEEN_MAX:]
            return False
        moved = reader.mapped(found, now)
        self._judge(reader, region)
        return moved

    def plan(self, reader: PlannedReader, storage: Storage, allowed_bytes: int) -> None:
        """Hand on what a reader needs next."""
        from uffdprefetch.plan.order import lookahead_bytes

        if reader.walk is None:
            return
        ahead = lookahead_bytes(reader.walk, storage, allowed_bytes, reader.stream.boost)
        for start, end, need in reader.due(ahead):
            self._scheduler.want(reader.file, reader.stream, start, end, need)

    def describe(self) -> list[dict[str, Any]]:
        """For the summary: those that have ended (the last ENDED_MAX), and the others."""
        return self._ended + [r.describe() for r in self.all if r.walk is not None or r.dropped]
