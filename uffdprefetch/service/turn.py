# SPDX-License-Identifier: Apache-2.0
"""What the service does between two waits, in the order that each step needs of those before it
(docs/architecture.md, "One turn")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uffdprefetch.base.clock import CLOCK, MS
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.service.freshness import Freshness
from uffdprefetch.service.observe import Observer
from uffdprefetch.service.peers import Peers
from uffdprefetch.service.reads import FollowedReads
from uffdprefetch.service.threads import Threads
from uffdprefetch.service.told import Told
from uffdprefetch.service.waits import Waits
from uffdprefetch.service.writers import Writers

if TYPE_CHECKING:
    from uffdprefetch.service.known_orders import OrderService

HOUSEKEEPING_NS = 1000 * MS
#: What may lie ahead is asked again when this part of it has been read since: meanwhile the job may
#: have taken the memory.
ASK_SHARE = 0.25


class Turn:
    """Of one service, whose thread calls everything here."""

    def __init__(
        self, core: Coordinator, threads: Threads, peers: Peers, told: Told, observer: Observer,
        freshness: Freshness, waits: Waits, orders: OrderService | None,
        reads: FollowedReads | None,
    ) -> None:  # fmt: skip
        self._core, self._threads, self._peers, self._told = core, threads, peers, told
        self._observer, self._freshness, self._waits = observer, freshness, waits
        self._orders, self._reads = orders, reads
        self.writers = Writers(core.table, core.mappings, freshness.let_in)
        self._housekeeping_ns = self._next_pump_ns = 0

    def due_ns(self, now: int) -> int:
        """When the next one is though nothing happens."""
        due = min(self._housekeeping_ns, self._observer.due_ns, self._freshness.due_ns)
        for at in (self._next_pump_ns, self._core.table.look_ns, self._told.due_ns):
            due = min(due, at) if at else due
        orders_ns = self._orders.due_ns if self._orders is not None else None
        reads_ns = self._reads.due_ns if self._reads is not None else None
        due = min(at for at in (due, self._core.due_ns, orders_ns, reads_ns) if at is not None)
        if self._core.pool is not None:
            due = min(due, now + uffd_pool.TICK_NS)
            if self._core.pool.processes.orphans:
                due = min(due, self._core.pool.processes.orphans_due_ns(now))
        for client in self._core.mappings.clients.values():
            for region in client.regions.values():
                if not region.agent.detaching:
                    due = min(due, region.scan.due_ns, self._waits.due_ns)
        return due

    def take(self) -> None:
        """What sockets have said is done: the rest of it."""
        core, scheduler = self._core, self._core.scheduler
        if self._orders is not None:  # what has ended first, then what was touched since
            self._orders.announcements.look(CLOCK.now_ns())
        for client in core.mappings.clients.values():
            core.events.take(client, client.ring.drain())
        self._look_at_pool()
        scheduler.reap()
        if core.windows.read_since_bytes > ASK_SHARE * core.windows.allowed_bytes:
            self._ask_memory()
        self._threads.opener.step()
        now = CLOCK.now_ns()
        if core.table.waits or 0 < core.table.look_ns <= now:
            core.table.look(now)
        self._observer.look(self._peers.launchers.jobs(), now)
        if self._threads.learning is not None:
            self._threads.learning.step(now)
        if self._reads is not None:
            self._reads.step(now)
            if self._orders is not None:
                self._orders.follow(self._reads.processes, now)
        core.look(now)
        self._freshness.step(now)
        self._waits.step(core.mappings.clients)
        if now >= self._housekeeping_ns:
            self._housekeep(now)
        elif self.writers.waiting:
            self.writers.look()
        core.plan()
        core.plan_evictions(CLOCK.now_ns())
        wait = scheduler.pump(CLOCK.now_ns())
        self._next_pump_ns = CLOCK.now_ns() + wait if wait else 0
        self._told.step(now)
        self._tell_agents()

    def _look_at_pool(self) -> None:
        pool = self._core.pool
        if pool is None:
            return
        pool.pool.alive()
        if pool.processes.orphans:
            pool.processes.look_for_orphans()
        if self._core.bridge is not None:
            self._core.bridge.take_events()

    def _tell_agents(self) -> None:
        """Those whose sockets were full."""
        for fd, client in list(self._core.mappings.clients.items()):
            if client.agent.waiting:
                client.agent.flush()
            if client.agent.gone:
                self._peers.drop_client(fd, client)

    def _housekeep(self, now: int) -> None:
        """Once a second."""
        is_first = not self._housekeeping_ns
        self._housekeeping_ns = now + HOUSEKEEPING_NS
        self._peers.housekeep(now)
        for client in self._core.mappings.clients.values():
            client.agent.look_for_lost_rights()
        self._told.sample()
        self._ask_memory()
        if self._core.pool is not None:
            self._core.pool.housekeep()
        self._told.tick(now, is_first)
        self.writers.look()
        self._core.refresh_all()

    def _ask_memory(self) -> None:
        windows = self._core.windows
        if windows.ask_memory(sum(file.size_bytes for file in self._core.table.files.values())):
            limit = windows.allowed_by.words
            self._core.ledger.degrade(
                f"less is read ahead than --budget allows: {limit} leaves no more"
            )
