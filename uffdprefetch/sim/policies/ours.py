# SPDX-License-Identifier: Apache-2.0
"""This project's policies: windows, known orders, the node's pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from uffdprefetch.sim.evict_rules import EVICT
from uffdprefetch.sim.model import System
from uffdprefetch.sim.plan import CannotRun, LoadingPlan, Phase
from uffdprefetch.sim.policies.base import LoadingPolicy, disks_mb, tiers_of, whole_order
from uffdprefetch.sim.workload import Workload

#: Share of samples within their reader's window from which windows apply, else demand reads.
FOLLOWED = 0.75


def _memory_mb(system: System) -> float:
    """A node's memory for keeping what was read: class 1's capacity."""
    if not system.J:
        raise CannotRun("the nodes have no storage class beside the staging buffer")
    return system.classes[1].d


def _kept(
    order: np.ndarray, workload: Workload, evict: str, capacities_mb: Sequence[float]
) -> np.ndarray:
    """The sources of all accesses, int8 as ``order``: the class in which the node still has it, 0
    for none. ``capacities_mb``: of its memory and of each disk."""
    source = np.zeros(order.shape, np.int8)
    if capacities_mb[0] <= 0:
        return source  # not even empty samples
    for node in range(order.shape[1]):
        mine = order[:, node]
        place = np.zeros(mine.shape, np.int8)
        place[mine >= 0] = tiers_of(mine, mine >= 0, workload, evict, capacities_mb)
        source[:, node] = place
    return source


@dataclass(frozen=True)
class FixedWindowPolicy(LoadingPolicy):
    """`--policy fixed`: a window of the file ahead of each reader in file order; the page cache
    (class 1) evicts by lru."""

    size_mb: float = 52.4288

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        order = whole_order(workload, system.N)
        cache_mb = system.classes[1].d if system.J else 0.0
        source = _kept(order, workload, "lru", [cache_mb])
        starts: np.ndarray = np.append(0.0, np.cumsum(workload.sizes))
        gap = self._gaps(order, starts)
        followed = (order >= 0) & (gap >= 0) & (gap <= self.size_mb)
        if followed.sum() < FOLLOWED * (order >= 0).sum():
            return LoadingPlan(
                [Phase(order, "demand", source=source)],
                notes=["the order is none that a window could follow"],
            )
        useless = np.where(followed & (source == 0), gap, 0.0)
        return LoadingPlan([Phase(order, "staged", source=source, useless=useless)])

    @staticmethod
    def _gaps(order: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """MB of the file between a node's sample and the one before (as ``order``); -1 where it
        goes back, 0 for a node's first."""
        gaps = np.zeros(order.shape)
        for node in range(order.shape[1]):
            mine = order[:, node]
            real = mine >= 0
            samples = mine[real]
            gap = starts[samples] - np.append(starts[samples[:1]], starts[samples[:-1] + 1])
            place = np.zeros(mine.shape)
            place[real] = np.where(gap < -1e-9, -1.0, np.maximum(gap, 0.0))
            gaps[:, node] = place
        return gaps


@dataclass(frozen=True)
class KnownOrderCache(LoadingPolicy):
    """A known order is read ahead, as far as the staging buffer; the page cache (class 1) evicts by
    lru."""

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        order = whole_order(workload, system.N)
        source = _kept(order, workload, "lru", [_memory_mb(system)])
        return LoadingPlan([Phase(order, "staged", source=source)])


@dataclass(frozen=True)
class KnownOrderPool(LoadingPolicy):
    """Known orders with a pool in each node's memory (class 1) that evicts by cyclic, lru, newest,
    planned or belady, and a disk below it (the other classes; `--spill`)."""

    evict: str = "belady"

    def __post_init__(self) -> None:
        if self.evict not in EVICT:
            raise ValueError(f"evict: {self.evict!r} is none of {', '.join(EVICT)}")

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        order = whole_order(workload, system.N)
        source = _kept(order, workload, self.evict, [_memory_mb(system), *disks_mb(system)])
        return LoadingPlan([Phase(order, "staged", source=source)])
