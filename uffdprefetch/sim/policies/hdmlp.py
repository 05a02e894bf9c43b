# SPDX-License-Identifier: Apache-2.0
"""The bounds, readahead and HDMLP ([HDMLP] chapters 3.2 and 4.1.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from uffdprefetch.sim.model import System
from uffdprefetch.sim.plan import NEVER, Holdings, LoadingPlan, Phase, holdings
from uffdprefetch.sim.policies.base import LoadingPolicy, fill_classes, whole_order
from uffdprefetch.sim.workload import Workload


@dataclass(frozen=True)
class Perfect(LoadingPolicy):
    """Lower bound: every sample is there when it is needed."""

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        return LoadingPlan([Phase(whole_order(workload, system.N), "perfect")])


@dataclass(frozen=True)
class Naive(LoadingPolicy):
    """Every sample is read from the file system when it is needed."""

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        return LoadingPlan([Phase(whole_order(workload, system.N), "demand")])


@dataclass(frozen=True)
class StagingPool(LoadingPolicy):
    """Samples are read from the file system in order, as far ahead as the staging buffer is large
    (tf.data, double buffering)."""

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        if system.classes[0].d <= 0:
            return Naive().plan(system, workload)
        return LoadingPlan([Phase(whole_order(workload, system.N), "staged")])


@dataclass(frozen=True)
class Frequency(LoadingPolicy):
    """HDMLP: a node keeps what it reads most often in its fastest storage; samples are fetched from
    the fastest source."""

    in_order: bool = True  # a class is filled by first access, else by frequency
    cleanup_read: bool = False  # samples are removed at their node's last read
    remote: bool = True  # also from other nodes' storage; [HDMLP]'s tables agree with False

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        order = whole_order(workload, system.N)
        if system.classes[0].d <= 0:
            return LoadingPlan([Phase(order, "demand")])
        return LoadingPlan([Phase(order, "staged", self._held(system, workload, order))])

    def _held(self, system: System, workload: Workload, order: np.ndarray) -> Holdings:
        steps, classes = len(order), system.J + 1
        rows = []
        to_fill = np.zeros((system.N, classes))
        # By the beginning of each batch, and of the one after the last.
        freed = np.zeros((system.N, classes, steps + 1)) if self.cleanup_read else None
        for node in range(system.N):
            kept = self._kept(system, workload.sizes, order[:, node])
            sizes = workload.sizes[kept.sample]
            to_fill[node] = np.bincount(kept.storage, sizes, classes)
            if freed is not None:
                np.add.at(freed[node], (kept.storage, kept.last + 1), sizes)
            rows.append(
                (
                    kept.sample,
                    np.full(len(sizes), node),
                    kept.storage,
                    kept.after,
                    kept.last if self.cleanup_read else np.full(len(sizes), NEVER),
                )
            )
        sample, owner, storage, after, until = map(np.concatenate, zip(*rows, strict=True))
        held = holdings(
            workload.F, to_fill.shape, sample, owner, storage, after, until=until, to_fill=to_fill
        )
        held.shared = self.remote
        if freed is not None:
            held.room = (
                np.cumsum(freed, axis=2)
                + np.array([one.d for one in system.classes])[None, :, None]
            )
        return held

    def _kept(self, system: System, sizes: np.ndarray, mine: np.ndarray) -> _Kept:
        """Contents of one node's classes; ``mine``: (batches, b)."""
        capacities = [one.d for one in system.classes[1:]]
        batch = np.nonzero(mine >= 0)[0]
        flat = mine[mine >= 0]
        samples, first, counts = np.unique(flat, return_index=True, return_counts=True)
        last = batch[len(flat) - 1 - np.unique(flat[::-1], return_index=True)[1]]
        ranked = np.lexsort((first, -counts))
        samples, first, last = samples[ranked], first[ranked], last[ranked]
        storage, _ = fill_classes(sizes[samples], capacities)
        generation: np.ndarray = np.zeros(len(samples), np.int8)
        if self.cleanup_read:
            # Removals free room for as much again, of the next in rank.
            rest = np.nonzero(storage == 0)[0]
            storage[rest], _ = fill_classes(sizes[samples[rest]], capacities)
            generation[rest] = 1
        inside = np.nonzero(storage > 0)[0]
        by = first if self.in_order else np.arange(len(first))
        inside = inside[np.lexsort((by[inside], generation[inside], storage[inside]))]
        samples, last, storage = samples[inside], last[inside], storage[inside]
        after = np.cumsum(sizes[samples])
        before = np.append(0.0, after)[np.searchsorted(storage, np.arange(system.J + 1))]
        return _Kept(samples, storage, after - before[storage], last)


@dataclass(frozen=True)
class _Kept:
    """Samples that a node keeps, sorted by class and fill order."""

    sample: np.ndarray
    storage: np.ndarray  # class
    after: np.ndarray  # MB that the class has read when the sample is there
    last: np.ndarray  # the batch in which the node reads it for the last time
