# SPDX-License-Identifier: Apache-2.0
"""Everything of a service that has to do with known orders, in one piece for its loop."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.orders.indexer_client import IndexerClient
from uffdprefetch.orders.indices import Indices
from uffdprefetch.readers.announced_files import FileReaders
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.readers.known_order import KnownOrders
from uffdprefetch.readers.order_sources import Announcements, PlanFile
from uffdprefetch.readers.planned_files import PlannedFiles, say_unread
from uffdprefetch.readers.strides import Strides
from uffdprefetch.service.planned_readers import PlannedReaders
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import readers_of
from uffdprefetch.warm.scheduler import Scheduler

if TYPE_CHECKING:
    from uffdprefetch.readers.learned_plans import LearnedPlans


class OrderService:
    """The helper process, the plan file, what is announced, and the readers that follow them."""

    def __init__(
        self, socket_path: str, config: Config, poll: select.epoll, scheduler: Scheduler,
        ledger: Ledger, clock: Clock, arbiter: Arbiter, clients: Mapping[int, Client],
        room_bytes: Callable[[FileState], int], allowed_bytes: Callable[[bool], int],
        file_readers: FileReaders | None,
    ) -> None:  # fmt: skip
        """``room_bytes``, ``allowed_bytes``: see KnownOrders; ``file_readers``: who reads small
        files ahead. Raises OSError when there is no place for the helper's files."""
        came = arbiter.orders_came
        self.resolver = IndexerClient(socket_path, config.orders.plan, poll)
        self.known_orders = KnownOrders(
            scheduler, ledger, clock, room_bytes, allowed_bytes, arbiter.add
        )
        self.announcements = Announcements(
            self.resolver, self.known_orders, ledger, lambda: list(clients.values()), came,
            file_readers,
        )  # fmt: skip
        self.known_orders.sources.append(self.announcements)
        if config.orders.plan is not None:
            self.known_orders.begin()
            plan = PlanFile(self.resolver, self.known_orders, ledger, came)
            self.known_orders.sources.insert(0, plan)
        self._planned: PlannedReaders | None = None
        if config.orders.plan is not None and file_readers is not None:
            files = PlannedFiles(self.resolver, file_readers, ledger, came)
            self._planned = PlannedReaders(files)
        if config.policy in ("auto", "stride"):
            strides = Strides(
                Indices(self.resolver, came), self.known_orders, ledger,
                lambda: readers_of(clients), always=config.policy == "stride",
            )  # fmt: skip
            self.known_orders.sources.append(strides)
            arbiter.add(strides)
        #: `--learn`; None: without.
        self.learned: LearnedPlans | None = None
        if config.learn.name and config.engine != "off":
            from uffdprefetch.readers.learned_plans import LearnedPlans

            self.learned = LearnedPlans(self.resolver, self.known_orders, ledger, came)
            self.known_orders.sources.append(self.learned)  # who knows better is asked before
            arbiter.on_seen = self.learned.saw
        if config.orders.plan is not None or config.policy == "stride":
            self.resolver.start()  # the job has yet to start
        if config.orders.plan is not None and file_readers is None:
            say_unread(self.resolver, ledger)

    def follow(self, pids: frozenset[int], now_ns: int) -> None:
        """Once a turn, where files are read ahead. ``pids``: see PlannedReaders."""
        if self._planned is not None:
            self._planned.step(pids, now_ns)

    def say_unopened(self) -> None:
        """A job has ended: see PlannedFiles."""
        if self._planned is not None:
            self._planned.files.say_unopened()

    @property
    def due_ns(self) -> int | None:
        """When to look again; None: when something is told."""
        return self.announcements.next_ns if self.announcements.any else None

    def close(self) -> None:
        """End the helper."""
        self.resolver.close()
