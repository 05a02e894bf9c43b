#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pool's disk tier (`--spill`): what is read of a slow file system, and in what time, when
memory holds a quarter of the data and a disk all of it, or a part.

Variants in turns, each in a memory cgroup of its own where root can make one; every byte is
compared.

    .venv/bin/python bench/spill.py --size 512MiB --disk /tmp --json spill.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from pool_cgroup import memory_group
from pool_cgroup import why_not as why_no_cgroup
from pool_replay import interleave, tier_hits
from render import markdown_table
from reports import ROOT, a_line_for_errors, command, conditions, save
from spill_job import records_in_order

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import parse_size
from uffdprefetch.demo.bed import SlowBed, drop_cache
from uffdprefetch.demo.jobrun import read_tool_summary, wrap_command

SCHEMA = "uffdprefetch.bench.spill/1"
ORDERS = ("in order", "known", "unknown")
RECORD_BYTES = 128 << 10
#: What wrap, the service and the job may use besides the budget.
SLACK_BYTES = 256 << 20
#: The disk's part of the data, by variant; None: there is no disk.
DISKS: dict[str, float | None] = {
    "plain": None, "pool": None, "disk 1.0": 1.0, "disk 0.65": 0.65, "disk 0.4": 0.4,
    "memory": None,
}  # fmt: skip
#: Memory's part of the data; of "memory" all of it, and of what the pool itself takes.
MEMORY = 0.25
Run = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    bed: SlowBed
    scratch: Path
    disk: Path
    size_bytes: int
    epochs: int
    compute_seconds: float  # on each record

    def budget_bytes(self, variant: str) -> int:
        """Of the pool."""
        return 2 * self.size_bytes if variant == "memory" else int(self.size_bytes * MEMORY)

    def words(self, variant: str, order: str) -> list[str]:
        """The command of one run."""
        job = [
            sys.executable, str(ROOT / "bench" / "spill_job.py"), str(self.bed.path("data")),
            str(self.scratch / "sums"), f"--record={RECORD_BYTES}", f"--epochs={self.epochs}",
            "--order", order, f"--compute={self.compute_seconds}",
        ]  # fmt: skip
        if variant == "plain":
            return job
        share = DISKS[variant]
        # a slot of 1 MiB more: the tier rounds down
        spill = (
            []
            if share is None
            else ["--spill", f"{self.disk}:{int(share * self.size_bytes) + (share == 1.0) * 2**20}"]
        )
        return [
            *wrap_command(
                "-f", "-o", str(self.scratch / "tool"), "--engine", "pool",
                "--budget", str(self.budget_bytes(variant)), *spill,
            ),
            *job,
        ]  # fmt: skip


def make_data(path: Path, sums: Path, size_bytes: int) -> None:
    """Random bytes, and the checksum of each record."""
    found = array("I")
    with open("/dev/urandom", "rb") as source, open(path, "wb") as file:
        for _ in range(size_bytes // RECORD_BYTES):
            record = source.read(RECORD_BYTES)
            found.append(zlib.crc32(record))
            file.write(record)
    sums.write_bytes(found.tobytes())


@contextlib.contextmanager
def _group(limit_bytes: int) -> Iterator[Any]:
    """A cgroup where one can be made, else None."""
    if why_no_cgroup() is not None:
        yield None
        return
    with memory_group(limit_bytes) as group:
        yield group


def measure(setting: Setting, variant: str, order: str) -> Run:
    """One run. Raises UffdPrefetchError for a wrong byte."""
    drop_cache(setting.bed.path("data"))
    setting.bed.reset()
    (setting.scratch / "tool.summary.json").unlink(missing_ok=True)
    lines: list[Run] = []
    before = 0
    with _group(setting.budget_bytes(variant) + SLACK_BYTES) as group:
        words = setting.words(variant, order)
        process = subprocess.Popen(
            group.joined(words) if group else words, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        for line in process.stdout:
            now = setting.bed.counters()["bytes"]
            lines.append({**json.loads(line), "storage_bytes": now - before})
            before = now
        if process.wait() or len(lines) != setting.epochs:
            raise UffdPrefetchError(f"{variant}, {order}: the job failed ({process.returncode})")
    run: Run = {"variant": variant, "order": order, "epochs": lines}
    if variant != "plain":
        summary = read_tool_summary(setting.scratch / "tool") or {}
        pool = summary.get("pool")
        if not pool:
            raise UffdPrefetchError(f"the pool did not run: {summary.get('degradations')}")
        run["spill"], run["service"] = pool["spill"], summary["service"]
        run["limited_by"], run["budget_bytes"] = pool["limited_by"], pool["budget_bytes"]
    return run


def optimum(size_bytes: int, epochs: int, order: str, share: float) -> list[float]:
    """Of the data, what each epoch reads at the least where memory and disk hold this share of it:
    by who knows all epochs."""
    count = size_bytes // RECORD_BYTES
    walk = [np.array(records_in_order(count, epoch, order)) for epoch in range(epochs)]
    memory = int(MEMORY * count)
    found = sum(tier_hits(interleave([walk]), memory, int(share * count) - memory))
    return [1 - hits / count for hits in found.tolist()]


def _least(report: Run, run: Run) -> str:
    if run["variant"] not in DISKS or run["variant"] in ("plain", "memory"):
        return ""
    share = min(1.0, MEMORY + (DISKS[run["variant"]] or 0.0))
    least = optimum(report["size_bytes"], len(run["epochs"]), run["order"], share)
    return " ".join(f"{each:.2f}" for each in least)


def table(report: Run) -> str:
    """By order and variant: seconds, the share of the data that each epoch read from storage."""
    size = report["size_bytes"]
    rows = []
    for run in report["runs"]:
        spill = run.get("spill") or {}
        cpu = (run.get("service") or {}).get("worker_cpu_seconds")
        rows.append([
            run["order"], run["variant"],
            " ".join(f"{epoch['seconds']:.1f}" for epoch in run["epochs"]),
            " ".join(f"{epoch['storage_bytes'] / size:.2f}" for epoch in run["epochs"]),
            _least(report, run),
            " ".join(f"{epoch['most_ms']:.0f}" for epoch in run["epochs"]),
            f"{spill.get('written_bytes', 0) / size:.2f}",
            f"{spill.get('read_bytes', 0) / size:.2f}",
            f"{spill.get('dropped_bytes', 0) / size:.2f}",
            "" if cpu is None else f"{cpu:.2f}",
        ])  # fmt: skip
    heads = [
        "order", "variant", "seconds by epoch", "of the data from storage", "the least",
        "longest wait, ms", "written", "read from disk", "not in time", "CPU s",
    ]  # fmt: skip
    return markdown_table(heads, rows)


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--size", type=parse_size, default=parse_size("2GiB"))
    add("--epochs", type=int, default=4)
    add("--disk", type=Path, default=Path(tempfile.gettempdir()), help="where the tier is")
    add("--bandwidth", type=int, default=300_000_000)
    add("--latency-us", type=int, default=1000)
    add("--compute-us", type=float, default=0, help="the job computes so long on each record")
    add("--only", default=",".join(list(DISKS)[:-1]), help="variants, with commas")
    add("--orders", default=",".join(ORDERS), help="with commas")
    add("--rounds", type=int, default=1)
    add("--json", type=Path)
    args = parser.parse_args(words)
    report: Run = {
        "schema": SCHEMA, "command": command("bench/spill.py", words), **conditions(),
        "size_bytes": args.size, "cgroup": why_no_cgroup() or "yes", "runs": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.disk) as scratch:
        source = Path(scratch) / "source"
        source.mkdir()
        make_data(source / "data", Path(scratch) / "sums", args.size)
        with SlowBed(source, bandwidth=args.bandwidth, latency_us=args.latency_us) as bed:
            setting = Setting(
                bed, Path(scratch), args.disk, args.size, args.epochs, args.compute_us / 1e6
            )
            for _ in range(args.rounds):
                for order in args.orders.split(","):
                    for variant in args.only.split(","):
                        report["runs"].append(measure(setting, variant, order))
                        save(args.json, report)
    print(table(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
