# SPDX-License-Identifier: Apache-2.0
"""Jobs that need all the memory of their cgroup: `python bench/lab/memory_limits.py --runs 50`.

Each job (memory_limits.c) maps a file, reads it in order, takes memory of its own and reads again,
in a memory cgroup: without us, with `--engine cache` and with `--engine pool`, in turns. Counted is
how many jobs the kernel killed. One run of each is watched every 10 ms: what the group holds, whose
it is. ``--png`` draws that. As root, where a memory cgroup can be made.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pool_cgroup import MemoryGroup, memory_group
from reports import ROOT, a_line_for_errors, conditions, load, save

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import drop_cache
from uffdprefetch.demo.jobrun import job_environment, wrap_command

SCHEMA = "uffdprefetch.bench-memory-limits/1"
MIB = 1 << 20
#: A run that takes this long hangs.
RUN_SECONDS = 120.0
LOOK_SECONDS = 0.01
ENGINES = ("plain", "cache", "pool")


@dataclass(frozen=True)
class Case:
    """A job and its cgroup, in MiB."""

    what: str
    limit: int
    file: int
    grow: int
    step: int
    pause_ms: int = 0


CASES = {
    "grows": Case("a file of 250 MiB, then 280 of 300 MiB, 4 at once", 300, 250, 280, 4),
    "bursts": Case("a file of 600 MiB, then 450 of 700 MiB at once", 700, 600, 450, 450),
    "leaves 20": Case("a file of 250 MiB, then all but 20 of 300 MiB", 300, 250, 279, 4, 5),
}


def wrapped(engine: str, out: Path) -> list[str]:
    """The words before the job."""
    if engine == "plain":
        return []
    return wrap_command("-f", "-o", str(out), "--engine", engine)


def whose(pid: str) -> str | None:
    """A process of the group: service, another of ours, or job."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if Path(f"/proc/{pid}/comm").read_text().startswith("uffd-"):
            return "others of ours"
        if words[0].endswith(b"memory_limits"):
            return "job"
        if b"serve" in words:
            return "service"
        return "others of ours"
    return None


def anonymous_bytes(pid: str) -> int:
    """Of its own: what it shares since fork(2) counts for each process by its part."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as lines:
        for line in lines:
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) << 10
    return 0


def watch(group: MemoryGroup, over: threading.Event, points: list[dict[str, Any]]) -> None:
    """What the group holds, until ``over``: MiB and the time in seconds."""
    begun = time.monotonic()
    while not over.wait(LOOK_SECONDS):
        used = group.used()
        point: dict[str, Any] = {
            "seconds": round(time.monotonic() - begun, 3),
            "page cache": used["file"] / MIB,
            "pool": used["shmem"] / MIB,
            "job": 0.0,
            "service": 0.0,
            "others of ours": 0.0,
        }
        for pid in (group.path / "cgroup.procs").read_text().split():
            owner = whose(pid)
            if owner is not None:
                point[owner] += anonymous_bytes(pid) / MIB
        points.append({name: round(value, 2) for name, value in point.items()})


def run(case: Case, engine: str, program: Path, data: Path, watched: bool) -> dict[str, Any]:
    """One job in its group: how it ended, how often the kernel killed, what was watched."""
    with memory_group(case.limit * MIB) as group:
        words = [str(program), str(data), str(case.grow), str(case.step), str(case.pause_ms)]
        command = group.joined([*wrapped(engine, data.with_name("run")), *words])
        points: list[dict[str, Any]] = []
        over = threading.Event()
        watcher = threading.Thread(target=watch, args=(group, over, points))
        with contextlib.ExitStack() as stack:
            if watched:
                watcher.start()
                stack.callback(watcher.join)
                stack.callback(over.set)
            begun = time.monotonic()
            done = subprocess.run(
                command, cwd=ROOT, env=job_environment(), capture_output=True, text=True,
                timeout=RUN_SECONDS,
            )  # fmt: skip
            seconds = time.monotonic() - begun
        found = {
            "status": done.returncode,
            "seconds": round(seconds, 3),
            "kills": group.kills(),
            "peak_bytes": group.peak_bytes(),
        }
    if done.returncode not in (0, 128 + signal.SIGKILL, -signal.SIGKILL):
        raise UffdPrefetchError(f"{engine}: exit status {done.returncode}: {done.stderr.strip()}")
    return {**found, **({"points": points} if watched else {})}


def measure(cases: Sequence[str], runs: int) -> dict[str, Any]:
    """For each case and engine its runs; the last one is watched."""
    results: dict[str, Any] = {name: {engine: [] for engine in ENGINES} for name in cases}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        program = Path(name) / "memory_limits"
        source = ROOT / "bench" / "lab" / "memory_limits.c"
        subprocess.run(["gcc", "-O1", "-Wall", "-o", program, source], check=True)
        for case in cases:
            data = Path(name) / f"{CASES[case].file}.bin"
            if not data.exists():
                np.arange(0, CASES[case].file * MIB, 8, dtype="<u8").tofile(data)
            for number in range(runs):
                for engine in ENGINES:
                    drop_cache(data)
                    found = run(CASES[case], engine, program, data, number == runs - 1)
                    results[case][engine].append(found)
                print(".", end="", flush=True, file=sys.stderr)
            print(file=sys.stderr)
    return results


# ---- what is shown -----------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """A row for each case: how many jobs were killed, and the median time."""
    lines = [f"| job and its group | {' | '.join(ENGINES)} |", "|---|" + "---:|" * len(ENGINES)]
    for case, engines in results.items():
        cells = []
        for engine in ENGINES:
            runs = engines[engine]
            killed = sum(run["status"] != 0 for run in runs)
            median = statistics.median(run["seconds"] for run in runs)
            of_ours = sum(run["kills"] for run in runs) - killed
            cells.append(
                f"{killed} of {len(runs)} killed, {median:.2f} s"
                + (f", {of_ours} of ours killed" if of_ours else "")
            )
        lines.append(f"| {CASES[case].what} | {' | '.join(cells)} |")
    return "\n".join(lines)


#: What a watched run's figure stacks, from the bottom.
COLOURS = {
    "job": "#444444",
    "service": "#b2182b",
    "others of ours": "#ef8a62",
    "pool": "#2166ac",
    "page cache": "#a6cde3",
}


def draw(results: dict[str, Any], path: Path) -> None:
    """A row for each case, a column for each engine: the group's memory over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 8, "axes.titlesize": 8.5, "axes.linewidth": 0.7})
    figure, rows = pyplot.subplots(
        len(results), len(ENGINES), figsize=(10, 0.9 + 2.2 * len(results)), squeeze=False,
        sharey="row", layout="constrained",
    )  # fmt: skip
    for ax, engine in zip(rows[0], ENGINES, strict=True):
        ax.set_title({"plain": "without us"}.get(engine, f"--engine {engine}"))
    for ax in rows[-1]:
        ax.set_xlabel("seconds")
    for axes, (case, engines) in zip(rows, results.items(), strict=True):
        for ax, engine in zip(axes, ENGINES, strict=True):
            points = engines[engine][-1]["points"]
            ax.stackplot(
                [point["seconds"] for point in points],
                [[point[owner] for point in points] for owner in COLOURS],
                colors=COLOURS.values(), labels=COLOURS, linewidth=0,
            )  # fmt: skip
            ax.axhline(CASES[case].limit, color="black", lw=0.8, ls="--")
            ax.set_ylim(0, CASES[case].limit * 1.05)
            ax.set_xlim(0, None)
            ax.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel(CASES[case].what.replace(", then", ",\nthen") + "\nMiB")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(COLOURS), frameon=False)
    figure.savefig(path, dpi=150)


@a_line_for_errors
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each job with each engine")
    parser.add_argument("--case", action="append", choices=CASES, help="only this job")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--from", dest="source", type=Path, help="results instead of new runs")
    parser.add_argument("--png", type=Path, help="draw the watched runs here")
    args = parser.parse_args(argv)
    if args.source is not None:
        results = load(args.source, SCHEMA)["results"]
    else:
        results = measure(args.case or list(CASES), args.runs)
        save(args.json, {"schema": SCHEMA, **conditions(), "results": results})
    print(table(results))
    if args.png is not None:
        draw(results, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
