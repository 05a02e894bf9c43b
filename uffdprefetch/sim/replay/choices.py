# SPDX-License-Identifier: Apache-2.0
"""Which policies a recorded job is put through, and the command line that each one is. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from uffdprefetch.sim.replay.demand import Demand
from uffdprefetch.sim.replay.engine import Outcome, Policy, replay
from uffdprefetch.sim.replay.keep import Belady, Cyclic, Keep, Lru
from uffdprefetch.sim.replay.link import Storage
from uffdprefetch.sim.replay.policies import (
    DISTANCE_BYTES,
    Plain,
    Planned,
    PoolPlanned,
    PoolWindows,
    Windows,
)
from uffdprefetch.units import format_size_exact

MIB = 1 << 20
#: Distances of checkpoints that are tried.
DISTANCES = (DISTANCE_BYTES,)
#: Windows that are tried (paper 1 tries 25 to 200 MiB), and what may lie ahead of a known order.
WINDOWS = (16 * MIB, 50 * MIB, 128 * MIB)
LOOKAHEAD = 64 * MIB


@dataclass(frozen=True)
class Choice:
    """A way to run the job. ``options``: of `wrap`; None is the job without it."""

    name: str
    options: tuple[str, ...] | None
    policy: Callable[[], Policy]
    keep: Callable[[Demand, int], Keep]
    #: Bytes of memory for what was read; None: whatever is there.
    memory_bytes: int | None = None
    needs_order: bool = False


@dataclass(frozen=True)
class Predicted:
    choice: Choice
    outcome: Outcome


def choices(
    windows: Sequence[int], distances: Sequence[int], lookahead_bytes: int,
    memory_bytes: int | None, budgets: Sequence[int],
) -> list[Choice]:
    """Plain, windows of each size and distance, a known order; and pools of each budget."""
    found = [Choice("plain", None, Plain, Lru, memory_bytes)]
    for size, distance in product(windows, distances):
        text, apart = format_size_exact(size), format_size_exact(distance)
        name = f"windows of {text}" + (f", seen each {apart}" if len(distances) > 1 else "")
        found.append(Choice(
            name, ("--policy", "fixed", "--size", text, "--distance", apart),
            partial(Windows, size, distance), Lru, memory_bytes))
    found.append(Choice("known order", ("--plan", "PLAN"), partial(Planned, lookahead_bytes), Lru,
                        memory_bytes, True))
    for budget in budgets:
        text = format_size_exact(budget)
        options = ("--engine", "pool", "--budget", text)
        ahead = max(MIB, min(lookahead_bytes, budget // 4))
        found.append(Choice(f"pool of {text}, windows", options,
                            partial(PoolWindows, ahead), Cyclic, budget))
        found.append(Choice(f"pool of {text}, known order", (*options, "--plan", "PLAN"),
                            partial(PoolPlanned, ahead), Belady, budget, True))
    return found


def predict(
    demand: Demand, storage: Storage, which: Sequence[Choice]
) -> Iterator[Predicted]:
    """Each of them, replayed."""
    for choice in which:
        keep = None
        if choice.memory_bytes is not None:
            keep = choice.keep(demand, choice.memory_bytes)
        yield Predicted(choice, replay(demand, storage, choice.policy(), keep))


def command_line(choice: Choice, job: Sequence[str]) -> str:
    """What to type."""
    words = list(job) or ["COMMAND"]
    if choice.options is not None:
        words = ["uffdprefetch", "wrap", *choice.options, "--", *words]
    return shlex.join(words)
