# SPDX-License-Identifier: Apache-2.0
"""Ranks that skip each other's records: `python bench/skipping.py [--json F]`, `show F`.

Rank r of R reads records r, r + R, ... of an LMDB ([Stanovnik]); the first --here ranks are on this
node, the others elsewhere. All compute for 95 % of the link's time for this node's bytes. Useless:
the share of the bytes from storage on no page of a record read here and no page of the B-tree.

The variants take turns (A B C A B C ...). Times are those of the slowest rank, cold; ratios are
within a round: to plain, and to the limit, the larger of that round's warm run and the needed bytes
over the link's bandwidth; in brackets the bootstrap's 95 % interval of the median.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lmdb
import numpy as np
from pool_bench import Bench, Run, by_variant, cases_of, disturbances, median, paired
from pool_bench import report_of as pool_report_of
from render import markdown_table, number, ratio
from reports import command, save
from runs import bootstrap_interval

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import parse_rate, parse_size
from uffdprefetch.demo.bed import DEFAULT_BANDWIDTH, DEFAULT_LATENCY_US, SlowBed, warm_fully
from uffdprefetch.demo.dataset import DATABASE_NAME, SCHEMA, Manifest, make_dataset
from uffdprefetch.demo.job import KEY, aggregate, open_database, run_gate
from uffdprefetch.demo.jobrun import job_command, read_tool_summary, run_job, wrap_command
from uffdprefetch.demo.run import COMPUTE_SHARE
from uffdprefetch.formats.detect import open_index

PLAIN, WARM = "plain mmap", "warm cache"
#: Name -> the options of `wrap`, None: without it. "fixed" is a window over all that is ahead.
VARIANTS: dict[str, tuple[str, ...] | None] = {
    PLAIN: None,
    WARM: None,
    "wrap, fixed windows": ("--policy", "fixed"),
    "wrap": (),
    "wrap --policy stride": ("--policy", "stride"),
}
PAGE_BYTES = 4096


# ---- the ranks of this node, as a launcher starts them ----------------------------------------


def spawn(here: int, ranks: int, words: Sequence[str]) -> int:
    """Start ranks 0 to here - 1 of ``ranks`` of demo/job.py at a barrier, print the aggregate; 1 if
    one failed."""
    children, up, down, started = [], [], [], [0.0]
    for rank in range(here):
        here_read, here_write = os.pipe()
        go_read, go_write = os.pipe()
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(here),
        }  # fmt: skip
        command = [*words, f"--rank={rank}", f"--ranks={ranks}"]
        command += ["--gate-fds", f"{go_read},{here_write}"]
        children.append(
            subprocess.Popen(
                command, env=environment, pass_fds=(go_read, here_write),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        os.close(go_read)
        os.close(here_write)
        up.append(here_read)
        down.append(go_write)
    run_gate(up, down, lambda: started.__setitem__(0, time.perf_counter()))
    ended = time.perf_counter()
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        return 1
    print(json.dumps(aggregate([json.loads(one) for one in outputs], ended - started[0])))
    return 0


# ---- the data set -----------------------------------------------------------------------------


def make_equal(directory: Path, size_bytes: int, record_bytes: int) -> Manifest:
    """An LMDB of records of one size, made if missing."""
    database, count = directory / DATABASE_NAME, max(1, size_bytes // record_bytes)
    generator = np.random.default_rng(record_bytes)
    if not (database / "data.mdb").exists():
        env = lmdb.open(str(database), map_size=2 * size_bytes + (64 << 20), sync=False)
        for first in range(0, count, 256):
            with env.begin(write=True) as txn:
                for record in range(first, min(count, first + 256)):
                    txn.put(KEY % record, generator.bytes(record_bytes), append=True)
        env.close()
    env = open_database(str(database))
    records = env.stat()["entries"]
    env.close()
    return Manifest(
        schema=SCHEMA, size_bytes=size_bytes, seed=record_bytes, records=records,
        record_bytes=records * record_bytes, sha256="",
        file_bytes=(database / "data.mdb").stat().st_size,
    )  # fmt: skip


@dataclass
class Case:
    """``here`` ranks on this node of ``ranks``."""

    bench: Bench
    here: int
    ranks: int

    def __post_init__(self) -> None:
        index = open_index(self.bench.original)
        numbers = np.arange(len(index))
        starts, ends = index.extents(numbers[numbers % self.ranks < self.here])
        records = int((-(-ends // PAGE_BYTES) - starts // PAGE_BYTES).sum()) * PAGE_BYTES
        leaves = len(np.unique(index.columns["leaf_page"]))
        branches = index.outside_bytes["branch pages"] + index.outside_bytes["meta pages"]
        self.records, self.record_bytes = len(starts), int((ends - starts).sum())
        self.needed_bytes = records + leaves * PAGE_BYTES + branches

    @property
    def name(self) -> str:
        return f"{self.here} of {self.ranks} ranks here"

    def measure(self, variant: str) -> Run:
        """One run, checked for its bytes."""
        bench, options = self.bench, VARIANTS[variant]
        if variant == WARM:
            bench.bed.set(bandwidth=0, latency_us=0)
            warm_fully(bench.data)
            bench.bed.set(bandwidth=bench.bandwidth, latency_us=bench.latency_us)
            bench.bed.reset()
        else:
            bench.prepare()
        per_byte_seconds = COMPUTE_SHARE / bench.bandwidth * self.here
        job = job_command(
            bench.data.parent, "--pattern=skipping",
            f"--compute-seconds-per-byte={per_byte_seconds!r}",
        )  # fmt: skip
        words = [sys.executable, str(Path(__file__).resolve()), "spawn", str(self.here),
                 str(self.ranks), *job]  # fmt: skip
        output = bench.scratch / "tool"
        if options is not None:
            words = wrap_command("-f", "-o", str(output), "--strict", *options) + words
        transfer_seconds = self.needed_bytes / bench.bandwidth
        run = run_job(words, timeout_seconds=120 + 60 * transfer_seconds, cwd=bench.scratch)
        counters, epoch = bench.bed.counters(), run.job["epochs"][0]
        if (epoch["records"], epoch["bytes"]) != (self.records, self.record_bytes):
            raise UffdPrefetchError(f"{variant}: {epoch['records']} of {self.records} records")
        summary = (read_tool_summary(output) or {}) if options is not None else {}
        useless = counters["bytes"] - self.needed_bytes
        return {
            "seconds": epoch["seconds"],
            "stall_seconds": epoch["stall_seconds"],
            "bytes_read": counters["bytes"],
            "needed_bytes": self.needed_bytes,
            "useless_share": max(0, useless) / counters["bytes"] if counters["bytes"] else 0.0,
            "requests": counters["requests"],
            "transfer_seconds": transfer_seconds,
            "orders": summary.get("plans"),
            "degradations": summary.get("degradations"),
            "command": shlex.join(run.command),
        }


# ---- tables -----------------------------------------------------------------------------------


def to_limit(runs: Sequence[Run], variant: str) -> tuple[float, tuple[float, float]] | None:
    """(median, 95 % interval) of a variant's seconds over the limit of its round."""
    warm = {run["round"]: run["seconds"] for run in runs if run["variant"] == WARM}
    ratios = [
        run["seconds"] / max(warm[run["round"]], run["transfer_seconds"])
        for run in runs
        if run["variant"] == variant and run["round"] in warm
    ]
    return (statistics.median(ratios), bootstrap_interval(ratios)) if ratios else None


def table(report: dict[str, Any], case: str) -> str:
    """One row a variant."""
    every, rows = [run for run in report["runs"] if run["case"] == case], []
    for name, runs in by_variant(every, case).items():
        limit, plain = to_limit(every, name), paired(every, name, PLAIN)
        useless = median(runs, "useless_share")
        rows.append(
            [
                name,
                number(median(runs, "seconds")),
                ratio(*limit) if limit else "n/a",
                ratio(*plain) if plain else "n/a",
                number(median(runs, "stall_seconds")),
                "n/a" if useless is None or name == WARM else f"{useless:.1%}",
                number(median(runs, "requests"), 0),
            ]
        )
    head = ["", "s", "of the limit", "of plain", "stall, s", "useless bytes", "requests"]
    return f"### {case}\n\n{markdown_table(head, rows)}"


def show(report: dict[str, Any]) -> str:
    """The tables of a report."""
    parts = [table(report, case) for case in cases_of(report["runs"])]
    return "\n\n".join([*parts, *disturbances(report)])


# ---- the command --------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench/skipping.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, metavar="F")
    add("--pairs", type=int, default=3, help="rounds over all variants")
    add("--size", type=parse_size, default=parse_size("2GiB"))
    add("--record", type=parse_size, default=parse_size("192KiB"), help="0: 12 to 192 KiB")
    add("--here", type=int, default=4)
    add("--ranks", type=int, nargs="+", default=[4, 16], help="one case for each")
    add("--only", default="", help="comma-separated words that variants' names contain")
    add("--bandwidth", type=parse_rate, default=DEFAULT_BANDWIDTH, help="of the link, per second")
    add("--latency-us", type=int, default=DEFAULT_LATENCY_US)
    add("--work", type=Path, help="where the data set lies (default: made anew in /dev/shm)")
    args = parser.parse_args(argv)
    args.show, args.words = "skipping", list(argv)
    return args


def run_all(args: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """Measure, print the tables; 1 if a run failed."""

    def directory(where: str | None = None) -> Path:
        made = tempfile.TemporaryDirectory(prefix="uffdprefetch-bench-", dir=where)
        return Path(stack.enter_context(made))

    source = args.work or directory("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    manifest = (
        make_equal(source, args.size, args.record)
        if args.record
        else make_dataset(source, args.size)
    )
    bed = SlowBed(source, bandwidth=args.bandwidth, latency_us=args.latency_us)
    stack.enter_context(bed)
    bench = Bench(bed, source, manifest, directory(), args.bandwidth, args.latency_us)
    bench.only = tuple(word for word in args.only.split(",") if word)
    settings = bed.settings()

    def keep() -> None:
        report = pool_report_of(bench, args, settings)
        save(args.json, report | {"command": command("skipping.py", args.words)})

    for ranks in args.ranks:
        case = Case(bench, args.here, ranks)
        variants = {name: (lambda name=name, case=case: case.measure(name)) for name in VARIANTS}
        bench.rounds(case.name, args.pairs, variants, keep)
    print(show(pool_report_of(bench, args, settings)))
    return 1 if bench.failures else 0


def main(argv: Sequence[str]) -> int:
    """Measure or show; `spawn HERE RANKS CMD...` is the job."""
    if argv[:1] == ["spawn"]:
        return spawn(int(argv[1]), int(argv[2]), argv[3:])
    try:
        if argv[:1] == ["show"]:
            print(show(json.loads(Path(argv[1]).read_text())))
            return 0
        with contextlib.ExitStack() as stack:
            return run_all(parse(argv), stack)
    except (UffdPrefetchError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
