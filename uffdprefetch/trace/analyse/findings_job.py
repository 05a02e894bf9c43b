# SPDX-License-Identifier: Apache-2.0
"""Rules about the job as a whole: how ranks share files, the storage's layout, our service, and
what the trace itself lacks. Pure; see findings.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from statistics import median

from uffdprefetch.base.units import format_duration, format_size, format_size_exact
from uffdprefetch.trace.analyse.advice import (
    MEDIUM,
    MIB,
    Found,
    Report,
    finding,
    name_of,
    percent,
    ranks_text,
)

#: Factor off the best size, either way, from which a stripe is a finding: to mend it moves data.
STRIPE_FACTOR = 2.0
#: A rank's stall, and its bytes, over the others' median, from which they are a finding.
UNEVEN_STALL, UNEVEN_BYTES = 2.0, 1.5
#: Share of a file's touched pages from which a rank reads all of it.
ALL = 0.8
#: Fault-around (mm/memory.c).
AROUND_BYTES = 65536
#: Where programs lie that are of no package.
_SYSTEM = ("/usr", "/lib", "/bin", "/sbin", "/opt", "/etc", "/sys", "/proc")
#: What a program that starts from memory takes at most, for its libraries.
STARTING_SECONDS = 0.25
#: Shares of what was prefetched that are a finding: unused, late.
UNUSED, LATE = 0.5, 0.25


def stripe(report: Report) -> Iterator[Found]:
    """[Haderbache] section 2.3, [Stanovnik]: stripe size = batch bytes x GPUs per node."""
    hosts = max(1, len(str(report.trace.get("host") or "").split(",")))
    for file in report.files:
        readers = [r for r in report.of_file(file["id"]) if r.get("batch_bytes")]
        stripe_bytes = file["stripe_bytes"]
        if not stripe_bytes or not readers:
            continue
        ranks = max(1, round(len({r["rank"] for r in readers}) / hosts))
        batch = int(median(r["batch_bytes"] for r in readers))
        best_bytes = max(1, round(batch * ranks / MIB)) * MIB
        off = stripe_bytes / best_bytes
        if 1 / STRIPE_FACTOR < off < STRIPE_FACTOR:
            continue
        folder = os.path.dirname(file["path"])
        size = format_size_exact(best_bytes).removesuffix("iB")
        stall = report.stall(readers)
        yield finding(
            report,
            f"{name_of(file)} has stripes of {format_size(stripe_bytes)}, its batches are about"
            f" {format_size(batch)} x {ranks} per node",
            "A stripe should hold one batch of all ranks of a node.",
            f"`lfs setstripe -S {size} -c -1 {folder}` for new files; one that exists moves by"
            f" `lfs migrate -S {size} -c -1 {file['path']}`",
            "Haderbache et al., Stanovnik et al.: stripe = batch bytes x GPUs per node",
            None if stall is None else stall * (1 - min(off, 1 / off)) / 2, "low",
            readers, file["id"],
        )  # fmt: skip


def shared_lock(report: Report) -> Iterator[Found]:
    """[Stanovnik] section 4.2: ranks contend for LMDB's lock file."""
    for file in report.files:
        name = os.path.basename(file["path"])
        if not (name == "lock.mdb" or name.endswith("-lock")) or len(file["ranks"]) < 2:
            continue
        yield finding(
            report,
            f"{name} of {os.path.dirname(file['path'])} is shared by {len(file['ranks'])} ranks",
            "On a parallel file system its lock is passed from rank to rank (it stalled training"
            " for Stanovnik et al.).",
            "run it under `uffdprefetch wrap --ownlock -- CMD`, or open with lock=False where"
            " nobody writes",
            "Stanovnik et al., section 4.2", None, "medium", file=file["id"],
        )  # fmt: skip


def uneven_stall(report: Report) -> Iterator[Found]:
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
    yield finding(
        report,
        f"rank {worst} stalls {format_duration(known[worst])}, the others"
        f" {format_duration(usual)}",
        "At each synchronisation the others wait for it (skew).",
        "look at its part of the file in the access map: another place, another pattern, or a cold"
        " cache",
        "LMDBIO-DM, section III", extra, "medium", [{"rank": worst}],
    )  # fmt: skip


def uneven_bytes(report: Report) -> Iterator[Found]:
    """Shards of very different size."""
    for file in report.files:
        readers = report.of_file(file["id"])
        sizes = [r["touched_pages"] for r in readers]
        if len(readers) < 2 or not sum(sizes):
            continue
        most = max(readers, key=lambda r: r["touched_pages"])
        usual = median(sorted(sizes)[:-1])
        if (
            most["touched_pages"] < UNEVEN_BYTES * usual
            or most["touched_pages"] * report.page_bytes < 4 * MIB
        ):
            continue
        yield finding(
            report,
            f"rank {most['rank']} reads {report.size_of(most['touched_pages'])} of"
            f" {name_of(file)}, the others {report.size_of(usual)}",
            "The median of the other ranks that read this file.",
            "divide the records evenly over the ranks",
            "touched pages by rank", None, "low", [most], file["id"],
        )  # fmt: skip


def read_by_all(report: Report) -> Iterator[Found]:
    """Every rank reads the whole file in each epoch."""
    for file in report.files:
        readers = [
            r
            for r in report.of_file(file["id"])
            if r["epochs"]
            and r["epochs"][0]["touched_pages"] >= ALL * file["touched_pages"]
            and (r["pattern"]["skipped_share"] or 0) < 0.3
            # of small records in random order more is mapped than is read
            and (r["pattern"]["name"] != "random" or r["runs"]["bytes_p50"] >= 2 * AROUND_BYTES)
        ]
        if len(readers) < 2 or len(readers) < ALL * len(report.of_file(file["id"])):
            continue
        pages = sum(r["epochs"][0]["touched_pages"] for r in readers)
        if file["touched_pages"] * report.page_bytes < 16 * MIB:
            continue
        yield finding(
            report,
            f"each of {ranks_text([r['rank'] for r in readers])} reads all of {name_of(file)}",
            f"{report.size_of(pages)} for {report.size_of(file['touched_pages'])}:"
            f" {pages / file['touched_pages']:.1f} times, once for each node's cache at least.",
            "divide the records over the ranks (a DistributedSampler), unless each is meant to see"
            " them all",
            "LMDBIO-DM: redundant data movement", None, "low", readers, file["id"],
        )  # fmt: skip


def starting(report: Report) -> Iterator[Found]:
    """Programs and libraries that come from slow storage, file by file; or a data set of small
    files."""
    programs = [one for one in report.others if not _is_data(one["name"])]
    data = [one for one in report.others if _is_data(one["name"])]
    for groups, what, remedy in (
        (
            programs,
            "programs and libraries",
            "keep the environment on the node: unpack it into local storage or /dev/shm at the"
            " job's start, or make one image of it (squashfs, a container)",
        ),
        (
            data,
            "small files",
            "pack them into one file that is mapped (LMDB, Arrow): `uffdprefetch wrap` serves it",
        ),
    ):
        waited = sum(one["wait_seconds"] for one in groups)
        if waited < MEDIUM * report.run_seconds or waited < STARTING_SECONDS:
            continue
        first = groups[0]
        requests = sum(one["requests"] for one in groups)
        filled = sum(one["fill_bytes"] for one in groups)
        yield finding(
            report,
            f"{sum(one['files'] for one in groups)} {what}: {format_duration(waited)} of waiting,"
            f" most for {first['name']} ({format_duration(first['wait_seconds'])})",
            f"{requests} requests, {format_size(filled)}, one after the other."
            " `uffdprefetch wrap` does not read them ahead.",
            remedy, "tracepoints: fills, major faults and read calls of other files", waited, "low",
        )  # fmt: skip


def _is_data(group: str) -> bool:
    """Whether a group of other files is a directory that holds no programs."""
    return group.startswith("/") and not group.startswith(_SYSTEM)


def prefetching(report: Report) -> Iterator[Found]:
    """Our own: read for nothing, or too late."""
    service = report.service
    if service is None or service["warm_bytes"] < 16 * MIB:
        return
    used = service["warm_used_share"]
    if used is not None and used < UNUSED:
        yield finding(
            report,
            f"{percent(1 - used)} of what was prefetched was not used",
            f"Of {format_size(service['warm_bytes'])}; a job that ends early leaves what lies"
            " ahead of it unused.",
            "lower --budget, or --size with --policy fixed",
            "service: extents warmed, pages mapped since", None, "medium",
        )  # fmt: skip
    late, extents = service["warm_late_extents"], service["warm_extents"]
    if extents >= 16 and late >= LATE * extents:
        yield finding(
            report,
            f"prefetching came late: {late} of {extents} extents were being read when a rank"
            " needed them",
            "The storage, or --max-rate, gives less than the ranks take.",
            "raise --budget and --max-rate; if the storage is the limit, fewer bytes per record",
            "service: extents warmed, faults in them", report.stall(report.readers), "low",
        )  # fmt: skip


def of_the_trace(report: Report) -> Iterator[Found]:
    """What makes the report's own numbers weaker."""
    trace = report.trace
    lost, events = trace["lost_events"], trace["events"]
    if lost:
        yield finding(
            report,
            f"{lost} events were lost ({percent(lost / (lost + events))})",
            "Counts are lower bounds, and patterns may show gaps that are none.",
            "record less (--include GLOB), or on a less busy machine",
            "recorder",
        )  # fmt: skip
    if trace["truncated"]:
        yield finding(
            report, "the trace does not reach to its end", f"{trace['truncated']}.",
            "record again, or read it as what it is: the run up to there", "trace file",
        )  # fmt: skip
    if trace["raw_until_seconds"] is not None:
        yield finding(
            report,
            f"single events end after {format_duration(trace['raw_until_seconds'])}",
            "Numbers are of that part; the overview goes on in the pictures.",
            "raise --max-events",
            "recorder",
        )  # fmt: skip


JOB_RULES: tuple[Callable[[Report], Iterator[Found]], ...] = (
    stripe, shared_lock, uneven_stall, uneven_bytes, read_by_all, starting, prefetching,
    of_the_trace,
)  # fmt: skip
