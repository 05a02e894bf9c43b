# SPDX-License-Identifier: Apache-2.0
"""Wires the core of a service together, and has each part do its step of a turn
(docs/architecture.md).

A turn of the service: events and scans -> the arbiter (readers/arbiter.py) -> ranges -> the
scheduler (warm/scheduler.py) -> checkpoints armed again behind. Nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.config import Config
from uffdprefetch.native.memory_limits import Limits
from uffdprefetch.readers.advice import Advice
from uffdprefetch.readers.ahead import Ahead
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.readers.file_stream import Room
from uffdprefetch.readers.fixed_windows import FixedWindows
from uffdprefetch.readers.next_shard import NextShard
from uffdprefetch.readers.reader_streams import ReaderStreams
from uffdprefetch.readers.stated import StatedRanges
from uffdprefetch.readers.tensor_starts import TensorStarts
from uffdprefetch.sense.checkpoint_events import CheckpointEvents
from uffdprefetch.sense.observation import Batch
from uffdprefetch.sense.pagetables import PagetableScanner
from uffdprefetch.service.attachments import Attachments
from uffdprefetch.service.mappings import ManagedMappings
from uffdprefetch.service.offers import Offers
from uffdprefetch.service.pool_bridge import PoolBridge
from uffdprefetch.service.pooled import PooledMappings
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opener
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import readers_of
from uffdprefetch.warm.placement import CheckpointPlacer
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.windows import Windows

if TYPE_CHECKING:
    from uffdprefetch.pool.node_pool import NodePool
    from uffdprefetch.readers.known_order import KnownOrders


class Coordinator:
    """The parts of one core. ``mappings`` of the job's processes, ``attachments`` as they are
    offered, ``table`` of their files; ``events`` and ``scanner`` tell what is touched, the
    ``arbiter`` what is read ahead, within ``windows``."""

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        ledger: Ledger,
        publisher: EventPublisher | None = None,
        opener: Opener | None = None,
        clock: Clock = CLOCK,
        limits: Limits | None = None,
        waiting: Callable[[], float] = lambda: 1.0,
        pool: NodePool | None = None,
    ) -> None:
        """Without an ``opener``: one that nobody steps, for tests of what needs none. ``waiting``:
        how many readers wait at one time, side by side. ``pool``: of `--engine pool`, mappings that
        can be are served from there."""
        publisher, opener = publisher or EventPublisher(), opener or Opener(-1)
        limits = limits or Limits(config.budget_bytes)
        self.scheduler, self.ledger = scheduler, ledger
        self.windows = Windows(
            config, scheduler, limits, pool.size if pool is not None else None, clock
        )
        self.table = FileTable(
            config, scheduler, ledger, clock, pool.files if pool is not None else None
        )
        layout = CheckpointPlacer(self.windows, ledger, clock)
        streams = ReaderStreams(config.policy, ledger, self.windows)
        self.arbiter = Arbiter(
            config.policy, scheduler, layout, streams, clock,
            lambda: readers_of(self.mappings.clients),
        )  # fmt: skip
        want, room = self.arbiter.want, Room(config, self.windows, limits)
        next_shard = NextShard(self.table, opener, scheduler)
        self.ahead = ahead = Ahead(
            scheduler, ledger, publisher, room, next_shard, self.arbiter.in_charge, want,
            self.windows, waiting,
        )  # fmt: skip
        stated = StatedRanges(
            config, scheduler, want, ledger, room, clock, ahead.said if config.guesses else None
        )
        tensor_starts = TensorStarts(
            config.policy, want, streams, self.windows, opener, ahead.room_bytes
        )
        self.arbiter.listen(stated)
        self.arbiter.listen(tensor_starts)
        self.arbiter.add(FixedWindows(config, scheduler, publisher, self.windows))
        if config.guesses:
            self.arbiter.add(ahead)
            scheduler.on_sent = ahead.sent
            self.arbiter.may_begin = ahead.may_begin

        def seen(batch: Batch) -> None:
            """A look at a mapping has found something."""
            if batch.region.file.blocks.tensor_starts:
                tensor_starts.scanned(batch.region, batch.found)
            self.arbiter.observe(batch)

        pace = ahead.look_ns if config.guesses else None
        self.scanner = PagetableScanner(self.windows, publisher, seen, clock, pace)
        self.events = CheckpointEvents(
            ledger, publisher, lambda batch: self.arbiter.observe(batch), clock
        )
        pooled = None
        if pool is not None:
            scheduler.requests.pool = pool.pool
            pooled = PooledMappings(pool, ledger, is_shared=config.cluster.nodes is not None)
        self.mappings = ManagedMappings(
            config, self.table, self.arbiter, scheduler, self.windows, ledger, clock, pooled
        )
        self.attachments = Attachments(
            config, self.mappings, self.table, opener, self.arbiter,
            Advice(config.policy, self.arbiter, stated, clock), ledger, publisher, pooled,
            Offers(scheduler, ledger, clock) if config.lays_checkpoints else None,
        )  # fmt: skip
        self.bridge = None
        if pool is not None:
            self.bridge = PoolBridge(
                pool, self.mappings, self.arbiter, self.windows, ledger, publisher, next_shard
            )
        self.known_orders: KnownOrders | None = None

    @property
    def pool(self) -> NodePool | None:
        """Of `--engine pool`."""
        return self.bridge.pool if self.bridge is not None else None

    def use_known_orders(self, known_orders: KnownOrders) -> None:
        """The orders of some readers are known, or may be told."""
        self.known_orders = known_orders
        self.arbiter.listen(known_orders)

    # -------------------------------------------------------------- steps of a turn

    def look(self, now: int) -> None:
        """Read the page tables that are due: new streams, and progress where no uffd tells."""
        self.windows.begin_turn()
        clients = self.mappings.clients.values()
        regions = [region for client in clients for region in client.regions.values()]
        known = sum(region.reader.order.announced for region in regions)
        for region in regions:
            if now >= region.scan.due_ns and not region.agent.detaching:
                share = known if region.reader.order.announced else 1
                self.scanner.look(region, now, share, len(regions))
        self.arbiter.step(now)

    @property
    def due_ns(self) -> int | None:
        """When plan() is due though nothing happens."""
        offers = self.attachments.offers
        offered_ns = offers.due_ns if offers is not None else None
        due = [at for at in (offered_ns, self.arbiter.due_ns) if at is not None]
        return min(due, default=None)

    def plan(self) -> None:
        """Windows for every region that was touched since the last turn, checkpoints for those that
        have just been mapped."""
        if self.attachments.offers is not None:
            self.attachments.offers.hand_out()
        if self.arbiter.idle:
            return
        self.windows.count_places(readers_of(self.mappings.clients))
        self.arbiter.plan()

    def plan_evictions(self, now: int) -> None:
        """Have blocks ready to leave the pool, if there is one."""
        if self.bridge is not None:
            self.bridge.plan_evictions(now, self.known_orders)

    def refresh_all(self) -> None:
        """Once a second: what is long ago is forgotten, or armed again."""
        for file in self.table.files.values():
            file.cache.forget_recent()
        for client in self.mappings.clients.values():
            for reader in list(client.readers.values()):
                self.arbiter.refresh(reader)
