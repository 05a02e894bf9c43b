# SPDX-License-Identifier: Apache-2.0
"""Validates `simulate --replay` by runs: `python bench/lab/predict.py [--pairs 3] [--json F]`.

For each case a plain run of the demo's job is recorded on the slow bed, and `simulate --replay`
predicts its time plainly and under `wrap`, on storage that `calibrate` has measured on the same
bed. Then the predicted commands are run, cold, and the wall times compared. Runs with a known order
have a plan file of the job's order. The start and end of `wrap` are measured separately (`wrap --
true`) and added to the predictions.
"""

from __future__ import annotations

import argparse
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
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reports import conditions, save

from uffdprefetch.base.units import format_size_exact, parse_rate, parse_size
from uffdprefetch.demo.bed import SlowBed, drop_cache
from uffdprefetch.demo.dataset import make_dataset
from uffdprefetch.demo.job import data_file, rank_order

SCHEMA = "uffdprefetch.bench.predict/1"
TOOL = [sys.executable, "-m", "uffdprefetch"]
JOB = Path(__file__).resolve().parents[2] / "uffdprefetch" / "demo" / "job.py"


@dataclass(frozen=True)
class Case:
    """A job, and the choices that are tried. One epoch is recorded: the second has no faults where
    the mapping stays."""

    pattern: str
    choices: Sequence[str]
    epochs: int = 1
    ranks: int = 1

    @property
    def name(self) -> str:
        more = [f"{self.ranks} ranks"] * (self.ranks > 1)
        more += [f"{self.epochs} epochs"] * (self.epochs > 1)
        return ", ".join([self.pattern, *more])


CASES = (
    Case("contiguous", ["plain", "wrap", "windows of 50MiB"]),
    Case("shuffled", ["plain", "wrap", "known order"]),
    Case("contiguous", ["pool of {half}"], epochs=3),
    Case("shuffled", ["pool of {half}, known order"], epochs=3),
    Case("contiguous", ["plain", "wrap"], ranks=4),
    Case("shuffled", ["plain", "known order"], ranks=4),
)


def run_tool(words: Sequence[str], where: Path) -> str:
    """stdout of a command of ours; its stderr is ours."""
    return subprocess.run(
        [*TOOL, *words], cwd=where, check=True, stdout=subprocess.PIPE, text=True, env=environment()
    ).stdout


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": root}


def wall_seconds(words: Sequence[str], data: Path, where: Path) -> float:
    """Of one cold run."""
    drop_cache(data)
    began = time.monotonic()
    subprocess.run(words, cwd=where, check=True, stdout=subprocess.DEVNULL, env=environment())
    return time.monotonic() - began


def write_plan(where: Path, data: Path, records: int, case: Case) -> Path:
    """The orders of a case's ranks and epochs, as a plan file."""
    epochs = [
        {
            "ranks": {
                str(rank): list(rank_order(case.pattern, records, rank, case.ranks, epoch=epoch))
                for rank in range(case.ranks)
            }
        }
        for epoch in range(case.epochs)
    ]
    path = where / "plan.json"
    path.write_text(
        json.dumps(
            {
                "schema": "uffdprefetch.plan/1",
                "files": [{"file": str(data), "unit": "records", "epochs": epochs}],
            }
        )
    )
    return path


def words_of(command: str, plan: Path, where: Path) -> list[str]:
    """A printed command line, adapted to this checkout."""
    words = shlex.split(command.replace("--plan PLAN", f"--plan {shlex.quote(str(plan))}"))
    if words[0] == "uffdprefetch":
        words = [*TOOL, "wrap", "-q", "-f", "-o", str(where / "summary"), *words[2:]]
    return words


def measure(args: argparse.Namespace, where: Path) -> list[dict[str, Any]]:
    """A row for each case and choice."""
    manifest = make_dataset(where / "data", parse_size(args.size))
    rows = []
    with SlowBed(
        where / "data", bandwidth=parse_rate(args.bandwidth), latency_us=args.latency_us
    ) as bed:
        database = bed.path("records.lmdb")
        data = Path(data_file(str(database)))
        run_tool(
            [
                "calibrate",
                str(data),
                "--seconds",
                "12",
                "--bytes",
                "4GiB",
                "--threads",
                "1,8",
                "-f",
                "-o",
                "bed.toml",
            ],
            where,
        )
        compute = args.compute / parse_rate(args.bandwidth)
        half = format_size_exact(parse_size(args.size) // 2)
        for case in CASES:
            if args.only not in case.name:
                continue
            job = [
                sys.executable,
                str(JOB),
                "--db",
                str(database),
                "--pattern",
                case.pattern,
                "--compute-seconds-per-byte",
                str(compute * case.ranks),
            ]
            if case.ranks > 1:
                job += ["--spawn", "--ranks", str(case.ranks)]
            drop_cache(data)
            run_tool(["trace", "-f", "-o", "plain.uptrace", "--", *job], where)
            report = json.loads(
                run_tool(
                    [
                        "simulate",
                        "bed.toml",
                        "--replay",
                        "plain.uptrace",
                        "--json",
                        "--epochs",
                        str(case.epochs),
                        "--budget",
                        half,
                    ],
                    where,
                )
            )
            wanted = [name.format(half=half) for name in case.choices]
            report["choices"] = [c for c in report["choices"] if c["name"] in wanted]
            print(json.dumps({k: v for k, v in report.items() if k != "choices"}), file=sys.stderr)
            plan = write_plan(where, data, manifest.records, case)
            starts = [
                wall_seconds(
                    [*TOOL, "wrap", "-q", "-f", "-o", str(where / "summary"), "--", "true"],
                    data,
                    where,
                )
                for _ in range(args.pairs)
            ]
            start = statistics.median(starts)
            took: dict[str, list[float]] = {}
            for _ in range(args.pairs):
                for choice in report["choices"]:
                    words = [
                        *words_of(choice["command"], plan, where),
                        "--epochs",
                        str(case.epochs),
                    ]
                    took.setdefault(choice["name"], []).append(wall_seconds(words, data, where))
            for choice in report["choices"]:
                seconds = took[choice["name"]]
                middle = statistics.median(seconds)
                wrapped = choice["command"].startswith("uffdprefetch")
                predicted = choice["seconds"] + (start if wrapped else 0.0)
                rows.append(
                    {
                        "case": case.name,
                        "choice": choice["name"],
                        "predicted_seconds": predicted,
                        "wrap_true_seconds": start if wrapped else None,
                        "measured_seconds": seconds,
                        "error": predicted / middle - 1,
                        "predicted_stall_seconds": choice["stall_seconds"],
                        "predicted_read_bytes": choice["read_bytes"],
                        "command": choice["command"],
                    }
                )
                print(
                    f"bench: {case.name} | {choice['name']}: predicted {predicted:.2f} s, "
                    f"measured {middle:.2f} s ({rows[-1]['error']:+.1%})",
                    file=sys.stderr,
                )
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/simulate.md."""
    lines = ["| case | run as | predicted s | measured s | error |", "|---|---|---:|---:|---:|"]
    for row in rows:
        middle = statistics.median(row["measured_seconds"])
        lines.append(
            f"| {row['case']} | {row['choice']} | {row['predicted_seconds']:.2f} | "
            f"{middle:.2f} | {row['error']:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench/lab/predict.py", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--pairs", type=int, default=3, help="rounds")
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--bandwidth", default="300MB/s")
    parser.add_argument("--latency-us", type=int, default=1000)
    parser.add_argument("--compute", type=float, default=0.95, help="of the link's time")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = conditions()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rows = measure(args, Path(folder))
    save(args.json, {"schema": SCHEMA, **found, "rows": rows})
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
