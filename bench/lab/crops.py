# SPDX-License-Identifier: Apache-2.0
"""Random crops of a token file, as nanoGPT reads it: `python bench/lab/crops.py [--json F]`.

A job takes batches of 12 crops of 1024 tokens (uint16, 2 KiB) at random places of a memmap on the
slow bed, with a little compute (a sleep) in each step; plainly and under `wrap`, in turn. Two
cases: a file that fits --budget, which should be read whole, and one that does not, where it
should only report so. Each with one mapping for the run and, as newer nanoGPT does, with a memmap
for each batch. Every run's tokens must have the same sum. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from reports import conditions, save  # noqa: E402
from runs import bootstrap_interval  # noqa: E402

from uffdprefetch.base.units import format_size, format_size_exact, parse_size  # noqa: E402
from uffdprefetch.demo.bed import SlowBed, drop_cache, warm_fully  # noqa: E402
from uffdprefetch.demo.jobrun import machine_cpu_seconds  # noqa: E402

SCHEMA = "uffdprefetch.bench.crops/1"
MIB = 1 << 20
TOKENS, BATCH = 1024, 12
NAME = "train.bin"
PLAIN = "plain mmap"
ENGINES = {"uffdprefetch": (), "uffdprefetch --engine pool": ("--engine", "pool")}
MAPPINGS = ("one mapping", "a mapping for each batch")
Run = dict[str, Any]


def job(path: str, steps: int, mapping: str, compute_seconds: float, seed: int) -> Run:
    """The training loop: seconds, and the sum of all tokens."""
    import numpy as np

    source = random.Random(seed)
    begin, total = time.perf_counter(), 0
    data = np.memmap(path, dtype=np.uint16, mode="r")
    for _ in range(steps):
        if mapping != MAPPINGS[0]:
            data = np.memmap(path, dtype=np.uint16, mode="r")
        for _ in range(BATCH):
            at = source.randrange(len(data) - TOKENS)
            total += int(data[at : at + TOKENS].astype(np.int64).sum())
        time.sleep(compute_seconds)
    return {"seconds": time.perf_counter() - begin, "total": total}


def measure(
    bed: SlowBed, words: Sequence[str], wrap: Sequence[str], scratch: Path,
    script: str = __file__, warm: bool = False, **variables: str,
) -> Run:  # fmt: skip
    """One run of a script's job on a cold file, or a ``warm`` one. Raises CalledProcessError with
    its stderr shown."""
    path = bed.path(NAME)
    drop_cache(path)
    if warm:
        warm_fully(path)
    bed.reset()
    command = [sys.executable, script, "--job", str(path), *words]
    if wrap:
        ours = [sys.executable, "-m", "uffdprefetch", "wrap", "-f", "-q"]
        command = [*ours, "-o", str(scratch / "tool"), *wrap, "--", *command]
    (scratch / "tool.summary.json").unlink(missing_ok=True)
    _, steal = machine_cpu_seconds()
    environment = {**os.environ, **variables, "UFFDPREFETCH_RUNDIR": str(scratch / "run")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        command, env=environment, cwd=scratch, stdout=subprocess.PIPE, check=True, timeout=300
    )
    run = {**json.loads(done.stdout), "steal_seconds": machine_cpu_seconds()[1] - steal}
    counters = bed.counters()
    run |= {"read_bytes": counters["bytes"], "requests": counters["requests"]}
    if wrap:
        summary = json.loads((scratch / "tool.summary.json").read_text())
        files = summary["files"]  # none where the job has ended before its service was up
        run |= {
            "whole": files[0]["whole"] if files else None,
            "findings": [line for line in summary["degradations"] if "jumps about" in line],
            "service_cpu_seconds": summary["service"]["cpu_seconds"],
        }
    return run


def run_case(
    case: str, size: int, budget: int, options: argparse.Namespace, scratch: Path
) -> list[Run]:
    """All variants of a case in turn, --pairs times."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-bench-", dir=options.work) as name:
        with open(Path(name) / NAME, "wb") as file:
            for _ in range(size // MIB):
                file.write(os.urandom(MIB))
        with SlowBed(name, bandwidth=options.bandwidth, latency_us=options.latency_us) as bed:
            for number in range(options.pairs):
                for mapping in MAPPINGS:
                    compute = str(options.compute_ms / 1e3)
                    words = [str(options.steps), mapping, compute, str(number)]
                    totals = set()
                    for variant, engine in {PLAIN: None, **ENGINES}.items():
                        ours = ("--budget", format_size_exact(budget))
                        wrap = () if engine is None else (*engine, *ours)
                        run = measure(bed, words, wrap, scratch)
                        totals.add(run.pop("total"))
                        runs.append(
                            {"case": case, "mapping": mapping, "variant": variant, "round": number}
                            | {"file_bytes": size, "budget_bytes": budget, **run}
                        )
                        print(
                            f"bench: {case} | {mapping} | round {number + 1}/{options.pairs} | "
                            f"{variant}: {run['seconds']:.3f} s, {run['read_bytes'] / 1e6:.0f} MB",
                            file=sys.stderr, flush=True,
                        )  # fmt: skip
                    if len(totals) != 1:
                        raise SystemExit(f"bench: wrong tokens in {case}, {mapping}: {totals}")
    return runs


def rows(runs: list[Run]) -> list[dict[str, Any]]:
    """Per case, mapping and variant: medians, and ratios to plain within a round. Pure."""
    found: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run["case"], run["mapping"], run["variant"]), []).append(run)
    made = []
    for (case, mapping, variant), mine in found.items():
        plain = {run["round"]: run for run in found[case, mapping, PLAIN]}
        ratios = [run["seconds"] / plain[run["round"]]["seconds"] for run in mine]
        more = [run["read_bytes"] / plain[run["round"]]["read_bytes"] for run in mine]
        states = [run["whole"]["state"] if run.get("whole") else "none" for run in mine]
        made.append(
            {
                "case": case,
                "mapping": mapping,
                "variant": variant,
                "runs": len(mine),
                "seconds": statistics.median(run["seconds"] for run in mine),
                "ratio_to_plain": statistics.median(ratios),
                "ratio_to_plain_interval": bootstrap_interval(ratios),
                "read_bytes": statistics.median(run["read_bytes"] for run in mine),
                "read_ratio_to_plain": statistics.median(more),
                "states": sorted(set(states)) if variant != PLAIN else [],
                "findings": max(len(run.get("findings", [])) for run in mine),
            }
        )
    return made


def table(summary: list[dict[str, Any]]) -> str:
    """The rows in Markdown. Pure."""
    lines = [
        "| case | mapping | variant | s | to plain | read MB | to plain | whole | notes | runs |",
        "|---|---|---|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in summary:
        low, high = row["ratio_to_plain_interval"]
        states = ", ".join(row["states"]) or "-"
        lines.append(
            f"| {row['case']} | {row['mapping']} | {row['variant']} | {row['seconds']:.2f}"
            f" | {row['ratio_to_plain']:.2f} [{low:.2f}, {high:.2f}]"
            f" | {row['read_bytes'] / 1e6:.0f} | {row['read_ratio_to_plain']:.2f}"
            f" | {states} | {row['findings']} | {row['runs']} |"
        )
    return "\n".join(lines)


def add_bed_options(parser: argparse.ArgumentParser) -> None:
    """Of the bed and of what is kept, for the report."""
    add = parser.add_argument
    add("--bandwidth", type=int, default=300_000_000, help="of the link, bytes/s")
    add("--latency-us", type=int, default=1000)
    add("--work", type=Path, default=Path("/dev/shm"), help="where the files are made: memory")
    add("--json", type=Path)


def report(
    options: argparse.Namespace, schema: str, measured: Callable[[Path], list[Run]],
    summed: Callable[[list[Run]], list[dict[str, Any]]],
    shown: Callable[[list[dict[str, Any]]], str], **settings: Any,
) -> None:  # fmt: skip
    """Measure, print the table of the sums, and write the JSON that options name: how it was
    measured, ``settings``, and every run."""
    found = conditions()
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-") as scratch:
        runs = measured(Path(scratch))
    summary = summed(runs)
    print(shown(summary))
    document = {
        "schema": schema,
        **found,
        "bandwidth_bytes_per_second": options.bandwidth,
        "latency_us": options.latency_us,
        **settings,
        "summary": summary,
        "runs": runs,
    }
    save(options.json, document)


def main() -> None:
    """Measure both cases and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--pairs", type=int, default=5, help="rounds")
    add("--steps", type=int, default=400, help="batches of a run")
    add("--compute-ms", type=float, default=5.0, help="of each step")
    add("--size", type=parse_size, default=256 * MIB, help="of the file that fits")
    add("--large", type=parse_size, default=768 * MIB, help="of the file that does not")
    add("--budget", type=parse_size, default=512 * MIB)
    add_bed_options(parser)
    options = parser.parse_args()

    def measured(scratch: Path) -> list[Run]:
        runs = []
        for case, size in (("fits", options.size), ("does not fit", options.large)):
            named = f"{case}: {format_size(size)} of {format_size(options.budget)}"
            runs += run_case(named, size, options.budget, options, scratch)
        return runs

    settings = {"steps": options.steps, "compute_ms": options.compute_ms}
    report(options, SCHEMA, measured, rows, table, **settings)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        _, _, path, steps, mapping, compute, seed = sys.argv
        print(json.dumps(job(path, int(steps), mapping, float(compute), int(seed))))
    else:
        main()
