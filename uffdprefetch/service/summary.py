# SPDX-License-Identifier: Apache-2.0
"""The run as a whole: the document of docs/summary-schema.md, made once, at its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uffdprefetch.base.config import PAGE_BYTES, Config
from uffdprefetch.base.file_systems import mounted
from uffdprefetch.base.mounts import type_at
from uffdprefetch.base.record import dataclass
from uffdprefetch.predict.storage import MISS_BYTES
from uffdprefetch.protocol import summary as doc
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.service.gained import Gained, gained
from uffdprefetch.service.waits import Waits
from uffdprefetch.state import processes
from uffdprefetch.state.account import of_prefetched
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.client import Client
from uffdprefetch.state.closed_book import FileReads, describe_file, describe_stream, reads_of
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.notes import Note
from uffdprefetch.warm.meter import LATENCY_LEAST
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.windows import Windows

if TYPE_CHECKING:  # they bring numpy, which a service without orders and pool spares
    from uffdprefetch.pool.node_pool import NodePool
    from uffdprefetch.readers.known_order import KnownOrders

USED_SENSOR = (
    "page tables of the readers at 64 KiB (fault-around maps cached neighbours: an upper bound)"
)
MISS_SENSOR = (
    "/proc/PID/stat majflt of each process of the job, sampled every second and at its exit; "
    "counts every file the process maps"
)
POOL_MISS_SENSOR = (
    f"{MISS_SENSOR}; and every touch that the pool had to read for (exact; before Linux 6.6 the "
    "kernel counts a touch that the pool answers as a major fault, too)"
)
POOL_USED_SENSOR = "the pool's faults: what lies between two touches of one stream counts as used"
READ_SENSOR = (
    "/proc/PID/io rchar of wrap, to which the kernel adds that of each process of the job that was "
    "waited for, from its start: read(2) and the like of any file, pipe or socket"
)
PROCESSES_READ_SENSOR = (
    "/proc/PID/io rchar: read(2) and the like of any file or pipe; a child that its parent "
    "has waited for is in both's"
)
#: Blocks of a file that were read ahead, by what came of them.
_MARKED = ("prefetched_used_blocks_bytes", "prefetched_unused_blocks_bytes")
WAIT_SENSOR = (
    "the agent, from reading the fault to the end of UFFDIO_CONTINUE; its wake-up before that "
    "is not seen from there"
)


def _share(a: int, rest: int) -> float | None:
    """Of a in a and the rest of it."""
    return a / (a + rest) if a + rest else None


def missed_bytes(touched_bytes: int, misses: int | None, by_faults_bytes: int = 0) -> int:
    """What readers had to wait for, of ``touched_bytes`` that they mapped and we had not brought:
    the rest was in memory. A miss brings MISS_BYTES at the most and a page at the
    least, which may have been prefetched and be late. ``by_faults_bytes``: what their own page
    faults have had read, as far as that is known. It is more where the kernel reads further ahead:
    who waits for its readahead is in no counter of misses. Without a miss nobody waited."""
    if misses is None:
        return touched_bytes
    brought_bytes = max(misses * MISS_BYTES, by_faults_bytes) if misses else 0
    return max(misses * PAGE_BYTES, min(touched_bytes, brought_bytes))


def _by_faults_bytes(ledger: Ledger) -> int:
    """What the job's own page faults have had read from storage, from its first byte on, at the
    least: what it took by read(2) may have come from there as well."""
    storage, by_calls = _sum_known(ledger.jobs.storage), _sum_known(ledger.jobs.read)
    return max(0, (storage or 0) - (by_calls or 0))


def totals(
    ledger: Ledger,
    files: list[dict[str, Any]],
    pool: dict[str, Any] | None,
    followed: dict[str, Any] | None,
    gain: Callable[[dict[str, Any]], Gained],
) -> doc.Totals:
    """Sums over files and processes; every ratio has its denominator beside it. ``followed``: what
    is known of reads by calls; ``gain``: told the figures of bytes and misses, what they came to in
    time."""

    def sum_of(name: str) -> int:
        return sum(f[name] for f in files)

    watched = [process.watched for process in ledger.processes.all()]
    prefetched = sum_of("prefetched_bytes")
    used = sum(map(_used_bytes, files))
    both = sum_of("prefetched_used_blocks_bytes")
    late = sum_of("late_bytes")
    by_calls = _by_calls(files)  # no counter tells their misses, but they are seen where they wait
    read_files = [file for file in ledger.jobs.files() if file["path"] not in by_calls]
    paths = [*(file["path"] for file in read_files), *ledger.unserved]
    uncounted = _uncounted({f["file_system"] for f in files}, paths, followed)
    storage, storage_reason = storage_bytes(watched, uncounted, ledger.jobs.storage)
    reads = ledger.jobs.read or [w.now.read_call_bytes for w in watched]
    misses = sum(w.now.major_faults for w in watched) + (pool["missing_faults"] if pool else 0)
    sensor = POOL_MISS_SENSOR if pool else MISS_SENSOR
    brought = sum(map(_brought_bytes, files))
    others = sum_of("demand_used_blocks_bytes") + both - brought
    waited = sum(f["demand_used_blocks_bytes"] for f in files if f["path"] in by_calls)
    by_faults = 0 if storage is None else _by_faults_bytes(ledger)
    missed = waited + missed_bytes(others - waited, misses if watched else None, by_faults)
    if pool:  # a touch that has waited for what was being read ahead is one of its misses, too
        brought = max(0, min(brought, brought + others - missed))
    figures: dict[str, Any] = {
        "demand_misses": misses if watched else None,
        "prefetched_bytes": prefetched,
        "used_bytes": used,
        "wasted_bytes": prefetched - used,
        "already_resident_bytes": sum_of("already_resident_bytes"),
        "job_storage_bytes": None if storage is None else _sum_known(ledger.jobs.storage),
        "accuracy": used / prefetched if prefetched else None,
        "accuracy_denominator_bytes": prefetched,
        "coverage": _share(brought, missed),
        "coverage_denominator_bytes": brought + missed,
        "timeliness": 1 - late / prefetched if prefetched else None,
        "timeliness_denominator_bytes": prefetched,
    }
    return doc.Totals(
        **figures,
        **vars(gain(figures)),
        demand_misses_sensor=sensor if watched else "no process of the job reported",
        used_sensor=POOL_USED_SENSOR if pool else USED_SENSOR,
        fault_wait_ns=doc.fault_wait(
            WAIT_SENSOR, vars(ledger.checkpoints.fault_wait.quantiles(total=True))
        ),
        storage_read_bytes=storage,
        storage_read_reason=storage_reason,
        unserved_read_bytes=_read_by_calls(reads, pool, followed),
        unserved_read_sensor=READ_SENSOR if ledger.jobs.read else PROCESSES_READ_SENSOR,
        unserved_read_files=read_files,
        unserved_read_files_sensor=(
            "positions of descriptors in /proc/PID/fdinfo, each second: a lower bound; pread(2), "
            "io_uring and what is read between two looks leave no trace"
        ),
        checkpoints={
            "laid": ledger.checkpoints.laid,
            "taken_away": 0,  # none ever is; the key is older
            "rearmed": ledger.checkpoints.rearmed,
            "lost_events": ledger.checkpoints.dropped_events,
        },
        freshness=ledger.freshness.describe(),
    )


def _by_calls(files: list[dict[str, Any]]) -> set[str]:
    """Paths of those that were read by calls, and followed."""
    return {file["path"] for file in files if file["served_by"] == "reads"}


def _uncounted(kinds: set[str], paths: list[str], followed: dict[str, Any] | None) -> set[str]:
    """File systems of these ``kinds``, of these ``paths`` and of small files whose reads the kernel
    counts for no process."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:  # no descriptor is left: kinds of file systems are not worth the summary
        mountinfo = ""
    known = kinds.union(type_at(path, mountinfo) for path in paths)
    small = (followed or {}).get("small_files") or {}
    return {kind for kind in known if mounted(kind).counts_reads is False}.union(
        small.get("uncounted", ())
    )


def _brought_bytes(file: dict[str, Any]) -> int:
    """Of the blocks of a file that were read ahead and used as much as was not in memory already:
    brought by the readers' own misses, or of old. What is asked for once more, since it has left
    the pool for its disk or has not left, says nothing of that."""
    ahead, marked = file["prefetched_bytes"], sum(file[name] for name in _MARKED)
    there = min(file["already_resident_bytes"], max(0, marked - ahead))
    share = ahead / (ahead + there) if ahead else 0.0
    return round(file["prefetched_used_blocks_bytes"] * share)


def _read_by_calls(
    reads: list[int | None], pool: dict[str, Any] | None, followed: dict[str, Any] | None
) -> int | None:
    """By the job, and not followed: its agents read files in the pool's stead, in its processes."""
    total = None if None in reads else sum(r or 0 for r in reads)
    ours = (pool["stand_in_bytes"] if pool else 0) + (followed["read_bytes"] if followed else 0)
    return None if total is None else max(0, total - ours)


def _used_bytes(file: dict[str, Any]) -> int:
    """Of what was prefetched of a file as much as of the blocks that it lies in."""
    both, unused = (file[name] for name in _MARKED)
    return of_prefetched(file["prefetched_bytes"], both, both + unused)


@dataclass(frozen=True)
class Read:
    """What a run has read, and how, as the summary's rows; ``reads``: the requests of each file
    that the kernel would have made; ``quickest_fills``: see NodePool; ``followed``: what is known
    of reads by calls, None: nobody follows them."""

    files: list[dict[str, Any]]
    streams: list[dict[str, Any]]
    plans: list[dict[str, Any]]
    pool: dict[str, Any] | None
    reads: list[FileReads]
    quickest_fills: list[tuple[int, float]]
    followed: dict[str, Any] | None = None


def read_so_far(
    ledger: Ledger, table: FileTable, clients: Mapping[int, Client], windows: Windows,
    arbiter: Arbiter, orders: KnownOrders | None, pool: NodePool | None,
    followed: dict[str, Any] | None = None,
) -> Read:  # fmt: skip
    """By now, of the files that are closed as well."""
    in_pool = pool.summary() if pool else None  # takes the files' counts as well
    if orders:
        orders.note_read()
    files = [describe_file(file, ledger.serving.modes) for file in table.all]
    readers = [one for client in clients.values() for one in client.readers.values()]
    return Read(
        [
            {**file, **arbiter.describe_file(file["path"])}
            for file in [*files, *ledger.closed.files]
        ],
        [
            *ledger.closed.streams,
            *(
                describe_stream(reader, stream, windows.late_extents(stream))
                for reader in readers
                for stream in reader.table.active()
            ),
        ],
        orders.describe() if orders else [],
        in_pool,
        [*ledger.closed.reads, *map(reads_of, table.all)],
        pool.quickest_fills() if pool else [],
        followed,
    )


def _gained(
    ledger: Ledger, scheduler: Scheduler, read: Read, waits: Waits, figures: dict[str, Any]
) -> Gained:
    """What came of it in seconds (service/gained.py)."""
    touched, pool = 0, read.pool
    if not figures["demand_misses"]:  # else the kernel's own readahead may have brought it
        touched = sum(file["demand_used_blocks_bytes"] for file in read.files)
    return gained(
        read.reads,
        figures["used_bytes"],
        figures["wasted_bytes"],
        max(figures["already_resident_bytes"], touched),
        figures["demand_misses"] or 0,
        0 if figures["job_storage_bytes"] is None else _by_faults_bytes(ledger),
        waits.watched(_pool_waits_ns(pool) if pool else 0),
        scheduler.meter.cost(read.quickest_fills),
    )


def _pool_waits_ns(pool: Mapping[str, Any]) -> int:
    """Of all that waited for it. That a thread is woken after that is not in what was counted."""
    return (pool["demand_wait_ns"].sum or 0) + int(pool["missing_faults"] * LATENCY_LEAST * 1e9)


def _sum_known(numbers: list[int | None]) -> int | None:
    """None where one is, or where there is none."""
    known = [n for n in numbers if n is not None]
    return sum(known) if numbers and len(known) == len(numbers) else None


def storage_bytes(
    watched: list[processes.Watched], uncounted: set[str], jobs_storage: list[int | None]
) -> tuple[int | None, str | None]:
    """Bytes that really came from storage, or (None, why). ``uncounted``: file systems that the job
    was seen to read and whose reads the kernel does not count; ``jobs_storage``: of each launcher's
    job from its first byte, where that was told."""
    if uncounted:
        return None, f"{', '.join(sorted(uncounted))} does not count into /proc/PID/io read_bytes"
    ours = processes.read("self")
    if ours is None or ours.storage_bytes is None:
        return None, "/proc/PID/io cannot be read"
    total = ours.storage_bytes
    of_jobs = _sum_known(jobs_storage)
    if of_jobs is not None:
        return total + of_jobs, None
    for w in watched:
        if w.now.storage_bytes is None:
            return None, f"/proc/{w.pid}/io cannot be read"
        total += w.now.storage_bytes
    return total, None


def notes(ledger: Ledger, scheduler: Scheduler) -> tuple[Note, ...]:
    """What worked less well than it could, up to now."""
    results = scheduler.results
    if not results.failed_extents:
        return tuple(ledger.noted.all)
    failed = f"{results.failed_extents} extents could not be read ({results.last_error})"
    return (*ledger.noted.limits, Note(failed), *ledger.noted.left_alone)


def degradations(ledger: Ledger, scheduler: Scheduler) -> tuple[str, ...]:
    """The same as lines."""
    return tuple(note.line for note in notes(ledger, scheduler))


def summary(
    config: Config,
    run: str,
    ledger: Ledger,
    scheduler: Scheduler,
    read: Read,
    workers_cpu: float,
    waits: Waits,
    cluster: dict[str, Any] | None = None,
    stood_still_ns: int = 0,
) -> dict[str, Any]:
    """The document of docs/summary-schema.md."""
    wall = ledger.seconds()
    service_cpu = max(0.0, time.process_time() - workers_cpu)
    ranks: dict[int, dict[str, Any]] = {}
    for one in ledger.processes.all():
        entry = ranks.setdefault(
            one.rank,
            {
                "rank": one.rank,
                "local_rank": one.local_rank,
                "processes": [],
                "processes_not_listed": 0,
                "demand_misses": 0,
            },
        )
        if one.command or one.watched.pid:
            entry["processes"].append({"pid": one.watched.pid, "command": one.command})
        else:
            entry["processes_not_listed"] += one.count
        entry["demand_misses"] += one.watched.misses
    storage = scheduler.meter.storage
    figures = totals(
        ledger, read.files, read.pool, read.followed,
        lambda found: _gained(ledger, scheduler, read, waits, found),
    )  # fmt: skip
    return vars(
        doc.Summary(
            run=run,
            host=os.uname().nodename,
            engine=config.engine,
            engine_asked=config.engine_asked,
            policy=config.policy,
            pool=read.pool,
            cluster=cluster,
            rung=ledger.serving.rung,
            rung_reason=ledger.serving.reason,
            rung_lifts=ledger.serving.lifts,
            rung_remedy=ledger.serving.remedy,
            wall_seconds=round(wall, 3),
            ranks=[ranks[rank] for rank in sorted(ranks)],
            files=read.files,
            streams=read.streams,
            plans=read.plans,
            reads=read.followed,
            refused=ledger.refused,
            coarse=ledger.serving.coarse,
            unserved=[
                one.describe()
                for one in sorted(ledger.unserved.values(), key=lambda one: -one.mapped_bytes)
            ],
            totals=vars(figures),
            service=doc.service(
                service_cpu,
                max(0.0, service_cpu - ledger.started_cpu_seconds) / wall,
                workers_cpu,
                stood_still_seconds=stood_still_ns / 1e9,
            ),
            storage=doc.storage(
                "finished extents of 1 MiB and more (EWMA; latency: least of the last 64)",
                round(storage.bandwidth_bytes_per_second) or None,
                scheduler.meter.told_latency,
            ),
            degradations=list(degradations(ledger, scheduler)),
            notes=[
                {"path": note.path, "text": note.text, "asked": note.is_asked}
                for note in notes(ledger, scheduler)
                if note.is_mendable
            ],
            timeline=doc.timeline(
                ledger.timeline.width_seconds, [vars(b) for b in ledger.timeline.bins]
            ),
        )
    )
