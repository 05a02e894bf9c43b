# SPDX-License-Identifier: Apache-2.0
"""Everything of a service that has to do with known orders, in one piece for its loop."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from uffdprefetch.base.config import Config
from uffdprefetch.orders.indexer_client import IndexerClient
from uffdprefetch.orders.indices import Indices
from uffdprefetch.readers.known_order import KnownOrders
from uffdprefetch.readers.order_sources import Announcements, PlanFile
from uffdprefetch.readers.strides import Strides

if TYPE_CHECKING:
    from uffdprefetch.service.coordinator import Coordinator


class OrderService:
    """The helper process, the plan file, what is announced, and the readers that follow them."""

    def __init__(
        self, socket_path: str, config: Config, coordinator: Coordinator, poll: select.epoll
    ) -> None:
        """Raises OSError when there is no place for the helper's files."""
        self.resolver = IndexerClient(socket_path, config.plan, poll)
        self.known_orders = KnownOrders(
            coordinator.scheduler, coordinator.ledger, coordinator.clock,
            coordinator.room_bytes, coordinator.allowed_bytes, coordinator.arbiter.add,
        )  # fmt: skip
        self.announcements = Announcements(
            self.resolver, self.known_orders, coordinator.ledger,
            lambda: list(coordinator.clients.values()), coordinator.arbiter.orders_came,
        )  # fmt: skip
        coordinator.use_known_orders(self.known_orders)
        self.known_orders.sources.append(self.announcements)
        if config.plan is not None:
            plan = PlanFile(
                self.resolver,
                self.known_orders,
                coordinator.ledger,
                coordinator.arbiter.orders_came,
            )
            self.known_orders.sources.insert(0, plan)
        if config.policy in ("auto", "stride"):
            strides = Strides(
                Indices(self.resolver, coordinator.arbiter.orders_came), self.known_orders,
                coordinator.ledger, coordinator.readers, always=config.policy == "stride",
            )  # fmt: skip
            self.known_orders.sources.append(strides)
            coordinator.arbiter.add(strides)
        if config.plan is not None or config.policy == "stride":
            self.resolver.start()  # the job has yet to start

    @property
    def due_ns(self) -> int | None:
        """When to look again; None: when something is told."""
        return self.announcements.next_ns if self.announcements.any else None

    def close(self) -> None:
        """End the helper."""
        self.resolver.close()
