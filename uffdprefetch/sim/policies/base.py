# SPDX-License-Identifier: Apache-2.0
"""The interface of a policy, and what several of them need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from uffdprefetch.sim.model import System
from uffdprefetch.sim.plan import Plan
from uffdprefetch.sim.workload import Workload


@dataclass(frozen=True)
class Policy(ABC):
    """A way to load data. A subclass's fields are its options in a scenario file; its
    docstring is what `simulate --list` says about it."""

    @abstractmethod
    def plan(self, system: System, workload: Workload) -> Plan:
        """What is read by whom, when and to where; raises CannotRun where it does not apply."""


def whole_order(workload: Workload, nodes: int) -> np.ndarray:
    """(E T, N, b): all epochs."""
    return np.concatenate(list(workload.epochs(nodes)))


def preload_seconds(system: System, mb: np.ndarray, clients: int | None = None) -> float:
    """Seconds to read ``mb`` ((N, J + 1): MB into class j of each node) before the first batch.

    ``clients`` nodes read at once (None: all) and preprocess what they have read, each class with
    its own p_j threads, as fast as it can be written; where rates are a node's, all of it together
    no faster than that.
    """
    one = float(system.pfs(clients or system.N))
    together = one * float(mb[:, 1:].sum(axis=1).max()) if system.rates == "node" else 0.0
    seconds = [together]
    for j in range(1, system.J + 1):
        p = system.classes[j].p
        read = one * float(system.sharing(p)) + 1.0 / system.beta
        seconds.append(float(mb[:, j].max()) / p * max(read, system.store(j)))
    return max(seconds)


def fill_classes(sizes: np.ndarray, capacities: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Put samples of ``sizes`` MB in their order into classes of ``capacities`` MB, the first
    class first. Returns (class 1.. or 0 for none, MB in the class when the sample is in it)."""
    storage: np.ndarray = np.zeros(len(sizes), np.int8)
    after = np.zeros(len(sizes))
    begin = 0
    for j, capacity in enumerate(capacities, 1):
        cumulative = np.cumsum(sizes[begin:])
        end = begin + int(np.searchsorted(cumulative, capacity, "right"))
        storage[begin:end] = j
        after[begin:end] = cumulative[: end - begin]
        begin = end
    return storage, after
