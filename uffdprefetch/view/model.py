# SPDX-License-Identifier: Apache-2.0
"""What the screen shows, as one frozen value: it crosses from the fetching thread to the screen.

Made from a service's document (docs/summary-schema.md, snapshot) and from nothing else, so that a
picture can be made, and tested, without a service, a terminal or a clock. None is what is not
known; the ``..._why`` beside it says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SCHEMA = "uffdprefetch.snapshot/1"
LIVE, ENDED, LOST, SILENT = "live", "ended", "lost", "silent"
#: The reason that the service gives for what it leaves to its watcher.
ADDED_BY_WATCHER = "not sampled by the service; uffdprefetch top adds it"


@dataclass(frozen=True)
class Walk:
    """One reader's way through the rank's file, in bytes."""

    start_bytes: int
    position_bytes: int
    frontier_bytes: int


@dataclass(frozen=True)
class Rank:
    """One rank as it stands; ``walks`` are all in ``file``, the rank's first one leads."""

    rank: int
    pids: tuple[int, ...]
    file: str | None
    size_bytes: int | None
    pattern: str
    direction: int
    walks: tuple[Walk, ...]
    walks_elsewhere: int
    quiet_seconds: float | None
    rate_bytes_per_second: float
    hit_share: float | None
    hit_why: str | None
    misses: int | None
    blocks: int | None
    hit_seconds: float | None
    stall_share: float | None
    stall_why: str | None
    window_bytes: int
    in_flight_bytes: int
    wasted_bytes: int | None
    late_extents: int
    stride_bytes: int | None

    @property
    def share(self) -> float | None:
        """How far into its file the rank is, 0 to 1."""
        if not self.walks or not self.size_bytes:
            return None
        return min(1.0, max(0.0, self.walks[0].position_bytes / self.size_bytes))


@dataclass(frozen=True)
class File:
    """One file under management."""

    path: str
    size_bytes: int
    file_system: str
    served_by: str | None
    changed: str | None
    resident_bytes: int | None
    resident_why: str | None
    prefetched_bytes: int | None  # None: nobody tells what was cached before
    used_bytes: int | None
    wasted_bytes: int | None
    pool_resident_bytes: int | None = None


@dataclass(frozen=True)
class Node:
    """The node: storage, memory, our own cost."""

    bandwidth_bytes_per_second: float | None
    latency_seconds: float | None
    readers_bytes_per_second: float | None
    allowed_bytes: int
    allowed_by: str
    ahead_bytes: int
    under_way_bytes: int
    under_way_target_bytes: int
    max_rate_bytes_per_second: int | None
    service_cpu_share: float | None
    io_pressure: float | None
    io_pressure_why: str | None
    wait_p50_ns: int | None
    wait_p99_ns: int | None
    wait_count: int


@dataclass(frozen=True)
class Pool:
    """The node's page pool; None in a Snapshot of another engine."""

    resident_bytes: int
    budget_bytes: int
    limited_by: str | None
    pinned_bytes: int
    read_bytes_per_second: float | None
    reread_bytes: int
    evicted_bytes: int
    evicted_bytes_per_second: float | None
    waiters: int
    waiters_peak: int
    hit_share: float | None
    hit_faults: int
    missing_faults: int
    wait_p50_ns: int | None
    wait_p99_ns: int | None
    fill_p50_ns: int | None
    fill_p99_ns: int | None
    huge_pages: bool
    evict: str


@dataclass(frozen=True)
class Snapshot:
    """One run at one moment. ``state``: live; ended (the job has); lost (the service has, the job
    goes on); silent (no answer for ``silent_seconds``)."""

    run: str
    host: str
    seconds: float
    engine: str
    policy: str
    rung: int | None
    rung_reason: str
    ranks: tuple[Rank, ...]
    ranks_not_listed: int
    files: tuple[File, ...]
    files_not_listed: int
    node: Node
    prefetch_history: tuple[float, ...]
    reader_history: tuple[float, ...]
    miss_history: tuple[float, ...]
    degradations: tuple[str, ...]
    not_managed: tuple[str, ...]  # those that map something that would be served
    pool: Pool | None = None
    state: str = LIVE
    silent_seconds: float = 0.0

    def but(self, state: str, silent_seconds: float = 0.0) -> Snapshot:
        """The same picture, of a service that has come to another state since."""
        return replace(self, state=state, silent_seconds=silent_seconds)

    @property
    def in_flight_bytes(self) -> int:
        """Of all ranks."""
        return sum(rank.in_flight_bytes for rank in self.ranks)

    @property
    def wasted_bytes(self) -> int | None:
        """Of all files; ranks that read the same stretch would count it twice."""
        known = [f.wasted_bytes for f in self.files if f.wasted_bytes is not None]
        return sum(known) if known else None

    @property
    def hit_share(self) -> float | None:
        """Of all ranks of which it is known, weighted by what they read."""
        known = [r for r in self.ranks if r.hit_share is not None and r.blocks]
        blocks = sum(r.blocks or 0 for r in known)
        return max(0.0, 1 - sum(r.misses or 0 for r in known) / blocks) if blocks else None

    @property
    def stall_share(self) -> float | None:
        """The mean of the ranks of which it is known."""
        known = [r.stall_share for r in self.ranks if r.stall_share is not None]
        return sum(known) / len(known) if known else None

    @property
    def share(self) -> tuple[float, float] | None:
        """The least and the most advanced rank."""
        known = [r.share for r in self.ranks if r.share is not None]
        return (min(known), max(known)) if known else None


def from_document(document: Mapping[str, Any]) -> Snapshot:
    """Read a document of SCHEMA; raises ValueError for anything else."""
    try:
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r} instead of {SCHEMA}")
        history = document["history"]
        return Snapshot(
            run=str(document["run"]),
            host=str(document["host"]),
            seconds=float(document["seconds"]),
            engine=str(document["engine"]),
            policy=str(document["policy"]),
            rung=document["rung"],
            rung_reason=str(document["rung_reason"]),
            ranks=tuple(_rank(r) for r in _list(document["ranks"])),
            ranks_not_listed=int(document["ranks_not_listed"]),
            files=tuple(_file(f) for f in _list(document["files"])),
            files_not_listed=int(document["files_not_listed"]),
            node=_node(document["node"]),
            prefetch_history=_numbers(history["prefetch_bytes_per_second"]),
            reader_history=_numbers(history["reader_bytes_per_second"]),
            miss_history=_numbers(history["misses_per_second"]),
            degradations=tuple(str(d) for d in _list(document["degradations"])),
            not_managed=tuple(
                f"{p['pid']} {p['command']} ({p['why']})"
                for p in document["not_managed"]["processes"] or ()
                if p["maps_bytes"]
            ),
            pool=_pool(document["pool"]) if document.get("pool") else None,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a snapshot ({type(error).__name__}: {error})") from None


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__} instead of a list")
    return value


def _numbers(values: list[Any]) -> tuple[float, ...]:
    return tuple(float(v) for v in _list(values))


def _rank(r: Mapping[str, Any]) -> Rank:
    file = r["file"]
    walks = [s for s in r["streams"] if s["file"] == file]
    return Rank(
        rank=int(r["rank"]),
        pids=tuple(int(pid) for pid in r["pids"]),
        file=None if file is None else str(file),
        size_bytes=None if r["size_bytes"] is None else int(r["size_bytes"]),
        pattern=str(r["pattern"]),
        direction=int(r["direction"] or 1),
        walks=tuple(
            Walk(int(s["start_bytes"]), int(s["position_bytes"]), int(s["frontier_bytes"]))
            for s in walks
        ),
        walks_elsewhere=len(r["streams"]) - len(walks),
        quiet_seconds=r["quiet_seconds"],
        rate_bytes_per_second=float(r["rate_bytes_per_second"]),
        hit_share=r["hit"]["share"],
        hit_why=r["hit"]["why"],
        misses=r["hit"]["misses"],
        blocks=r["hit"]["blocks"],
        hit_seconds=r["hit"]["seconds"],
        stall_share=r["stall"]["share"],
        stall_why=r["stall"]["why"],
        window_bytes=int(r["window_bytes"]),
        in_flight_bytes=int(r["in_flight_bytes"]),
        wasted_bytes=r["wasted_bytes"],
        late_extents=int(r["late_extents"]),
        stride_bytes=r["stride_bytes"],
    )


def _file(f: Mapping[str, Any]) -> File:
    return File(
        path=str(f["path"]),
        size_bytes=int(f["size_bytes"]),
        file_system=str(f["file_system"]),
        served_by=f["served_by"],
        changed=f["changed"],
        resident_bytes=f["resident_bytes"],
        resident_why=f["resident_why"],
        prefetched_bytes=f["prefetched_bytes"],
        used_bytes=f["used_bytes"],
        wasted_bytes=f["wasted_bytes"],
        pool_resident_bytes=f.get("pool_resident_bytes"),
    )


def _pool(p: Mapping[str, Any]) -> Pool:
    wait, fill = p["demand_wait_ns"], p["fill_ns"]
    return Pool(
        resident_bytes=int(p["resident_bytes"]),
        budget_bytes=int(p["budget_bytes"]),
        limited_by=p["limited_by"],
        pinned_bytes=int(p["pinned_bytes"]),
        read_bytes_per_second=p["read_bytes_per_second"],
        reread_bytes=int(p["reread_bytes"]),
        evicted_bytes=int(p["evicted_bytes"]),
        evicted_bytes_per_second=p["evicted_bytes_per_second"],
        waiters=int(p["waiters"]),
        waiters_peak=int(p["waiters_peak"]),
        hit_share=p["hit"]["share"],
        hit_faults=int(p["hit"]["faults"]),
        missing_faults=int(p["missing_faults"]),
        wait_p50_ns=wait["p50"],
        wait_p99_ns=wait["p99"],
        fill_p50_ns=fill["p50"],
        fill_p99_ns=fill["p99"],
        huge_pages=bool(p["huge_pages"]),
        evict=str(p["evict"]),
    )


def _node(n: Mapping[str, Any]) -> Node:
    wait = n["checkpoint_wait_ns"]
    return Node(
        bandwidth_bytes_per_second=n["bandwidth_bytes_per_second"],
        latency_seconds=n["latency_seconds"],
        readers_bytes_per_second=n["readers_bytes_per_second"],
        allowed_bytes=int(n["allowed_bytes"]),
        allowed_by=str(n["allowed_by"]),
        ahead_bytes=int(n["ahead_bytes"]),
        under_way_bytes=int(n["under_way_bytes"]),
        under_way_target_bytes=int(n["under_way_target_bytes"]),
        max_rate_bytes_per_second=n["max_rate_bytes_per_second"],
        service_cpu_share=n["service_cpu_share"],
        io_pressure=n["io_pressure"]["share"],
        io_pressure_why=n["io_pressure"]["why"],
        wait_p50_ns=wait["p50"],
        wait_p99_ns=wait["p99"],
        wait_count=int(wait["count"]),
    )
