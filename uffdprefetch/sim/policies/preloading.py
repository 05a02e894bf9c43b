# SPDX-License-Identifier: Apache-2.0
"""Policies that distribute the data set over the nodes: DeepIO, parallel staging, LBANN,
locality-aware loading ([HDMLP] chapters 2.3 and 4.1.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from uffdprefetch.sim.model import System
from uffdprefetch.sim.plan import CannotRun, Holdings, LoadingPlan, Phase, holdings
from uffdprefetch.sim.policies.base import LoadingPolicy, fill_classes, preload_seconds, whole_order
from uffdprefetch.sim.workload import NONE, Workload


@dataclass
class Shares:
    """Disjoint parts of the data set, one a node, in the node's storage classes."""

    owner: np.ndarray  # (F,) node, NONE: on the file system only
    storage: np.ndarray  # (F,) class, 0: on the file system only
    mb: np.ndarray  # (N, J + 1) MB in each class

    @property
    def kept(self) -> np.ndarray:
        return np.nonzero(self.storage > 0)[0]

    def holdings(self) -> Holdings:
        kept = self.kept
        return holdings(len(self.owner), self.mb.shape, kept, self.owner[kept], self.storage[kept])


def shares(system: System, workload: Workload, classes: int) -> Shares:
    """The data set in N parts by sample number, each as far as it fits into ``classes`` classes."""
    owner: np.ndarray = np.full(workload.F, NONE, np.int32)
    storage: np.ndarray = np.zeros(workload.F, np.int8)
    mb = np.zeros((system.N, system.J + 1))
    capacities = [one.d for one in system.classes[1 : classes + 1]]
    for node in range(system.N):
        mine = np.arange(node, workload.F, system.N)
        storage[mine], _ = fill_classes(workload.sizes[mine], capacities)
        owner[mine[storage[mine] > 0]] = node
        mb[node] = np.bincount(storage[mine], workload.sizes[mine], system.J + 1)
    mb[:, 0] = 0.0
    return Shares(owner, storage, mb)


def _sources(order: np.ndarray, kept: Shares, J: int) -> np.ndarray:
    """The source of each access when only the shares are kept: int8, as ``order``."""
    storage: np.ndarray = np.append(kept.storage, 0)
    owner: np.ndarray = np.append(kept.owner, NONE)
    nodes = np.arange(order.shape[1], dtype=np.int32)[None, :, None]
    where = storage[order]
    return np.where((where > 0) & (owner[order] != nodes), where + J, where).astype(np.int8)


def _local_order(pools: list[np.ndarray], like: np.ndarray, seed: int) -> np.ndarray:
    """An order of the shape of ``like`` in which each node reads its own pool, reshuffled in each
    round."""
    out = np.full_like(like, NONE)
    for node, pool in enumerate(pools):
        places = like[:, node] >= 0
        wanted = int(places.sum())
        if not len(pool):
            raise CannotRun("a node's storage holds not one sample")
        random = np.random.default_rng([seed, node, 1])
        rounds = max(1, -(-wanted // len(pool)))
        drawn = np.concatenate([random.permutation(pool) for _ in range(rounds)])[:wanted]
        mine = np.full(places.shape, NONE, np.int32)
        mine[places] = drawn
        out[:, node] = mine
    return out


@dataclass(frozen=True)
class DeepIO(LoadingPolicy):
    """DeepIO: the memory of all nodes keeps what fits, the rest is read on demand."""

    opportunistic: bool = False  # train only on what is in memory, in an order of each node's own

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        kept = shares(system, workload, 1)
        order = whole_order(workload, system.N)
        if self.opportunistic:
            pools = [np.nonzero(kept.owner == node)[0] for node in range(system.N)]
            order = _local_order(pools, order, workload.training.seed)
            phase = Phase(order, "staged", kept.holdings())
        else:
            phase = Phase(order, "demand", source=_sources(order, kept, system.J))
            if len(kept.kept) == workload.F:
                phase = Phase(order, "staged", kept.holdings())
        return LoadingPlan([phase], preload_seconds(system, kept.mb), float(kept.mb.sum()))


@dataclass(frozen=True)
class ParallelStaging(LoadingPolicy):
    """Parallel data staging: each node copies what it will train on to its storage: all, if that
    fits, read from the file system once and passed on; else a part of its own."""

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        order = whole_order(workload, system.N)
        capacities = [one.d for one in system.classes[1:]]
        storage, _ = fill_classes(workload.sizes, capacities)
        if (storage > 0).all():
            all_mb = np.bincount(storage, workload.sizes, system.J + 1)
            phase = Phase(order, "staged", source=np.append(storage, 0)[order].astype(np.int8))
            # One node reads, the others receive from it.
            seconds = preload_seconds(system, all_mb[None], clients=1)
            return LoadingPlan([phase], seconds, float(all_mb.sum()))
        pools, mb = [], np.zeros((system.N, system.J + 1))
        for node in range(system.N):
            # As much as fits: parts may overlap, no node has all.
            random = np.random.default_rng([workload.training.seed, node, 2])
            mine = random.permutation(workload.F)
            storage, _ = fill_classes(workload.sizes[mine], capacities)
            pools.append((mine[storage > 0], storage[storage > 0]))
            mb[node] = np.bincount(storage, workload.sizes[mine], system.J + 1)
        mb[:, 0] = 0.0
        held = holdings(
            workload.F,
            mb.shape,
            np.concatenate([pool for pool, _ in pools]),
            np.arange(system.N).repeat([len(pool) for pool, _ in pools]),
            np.concatenate([where for _, where in pools]),
        )
        order = _local_order([pool for pool, _ in pools], order, workload.training.seed)
        return LoadingPlan(
            [Phase(order, "staged", held)], preload_seconds(system, mb), float(mb.sum())
        )


@dataclass(frozen=True)
class Lbann(LoadingPolicy):
    """LBANN's data store: the memory of all nodes keeps the whole data set."""

    preloading: bool = False  # before the first batch, instead of during the first epoch

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        kept = shares(system, workload, 1)
        if len(kept.kept) < workload.F:
            raise CannotRun("the data set is larger than the memory of all nodes")
        epochs = list(workload.epochs(system.N))
        if self.preloading:
            return LoadingPlan(
                [Phase(np.concatenate(epochs), "staged", kept.holdings())],
                preload_seconds(system, kept.mb),
                float(kept.mb.sum()),
            )
        first = Phase(epochs[0], "staged", write="once")
        if len(epochs) == 1:
            return LoadingPlan([first])
        return LoadingPlan([first, Phase(np.concatenate(epochs[1:]), "staged", kept.holdings())])


@dataclass(frozen=True)
class LocalityAware(LoadingPolicy):
    """Locality-aware loading: a node takes those samples of a batch that it holds."""

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        if workload.training.scheme == "whole":
            raise CannotRun("every node reads every sample of a batch: there is nothing to choose")
        kept = shares(system, workload, system.J)
        order = localised(whole_order(workload, system.N), kept.owner)
        return LoadingPlan(
            [Phase(order, "staged", kept.holdings())],
            preload_seconds(system, kept.mb),
            float(kept.mb.sum()),
        )


def localised(order: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """The same batches with each sample at its owner, as far as parts of equal size allow.

    Surplus samples of one node, and those without an owner, fill up the parts of the others.
    """
    batches, nodes, b = order.shape
    samples = order.reshape(batches, -1)
    room = (order >= 0).sum(axis=2)  # (batches, N)
    home = np.append(owner, NONE)[samples]
    home = np.where(samples >= 0, home, nodes)  # NONE comes last
    keys = np.where(home == NONE, nodes - 1 + 0.5, home)
    by_home = np.argsort(keys, axis=1, kind="stable")
    samples = np.take_along_axis(samples, by_home, 1)
    home = np.take_along_axis(home, by_home, 1)
    rows = np.broadcast_to(np.arange(batches)[:, None], samples.shape)
    own = (home >= 0) & (home < nodes)
    counts = np.bincount(rows[own] * nodes + home[own], minlength=batches * nodes)
    counts = counts.reshape(batches, nodes)
    begins = np.cumsum(counts, axis=1) - counts
    at = np.arange(samples.shape[1])[None]
    index = np.clip(home, 0, nodes - 1)
    place = at - np.take_along_axis(begins, index, 1)
    fits = own & (place < np.take_along_axis(room, index, 1))
    out = np.full_like(order, NONE)
    out[rows[fits], home[fits], place[fits]] = samples[fits]
    # The others fill the free places in their order.
    leftover = ~fits & (samples >= 0)
    free = (out < 0) & (np.arange(b)[None, None] < room[:, :, None])
    out[free] = samples[leftover]
    return out
