# SPDX-License-Identifier: Apache-2.0
"""What to change, most costly first: each finding with its number and its remedy. Pure.

A rule looks at the report (docs/trace-report.md), at files of one kind together, and is silent
where there is nothing to gain. A finding's `cost` is seconds of stall, added over ranks, that it is
about: an order, no promise. No second is told twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from uffdprefetch.base.units import format_size
from uffdprefetch.trace.analyse.advice import (
    MIB,
    WALK_BYTES,
    WRAP,
    Entry,
    FileKind,
    Finding,
    ReportLookup,
    percent,
    settle,
    who_text,
)
from uffdprefetch.trace.analyse.findings_job import JOB_RULES

#: Least accesses, and bytes, of a finding.
ACCESSES_MIN = 16
WAITS_MIN = MAJORS_MIN = 64
USELESS_MIN_BYTES = MIB
#: Least shares of the bytes read for the findings "useless" and "read again".
USELESS, AGAIN = 0.2, 0.1
#: Least share of its way that a skipping reader leaves out: two that take turns leave out a half.
SKIPPED = 0.3
#: Waits per MiB from which the kernel's readahead is too small to hide the storage's latency: its
#: default of 128 KiB gives 8.
WAITS_PER_MIB = 1.0
#: Mean pages of a major fault up to which a file counts as read page by page.
SINGLE_PAGES = 2
#: Least bytes by read(2) for the finding that a file is read by it.
READ_MIN_BYTES = 16 * MIB


def _majors(readers: Sequence[Entry]) -> int:
    return sum((reader["faults"] or {}).get("major") or 0 for reader in readers)


def _filled_per_major(kind: FileKind) -> float | None:
    """Bytes that a major fault brought with its readahead, on average; None: not known."""
    if any(file["fill_by"] is None for file in kind.files):
        return None
    filled = sum(file["fill_by"]["ranks"] + file["fill_by"]["kernel"] for file in kind.files)
    return filled / max(1, _majors(kind.readers))


def skipping(report: ReportLookup) -> Iterator[Finding]:
    """[Stanovnik]: each rank reads a record and leaves out the next n - 1."""
    for kind in report.kinds:
        readers = [
            r
            for r in kind.readers
            if r["pattern"]["name"] in ("strided", "sequential", "backward")
            and (r["pattern"]["skipped_share"] or 0) >= SKIPPED
        ]
        if sum(r["pattern"]["accesses"] for r in readers) < ACCESSES_MIN:
            continue
        kind = kind.of(readers)
        useless, of = kind.sum("useless_bytes"), kind.sum("useless_denominator_bytes")
        share = useless / of if of else 0.0
        wasteful = share >= USELESS and useless >= USELESS_MIN_BYTES
        if not wasteful and not report.matters(readers):
            continue
        strides = {r["pattern"]["stride_records"] for r in readers}
        n = strides.pop() if len(strides) == 1 else None
        skipped = sum(r["pattern"]["skipped_share"] for r in readers) / len(readers)
        what = f"{n - 1} of {n} records" if n and n > 1 else f"{percent(skipped)} of the way"
        stall = report.stall(readers)
        title = f"{who_text(readers, 'skip')} {what} of {kind.name}"
        if wasteful:
            title += f": {percent(share)} of what is read is never used"
            detail = (
                f"{format_size(useless)} of {format_size(of)} came into the page cache and was not"
                " mapped since (at least)."
            )
            cost = None if stall is None else stall * share
        else:
            detail = "What one leaves out is read for another, but not in the order of its own way."
            cost = None if stall is None else stall / 2
        remedy = (
            "give each rank a contiguous part of the file (5 to 6 times as fast for Stanovnik"
            " et al.)"
        )
        if len(report.ranks) < 2:
            remedy = "write the records that are used to a file of their own"
        elif report.wrap_helps(kind):
            remedy += f"; or {WRAP}, which reads ahead of each rank"
        yield Finding(
            title, detail, remedy, "Stanovnik et al., sections 5.2 and 6", cost,
            "medium" if wasteful else "low", readers, kind.files,
        )  # fmt: skip


def _rows_of_single_pages(report: ReportLookup, kind: FileKind) -> int:
    """Number of rows of pages that were read one after the other, each alone; 0: not so."""
    majors, per_major = _majors(kind.readers), _filled_per_major(kind)
    if per_major is None or per_major > SINGLE_PAGES * report.page_bytes or majors < MAJORS_MIN:
        return 0
    rows = majors - sum(r["majors_of_next_page"] or 0 for r in kind.readers)
    return rows if majors >= 2 * rows else 0


def single_pages(report: ReportLookup) -> Iterator[Finding]:
    """MADV_RANDOM (LMDB's readahead=False): each cold page is a read of its own."""
    for kind in report.kinds:
        rows = _rows_of_single_pages(report, kind)
        if not rows:
            continue
        majors, per_major = _majors(kind.readers), _filled_per_major(kind) or 0.0
        lmdb = any(f["format"] == "lmdb" or f["path"].endswith(".mdb") for f in kind.files)
        cause = "readahead=False" if lmdb else "madvise(MADV_RANDOM)"
        remedy = f"leave {cause} out where records are read in order"
        if majors * report.page_bytes >= rows * WALK_BYTES and report.wrap_helps(kind):
            remedy += f"; or {WRAP}, which reads whole windows"
        yield Finding(
            f"{cause} costs {majors} major faults on {kind.name}",
            f"Each cold page is read alone: {format_size(per_major)} per major fault, although"
            f" {majors / rows:.0f} pages are read in a row.",
            remedy, "tracepoints: fills per major fault", report.stall(kind.readers), "medium",
            kind.readers, kind.files,
        )  # fmt: skip


def small_readahead(report: ReportLookup) -> Iterator[Finding]:
    """A reader in order that waits for storage again and again."""
    for kind in report.kinds:
        readers = [
            r
            for r in kind.readers
            if r["pattern"]["name"] in ("consecutive", "sequential", "backward")
            and (r["pattern"]["skipped_share"] or 0) < SKIPPED
        ]
        waits = sum(r["stalls"] or 0 for r in readers)
        pages = sum(r["touched_pages"] for r in readers)
        if report.wrapped or waits < WAITS_MIN or not report.matters(readers):
            continue
        if _rows_of_single_pages(report, kind):
            continue  # single_pages() has it
        per_mib = waits / (pages * report.page_bytes / MIB)
        if per_mib < WAITS_PER_MIB:
            continue
        kind = kind.of(readers)
        ahead = [file["readahead"] for file in kind.files if file["readahead"]]
        made = sum(one["decisions"] for one in ahead)
        size = "little at a time"
        if made:
            size = f"{format_size(sum(one['bytes'] for one in ahead) // made)} at a time"
        limit = kind.files[0]["read_ahead_bytes"]
        ways = {r["pattern"]["name"] for r in readers}
        how = "backward" if ways == {"backward"} else "in order"
        remedy = "as root, raise read_ahead_kb of the file system's device"
        if report.wrap_helps(kind):
            remedy = f"{WRAP}; or, {remedy}"
        yield Finding(
            f"the kernel reads {kind.name} {size}: {per_mib:.1f} waits per MiB",
            f"{waits} waits ({_majors(readers)} major faults) on {report.size_of(pages)} read"
            f" {how}" + (f"; read_ahead_kb is {limit // 1024}." if limit is not None else "."),
            remedy, "tracepoints: sleeps in faults, readahead", report.stall(readers), "low",
            readers, kind.files,
        )  # fmt: skip


def random_order(report: ReportLookup) -> Iterator[Finding]:
    """A shuffle that the kernel cannot read ahead of."""
    for kind in report.kinds:
        readers = [r for r in kind.readers if r["pattern"]["name"] == "random"]
        if not readers or not report.matters(readers):
            continue
        whole = report.is_read_whole(kind)
        kind = kind.of(readers)
        majors = f"{_majors(readers)} major faults; the order is known to the job alone."
        if whole:
            detail = majors
            remedy = (
                "shuffle contiguous blocks of some MiB and the records within them in memory"
                + _read_before(kind)
            )
            if report.wrap_helps(kind):
                remedy = (
                    f"{WRAP}, which knows the order of a PyTorch loader (or is told it: --plan),"
                    f" and reads a file that fits as a whole when that pays; or {remedy}"
                )
        else:
            touched = kind.sum("touched_pages") / max(1, kind.sum("pages"))
            detail = (
                f"At most {percent(touched)} of it are used; the rest would be read for nothing."
                f" {majors}"
            )
            remedy = READ_AT_RANDOM
            if not report.wrapped:
                remedy += (
                    "; where the order is known before it is read (a PyTorch loader, a file for"
                    " --plan), `uffdprefetch wrap` reads that alone"
                )
        yield Finding(
            f"{who_text(readers, 'read')} {kind.name} in random order: the kernel cannot read"
            " ahead",
            detail, remedy, "Stanovnik et al., section 6.1", report.stall(readers), "low", readers,
            kind.files,
        )  # fmt: skip


def read_again(report: ReportLookup) -> Iterator[Finding]:
    """Pages that left the cache and had to be read once more."""
    for kind in report.kinds:
        again, filled = kind.sum("refilled_bytes"), kind.sum("fill_bytes")
        if again < USELESS_MIN_BYTES or again < AGAIN * filled:
            continue
        stall = report.stall(kind.readers)
        seen = any(file["evicted_bytes"] is not None for file in kind.files)
        yield Finding(
            f"{format_size(again)} of {kind.name} were read from storage more than once",
            f"{percent(again / filled)} of {format_size(filled)}; "
            + (
                f"{format_size(kind.sum('evicted_bytes'))} left the page cache."
                if seen
                else "what left the page cache was not seen."
            ),
            "give the job more memory (memory.max of its cgroup), or let each node read a"
            " contiguous part that fits",
            "Stanovnik et al., section 6.1",
            None if stall is None else stall * again / filled, "medium", kind.readers, kind.files,
        )  # fmt: skip


def _read_again_bytes(pool: Mapping[str, Any]) -> int:
    """From storage: what has come back from the disk tier was not."""
    return max((pool["warm_again_bytes"] or 0) - (pool.get("disk_read_bytes") or 0), 0)


def pool_too_small(report: ReportLookup) -> Iterator[Finding]:
    """`--engine pool`: what it lets go in order to read it again."""
    for kind in report.kinds:
        kind = kind.only([file for file in kind.files if file.get("pool")])
        pools = [file["pool"] for file in kind.files]
        again = sum(_read_again_bytes(pool) for pool in pools)
        warm = sum(pool["warm_bytes"] for pool in pools)
        if again < USELESS_MIN_BYTES or again < AGAIN * warm:
            continue
        missed, touches = (sum(pool[name] for pool in pools) for name in ("missed", "touches"))
        yield Finding(
            f"the pool let {format_size(again)} or more of {kind.name} go and read it again",
            f"{percent(again / warm)} of {format_size(warm)} asked for ahead; {missed} of {touches}"
            " touches had to wait.",
            f"a larger --budget, up to {format_size(kind.size_bytes)}; or a part of the file for"
            " each node that fits",
            "service: what was punched, and asked for since", None, "low", kind.readers, kind.files,
        )  # fmt: skip


#: What to do about read(2) in order, by whether it was recorded under `wrap`; in none; of what is
#: in memory.
READ_BY_CALLS = (
    "`uffdprefetch wrap`, which reads ahead of them; or map the file (numpy.memmap, mmap), or"
    " enlarge the program's own read-ahead buffer"
)
READ_BY_WRAP = (
    "`reads` of the run's summary says what was followed, and what was left alone and why; or map"
    " the file (numpy.memmap, mmap), or enlarge the program's own read-ahead buffer"
)
READ_AT_RANDOM = (
    "store together what is read together, or sort what is read at a time by its place in the file"
)
READ_FROM_MEMORY = "none is needed; where the copies cost CPU, map the file (numpy.memmap, mmap)"
#: Share of what came from storage that the service has read, from which reads were served: the
#: beginning is read before it is up.
SERVED = 0.75


def _follows_calls(reader: Entry) -> bool:
    """Whether `wrap` reads ahead of who reads by calls: in order, a gap begins anew
    (docs/reads.md)."""
    return bool(
        reader["pattern"]["name"] == "consecutive" or reader["runs"]["bytes_p50"] >= WALK_BYTES
    )


def _remedy_of_calls(report: ReportLookup, kind: FileKind) -> str:
    if not kind.sum("fill_bytes"):
        return READ_FROM_MEMORY
    in_order = sum(r["read_call_bytes"] for r in kind.readers if _follows_calls(r))
    if 2 * in_order >= sum(r["read_call_bytes"] for r in kind.readers):
        return READ_BY_WRAP if report.wrapped else READ_BY_CALLS
    return READ_AT_RANDOM + (_read_before(kind) if report.is_read_whole(kind) else "")


def _read_before(kind: FileKind) -> str:
    """... or all of it before, in order."""
    them = "it" if len(kind.files) == 1 else "them"
    return (
        f"; or, if {format_size(kind.size_bytes)} fit into the page cache, read {them} once before"
        f" (`cat {kind.files[0]['path']} > /dev/null`)"
    )


def not_read_by_mmap(report: ReportLookup) -> Iterator[Finding]:
    """read(2) and its kind, which make no faults."""
    for kind in report.kinds:
        readers = [r for r in kind.readers if r["read_call_bytes"]]
        taken = sum(r["read_call_bytes"] for r in readers)
        touched = sum(r["touched_pages"] for r in readers) * report.page_bytes
        if taken < READ_MIN_BYTES or taken < touched / 2:
            continue
        kind = kind.of(readers)
        calls = [file["read_calls"] for file in kind.files if file["read_calls"]]
        waited = sum(one["seconds"] for one in calls) if calls else None
        filled = kind.sum("fill_bytes")
        by_service = sum((file["fill_by"] or {}).get("service", 0) for file in kind.files)
        if filled and by_service >= SERVED * filled:
            continue  # prefetching() has what they waited for all the same
        if not filled:
            waited = None  # they copied what was in memory
        yield Finding(
            f"{kind.name} {'is' if len(kind.files) == 1 else 'are'} read by read(2):"
            f" {format_size(taken)}",
            f"{format_size(filled)} came from storage." if filled else "All was in memory.",
            _remedy_of_calls(report, kind),
            "tracepoint mm_filemap_get_pages", waited, "medium" if report.wrapped else "low",
            readers, kind.files, waits="in read(2)",
        )  # fmt: skip


RULES: tuple[Callable[[ReportLookup], Iterator[Finding]], ...] = (
    skipping, single_pages, small_readahead, random_order, read_again, pool_too_small,
    not_read_by_mmap,
    *JOB_RULES,
)  # fmt: skip


def findings(document: dict[str, Any]) -> list[Entry]:
    """The findings of a report, most costly first; then by severity."""
    report = ReportLookup(document)
    found = [one for rule in RULES for one in rule(report)]
    return [one.entry(report) for one in settle(found, report)]
