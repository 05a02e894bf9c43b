# SPDX-License-Identifier: Apache-2.0
"""The door to the service's core: how it is built, and what stands in for the kernel derives from.

`cli serve` builds it on the kernel (serve.py), the simulator on a replayed one
(sim/replay/node.py). Nobody else comes in; what others need as well lies below the core
(docs/architecture.md, "The door").
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.config import Config
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.native.memory_limits import Limits
from uffdprefetch.native.uffd import PageTable
from uffdprefetch.predict.checkpoints import DISTANCE_MIN_BYTES
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.state.agent_link import AgentLink
from uffdprefetch.state.client import Client
from uffdprefetch.state.file_call import FileCall
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opened, Opener
from uffdprefetch.state.pending import PendingMappings
from uffdprefetch.state.processes import Watched
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import Region
from uffdprefetch.warm.scheduler import EXTENT_BYTES, READAHEAD_EXTENT_BYTES, Extent, Scheduler
from uffdprefetch.warm.token_bucket import TokenBucket

if TYPE_CHECKING:  # it brings numpy, which a service without a pool spares
    from uffdprefetch.pool.node_pool import NodePool

__all__ = [
    "EXTENT_BYTES", "READAHEAD_EXTENT_BYTES", "AgentLink", "Client", "Coordinator", "FileCall",
    "FileState", "Ledger", "Opened", "PageTable", "PendingMappings", "Region", "Watched", "build",
    "make_pool",
]  # fmt: skip


def build(
    config: Config, workers: uffd.Workers, ledger: Ledger, *,
    publisher: EventPublisher | None = None, opener: Opener | None = None, clock: Clock = CLOCK,
    limits: Limits | None = None,
    on_warmed: Callable[[Extent, uffd.WarmResult], None] | None = None,
    defer: Callable[[int, int, int, int], int | None] | None = None,
    waiting: Callable[[], float] = lambda: 1.0, pool: NodePool | None = None,
) -> Coordinator:  # fmt: skip
    """The core of one service. ``workers``: who reads for it; ``on_warmed``: told of each read that
    has ended; ``defer``: see Scheduler; the others: see Coordinator."""
    bucket = TokenBucket(config.max_rate_bytes_per_second, EXTENT_BYTES)
    grid = config.fixed.distance_bytes or DISTANCE_MIN_BYTES
    scheduler = Scheduler(workers, bucket, grid, on_warmed, ledger.degrade, defer)
    return Coordinator(config, scheduler, ledger, publisher, opener, clock, limits, waiting, pool)


def make_pool(
    config: Config, event_fd: int, ledger: Ledger, clock: Clock = CLOCK,
    limits: Limits | None = None, make: Callable[..., uffd_pool.Pool] = uffd_pool.Pool,
) -> NodePool:  # fmt: skip
    """A pool, for build(). ``event_fd``: written to when something has happened in
    it; ``make``: its C side. Raises OSError, and ImportError without numpy."""
    from uffdprefetch.pool.node_pool import NodePool, is_short

    if is_short(config.budget_bytes):
        importlib.import_module("uffdprefetch.pool.victims")
    elif importlib.util.find_spec("numpy") is None:  # it is loaded later
        raise ImportError("numpy is missing")
    return NodePool(config, event_fd, ledger, clock, limits, make)
