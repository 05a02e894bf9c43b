# SPDX-License-Identifier: Apache-2.0
"""Latency of a job's own calls while parts of us hang: `python bench/waits.py --json F`.

Each state against the same program without `wrap`: ``all well``; ``service stopped`` (SIGSTOP),
``service dead`` (SIGKILL); ``threads held`` (a tracer holds ours in the job); ``threads dead``
(both end at once, by a test's variable); ``storage stopped`` (SIGSTOP for the file
system). The processes have the file mapped, and read some of it, before that.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reports import ROOT, conditions, save
from slides import build, find_service

from uffdprefetch.demo.bed import SlowBed

MIB = 1 << 20
STATES = (
    *("all well", "service stopped", "service dead", "threads held", "threads dead"),
    "storage stopped",
)
CALLS = ("mmap", "munmap, new", "munmap", "fork", "exec", "_exit")
ENGINES = {"plain": None, "cache": ("cache",), "pool": ("pool", "--budget", "256MiB")}
DEAD = {"UFFDPREFETCH_TEST_AGENT_EXIT": "1", "UFFDPREFETCH_TEST_AGENT_EXIT_ALL": "1"}


def measure(
    state: str, engine: str, program: Path, bed: SlowBed, name: str, children: int
) -> dict[str, list[int]]:
    """Microseconds of each call, in the order in which they came."""
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-waits-") as rundir:
        os.chmod(rundir, 0o700)
        env = {**os.environ, "UFFDPREFETCH_RUNDIR": rundir, "UFFDPREFETCH_RUN": "waits"}
        words = [str(program), str(bed.path(name)), str(children)]
        options = ENGINES[engine]
        if options is not None:
            wrap = [sys.executable, "-m", "uffdprefetch", "wrap", "-q", "-f", "-o", f"{rundir}/out"]
            own = ["--min-size", "1MiB", "--distance", "4MiB", "--engine", *options]
            if state == "threads held":
                words.append("hold")
            if state == "threads dead":
                env |= DEAD
            words = [*wrap, *own, "--", *words]
        job = subprocess.Popen(
            words, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert job.stdin is not None and job.stdout is not None
        found: dict[str, list[int]] = {}
        stopped: int | None = None
        began = time.monotonic()
        for text in job.stdout:
            line = json.loads(text)
            if line["what"] != "ready":
                found.setdefault(line["what"], []).append(line["us"])
                continue
            if state == "storage stopped":
                stopped = bed.pid
            elif state.startswith("service") and options is not None:
                stopped = find_service(rundir)
                assert stopped is not None, "no service"
            if stopped is not None:
                os.kill(stopped, signal.SIGKILL if state == "service dead" else signal.SIGSTOP)
            began = time.monotonic()
            job.stdin.write("go\n")
            job.stdin.flush()
        found["all of it"] = [int((time.monotonic() - began) * 1e6)]
        if stopped is not None and state != "service dead":
            os.kill(stopped, signal.SIGCONT)
        job.stdout.close()
        job.stdin.close()
        if job.wait():
            raise SystemExit(f"bench: {state}, {engine}: status {job.returncode}")
    return found


def cell(us: list[int]) -> str:
    """The longest and the median, in ms."""
    return f"{max(us) / 1e3:.1f} ({statistics.median(us) / 1e3:.2f})" if us else "-"


def main() -> int:
    """Measure every state and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", required=True, metavar="F")
    parser.add_argument("--children", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "schema": "uffdprefetch.bench/1",
        "suite": "waits",
        **conditions(),
        "states": {state: {engine: {} for engine in ENGINES} for state in STATES},
    }
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-waits-") as work:
        program, source = build("waits", Path(work)), Path(work) / "source"
        source.mkdir()
        with open(source / "data", "wb") as file:
            for _ in range(64):
                file.write(os.urandom(MIB))
        with SlowBed(source, writers_behind=True) as bed:
            for _ in range(args.rounds):
                for state, engines in report["states"].items():
                    for engine, calls in engines.items():
                        found = measure(state, engine, program, bed, "data", args.children)
                        for what, us in found.items():
                            calls.setdefault(what, []).extend(us)
    save(Path(args.json), report)
    print("longest (median), ms; " + ", ".join(ENGINES))
    print("| | " + " | ".join(CALLS) + " |")
    print("|---|" + "---:|" * len(CALLS))
    for state, engines in report["states"].items():
        for engine, calls in engines.items():
            shown = " | ".join(cell(calls.get(what, [])) for what in CALLS)
            print(f"| {state}, {engine} | {shown} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
