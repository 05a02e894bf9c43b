# SPDX-License-Identifier: Apache-2.0
"""The cost of recording: `python bench/tracecost.py --json F` (as root, for eBPF).

Pairs of the same run, plain and under `uffdprefetch trace`, in turn. ``faults``: a cached file, one
word per 64 KiB, so one fault after the other and nothing else: the worst case. ``scan``: the same
file, all of its bytes. ``reads`` and ``small-reads``: the same file by pread(2) of 64 KiB and of
4 KiB, from memory, one call after the other and nothing else. ``training``: demo/job.py, four ranks
skipping on the slow bed, cold, one epoch with compute. Times are the programs' own, without the
recorder's start. A third of each kind is recorded without eBPF (by the observing service).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reports import ROOT, conditions, save
from runs import bootstrap_interval
from slides import build

from uffdprefetch.demo.jobrun import job_command, job_environment
from uffdprefetch.demo.storage import Wanted, open_storage
from uffdprefetch.trace.file import trace_file

MIB = 1 << 20
SCAN_BYTES = 512 * MIB
#: By case: passes, step, and how it reads, where that is not by mapping it (scan.c).
PASSES: dict[str, tuple[str, ...]] = {
    "faults": ("40", "65536"),
    "scan": ("24", "8"),
    "reads": ("24", "65536", "pread"),
    "small-reads": ("8", "4096", "pread"),
}
VARIANTS = {"recorded": (), "without eBPF": ("--no-bpf",)}


def run(command: list[str], variant: str | None, path: Path) -> tuple[str, dict[str, Any]]:
    """stdout of a run, plain or recorded into ``path``, and the recording's totals."""
    ours: list[str] = []
    if variant is not None:
        ours = [sys.executable, "-m", "uffdprefetch", "trace", "-q", "-f", "-o", str(path)]
        ours += [*VARIANTS[variant], "--"]
    done = subprocess.run(
        [*ours, *command], env=job_environment(), cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    end = trace_file.read(str(path)).end if variant is not None else None
    return done.stdout.decode(), end or {}


def compare(
    name: str, rounds: int, command: list[str], seconds_of: Callable[[str], float],
    before: Callable[[], None], path: Path,
) -> dict[str, Any]:  # fmt: skip
    """Rounds of all variants in turn; the ratios of each to the plain run of its round."""
    seconds: dict[str, list[float]] = {"plain": [], **{v: [] for v in VARIANTS}}
    ends: dict[str, list[dict[str, Any]]] = {v: [] for v in VARIANTS}
    for _ in range(rounds):
        for variant in (None, *VARIANTS):
            before()
            out, end = run(command, variant, path)
            seconds[variant or "plain"].append(seconds_of(out))
            if variant is not None:
                ends[variant].append(end)
    result: dict[str, Any] = {
        "case": name,
        "rounds": rounds,
        "plain_seconds_median": statistics.median(seconds["plain"]),
    }
    for variant in VARIANTS:
        ratios = [a / b for a, b in zip(seconds[variant], seconds["plain"], strict=True)]
        low, high = bootstrap_interval(ratios)
        result[variant] = {
            "ratio_median": round(statistics.median(ratios), 4),
            "ratio_95": [round(low, 4), round(high, 4)],
            "events": [e.get("events_seen") for e in ends[variant]],
            "lost_events": sum(e.get("lost_events", 0) for e in ends[variant]),
            "recorder_cpu_seconds": [e.get("recorder_cpu_seconds") for e in ends[variant]],
        }
    return result


def training_seconds(out: str) -> float:
    """Of the slowest rank."""
    return max(float(epoch["seconds"]) for epoch in json.loads(out)["epochs"])


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=(*PASSES, "training"), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-cost-") as name:
        directory = Path(name)
        path = directory / "t.uptrace"
        wanted = Wanted(SCAN_BYTES)
        with open_storage(wanted, lambda line: print(line, file=sys.stderr)) as storage:
            program = build("scan", directory)
            chosen = options.only or (*PASSES, "training")
            for case, how in PASSES.items():
                if case not in chosen:
                    continue
                storage.make_warm()
                words = [str(program), str(storage.data), *how]
                results.append(
                    compare(case, options.rounds, words, lambda out: float(out.split()[0]),
                            lambda: None, path)
                )  # fmt: skip
            per_byte = 0.95 * 4 / storage.bandwidth
            words = job_command(
                storage.database, "--pattern", "skipping", "--ranks", "4", "--spawn",
                "--compute-seconds-per-byte", repr(per_byte),
            )  # fmt: skip
            if "training" in chosen:
                results.append(
                    compare("training", options.rounds, words, training_seconds,
                            storage.make_cold, path)
                )  # fmt: skip
    for result in results:
        for variant in VARIANTS:
            one = result[variant]
            low, high = one["ratio_95"]
            print(
                f"{result['case']:<11} {variant:<14} {one['ratio_median']:.3f}"
                f" [{low:.3f}, {high:.3f}]  events {statistics.median(one['events']):.0f}"
                f"  lost {one['lost_events']}"
            )
    document = {"schema": "uffdprefetch.bench.tracecost/1", **conditions(), "results": results}
    save(options.json, document)


if __name__ == "__main__":
    main()
