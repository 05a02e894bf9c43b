# SPDX-License-Identifier: Apache-2.0
"""The run as it stands now: makes the snapshot that a watcher gets (protocol/snapshot.py).

Made from what is in memory; it changes nothing. What only a watcher can see without costing the
service anything (block-I/O delay, processes without an agent) is null here and added there
(view/sensors.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from uffdprefetch.base.config import Config
from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol import snapshot as doc
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.service.sampling import RANK_TICKS, RANKS_MAX, PoolTrack, RankTrack, Sampling
from uffdprefetch.service.summary import MISS_SENSOR, POOL_MISS_SENSOR, WAIT_SENSOR, degradations
from uffdprefetch.state.files import FileState
from uffdprefetch.state.job_processes import JobProcess
from uffdprefetch.state.reader import Reader
from uffdprefetch.warm.scheduler import Scheduler

STREAMS_MAX = 8
PIDS_MAX = 64
FILES_MAX = 64
#: A walk moves as long as it is silent for no more than this; a sure one, than GAPS times what its
#: reader takes from one checkpoint to the next.
MOVING_SECONDS = 2.0
MOVING_GAPS = 3.0
MOVING_SECONDS_MAX = 30.0
#: Fewer blocks are no base for a share.
BLOCKS_MIN = 16
SENSORS = {
    "hit.misses": f"exact: {MISS_SENSOR}; a wait for a page that is being read is none",
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
    "hit.blocks": "blocks of 64 KiB between two touches of a walk, as the pool's faults tell",
}


class Live:
    """Makes snapshots of one run; the service's thread calls everything here."""

    def __init__(
        self,
        config: Config,
        run: str,
        coordinator: Coordinator,
        scheduler: Scheduler,
        jobs: Callable[[], list[int]],
        workers_cpu_seconds: Callable[[], float],
        cluster: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._run = run
        self._coordinator = coordinator
        self._scheduler = scheduler
        self._jobs = jobs
        self._workers_cpu_seconds = workers_cpu_seconds
        self._allowed_by = Limit.BUDGET
        self.sampling = Sampling(
            coordinator.files, coordinator.clients, scheduler, coordinator.ledger
        )
        self._pool = PoolTrack(coordinator.pool) if coordinator.pool else None

    def tick(self, now: int, allowed_by: Limit) -> None:
        """Once a second. ``allowed_by``: which limit binds what may lie ahead of the readers."""
        self._allowed_by = allowed_by
        self.sampling.tick(now)
        if self._pool:
            self._pool.tick(now)

    def snapshot(self, now: int) -> doc.Snapshot:
        """The run at ``now`` (CLOCK_MONOTONIC ns)."""
        self.sampling.slow.asked(now)
        ledger = self._coordinator.ledger
        ranks = self._ranks(now)
        files = sorted(
            self._coordinator.known_files, key=lambda f: (-f.mappings.attached, -f.size_bytes)
        )
        return doc.Snapshot(
            schema=doc.SCHEMA,
            run=self._run,
            host=os.uname().nodename,
            time_unix_seconds=round(time.time(), 3),
            seconds=round(ledger.seconds(), 3),
            service_pid=os.getpid(),
            job_pids=tuple(self._jobs()[:PIDS_MAX]),
            engine=self._config.engine,
            engine_asked=self._config.engine_asked or self._config.engine,
            policy=self._config.policy,
            resolve="agent",
            rung=ledger.serving.rung,
            rung_reason=ledger.serving.reason,
            ranks=tuple(ranks[:RANKS_MAX]),
            ranks_not_listed=max(0, len(ranks) - RANKS_MAX),
            files=tuple(self._file(file, now) for file in files[:FILES_MAX]),
            files_not_listed=max(0, len(files) - FILES_MAX) + len(ledger.closed.files),
            node=self._node(ranks),
            pool=self._pool.snapshot(now) if self._pool else None,
            plans=tuple(
                self._coordinator.known_orders.describe() if self._coordinator.known_orders else ()
            ),
            history=doc.History(1.0, *self.sampling.columns()),
            not_managed=doc.NotManaged(processes=None, why=doc.ADDED_BY_WATCHER),
            counted=self.sampling.slow.counted_all,
            degradations=degradations(ledger, self._scheduler),
            refused=dict(list(ledger.refused.items())[:FILES_MAX]),
            sensors=POOL_SENSORS if self._pool else SENSORS,
            cluster=self._cluster(),
        )

    # -------------------------------------------------------------- ranks

    def _ranks(self, now: int) -> list[doc.Rank]:
        members: dict[int, list[JobProcess]] = {}
        for process in self._coordinator.ledger.processes.all():
            members.setdefault(process.rank, []).append(process)
        readers: dict[int, list[Reader]] = {}
        for reader in self._coordinator.readers():
            readers.setdefault(reader.rank, []).append(reader)
        under_way = self._scheduler.under_way_by_rank()
        return [
            self._rank(rank, members[rank], readers.get(rank, []), under_way.get(rank, 0), now)
            for rank in sorted(members)
        ]

    def _rank(
        self,
        rank: int,
        members: list[JobProcess],
        readers: list[Reader],
        in_flight_bytes: int,
        now: int,
    ) -> doc.Rank:
        walks = self._walks(readers, now)
        moving = [walk for walk in walks if self._moves(walk[1], now)] or walks[:1]
        random = next((r for r in reversed(readers) if r.access is Access.JUMPS), None)
        told = moving[0][0] if moving else (random or (readers[-1] if readers else None))
        alive = _alive(members)
        track = self.sampling.ranks.get(rank)
        wasted = sum(track.wasted_bytes.values()) if track and track.wasted_bytes else None
        made = doc.Rank(
            rank=rank,
            local_rank=members[0].local_rank,
            pids=tuple(p.watched.pid for p in alive[:PIDS_MAX]),
            pids_not_listed=max(0, len(alive) - PIDS_MAX),
            commands=tuple(sorted({p.command for p in alive})[:PIDS_MAX]),
            file=told.file.path if told else None,
            size_bytes=told.file.size_bytes if told else None,
            pattern=_pattern(told, moving[0][1] if moving else None, random),
            direction=None,
            start_bytes=None,
            position_bytes=None,
            frontier_bytes=None,
            stride_bytes=None,
            density_64KiB=None,
            quiet_seconds=None,
            rate_bytes_per_second=round(sum(self._rate(s, now) for _, s in moving)),
            read_bytes_per_second=round(sum(self._reads(s, now) for _, s in moving)),
            window_bytes=sum(self._coordinator.window_bytes(s) for _, s in moving),
            ahead_bytes=sum(self._coordinator.windows.ahead_bytes(s) for _, s in moving),
            in_flight_bytes=in_flight_bytes,
            wasted_bytes=wasted,
            wasted_why=None if wasted is not None else "not counted yet",
            late_extents=sum(self._coordinator.windows.late_extents(s) for _, s in walks),
            hit=_hit(track, bool(random)),
            demand_misses=sum(p.watched.misses for p in members),
            stall=doc.Stall(share=None, seconds=None, sensor=None, why=doc.ADDED_BY_WATCHER),
            walks=len(walks),
            streams=tuple(self._walk(*walk, now) for walk in moving[:STREAMS_MAX]),
        )
        return _with_leading(made, moving[0][1], now) if moving else made

    def _walks(self, readers: list[Reader], now: int) -> list[tuple[Reader, Stream]]:
        """Those that were touched lately, the leading one first."""
        walks = [(reader, stream) for reader in readers for stream in reader.table.active()]
        return sorted(walks, key=lambda walk: self._leads(walk[1], now))

    def _walk(self, reader: Reader, stream: Stream, now: int) -> doc.StreamState:
        size_bytes = reader.file.size_bytes  # pages end where the file does
        return doc.StreamState(
            file=reader.file.path,
            pid=stream.reader,
            pattern=stream.pattern,
            start_bytes=min(stream.start_bytes, size_bytes),
            position_bytes=min(stream.position_bytes, size_bytes),
            frontier_bytes=min(self._coordinator.windows.of(stream).frontier_bytes, size_bytes),
            rate_bytes_per_second=round(self._rate(stream, now)),
        )

    def _leads(self, stream: Stream, now: int) -> tuple[bool, int, int]:
        """For sorting: a sure walk first, then the fastest, then the latest. A B-tree's root and a
        file's header are walks too, short ones."""
        return not stream.settled, -round(self._rate(stream, now)), -stream.last_ns

    def _moves(self, stream: Stream, now: int) -> bool:
        """Whether its reader is still on this walk, as far as one can know."""
        patience = MOVING_SECONDS
        if stream.settled and stream.rate_bytes_per_second > 0:
            gap = self._coordinator.windows.of(stream).step_bytes / stream.rate_bytes_per_second
            patience = min(MOVING_SECONDS_MAX, max(MOVING_SECONDS, MOVING_GAPS * gap))
        return now - stream.last_ns < patience * 1e9

    def _rate(self, stream: Stream, now: int) -> float:
        """The planner's moving average does not fall while nothing is touched; this one does."""
        quiet_seconds = (now - stream.last_ns) / 1e9
        rate = stream.rate_bytes_per_second
        if quiet_seconds > 1.0:
            rate = min(rate, self._coordinator.windows.of(stream).step_bytes / quiet_seconds)
        return rate

    def _reads(self, stream: Stream, now: int) -> float:
        """Of its speed what it touches: the rates of ranks that skip add up to that of all."""
        return self._rate(stream, now) * (1.0 if stream.density is None else stream.density)

    # -------------------------------------------------------------- files and the node

    def _file(self, file: FileState, now: int) -> doc.File:
        pool, pooled = self._coordinator.pool, file.pooled
        in_pool = pool.pool.file_counts(pooled.number).resident_bytes if pool and pooled else None
        counted = self.sampling.slow.counted.get(file.key)
        known = counted is not None and counted.resident_bytes is not None
        sensor = counted.sensor if counted else "not counted yet"
        return doc.File(
            path=file.path,
            size_bytes=file.size_bytes,
            file_system=file.call.file_system,
            served_by=self._coordinator.ledger.serving.verdicts.get(file.path),
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

    def _node(self, ranks: list[doc.Rank]) -> doc.Node:
        coordinator, scheduler, ledger = (
            self._coordinator,
            self._scheduler,
            self._coordinator.ledger,
        )
        storage = scheduler.meter.storage
        history = self.sampling.history
        workers = self._workers_cpu_seconds()
        cpu = max(0.0, time.process_time() - workers - ledger.started_cpu_seconds)
        return doc.Node(
            bandwidth_bytes_per_second=round(storage.bandwidth_bytes_per_second) or None,
            latency_seconds=scheduler.meter.told_latency,
            readers_bytes_per_second=history[-1].reader_bytes_per_second if history else None,
            max_rate_bytes_per_second=self._config.max_rate_bytes_per_second,
            budget_bytes=self._config.budget_bytes,
            allowed_bytes=coordinator.windows.allowed_bytes,
            allowed_by=self._allowed_by.value,
            ahead_bytes=sum(r.ahead_bytes for r in ranks),
            under_way_bytes=scheduler.under_way_bytes,
            under_way_target_bytes=scheduler.target_bytes,
            queued_bytes=scheduler.queued_bytes,
            prefetched_bytes=scheduler.prefetched_bytes,
            checkpoint_wait_ns=ledger.checkpoints.fault_wait.quantiles(),
            service_cpu_seconds=round(cpu, 3),
            service_cpu_share=round(cpu / max(ledger.seconds(), 1e-3), 4),
            io_pressure=doc.IoPressure(share=None, why=doc.ADDED_BY_WATCHER),
        )


def _alive(members: list[JobProcess]) -> list[JobProcess]:
    return [p for p in members if p.watched.pid and not p.watched.ended]


def _pattern(told: Reader | None, stream: Stream | None, random: Reader | None) -> str:
    """In a word, of what is ``told`` of a rank and its leading ``stream``. ``random``: one of its
    readers that jumps about."""
    if told is None:
        return "no mapping"
    if told.order.followed:
        return "planned"
    if random is not None:
        return "random"
    return stream.pattern if stream is not None else "unknown"


def _with_leading(rank: doc.Rank, stream: Stream, now: int) -> doc.Rank:
    """With the place of its leading walk, the first of those that it tells of."""
    leading = rank.streams[0]
    return replace(
        rank,
        direction=stream.direction,
        start_bytes=leading.start_bytes,
        position_bytes=leading.position_bytes,
        frontier_bytes=leading.frontier_bytes,
        stride_bytes=stream.stride_bytes,
        density_64KiB=stream.density,
        quiet_seconds=round((now - stream.last_ns) / 1e9, 1),
    )


def _hit(track: RankTrack | None, random: bool) -> doc.Hit:
    """Of the blocks that a rank has read lately, the share that cost no major fault."""
    if track is None or len(track.ticks) < 2:
        short = f"more than {RANKS_MAX} ranks" if track is None else "it runs for less than 2 s"
        return doc.Hit(share=None, misses=None, blocks=None, seconds=None, why=short)
    first, last = track.ticks[0], track.ticks[-1]
    misses = last.misses - first.misses
    blocks = (last.touched_bytes - first.touched_bytes) // BLOCK_BYTES
    share: float | None = None
    why: str | None = None
    if random:
        why = "it jumps about: what it reads between two walks is not counted"
    elif blocks < BLOCKS_MIN:
        why = f"less than {BLOCKS_MIN} blocks read in the last {RANK_TICKS} s"
    else:
        share = max(0.0, 1 - misses / blocks)
    seconds = round((last.at_ns - first.at_ns) / 1e9, 1)
    return doc.Hit(share, misses, blocks, seconds, why)
