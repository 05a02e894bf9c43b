# SPDX-License-Identifier: Apache-2.0
"""Who says what a mapping's reader will need: of all predictors the one that is surest.

Of every mapping that has gone on since the last turn the predictor in charge is asked; what it
wants goes to the scheduler. Bulk warm is of files and not of readers: it goes on by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from uffdprefetch.base.clock import MS, Clock
from uffdprefetch.readers.bulk import Bulk
from uffdprefetch.readers.known_order import KnownOrders
from uffdprefetch.readers.predictor import Observation, Predictor
from uffdprefetch.readers.windows import Windows
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.region import Region
from uffdprefetch.warm.placement import CheckpointPlacer
from uffdprefetch.warm.scheduler import Scheduler

#: Interval at which an announced order is asked: what lies ahead lasts much longer.
PLAN_NS = 10 * MS


class Arbiter:
    """The predictors of one service. Its thread calls everything here."""

    def __init__(
        self, policy: str, scheduler: Scheduler, ledger: Ledger, layout: CheckpointPlacer,
        bulk: Bulk, windows: Windows, clock: Clock, clients: Callable[[], list[Client]],
    ) -> None:  # fmt: skip
        self._scheduler, self._ledger, self._layout, self._bulk = scheduler, ledger, layout, bulk
        self._policy, self._clock, self._clients = policy, clock, clients
        self.windows = windows
        self.orders: KnownOrders | None = None
        #: The first of those that are equally sure is taken.
        self.predictors: list[Predictor] = [windows]
        self._due: dict[int, tuple[Client, Region]] = {}
        self._in_charge: dict[int, Predictor] = {}  # by region

    def use_orders(self, orders: KnownOrders) -> None:
        """The orders of some readers are known, or may be told."""
        self.orders = orders
        self.predictors.append(orders)

    # -------------------------------------------------------------- what is told

    def observe(self, client: Client, region: Region, seen: Observation) -> None:
        """A process has touched something, outside of the pool."""
        self.due(client, region)
        if region.order.announced:
            self.gone_on(client, region, seen)
        else:
            self.windows.observe(client, region, seen)
        if self.orders is not None and self.orders.possible:
            self.orders.observe(client, region, seen)
        self.tell_others(client, region, seen)

    def tell_others(self, client: Client, region: Region, seen: Observation) -> None:
        """A touch is told to the predictors that are neither windows nor known orders; of these the
        pool's faults are told by service/pool_bridge.py, in an order of their own."""
        for predictor in self.predictors:
            if predictor is not self.windows and predictor is not self.orders:
                predictor.observe(client, region, seen)

    def gone_on(self, client: Client, region: Region, seen: Observation) -> None:
        """Progress of a reader whose order is known: its walks would say nothing more."""
        self.due(client, region)
        self._ledger.touch(region.table.rank, seen.start, seen.at_ns)
        self._bulk.saw_planned(region, seen.start, seen.end, seen.at_ns)
        if seen.told:
            region.file.mark_used(seen.start, seen.end)
            region.scan.mapped.add(seen.start, seen.end)

    def scanned(self, client: Client, region: Region, found: list[tuple[int, int]]) -> None:
        """All that one page-table scan has found, in the order of the file."""
        orders = self.orders
        if orders is None or not orders.possible:
            return
        if orders.scanned(client, region, found, self._clock.now_ns()):
            self._due[id(region)] = client, region

    def due(self, client: Client, region: Region) -> None:
        """Ask of this mapping in the next turn."""
        self._due[id(region)] = client, region

    def orders_came(self) -> None:
        """Orders have come, or readers have said how far they are: every mapping is looked at."""
        for client in self._clients():
            for region in client.regions.values():
                self.due(client, region)

    def left(self, region: Region) -> None:
        """The mapping is gone from our management."""
        self._due.pop(id(region), None)
        self._in_charge.pop(id(region), None)
        for predictor in self.predictors:
            predictor.left(region)

    # -------------------------------------------------------------- what is wanted

    @property
    def due_ns(self) -> int | None:
        """When plan() is due though nothing happens."""
        return min((r.order.planned_ns + PLAN_NS for _, r in self._due.values()), default=None)

    @property
    def idle(self) -> bool:
        """Whether plan() would do nothing."""
        return not self._due

    def plan(self) -> None:
        """Ask of every mapping that is due what is needed next, and have it read."""
        due, self._due = self._due, {}
        now = self._clock.now_ns()
        for client, region in due.values():
            if region.file.changed or region.detaching:
                continue
            if region.order.announced and now - region.order.planned_ns < PLAN_NS:
                self._due[id(region)] = client, region
                continue
            if self.orders is not None and self.orders.possible:
                self._note_order(client, region, now)
            else:
                region.order.planned_ns = now
            chosen = self._surest(client, region, now)
            before = self._in_charge.get(id(region), chosen)
            if before is not None and before is not chosen:
                before.dismissed(client, region)
            if chosen is None:
                self._in_charge.pop(id(region), None)
            else:
                self._in_charge[id(region)] = chosen
                for consumer, wanted in chosen.demand(client, region, now):
                    self._scheduler.want(consumer, wanted)
            self._layout.refresh(client, region)

    def _surest(self, client: Client, region: Region, now: int) -> Predictor | None:
        """Of those that the run's policy allows; None: of none of them."""
        best, most = None, 0.0
        for predictor in self.predictors:
            if self._policy not in predictor.policies:
                continue
            if predictor is self.orders and not self.orders.possible:
                continue
            sure = predictor.confidence(client, region, now)
            if sure > most:
                best, most = predictor, sure
        return best

    def _note_order(self, client: Client, region: Region, now: int) -> None:
        """Whose order the reader follows now, and whether one may become known."""
        order, orders = region.order, self.orders
        assert orders is not None
        reader = orders.reader(client, region)
        if reader is None and order.reader is not None and not order.reader.dropped:
            self._bulk.forget(region)  # it has come to its end: what follows is another matter
        order.reader, order.followed, order.planned_ns = reader, reader is not None, now
        if reader is not None:
            order.last_progress_ns = max(reader.touched_ns, reader.said_ns)
        pending = orders.pending(client, region)
        order.pending_since_ns = (order.pending_since_ns or now) if pending else 0
        self._bulk.planned(region, order.followed or pending)
