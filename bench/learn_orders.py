# SPDX-License-Identifier: Apache-2.0
"""Orders of mapped files that `wrap --learn` has learned: `python bench/learn_orders.py --json F`,
`show F`.

A file on the slow bed is mapped and read in an order of its own, from cold, in turns:

- plain; wrap: without a known order;
- plan: with a plan that somebody has written, of the job's own ranges;
- record: the first run under `wrap --learn`; learn: the next one;
- wrong plan: the plan of another seed; other: what was learned of another seed, or number of ranks;
- changed: the file has another time than what was learned.

Of `slices` each rank reads its part of each tensor (so many ranks on this node, of so many in all),
of `shuffle` one reads records in a shuffled order. `safetensors` does as a tensor-parallel load: by
get_slice of that library five of seven tensors are cut by rows, and two by columns, which reads all
of their pages. All must read the right bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apps_bench import wait_until_quiet
from harm_beds import LINKS
from render import markdown_table, number
from reports import (
    Report,
    a_line_for_errors,
    among,
    conditions,
    load,
    options,
    save,
    show_or_measure,
)

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import SlowBed

SCHEMA = "uffdprefetch.bench.learn-orders/1"
PLAIN, WRAP, PLAN, RECORD, LEARN = "plain", "wrap", "plan", "record", "learn"
WRONG, OTHER, CHANGED = "wrong plan", "other", "changed"
VARIANTS = (PLAIN, WRAP, PLAN, RECORD, LEARN, WRONG, OTHER, CHANGED)
#: What was learned is there for these.
LEARNED = (LEARN, OTHER, CHANGED)
SECONDS_MOST = 600.0
NAME = "data.bin"

#: What each rank does: maps, and reads [start, end) of a list, with a pause after each range.
JOB = """
import hashlib, json, mmap, os, random, subprocess, sys, time
path, work = sys.argv[1], json.loads(sys.argv[2])
if "RANK" not in os.environ:
    world = str(work["world"])
    ranks = [
        subprocess.Popen([*work["words"], "-c", work["code"], *sys.argv[1:]],
                         stdout=subprocess.PIPE,
                         env={**os.environ, "RANK": str(rank), "WORLD_SIZE": world})
        for rank in range(work["ranks"])
    ]
    print(*[rank.communicate()[0].decode().strip() for rank in ranks])
    sys.exit(max(rank.returncode for rank in ranks))
with open(path, "rb") as file:
    data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sha = hashlib.sha256()
for start, end in json.load(open(work["orders"]))[os.environ["RANK"]]:
    sha.update(data[start:end])
    time.sleep(work["pause"])
print(sha.hexdigest()[:16])
"""

#: The same by safetensors: what is mapped, and how, is the library's own affair.
SAFETENSORS_JOB = JOB.replace(
    JOB[JOB.index("with open(path") :],
    """
from safetensors import safe_open
sha, world = hashlib.sha256(), int(os.environ["WORLD_SIZE"])
rank = int(os.environ["RANK"]) % world
with safe_open(path, "numpy") as file:
    for at, name in enumerate(sorted(file.keys())):
        part = file.get_slice(name)
        rows, columns = part.get_shape()
        if work["by_columns"][at % 7]:
            data = part[:, rank * columns // world : (rank + 1) * columns // world]
        else:
            data = part[rank * rows // world : (rank + 1) * rows // world]
        sha.update(data.tobytes())
        time.sleep(work["pause"])
print(sha.hexdigest()[:16])
""",
)
#: Of each seven tensors of a layer, as they are cut: q, k, v, o, gate, up, down.
BY_COLUMNS = (False, False, False, True, False, False, True)
ROWS = 2048


@dataclass(frozen=True)
class Case:
    """``parts`` of ``part_bytes``: tensors, or records; ``pause``: seconds after each range."""

    name: str
    parts: int
    part_bytes: int
    ranks: int
    world: int
    pause: float
    is_shuffled: bool
    is_safetensors: bool = False

    @property
    def program(self) -> str:
        """Of its ranks."""
        return SAFETENSORS_JOB if self.is_safetensors else JOB

    @property
    def interpreter(self) -> list[str]:
        """Which runs that; without a library it needs no packages."""
        return [sys.executable, *([] if self.is_safetensors else ["-S"])]

    @property
    def file_bytes(self) -> int:
        """Of its file."""
        return self.parts * self.part_bytes

    def orders(self, seed: int, world: int, path: Path) -> dict[str, list[tuple[int, int]]]:
        """By rank, the ranges that it reads of a file."""
        import random

        if self.is_safetensors:
            return {str(rank): self._slices(rank, world, path) for rank in range(self.ranks)}
        length = self.part_bytes // (1 if self.is_shuffled else world)
        found = {}
        for rank in range(self.ranks):
            starts = [part * self.part_bytes for part in range(self.parts)]
            if self.is_shuffled:
                starts = starts[rank :: self.ranks]
                random.Random(seed).shuffle(starts)
            else:
                starts = [start + rank * length for start in starts]
            found[str(rank)] = [(start, start + length) for start in starts]
        return found

    def _slices(self, rank: int, world: int, path: Path) -> list[tuple[int, int]]:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        found, rank = [], rank % world
        for at, name in enumerate(sorted(header)):
            start, end = (8 + size + offset for offset in header[name]["data_offsets"])
            if not BY_COLUMNS[at % 7]:
                part = (end - start) // world
                start, end = start + rank * part, start + (rank + 1) * part
            found.append((start, end))
        return found


CASES = {
    case.name: case
    for case in (
        Case("slices 8/8", 96, 8 << 20, 8, 8, 0.02, False),
        Case("slices 2/8", 96, 8 << 20, 2, 8, 0.02, False),
        Case("safetensors 8/8", 96, 8 << 20, 8, 8, 0.02, False, is_safetensors=True),
        Case("safetensors 2/8", 96, 8 << 20, 2, 8, 0.02, False, is_safetensors=True),
        Case("shuffle 128 KiB", 2048, 128 << 10, 1, 1, 0.0005, True),
        Case("shuffle 16 KiB", 8192, 16 << 10, 1, 1, 0.0002, True),
    )
}


class Bench:
    """Of one file, and what is ours alone beside it."""

    def __init__(self, own: Path, source: Path) -> None:
        self.own, self.source = own, source
        self.mountpoint = own / "bed"
        self.mountpoint.mkdir()

    def make(self, case: Case) -> None:
        """The case's file."""
        if case.is_safetensors:
            import numpy
            from safetensors.numpy import save_file

            chance, shape = numpy.random.default_rng(1), (ROWS, case.part_bytes // ROWS)
            tensors = {
                f"layer{part:03}": chance.integers(0, 256, shape, numpy.uint8)
                for part in range(case.parts)
            }
            save_file(tensors, self.source / NAME)
            return
        with (self.source / NAME).open("wb") as file:
            for _ in range(case.file_bytes >> 20):
                file.write(os.urandom(1 << 20))

    def once(self, case: Case, bed: str, variant: str) -> dict[str, Any]:
        """A run; what is told of it."""
        if variant == RECORD:
            shutil.rmtree(self.own / "cache", ignore_errors=True)
        if variant == CHANGED:
            os.utime(self.source / NAME)
        is_other = variant == OTHER
        seed, world = (2, case.world) if is_other and case.is_shuffled else (1, case.world)
        if is_other and not case.is_shuffled:
            world = case.world // 2
        made = self.source / NAME
        orders = case.orders(seed, world, made)
        planned = case.orders(2, world // 2 or 1, made) if variant == WRONG else orders
        link = LINKS[bed]
        with SlowBed(
            self.source, self.mountpoint, bandwidth=link.bandwidth, latency_us=link.latency_us
        ) as mount:
            words = self.listed(case, mount.path(NAME), world, orders, planned, variant)
            mount.reset()
            done = subprocess.run(
                words, check=False, text=True, capture_output=True, timeout=SECONDS_MOST,
                cwd=self.own, env=self._environment(),
            )  # fmt: skip
            read = mount.counters()["bytes"]
        if done.returncode:
            raise UffdPrefetchError(f"ended with {done.returncode}: {done.stderr.strip()[-200:]}")
        *digests, seconds = done.stdout.split()
        return {
            "seconds": float(seconds), "bytes": read, "output": digests,
            "learn": self._told(variant),
        }  # fmt: skip

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        paths = {"XDG_CACHE_HOME": "cache", "UFFDPREFETCH_RUNDIR": "run"}
        root = str(Path(__file__).resolve().parents[1])
        return {**kept, **{k: str(self.own / v) for k, v in paths.items()}, "PYTHONPATH": root}

    def listed(
        self, case: Case, path: Path, world: int, orders: Any, planned: Any, variant: str
    ) -> list[str]:
        (self.own / "orders.json").write_text(json.dumps(orders))
        work = {
            "ranks": case.ranks, "world": world, "pause": case.pause, "code": case.program,
            "orders": str(self.own / "orders.json"), "by_columns": BY_COLUMNS,
            "words": case.interpreter,
        }  # fmt: skip
        timed = "import subprocess, sys, time; t = time.perf_counter();"
        timed += "s = subprocess.call(sys.argv[1:]); print(time.perf_counter() - t); sys.exit(s)"
        words = [*case.interpreter, "-c", case.program, str(path), json.dumps(work)]
        if variant != PLAIN:
            ours = [sys.executable, "-m", "uffdprefetch", "wrap", "-q", "-f", "-o", "tool"]
            if variant in (PLAN, WRONG):
                entry = {"file": str(path), "unit": "bytes", "epochs": [{"ranks": planned}]}
                plan = {"schema": "uffdprefetch.plan/1", "files": [entry]}
                (self.own / "plan.json").write_text(json.dumps(plan))
                ours += ["--plan", "plan.json"]
            elif variant != WRAP:
                ours.append("--learn=bench")
            words = [*ours, "--", *words]
        return [sys.executable, "-S", "-c", timed, *words]

    def _told(self, variant: str) -> Any:
        if variant in (PLAIN, WRAP, PLAN, WRONG):
            return None
        return json.loads((self.own / "tool.summary.json").read_text())["learn"]["orders"]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The rounds that are asked for and not there."""
    report: dict[str, Any] = {"runs": [], "failures": []}
    if args.json.exists():
        report = load(args.json, SCHEMA)
    report |= {"schema": SCHEMA, **conditions()}
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with contextlib.ExitStack() as stack:
        own, source = (
            Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="uffdprefetch-learn-", dir=d)
                )
            )
            for d in (None, memory)
        )
        bench = Bench(own, source)
        for name in args.cases:
            bench.make(CASES[name])
            outputs: dict[bool, list[str]] = {}
            for turn in range(args.rounds):
                where = {"bed": args.bed, "case": name, "round": turn}
                had = {run["variant"] for run in report["runs"] if where.items() <= run.items()}
                wanted = [one for one in args.variants if one not in had]
                if RECORD not in wanted and {*LEARNED} & {*wanted}:
                    wanted = [*args.variants]  # what was learned is of this round
                report["runs"] = [
                    run
                    for run in report["runs"]
                    if not (where.items() <= run.items() and run["variant"] in wanted)
                ]
                for variant in wanted:
                    if args.quiet:
                        wait_until_quiet()
                    one = where | {"variant": variant}
                    try:
                        run = bench.once(CASES[name], args.bed, variant)
                        expected = outputs.setdefault(variant == OTHER, run["output"])
                        if run["output"] != expected:
                            raise UffdPrefetchError("OTHER BYTES were read")
                    except UffdPrefetchError as error:
                        report["failures"].append(one | {"error": error.message})
                        told = f"FAILED: {error.message}"
                    else:
                        report["runs"].append(one | run)
                        told = f"{run['seconds']:.2f} s, {run['bytes'] / 2**20:.1f} MiB"
                    save(args.json, report)
                    print(f"bench: {name} | {variant}: {told}", file=sys.stderr, flush=True)
    return report


def markdown(report: dict[str, Any]) -> str:
    """A table: medians, and each round's ratio to the plan."""
    rows = []
    for case in dict.fromkeys(run["case"] for run in report["runs"]):
        of = {
            name: {run["round"]: run for run in report["runs"]
                   if (run["case"], run["variant"]) == (case, name)}
            for name in VARIANTS
        }  # fmt: skip
        for name, runs in of.items():
            if not runs:
                continue
            cells = [
                number(statistics.median(run["seconds"] for run in runs.values()), 2),
                number(statistics.median(run["bytes"] for run in runs.values()) / 2**20, 1),
            ]
            for what in ("seconds", "bytes"):
                ratios = [
                    run[what] / of[PLAN][turn][what]
                    for turn, run in runs.items() if turn in of[PLAN]
                ]  # fmt: skip
                cells.append(number(statistics.median(ratios), 2) if ratios else "")
            rows.append([case, name, *cells])
    head = ["job", "run", "s", "MiB", "time to the plan's", "bytes to the plan's"]
    failed = [
        f"FAILED: {one['case']} {one['variant']}: {one['error']}" for one in report["failures"]
    ]
    return "\n\n".join([markdown_table(head, rows), *failed])


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command; 0, or 1 if a run failed."""
    return show_or_measure(words, SCHEMA, _measured, markdown)


def _measured(words: Sequence[str]) -> tuple[Report, bool]:
    parser = options("bench/learn_orders.py", __doc__)
    add = parser.add_argument
    add("--bed", default="300/1", choices=list(LINKS))
    add("--cases", type=among(CASES), default=list(CASES), help=f"of {', '.join(CASES)}")
    variants = f"of {', '.join(VARIANTS)}"
    add("--variants", type=among(VARIANTS), default=list(VARIANTS), help=variants)
    args = parser.parse_args(words)
    args.variants = [name for name in VARIANTS if name in args.variants]
    return measure(args), False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
