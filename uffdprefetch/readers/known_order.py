# SPDX-License-Identifier: Apache-2.0
"""Readers whose order is known: what they need next is warmed in that order.

predict/order/cursor.py knows where a reader is in its order and what it needs next; this knows
which mapping is whose, hands its pieces to the scheduler, and says when a plan was wrong. A reader
with a plan has no windows of its own streams. Where the orders come from: readers/order_sources.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.predict.order.epochs import Epochs, Source
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.predictor import Observation
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.region import Region
from uffdprefetch.warm.consumer import Consumer, OrderConsumer, PrefetchRange
from uffdprefetch.warm.scheduler import Scheduler

if TYPE_CHECKING:  # it brings numpy, which a service without a plan spares
    from uffdprefetch.predict.order.cursor import OrderCursor

#: Ranges that are kept until its order is there.
SEEN_MAX = 4096
#: Silence of the pool's faults after which page tables tell instead.
QUIET_NS = 100_000_000
#: A node reads all of a file where its orders are as long as this part of it: what is read besides
#: costs less than requests that are shorter than storage would answer at once.
ALL_SHARE = 0.9
#: Readers that are told of one by one when they have ended.
ENDED_MAX = 256


class PlannedReader:
    """One reader on its way through one file in a known order. Sizes in bytes."""

    #: Whether the order was taken from how it walks, which has to be watched on.
    inferred = False

    def __init__(self, file: FileState, rank: int, source: Source, clock: Clock = CLOCK) -> None:
        """``rank``: whose it is, for people."""
        self._clock = clock
        self.file, self.rank = file, rank
        self.epochs = Epochs(source, file.size_bytes)
        self.dropped: str | None = None  # why the plan is not followed any more
        self.ended = False  # nothing of it is read any more
        self.active_ns = self.touched_ns = self.said_ns = now = self._clock.now_ns()
        self.seen: list[tuple[int, int]] = []  # found mapped, and not looked at yet
        self.consumer = OrderConsumer(rank, now)

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
    def walk(self) -> OrderCursor | None:
        """The walk through the present epoch, if its order was there at the last look()."""
        return self.epochs.walk

    def look(self) -> OrderCursor | None:
        """The walk through the present epoch; None while its order is not there."""
        return self.epochs.look(self._clock.now_ns())

    # ---- progress -------------------------------------------------------------------------------

    def saw(self, start: int, end: int, now: int) -> None:
        """A touch of [start, end) of the file by one of its processes."""
        if self.epochs.saw(start, end, now):
            self.active_ns = self.touched_ns = now
            self._moved(now)
        self._judge()

    def mapped(self, found: list[tuple[int, int]], now: int) -> bool:
        """What a look has found mapped, and no look before; whether that moved the position."""
        self.seen = [*self.seen, *found][-SEEN_MAX:]
        if self.look() is None:
            return False
        found, self.seen = self.seen, []
        # an inferred order is compared with page tables anyway
        moved = self.epochs.mapped(found, now, judge=not self.inferred)
        self.active_ns = now if moved else self.active_ns
        self._moved(now)
        self._judge()
        return moved

    def said(self, items: int, now: int) -> None:
        """So many items of the present epoch have been read."""
        walk = self.look()
        if walk is not None:
            self.active_ns = self.said_ns = now
            walk.said(items, now)
            self._moved(now)

    def _moved(self, now: int) -> None:
        self.consumer.advance(self.epochs.position_bytes, now)

    def _judge(self) -> None:
        if self.walk is not None:
            self.dropped = self.dropped or self.walk.wrong

    def describe(self) -> dict[str, Any]:
        """For the summary."""
        walk, epochs = self.walk, self.epochs
        return {
            "file": self.file.path,
            "rank": self.rank,
            "how": self.how,
            "epoch": self.epoch,
            "items": None if walk is None else walk.items,
            "read_items": 0 if walk is None else epochs.done_items + walk.position,
            "sent_bytes": 0 if walk is None else epochs.base_bytes + walk.sent_bytes,
            "dropped": self.dropped,
        }


class OrderSource(Protocol):
    """Which readers a mapping may have."""

    def readers(self, client: Client, region: Region) -> list[PlannedReader]: ...

    def pending(self, client: Client, region: Region) -> bool:
        """Whether one may still come."""

    def mapped(self, client: Client) -> None:
        """A process has mapped a file."""


class KnownOrders:
    """All readers of a service whose order is known. See readers/predictor.Predictor."""

    name = "known order"
    policies = frozenset({"auto", "fixed", "stride", "plan"})

    def __init__(self, scheduler: Scheduler, ledger: Ledger, clock: Clock = CLOCK) -> None:
        self._scheduler, self._ledger = scheduler, ledger
        self.clock = clock  # of its readers as well
        self.sources: list[OrderSource] = []
        #: Whether any source has ever had something to say; until then nobody need ask.
        self.possible = False
        self.room_bytes: Callable[[FileState], int] = lambda _: 0  # for a file in memory
        self.allowed_bytes: Callable[[Region], int] = lambda _: 0  # ahead of a reader
        self.all: list[PlannedReader] = []
        self._ended: list[dict[str, Any]] = []

    def add(self, reader: PlannedReader) -> None:
        """A reader is known of from now on."""
        self.all.append(reader)
        self.possible = True

    def remove(self, reader: PlannedReader) -> None:
        """Its order has ended, or another one has taken its place."""
        if reader in self.all:
            self.all.remove(reader)
            self._scheduler.forget(reader.consumer)
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

    def touch(self, client: Client, region: Region, start: int, end: int, at_ns: int) -> bool:
        """A touch of [start, end) of the file by a reader that may have a plan; whether it has."""
        reader = self.reader(client, region)
        if reader is None or reader.walk is None:
            return False
        reader.saw(start, end, at_ns)
        self._judge(reader, region)
        return True

    def _judge(self, reader: PlannedReader, region: Region) -> None:
        if reader.dropped:
            self._scheduler.forget(reader.consumer)
            self._ledger.degrade(
                f"{region.file.path}: rank {reader.rank}: the order known from {reader.how} is not "
                f"followed any more: {reader.dropped}"
            )

    def observe(self, client: Client, region: Region, seen: Observation) -> None:
        """See Predictor. What a scan has found comes by scanned()."""
        if seen.told:
            self.touch(client, region, seen.start, seen.end, seen.at_ns)

    def scanned(
        self, client: Client, region: Region, found: list[tuple[int, int]], now: int
    ) -> bool:
        """Ranges that a page-table scan has found mapped, and none before, in the order of the
        file; whether the reader has moved."""
        reader = self.reader(client, region)
        if reader is None:
            return False
        quiet = now - reader.touched_ns >= QUIET_NS
        if region.verdict == ServingMode.POOL and not quiet:
            reader.seen = [*reader.seen, *found][-SEEN_MAX:]
            return False
        moved = reader.mapped(found, now)
        self._judge(reader, region)
        return moved

    def confidence(self, client: Client, region: Region, now_ns: int) -> float:
        """See Predictor: an order that is followed is known."""
        return float(region.order.followed)

    def demand(
        self, client: Client, region: Region, now_ns: int
    ) -> Iterator[tuple[Consumer, PrefetchRange]]:
        """See Predictor: the next items of the order."""
        from uffdprefetch.predict.order.cursor import lookahead_bytes

        reader = region.order.reader
        if reader is None or reader.walk is None:
            return
        pooled = region.verdict == ServingMode.POOL
        storage, boost = self._scheduler.meter.storage, reader.consumer.feedback.boost
        ahead = lookahead_bytes(reader.walk, storage, self.allowed_bytes(region), boost)
        whole = self._all_is_read(reader.file)
        for start, end, need in reader.epochs.due(ahead):
            yield (
                reader.consumer,
                PrefetchRange(reader.file, start, end, need, whole=whole, pooled=pooled),
            )

    def dismissed(self, client: Client, region: Region) -> None:
        """See Predictor: an order that has ended, or was wrong, has nothing queued."""

    def left(self, region: Region) -> None:
        """See Predictor: orders are of readers, not of mappings."""

    def _all_is_read(self, file: FileState) -> bool:
        """Whether this node's readers, all together, read nearly all of a file, for which there is
        room: then what lies beside a record is not read in vain."""
        if not file.unit_bytes or file.size_bytes > self.room_bytes(file):
            return False
        orders = sum(
            one.walk.total_bytes for one in self.all if one.file is file and one.walk is not None
        )
        return orders >= ALL_SHARE * file.size_bytes

    def describe(self) -> list[dict[str, Any]]:
        """For the summary: those that have ended (the last ENDED_MAX), and the others."""
        return self._ended + [r.describe() for r in self.all if r.walk is not None or r.dropped]
