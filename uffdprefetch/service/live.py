# SPDX-License-Identifier: Apache-2.0
"""The run as it stands now: makes the snapshot that a watcher gets (protocol/snapshot.py).

Made from what is in memory; it changes nothing. What only a watcher can see without costing the
service anything (block-I/O delay, processes without an agent) is null here and added there
(view/sensors.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from uffdprefetch.base.config import Config
from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.protocol import snapshot as doc
from uffdprefetch.service.live_ranks import PIDS_MAX, LiveRanks
from uffdprefetch.service.sampling import RANKS_MAX, HistoryTick, PoolTrack, Sampling
from uffdprefetch.service.summary import MISS_SENSOR, POOL_MISS_SENSOR, WAIT_SENSOR, degradations
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.warm.scheduler import Scheduler

if TYPE_CHECKING:  # it brings numpy, which a service without orders spares
    from uffdprefetch.readers.known_order import KnownOrders

FILES_MAX = 64
SENSORS = {
    "hit.misses": (
        f"exact: {MISS_SENSOR}; a wait for a page that is being read is none. Of what is read by "
        "calls: blocks of 64 KiB that were read before they were read ahead"
    ),
    "hit.blocks": (
        "sampled: blocks of 64 KiB in the stretch that the rank has walked over and in its page "
        "table (fault-around maps cached neighbours: an upper bound)"
    ),
    "rate": (
        "speed of the position, moving average, half-life 1 s: what a rank skips is in it; that of "
        "a silent reader is bounded by the step in which it is followed"
    ),
    "read": "of that speed the share of blocks of 64 KiB that the rank has touched on its way",
    "readers": "of all ranks, in the last second: blocks as in hit.blocks",
    "wasted": (
        "blocks of 64 KiB that were prefetched, lie where the rank has passed, and are in nobody's "
        "page table"
    ),
    "resident": "cachestat(2) or mincore(2), every few seconds while somebody watches",
    "bandwidth": "finished extents of 1 MiB and more (EWMA; latency: least of the last 64)",
    "checkpoint_wait": WAIT_SENSOR,
}
POOL_SENSORS = SENSORS | {
    "hit.misses": f"exact: {POOL_MISS_SENSOR}",
    "hit.blocks": "blocks of 64 KiB between two touches of a stream, as the pool's faults tell",
}


class LiveNode:
    """What one run makes of the node."""

    def __init__(
        self, config: Config, ledger: Ledger, scheduler: Scheduler,
        allowed: Callable[[], tuple[int, Limit]], history: Sequence[HistoryTick],
        workers_cpu_seconds: Callable[[], float],
        small_files: Callable[[], doc.SmallFilesAhead | None],
    ) -> None:  # fmt: skip
        """``allowed``: how much may lie ahead of the readers, and which limit binds it."""
        self._config, self._ledger, self._scheduler = config, ledger, scheduler
        self._allowed, self._history = allowed, history
        self._workers_cpu_seconds = workers_cpu_seconds
        self.small_files = small_files

    def snapshot(self, ranks: list[doc.Rank]) -> doc.Node:
        """It, as it is now, with these ``ranks``."""
        scheduler, ledger, history = self._scheduler, self._ledger, self._history
        storage, (allowed_bytes, allowed_by) = scheduler.meter.storage, self._allowed()
        workers = self._workers_cpu_seconds()
        cpu = max(0.0, time.process_time() - workers - ledger.started_cpu_seconds)
        return doc.Node(
            bandwidth_bytes_per_second=round(storage.bandwidth_bytes_per_second) or None,
            latency_seconds=scheduler.meter.told_latency,
            readers_bytes_per_second=history[-1].reader_bytes_per_second if history else None,
            max_rate_bytes_per_second=self._config.max_rate_bytes_per_second,
            budget_bytes=self._config.budget_bytes,
            allowed_bytes=allowed_bytes,
            allowed_by=allowed_by.value,
            ahead_bytes=sum(r.ahead_bytes for r in ranks),
            under_way_bytes=scheduler.under_way_bytes,
            under_way_target_bytes=scheduler.target_bytes,
            queued_bytes=scheduler.queued_bytes,
            prefetched_bytes=scheduler.results.prefetched_bytes,
            checkpoint_wait_ns=ledger.checkpoints.fault_wait.quantiles(),
            service_cpu_seconds=round(cpu, 3),
            service_cpu_share=round(cpu / max(ledger.seconds(), 1e-3), 4),
            io_pressure=doc.IoPressure(share=None, why=doc.ADDED_BY_WATCHER),
        )


class Live:
    """Makes snapshots of one run; the service's thread calls everything here."""

    def __init__(
        self, config: Config, run: str, ledger: Ledger, scheduler: Scheduler, table: FileTable,
        sampling: Sampling, ranks: LiveRanks, node: LiveNode, jobs: Callable[[], list[int]],
        pool: PoolTrack | None, orders: KnownOrders | None,
        cluster: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:  # fmt: skip
        """``jobs``: the pids of the commands that run."""
        self._config, self._run = config, run
        self._ledger, self._scheduler, self._table = ledger, scheduler, table
        self.sampling, self._ranks, self._node = sampling, ranks, node
        self._jobs, self._pool, self._orders, self._cluster = jobs, pool, orders, cluster

    def tick(self, now: int) -> None:
        """Once a second."""
        self.sampling.tick(now)
        if self._pool:
            self._pool.tick(now)

    def snapshot(self, now: int) -> doc.Snapshot:
        """The run at ``now`` (CLOCK_MONOTONIC ns)."""
        self.sampling.slow.asked(now)
        ledger, ranks = self._ledger, self._ranks.snapshot(now)
        files = sorted(self._table.all, key=lambda f: (-f.mappings.attached, -f.size_bytes))
        return doc.Snapshot(
            schema=doc.SCHEMA,
            run=self._run,
            host=os.uname().nodename,
            time_unix_seconds=round(time.time(), 3),
            seconds=round(ledger.seconds(), 3),
            service_pid=os.getpid(),
            job_pids=tuple(self._jobs()[:PIDS_MAX]),
            engine=self._config.engine,
            engine_asked=self._config.engine_asked,
            policy=self._config.policy,
            resolve="agent",
            rung=ledger.serving.rung,
            rung_reason=ledger.serving.reason,
            ranks=tuple(ranks[:RANKS_MAX]),
            ranks_not_listed=max(0, len(ranks) - RANKS_MAX),
            files=tuple(self._file(file, now) for file in files[:FILES_MAX]),
            files_not_listed=max(0, len(files) - FILES_MAX) + len(ledger.closed.files),
            node=self._node.snapshot(ranks),
            pool=self._pool.snapshot(now) if self._pool else None,
            plans=tuple(self._orders.describe() if self._orders else ()),
            history=doc.History(1.0, *self.sampling.columns()),
            not_managed=doc.NotManaged(processes=None, why=doc.ADDED_BY_WATCHER),
            counted=self.sampling.slow.counted_all,
            degradations=degradations(ledger, self._scheduler),
            refused=dict(list(ledger.refused.items())[:FILES_MAX]),
            sensors=POOL_SENSORS if self._pool else SENSORS,
            cluster=self._cluster(),
            small_files=self._node.small_files(),
        )

    def _file(self, file: FileState, now: int) -> doc.File:
        in_pool = self._pool.resident_bytes(file.pooled) if self._pool and file.pooled else None
        counted = self.sampling.slow.counted.get(file.key)
        known = counted is not None and counted.resident_bytes is not None
        sensor = counted.sensor if counted else "not counted yet"
        return doc.File(
            path=file.path,
            size_bytes=file.size_bytes,
            file_system=file.call.file_system,
            served_by=self._ledger.serving.modes.get(file.path),
            mappings=file.mappings.attached,
            changed=file.guard.changed,
            compared_pages=file.guard.compared_pages,
            prefetched_bytes=file.account.prefetched_bytes,
            already_resident_bytes=file.account.already_resident_bytes,
            late_bytes=file.account.late_bytes,
            pool_resident_bytes=in_pool,
            resident_bytes=counted.resident_bytes if counted else None,
            resident_sensor=sensor if known else None,
            resident_why=None if known else sensor,
            used_bytes=counted.used_bytes if counted else None,
            unused_bytes=counted.unused_bytes if counted else None,
            wasted_bytes=counted.wasted_bytes if counted else None,
            demand_bytes=counted.demand_bytes if counted else None,
            counted_seconds_ago=round((now - counted.at_ns) / 1e9, 1) if counted else None,
        )
