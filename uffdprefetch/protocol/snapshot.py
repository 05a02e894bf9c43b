# SPDX-License-Identifier: Apache-2.0
"""The run as it stands: the document `uffdprefetch.snapshot/1` between a service and its watchers.

The fields are the keys of docs/summary-schema.md, which says what each one means. The service makes
a Snapshot (service/live.py), a watcher adds what only it can see (view/sensors.py) and shows it.
None is what is not known. A field with a default may be missing from a document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from uffdprefetch.protocol.document import Quantiles, decoded

SCHEMA = "uffdprefetch.snapshot/1"
#: The reason that the service gives for what it leaves to its watcher.
ADDED_BY_WATCHER = "not sampled by the service; uffdprefetch top adds it"


@dataclass(frozen=True)
class Snapshot:
    """One run at one moment."""

    schema: str
    run: str
    host: str
    time_unix_seconds: float
    seconds: float
    service_pid: int
    job_pids: tuple[int, ...]
    engine: str
    engine_asked: str
    policy: str
    resolve: str
    rung: int | None
    rung_reason: str
    ranks: tuple[Rank, ...]
    ranks_not_listed: int
    files: tuple[File, ...]
    files_not_listed: int
    node: Node
    pool: PoolActivity | None
    plans: tuple[dict[str, Any], ...]
    history: History
    not_managed: NotManaged
    counted: bool
    degradations: tuple[str, ...]
    refused: dict[str, str]
    sensors: dict[str, str]
    cluster: dict[str, Any] | None = None  # as in the summary
    small_files: SmallFilesAhead | None = None
    start: dict[str, Any] | None = None  # ``learn.recorded`` of the summary


@dataclass(frozen=True)
class Rank:
    """One rank; places and pattern are those of its leading stream, the first of ``streams``."""

    rank: int
    local_rank: int
    pids: tuple[int, ...]
    pids_not_listed: int
    commands: tuple[str, ...]
    file: str | None
    size_bytes: int | None
    pattern: str
    direction: int | None
    start_bytes: int | None
    position_bytes: int | None
    frontier_bytes: int | None
    stride_bytes: int | None
    density_64KiB: float | None
    quiet_seconds: float | None
    rate_bytes_per_second: float
    read_bytes_per_second: float
    window_bytes: int
    ahead_bytes: int
    in_flight_bytes: int
    wasted_bytes: int | None
    wasted_why: str | None
    late_extents: int
    hit: Hit
    demand_misses: int
    stall: Stall
    walks: int
    streams: tuple[StreamState, ...]


@dataclass(frozen=True)
class Hit:
    """Of the blocks that a rank has read lately, the share that cost no miss."""

    share: float | None
    misses: int | None
    blocks: int | None
    seconds: float | None
    why: str | None


@dataclass(frozen=True)
class Stall:
    """Share of its time that a rank waits for block I/O."""

    share: float | None
    seconds: float | None
    sensor: str | None
    why: str | None


@dataclass(frozen=True)
class StreamState:
    """A stream: one reader's way through a file."""

    file: str
    pid: int
    pattern: str
    start_bytes: int
    position_bytes: int
    frontier_bytes: int
    rate_bytes_per_second: float


@dataclass(frozen=True)
class File:
    """One file under management."""

    path: str
    size_bytes: int
    file_system: str
    served_by: str | None
    mappings: int
    changed: str | None
    compared_pages: int
    prefetched_bytes: int | None
    already_resident_bytes: int
    late_bytes: int
    pool_resident_bytes: int | None
    resident_bytes: int | None
    resident_sensor: str | None
    resident_why: str | None
    used_bytes: int | None
    unused_bytes: int | None
    wasted_bytes: int | None
    demand_bytes: int | None
    counted_seconds_ago: float | None


@dataclass(frozen=True)
class SmallFilesAhead:
    """Small files that are read ahead by their names: of the whole run, by tree of directories, and
    by order that was told. ``used``: opened since."""

    read: int
    read_bytes: int
    used: int
    used_bytes: int
    already_resident: int
    trees: tuple[FileTree, ...]
    trees_not_listed: int
    orders: tuple[FollowedFiles, ...]
    orders_not_listed: int


@dataclass(frozen=True)
class FileTree:
    """Directories below one, whose files are opened one after the other. ``order``: readdir,
    sorted, inode or reversed; None: none is found."""

    path: str
    directories: int
    latest: str
    order: str | None
    read: int
    used: int
    lost: int


@dataclass(frozen=True)
class FollowedFiles:
    """Files in an order that the job, or a plan, has told."""

    pid: int
    files: int
    position: int
    read: int
    used: int


@dataclass(frozen=True)
class Node:
    """The node: storage, memory, our own cost."""

    bandwidth_bytes_per_second: float | None
    latency_seconds: float | None
    readers_bytes_per_second: float | None
    max_rate_bytes_per_second: int | None
    budget_bytes: int
    allowed_bytes: int
    allowed_by: str
    ahead_bytes: int
    under_way_bytes: int
    under_way_target_bytes: int
    queued_bytes: int
    prefetched_bytes: int
    checkpoint_wait_ns: Quantiles
    service_cpu_seconds: float
    service_cpu_share: float
    io_pressure: IoPressure


@dataclass(frozen=True)
class IoPressure:
    """The node's I/O pressure."""

    share: float | None
    why: str | None
    sensor: str | None = None


@dataclass(frozen=True)
class SpillState:
    """The pool's disk tier, `--spill`."""

    directory: str
    size_bytes: int  # it may hold
    used_bytes: int
    written_bytes: int
    read_bytes: int
    dropped_bytes: int  # left memory before it was written
    refused_bytes: int  # left memory while there was no room
    late_reads: int  # took too long: the bytes came from elsewhere
    errors: dict[str, int]  # by errno's name
    read_bytes_per_second: float | None  # of one thread
    write_bytes_per_second: float | None
    ended: str | None  # why it is not used any more, or not written


@dataclass(frozen=True)
class PoolState:
    """The node's page pool, as the summary tells of it, too."""

    budget_bytes: int
    limited_by: str | None
    chunk_bytes: int
    huge_pages: bool
    evict: str
    resident_bytes: int
    pinned_bytes: int
    read_bytes: int
    reread_bytes: int
    others_bytes: int  # from other nodes
    evicted_bytes: int
    waiters: int
    waiters_peak: int
    faults: int
    missing_faults: int
    demand_wait_ns: Quantiles
    fill_ns: Quantiles
    spill: SpillState | None  # without a disk tier


@dataclass(frozen=True)
class PoolActivity(PoolState):
    """The pool's state, and its rates and hits of the last seconds."""

    read_bytes_per_second: float | None
    evicted_bytes_per_second: float | None
    rate_seconds: float | None
    hit: PoolHit
    sensor: str


@dataclass(frozen=True)
class PoolHit:
    """Of the last faults, the share that found their chunk in the pool."""

    share: float | None
    faults: int
    seconds: float | None
    why: str | None


@dataclass(frozen=True)
class History:
    """The last minutes, a value a step, the latest last."""

    step_seconds: float
    prefetch_bytes_per_second: tuple[float, ...]
    reader_bytes_per_second: tuple[float, ...]
    misses_per_second: tuple[float, ...]


@dataclass(frozen=True)
class NotManaged:
    """The processes of the job without an agent; fields with a default come with a look at them."""

    processes: tuple[UnservedProcess, ...] | None
    why: str | None
    sensor: str | None = None
    births: int | None = None
    births_why: str | None = None
    births_lost: int | None = None
    ended_before_they_were_seen: int | None = None


@dataclass(frozen=True)
class UnservedProcess:
    """A process of the job that cannot be served."""

    pid: int
    parent_pid: int
    command: str
    why: str
    maps_bytes: int


def decode(document: Mapping[str, Any]) -> Snapshot:
    """Read a parsed document of SCHEMA, unknown keys left out; ValueError for anything else."""
    if document.get("schema") != SCHEMA:
        raise ValueError(f"not a snapshot (schema {document.get('schema')!r} instead of {SCHEMA})")
    snapshot: Snapshot = decoded(Snapshot, document, "document")
    return snapshot
