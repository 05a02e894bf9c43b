# SPDX-License-Identifier: Apache-2.0
"""What to change, most costly first: each finding with its number and its remedy. Pure.

A rule looks at the report (docs/trace-report.md) and is silent where there is nothing to gain. A
finding's `cost` is seconds of stall, added over ranks, that it is about: an order, no promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from uffdprefetch.base.units import format_size
from uffdprefetch.trace.analyse.advice import (
    MIB,
    Found,
    Report,
    finding,
    name_of,
    percent,
    ranks_text,
)
from uffdprefetch.trace.analyse.findings_job import JOB_RULES

#: Counts and bytes below which nothing is worth a finding.
WAITS_MIN = MAJORS_MIN = 64
USELESS_MIN_BYTES = MIB
#: Shares of what was read that are a finding: useless, read again.
USELESS, AGAIN = 0.2, 0.1
#: Share of its way that a reader leaves out who skips: the least is a half, of two that take turns.
SKIPPED = 0.3
#: Waits per MiB read from which the kernel's readahead is too small to hide a storage's latency:
#: its default of 128 KiB gives 8.
WAITS_PER_MIB = 1.0
#: Most pages that a major fault brings, on average, where a file is read page by page.
SINGLE_PAGES = 2
WRAP = "run it under `uffdprefetch wrap -- CMD`"


def _majors(readers: list[dict[str, Any]]) -> int:
    return sum((reader["faults"] or {}).get("major") or 0 for reader in readers)


def _filled_per_major(file: dict[str, Any], readers: list[dict[str, Any]]) -> float | None:
    """Bytes that a major fault brought with its readahead, on average; None: not known."""
    by = file["fill_by"]
    return None if by is None else (by["ranks"] + by["kernel"]) / max(1, _majors(readers))


def skipping(report: Report) -> Iterator[Found]:
    """[Stanovnik]: each rank reads a record and leaves out the next n - 1."""
    for file in report.files:
        readers = [
            r
            for r in report.of_file(file["id"])
            if r["pattern"]["name"] in ("strided", "sequential", "backward")
            and (r["pattern"]["skipped_share"] or 0) >= SKIPPED
            and r["pattern"]["accesses"] >= 16
        ]
        if not readers:
            continue
        useless, share = file["useless_bytes"] or 0, file["useless_share"] or 0.0
        wasteful = share >= USELESS and useless >= USELESS_MIN_BYTES
        if not wasteful and not report.matters(readers):
            continue
        who = ranks_text([r["rank"] for r in readers])
        verb = "skips" if len(readers) == 1 else "skip"
        strides = {r["pattern"]["stride_records"] for r in readers}
        n = strides.pop() if len(strides) == 1 else None
        skipped = sum(r["pattern"]["skipped_share"] for r in readers) / len(readers)
        what = f"{n - 1} of {n} records" if n and n > 1 else f"{percent(skipped)} of the way"
        stall = report.stall(readers)
        if wasteful:
            title = f"{who} {verb} {what} of {name_of(file)}: {percent(share)} of what is read"
            title += " is never used"
            detail = (
                f"{format_size(useless)} of {format_size(file['useless_denominator_bytes'])} came"
                " into the page cache and was not mapped since (at least)."
            )
            cost = None if stall is None else stall * share
        else:
            title = f"{who} {verb} {what} of {name_of(file)}"
            detail = "What one leaves out is read for another, but not in the order of its own way."
            cost = None if stall is None else stall / 2
        remedy = (
            "give each rank a contiguous part of the file (5 to 6 times as fast for Stanovnik"
            " et al.)"
        )
        if len(report.ranks) < 2:
            remedy = "write the records that are used to a file of their own"
        elif not report.wrapped:
            remedy += f"; or {WRAP}, which reads ahead of each rank"
        yield finding(
            report, title, detail, remedy, "Stanovnik et al., sections 5.2 and 6", cost,
            "medium" if wasteful else "low", readers, file["id"],
        )  # fmt: skip


def _rows_of_single_pages(report: Report, file: dict[str, Any]) -> int:
    """How many rows of pages were read one after the other, each alone; 0: not so."""
    readers = report.of_file(file["id"])
    majors, per_major = _majors(readers), _filled_per_major(file, readers)
    if per_major is None or per_major > SINGLE_PAGES * report.page_bytes or majors < MAJORS_MIN:
        return 0
    rows = majors - sum(r["majors_of_next_page"] or 0 for r in readers)
    return rows if majors >= 2 * rows else 0


def single_pages(report: Report) -> Iterator[Found]:
    """MADV_RANDOM (LMDB's readahead=False): each cold page is a read of its own."""
    for file in report.files:
        rows = _rows_of_single_pages(report, file)
        if not rows:
            continue
        readers = report.of_file(file["id"])
        majors, per_major = _majors(readers), _filled_per_major(file, readers) or 0.0
        lmdb = file["format"] == "lmdb" or file["path"].endswith(".mdb")
        cause = "readahead=False" if lmdb else "madvise(MADV_RANDOM)"
        yield finding(
            report,
            f"{cause} costs {majors} major faults on {name_of(file)}",
            f"Each cold page is read alone: {format_size(per_major)} per major fault, although"
            f" {majors / rows:.0f} pages are read in a row.",
            f"leave {cause} out where records are read in order"
            + ("" if report.wrapped else f"; or {WRAP}, which reads whole windows"),
            "tracepoints: fills per major fault", report.stall(readers), "medium", readers,
            file["id"],
        )  # fmt: skip


def small_readahead(report: Report) -> Iterator[Found]:
    """A reader in order that waits for storage again and again."""
    for file in report.files:
        readers = [
            r
            for r in report.of_file(file["id"])
            if r["pattern"]["name"] in ("consecutive", "sequential", "backward")
            and (r["pattern"]["skipped_share"] or 0) < SKIPPED
        ]
        waits = sum(r["stalls"] or 0 for r in readers)
        pages = sum(r["touched_pages"] for r in readers)
        if report.wrapped or waits < WAITS_MIN or not report.matters(readers):
            continue
        if _rows_of_single_pages(report, file):
            continue  # single_pages() has it
        per_mib = waits / (pages * report.page_bytes / MIB)
        if per_mib < WAITS_PER_MIB:
            continue
        ahead = file["readahead"]
        size = f"{format_size(ahead['mean_bytes'])} at a time" if ahead else "little at a time"
        limit = file["read_ahead_bytes"]
        ways = {r["pattern"]["name"] for r in readers}
        how = "backward" if ways == {"backward"} else "in order"
        yield finding(
            report,
            f"the kernel reads {name_of(file)} {size}: {per_mib:.1f} waits per MiB",
            f"{waits} waits ({_majors(readers)} major faults) on {report.size_of(pages)} read"
            f" {how}" + (f"; read_ahead_kb is {limit // 1024}." if limit is not None else "."),
            f"{WRAP}; or, as root, raise read_ahead_kb of the file system's device",
            "tracepoints: sleeps in faults, readahead", report.stall(readers), "low", readers,
            file["id"],
        )  # fmt: skip


def random_order(report: Report) -> Iterator[Found]:
    """A shuffle that the kernel cannot read ahead of."""
    for file in report.files:
        readers = [r for r in report.of_file(file["id"]) if r["pattern"]["name"] == "random"]
        if not readers or not report.matters(readers):
            continue
        verb = "reads" if len(readers) == 1 else "read"
        remedy = (
            "shuffle contiguous blocks of some MiB and the records within them in memory; or, if"
            f" {format_size(file['size_bytes'])} fit into the page cache, read the file once"
            f" before (`cat {file['path']} > /dev/null`)"
        )
        if not report.wrapped:
            remedy = (
                f"{WRAP}, which knows the order of a PyTorch loader (or is told it: --plan), and"
                f" reads a file that fits as a whole when that pays; or {remedy}"
            )
        yield finding(
            report,
            f"{ranks_text([r['rank'] for r in readers])} {verb} {name_of(file)} in random order:"
            " the kernel cannot read ahead",
            f"{_majors(readers)} major faults; the order is known to the job alone.",
            remedy,
            "Stanovnik et al., section 6.1", report.stall(readers), "low", readers, file["id"],
        )  # fmt: skip


def read_again(report: Report) -> Iterator[Found]:
    """Pages that left the cache and had to be read once more."""
    for file in report.files:
        again, filled = file["refilled_bytes"] or 0, file["fill_bytes"] or 0
        if again < USELESS_MIN_BYTES or again < AGAIN * filled:
            continue
        readers = report.of_file(file["id"])
        stall = report.stall(readers)
        yield finding(
            report,
            f"{format_size(again)} of {name_of(file)} were read from storage more than once",
            f"{percent(again / filled)} of {format_size(filled)}; "
            + (
                f"{format_size(file['evicted_bytes'])} left the page cache."
                if file["evicted_bytes"] is not None
                else "what left the page cache was not seen."
            ),
            "give the job more memory (memory.max of its cgroup), or let each node read a"
            " contiguous part that fits",
            "Stanovnik et al., section 6.1",
            None if stall is None else stall * again / filled, "medium",
            readers, file["id"],
        )  # fmt: skip


def pool_too_small(report: Report) -> Iterator[Found]:
    """`--engine pool`: what it lets go in order to read it again."""
    for file in report.files:
        pool = file.get("pool") or {}
        again = pool.get("warm_again_bytes") or 0
        if again < USELESS_MIN_BYTES or again < AGAIN * pool["warm_bytes"]:
            continue
        yield finding(
            report,
            f"the pool let {format_size(again)} or more of {name_of(file)} go and read it again",
            f"{percent(again / pool['warm_bytes'])} of {format_size(pool['warm_bytes'])} asked for"
            f" ahead; {pool['missed']} of {pool['touches']} touches had to wait.",
            f"a larger --budget, up to {format_size(file['size_bytes'])}; or a part of the file for"
            " each node that fits",
            "service: what was punched, and asked for since", None, "low",
            report.of_file(file["id"]), file["id"],
        )  # fmt: skip


def not_read_by_mmap(report: Report) -> Iterator[Found]:
    """read(2) and its kind, which make no faults."""
    for file in report.files:
        readers = report.of_file(file["id"])
        taken = sum(r["read_call_bytes"] for r in readers)
        touched = sum(r["touched_pages"] for r in readers) * report.page_bytes
        if taken < 16 * MIB or taken < touched / 2:
            continue
        yield finding(
            report,
            f"{name_of(file)} is read by read(2): {format_size(taken)}",
            "`uffdprefetch wrap` follows mappings; these reads it does not see.",
            "map the file (numpy.memmap, mmap), or enlarge the program's own read-ahead buffer",
            "tracepoint mm_filemap_get_pages", None, "medium" if report.wrapped else "low", readers,
            file["id"],
        )  # fmt: skip


RULES: tuple[Callable[[Report], Iterator[Found]], ...] = (
    skipping, single_pages, small_readahead, random_order, read_again, pool_too_small,
    not_read_by_mmap,
    *JOB_RULES,
)  # fmt: skip


def findings(document: dict[str, Any]) -> list[Found]:
    """The findings of a report, most costly first; then by severity."""
    report = Report(document)
    found = [one for rule in RULES for one in rule(report)]
    weight = ("high", "medium", "low")
    return sorted(found, key=lambda f: (-(f["cost"] or 0.0), weight.index(f["severity"])))
