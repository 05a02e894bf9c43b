# SPDX-License-Identifier: Apache-2.0
"""The interface of a policy, and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from uffdprefetch.sim import caches
from uffdprefetch.sim.model import System
from uffdprefetch.sim.plan import LoadingPlan
from uffdprefetch.sim.workload import Workload

#: Ratio by which the shared file system must be faster to be preferred to a node's disk, or to
#: another node (csrc/service/pool/spill.c, net/fetch.c).
FAVOUR = 1.25


@dataclass(frozen=True)
class LoadingPolicy(ABC):
    """A way to load data. A subclass's fields are its options in a scenario file; its
    docstring is what `simulate --list` says about it."""

    @abstractmethod
    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        """The plan; raises CannotRun where the policy does not apply."""


def whole_order(workload: Workload, nodes: int) -> np.ndarray:
    """(E T, N, b): all epochs."""
    return np.concatenate(list(workload.epochs(nodes)))


def disks_mb(system: System) -> list[float]:
    """Capacities of the classes below memory, as the disk tier of a pool has them (`--spill`):
    nothing of one than which the file system is faster."""
    least = FAVOUR * float(system.pfs(system.N))
    return [
        one.d if system.local(j, 1) <= least else 0.0 for j, one in enumerate(system.classes[2:], 2)
    ]


def tiers_of(
    mine: np.ndarray,
    among: np.ndarray,
    workload: Workload,
    evict: str,
    capacities_mb: Sequence[float],
    copies: Mapping[int, int] = MappingProxyType({}),
) -> np.ndarray:
    """Where a node finds those of its accesses (``mine``: (batches, b), as whole_order()) that a
    mask has: caches.tiers()."""
    before = np.append(0, np.cumsum(among.sum(axis=1)))
    epochs = before[: -1 : workload.T].tolist()
    found: np.ndarray = caches.tiers(
        mine[among], workload.sizes, capacities_mb, evict, epochs, copies
    )
    return found


def preload_seconds(system: System, mb: np.ndarray, clients: int | None = None) -> float:
    """Seconds to read ``mb`` ((N, J + 1): MB into class j of each node) before the first batch.

    ``clients`` nodes (None: all) read and preprocess concurrently, each class with its own p_j
    threads and limited by its write rate; where rates are a node's, their sum is limited too.
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
    """Assign samples of ``sizes`` MB in their order to classes of ``capacities`` MB, filling one
    after the other. Returns (class from 1, 0 for none; MB in the class up to this sample)."""
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
