# SPDX-License-Identifier: Apache-2.0
"""Simulates the hits of an eviction policy in a pool of a given number of blocks.

For tests, and for the bench to compare measurements with: :func:`belady_hits` is the optimum of all
demand-paging policies ([Belady]; Mattson et al. 1970), :func:`tier_hits` that of memory and a disk.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from belady import Belady

from uffdprefetch.pool import workingset
from uffdprefetch.pool.eviction import BlockReader, Cyclic, Policy, Residents

#: Share of steps in one direction from which a reader counts as sequential, else as random.
ONE_WAY = 0.9


@dataclass(frozen=True)
class Accesses:
    """The readers' accesses in time order: parallel int64 arrays, one row an access."""

    reader: np.ndarray
    file: np.ndarray
    block: np.ndarray
    epoch: np.ndarray  # from 0 on, of its own reader

    def __len__(self) -> int:
        return len(self.block)

    def per_epoch(self) -> np.ndarray:
        """The number of accesses in each epoch: the denominator of hits."""
        return np.bincount(self.epoch)

    def futures(self) -> dict[int, np.ndarray]:
        """Each reader's own accesses as (file, block): what :class:`Belady` is made from."""
        both = np.stack((self.file, self.block), axis=1)
        return {int(r): both[self.reader == r] for r in np.unique(self.reader)}


def interleave(walks: Sequence[Sequence[np.ndarray]], lags: Sequence[int] = ()) -> Accesses:
    """Accesses of readers that take one step each in turn and begin each epoch together.

    ``walks[reader][epoch]`` is a row of blocks (of file 0) or (n, 2) of (file, block);
    ``lags[reader]`` is by how many steps it comes later than the others (default 0).
    """
    epochs = len(walks[0])
    starts = np.cumsum([0] + [max(len(walk[e]) for walk in walks) for e in range(epochs)])
    rows = []
    for reader, walk in enumerate(walks):
        lag = lags[reader] if reader < len(lags) else 0
        for epoch, steps in enumerate(walk):
            pairs = np.asarray(steps, np.int64)
            if pairs.ndim == 1:
                pairs = np.stack((np.zeros_like(pairs), pairs), axis=1)
            times = starts[epoch] + lag + np.arange(len(pairs))
            same = np.ones_like(times)
            rows.append((times, same * reader, pairs[:, 0], pairs[:, 1], same * epoch))
    columns = zip(*rows, strict=True)
    time, reader_, file, block, epoch_ = (np.concatenate(column) for column in columns)
    order = np.lexsort((reader_, time))
    return Accesses(reader_[order], file[order], block[order], epoch_[order])


def scan(blocks: int, epochs: int) -> Accesses:
    """One reader, the whole file in order, once an epoch."""
    return interleave([[np.arange(blocks)] * epochs])


def replay(
    accesses: Accesses,
    capacity: int,
    policy_factory: Callable[[], Policy],
    *,
    ahead: int = 0,
    behind: int = 1,
    batch: int = 1,
    mapped: bool = False,
    working_set: bool = True,
) -> np.ndarray:
    """Hits per epoch of a pool of ``capacity`` blocks under a policy.

    The policy gets what the engine would pass: the position of each sequential reader, with the
    range of this epoch, while it reads that file. It is asked for ``batch`` victims at a time, of
    which those used meanwhile are skipped. A block that no victim makes room for is read past the
    pool. With ``mapped`` only a reader's first use of a resident block is observed: later ones do
    not fault. With ``working_set`` it chooses among what is not used again and again, as the engine
    has the cyclic one do.
    """
    policy = policy_factory()
    walks = _walks(accesses, ahead, behind)
    readers: dict[int, BlockReader] = {}
    done: dict[int, int] = {}
    hits: np.ndarray = np.zeros(len(accesses.per_epoch()), np.int64)
    pool = Residents(
        np.zeros(capacity, np.int32),
        np.zeros(capacity, np.int64),
        np.zeros(capacity, np.uint32),
        np.zeros(capacity, bool),
    )
    where: dict[tuple[int, int], int] = {}
    mappers: list[set[int]] = [set() for _ in range(capacity)]
    learns = working_set and policy.name == Cyclic.name
    refaults: np.ndarray = np.zeros(capacity, np.uint8)  # of each row, as workingset.Ghosts
    left: np.ndarray = np.zeros(capacity, np.uint32)
    ghosts: dict[tuple[int, int], tuple[int, int]] = {}  # of what was evicted: the same two
    evictions = 0
    listed: deque[tuple[int, int]] = deque()  # victims: (row, its touch when it was listed)
    columns = [
        column.tolist()
        for column in (accesses.reader, accesses.file, accesses.block, accesses.epoch)
    ]
    last = {reader: now for now, reader in enumerate(columns[0], 1)}
    for now, (reader, file, block, epoch) in enumerate(zip(*columns, strict=True), 1):
        walk = walks.get((reader, file, epoch))
        if walk is None:
            readers.pop(reader, None)
        else:
            readers[reader] = replace(walk, position=block)
        row = where.get((file, block))
        if row is not None:
            hits[epoch] += 1
        elif len(where) < capacity:
            row = len(where)
        else:
            while listed and pool.touched[listed[0][0]] != listed[0][1]:
                listed.popleft()
            if not listed:
                books = workingset.Ghosts(refaults, left, np.ones(capacity, bool))
                workingset.retire([books], evictions, capacity)
                pool.pinned[:] = refaults >= workingset.ACTIVE
                rows = policy.victims(pool, list(readers.values()), batch).tolist()
                listed.extend((r, int(pool.touched[r])) for r in rows)
            if listed:
                row = listed.popleft()[0]
                gone = int(pool.file[row]), int(pool.block[row])
                del where[gone]
                mappers[row].clear()
                evictions += 1
                ghosts[gone] = int(refaults[row]), evictions
        if row is not None and (file, block) not in where:
            times, left[row] = ghosts.get((file, block), (0, 0))
            if learns and walk is None and left[row]:
                distance = evictions - int(left[row]) + 1
                times = workingset.refaulted(times, distance, capacity)
            refaults[row] = times
        if row is not None:
            where[file, block] = row
            pool.file[row], pool.block[row] = file, block
            if not mapped or reader not in mappers[row]:
                pool.touched[row] = now
                mappers[row].add(reader)
        done[reader] = done.get(reader, 0) + 1
        if isinstance(policy, Belady):
            policy.progress(reader, done[reader])
        if now == last[reader]:
            readers.pop(reader, None)
    return hits


def _walks(accesses: Accesses, ahead: int, behind: int) -> dict[tuple[int, int, int], BlockReader]:
    """The range of each sequential (reader, file, epoch)."""
    keys = np.stack((accesses.reader, accesses.file, accesses.epoch), axis=1)
    names, which = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    ends = np.cumsum(np.bincount(which.ravel()))
    walks = {}
    for name, blocks in zip(names.tolist(), np.split(accesses.block[order], ends), strict=False):
        steps = np.diff(blocks)
        up, down = np.count_nonzero(steps >= 0), np.count_nonzero(steps <= 0)
        if max(up, down) >= ONE_WAY * len(steps):
            reader, file, epoch = name
            low, high = int(blocks.min()), int(blocks.max()) + 1
            direction = 1 if up >= down else -1
            walks[reader, file, epoch] = BlockReader(file, low, direction, low, high, ahead, behind)
    return walks


def belady_hits(accesses: Accesses | np.ndarray, capacity: int) -> np.ndarray:
    """Hits per epoch of the optimum (a plain row of blocks is one epoch): a miss evicts the block
    whose next use is farthest. O(n log n)."""
    if not isinstance(accesses, Accesses):
        accesses = interleave([[np.asarray(accesses)]])
    never = len(accesses)
    _, ids = np.unique((accesses.file << 31) + accesses.block, return_inverse=True)
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    again: np.ndarray = np.full(never, never)
    again[order[:-1][same]] = order[1:][same]
    hits: np.ndarray = np.zeros(len(accesses.per_epoch()), np.int64)
    resident: dict[int, int] = {}  # block: its next use
    heap: list[tuple[int, int]] = []  # (-next use, block), with old entries among them
    columns = [column.tolist() for column in (ids, accesses.epoch, again)]
    for block, epoch, use in zip(*columns, strict=True):
        if block in resident:
            hits[epoch] += 1
        elif len(resident) >= capacity:
            while True:
                farthest, victim = heapq.heappop(heap)
                if resident.get(victim) == -farthest:
                    break
            del resident[victim]
        resident[block] = use
        heapq.heappush(heap, (-use, block))
    return hits


def tier_hits(accesses: Accesses, memory: int, disk: int) -> tuple[np.ndarray, np.ndarray]:
    """Hits per epoch of the optimum of two tiers, of so many blocks each: (in memory, on the disk).
    What a smaller cache holds by Belady's rule a larger one holds, too (it is a stack algorithm;
    Mattson et al. 1970): memory and both together are as good as can be at the same time."""
    inside = belady_hits(accesses, memory)
    return inside, belady_hits(accesses, memory + disk) - inside
