# SPDX-License-Identifier: Apache-2.0
"""Whether `wrap` tells the truth about what it gains: `python bench/truth.py --json F`, `show F`.

Each job (bench/truth_jobs.py) runs plain and under `wrap`, by the page cache and by the pool, in
turn and from cold, on the slow bed. The truth is by how much longer it took plain, the median of
all rounds; told is what the run's first line said. `--as 65534` runs it all as another user than
the files' own.
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

from reports import ROOT, TEMPFAIL, a_line_for_errors, conditions, load, save
from told import beside, counted, told_seconds
from truth_jobs import JOBS, make

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import SlowBed, drop_cache

SCHEMA = "uffdprefetch.bench.truth/1"
SAYS = "uffdprefetch: "
PLAIN, ENGINES = "plain", ("cache", "pool")
MOST_SECONDS = 300.0
KEPT_TOTALS = (
    "gain", "saved_at_least_seconds", "cost_seconds", "waited_seconds", "demand_misses",
    "prefetched_bytes", "used_bytes", "wasted_bytes", "already_resident_bytes", "coverage",
    "coverage_denominator_bytes",
)  # fmt: skip


def words_of(args: argparse.Namespace, engine: str, job: str, path: Path, out: Path) -> list[str]:
    """The command of a run."""
    user = ["setpriv", f"--reuid={args.user}", f"--regid={args.user}", "--clear-groups"]
    before = user if args.user is not None else []
    run = [sys.executable, str(ROOT / "bench" / "truth_jobs.py"), job, str(path)]
    if engine == PLAIN:
        return [*before, *run]
    tool = [sys.executable, "-m", "uffdprefetch", "wrap", "-f", "-o", str(out), *args.wrap]
    tool.append(f"--engine={engine}")
    return [*before, *tool, "--", *run]


def one_run(
    args: argparse.Namespace, engine: str, job: str, path: Path, work: Path
) -> dict[str, Any]:
    """From cold."""
    out = work / "summary.json"
    drop_cache(path)
    out.unlink(missing_ok=True)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "UFFDPREFETCH_RUNDIR": str(work / "run"),
        "PYTHONDONTWRITEBYTECODE": "1", "XDG_CONFIG_HOME": str(work), "HOME": str(work),
    }  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(
        words_of(args, engine, job, path, out), env=environment, cwd=work, text=True,
        capture_output=True, timeout=MOST_SECONDS, check=False,
    )  # fmt: skip
    total = time.monotonic() - began
    if done.returncode:
        raise UffdPrefetchError(
            f"{job} by {engine}: status {done.returncode}: {done.stderr[-400:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    found |= {"engine": engine, "job": job, "total_seconds": total}
    if engine != PLAIN:
        summary = json.loads(out.read_text())
        found["totals"] = {name: summary["totals"][name] for name in KEPT_TOTALS}
        lines = done.stderr.splitlines()
        found["said"] = [line.removeprefix(SAYS) for line in lines if line.startswith(SAYS)]
    return found


def judged(report: dict[str, Any]) -> list[dict[str, Any]]:
    """For each job and engine the truth, and of each round what was told."""
    found = []
    for job in JOBS:
        runs = [run for run in report["runs"] if run["job"] == job]
        plain = [run["seconds"] for run in runs if run["engine"] == PLAIN]
        for engine in ENGINES:
            ours = [run for run in runs if run["engine"] == engine]
            if not plain or not ours:
                continue
            truth = statistics.median(plain) - statistics.median(r["seconds"] for r in ours)
            told = [told_seconds(run["totals"]) for run in ours]
            found.append({
                "job": job, "engine": engine, "plain": statistics.median(plain),
                "truth": truth, "told": told, **beside(truth, told),
            })  # fmt: skip
    return found


def show(report: dict[str, Any]) -> str:
    """A table, and how often what was told held."""
    rows = judged(report)
    lines = [
        "| job | engine | plain, s | truth: saved, s | told, s |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        told = " ".join(f"{one:.2f}" if one else "-" for one in row["told"])
        cells = [row["job"], row["engine"], f"{row['plain']:.2f}", f"{row['truth']:+.2f}", told]
        lines.append(f"| {' | '.join(cells)} |")
    lines += counted((f"{row['job']} ({row['engine']})", row) for row in rows)
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> int:
    """All jobs, round by round; a run that F has is not made again."""
    report: dict[str, Any] = {"schema": SCHEMA, **conditions(), "runs": []}
    if args.json.exists():
        report = load(args.json, SCHEMA)
    jobs = [job for job in JOBS if not args.jobs or job in args.jobs]
    until = time.monotonic() + args.minutes * 60
    with contextlib.ExitStack() as stack:

        def directory(where: str | None) -> Path:
            made = Path(stack.enter_context(tempfile.TemporaryDirectory("", "truth-", where)))
            made.chmod(0o777)
            return made

        source, work = directory("/dev/shm"), directory(None)
        bed = stack.enter_context(
            SlowBed(source, bandwidth=args.bandwidth, latency_us=args.latency_us)
        )
        for number in range(args.rounds):
            for job in jobs:
                kind = JOBS[job][0]
                if not (source / kind).exists():
                    make(kind, source / kind)
                    (source / kind).chmod(0o644)
                turn = [PLAIN, *args.engines]
                for engine in turn[number % len(turn) :] + turn[: number % len(turn)]:
                    had = sum(r["job"] == job and r["engine"] == engine for r in report["runs"])
                    if had > number:
                        continue
                    if time.monotonic() > until:
                        return TEMPFAIL
                    run = one_run(args, engine, job, bed.path(kind), work)
                    digests = {r["digest"] for r in report["runs"] if r["job"] == job}
                    if digests - {run["digest"]}:
                        raise UffdPrefetchError(f"WRONG VALUES: {job} by {engine}")
                    report["runs"].append(run)
                    save(args.json, report)
                    said = " | ".join(run.get("said", []))
                    print(f"{job} {engine}: {run['seconds']:.2f} s {said}", file=sys.stderr)
    print(show(report))
    return 0


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench/truth.py", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    if words[:1] == ["show"]:
        print(show(load(Path(words[1]), SCHEMA)))
        return 0
    add("--json", type=Path, required=True, metavar="F", help="goes on where it was cut off")
    add("--jobs", type=lambda text: text.split(","), default=[], help="with commas (default: all)")
    add("--engines", type=lambda text: text.split(","), default=list(ENGINES), help="with commas")
    add("--rounds", type=int, default=3)
    add("--minutes", type=float, default=60.0, help="begin no run after so long; status 75")
    add("--bandwidth", type=int, default=300_000_000, help="bytes/s of the bed")
    add("--latency-us", type=int, default=1000)
    add("--wrap", type=str.split, default=[], metavar="OPTIONS", help="of wrap, in one word")
    add("--as", dest="user", type=int, help="a uid that owns none of the files (as root)")
    return measure(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
