# SPDX-License-Identifier: Apache-2.0
"""Rules about the job as a whole: how ranks share files, the storage's layout, our service, and
what the trace itself lacks. Pure; see findings.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from statistics import median

from uffdprefetch.base.units import format_duration, format_rate, format_size, format_size_exact
from uffdprefetch.trace.analyse.advice import (
    ALL,
    AROUND_BYTES,
    MEDIUM,
    MIB,
    Finding,
    ReportLookup,
    percent,
    ranks_text,
)

#: Ratio of a stripe size to the best one, either way, from which it is a finding: a new layout
#: moves all data.
STRIPE_FACTOR = 2.0
#: Ratio of a rank's stall, and of its bytes, to the others' median, from which it is a finding.
UNEVEN_STALL, UNEVEN_BYTES = 2.0, 1.5
#: Directories of programs that belong to no package.
_SYSTEM = ("/usr", "/lib", "/bin", "/sbin", "/opt", "/etc", "/sys", "/proc")
#: Longest time that a program takes to load its libraries from memory.
STARTING_SECONDS = 0.25
#: Least shares of the prefetched bytes for the findings "unused" and "late".
UNUSED, LATE = 0.5, 0.25
#: Least bytes that the service has read from storage for a finding about it.
READ_MIN_BYTES = 16 * MIB
#: Share of the time between the service's first and last read with one under way, from which the
#: storage is the bottleneck.
BUSY = 0.9


def stripe(report: ReportLookup) -> Iterator[Finding]:
    """[Haderbache] section 2.3, [Stanovnik]: stripe size = batch bytes x GPUs per node."""
    hosts = max(1, len(str(report.trace.get("host") or "").split(",")))
    for kind in report.kinds:
        for stripe_bytes in sorted({file["stripe_bytes"] or 0 for file in kind.files} - {0}):
            part = kind.only([f for f in kind.files if f["stripe_bytes"] == stripe_bytes])
            readers = [r for r in part.readers if r.get("batch_bytes")]
            if not readers:
                continue
            part = part.of(readers)
            ranks = max(1, round(len({r["rank"] for r in readers}) / hosts))
            batch = int(median(r["batch_bytes"] for r in readers))
            best_bytes = max(1, round(batch * ranks / MIB)) * MIB
            off = stripe_bytes / best_bytes
            if 1 / STRIPE_FACTOR < off < STRIPE_FACTOR:
                continue
            path = part.files[0]["path"]
            size = format_size_exact(best_bytes).removesuffix("iB")
            stall = report.stall(readers)
            yield Finding(
                f"{part.name} {'has' if len(part.files) == 1 else 'have'} stripes of"
                f" {format_size(stripe_bytes)}, batches are about {format_size(batch)} x {ranks}"
                " per node",
                "A stripe should hold one batch of all ranks of a node.",
                f"`lfs setstripe -S {size} -c -1 {os.path.dirname(path)}` for new files; one that"
                f" exists moves by `lfs migrate -S {size} -c -1 {path}`",
                "Haderbache et al., Stanovnik et al.: stripe = batch bytes x GPUs per node",
                None if stall is None else stall * (1 - min(off, 1 / off)) / 2, "low", readers,
                part.files,
            )  # fmt: skip


def shared_lock(report: ReportLookup) -> Iterator[Finding]:
    """[Stanovnik] section 4.2: ranks contend for LMDB's lock file."""
    for kind in report.kinds:
        shared = kind.only([f for f in kind.files if _is_lock(f["path"]) and len(f["ranks"]) > 1])
        if not shared.files:
            continue
        folder, name = os.path.split(shared.files[0]["path"])
        ranks = len({rank for file in shared.files for rank in file["ranks"]})
        more = f", and {len(shared.files) - 1} like it," if len(shared.files) > 1 else ""
        yield Finding(
            f"{name} of {folder}{more} is shared by {ranks} ranks",
            "On a parallel file system its lock is passed from rank to rank (it stalled training"
            " for Stanovnik et al.).",
            "run it under `uffdprefetch wrap --ownlock -- CMD`, or open with lock=False where"
            " nobody writes",
            "Stanovnik et al., section 4.2", None, "medium", files=shared.files,
        )  # fmt: skip


def _is_lock(path: str) -> bool:
    name = os.path.basename(path)
    return name == "lock.mdb" or name.endswith("-lock")


def uneven_stall(report: ReportLookup) -> Iterator[Finding]:
    """One rank waits much longer: the others wait for it at the next synchronisation."""
    by_rank = {
        rank: report.stall([r for r in report.readers if r["rank"] == rank])
        for rank in report.ranks
    }
    known = {rank: stall for rank, stall in by_rank.items() if stall is not None}
    if len(known) < 2:
        return
    worst = max(known, key=lambda rank: known[rank])
    usual = median(stall for rank, stall in known.items() if rank != worst)
    extra = known[worst] - usual
    if known[worst] < UNEVEN_STALL * usual or extra < MEDIUM * report.seconds:
        return
    yield Finding(
        f"rank {worst} stalls {format_duration(known[worst])}, the others"
        f" {format_duration(usual)}",
        "At each synchronisation the others wait for it (skew).",
        "look at its part of the file in the access map: another place, another pattern, or a cold"
        " cache",
        "LMDBIO-DM, section III", extra, "medium", [r for r in report.readers if r["rank"] == worst]
    )  # fmt: skip


def uneven_bytes(report: ReportLookup) -> Iterator[Finding]:
    """Shards of very different size."""
    for kind in report.kinds:
        pages: dict[int, int] = {}
        for reader in kind.readers:
            pages[reader["rank"]] = pages.get(reader["rank"], 0) + reader["touched_pages"]
        if len(pages) < 2 or not sum(pages.values()):
            continue
        rank = max(pages, key=lambda one: pages[one])
        usual = median(sorted(pages.values())[:-1])
        if pages[rank] < UNEVEN_BYTES * usual or pages[rank] * report.page_bytes < 4 * MIB:
            continue
        yield Finding(
            f"rank {rank} reads {report.size_of(pages[rank])} of {kind.name}, the others"
            f" {report.size_of(usual)}",
            "The median of the other ranks that read this.",
            "divide the records evenly over the ranks",
            "touched pages by rank", None, "low", [r for r in kind.readers if r["rank"] == rank],
            kind.files,
        )  # fmt: skip


def read_by_all(report: ReportLookup) -> Iterator[Finding]:
    """Every rank reads the whole file in each epoch."""
    for kind in report.kinds:
        touched = {file["id"]: file["touched_pages"] for file in kind.files}
        readers = [
            r
            for r in kind.readers
            if r["epochs"]
            and r["epochs"][0]["touched_pages"] >= ALL * touched[r["file"]]
            and (r["pattern"]["skipped_share"] or 0) < 0.3
            # of small records in random order more is mapped than is read
            and (r["pattern"]["name"] != "random" or r["runs"]["bytes_p50"] >= 2 * AROUND_BYTES)
        ]
        ranks = {r["rank"] for r in readers}
        if len(ranks) < 2 or len(readers) < ALL * len(ranks) * len(kind.files):
            continue
        if len(readers) < ALL * len(kind.readers):
            continue
        whole = sum(touched.values())
        if whole * report.page_bytes < 16 * MIB:
            continue
        pages = sum(r["epochs"][0]["touched_pages"] for r in readers)
        yield Finding(
            f"each of {ranks_text(list(ranks))} reads all of {kind.name}",
            f"{report.size_of(pages)} for {report.size_of(whole)}: {pages / whole:.1f} times, once"
            " for each node's cache at least.",
            "divide the records over the ranks (a DistributedSampler), unless each is meant to see"
            " them all",
            "LMDBIO-DM: redundant data movement", None, "low", readers, kind.files,
        )  # fmt: skip


_PACK = "pack them into one file that is mapped (LMDB, Arrow)"
_SMALL_PLAIN = (
    "`uffdprefetch wrap`, which reads them ahead where they are opened in an order of their names,"
    f" or in one that is told; or {_PACK}"
)
_SMALL_BY_WRAP = (
    "`reads` of the run's summary says how many were read ahead; where they are opened in no order"
    f" of their names, tell it (`wrap --plan`, uffdprefetch.plan.announce); or {_PACK}"
)


def starting(report: ReportLookup) -> Iterator[Finding]:
    """Programs and libraries that come from slow storage, file by file; or a data set of small
    files."""
    programs = [one for one in report.others if not _is_data(one["name"])]
    data = [one for one in report.others if _is_data(one["name"])]
    for groups, what, remedy in (
        (
            programs,
            "programs and libraries",
            "`uffdprefetch wrap --learn`, which reads them ahead at the next start; or keep the"
            " environment on the node: unpack it into local storage or /dev/shm at the job's start,"
            " or make one image of it (squashfs, a container)",
        ),
        (data, "small files", _SMALL_BY_WRAP if report.wrapped else _SMALL_PLAIN),
    ):
        waited = sum(one["wait_seconds"] for one in groups)
        if waited < MEDIUM * report.run_seconds or waited < STARTING_SECONDS:
            continue
        first, part = groups[0], format_duration(groups[0]["wait_seconds"])
        most = f"nearly all for {first['name']}"
        if part != format_duration(waited):
            most = f"most for {first['name']} ({part})"
        requests = sum(one["requests"] for one in groups)
        filled = sum(one["fill_bytes"] for one in groups)
        yield Finding(
            f"{sum(one['files'] for one in groups)} {what}, {most}",
            f"{requests} requests, {format_size(filled)}, one after the other.",
            remedy, "tracepoints: fills, major faults and read calls of other files", waited, "low",
            waits="of waiting",
        )  # fmt: skip


def _is_data(group: str) -> bool:
    """Whether a group of other files is a directory that holds no programs."""
    return group.startswith("/") and not group.startswith(_SYSTEM)


def prefetching(report: ReportLookup) -> Iterator[Finding]:
    """Our own: read for nothing, or too late."""
    service = report.service
    if service is None:
        return
    read = service["warm_bytes"] - service["warm_cached_bytes"]
    if read < READ_MIN_BYTES:  # the data was in memory
        return
    used = service["warm_used_share"]
    if used is not None and used < UNUSED:
        yield Finding(
            f"{percent(1 - used)} of what was prefetched was not used",
            f"Of {format_size(service['warm_bytes'])}; a job that ends early leaves what lies"
            " ahead of it unused.",
            "leave files of which the job uses a part to the kernel (--exclude GLOB)",
            "service: extents warmed, pages mapped since", None, "medium",
        )  # fmt: skip
    late, extents = service["warm_late_extents"], service["warm_extents"]
    if extents < 16 or late < LATE * extents:
        return
    busy, span = service["warm_busy_seconds"], service["warm_span_seconds"]
    what = f"{late} of {extents} extents were being read when a rank needed them"
    source, stall = "service: extents warmed, faults in them", report.stall(report.readers)
    waits = ""
    if report.read_call_seconds > (stall or 0.0):
        stall, waits = report.read_call_seconds, "in read(2)"
    if busy >= BUSY * span:
        rate = read / busy if busy else 0.0
        yield Finding(
            f"the storage gives less than the ranks take: {what}",
            f"It was read from for {percent(busy / span)} of the time, at {format_rate(rate)}.",
            "fewer bytes from this storage: smaller or compressed records, or a copy of the file"
            " on quicker storage, or --cluster where several nodes read the same",
            source, stall, "low", report.readers, waits=waits,
        )  # fmt: skip
        return
    yield Finding(
        f"prefetching came late: {what}",
        f"The storage was read from for {percent(busy / span)} of the time only.",
        "raise --max-rate and --budget where the run was given them; where the order is known"
        " before, tell it (--plan)",
        source, stall, "low", report.readers, waits=waits,
    )  # fmt: skip


def of_the_trace(report: ReportLookup) -> Iterator[Finding]:
    """Findings about the trace itself, which make the report's numbers weaker."""
    trace = report.trace
    lost, events = trace["lost_events"], trace["events"]
    if lost:
        yield Finding(
            f"{lost} events were lost ({percent(lost / (lost + events))})",
            "Counts are lower bounds, and patterns may show gaps that are none.",
            "record less (--include GLOB), or on a less busy machine",
            "recorder",
        )  # fmt: skip
    if trace["truncated"]:
        yield Finding(
            "the trace does not reach to its end", f"{trace['truncated']}.",
            "record again, or read it as what it is: the run up to there", "trace file",
        )  # fmt: skip
    if trace["raw_until_seconds"] is not None:
        yield Finding(
            f"single events end after {format_duration(trace['raw_until_seconds'])}",
            "Numbers are of that part; the overview goes on in the pictures.",
            "raise --max-events",
            "recorder",
        )  # fmt: skip


JOB_RULES: tuple[Callable[[ReportLookup], Iterator[Finding]], ...] = (
    stripe, shared_lock, uneven_stall, uneven_bytes, read_by_all, starting, prefetching,
    of_the_trace,
)  # fmt: skip
