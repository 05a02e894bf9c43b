# SPDX-License-Identifier: Apache-2.0
"""Show 2 of bench/pool.py: a data set that is larger than its cache, read in epochs."""

from __future__ import annotations

import functools
import importlib
import itertools
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pool_replay
from pool_bench import (
    PLAIN,
    Bench,
    NotHere,
    Run,
    by_variant,
    cases_of,
    median,
    paired,
)
from pool_cgroup import memory_group
from pool_cgroup import why_not as why_no_cgroup
from pool_gate import check_sums, run_readers, unit_sums
from render import markdown_table, number, ratio
from reports import ROOT

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import parse_size
from uffdprefetch.demo.dataset import DATABASE_NAME

TITLE = "A budget of half the data set: hit rate by epoch"
READERS = ("C scan", "py-lmdb")
POLICIES = ("lru", "cyclic")
MIB = 1 << 20
UNIT_BYTES = MIB
IN_GROUP = PLAIN
#: Block size where no run reports one: the chunk.
DEFAULT_BLOCK_BYTES = 64 << 10


def add_options(parser: ArgumentParser) -> None:
    """The options of this measurement alone."""
    add = parser.add_argument
    add("--epochs", type=int, default=4)
    add("--share", type=float, default=0.5, help="of the data set that the budget holds")
    add("--readers", default=",".join(READERS), help="with commas")
    add(
        "--slack", type=parse_size, default=parse_size("512MiB"),
        help="what wrap, the service and the job may use besides the budget",
    )  # fmt: skip
    add(
        "--compute-share", type=float, default=0.0,
        help="the C scan sleeps for this part of the link's time for the bytes",
    )  # fmt: skip


def optimum(blocks: int, capacity: int, epochs: int) -> list[float]:
    """Hit rate by epoch of Belady's rule for a repeated scan."""
    accesses = pool_replay.scan(blocks, epochs)
    hits = pool_replay.belady_hits(accesses, capacity)
    return [float(each) for each in hits / accesses.per_epoch()]


class Epochs:
    """One case: a reader that goes over the data set again and again."""

    def __init__(self, bench: Bench, args: Namespace, reader: str) -> None:
        self.bench, self.reader, self.epochs = bench, reader, args.epochs
        self.budget_bytes = int(bench.file_bytes * args.share) // UNIT_BYTES * UNIT_BYTES
        self.slack_bytes = args.slack
        share = args.compute_share if bench.bandwidth else 0
        self.compute_us = round(1e6 * share * MIB / max(1, bench.bandwidth))
        if reader == "C scan":
            self.sums = unit_sums(bench.original, UNIT_BYTES, 8)
        else:
            lmdb_reader = importlib.import_module("pool_lmdb")
            self.crc = lmdb_reader.crc_of(str(bench.source / DATABASE_NAME))

    def words(self, gate: Path) -> list[str]:
        """The reader's."""
        bench = self.bench
        if self.reader == "C scan":
            return [
                bench.program("pool_read"), "--pattern=whole", f"--unit={UNIT_BYTES}",
                f"--epochs={self.epochs}", f"--compute-us={self.compute_us}", f"--gate={gate}",
                str(bench.data),
            ]  # fmt: skip
        script = str(ROOT / "bench" / "pool_lmdb.py")
        return [
            sys.executable, script, str(bench.bed.path(DATABASE_NAME)), str(self.epochs), str(gate)
        ]  # fmt: skip

    def check(self, lines: Sequence[dict[str, Any]]) -> None:
        """Raise UffdPrefetchError for a wrong byte."""
        if self.reader == "C scan":
            check_sums(lines, self.sums, "whole")
        elif (lines[0]["sum"], lines[0]["bytes"]) != self.crc:
            raise UffdPrefetchError(f"WRONG BYTES: py-lmdb read {lines[0]}, not {self.crc}")

    def measure(self, wrap: Sequence[str], limit_bytes: int) -> Run:
        """One run in a cgroup with that limit, checked."""
        reason = why_no_cgroup()
        if reason is not None:
            raise NotHere(reason)
        bench, marks, used = self.bench, list[int](), list[dict[str, int]]()
        bench.prepare()
        with memory_group(limit_bytes) as group:

            def between(_epochs: int, _rundir: Path) -> None:
                # Requests in flight are not awaited: a pause would be time to prefetch.
                marks.append(bench.bed.counters()["bytes"])
                used.append(group.used())

            readers = run_readers(
                lambda gate: group.joined([*wrap, *self.words(gate)]),
                ranks=1, epochs=self.epochs, between=between, scratch=bench.scratch,
                timeout_seconds=120 + 60 * self.epochs * bench.file_bytes
                / (bench.bandwidth or 1e9),
            )  # fmt: skip
            peak_bytes = group.peak_bytes()
        total = bench.bed.counters()["bytes"]
        for lines in readers.epochs:
            self.check(lines)
        # Bytes read before the first epoch count for it; those after the last one do not count.
        epoch_bytes = [b - a for a, b in itertools.pairwise([0, *marks[1:]])]
        seconds = [readers.seconds(epoch) for epoch in range(self.epochs)]
        return {
            "seconds": sum(seconds),
            "epoch_seconds": seconds,
            "wall_seconds": readers.wall_seconds,
            "epoch_bytes": epoch_bytes,
            "hit_rates": [1 - each / bench.file_bytes for each in epoch_bytes],
            "bytes_read": total,
            "budget_bytes": self.budget_bytes,
            "limit_bytes": limit_bytes,
            "peak_bytes": peak_bytes,
            "group_bytes": used,
            "page_cache_bytes": bench.left_in_page_cache(),
            "major_faults": readers.total("majflt"),
            "switches": readers.total("nvcsw") + readers.total("nivcsw"),
        }

    def pool(self, policy: str) -> Run:
        """Under the pool engine with that eviction; all of it in the cgroup."""
        words = self.bench.wrapped("pool", ("--budget", str(self.budget_bytes), "--evict", policy))
        run = self.measure(words, self.budget_bytes + self.slack_bytes)
        run["pool"] = self.bench.pool_summary()
        return run

    def variants(self) -> dict[str, Callable[[], Run]]:
        """By name."""
        found: dict[str, Callable[[], Run]] = {
            IN_GROUP: lambda: self.measure([], self.budget_bytes)
        }
        for policy in POLICIES:
            found[f"pool, {policy}"] = functools.partial(self.pool, policy)
        return found


def measure(bench: Bench, args: Namespace, save: Callable[[], None]) -> None:
    """All cases."""
    for reader in args.readers.split(","):
        case = Epochs(bench, args, reader)
        bench.rounds(reader, args.pairs, case.variants(), save)


def rates(runs: Sequence[Run]) -> list[float]:
    """Median hit rate of each epoch."""
    return [
        statistics.median(each) for each in zip(*(run["hit_rates"] for run in runs), strict=True)
    ]


def optimum_of(report: dict[str, Any]) -> list[float] | None:
    """Belady's optimum for the report's cases, in the pool's own blocks."""
    runs = report["runs"]
    if not runs:
        return None
    block_sizes = [run["pool"]["block_bytes"] for run in runs if run.get("pool")]
    block_bytes = next((each for each in block_sizes if each), DEFAULT_BLOCK_BYTES)
    blocks = -(-report["dataset"]["file_bytes"] // block_bytes)
    return optimum(blocks, runs[0]["budget_bytes"] // block_bytes, len(runs[0]["hit_rates"]))


def tables(report: dict[str, Any]) -> list[str]:
    """A table for each reader."""
    made = []
    best = optimum_of(report)
    for case in cases_of(report["runs"]):
        runs = [run for run in report["runs"] if run["case"] == case]
        rows = []
        for name, mine in by_variant(report["runs"], case).items():
            each, compared = rates(mine), paired(runs, name, IN_GROUP)
            later = statistics.mean(each[1:]) if len(each) > 1 else None
            below = None
            if best is not None and later is not None and len(best) > 1:
                below = 100 * (statistics.mean(best[1:]) - later)
            peak, page_cache = median(mine, "peak_bytes"), median(mine, "page_cache_bytes")
            rows.append(
                [
                    name,
                    *(f"{100 * one:.1f} %" for one in each),
                    number(below, 1),
                    number(median(mine, "seconds")),
                    ratio(*compared) if compared else "n/a",
                    number(None if peak is None else peak / 1e6, 0),
                    number(None if page_cache is None else page_cache / 1e6, 0),
                    str(len(mine)),
                ]
            )
        epochs = len(runs[0]["hit_rates"])
        if best is not None:
            rows.append(
                ["Belady's optimum", *(f"{100 * one:.1f} %" for one in best), "0.0", *["n/a"] * 5]
            )
        head = [case, *(f"epoch {one + 1}" for one in range(epochs)), "points below optimum"]
        head += ["s", "ratio to plain", "peak MB", "page cache MB", "runs"]
        made.append(markdown_table(head, rows))
    return made


def notes(report: dict[str, Any]) -> Sequence[str]:
    """The tables' legend."""
    runs = report["runs"]
    if not runs:
        return ()
    budget = runs[0]["budget_bytes"] / 1e6
    text = (
        f"The budget is {budget:.0f} MB of {report['dataset']['file_bytes'] / 1e6:.0f} MB. "
        f"*{IN_GROUP}*: reader and page cache in a memory cgroup (version "
        f"{report['cgroup_version']}) limited to the budget. *pool*: wrap, service, pool and "
        f"reader in one limited to the budget and {report['options']['slack'] / 1e6:.0f} MB "
        "more. A hit rate is 1 - bytes that the bed delivered from one epoch's end to the next "
        "one's over those of the file: what is prefetched across an epoch's end counts for the "
        "epoch before. *peak*: the most that the cgroup was charged; *page cache*: what the kernel "
        "holds of the file when the job has ended. Every epoch's bytes are checked against the "
        "file. *points below optimum*: of epoch 2 and later."
    )
    return (text,)
