# SPDX-License-Identifier: Apache-2.0
"""What is left of a fast disk: `python bench/rate.py --json F --size 3GiB --rounds 3`, `show F`.

The slow bed's 300 MB/s hides what the service costs a byte. Here a file lies on ext4 on a loop
device, best over tmpfs (``--scratch``), which reads past the page cache of what is below. A job
maps it and adds all its words, MiB after MiB, or records in an order that it has announced; from
cold, in turns: plain, by the page cache, by the pool. The limit is what eight threads that pread
bring.
``--build NAME=PYTHON``: with another checkout's interpreter, too. The sums must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harm_beds import LoopDisk, loop_disk, why_no_loop
from reports import a_line_for_errors, conditions, load, save

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import parse_size
from uffdprefetch.demo.bed import drop_cache

SCHEMA = "uffdprefetch.bench.rate/1"
MIB = 1 << 20
RECORD_BYTES = 256 << 10
THREADS = 8
PREAD_BYTES = 4 * MIB
ORDERS = ("in order", "announced")
PLAIN, LIMIT, ENGINES = "plain", "pread", ("cache", "pool")
MOST_SECONDS = 300.0

#: What the job runs: it prints its seconds, and the sum of the file's words.
JOB = """
import sys, time, mmap
import numpy as np
path, order, record = sys.argv[1], sys.argv[2], int(sys.argv[3])
began, file = time.perf_counter(), open(path, "rb")
words = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint64)
each, places = record // 8, range(0, len(words), record // 8)
if order == "announced":
    places = np.random.default_rng(1).permutation(np.arange(0, len(words), each))
    try:
        from uffdprefetch import plan
        plan.announce(path, ranges=np.stack([places * 8, places * 8 + record], 1))
    except ImportError:
        pass
total = 0
for at in places:
    total += int(words[at : at + each].sum(dtype=np.uint64))
print(time.perf_counter() - began, total % 2**64)
"""
#: ... and what tells the limit.
PREADS = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
path, threads, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
fd, size, began = os.open(path, os.O_RDONLY), os.path.getsize(path), time.perf_counter()
buffers = [bytearray(count) for _ in range(threads)]
def read(one):
    for at in range(one * count, size, threads * count):
        os.preadv(fd, [buffers[one]], at)
with ThreadPoolExecutor(threads) as pool:
    list(pool.map(read, range(threads)))
print(time.perf_counter() - began, -1)
"""


def words_of(variant: str, build: str, path: Path, order: str, out: Path) -> list[str]:
    """The command of a run."""
    if variant == LIMIT:
        return [sys.executable, "-c", PREADS, str(path), str(THREADS), str(PREAD_BYTES)]
    record = MIB if order == ORDERS[0] else RECORD_BYTES
    job = [build, "-c", JOB, str(path), order, str(record)]
    if variant == PLAIN:
        return job
    wrap = [build, "-m", "uffdprefetch", "wrap", "-q", "-f", "-o", str(out), f"--engine={variant}"]
    return [*wrap, "--", *job]


def one_run(
    disk: LoopDisk, path: Path, work: Path, variant: str, build: tuple[str, str], order: str
) -> dict[str, Any]:
    """From cold."""
    out = work / "summary.json"
    out.unlink(missing_ok=True)
    drop_cache(path)
    disk.reset()
    home = Path(build[1]).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(home), "HOME": str(work)}
    began = time.monotonic()
    done = subprocess.run(
        words_of(variant, build[1], path, order, out), env=environment, cwd=work, text=True,
        capture_output=True, timeout=MOST_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UffdPrefetchError(f"{variant}: status {done.returncode}: {done.stderr[-400:]}")
    seconds, total = done.stdout.split()
    found: dict[str, Any] = {
        "order": order, "variant": variant, "build": build[0], "seconds": float(seconds),
        "total_seconds": time.monotonic() - began, "sum": int(total), **disk.counters(),
    }  # fmt: skip
    if variant in ENGINES:
        summary = json.loads(out.read_text())
        service = summary["service"]
        found["service_cpu_seconds"] = service["cpu_seconds"]
        # its own start, 0.2 s of a core, is the same for a file of any size
        found["service_run_cpu_seconds"] = service["cpu_share"] * summary["wall_seconds"]
        found["worker_cpu_seconds"] = service["worker_cpu_seconds"]
    return found


def measure(args: argparse.Namespace, disk: LoopDisk, work: Path) -> list[dict[str, Any]]:
    """All variants in turns."""
    path = disk.path("words")
    words, total = np.random.default_rng(0), 0
    with open(path, "wb") as file:
        for _ in range(args.size // (64 * MIB)):
            some = words.integers(0, 2**63, 8 * MIB, dtype=np.uint64)
            total = (total + int(some.sum(dtype=np.uint64))) % 2**64
            file.write(some.tobytes())
        os.fsync(file.fileno())
    ours, runs = ("", sys.executable), list[dict[str, Any]]()
    for number in range(args.rounds):
        for order in args.orders:
            turn = [(LIMIT, ours), (PLAIN, ours)]
            turn += [(engine, build) for engine in ENGINES for build in (*args.build, ours)]
            for variant, build in turn:
                run = one_run(disk, path, work, variant, build, order)
                if variant != LIMIT and run["sum"] != total:
                    raise UffdPrefetchError(f"{variant}, {order}: wrong bytes")
                runs.append({"round": number, "file_bytes": path.stat().st_size, **run})
                print(f"{order}, {variant} {build[0]}: {run['seconds']:.2f} s", file=sys.stderr)
    return runs


def show(report: dict[str, Any]) -> str:
    """A table: medians."""
    lines = [
        "| order | | s | GB/s | of pread | requests | service, CPU s a GB | since its start |"
        " its workers |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    kinds = dict.fromkeys((r["order"], r["variant"], r["build"]) for r in report["runs"])
    for order, variant, build in kinds:
        runs = [
            r
            for r in report["runs"]
            if (r["order"], r["variant"], r["build"]) == (order, variant, build)
        ]
        limit = statistics.median(
            r["seconds"] for r in report["runs"] if (r["order"], r["variant"]) == (order, LIMIT)
        )
        gigabytes = runs[0]["file_bytes"] / 1e9
        seconds = statistics.median(run["seconds"] for run in runs)
        cpu = [
            f"{statistics.median(run[name] for run in runs) / gigabytes:.2f}"
            if name in runs[0]
            else ""
            for name in (
                "service_cpu_seconds",
                "service_run_cpu_seconds",
                "worker_cpu_seconds",
            )
        ]
        requests = statistics.median(run["requests"] for run in runs)
        cells = [order, f"{variant} {build}".strip(), f"{seconds:.2f}"]
        cells += [f"{gigabytes / seconds:.2f}", f"{limit / seconds:.2f}", f"{requests:.0f}", *cpu]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _build(words: str) -> tuple[str, str]:
    name, _, python = words.partition("=")
    if not python or not os.access(python, os.X_OK):
        raise argparse.ArgumentTypeError(f"NAME=PYTHON, an interpreter: {words}")
    return name, python


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command line."""
    if words[:1] == ["show"]:
        print(show(load(Path(words[1]), SCHEMA)))
        return 0
    parser = argparse.ArgumentParser(
        prog="bench/rate.py", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="F")
    add("--size", type=parse_size, default=parse_size("3GiB"))
    add("--rounds", type=int, default=3)
    add("--orders", type=lambda text: text.split(","), default=list(ORDERS))
    add("--build", type=_build, action="append", default=[], metavar="NAME=PYTHON")
    add("--read-ahead-kb", type=int, default=128, help="of the disk; the kernel's own default")
    add("--scratch", type=Path, default=Path("/dev/shm"), help="where the disk's image lies")
    args = parser.parse_args(words)
    if (why := why_no_loop()) is not None:
        raise UffdPrefetchError(why)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.scratch)))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk = stack.enter_context(loop_disk(scratch))
        disk.set_read_ahead(args.read_ahead_kb)
        settings = disk.settings()
        runs = measure(args, disk, work)
    report = {"schema": SCHEMA, **conditions(), "disk": settings, "runs": runs}
    save(args.json, report)
    print(show(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
