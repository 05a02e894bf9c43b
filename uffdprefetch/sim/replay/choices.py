# SPDX-License-Identifier: Apache-2.0
"""The policies that a recorded job is replayed with, and their command lines. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from uffdprefetch.base.config import Config
from uffdprefetch.base.units import format_size_exact
from uffdprefetch.predict import window
from uffdprefetch.sim.replay.auto import Auto, PoolAuto
from uffdprefetch.sim.replay.demand import Demand
from uffdprefetch.sim.replay.engine import ReplayOutcome, ReplayPolicy, replay
from uffdprefetch.sim.replay.eviction import (
    BeladyEviction,
    CyclicEviction,
    EvictionPolicy,
    LruEviction,
)
from uffdprefetch.sim.replay.link import StorageModel
from uffdprefetch.sim.replay.policies import (
    DISTANCE_BYTES,
    Plain,
    Planned,
    PoolPlanned,
    ReplayWindows,
)

MIB = 1 << 20
#: Distances of checkpoints that are tried.
DISTANCES = (DISTANCE_BYTES,)
#: ReplayWindows that are tried ([Haderbache] figure 8: 25 to 200 MiB).
WINDOWS = (16 * MIB, 50 * MIB, 128 * MIB)
#: Share of the recorded time that the job's replay without wrap may miss it by: plain runs were
#: predicted to 11 % (docs/simulate.md). One that misses it by more replays another job.
AGREES = 0.15


@dataclass(frozen=True)
class RunConfiguration:
    """A way to run the job. ``options``: of `wrap`; None: without wrap."""

    name: str
    options: tuple[str, ...] | None
    policy: Callable[[], ReplayPolicy]
    eviction: Callable[[Demand, int], EvictionPolicy]
    #: Bytes of memory for what was read; None: unlimited.
    memory_bytes: int | None = None
    needs_order: bool = False


@dataclass(frozen=True)
class Predicted:
    choice: RunConfiguration
    outcome: ReplayOutcome


def choices(
    windows: Sequence[int],
    distances: Sequence[int],
    memory_bytes: int | None,
    budgets: Sequence[int],
    files_bytes: int,
) -> list[RunConfiguration]:
    """The job without wrap; `wrap` by default, with windows of each size and distance, with a known
    order; pools of each budget. ``files_bytes``: of all files together."""
    # The default budget of bytes ahead, or of a file in memory.
    room = min(Config().budget_bytes, memory_bytes or 1 << 62)
    found = [
        RunConfiguration("plain", None, Plain, LruEviction, memory_bytes),
        RunConfiguration("wrap", (), partial(Auto, room), LruEviction, memory_bytes),
    ]
    for size, distance in product(windows, distances):
        text, apart = format_size_exact(size), format_size_exact(distance)
        name = f"windows of {text}" + (f", seen each {apart}" if len(distances) > 1 else "")
        found.append(
            RunConfiguration(
                name,
                ("--policy", "fixed", "--size", text, "--distance", apart),
                partial(ReplayWindows, size, distance),
                LruEviction,
                memory_bytes,
            )
        )
    found.append(
        RunConfiguration(
            "known order",
            ("--plan", "PLAN"),
            partial(Planned, room),
            LruEviction,
            memory_bytes,
            True,
        )
    )
    for budget in budgets:
        text = format_size_exact(budget)
        options = ("--engine", "pool", "--budget", text)
        ahead = window.pool_bytes(budget, files_bytes, 1)
        found.append(
            RunConfiguration(
                f"pool of {text}", options, partial(PoolAuto, budget), CyclicEviction, budget
            )
        )
        found.append(
            RunConfiguration(
                f"pool of {text}, known order",
                (*options, "--plan", "PLAN"),
                partial(PoolPlanned, budget, ahead),
                BeladyEviction,
                budget,
                True,
            )
        )
    return found


def predict(
    demand: Demand, storage: StorageModel, which: Sequence[RunConfiguration]
) -> Iterator[Predicted]:
    """Replay each of them."""
    for choice in which:
        eviction = None
        if choice.memory_bytes is not None:
            eviction = choice.eviction(demand, choice.memory_bytes)
        yield Predicted(choice, replay(demand, storage, choice.policy(), eviction))


@dataclass(frozen=True)
class RecordingCheck:
    """The recorded run itself, replayed: without wrap, once, with room for all that it reads."""

    outcome: ReplayOutcome
    #: Whether the replay takes as long as the recording.
    agrees: bool
    #: Whether it tells what the job waited for: what came by read(2) is not replayed.
    is_mapped: bool

    @property
    def holds(self) -> bool:
        """Whether a choice can be recommended."""
        return self.agrees and self.is_mapped


def check(demand: Demand, storage: StorageModel) -> RecordingCheck:
    """Replay what was recorded; ``demand``: the recording, once."""
    outcome = replay(demand, storage, Plain())
    agrees = abs(outcome.seconds - demand.seconds) <= AGREES * demand.seconds
    return RecordingCheck(outcome, agrees, demand.read_call_share <= AGREES)


def command_line(choice: RunConfiguration, job: Sequence[str]) -> str:
    """The shell command of a choice."""
    words = list(job) or ["COMMAND"]
    if choice.options is not None:
        words = ["uffdprefetch", "wrap", *choice.options, "--", *words]
    return shlex.join(words)
