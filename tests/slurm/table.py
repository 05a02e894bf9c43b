# SPDX-License-Identifier: Apache-2.0
"""What is left under Slurm, as a table: process tracking x way of ending.

    UFFDPREFETCH_SLURMBED=... python tests/slurm/table.py [--runs 5] [--nodes 4] [--time-limit]
        [PROGRAM WORD...]

PROGRAM: the command line of uffdprefetch, to look at another version. With --time-limit one run of
each is ended by Slurm's clock, which takes a minute and more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bed import TRACKINGS, Bed, Step, running

#: Processes that end by themselves have had this long.
SETTLED_SECONDS = 2.0


def _end(step: Step) -> None:
    step.go()


def _cancel(step: Step) -> None:
    step.cancel()


def _kill(step: Step) -> None:
    step.signal("KILL")


def _limit(step: Step) -> None:
    """The limit was given at its start."""


def _leavings(bed: Bed, runs: int, nodes: int, end: Callable[[Step], None]) -> str:
    for _ in range(runs):
        limit = ("-t1",) if end is _limit else ()
        step = bed.start(nodes=nodes, tasks=nodes, srun=limit)
        end(step)
        step.process.wait(200)
    time.sleep(SETTLED_SECONDS)
    text = f"{len(bed.left())} files, {len(bed.processes())} processes"
    bed.slurm("srun", f"-N{nodes}", f"-n{nodes}", *bed.wrap("true"))
    return f"{text}; after the next run {len(bed.left())} files"


def _signals(bed: Bed) -> str:
    step = bed.start(nodes=1, tasks=1)
    step.signal("USR1")
    time.sleep(SETTLED_SECONDS)
    step.go()
    step.wait()
    died = ", the service died" if "service died" in step.errors() else ""
    return f"{step.signals(0).count('SIGUSR1')} of 1{died}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--time-limit", action="store_true")
    parser.add_argument("program", nargs="*")
    args = parser.parse_args()
    program = args.program or [sys.executable, "-m", "uffdprefetch"]
    endings = [("end", _end, args.runs), ("scancel", _cancel, args.runs)]
    endings += [("SIGKILL to the step", _kill, args.runs)]
    if args.time_limit:
        endings.append(("time limit", _limit, 1))
    print("| tracking | ending | runs x nodes | left |\n|---|---|---|---|")
    for tracking in TRACKINGS:
        with tempfile.TemporaryDirectory() as directory:
            for name, end, runs in endings:
                own = Path(directory) / name.replace(" ", "-")
                own.mkdir()
                with running(own, tracking, program, args.nodes) as bed:
                    left = _leavings(bed, runs, args.nodes, end)
                print(f"| {tracking} | {name} | {runs} x {args.nodes} | {left} |", flush=True)
            own = Path(directory) / "signals"
            own.mkdir()
            with running(own, tracking, program) as bed:
                print(f"| {tracking} | SIGUSR1, then end | 1 x 1 | {_signals(bed)} |", flush=True)


if __name__ == "__main__":
    main()
