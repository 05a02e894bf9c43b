# SPDX-License-Identifier: Apache-2.0
"""What leaves the node's pool next: the list of victims, which the C side takes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Protocol

import numpy as np
import numpy.typing as npt

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.pool import workingset
from uffdprefetch.pool.eviction import (
    LRU,
    SKIP,
    BlockReader,
    Breaks,
    Cyclic,
    Policy,
    Residents,
    copied_first,
    evictable,
    smallest,
)
from uffdprefetch.pool.files import PooledFiles
from uffdprefetch.pool.residents import reader, resident_blocks, to_come
from uffdprefetch.pool.size import BLOCKS_WANTED, NEARLY_FULL, PoolSize, block_bytes
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.order.epochs import Epochs
from uffdprefetch.predict.streams import FORGET_NS, Stream
from uffdprefetch.state.files import FileState
from uffdprefetch.state.reader import Reader

#: BLOCKS_WANTED with known orders, where neighbours of a record are not used with it.
PLANNED_BLOCKS = 1 << 15
#: Length of a list of victims: this fraction of the pool's blocks, ...
VICTIMS_SHARE = 32
#: ... and no less.
VICTIMS_LEAST = 8


class Disk(Protocol):
    """The tier below the pool's memory (pool/disk_tier.py)."""

    @property
    def has_room(self) -> bool:
        """Whether what leaves memory now can be written."""

    @property
    def writes(self) -> bool:
        """Whether anything is written still, be it beside copies that are there."""

    def free(self, number: int, size_bytes: int) -> int:
        """Copies of so much of a file go, by its number in the pool: bytes that are free."""


class KnownOrder(Protocol):
    """An order that a reader of a file follows (readers/known_order.py)."""

    file: FileState
    epochs: Epochs

    @property
    def rate_bytes_per_second(self) -> float:
        """How fast it reads of this file."""


class Victims:
    """The list of one pool."""

    def __init__(
        self, pool: uffd_pool.Pool, files: PooledFiles, size: PoolSize, clock: Clock, *,
        wanted_bytes: int, chunk_bytes: int, evict: str, disk: Disk | None = None,
    ) -> None:  # fmt: skip
        """``wanted_bytes``: --budget; ``evict``: --evict; ``disk``: to which what leaves goes."""
        self._disk, self._breaks = disk, Breaks()
        self._pool, self._files, self._size, self._clock = pool, files, size, clock
        self._wanted_bytes, self._chunk_bytes = wanted_bytes, chunk_bytes
        self._policy: Policy = LRU() if evict == "lru" else Cyclic()
        self.block_bytes = self._block_bytes(BLOCKS_WANTED)
        self._planned = False  # whether known orders choose the victims
        self._made_ns = 0

    @property
    def rule(self) -> str:
        """By which they are chosen: "planned", "lru", "cyclic"."""
        return "planned" if self._planned else self._policy.name

    def wants_list(self) -> bool:
        """Whether to make a new list: half of what leaves by one is used and the pool is nearly
        full, or it is older than LATELY_NS."""
        remaining = self._pool.victims_left()
        if remaining < 0 or self._clock.now_ns() - self._made_ns > LATELY_NS:
            return True
        spare = self._length() - self._count() // 2
        return self._size.is_nearly_full and remaining <= spare - self._count() % 2

    def plan(
        self,
        streams: Iterable[tuple[Reader, Stream, int]],
        planned: Sequence[KnownOrder] = (),
        unneeded: Iterable[tuple[int, IntervalSet]] = (),
        awaited: Iterable[tuple[FileState, int]] = (),
    ) -> None:
        """Make the list of victims. ``streams``: (reader, stream, its window in bytes) of readers
        whose order is not known, ``planned``: the others; ``unneeded``: (number of a file, ranges
        of it that go first); ``awaited``: (file, bytes of it) to which a stream in another file
        will come."""
        self._size.fit_if_short()
        self._made_ns = self._clock.now_ns()
        self.block_bytes = self._block_bytes(PLANNED_BLOCKS if planned else BLOCKS_WANTED)
        per = self.block_bytes // self._chunk_bytes
        readers = [reader(*one, self.block_bytes) for one in streams]
        readers += [to_come(*one, self.block_bytes) for one in awaited]
        unneeded = list(unneeded)
        ordered = {one.file.pooled.number for one in planned if one.file.pooled is not None}
        active = self._active_chunks(ordered, unneeded)
        residents = resident_blocks(
            self._files.by_number, per, active, self._files.spilled,
            writes=self._disk is not None and self._disk.writes,
        )  # fmt: skip
        self._planned = bool(planned)
        first = unneeded_blocks(residents, unneeded, self.block_bytes)
        rows = np.empty(0, np.intp)
        if first.any():
            residents.pinned[:] = ~first
            rows = self._best(residents, readers, planned)
            residents.pinned[:] = first
        if not planned:
            rows = np.concatenate((rows, self._passed(residents, readers)))
        rows = np.concatenate((rows, self._best(residents, readers, planned)))[: self._length()]
        self._make_room(residents, rows, ordered.union(one.file for one in readers))
        self._pool.set_victims(
            (number, start, end - start)
            for number, block in zip(
                residents.file[rows].tolist(), residents.block[rows].tolist(), strict=True
            )
            for start, end in without(active.get(number), block * per, per)
        )

    def _make_room(
        self, residents: Residents, rows: npt.NDArray[np.intp], read_files: Set[int]
    ) -> None:
        """On a full disk, for those of the victims (rows) that have no copy there, in the place of
        files that are not expected to be read again."""
        if self._disk is None:
            return
        unread = ~np.isin(residents.file, list(read_files))
        self._breaks.note(residents, unread, read_files)
        if self._disk.has_room or residents.copied is None:
            return
        expired = self._breaks.expired()
        lack = ~residents.copied[rows] & ~np.isin(residents.file[rows], expired)
        wanted = int(np.count_nonzero(lack)) * self.block_bytes
        for number in expired:
            if wanted > 0 and number in self._files.by_number and number not in read_files:
                wanted -= self._disk.free(number, wanted)

    def refaulted(self, file: FileState, offset: int, distance: int) -> None:
        """A reader that does not walk has missed what was evicted ``distance`` chunks ago."""
        part = file.pooled
        if part is None or self._policy.name != Cyclic.name:
            return
        chunk = offset // self._chunk_bytes
        times = workingset.refaulted(part.books.refaults[chunk], distance, self._own_chunks())
        part.books.refaults[chunk] = times
        part.has_active |= times >= uffd_pool.ACTIVE

    def _own_chunks(self) -> int:
        """Chunks of the pool that are not kept for other nodes."""
        return self._size.own_bytes // self._chunk_bytes

    def _active_chunks(
        self, ordered: Set[int], unneeded: Iterable[tuple[int, IntervalSet]]
    ) -> dict[int, npt.NDArray[np.bool_]]:
        """Of the files, by number, that are read just now: which chunks are no victims, since they
        are used again and again. ``ordered``: those with a known order, which says more."""
        now = self._clock.now_ns()
        found: dict[int, workingset.Ghosts] = {}
        for number, file in self._files.by_number.items():
            part = file.pooled
            if part is None or not part.has_active or number in ordered:
                continue
            if now - part.faulted_ns <= FORGET_NS:
                books = part.books
                present = np.asarray(books.state) == uffd_pool.PRESENT
                found[number] = workingset.Ghosts(
                    np.asarray(books.refaults), np.asarray(books.left), present
                )
        if not found:
            return {}
        for number, ranges in unneeded:
            for start, end in ranges if number in found else ():
                chunks = slice(-(-start // self._chunk_bytes), end // self._chunk_bytes)
                found[number].refaults[chunks] = 0
        workingset.retire(list(found.values()), self._pool.evictions(), self._own_chunks())
        return {number: file.refaults >= uffd_pool.ACTIVE for number, file in found.items()}

    def _passed(self, residents: Residents, readers: list[BlockReader]) -> npt.NDArray[np.intp]:
        """Of files that several nodes walk through, what lies outside of windows, the oldest first:
        what stays there is kept, and what has just been read is what others come to next. It is
        pinned then."""
        walked = [n for n in {one.file for one in readers} if self._files.others.reads_alike(n)]
        among = np.isin(residents.file, walked) & evictable(residents, readers)
        rows = smallest(residents, np.where(among, residents.touched, SKIP), self._length())
        residents.pinned |= among
        return rows

    def _best(
        self, residents: Residents, readers: list[BlockReader], planned: Sequence[KnownOrder]
    ) -> npt.NDArray[np.intp]:
        if self._disk is None or self._disk.has_room:
            return self._farthest(residents, readers, planned)
        return copied_first(
            residents, self._length(), lambda rows: self._farthest(rows, readers, planned)
        )

    def _farthest(
        self, residents: Residents, readers: list[BlockReader], planned: Sequence[KnownOrder]
    ) -> npt.NDArray[np.intp]:
        if planned:
            return self._planned_victims(residents, readers, planned)
        return self._policy.victims(residents, readers, self._length())

    def _planned_victims(
        self, residents: Residents, readers: list[BlockReader], planned: Sequence[KnownOrder]
    ) -> npt.NDArray[np.int_]:
        """Rows to evict where orders are known: pool/order_eviction.py."""
        from uffdprefetch.pool import order_eviction

        next_use = np.full(len(residents.file), np.inf)
        is_known: npt.NDArray[np.bool_] = np.zeros(len(next_use), bool)
        for one in planned:
            if one.file.pooled is None:
                continue
            its = np.flatnonzero(residents.file == one.file.pooled.number)
            blocks = residents.block[its]
            next_use[its] = np.minimum(next_use[its], one.epochs.future(blocks, self.block_bytes))
            is_known[its] |= one.epochs.knows(blocks, self.block_bytes)
        rate = sum(one.rate_bytes_per_second for one in planned)
        now_ms = int(residents.touched.max(initial=0))
        found: npt.NDArray[np.int_] = order_eviction.victims(
            residents, readers, self._length(), next_use, is_known, self.block_bytes, now_ms, rate
        )
        return found

    def _block_bytes(self, wanted: int) -> int:
        """The unit of eviction with at least ``wanted`` blocks in the pool."""
        return block_bytes(self._wanted_bytes, self._chunk_bytes, wanted)

    def _count(self) -> int:
        """How many leave by one list: few, since by the time that it is used up its end may be what
        is read next."""
        return max(VICTIMS_LEAST, self._size.budget_bytes // self.block_bytes // VICTIMS_SHARE)

    def _length(self) -> int:
        """Of the list: where they go to a disk, more, which are written meanwhile: what could be
        before the pool was full."""
        if self._disk is None or not self._disk.writes:
            return self._count()
        ahead_bytes = (1 - NEARLY_FULL) * self._size.budget_bytes
        return max(2 * self._count(), round(ahead_bytes / self.block_bytes))


def unneeded_blocks(
    residents: Residents, unneeded: Iterable[tuple[int, IntervalSet]], block_bytes: int
) -> npt.NDArray[np.bool_]:
    """Of which rows all of the block lies in one of these ranges of (number of a file, ranges)."""
    found: npt.NDArray[np.bool_] = np.zeros(len(residents.file), bool)
    for number, ranges in unneeded:
        of_file = residents.file == number
        for start, end in ranges:
            first, last = -(-start // block_bytes), end // block_bytes
            found |= of_file & (residents.block >= first) & (residents.block < last)
    return found


def without(
    spared: npt.NDArray[np.bool_] | None, first: int, count: int
) -> Iterator[tuple[int, int]]:
    """The runs [start, end) of [first, first + count) that a mask does not have."""
    if spared is None or not spared[first : first + count].any():
        yield first, first + count
        return
    edges = np.flatnonzero(np.diff(~spared[first : first + count], prepend=False, append=False))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield first + start, first + end
