# SPDX-License-Identifier: Apache-2.0
"""Readers whose order is known: what they need next is warmed in that order.

predict/order/cursor.py knows where a reader is in its order and what it needs next; this knows
which mapping is whose, hands its pieces to the scheduler, and says when a plan was wrong. A reader
with a plan has no windows of its own streams. Where the orders come from: readers/order_sources.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from uffdprefetch.base.clock import CLOCK, MS, Clock
from uffdprefetch.base.record import dataclass
from uffdprefetch.predict.bounds import DECIDE_NS, ENTRIES_MAX
from uffdprefetch.predict.order.epochs import Epochs, Source
from uffdprefetch.predict.order.guard import OrderGuard
from uffdprefetch.predict.order.worth import AskedInOrder
from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.streams import DENSITY, Stream
from uffdprefetch.predict.window import LOOKAHEAD_MIN_BYTES
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.predictor import Confidence, Predictor
from uffdprefetch.sense.observation import Batch
from uffdprefetch.sense.pagetables import RECENT_NS
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import FILES_MAX, Ledger
from uffdprefetch.state.reader import Process, Reader, Region
from uffdprefetch.warm.consumer import Consumer, OrderConsumer, PrefetchRange
from uffdprefetch.warm.scheduler import Scheduler

if TYPE_CHECKING:  # it brings numpy, which a service without a plan spares
    from uffdprefetch.predict.order.seen import SeenCursor

#: What is asked for at a time, as each record takes the service 15 us in which nothing else goes
#: out: the least lookahead, and so 1.6 GB/s, ...
AT_ONCE_BYTES = LOOKAHEAD_MIN_BYTES
#: ... or this part of the lookahead, some 50 ms of its reader's rate. The rest of a lookahead that
#: has grown follows.
AT_ONCE_PARTS = 8
#: Of a reader whose order is to become known for at most AWAIT_NS no windows, unless it has a
#: stream of at least DENSITY: of records in a shuffled order some follow each other by chance.
AWAIT_NS = 2000 * MS


@dataclass
class LastHeard:
    """When something was last heard of a reader on its way: at all, by a touch, and by what tells
    how far it is (a touch, or its job); ns, 0: never."""

    active_ns: int
    touched_ns: int
    progress_ns: int = 0

    def touched(self, now: int) -> None:
        """A touch was one of its order."""
        self.active_ns = self.touched_ns = self.progress_ns = now

    def said(self, now: int) -> None:
        """Its job has said how far it is."""
        self.active_ns = self.progress_ns = now

    def moved(self, now: int) -> None:
        """A scan has found that it has gone on."""
        self.active_ns = now


class Trial:
    """Of an order that a job has announced: whether what is read ahead in it is read by those who
    follow it."""

    def __init__(self, file: FileState, now: int) -> None:
        self.guard = OrderGuard(now)
        self.followers: dict[int, Reader] = {}  # by pid: whose order it is
        self._file = file

    def judge(self, cursor: SeenCursor, now: int) -> str | None:
        """As far as its followers' page tables tell, or the pool's faults; why it is wrong."""
        wrong = None
        if 4 * cursor.position_bytes <= 3 * cursor.total_bytes:  # near its end others may be read
            wrong = self.guard.stands_still
        if not self.guard.has_samples:
            return wrong
        regions = [r for one in self.followers.values() for r in one.regions.values()]
        if not regions:
            return wrong
        pooled, tables = self._file.pooled, [r for r in regions if r.mode != ServingMode.POOL]

        def touched(start: int, end: int) -> bool:
            in_pool = pooled is not None and pooled.touched(start, end)
            return in_pool or any(r.scan.mapped.overlaps(start, end) for r in tables)

        known_ns = min((region.scan.known_ns for region in tables), default=now)
        return wrong or self.guard.judge(known_ns, touched)


class PlannedReader:
    """One reader on its way through one file in a known order. Sizes in bytes."""

    #: Whether the order was taken from how it walks, which has to be watched on.
    inferred = False

    def __init__(
        self, file: FileState, rank: int, source: Source, clock: Clock = CLOCK,
        ahead_items: int = 0,
    ) -> None:  # fmt: skip
        """``rank``: whose it is, for people; ``ahead_items``: so many it may have read beyond what
        it has told."""
        self._clock, self.ahead_items = clock, ahead_items
        self.file, self.rank = file, rank
        self.epochs = Epochs(source, file.size_bytes)
        self.dropped: str | None = None  # why the plan is not followed any more
        self.ended = False  # nothing of it is read any more
        now = self._clock.now_ns()
        self.heard = LastHeard(now, now)
        self.seen: list[tuple[int, int]] = []  # found mapped, and not looked at yet
        self.consumer = OrderConsumer(rank, now)
        self.trial = Trial(file, now) if source.exact else None
        self.asks_on: Reader | None = None  # for what was kept back of its lookahead

    @property
    def how(self) -> str:
        """How the order is known, for people."""
        return self.epochs.how

    @property
    def over(self) -> bool:
        """Whether there is no order for it, or none any more."""
        return self.epochs.over

    @property
    def live(self) -> bool:
        """Whether its order is to be followed now."""
        followed = not self.dropped and not self.ended and self.look() is not None
        return followed and not self.epochs.through

    @property
    def epoch(self) -> int:
        """The present one, from 0."""
        return self.epochs.number

    @property
    def cursor(self) -> SeenCursor | None:
        """The cursor through the present epoch, if its order was there at the last look()."""
        return self.epochs.cursor

    def look(self) -> SeenCursor | None:
        """The cursor through the present epoch; None while its order is not there."""
        return self.epochs.look(self._clock.now_ns())

    @property
    def rate_bytes_per_second(self) -> float:
        """How fast it reads of this file; its consumer's rate is that of the whole order."""
        cursor = self.cursor
        here = 1.0 if cursor is None else cursor.here_bytes / max(1, cursor.total_bytes)
        return self.consumer.rate.bytes_per_second * here

    # ---- progress -------------------------------------------------------------------------------

    def saw(self, start: int, end: int, now: int) -> None:
        """A touch of [start, end) of the file by one of its processes."""
        if self.epochs.saw(start, end, now):
            self.heard.touched(now)
            self._moved(now)
        self._judge()

    def mapped(self, found: list[tuple[int, int]], now: int, since_ns: int = 0) -> bool:
        """What a scan has found mapped, and none before, the last of them at ``since_ns``; whether
        that moved the position."""
        self.seen = [*self.seen, *found][-ENTRIES_MAX:]
        if self.look() is None:
            return False
        found, self.seen = self.seen, []
        # an inferred order is compared with page tables anyway
        moved = self.epochs.mapped(found, now, judge=not self.inferred)
        if moved:
            self.heard.moved(now)
        self._moved(now)
        if self.trial is not None:
            self.trial.guard.scanned(sum(end - start for start, end in found), since_ns)
        self._judge()
        return moved

    def begins(self, early: list[tuple[int, int]], now: int) -> None:
        """It is followed; ``early``: what was found mapped while that was awaited. Some may be of
        the time before, so the order is not judged by it."""
        cursor = self.look()
        if cursor is not None:
            cursor.mapped(early, now, judge=False)
            self._moved(now)

    def said(self, items: int, now: int) -> None:
        """So many items of the present epoch have been read."""
        cursor = self.look()
        if cursor is not None:
            self.heard.said(now)
            cursor.said(items, now)
            self._moved(now)

    def _moved(self, now: int) -> None:
        self.consumer.advance(self.epochs.position_bytes, now)
        if self.trial is not None:
            self.trial.guard.on_position(self.epochs.position_bytes, now)

    def _judge(self) -> None:
        if self.cursor is not None:
            self.dropped = self.dropped or self.cursor.wrong

    def due(self, ahead_bytes: int) -> Iterator[tuple[int, int, int]]:
        """See Epochs.due()."""
        for start, end, need in self.epochs.due(ahead_bytes):
            if self.trial is not None:
                self.trial.guard.on_issued(start, end, need)
            yield start, end, need

    def judge(self, now: int) -> None:
        """Whether what is prefetched for it is read."""
        if self.trial is not None and self.cursor is not None:
            self.dropped = self.dropped or self.trial.judge(self.cursor, now)

    def note_read(self) -> None:
        """To the file's books: what its job has said to have read was used. A process that ends,
        as the workers of a loader do, takes along what it has touched since the last look."""
        if self.trial is not None and self.cursor is not None and not self.dropped:
            for start, end in self.cursor.behind():
                self.file.blocks.mark_used(start, end)

    def describe(self) -> dict[str, Any]:
        """For the summary."""
        cursor, epochs = self.cursor, self.epochs
        read, items = (0, None) if cursor is None else cursor.items_here
        return {
            "file": self.file.path,
            "rank": self.rank,
            "how": self.how,
            "epoch": self.epoch,
            "items": items,
            "read_items": 0 if cursor is None else epochs.done_items + read,
            "sent_bytes": 0 if cursor is None else epochs.base_bytes + cursor.sent_bytes,
            "dropped": self.dropped,
        }


class OrderSource(Protocol):
    """Which orders a reader may follow."""

    def readers(self, reader: Reader) -> list[PlannedReader]: ...

    def pending(self, reader: Reader) -> bool:
        """Whether one may still come."""

    def mapped(self, client: Process) -> None:
        """A process has mapped a file."""


def needs_order(file: FileState, clock: Clock) -> bool:
    """Whether anything is to be gained by the order in which a file is read."""
    return file.pooled is not None or not file.cache.all.ask(clock)


class KnownOrders(Predictor):
    """All readers of a service whose order is known."""

    name = "known order"
    policies = frozenset({"auto", "fixed", "stride", "plan"})
    every_ns = DECIDE_NS

    def __init__(
        self, scheduler: Scheduler, ledger: Ledger, clock: Clock = CLOCK,
        room_bytes: Callable[[FileState], int] = lambda _: 0,
        allowed_bytes: Callable[[bool], int] = lambda _: 0,
        begins: Callable[[KnownOrders], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """``room_bytes``: how much of a file may be in memory; ``allowed_bytes``: how much may lie
        ahead of a reader (of the pool). ``begins`` hears when a source has something to say for the
        first time: until then nobody need ask."""
        self._scheduler, self._ledger = scheduler, ledger
        self.clock = clock  # of its readers as well
        self.sources: list[OrderSource] = []
        self._begun = False
        self._begins, self._room_bytes, self._allowed_bytes = begins, room_bytes, allowed_bytes
        self.all: list[PlannedReader] = []
        self._followed: dict[Reader, PlannedReader] = {}  # by whom, when they were last asked about
        self._ended: list[dict[str, Any]] = []
        self._asked = AskedInOrder()

    def add(self, order: PlannedReader) -> None:
        """An order is known from now on."""
        self.all.append(order)
        order.consumer.feedback.of_all = self._asked
        self.begin()

    def begin(self) -> None:
        """Orders are to be expected."""
        if not self._begun:
            self._begun = True
            self._begins(self)

    def remove(self, order: PlannedReader) -> None:
        """It has ended, or another one has taken its place."""
        if order in self.all:
            self.all.remove(order)
            order.note_read()
            self._scheduler.forget(order.consumer)
            order.ended = True
            self._ended = [*self._ended[-FILES_MAX + 1 :], order.describe()]

    def order_of(self, reader: Reader) -> PlannedReader | None:
        """The order that a reader follows now: of the first source that knows; of several (a
        training and a validation set in one file) the one that has gone on last."""
        for source in self.sources:
            found = [order for order in source.readers(reader) if order.live]
            if found:
                return max(found, key=lambda order: order.heard.active_ns)
        return None

    def pending(self, reader: Reader) -> bool:
        """Whether a reader's order may become known soon."""
        return any(source.pending(reader) for source in self.sources)

    def attached(self, region: Region) -> bool:
        """See RangeSource: an order begins before the first touch."""
        self.mapped(region.reader.client)
        return True

    def mapped(self, client: Process) -> None:
        """A process has mapped a file."""
        for source in self.sources:
            source.mapped(client)

    # ---- what is told ---------------------------------------------------------------------------

    def observe(self, batch: Batch, streams: Sequence[Stream | None]) -> bool:
        """See Predictor. The touches that a scan has made of what it has found say no more."""
        told, reader = [seen for seen in batch.touches if seen.told], batch.region.reader
        if reader.order.pending_since_ns and not reader.order.followed:
            reader.order.early = [*reader.order.early, *batch.found][-ENTRIES_MAX:]
        for seen in told:
            order = self.order_of(reader)
            if order is not None and order.cursor is not None:
                order.saw(seen.start, seen.end, seen.at_ns)
                if order.trial is not None:
                    order.trial.guard.on_touched(seen.end - seen.start)
                self._judge(order, seen.at_ns)
        return (not told or bool(batch.found)) and self._found(batch)

    def _found(self, batch: Batch) -> bool:
        region, found, now_ns = batch.region, batch.found, batch.at_ns
        order = self.order_of(batch.region.reader)
        if order is None:
            return False
        # in the pool faults tell, and page tables where those are silent
        quiet = now_ns - order.heard.touched_ns >= RECENT_NS
        if region.mode == ServingMode.POOL and not quiet:
            order.seen = [*order.seen, *found][-ENTRIES_MAX:]
            return False
        since_ns = 0 if region.mode == ServingMode.POOL else region.scan.last_end_ns
        moved = order.mapped(found, now_ns, since_ns)
        self._judge(order, now_ns)
        return moved

    def _judge(self, order: PlannedReader, now: int) -> None:
        order.judge(now)
        if order.dropped:
            self._scheduler.forget(order.consumer)
            self._ledger.degrade(
                f"rank {order.rank}: the order known from {order.how} is not "
                f"followed any more: {order.dropped}",
                order.file.path,
            )

    # ---- what is wanted -------------------------------------------------------------------------

    def confidence(self, reader: Reader, now_ns: int) -> Confidence:
        """See Predictor: an order that is followed is known."""
        state, order = reader.order, self.order_of(reader)
        before = self._followed.pop(reader, None)
        if order is None and before is not None and not before.dropped:
            reader.forget_jumps()  # it has come to its end: what follows is another matter
        state.followed = order is not None
        if order is not None:
            self._followed[reader], state.inferred = order, order.inferred
            if state.early:
                order.begins(state.early, now_ns)
            if order.trial is not None:
                order.trial.followers[reader.pid] = reader
            state.last_progress_ns = order.heard.progress_ns
        pending = self.pending(reader)
        state.pending_since_ns = (state.pending_since_ns or now_ns) if pending else 0
        state.early = state.early if pending and order is None else []
        if state.followed:
            return Confidence.KNOWS
        awaits = pending and self._is_awaited(reader, now_ns)
        return Confidence.AWAITS if awaits else Confidence.NONE

    def unmapped(self, region: Region) -> None:
        """See Predictor."""
        order = self._followed.get(region.reader)
        if order is not None and order.trial is not None and region.mode != ServingMode.POOL:
            order.trial.guard.unmapped()

    def left(self, reader: Reader) -> None:
        """See Predictor."""
        self._followed.pop(reader, None)
        for order in self.all:
            followers = order.trial.followers if order.trial is not None else {}
            if followers.get(reader.pid) is reader:
                del followers[reader.pid]

    @staticmethod
    def _is_awaited(reader: Reader, now_ns: int) -> bool:
        """Whether nothing else is to be done for a reader until its order is known: one that jumps
        about meanwhile is not to have the whole file read (readers/whole_files.py)."""
        if reader.access is Access.JUMPS:
            return True
        dense = any(
            stream.settled and (stream.passed.density or 0.0) >= DENSITY
            for stream in reader.table.active()
        )
        return not dense and now_ns - reader.order.pending_since_ns < AWAIT_NS

    def demand(self, reader: Reader, now_ns: int) -> Iterator[tuple[Consumer, PrefetchRange]]:
        """See Predictor: the next items of the order."""
        from uffdprefetch.predict.order.cursor import lookahead_bytes

        order = self._followed.get(reader)
        if order is None or order.cursor is None:
            return
        if not needs_order(order.file, self.clock):
            order.asks_on = None
            return
        pooled = reader.reads_pool
        if not pooled and self._leaves_alone(order, reader, now_ns):
            return
        storage, boost = self._scheduler.meter.storage, order.consumer.feedback.boost
        ahead = lookahead_bytes(
            order.cursor, storage, self._allowed_bytes(pooled), boost, order.ahead_items
        )
        more = max(AT_ONCE_BYTES, ahead // AT_ONCE_PARTS)
        now_ahead = min(ahead, order.epochs.handed_out_bytes + more)
        whole, record = self._all_is_read(order.file), order.trial is not None
        order.asks_on = None
        for start, end, need in order.due(now_ahead):
            order.asks_on = reader if now_ahead < ahead else None
            wanted = PrefetchRange(
                order.file, start, end, need, whole=whole, pooled=pooled, record=record
            )
            yield order.consumer, wanted

    def _leaves_alone(self, order: PlannedReader, reader: Reader, now_ns: int) -> bool:
        """Whether reading ahead would save its reader nothing now. (In the pool, from which a
        reader's own misses are served, too, it is all that reads.)"""
        worth, state = order.consumer.feedback, reader.order
        # what was found of its last order holds for the next one
        worth.until_ns = max(worth.until_ns, state.left_until_ns)
        left = worth.leaves_alone(now_ns, self.clock.cpu_ns())
        state.left_until_ns = worth.until_ns
        if left:
            order.asks_on = None
            self._scheduler.forget(order.consumer)
            self._ledger.leave_alone(
                "left to the kernel: to read ahead in its order takes longer than its misses do",
                order.file.path,
            )
        return left

    def has_more(self, reader: Reader) -> bool:
        """See Predictor: the rest of a lookahead that has grown. Of several processes that read by
        one order (DataLoader workers) one asks for it."""
        order = self._followed.get(reader)
        return order is not None and order.asks_on is reader

    def _all_is_read(self, file: FileState) -> bool:
        """Whether this node's readers, all together, read nearly all of a file, for which there is
        room: what lies beside a record is not read in vain then, and costs less than requests that
        are shorter than storage would answer at once."""
        if not file.call.unit_bytes or file.size_bytes > self._room_bytes(file):
            return False
        orders = sum(
            one.cursor.here_bytes for one in self.all if one.file is file and one.cursor is not None
        )
        return orders >= DENSITY * file.size_bytes

    def note_read(self) -> None:
        """See PlannedReader, of those that have not ended."""
        for order in self.all:
            order.note_read()

    def describe(self) -> list[dict[str, Any]]:
        """For the summary: those that have ended (the last FILES_MAX), and the others."""
        return self._ended + [r.describe() for r in self.all if r.cursor is not None or r.dropped]
