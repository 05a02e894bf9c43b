# SPDX-License-Identifier: Apache-2.0
"""Whether any program is slower under `wrap`: `python bench/never_slower.py --json F`, `show F`.

A row is a program of bench/apps.py under one condition: cold at 300 MB/s all of them, and a reader
of weights, one of a data set and one of an array also warm, at 1 GB/s, on the local disk, and in a
memory cgroup of 1 GiB. Of each pair plain and `wrap` run in random turn, and a bare interpreter
after them; measured is the time from start to exit, with the options that a user gives, none.

A row that F has is not measured again, except --again: a run may be cut off and goes on.
Interpreters have their bytecode, as in an installed package, and no PYTHON* variable of ours.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pool_cgroup
from apps import SIZES
from apps_bench import ENVIRONMENT, Bench, wait_until_quiet
from apps_programs import EVERY, Program
from never_slower_table import SCHEMA, judged, markdown, to_measure
from reports import (
    ROOT,
    a_line_for_errors,
    command,
    commit_of,
    conditions,
    load,
    save,
    show_or_measure,
)

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import parse_size
from uffdprefetch.demo.bed import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY_US,
    SlowBed,
    drop_cache,
    warm_fully,
)

#: What of the matrix is measured under every condition.
FEW = ("safetensors-load_file", "hf-loader", "memmap-scan")
#: Pairs of a program that takes less than so many seconds plainly, and of others.
SHORT_SECONDS, PAIRS_OF_SHORT, PAIRS = 5.0, 20, 5
#: Of the machine; when and beside what each row was measured is told of the row.
KEPT_CONDITIONS = ("kernel", "machine", "cpus", "python", "proactive_reclaim")
BARE = (sys.executable, "-I", "-c", "pass")


@dataclass(frozen=True)
class Condition:
    """What the files lie on, what is in memory before a run, and what memory the job has."""

    name: str
    bandwidth: int | None = DEFAULT_BANDWIDTH  #: of the bed; None: on the local disk
    warm: bool = False
    cgroup_bytes: int | None = None
    every: bool = False  #: for all programs, not just FEW


CONDITIONS = (
    Condition("cold, 300 MB/s", every=True),
    Condition("warm, 300 MB/s", warm=True),
    Condition("cold, 1 GB/s", bandwidth=1_000_000_000),
    Condition("cold, local disk", bandwidth=None),
    Condition("cold, 300 MB/s, cgroup of 1 GiB", cgroup_bytes=1 << 30),
)
#: name -> (program, condition)
ROWS = {
    f"{program.name}, {condition.name}": (program, condition)
    for condition in CONDITIONS
    for program in EVERY
    if condition.every or program.name in FEW
}


@contextlib.contextmanager
def prepared(bench: Bench, files: Sequence[Path], condition: Condition) -> Iterator[list[str]]:
    """The files as they are to be before a run; the words that go before the command."""
    for path in files:
        drop_cache(path)
    if condition.bandwidth is not None:
        if condition.warm:
            bench.bed.set(bandwidth=0, latency_us=0)
            for path in files:
                warm_fully(path)
        bench.bed.set(bandwidth=condition.bandwidth, latency_us=bench.latency_us)
    wait_until_quiet()
    if condition.cgroup_bytes is None:
        yield []
        return
    with pool_cgroup.memory_group(condition.cgroup_bytes) as group:
        yield group.joined([])


def measure(
    bench: Bench, program: Program, condition: Condition, pairs: int | None
) -> dict[str, Any]:
    """A row. Raises UffdPrefetchError where a run fails or reads something else."""
    bench.make(program.kind)
    beside = bench.place(program.kind)
    files = bench.files(program.kind)
    if condition.bandwidth is None:
        files = sorted(path for path in beside.rglob("*") if path.is_file())
    directory = beside if condition.bandwidth is None else bench.bed.path(beside.name)
    file_bytes = sum(path.stat().st_size for path in files)
    words = program.command(directory)
    expected = bench.start(program.command(beside), file_bytes).job["digest"]
    turn = random.Random(f"{program.name}, {condition.name}")

    def once(prefix: Sequence[str]) -> float:
        with prepared(bench, files, condition) as before:
            done = bench.start([*before, *prefix, *words], file_bytes)
        if done.job["digest"] != expected:
            raise UffdPrefetchError(f"WRONG VALUES: digest {done.job['digest']}, not {expected}")
        return done.wall_seconds

    def bare() -> float:
        with prepared(bench, (), condition) as before:
            begin = time.perf_counter()
            subprocess.run([*before, *ENVIRONMENT, *BARE], cwd=bench.scratch, check=True)
            return time.perf_counter() - begin

    runs: list[dict[str, float]] = []
    while len(runs) < (pairs or PAIRS):
        order = ["plain", "wrap"]
        turn.shuffle(order)
        run = {"first": order[0]} | {
            which: once(bench.wrap() if which == "wrap" else []) for which in order
        }
        runs.append(run | {"bare": bare()})
        if pairs is None and len(runs) == 1:
            pairs = PAIRS_OF_SHORT if runs[0]["plain"] < SHORT_SECONDS else PAIRS
        print(f"bench:   {runs[-1]}", file=sys.stderr, flush=True)
    found = judged(*([run[which] for run in runs] for which in ("plain", "wrap", "bare")))
    return {"file_bytes": file_bytes, "runs": runs} | found


def conditions_now() -> dict[str, Any]:
    """When, of which commit, and beside what a row is measured."""
    found = conditions()
    return {"date": found["date"], "commit": commit_of(ROOT), "load_average": found["load_average"]}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="bench/never_slower.py", description=description)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="F", help="goes on where it was cut off")
    add("--rows", default="*", metavar="GLOB", help="by name; several with semicolons")
    add("--again", action="store_true", help="rows too that F has")
    add("--pairs", type=int, help=f"default: {PAIRS_OF_SHORT}, of slow programs {PAIRS}")
    add("--size", default="full", help="of each program's files: small, full or a size")
    add("--slow", action="store_true", help="programs too that take minutes")
    add("--work", type=Path, help="where the bed's files lie, and stay (default: anew in /dev/shm)")
    add("--disk", type=Path, help="where those of the local disk do (default: anew in /tmp)")
    args = parser.parse_args(words)
    args.size_bytes = SIZES[args.size] if args.size in SIZES else parse_size(args.size)
    return args


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """The rows that are asked for and not there; the report, which is saved after each."""
    report: dict[str, Any] = {"rows": {}, "failures": {}, "skipped": {}}
    if args.json.exists():
        report = load(args.json, SCHEMA)
    report |= {
        "schema": SCHEMA,
        **{name: value for name, value in conditions().items() if name in KEPT_CONDITIONS},
        "command": command("never_slower.py", ["--json", str(args.json)]),
        "size_bytes": args.size_bytes,
    }
    with contextlib.ExitStack() as stack:

        def directory(kept: Path | None, where: str | None) -> Path:
            if kept is not None:
                kept.mkdir(parents=True, exist_ok=True)
                return kept
            made = tempfile.TemporaryDirectory(prefix="uffdprefetch-never-slower-", dir=where)
            return Path(stack.enter_context(made))

        for name in [name for name in os.environ if name.startswith("PYTHON")]:
            del os.environ[name]
        compileall.compile_dir(ROOT / "uffdprefetch", quiet=1)
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        source, scratch = directory(args.work, shm), directory(None, None)
        os.environ["UFFDPREFETCH_RUNDIR"] = str(scratch / "run")
        os.environ["XDG_CONFIG_HOME"] = str(scratch / "no-config")
        os.environ["HF_HOME"] = str(scratch / "hf")
        bed = stack.enter_context(SlowBed(source))
        bench = Bench(
            *(bed, source, scratch, args.size_bytes, DEFAULT_BANDWIDTH, DEFAULT_LATENCY_US),
            columns=(), as_by_default=True,
        )  # fmt: skip
        on_disk = replace(bench, source=directory(args.disk, None))
        for name in to_measure(ROWS, args.rows, report["rows"], args.again):
            program, condition = ROWS[name]
            reason = program.why_not(args.slow)
            if reason is None and condition.cgroup_bytes is not None:
                reason = pool_cgroup.why_not()
            report["skipped"].pop(name, None)
            report["failures"].pop(name, None)
            if reason is not None:
                report["skipped"][name] = reason
                continue
            print(f"bench: {name}", file=sys.stderr, flush=True)
            try:
                ours = on_disk if condition.bandwidth is None else bench
                row = conditions_now() | measure(ours, program, condition, args.pairs)
                report["rows"][name] = row
                print(f"bench: {name}: {row['verdict']}", file=sys.stderr)
            except UffdPrefetchError as error:
                report["failures"][name] = error.message
                print(f"bench: FAILED {name}: {error.message}", file=sys.stderr)
            for part in ("rows", "failures", "skipped"):  # in the order of ROWS, whoever came first
                report[part] = {one: report[part][one] for one in ROWS if one in report[part]}
            save(args.json, report)
    return report


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command; 0, or 1 if a row could not be measured."""
    return show_or_measure(
        words, SCHEMA, lambda given: (measure_all(parse(given)), False), markdown
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
