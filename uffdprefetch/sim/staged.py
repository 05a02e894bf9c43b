# SPDX-License-Identifier: Apache-2.0
"""A phase with a staging buffer, batch after batch, all nodes in parallel. Pure.

[HDMLP] equations 3.2 to 3.4: threads fetch the samples in order into the staging buffer while the
classes' own prefetchers fill theirs. gamma, the number of clients of the file system, is one plus
the share of recent time in which each other node read from it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from uffdprefetch.sim.model import Readings, System
from uffdprefetch.sim.outcome import PFS, Outcome, fixed_costs, parts
from uffdprefetch.sim.plan import Holdings, Phase


class _Batch:
    """What a batch has taken so far, by node."""

    def __init__(self, nodes: int, classes: int, sources: int) -> None:
        self.mb = np.zeros(nodes)
        #: Seconds of the staging threads' clocks, ...
        self.elapsed = np.zeros(nodes)
        #: ... those in which each class's threads read from the file system, and of its reads by
        #: source.
        self.busy = np.zeros((nodes, classes))
        self.waits = np.zeros((nodes, sources))

    def note_read(self, mb: np.ndarray, source: np.ndarray, read: np.ndarray) -> None:
        """(N, b) MB, sources and seconds of samples."""
        nodes, kinds = self.waits.shape
        self.mb += mb.sum(axis=1)
        cell = source + np.arange(nodes)[:, None] * kinds
        self.waits += np.bincount(cell.ravel(), read.ravel(), kinds * nodes).reshape(nodes, kinds)

    def note_time(self, elapsed: np.ndarray, busy: np.ndarray) -> None:
        """(N,) seconds, and (N, J + 1) of them those in which the file system was read."""
        self.elapsed += elapsed
        self.busy += np.minimum(busy, elapsed[:, None])


class _ClassPrefetchers:
    """The storage classes' own prefetchers, of all nodes."""

    def __init__(self, system: System, held: Holdings | None, nodes: int) -> None:
        self.system, self.held = system, held
        self.filled = np.zeros((nodes, system.J + 1))  # MB
        self.threads = np.array([float(one.p) for one in system.classes])
        self.stores = np.array([0.0] + [system.store(j) for j in range(1, system.J + 1)])
        self.active = held is not None and bool(held.to_fill.any())

    def fill(
        self, batch: int, elapsed: np.ndarray, per_mb_pfs: np.ndarray, slower: np.ndarray
    ) -> tuple[float, np.ndarray]:
        """Go on for ``elapsed`` seconds: (MB, (N, J) seconds of reading from the file system)."""
        assert self.held is not None
        # Kept samples are preprocessed in turn, as in preload_seconds().
        each = per_mb_pfs[:, None] * slower + 1.0 / self.system.beta
        capacity = elapsed[:, None] * self.threads / np.maximum(each, self.stores)
        limit = self.held.to_fill
        if self.held.room is not None:
            limit = np.minimum(limit, self.held.room[:, :, batch])
        filled = np.maximum(self.filled, np.minimum(self.filled + capacity, limit))
        gained = filled - self.filled
        self.filled = filled
        part = np.divide(gained, capacity, out=np.zeros_like(capacity), where=capacity > 0)
        return float(gained.sum()), part[:, 1:] * elapsed[:, None]


class _Clients:
    """Which threads read from the file system, and what that makes of each one's rate."""

    def __init__(
        self, system: System, classes: _ClassPrefetchers, remaining_mb: np.ndarray
    ) -> None:
        """``remaining_mb``: (batches + 1, N) that each node still has to fetch, from each on."""
        nodes = remaining_mb.shape[1]
        self.system, self.threads, self.remaining_mb = system, classes.threads, remaining_mb
        self.gamma = np.full(nodes, float(nodes))
        # (N, J + 1): share of recent time in which each class's threads read from the file system;
        # class 0: those of the staging buffer.
        self.reading = np.zeros((nodes, system.J + 1))
        if classes.held is not None:
            self.reading[:] = classes.held.to_fill > 0
        self.reading[:, 0] = 1.0
        self.slower = self.reading
        # The file system's greatest aggregate MB/s.
        self.most = min(float(system.t(np.arange(1, nodes + 1)).max()), nodes * system.b_fs)

    def begin_batch(self) -> None:
        """Slowdown of a thread of each class by all that read at the same time."""
        reading = self.threads * self.reading
        others = reading.sum(axis=1)[:, None] - reading
        self.slower = self.system.sharing(others + self.threads)

    def end_batch(self, number: int, batch: _Batch, fetched: np.ndarray) -> None:
        """Who will read during the next one. ``fetched``: (N,) until when the staging threads are
        busy."""
        elapsed = batch.elapsed[:, None]
        reading = np.divide(batch.busy, elapsed, out=self.reading.copy(), where=elapsed > 0)
        # Smoothed: by the last batch alone all nodes would alternate in step.
        self.reading = (self.reading + reading) / 2 if number else reading
        self.gamma = self._next_gamma(self.remaining_mb[number + 1], batch, fetched)

    def _next_gamma(
        self, remaining_mb: np.ndarray, batch: _Batch, fetched: np.ndarray
    ) -> np.ndarray:
        """(N,) gamma of each node while it fetches the next batch: the others read at their recent
        rate until they have all that remains."""
        busy = self.reading.max(axis=1)
        pace = np.divide(batch.elapsed, batch.mb, out=np.zeros(len(busy)), where=batch.mb > 0)
        finish = fetched + pace * remaining_mb
        finish[(batch.mb == 0) & (remaining_mb > 0)] = np.inf
        if finish.min() >= (fetched + batch.elapsed).max():
            return 1.0 + busy.sum() - busy
        until = finish[None, :] - fetched[:, None]  # [i, k]: how long k reads, for i
        elapsed = batch.elapsed[:, None]
        part = np.clip(
            np.divide(until, elapsed, out=np.ones_like(until), where=elapsed > 0), 0.0, 1.0
        )
        np.fill_diagonal(part, 0.0)
        return 1.0 + part @ busy


def _remaining(sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """(batches + 1, N) MB that each node still has to fetch, from each batch on."""
    mb = [sizes[part].sum(axis=2) for part in parts(order)]
    each = np.concatenate([*mb, np.zeros((1, order.shape[1]))])
    return each[::-1].cumsum(axis=0)[::-1]


def _pieces(
    sizes: np.ndarray, order: np.ndarray, buffer_mb: float
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts of batches into pieces of at most half the buffer, and for each piece and node the
    piece whose consumption frees its room (-1: none needed)."""
    _, nodes, b = order.shape
    largest = float(sizes.max(initial=0.0))
    width = b
    if largest * b > buffer_mb / 2:
        width = max(1, int(buffer_mb / 2 / largest))
    cuts: np.ndarray = np.append(np.arange(0, b, width), b)
    mb = (
        np.concatenate(
            [
                np.add.reduceat(sizes[part], cuts[:-1], axis=2)
                .transpose(0, 2, 1)
                .reshape(-1, nodes)
                for part in parts(order)
            ]
        )
        if len(order)
        else np.zeros((0, nodes))
    )
    cumulative = np.cumsum(mb, axis=0)
    lags = np.full(mb.shape, -1, np.int64)
    for node in range(nodes):
        mine = cumulative[:, node]
        excess = mine - buffer_mb
        lags[:, node] = np.where(excess > 0, np.searchsorted(mine, excess), -1)
    return cuts, np.minimum(lags, np.arange(len(mb))[:, None] - 1)


class StagedPhase:
    """A phase with a staging buffer. Times are seconds from the phase's beginning."""

    def __init__(
        self, system: System, readings: Readings, sizes: np.ndarray, phase: Phase, out: Outcome
    ) -> None:
        self.system, self.readings, self.out = system, readings, out
        self.sizes, self.phase = sizes, phase
        nodes = phase.order.shape[1]
        self.fixed = fixed_costs(system, system.classes[0].p)
        self.fetched = np.zeros(nodes)  # until when its staging threads are busy
        self.classes = _ClassPrefetchers(system, phase.held, nodes)
        self.clients = _Clients(system, self.classes, _remaining(sizes, phase.order))
        self.batch = self._batch()
        self.before_mb = out.pfs_mb  # read from the file system before this phase

    def _batch(self) -> _Batch:
        return _Batch(len(self.fetched), len(self.classes.threads), len(self.fixed))

    def run(self) -> float:
        """Seconds of the phase."""
        now, nodes = 0.0, len(self.fetched)
        pieces, lags = _pieces(self.sizes, self.phase.order, self.system.classes[0].d)
        consumed = np.zeros((len(lags), nodes))
        step = 0
        cuts = list(pairwise(pieces.tolist()))
        for batch, order in enumerate(self.phase.order):
            self.batch = self._batch()
            self.clients.begin_batch()
            node_now = np.full(nodes, now)
            for begin, end in cuts:
                free = np.zeros(nodes)
                lag = lags[step]
                limited = lag >= 0
                if limited.any():
                    free[limited] = consumed[lag[limited], np.nonzero(limited)[0]]
                node_now = self._piece(batch, begin, order[:, begin:end], free, node_now)
                consumed[step] = node_now
                step += 1
            now = self._ended(now, node_now)
            self.clients.end_batch(batch, self.batch, self.fetched)
        return now

    def _ended(self, began: float, ends: np.ndarray) -> float:
        """When the last node has finished; the stall is attributed to that node's sources."""
        last = int(ends.argmax())
        now = max(began, float(ends[last]))
        if self.system.rates == "node":
            # gamma lags: nodes that start reading at once would exceed the aggregate rate.
            now = max(now, (self.out.pfs_mb - self.before_mb) / self.clients.most)
        stall = now - began - float(self.batch.mb.max()) / self.system.c
        waits = self.batch.waits[last]
        if waits.sum() > 0:
            self.out.stall_seconds += stall * waits / waits.sum()
        return now

    def _piece(
        self, batch: int, begin: int, part: np.ndarray, free: np.ndarray, now: np.ndarray
    ) -> np.ndarray:
        """Time at which each node has consumed one piece of a batch.

        part: (N, b) samples; free: when the buffer has room for them; now: when computing begins.
        """
        mb = self.sizes[part]
        alone = self.system.pfs(self.clients.gamma)
        per_mb_pfs = alone * self.clients.slower[:, 0]
        source, fetch = self._sources(batch, begin, part, per_mb_pfs)
        read = self.readings.read(fetch, self.system.write(), source == PFS) * mb
        from_pfs = np.where(source == PFS, fetch * mb, 0.0)
        if self.phase.useless is not None:
            more = self.phase.useless[batch, :, begin : begin + part.shape[1]]
            read = read + more * per_mb_pfs[:, None]
            from_pfs = from_pfs + more * per_mb_pfs[:, None]
            self.out.useless_mb += float(more.sum())
        started = np.maximum(self.fetched, free)
        avail = started[:, None] + np.cumsum(read, axis=1) / self.system.classes[0].p
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
        if self.phase.held is None:
            source = np.zeros(part.shape, np.int8)
            return source, np.broadcast_to(per_mb_pfs[:, None], part.shape)
        held = self.phase.held
        # Sources ranked by cost: one minimum yields both source and cost.
        costs = np.tile(self.fixed, (len(part), 1))
        costs[:, PFS] = np.inf if held.once else per_mb_pfs
        ranked = np.argsort(costs, axis=1, kind="stable")
        costs[:, PFS] = per_mb_pfs
        rank = np.empty_like(ranked)
        np.put_along_axis(rank, ranked, np.arange(costs.shape[1])[None], axis=1)
        flat = part.ravel()
        reader: np.ndarray = np.repeat(np.arange(len(part)), part.shape[1])
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
            if self.classes.active:
                there &= self.classes.filled[node, j] >= held.after[row]
            which = np.where(node == reader[owner], j, j + self.system.J)[there]
            owner = owner[there]
            np.minimum.at(best, owner, rank[reader[owner], which])
        source = ranked[reader, best]
        return source.reshape(part.shape), costs[reader, source].reshape(part.shape)

    def _account(self, mb: np.ndarray, source: np.ndarray, read: np.ndarray) -> None:
        self.out.read_mb += np.bincount(source.ravel(), mb.ravel(), len(self.fixed))
        self.out.consumed_mb += float(mb.sum())
        self.batch.note_read(mb, source, read)

    def _advance(
        self, batch: int, until: np.ndarray, from_pfs: np.ndarray, per_mb_pfs: np.ndarray
    ) -> None:
        """Advance the staging threads' clocks, and the classes' prefetchers with them.

        until: (N,) when the staging threads are done; from_pfs: (N, b) their seconds of reading
        from the file system; per_mb_pfs: (N,) seconds a MB of a thread that reads alone.
        """
        elapsed = until - self.fetched
        self.fetched = until
        busy = np.zeros_like(self.batch.busy)
        busy[:, 0] = from_pfs.sum(axis=1) / self.system.classes[0].p
        if self.classes.active:
            filled_mb, busy[:, 1:] = self.classes.fill(
                batch, elapsed, per_mb_pfs, self.clients.slower
            )
            self.out.fill_mb += filled_mb
        self.batch.note_time(elapsed, busy)
