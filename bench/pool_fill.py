# SPDX-License-Identifier: Apache-2.0
"""Show 4 of bench/pool.py: how fast a cold file fills, against fio, and what a page costs."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

from pool_bench import PLAIN, Bench, NotHere, Run, by_variant, cases_of, median, paired
from pool_gate import check_sums, run_readers, unit_sums
from render import markdown_table, number, ratio

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import parse_rate

TITLE = "Cold fill by one sequential reader"
MIB = 1 << 20
UNIT_BYTES = MIB
PAGE_BYTES = 4096
COPIED_PAGES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": MIB}
FIO = "fio, O_DIRECT, 16 in flight"
FIO_JOBS = 8
#: A link without bandwidth limit and latency: shows the cost of software alone.
NO_LINK = 0


def add_options(parser: ArgumentParser) -> None:
    """The options of this measurement alone."""
    parser.add_argument(
        "--bandwidths", default="300MB/s,1000MB/s,0",
        help="links, with commas; 0: neither a limit nor a latency",
    )  # fmt: skip


class Fill:
    """All variants behind one link."""

    def __init__(self, bench: Bench, bandwidth: int) -> None:
        self.bench, self.bandwidth = bench, bandwidth
        self.latency_us = bench.latency_us if bandwidth != NO_LINK else 0
        self.sums = unit_sums(bench.original, UNIT_BYTES, 8)
        self.timeout_seconds = 120 + 60 * bench.file_bytes / (bandwidth or 300_000_000)

    @property
    def name(self) -> str:
        """As the table heads it."""
        if self.bandwidth == NO_LINK:
            return "no link"
        return f"{self.bandwidth / 1e6:g} MB/s, {self.latency_us / 1000:g} ms"

    def figures(self, seconds: float) -> Run:
        """A run's own, from its time and the bed's counters."""
        counters = self.bench.bed.counters()
        return {
            "seconds": seconds,
            "mb_per_second": self.bench.file_bytes / 1e6 / seconds,
            "us_per_page": 1e6 * seconds * PAGE_BYTES / self.bench.file_bytes,
            "bytes_read": counters["bytes"],
            "requests": counters["requests"],
            "largest_request_bytes": counters["largest_request_bytes"],
            "most_in_flight": counters["most_in_flight"],
        }

    def prepare(self) -> None:
        """Cold, behind this case's link."""
        self.bench.prepare(self.bandwidth, self.latency_us)

    def fio(self, *options: str) -> Run:
        """fio's own bytes over its own time."""
        program = shutil.which("fio")
        if program is None:
            raise NotHere("fio is missing: install fio")
        self.prepare()
        ended = subprocess.run(
            [
                program, "--name=fill", f"--filename={self.bench.data}", "--readonly", "--rw=read",
                "--bs=1M", "--output-format=json", "--group_reporting", *options,
            ],
            capture_output=True, text=True, timeout=self.timeout_seconds, check=False,
            cwd=self.bench.scratch,
        )  # fmt: skip
        if ended.returncode:
            output = (ended.stderr or ended.stdout).strip().splitlines() or ["it said nothing"]
            raise UffdPrefetchError(f"fio ended with status {ended.returncode}: {output[-1]}")
        # Warnings may stand before the JSON.
        (job,) = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"]
        read = job["read"]
        if read["io_bytes"] < self.bench.file_bytes - FIO_JOBS * MIB:
            raise UffdPrefetchError(f"fio read {read['io_bytes']} bytes only")
        # runtime is in milliseconds and one job's; the slowest job's end is what counts
        seconds = read["runtime"] / 1e3 * self.bench.file_bytes / read["io_bytes"]
        return self.figures(seconds)

    def fio_jobs(self) -> Run:
        """Several fio jobs, each a part of the file; the last bytes are nobody's (fio refuses a
        part that reaches beyond the end)."""
        part = self.bench.file_bytes // FIO_JOBS // MIB * MIB
        return self.fio(
            "--ioengine=psync", "--direct=1", f"--numjobs={FIO_JOBS}", f"--size={part}",
            f"--offset_increment={part}",
        )  # fmt: skip

    def read(self, wrap: Sequence[str] = ()) -> Run:
        """pool_read, mapped before the clock starts."""
        self.prepare()
        readers = run_readers(
            lambda gate: [
                *wrap, self.bench.program("pool_read"), "--pattern=whole", f"--unit={UNIT_BYTES}",
                f"--gate={gate}", str(self.bench.data),
            ],
            ranks=1, epochs=1, timeout_seconds=self.timeout_seconds, scratch=self.bench.scratch,
        )  # fmt: skip
        (lines,) = readers.epochs
        check_sums(lines, self.sums, "whole")
        run = self.figures(readers.seconds(0))
        return run | {"wall_seconds": readers.wall_seconds, "minor_faults": lines[0]["minflt"]}

    def pool(self) -> Run:
        """Under the pool engine."""
        run = self.read(self.bench.wrapped("pool", ()))
        run["pool"] = self.bench.pool_summary()
        return run

    def cache(self) -> Run:
        """Under the cache engine."""
        return self.read(self.bench.wrapped("cache", ()))

    def copied(self, page_bytes: int) -> Run:
        """By a pager of the usual design (pool_copy.c)."""
        self.prepare()
        ended = subprocess.run(
            [self.bench.program("pool_copy"), str(self.bench.data), str(page_bytes)],
            capture_output=True, text=True, timeout=self.timeout_seconds, check=False,
        )  # fmt: skip
        if ended.returncode:
            raise UffdPrefetchError(f"pool_copy: {ended.stderr.strip() or ended.returncode}")
        line = json.loads(ended.stdout)
        check_sums([line], self.sums, "whole")
        return self.figures((line["end_ns"] - line["begin_ns"]) / 1e9) | {"faults": line["faults"]}

    def variants(self) -> dict[str, Callable[[], Run]]:
        """By name."""
        deep = ("--direct=1", "--iodepth=16")
        found: dict[str, Callable[[], Run]] = {
            FIO: lambda: self.fio("--ioengine=libaio", *deep),
            "fio, io_uring, O_DIRECT, 16 in flight": lambda: self.fio("--ioengine=io_uring", *deep),
            f"fio, O_DIRECT, {FIO_JOBS} jobs": self.fio_jobs,
            "fio, buffered": lambda: self.fio("--ioengine=psync"),
            PLAIN: self.read,
            "cache engine": self.cache,
            "pool": self.pool,
        }
        for words, page_bytes in COPIED_PAGES.items():
            # 4 KiB pages behind a link are a latency each, one after the other
            if page_bytes > PAGE_BYTES or self.bandwidth == NO_LINK:
                found[f"UFFDIO_COPY pager, {words}"] = functools.partial(self.copied, page_bytes)
        return found


def measure(bench: Bench, args: Namespace, save: Callable[[], None]) -> None:
    """All links."""
    for word in args.bandwidths.split(","):
        case = Fill(bench, NO_LINK if word.strip() == "0" else parse_rate(word))
        bench.rounds(case.name, args.pairs, case.variants(), save)


def with_best_fio(runs: Sequence[Run]) -> list[Run]:
    """The runs of a case, and for each round its fastest fio as a variant `best fio`."""
    found = list(runs)
    for number_ in {run["round"] for run in runs}:
        fios = [r for r in runs if r["round"] == number_ and r["variant"].startswith("fio")]
        if fios:
            best = max(fios, key=lambda run: run["mb_per_second"])
            found.append({**best, "variant": "best fio"})
    return found


def tables(report: dict[str, Any]) -> list[str]:
    """A table for each link."""
    made = []
    for case in cases_of(report["runs"]):
        every = with_best_fio([run for run in report["runs"] if run["case"] == case])
        rows = []
        for name, mine in by_variant(every, case).items():
            to_best = paired(every, name, "best fio", "mb_per_second")
            largest = median(mine, "largest_request_bytes")
            fill_ns = median(mine, "pool", "fill_ns", "p50")
            if name == "best fio":
                continue
            rows.append(
                [
                    name,
                    number(median(mine, "mb_per_second"), 0),
                    ratio(*to_best) if to_best else "n/a",
                    number(median(mine, "us_per_page")),
                    number(median(mine, "requests"), 0),
                    number(None if largest is None else largest / 1024, 0),
                    number(median(mine, "most_in_flight"), 0),
                    number(None if fill_ns is None else fill_ns / 1e3, 0),
                    str(len(mine)),
                ]
            )
        head = [case, "MB/s", "to the best fio", "us a page", "requests", "largest KiB"]
        head += ["most in flight", "fill p50 us", "runs"]
        made.append(markdown_table(head, rows))
    return made


def notes(report: dict[str, Any]) -> Sequence[str]:
    """The tables' legend."""
    return (
        "One reader, no compute; every word is read, the file cold and mapped before the clock "
        "starts. MB/s are the file's bytes over that time, *us a page* the time for 4096 of them. "
        "The best fio is the fastest of the four in the same round. *no link*: the bed gives "
        "bytes as fast as FUSE can, so the time is software's. *UFFDIO_COPY pager*: "
        "bench/pool_copy.c, what UMap does for a fault without its queue and its books: a fault, "
        "one O_DIRECT read of a page of that size, one UFFDIO_COPY, nothing ahead.",
    )
