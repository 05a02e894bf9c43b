# SPDX-License-Identifier: Apache-2.0
"""One trial: a job of four ranks, one fault, and whether anybody noticed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import HANG_SECONDS, clean_environment, process_gone, process_state
from harness import Job, Records, jobs
from inside import ring_address

from uffdprefetch import uffd

STATES = ("idle", "resolving", "laying", "taking", "rearming", "detaching")
MOMENT = "moment"
RANKS = 4
RECENT_NS = 10_000_000
#: Denser than anybody would run it: a state that lasts a microsecond must come often.
OPTIONS = ("--distance", "64KiB")
RING_EVENTS = 2048


class TrialFailed(AssertionError):
    """Wrong bytes, a wrong status, or a rank that hangs: what the campaign looks for."""


@dataclass(frozen=True)
class Outcome:
    """What a fault hit. ``counted``: a rank had taken a fault within 10 ms before a kill."""

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
            at = address + uffd.LAYOUT[6] - RING_EVENTS * uffd.EVENT.size
            at += (head - 1) % RING_EVENTS * uffd.EVENT.size
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


@contextlib.contextmanager
def _job(records: Records, cwd: Path, exits: tuple[str, ...] = ()) -> Iterator[Job]:
    env = clean_environment()
    env["UFFDPREFETCH_RUNDIR"] = str(cwd / "run")
    program = str(Path(__file__).with_name("ranks.py"))
    with jobs(env, cwd) as start:
        work = start([sys.executable, "-S", program, str(records.path), *exits], options=OPTIONS)
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


def _step(state: str, source: random.Random) -> int:
    """A random step of a state, such as comes within some seconds."""
    return source.randrange(1, {"rearming": 40, "detaching": 5, MOMENT: 3000}.get(state, 300))


def _point(state: str, source: random.Random) -> str:
    """What ranks.py takes: where an agent is to end, or to stand still."""
    number = MOMENT if state == MOMENT else str(STATES.index(state))
    return f"{number}:{_step(state, source)}"


def _kill(service: int, ranks: dict[int, int]) -> tuple[str, int]:
    """SIGKILL; (the state of the busiest agent, ns since the last fault of any rank), as read just
    before."""
    states, faults = zip(*(look(pid) for pid in ranks.values()), strict=True)
    os.kill(service, signal.SIGKILL)
    since = time.monotonic_ns() - max(faults)
    return next((state for state in states if state != "idle"), "idle"), since


def kill_trial(records: Records, directory: Path, wanted: str, source: random.Random) -> Outcome:
    """The service is killed with SIGKILL; ``wanted``: a state of one agent, or ``moment``."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    # the rank that has its agent stand still; the last one is armed again by the service
    victim = RANKS - 1 if wanted == "rearming" else source.randrange(RANKS)
    points = ["-"] * RANKS
    if wanted != MOMENT:
        points[victim] = _point(wanted, source)
    with _job(records, directory, ("--stop", *points)) as work:
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
    return Outcome("kill", wanted, state, since <= RECENT_NS, since)


def exit_trial(
    records: Records, directory: Path, wanted: list[str], source: random.Random
) -> list[Outcome]:
    """Each rank's agent ends at a random step of its wanted state (or of any: ``moment``)."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    exits = [_point(state, source) for state in wanted]
    with _job(records, directory, tuple(exits)) as work:
        for _ in range(RANKS):
            work.line()
        logs = [directory / f"exit-{rank}" for rank in range(RANKS)]
        _wait(lambda: all(log.exists() and log.stat().st_size for log in logs), "four exits")
        for line in _finish(work, records, f"agents ended at {exits}"):
            if line["agents"]:
                raise TrialFailed(f"an agent is still there: {line}")
    hits = [STATES[int(log.read_text()[0])] for log in logs]
    return [Outcome("exit", want, hit) for want, hit in zip(wanted, hits, strict=True)]
