# SPDX-License-Identifier: Apache-2.0
"""One trial: a job of four ranks, one fault, and whether anybody noticed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conftest import (
    HANG_SECONDS,
    PATIENCE_VARIABLE,
    clean_environment,
    process_gone,
    process_state,
)
from harness import Job, Records, jobs
from inside import ring_address

from uffdprefetch import _uffd  # type: ignore[attr-defined]
from uffdprefetch.native import uffd

STATES = ("idle", "resolving", "laying", "rearming", "detaching")
MOMENT = "moment"
RANKS = 4
RECENT_NS = 10_000_000
#: Of a plan.
ITEM_BYTES = 48 << 10


@dataclass(frozen=True)
class Engine:
    """What trials of an engine differ in. ``steps``: a step of a state that comes within seconds is
    below this; ``rings``: whether the event rings show the faults."""

    options: tuple[str, ...]
    states: tuple[str, ...]
    steps: dict[str, int]
    rings: bool
    plan: bool = False  # each rank reads in an order of its own, which is known


ENGINES = {
    # denser than anybody would run it: a state that lasts a microsecond must come often. The
    # service arms each checkpoint of a mapping again once at most, since the ranks share its page
    "cache": Engine(
        ("--distance", "64KiB"),
        STATES,
        {**dict.fromkeys(STATES, 300), "rearming": 8, "detaching": 5, MOMENT: 3000},
        True,
    ),
    # a quarter of the file: blocks leave all the time
    "pool": Engine(
        ("--engine", "pool", "--budget", "4MiB"),
        ("idle", "laying", "rearming", "detaching"),
        {"idle": 15, "laying": 8, "rearming": 5, "detaching": 5, MOMENT: 20},
        False,
    ),
}
ENGINES["cache-plan"] = replace(ENGINES["cache"], plan=True)
ENGINES["pool-plan"] = replace(ENGINES["pool"], plan=True)


class TrialFailed(AssertionError):
    """Wrong bytes, a wrong status, or a rank that hangs: what the campaign looks for."""


@dataclass(frozen=True)
class Outcome:
    """What a fault hit. ``counted``: a rank had taken a fault within 10 ms before a kill (in the
    pool, which holds a quarter of what is read, that is not looked at)."""

    kind: str  # "kill" or "exit"
    wanted: str
    state: str
    counted: bool = True
    since_fault_ns: int | None = None


def look(pid: int) -> tuple[str, int]:
    """(what the agent of a rank does, CLOCK_MONOTONIC ns of its last fault or 0), from its event
    ring, read through the rank's memory. Raises TrialFailed when the rank has died."""
    try:
        address = ring_address(pid)
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            head, state = struct.unpack("<Q52xI", os.pread(memory.fileno(), 64, address))
            at = address + _uffd.ffi.offsetof("struct up_ring", "event")
            at += (head - 1) % _uffd.lib.UP_RING_EVENTS * uffd.EVENT.size
            (last,) = struct.unpack("<Q", os.pread(memory.fileno(), 8, at))
    except FileNotFoundError:
        raise TrialFailed(f"rank {pid} has died") from None
    except (OSError, struct.error):
        return STATES[0], 0  # no ring yet
    return STATES[state], last if head else 0


def _wait(condition: Any, what: str) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TrialFailed(f"waited in vain for {what}")
        time.sleep(0.001)


def _write_plan(records: Records, cwd: Path) -> Path:
    """Pieces of the file, shuffled for each rank; every pass is the same."""
    cuts = [*range(0, records.size_bytes, ITEM_BYTES), records.size_bytes]
    pieces = list(itertools.pairwise(cuts))
    ranks = {str(rank): random.Random(rank).sample(pieces, len(pieces)) for rank in range(RANKS)}
    epochs = [{"ranks": ranks}]
    file = {"file": str(records.path), "unit": "bytes", "epochs": epochs, "repeat": True}
    path = cwd / "plan.json"
    path.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": [file]}))
    return path


@contextlib.contextmanager
def _job(records: Records, cwd: Path, engine: Engine, exits: tuple[str, ...] = ()) -> Iterator[Job]:
    env = clean_environment()
    env["UFFDPREFETCH_RUNDIR"] = str(cwd / "hub")
    env[PATIENCE_VARIABLE] = "1000"  # what is laid, or the pool's, is waited for
    program = str(Path(__file__).with_name("ranks.py"))
    with jobs(env, cwd) as start:
        words = [sys.executable, "-S", program, str(records.path), *exits]
        options = engine.options
        if engine.plan:
            options = (*options, "--plan", str(_write_plan(records, cwd)))
        work = start(words, options=options)
        try:
            yield work
        except TrialFailed as failure:
            raise TrialFailed(f"{failure}; its stderr: {work.errors()[-2000:]}") from None


def _finish(work: Job, records: Records, kind: str) -> list[dict[str, Any]]:
    """Let the ranks read on and end; raises TrialFailed unless all went well."""
    (work.cwd / "go").touch()
    done = work.finish()
    errors = [line for line in done.lines if "error" in line]
    said = [line for line in done.lines if "digests" in line]
    if done.status != 0 or errors or len(said) != RANKS:
        raise TrialFailed(f"{kind}: status {done.status}, {errors or done.stderr[-400:]}")
    for line in said:
        if line["digests"] != [records.digest] or line["wrong"]:
            raise TrialFailed(f"{kind}: wrong bytes: {line}")
    return said


def _point(engine: Engine, state: str, source: random.Random) -> str:
    """What ranks.py takes: a random step where an agent is to end, or to stand still."""
    number = MOMENT if state == MOMENT else str(STATES.index(state))
    return f"{number}:{source.randrange(1, engine.steps[state])}"


def _kill(service: int, ranks: dict[int, int]) -> tuple[str, int]:
    """SIGKILL; (the state of the busiest agent, ns since the last fault of any rank), as read just
    before."""
    states, faults = zip(*(look(pid) for pid in ranks.values()), strict=True)
    os.kill(service, signal.SIGKILL)
    since = time.monotonic_ns() - max(faults)
    return next((state for state in states if state != "idle"), "idle"), since


def kill_trial(
    records: Records, directory: Path, engine: Engine, wanted: str, source: random.Random
) -> Outcome:
    """The service is killed with SIGKILL; ``wanted``: a state of one agent, or ``moment``."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    # the rank that has its agent stand still; the last one is armed again by the service
    victim = RANKS - 1 if wanted == "rearming" else source.randrange(RANKS)
    points = ["-"] * RANKS
    if wanted != MOMENT:
        points[victim] = _point(engine, wanted, source)
    with _job(records, directory, engine, ("--stop", *points)) as work:
        said = [work.line() for _ in range(RANKS)]
        ranks = {line["rank"]: line["pid"] for line in said}
        service = work.service()
        if wanted == MOMENT:
            time.sleep(0.3 + source.random())
            state, since = _kill(service, ranks)
        else:
            _wait(lambda: process_state(ranks[victim]) == "T", f"an agent to be {wanted}")
            _, since = _kill(service, ranks)
            state = STATES[int((directory / f"exit-{victim}").read_text())]
        _wait(lambda: process_gone(service), "the service's death")
        if wanted != MOMENT:
            os.kill(ranks[victim], signal.SIGCONT)
        for line in _finish(work, records, f"service killed, agent {state}"):
            if line["agents"] or line["left"]:
                raise TrialFailed(f"the mapping was not given back: {line}")
    if not engine.rings:
        return Outcome("kill", wanted, state)
    return Outcome("kill", wanted, state, since <= RECENT_NS, since)


def exit_trial(
    records: Records, directory: Path, engine: Engine, wanted: list[str], source: random.Random
) -> list[Outcome]:
    """Of each rank one of our two threads ends at a random step of its wanted state (or of any:
    ``moment``), or both do."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    both = source.random() < 0.5
    exits = [*["--all"] * both, *(_point(engine, state, source) for state in wanted)]
    with _job(records, directory, engine, tuple(exits)) as work:
        for _ in range(RANKS):
            work.line()
        logs = [directory / f"exit-{rank}" for rank in range(RANKS)]
        _wait(lambda: all(log.exists() and log.stat().st_size for log in logs), "four exits")
        for line in _finish(work, records, f"agents ended at {exits}"):
            if both and line["agents"]:
                raise TrialFailed(f"an agent is still there: {line}")
    hits = [STATES[int(log.read_text()[0])] for log in logs]
    return [Outcome("exit", want, hit) for want, hit in zip(wanted, hits, strict=True)]
