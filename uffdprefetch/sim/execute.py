# SPDX-License-Identifier: Apache-2.0
"""Executes a plan in bulk-synchronous steps over all nodes: the time that it takes. Pure.

[HDMLP] chapters 3.1.3 and 4.1.4. A batch begins for all nodes when the last of them has finished
the one before. Two regimes:

- on demand: a node requests a sample, waits for it, preprocesses and computes. Batches share no
  state but the clock, so they are simulated in parallel (vectorised), event by event, with the
  exact number of clients gamma at each request.
- staged: threads fetch the samples in order into the staging buffer (equations 3.2 to 3.4) while
  the classes' own prefetchers fill theirs. Batch after batch, all nodes in parallel; gamma is one
  plus the share of recent time in which each other node read from the file system.

Sources are numbered: 0 the file system, 1..J the node's own class j, J + 1..2 J another node's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from uffdprefetch.sim.model import Readings, System
from uffdprefetch.sim.plan import Holdings, LoadingPlan, Phase

PFS = 0
#: Samples of batches simulated in parallel: keeps the arrays below some 100 MB.
SIDE_BY_SIDE = 1 << 21


@dataclass
class Outcome:
    """A policy's cost. Sums over nodes are in ``*_mb``; seconds are of the whole run."""

    seconds: float = 0.0
    preload_seconds: float = 0.0
    compute_seconds: float = 0.0  # with every sample there at once
    #: (2 J + 1,) per source: MB read by all nodes, and its share of the stall seconds.
    read_mb: np.ndarray = field(default_factory=lambda: np.zeros(1))
    stall_seconds: np.ndarray = field(default_factory=lambda: np.zeros(1))
    fill_mb: float = 0.0  # read from the file system by preloading and by the classes' prefetchers
    useless_mb: float = 0.0  # read from the file system and never used
    consumed_mb: float = 0.0

    @property
    def stall(self) -> float:
        """Seconds in which training waited for samples, preloading included."""
        return self.seconds - self.compute_seconds

    @property
    def pfs_mb(self) -> float:
        """MB read from the file system."""
        return float(self.read_mb[PFS]) + self.fill_mb + self.useless_mb


def execute(system: System, readings: Readings, sizes: np.ndarray, plan: LoadingPlan) -> Outcome:
    """The outcome of ``plan``; ``sizes`` is (F + 1,) with a last 0 (Workload.with_zero)."""
    sources = 2 * system.J + 1
    out = Outcome(read_mb=np.zeros(sources), stall_seconds=np.zeros(sources))
    out.preload_seconds = out.seconds = plan.preload
    out.fill_mb = plan.preload_mb
    for phase in plan.phases:
        mode = Readings(write=phase.write) if phase.write else readings
        if phase.how == "perfect":
            seconds = _compute(system, sizes, phase.order).sum()
            out.consumed_mb += float(sizes[phase.order].sum())
        elif phase.how == "demand":
            seconds = _on_demand(system, sizes, phase, out)
        else:
            seconds = _Staged(system, mode, sizes, phase, out).run()
        out.compute_seconds += float(_compute(system, sizes, phase.order).sum())
        out.seconds += float(seconds)
    return out


def _compute(system: System, sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """(batches,): seconds that the slowest node computes on each batch."""
    return (
        np.concatenate([sizes[part].sum(axis=2).max(axis=1) for part in _parts(order)]) / system.c
        if len(order)
        else np.zeros(0)
    )


def _parts(order: np.ndarray) -> list[np.ndarray]:
    """Parts of an order of SIDE_BY_SIDE samples."""
    step = max(1, SIDE_BY_SIDE // max(1, order.shape[1] * order.shape[2]))
    return [order[at : at + step] for at in range(0, len(order), step)]


def fixed_costs(system: System, threads: int) -> np.ndarray:
    """(2 J + 1,) seconds a MB of each source but the file system (0), for each of ``threads``
    concurrent threads of a node."""
    classes = range(1, system.J + 1)
    own, others = ([cost(j, threads) for j in classes] for cost in (system.local, system.remote))
    return np.array([0.0, *own, *others])


def _on_demand(system: System, sizes: np.ndarray, phase: Phase, out: Outcome) -> float:
    """Seconds of a phase without prefetching."""
    total = 0.0
    done = 0
    for order in _parts(phase.order):
        source = (
            np.zeros(order.shape, np.int8)
            if phase.source is None
            else phase.source[done : done + len(order)]
        )
        total += _demand_part(system, sizes[order], source, order >= 0, out)
        done += len(order)
    return total


def _demand_part(
    system: System, mb: np.ndarray, source: np.ndarray, real: np.ndarray, out: Outcome
) -> float:
    """As :func:`_on_demand`, of batches in parallel; ``mb``, ``source``: (batches, N, b)."""
    batches, nodes, _ = mb.shape
    lengths = real.sum(axis=2)
    fixed = fixed_costs(system, 1)
    write, compute = system.write(), 1.0 / system.c
    # gamma is an integer here: tabulated instead of interpolated at each event.
    per_mb = np.concatenate([[0.0], system.pfs_demand(np.arange(1, nodes + 1))])
    rows = np.arange(batches)
    ready = np.where(lengths > 0, 0.0, np.inf)  # when a node requests its next sample
    reading = np.zeros((batches, nodes))  # until when it reads from the file system
    ended = np.zeros((batches, nodes))
    turn = np.zeros((batches, nodes), np.int64)
    waits = np.zeros(len(fixed))
    for _ in range(int(lengths.sum(axis=1).max(initial=0))):
        node = ready.argmin(axis=1)
        now = ready[rows, node]
        live = np.isfinite(now)
        at = np.minimum(turn[rows, node], mb.shape[2] - 1)
        size = np.where(live, mb[rows, node, at], 0.0)
        now = np.where(live, now, 0.0)
        kind = source[rows, node, at]
        gamma = 1 + (reading > now[:, None]).sum(axis=1) - (reading[rows, node] > now)
        fetch = np.where(kind == PFS, per_mb[np.minimum(gamma, nodes)], fixed[kind]) * size
        waits += np.bincount(kind, fetch + size * write, len(fixed))
        reading[rows, node] = np.where(live & (kind == PFS), now + fetch, reading[rows, node])
        end = now + fetch + size * (write + compute)
        ended[rows, node] = np.where(live, end, ended[rows, node])
        turn[rows, node] += live
        more = turn[rows, node] < lengths[rows, node]
        ready[rows, node] = np.where(live & more, end, np.inf)
    took = ended.max(axis=1)
    stall = took.sum() - (mb.sum(axis=2).max(axis=1) * compute).sum()
    out.stall_seconds += stall * waits / max(waits.sum(), 1e-300)
    out.read_mb += np.bincount(source.ravel(), mb.ravel(), len(fixed))
    out.consumed_mb += float(mb.sum())
    return float(took.sum())


class _Staged:
    """A phase with a staging buffer. Times are seconds from the phase's beginning."""

    def __init__(
        self, system: System, readings: Readings, sizes: np.ndarray, phase: Phase, out: Outcome
    ) -> None:
        self.system, self.readings, self.out = system, readings, out
        self.sizes, self.order, self.phase = sizes, phase.order, phase
        self.held: Holdings | None = phase.held
        self.nodes = phase.order.shape[1]
        staging = system.classes[0]
        self.p0, self.d0 = staging.p, staging.d
        self.fixed = fixed_costs(system, self.p0)
        # State, per node.
        self.fetched = np.zeros(self.nodes)  # until when its staging threads are busy
        self.gamma = np.full(self.nodes, float(self.nodes))
        shape = (self.nodes, system.J + 1)
        self.filled = np.zeros(shape)
        self.threads = np.array([float(one.p) for one in system.classes])
        self.stores = np.array([0.0] + [system.store(j) for j in range(1, system.J + 1)])
        self.filling = self.held is not None and bool(self.held.to_fill.any())
        # (N, J + 1): share of recent time in which each class's threads read from the file system;
        # class 0: those of the staging buffer.
        self.reading = np.zeros(shape)
        if self.held is not None:
            self.reading[:] = self.held.to_fill > 0
        self.reading[:, 0] = 1.0
        self.remaining_mb = self._remaining()
        # The file system's greatest aggregate MB/s, and the MB read from it before this phase.
        clients = np.arange(1, self.nodes + 1)
        self.most = min(float(system.t(clients).max()), self.nodes * system.b_fs)
        self.before_mb = out.pfs_mb

    def _remaining(self) -> np.ndarray:
        """(batches + 1, N) MB that each node still has to fetch, from each batch on."""
        mb = [self.sizes[part].sum(axis=2) for part in _parts(self.order)]
        each = np.concatenate([*mb, np.zeros((1, self.nodes))])
        return each[::-1].cumsum(axis=0)[::-1]

    def run(self) -> float:
        """Seconds of the phase."""
        now = 0.0
        pieces, lags = self._pieces()
        consumed = np.zeros((len(lags), self.nodes))
        step = 0
        cuts = list(pairwise(pieces.tolist()))
        for batch, order in enumerate(self.order):
            self._begin_batch()
            node_now = np.full(self.nodes, now)
            for begin, end in cuts:
                free = np.zeros(self.nodes)
                lag = lags[step]
                limited = lag >= 0
                if limited.any():
                    free[limited] = consumed[lag[limited], np.nonzero(limited)[0]]
                node_now = self._piece(batch, begin, order[:, begin:end], free, node_now)
                consumed[step] = node_now
                step += 1
            now = self._end_batch(batch, now, node_now)
        return now

    def _begin_batch(self) -> None:
        # Of this batch, by node: MB; seconds of its staging threads' clocks, and those in which it
        # read from the file system; and seconds of its reads by source.
        self.mb = np.zeros(self.nodes)
        self.elapsed, self.busy = np.zeros(self.nodes), np.zeros((self.nodes, len(self.threads)))
        self.waits = np.zeros((self.nodes, len(self.fixed)))
        # Slowdown of a thread of each class by all that read at the same time.
        reading = self.threads * self.reading
        others = reading.sum(axis=1)[:, None] - reading
        self.slower = self.system.sharing(others + self.threads)

    def _end_batch(self, batch: int, began: float, ends: np.ndarray) -> float:
        """When the last node has finished; the stall is attributed to that node's sources."""
        last = int(ends.argmax())
        now = max(began, float(ends[last]))
        if self.system.rates == "node":
            # gamma lags: nodes that start reading at once would exceed the aggregate rate.
            now = max(now, (self.out.pfs_mb - self.before_mb) / self.most)
        stall = now - began - float(self.mb.max()) / self.system.c
        waits = self.waits[last]
        if waits.sum() > 0:
            self.out.stall_seconds += stall * waits / waits.sum()
        elapsed = self.elapsed[:, None]
        reading = np.divide(self.busy, elapsed, out=self.reading.copy(), where=elapsed > 0)
        # Smoothed: by the last batch alone all nodes would alternate in step.
        self.reading = (self.reading + reading) / 2 if batch else reading
        self.gamma = self._clients(batch)
        return now

    def _clients(self, batch: int) -> np.ndarray:
        """(N,) gamma of each node while it fetches the next batch: the others read at their recent
        rate until they have all that remains."""
        busy = self.reading.max(axis=1)
        pace = np.divide(self.elapsed, self.mb, out=np.zeros(self.nodes), where=self.mb > 0)
        finish = self.fetched + pace * self.remaining_mb[batch + 1]
        finish[(self.mb == 0) & (self.remaining_mb[batch + 1] > 0)] = np.inf
        if finish.min() >= (self.fetched + self.elapsed).max():
            return 1.0 + busy.sum() - busy
        until = finish[None, :] - self.fetched[:, None]  # [i, k]: how long k reads, for i
        part = np.clip(
            np.divide(
                until,
                self.elapsed[:, None],
                out=np.ones_like(until),
                where=self.elapsed[:, None] > 0,
            ),
            0.0,
            1.0,
        )
        np.fill_diagonal(part, 0.0)
        return 1.0 + part @ busy

    def _pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Cuts of batches into pieces of at most half the buffer, and for each piece and node the
        piece whose consumption frees its room (-1: none needed)."""
        b = self.order.shape[2]
        largest = float(self.sizes.max(initial=0.0))
        width = b
        if largest * b > self.d0 / 2:
            width = max(1, int(self.d0 / 2 / largest))
        cuts: np.ndarray = np.append(np.arange(0, b, width), b)
        mb = (
            np.concatenate(
                [
                    np.add.reduceat(self.sizes[part], cuts[:-1], axis=2)
                    .transpose(0, 2, 1)
                    .reshape(-1, self.nodes)
                    for part in _parts(self.order)
                ]
            )
            if len(self.order)
            else np.zeros((0, self.nodes))
        )
        cumulative = np.cumsum(mb, axis=0)
        lags = np.full(mb.shape, -1, np.int64)
        for node in range(self.nodes):
            mine = cumulative[:, node]
            excess = mine - self.d0
            lags[:, node] = np.where(excess > 0, np.searchsorted(mine, excess), -1)
        return cuts, np.minimum(lags, np.arange(len(mb))[:, None] - 1)

    def _piece(
        self, batch: int, begin: int, part: np.ndarray, free: np.ndarray, now: np.ndarray
    ) -> np.ndarray:
        """Time at which each node has consumed one piece of a batch.

        part: (N, b) samples; free: when the buffer has room for them; now: when computing begins.
        """
        mb = self.sizes[part]
        alone = self.system.pfs(self.gamma)
        per_mb_pfs = alone * self.slower[:, 0]
        source, fetch = self._sources(batch, begin, part, per_mb_pfs)
        read = self.readings.read(fetch, self.system.write(), source == PFS) * mb
        from_pfs = np.where(source == PFS, fetch * mb, 0.0)
        if self.phase.useless is not None:
            more = self.phase.useless[batch, :, begin : begin + part.shape[1]]
            read = read + more * per_mb_pfs[:, None]
            from_pfs = from_pfs + more * per_mb_pfs[:, None]
            self.out.useless_mb += float(more.sum())
        started = np.maximum(self.fetched, free)
        avail = started[:, None] + np.cumsum(read, axis=1) / self.p0
        compute = mb / self.system.c
        before = np.cumsum(compute, axis=1)
        total = before[:, -1]
        latest = (np.maximum(avail, now[:, None]) - (before - compute)).max(axis=1)
        end = latest + total
        self._account(mb, source, read)
        self._advance(batch, avail[:, -1], from_pfs, alone)
        return end

    def _sources(
        self, batch: int, begin: int, part: np.ndarray, per_mb_pfs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(N, b) the fastest source of each sample now, and its seconds a MB."""
        if self.phase.source is not None:
            source = self.phase.source[batch, :, begin : begin + part.shape[1]]
            return source, np.where(source == PFS, per_mb_pfs[:, None], self.fixed[source])
        if self.held is None:
            source = np.zeros(part.shape, np.int8)
            return source, np.broadcast_to(per_mb_pfs[:, None], part.shape)
        held = self.held
        # Sources ranked by cost: one minimum yields both source and cost.
        costs = np.tile(self.fixed, (self.nodes, 1))
        costs[:, PFS] = np.inf if held.once else per_mb_pfs
        ranked = np.argsort(costs, axis=1, kind="stable")
        costs[:, PFS] = per_mb_pfs
        rank = np.empty_like(ranked)
        np.put_along_axis(rank, ranked, np.arange(costs.shape[1])[None], axis=1)
        flat = part.ravel()
        reader: np.ndarray = np.repeat(np.arange(self.nodes), part.shape[1])
        first = held.first[flat]
        count = np.where(flat >= 0, held.first[flat + 1] - first, 0)
        best = rank[reader, PFS]
        if count.sum():
            owner: np.ndarray = np.repeat(np.arange(len(flat)), count)
            row = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count) + first[owner]
            node, j = held.node[row], held.storage[row]
            there = held.since[row] < batch
            there &= held.until[row] > batch
            if not held.shared:
                there &= node == reader[owner]
            if self.filling:
                there &= self.filled[node, j] >= held.after[row]
            which = np.where(node == reader[owner], j, j + self.system.J)[there]
            owner = owner[there]
            np.minimum.at(best, owner, rank[reader[owner], which])
        source = ranked[reader, best]
        return source.reshape(part.shape), costs[reader, source].reshape(part.shape)

    def _account(self, mb: np.ndarray, source: np.ndarray, read: np.ndarray) -> None:
        kinds = len(self.fixed)
        self.out.read_mb += np.bincount(source.ravel(), mb.ravel(), kinds)
        self.mb += mb.sum(axis=1)
        self.out.consumed_mb += float(mb.sum())
        cell = source + np.arange(self.nodes)[:, None] * kinds
        self.waits += np.bincount(cell.ravel(), read.ravel(), kinds * self.nodes).reshape(
            self.nodes, kinds
        )

    def _advance(
        self, batch: int, until: np.ndarray, from_pfs: np.ndarray, per_mb_pfs: np.ndarray
    ) -> None:
        """Advance the staging threads' clocks, and the classes' prefetchers with them.

        until: (N,) when the staging threads are done; from_pfs: (N, b) their seconds of reading
        from the file system; per_mb_pfs: (N,) seconds a MB of a thread that reads alone.
        """
        elapsed = until - self.fetched
        self.fetched = until
        busy = np.zeros_like(self.busy)
        busy[:, 0] = from_pfs.sum(axis=1) / self.p0
        if self.filling:
            assert self.held is not None
            # Kept samples are preprocessed in turn, as in preload_seconds().
            each = per_mb_pfs[:, None] * self.slower + 1.0 / self.system.beta
            capacity = elapsed[:, None] * self.threads / np.maximum(each, self.stores)
            limit = self.held.to_fill
            if self.held.room is not None:
                limit = np.minimum(limit, self.held.room[:, :, batch])
            filled = np.maximum(self.filled, np.minimum(self.filled + capacity, limit))
            gained = filled - self.filled
            self.filled = filled
            self.out.fill_mb += float(gained.sum())
            part = np.divide(gained, capacity, out=np.zeros_like(capacity), where=capacity > 0)
            busy[:, 1:] = part[:, 1:] * elapsed[:, None]
        self.elapsed += elapsed
        self.busy += np.minimum(busy, elapsed[:, None])
