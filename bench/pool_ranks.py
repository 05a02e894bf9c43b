# SPDX-License-Identifier: Apache-2.0
"""Show 1 of bench/pool.py: bytes from storage, context switches and time of the ranks of a node."""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pool_bench import (
    PLAIN,
    Bench,
    NotHere,
    Run,
    by_variant,
    cases_of,
    median,
    paired,
    service_switches,
)
from pool_cgroup import groups_of_ranks, joined_by_rank
from pool_cgroup import why_not as why_no_cgroup
from pool_gate import check_sums, run_readers, unit_sums
from render import markdown_table, number, ratio

PATTERNS = ("contiguous", "skipping", "whole", "apart")
UNIT_BYTES = 1 << 20
#: Bytes that a skipping rank reads at a time: about a record, and no divisor of a chunk.
SKIPPED_UNIT_BYTES = 80 << 10
GROUPS = "plain mmap, a cgroup for each rank"
SMALL = "pool engine, budget of the cgroups"
TITLE = "Ranks of one node: bytes from storage, context switches, time"


def add_options(parser: ArgumentParser) -> None:
    """The options of this measurement alone."""
    parser.add_argument("--ranks", default="4,8", help="numbers of ranks, with commas")
    parser.add_argument("--patterns", default=",".join(PATTERNS), help="with commas")
    parser.add_argument(
        "--compute-share", type=float, default=0.0,
        help="sleep for this part of the time that the link takes for the bytes of all ranks",
    )  # fmt: skip


class Ranks:
    """One case: a number of ranks with a pattern."""

    def __init__(self, bench: Bench, pattern: str, ranks: int, compute_share: float) -> None:
        self.bench, self.pattern, self.ranks = bench, pattern, ranks
        self.unit = SKIPPED_UNIT_BYTES if pattern == "skipping" else UNIT_BYTES
        self.sums = unit_sums(bench.original, self.unit, 8)
        every = 1 if pattern in ("whole", "apart") else ranks
        seconds_per_mib = every * compute_share * (1 << 20) / max(1, bench.bandwidth)
        self.compute_us = round(1e6 * seconds_per_mib) if bench.bandwidth else 0
        # Half the file for all: what one rank has read is evicted before another reads it.
        limit = bench.file_bytes // (2 * ranks)
        self.limit_bytes = max(limit, 4 << 20)

    def mpirun(self, gate: Path, how: str = "mmap", groups: Path | None = None) -> list[str]:
        """The words of the job."""
        program = shutil.which("mpirun")
        if program is None:
            raise NotHere("mpirun is missing: install openmpi-bin")
        reader = [
            self.bench.program("pool_read"), f"--how={how}", f"--pattern={self.pattern}",
            f"--unit={self.unit}", f"--compute-us={self.compute_us}", f"--gate={gate}",
            str(self.bench.data),
        ]  # fmt: skip
        if groups is not None:
            reader = joined_by_rank(groups, reader)
        launcher = [program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        return [*launcher, "-n", str(self.ranks), *reader]

    def measure(self, command: Callable[[Path], list[str]]) -> Run:
        """One run, checked for its bytes."""
        bench, switches = self.bench, list[int | None]()
        bench.prepare()

        def between(_epochs: int, rundir: Path) -> None:
            switches.append(service_switches(rundir))

        readers = run_readers(
            command, ranks=self.ranks, epochs=1, between=between, scratch=bench.scratch,
            timeout_seconds=120 + 40 * self.ranks * bench.file_bytes / (bench.bandwidth or 1e9),
        )  # fmt: skip
        counters = bench.bed.counters()
        (lines,) = readers.epochs
        check_sums(lines, self.sums, self.pattern)
        before, after = switches
        ours = readers.total("nvcsw") + readers.total("nivcsw")
        of_service = None if before is None or after is None else after - before
        return {
            "seconds": readers.seconds(0),
            "wall_seconds": readers.wall_seconds,
            "bytes_read": counters["bytes"],
            "requests": counters["requests"],
            "most_in_flight": counters["most_in_flight"],
            "unique_bytes": bench.file_bytes,
            "bytes_over_unique": counters["bytes"] / bench.file_bytes,
            "voluntary_switches": readers.total("nvcsw"),
            "involuntary_switches": readers.total("nivcsw"),
            "switches": ours,
            "service_switches": of_service,
            "all_switches": ours + (of_service or 0),
            "minor_faults": readers.total("minflt"),
            "major_faults": readers.total("majflt"),
            "rank_bytes": [line["bytes"] for line in lines],
            "sums": [line["sum"] for line in lines],
            "page_cache_bytes": bench.left_in_page_cache(),
        }

    def plain(self, how: str = "mmap") -> Run:
        return self.measure(lambda gate: self.mpirun(gate, how))

    def in_groups(self) -> Run:
        """Each rank in a memory cgroup of its own, which is smaller than the file."""
        reason = why_no_cgroup()
        if reason is not None:
            raise NotHere(reason)
        with groups_of_ranks(self.ranks, self.limit_bytes) as (directory, groups):
            run = self.measure(lambda gate: self.mpirun(gate, groups=directory))
            run["limit_bytes"] = self.limit_bytes
            run["peak_bytes"] = [group.peak_bytes() for group in groups]
        return run

    def engine(self, engine: str, *options: str) -> Run:
        """All of mpirun under one wrap."""
        words = self.bench.wrapped(engine, options)
        run = self.measure(lambda gate: [*words, *self.mpirun(gate)])
        if engine == "pool":
            run["pool"] = self.bench.pool_summary()
        return run

    def variants(self) -> dict[str, Callable[[], Run]]:
        """By name."""
        found: dict[str, Callable[[], Run]] = {
            PLAIN: self.plain,
            GROUPS: self.in_groups,
            "O_DIRECT readers": lambda: self.plain("direct"),
            "cache engine": lambda: self.engine("cache"),
            "pool engine": lambda: self.engine("pool"),
        }
        if self.pattern in ("whole", "apart"):
            budget = str(self.ranks * self.limit_bytes)
            found[SMALL] = lambda: self.engine("pool", "--budget", budget)
        return found


def measure(bench: Bench, args: Namespace, save: Callable[[], None]) -> None:
    """All cases."""
    for ranks in (int(word) for word in args.ranks.split(",")):
        for pattern in args.patterns.split(","):
            case = Ranks(bench, pattern, ranks, args.compute_share)
            bench.rounds(f"{pattern}, {ranks} ranks", args.pairs, case.variants(), save)


def tables(report: dict[str, Any]) -> list[str]:
    """A table for each case."""
    made = []
    for case in cases_of(report["runs"]):
        rows = []
        every = [run for run in report["runs"] if run["case"] == case]
        for name, runs in by_variant(every, case).items():
            compared = paired(every, name, PLAIN)
            switches = paired(every, name, PLAIN, "all_switches")
            rows.append(
                [
                    name,
                    number(median(runs, "bytes_over_unique"), 3),
                    number(median(runs, "requests"), 0),
                    number(median(runs, "seconds"), 3),
                    ratio(*compared) if compared else "n/a",
                    number(median(runs, "switches"), 0),
                    number(median(runs, "service_switches"), 0),
                    ratio(*switches) if switches else "n/a",
                    number(median(runs, "major_faults"), 0),
                    str(len(runs)),
                ]
            )
        head = [case, "bytes read / unique", "requests", "s", "ratio to plain"]
        head += ["switches of the ranks", "of the service", "both, to plain"]
        head += ["major faults", "runs"]
        made.append(markdown_table(head, rows))
    return made


def notes(report: dict[str, Any]) -> Sequence[str]:
    """The tables' legend."""
    limits = {r["limit_bytes"] for r in report["runs"] if r.get("limit_bytes")}
    return (
        "Every rank's sum over all words that it read is the file's. Unique bytes are the file's: "
        "in each pattern all ranks together read all of it. *whole*: every rank reads all of the "
        "file, from its begin; *apart*: all of it, rank r from the r-th n-th on and round the end.",
        "The kernel caches a page once for an inode and charges it to the cgroup that came first: "
        "cgroups alone make nobody read twice. It is their limits ("
        + (", ".join(f"{limit / 1e6:.0f} MB" for limit in sorted(limits)) or "n/a")
        + " for each rank) that take a page away before the next rank is there.",
        "Context switches: voluntary and involuntary, of all threads, from when all have mapped to "
        "when the last one has read. The bed's and mpirun's own are not in them.",
    )
