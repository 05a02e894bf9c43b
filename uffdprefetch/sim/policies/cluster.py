# SPDX-License-Identifier: Apache-2.0
"""`wrap --engine pool --cluster`: nodes that keep a file's blocks for each other.

Who keeps what is decided by the code that decides it in a run (cluster/homes.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from uffdprefetch.cluster.homes import BLOCK_BYTES, Home, Word, keep_bytes
from uffdprefetch.sim.evict_rules import EVICT
from uffdprefetch.sim.model import System
from uffdprefetch.sim.outcome import PFS
from uffdprefetch.sim.plan import CannotRun, LoadingPlan, Phase
from uffdprefetch.sim.policies.base import (
    FAVOUR,
    LoadingPolicy,
    disks_mb,
    fill_classes,
    tiers_of,
    whole_order,
)
from uffdprefetch.sim.workload import NONE, Workload

MB = 1_000_000
BLOCK_MB = BLOCK_BYTES / MB
#: Rule of csrc/service/net/fetch.c: the next block of a walk is at most STEP blocks away, and a
#: node's readers come to blocks that others keep where more than 1 / PART of the last WALK blocks
#: are such.
STEP, WALK, PART = 4, 16, 4
#: Most nodes whose questions about a block are simulated: more change nothing.
ASKERS = 16
PLACEMENTS = ("home", "frequency")
UNITS = ("block", "sample")


class _BlockHistory:
    """A node's record of the blocks that its readers came to."""

    def __init__(self) -> None:
        self._last = -STEP - 1
        self._elsewhere = self._walked = 0

    @property
    def together(self) -> bool:
        """Whether they come to what others keep."""
        return self._elsewhere.bit_count() * PART > self._walked

    def came(self, block: int, elsewhere: bool) -> None:
        if 0 < abs(block - self._last) <= STEP:
            self._elsewhere = (self._elsewhere << 1 | elsewhere) & ((1 << WALK) - 1)
            self._walked = min(WALK, self._walked + 1)
        self._last = block


def _first_questions(order: np.ndarray, block_of: np.ndarray) -> Iterator[tuple[int, int]]:
    """(node, block) as they are asked for the first time, a sample's by all nodes at once."""
    blocks = int(block_of.max(initial=0)) + 1
    nodes = order.shape[1]
    asked = np.zeros(nodes * blocks, bool)
    askers = np.zeros(blocks, np.int32)
    for batch in order:
        flat = batch.T.ravel()  # in the order of time
        node = np.tile(np.arange(nodes), batch.shape[1])[flat >= 0]
        block = block_of[flat[flat >= 0]]
        keys, first = np.unique(node * blocks + block, return_index=True)
        new = ~asked[keys]
        asked[keys] = True
        for at in np.sort(first[new]).tolist():
            if askers[block[at]] < ASKERS:
                askers[block[at]] += 1
                yield int(node[at]), int(block[at])


def keepers(
    order: np.ndarray, block_of: np.ndarray, block_mb: np.ndarray, keep_mb: float
) -> np.ndarray:
    """The node that keeps each block, -1 for none. ``order``: (batches, N, b) samples, -1 for
    none; ``block_of``: of each sample; ``block_mb``: of each block; ``keep_mb``: of each node."""
    nodes = order.shape[1]
    home, readers = Home(most=len(block_mb) + 1), [_BlockHistory() for _ in range(nodes)]
    kept, room = np.zeros(nodes), set(range(nodes)) if keep_mb > 0 else set[int]()
    found: np.ndarray = np.full(len(block_mb), -1, np.int32)
    for node, block in _first_questions(order, block_of):
        said = home.ask(0, block, node, room, 0, together=readers[node].together)
        if found[block] < 0 and said.word is not Word.READ and not said.copy:
            keeper = node if said.word is Word.KEEP else said.node
            found[block] = keeper
            kept[keeper] += block_mb[block]
            if kept[keeper] + BLOCK_MB > keep_mb:
                room.discard(keeper)
        readers[node].came(block, found[block] not in (node, -1))
    return found


def most_frequent(
    order: np.ndarray, unit_of: np.ndarray, unit_mb: np.ndarray, keep_mb: float
) -> np.ndarray:
    """As keepers(): the node that reads a unit most often in all of the run ([HDMLP] section
    3.2.1), as long as it has room."""
    nodes, units = order.shape[1], len(unit_mb)
    counts = np.zeros((nodes, units), np.int32)
    for node in range(nodes):
        mine = order[:, node][order[:, node] >= 0]
        counts[node] = np.bincount(unit_of[mine], minlength=units)
    kept, found = np.zeros(nodes), np.full(units, -1, np.int32)
    ranked = np.argsort(-counts, axis=0, kind="stable")
    for unit in np.argsort(-counts.max(axis=0), kind="stable").tolist():
        for node in ranked[:, unit].tolist():
            if kept[node] + unit_mb[unit] <= keep_mb:
                kept[node] += unit_mb[unit]
                found[unit] = node
                break
    return found


def _hold_mb(system: System) -> float:
    """Of a node's memory, what keeps for others."""
    return keep_bytes(int(system.classes[1].d * MB)) / MB


def _stays_mb(system: System) -> float:
    """Of that, what stays in memory where disks take the rest (csrc/service/pool/pool_keep.c)."""
    return _hold_mb(system) / 2


def keep_most_mb(system: System) -> float:
    """What a node keeps for others at the most, in memory and on its disks."""
    return max(_hold_mb(system), _stays_mb(system) + sum(disks_mb(system)))


def where_kept_lies(
    system: System, workload: Workload, order: np.ndarray, keeper: np.ndarray
) -> np.ndarray:
    """(F,) the class of its keeper's in which a sample lies, 0 for none: where there are disks, in
    memory what came last."""
    lies: np.ndarray = np.where(keeper < 0, 0, 1)
    capacities = disks_mb(system)
    if not any(capacities):
        return lies
    samples, first = np.unique(order.reshape(-1), return_index=True)
    came: np.ndarray = np.full(len(keeper), order.size, np.int64)
    came[samples[samples >= 0]] = first[samples >= 0]
    for node in range(order.shape[1]):
        mine = np.flatnonzero(keeper == node)
        mine = mine[np.argsort(came[mine], kind="stable")]
        later = np.cumsum(workload.sizes[mine][::-1])[::-1]
        goes = mine[later > _stays_mb(system)]
        storage, _ = fill_classes(workload.sizes[goes], capacities)
        lies[goes] = np.where(storage > 0, storage + 1, 1)
    return lies


@dataclass(frozen=True)
class ClusterPool(LoadingPolicy):
    """Each byte once per cluster: who asks first for a block of 4 MiB keeps it (class 1, less a
    reserve), and where all read the same they take turns (`--engine pool --cluster`). Disks (the
    other classes; `--spill`) keep as well, and have room left for what a node alone reads."""

    placement: str = "home"  # or "frequency": who reads it most often, as HDMLP has it
    unit: str = "block"  # of frequency: or "sample"
    evict: str = "cyclic"  # of copies, in what a node does not keep for others

    def __post_init__(self) -> None:
        for name, value, values in (
            ("placement", self.placement, PLACEMENTS),
            ("unit", self.unit, UNITS),
            ("evict", self.evict, tuple(EVICT)),
        ):
            if value not in values:
                raise ValueError(f"{name}: {value!r} is none of {', '.join(values)}")

    def plan(self, system: System, workload: Workload) -> LoadingPlan:
        if not system.J:
            raise CannotRun("the nodes have no storage class beside the staging buffer")
        order = whole_order(workload, system.N)
        keeper = self._keeper(system, workload, order)
        return LoadingPlan(
            [Phase(order, "staged", source=self._sources(system, workload, order, keeper))]
        )

    def _keeper(self, system: System, workload: Workload, order: np.ndarray) -> np.ndarray:
        """(F,): the node that keeps each sample, -1 for none. A sample lies where it begins."""
        starts: np.ndarray = np.append(0.0, np.cumsum(workload.sizes)[:-1])
        unit_of = np.arange(workload.F)
        if self.unit == "block" or self.placement == "home":
            unit_of = (starts / BLOCK_MB).astype(np.int64)
        unit_mb = np.bincount(unit_of, workload.sizes)
        place = keepers if self.placement == "home" else most_frequent
        found: np.ndarray = place(order, unit_of, unit_mb, keep_most_mb(system))[unit_of]
        return found

    def _sources(
        self, system: System, workload: Workload, order: np.ndarray, keeper: np.ndarray
    ) -> np.ndarray:
        """Source of every access, int8, in the shape of ``order``."""
        lies = where_kept_lies(system, workload, order, keeper)
        others = np.where(lies > 0, system.J + lies, PFS)
        if 1 / system.b_c > FAVOUR * float(system.pfs(system.N)):
            others[:] = PFS
        me = np.arange(order.shape[1])[None, :, None]
        of, at, far = (np.append(each, NONE)[order] for each in (keeper, lies, others))
        source = np.ascontiguousarray(np.where(of == me, at, np.where(of < 0, PFS, far)), np.int8)
        for node in range(order.shape[1]):
            held = np.bincount(lies[keeper == node], workload.sizes[keeper == node], system.J + 1)
            mine, place = order[:, node], source[:, node]
            passes = (mine >= 0) & ((of[:, node] != node) | (at[:, node] > 1))
            tiers = [system.classes[1].d, *disks_mb(system)] - held[1:]
            copies = {int(i): int(lies[i]) for i in np.flatnonzero((keeper == node) & (lies > 1))}
            found = tiers_of(mine, passes, workload, self.evict, tiers.tolist(), copies)
            place[passes] = np.where(found > 0, found, place[passes])
        self._first_reads(order, keeper, source)
        return source

    @staticmethod
    def _first_reads(order: np.ndarray, keeper: np.ndarray, source: np.ndarray) -> None:
        """A sample that somebody keeps is read from the file system once: by its keeper where that
        comes to it in the batch in which the first one does, else for that one."""
        _, nodes, b = order.shape
        flat, place = order.reshape(-1), source.reshape(-1)
        samples, first = np.unique(flat, return_index=True)
        reads = np.full(len(keeper), -1, np.int64)
        reads[samples[samples >= 0]] = first[samples >= 0]
        at = np.flatnonzero(flat >= 0)
        its = flat[at]
        mine = (at // (nodes * b) == reads[its] // (nodes * b)) & (at // b % nodes == keeper[its])
        samples, first = np.unique(its[mine], return_index=True)
        reads[samples] = at[mine][first]
        place[reads[(reads >= 0) & (keeper >= 0)]] = PFS
