# SPDX-License-Identifier: Apache-2.0
"""The run as it stands now: the document that a watcher gets (docs/summary-schema.md, snapshot).

Made from what is in memory; it changes nothing. What only a watcher can see without costing the
service anything (block-I/O delay, processes without an agent) is null here and added there
(view/sensors.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from uffdprefetch.base.config import Config
from uffdprefetch.predict.streams import Stream
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.service.sampling import RANK_TICKS, RANKS_MAX, Counted, RankTrack, Sampling
from uffdprefetch.service.summary import MISS_SENSOR, POOL_MISS_SENSOR, WAIT_SENSOR
from uffdprefetch.state.files import BLOCK_BYTES, FileState
from uffdprefetch.state.ledger import JobProcess
from uffdprefetch.state.region import Region
from uffdprefetch.warm.limits import Limit
from uffdprefetch.warm.scheduler import Scheduler

SCHEMA = "uffdprefetch.snapshot/1"
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
PLACE = ("start_bytes", "position_bytes", "frontier_bytes")
ADDED_BY_WATCHER = "not sampled by the service; uffdprefetch top adds it"  # view/model.py
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
        engine: Coordinator,
        scheduler: Scheduler,
        jobs: Callable[[], list[int]],
        workers_cpu_seconds: Callable[[], float],
    ) -> None:
        self._config = config
        self._run = run
        self._engine = engine
        self._scheduler = scheduler
        self._jobs = jobs
        self._workers_cpu_seconds = workers_cpu_seconds
        self._allowed_by = Limit.BUDGET
        self.sampling = Sampling(engine, scheduler, engine.ledger)
        self._pool = None
        if engine.pool:
            from uffdprefetch.service.pool_live import PoolTrack

            self._pool = PoolTrack(engine.pool)

    def tick(self, now: int, allowed_by: Limit) -> None:
        """Once a second. ``allowed_by``: which limit binds what may lie ahead of the readers."""
        self._allowed_by = allowed_by
        self.sampling.tick(now)
        if self._pool:
            self._pool.tick(now)

    def document(self, now: int) -> dict[str, Any]:
        """The snapshot at ``now`` (CLOCK_MONOTONIC ns)."""
        self.sampling.asked(now)
        ledger = self._engine.ledger
        ranks = self._ranks(now)
        files = sorted(self._engine.known_files, key=lambda f: (-f.attached, -f.size_bytes))
        degradations = list(ledger.degradations)
        if self._scheduler.failed_extents:
            degradations.append(
                f"{self._scheduler.failed_extents} extents could not be read "
                f"({self._scheduler.last_error})"
            )
        history = self.sampling.history
        return {
            "schema": SCHEMA,
            "run": self._run,
            "host": os.uname().nodename,
            "time_unix_seconds": round(time.time(), 3),
            "seconds": round(ledger.seconds(), 3),
            "service_pid": os.getpid(),
            "job_pids": self._jobs()[:PIDS_MAX],
            "engine": self._config.engine,
            "engine_asked": self._config.engine_asked or self._config.engine,
            "policy": self._config.policy,
            "resolve": "agent",
            "rung": ledger.rung,
            "rung_reason": ledger.rung_reason,
            "ranks": ranks[:RANKS_MAX],
            "ranks_not_listed": max(0, len(ranks) - RANKS_MAX),
            "files": [self._file(file, now) for file in files[:FILES_MAX]],
            "files_not_listed": max(0, len(files) - FILES_MAX) + len(ledger.closed_files),
            "node": self._node(ranks),
            "pool": self._pool.document(now) if self._pool else None,
            "plans": self._engine.plans.describe() if self._engine.plans else [],
            "history": {
                "step_seconds": 1.0,
                "prefetch_bytes_per_second": [round(t.prefetch_bytes_per_second) for t in history],
                "reader_bytes_per_second": [round(t.reader_bytes_per_second) for t in history],
                "misses_per_second": [round(t.misses_per_second, 1) for t in history],
            },
            "not_managed": {"processes": None, "why": ADDED_BY_WATCHER},
            "counted": self.sampling.counted_all,
            "degradations": degradations,
            "refused": dict(list(ledger.refused.items())[:FILES_MAX]),
            "sensors": POOL_SENSORS if self._pool else SENSORS,
        }

    # -------------------------------------------------------------- ranks

    def _ranks(self, now: int) -> list[dict[str, Any]]:
        ledger = self._engine.ledger
        members: dict[int, list[JobProcess]] = {}
        for process in ledger.all_processes():
            members.setdefault(process.rank, []).append(process)
        walks: dict[int, list[tuple[Region, Stream]]] = {}
        scattered: dict[int, Region] = {}
        regions: dict[int, Region] = {}
        for client in self._engine.clients.values():
            for region in client.regions.values():
                regions[client.rank] = region
                if region.table.random:
                    scattered[client.rank] = region
                found = walks.setdefault(client.rank, [])
                found += [(region, stream) for stream in region.table.active()]
        under_way = self._scheduler.under_way_by_rank()
        return [
            self._rank(
                rank,
                members[rank],
                sorted(walks.get(rank, []), key=lambda walk: self._leads(walk[1], now)),
                scattered.get(rank),
                regions.get(rank),
                under_way.get(rank, 0),
                now,
            )
            for rank in sorted(members)
        ]

    def _rank(
        self,
        rank: int,
        members: list[JobProcess],
        walks: list[tuple[Region, Stream]],
        scattered: Region | None,
        mapped: Region | None,
        in_flight_bytes: int,
        now: int,
    ) -> dict[str, Any]:
        moving = [walk for walk in walks if self._moves(walk[1], now)] or walks[:1]
        region, stream = moving[0] if moving else (scattered or mapped, None)
        if region is not None and region.order.followed:
            pattern = "planned"
        elif stream is None or scattered is not None:
            pattern = "random" if scattered else "unknown" if mapped else "no mapping"
        else:
            pattern = stream.pattern
        file = region.file if region else None
        alive = [p for p in members if p.watched.pid and not p.watched.ended]
        track = self.sampling.ranks.get(rank)
        wasted = sum(track.wasted_bytes.values()) if track and track.wasted_bytes else None
        return {
            "rank": rank,
            "local_rank": members[0].local_rank,
            "pids": [p.watched.pid for p in alive[:PIDS_MAX]],
            "pids_not_listed": max(0, len(alive) - PIDS_MAX),
            "commands": sorted({p.command for p in alive})[:PIDS_MAX],
            "file": file.path if file else None,
            "size_bytes": file.size_bytes if file else None,
            "pattern": pattern,
            "direction": stream.direction if stream else None,
            **(_place(region, stream) if region and stream else dict.fromkeys(PLACE)),
            "stride_bytes": stream.stride_bytes if stream else None,
            "density_64KiB": stream.density if stream else None,
            "quiet_seconds": round((now - stream.last_ns) / 1e9, 1) if stream else None,
            "rate_bytes_per_second": round(sum(self._rate(s, now) for _, s in moving)),
            "window_bytes": sum(self._engine.layout.lookahead(s) for _, s in moving),
            "ahead_bytes": sum(
                max(0, (s.frontier_bytes - s.position_bytes) * s.direction) for _, s in moving
            ),
            "in_flight_bytes": in_flight_bytes,
            "wasted_bytes": wasted,
            "wasted_why": None if wasted is not None else "not counted yet",
            "late_extents": sum(s.feedback.late_extents for _, s in walks),
            "hit": _hit(track, bool(scattered)),
            "demand_misses": sum(p.watched.misses for p in members),
            "stall": {"share": None, "seconds": None, "sensor": None, "why": ADDED_BY_WATCHER},
            "walks": len(walks),
            "streams": [
                {
                    "file": region.file.path,
                    "pid": s.reader,
                    "pattern": s.pattern,
                    **_place(region, s),
                    "rate_bytes_per_second": round(self._rate(s, now)),
                }
                for region, s in moving[:STREAMS_MAX]
            ],
        }

    def _leads(self, stream: Stream, now: int) -> tuple[bool, int, int]:
        """For sorting: a sure walk first, then the fastest, then the latest. A B-tree's root and a
        file's header are walks too, short ones."""
        return not stream.settled, -round(self._rate(stream, now)), -stream.last_ns

    def _moves(self, stream: Stream, now: int) -> bool:
        """Whether its reader is still on this walk, as far as one can know."""
        patience = MOVING_SECONDS
        if stream.settled and stream.rate_bytes_per_second > 0:
            gap = self._engine.layout.distance(stream) / stream.rate_bytes_per_second
            patience = min(MOVING_SECONDS_MAX, max(MOVING_SECONDS, MOVING_GAPS * gap))
        return now - stream.last_ns < patience * 1e9

    def _rate(self, stream: Stream, now: int) -> float:
        """The planner's moving average does not fall while nothing is touched; this one does."""
        quiet_seconds = (now - stream.last_ns) / 1e9
        rate = stream.rate_bytes_per_second
        if quiet_seconds > 1.0:
            rate = min(rate, self._engine.layout.distance(stream) / quiet_seconds)
        return rate

    # -------------------------------------------------------------- files and the node

    def _file(self, file: FileState, now: int) -> dict[str, Any]:
        counted = self.sampling.counted.get(file.key)
        pool, pooled = self._engine.pool, file.pooled
        in_pool = pool.pool.file_counts(pooled.number).resident_bytes if pool and pooled else None
        return {
            "path": file.path,
            "size_bytes": file.size_bytes,
            "file_system": file.file_system,
            "served_by": self._engine.ledger.verdicts.get(file.path),
            "mappings": file.attached,
            "changed": file.changed,
            "compared_pages": file.compared_pages,
            "prefetched_bytes": None if file.untold_bytes else file.prefetched_bytes,
            "already_resident_bytes": file.already_resident_bytes,
            "late_bytes": file.late_bytes,
            "pool_resident_bytes": in_pool,
            **_counts(counted, now),
        }

    def _node(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        engine, scheduler, ledger = self._engine, self._scheduler, self._engine.ledger
        storage = scheduler.meter.storage
        wait = ledger.fault_wait
        history = self.sampling.history
        workers = self._workers_cpu_seconds()
        cpu = max(0.0, time.process_time() - workers - ledger.started_cpu_seconds)
        return {
            "bandwidth_bytes_per_second": round(storage.bandwidth_bytes_per_second) or None,
            "latency_seconds": round(storage.latency_seconds, 6) or None,
            "readers_bytes_per_second": (
                round(history[-1].reader_bytes_per_second) if history else None
            ),
            "max_rate_bytes_per_second": self._config.max_rate_bytes_per_second,
            "budget_bytes": self._config.budget_bytes,
            "allowed_bytes": engine.layout.allowed_bytes,
            "allowed_by": self._allowed_by.value,
            "ahead_bytes": sum(r["ahead_bytes"] for r in ranks),
            "under_way_bytes": scheduler.under_way_bytes,
            "under_way_target_bytes": scheduler.target_bytes,
            "queued_bytes": scheduler.queued_bytes,
            "prefetched_bytes": scheduler.prefetched_bytes,
            "checkpoint_wait_ns": {
                "count": wait.count,
                "p50": wait.quantile(0.5),
                "p99": wait.quantile(0.99),
                "max": wait.max if wait.count else None,
            },
            "service_cpu_seconds": round(cpu, 3),
            "service_cpu_share": round(cpu / max(ledger.seconds(), 1e-3), 4),
            "io_pressure": {"share": None, "why": ADDED_BY_WATCHER},
        }


def _place(region: Region, stream: Stream) -> dict[str, int]:
    """Where a walk began, is, and is warmed up to; pages end where the file does."""
    at = (stream.start_bytes, stream.position_bytes, stream.frontier_bytes)
    return {name: min(o, region.file.size_bytes) for name, o in zip(PLACE, at, strict=True)}


def _hit(track: RankTrack | None, scattered: bool) -> dict[str, Any]:
    """Of the blocks that a rank has read lately, the share that cost no major fault."""
    if track is None or len(track.ticks) < 2:
        short = f"more than {RANKS_MAX} ranks" if track is None else "it runs for less than 2 s"
        return {"share": None, "misses": None, "blocks": None, "seconds": None, "why": short}
    first, last = track.ticks[0], track.ticks[-1]
    misses = last.misses - first.misses
    blocks = (last.touched_bytes - first.touched_bytes) // BLOCK_BYTES
    share: float | None = None
    why: str | None = None
    if scattered:
        why = "it jumps about: what it reads between two walks is not counted"
    elif blocks < BLOCKS_MIN:
        why = f"less than {BLOCKS_MIN} blocks read in the last {RANK_TICKS} s"
    else:
        share = max(0.0, 1 - misses / blocks)
    seconds = round((last.at_ns - first.at_ns) / 1e9, 1)
    return {"share": share, "misses": misses, "blocks": blocks, "seconds": seconds, "why": why}


def _counts(counted: Counted | None, now: int) -> dict[str, Any]:
    """A file's part of the slow pass."""
    if counted is None:
        return {
            "resident_bytes": None,
            "resident_sensor": None,
            "resident_why": "not counted yet",
            "used_bytes": None,
            "unused_bytes": None,
            "wasted_bytes": None,
            "demand_bytes": None,
            "counted_seconds_ago": None,
        }
    known = counted.resident_bytes is not None
    return {
        "resident_bytes": counted.resident_bytes,
        "resident_sensor": counted.sensor if known else None,
        "resident_why": None if known else counted.sensor,
        "used_bytes": counted.used_bytes,
        "unused_bytes": counted.unused_bytes,
        "wasted_bytes": counted.wasted_bytes,
        "demand_bytes": counted.demand_bytes,
        "counted_seconds_ago": round((now - counted.at_ns) / 1e9, 1),
    }
