# SPDX-License-Identifier: Apache-2.0
"""Chooses the pool's victims, best first. Pure: resident blocks in, row numbers out.

Belady's rule ([Belady]) evicts the block whose next use is farthest away. The policies differ in
what they know of the future: :class:`LRU` nothing (it takes the past for the future),
:class:`Cyclic` that readers go on in order and begin again, bench/belady.py all of it. Blocks are
numbered per file.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

#: An idle file counts as still in use for this many times its longest break so far: for files read
#: once an epoch in random order a break lasts from none to two epochs, one in the mean.
BREAKS = 2
#: Distance of a block in no reader's range.
NOBODY = np.uint32(0xFFFFFFFF)
#: Key of a row that must not be chosen.
SKIP = np.uint32(0xFFFFFFFF)
#: Rows per batch: their arrays fit into the CPU's cache.
SLICE_ROWS = 1 << 16


@dataclass(frozen=True)
class BlockReader:
    """One active stream, in blocks of its file."""

    file: int  # number of the file in the pool
    position: int  # where it is now
    direction: int  # +1 / -1
    low: int  # [low, high): its range in an epoch; the whole file when not known
    high: int
    ahead: int  # its window: blocks after the position that are never evicted
    behind: int = 1  # blocks before the position never evicted: a record may straddle

    @property
    def spared(self) -> tuple[int, int]:
        """[first, end) of the blocks that are never evicted."""
        if self.direction < 0:
            return self.position - self.ahead, self.position + self.behind + 1
        return self.position - self.behind, self.position + self.ahead + 1


@dataclass
class Residents:
    """The pool's resident blocks: parallel arrays, one row a block, in any order."""

    file: np.ndarray  # int32
    block: np.ndarray  # int64, below 2^31 (128 TiB of 64 KiB)
    touched: np.ndarray  # uint32, ms since the pool began (from 1 on), 0 never
    pinned: np.ndarray  # bool: may not be evicted
    #: bool: all of it has a copy in the disk tier, or will have one before it leaves; None: there
    #: is none.
    copied: np.ndarray | None = None


class Policy(Protocol):
    """An eviction policy; it may keep state, and has no other input."""

    name: str

    def victims(
        self, residents: Residents, readers: Sequence[BlockReader], count: int
    ) -> np.ndarray:
        """Row numbers of at most ``count`` rows to evict, best victim first; never a pinned one
        nor one of :attr:`Reader.spared`. Ties go to the lower file, then the lower block."""


def evictable(residents: Residents, readers: Sequence[BlockReader]) -> np.ndarray:
    """Whether a policy may choose a row (bool)."""
    free = ~residents.pinned
    for rows, blocks, its in _by_file(residents, readers):
        spared: np.ndarray = np.zeros(len(blocks), bool)
        for reader in its:
            spared |= _within(blocks, *reader.spared)
        free[rows] &= ~spared
    return free


def smallest(residents: Residents, keys: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` rows of the smallest ``keys`` (uint32, one a row), smallest first, ties by
    file and block; never one whose key is SKIP. Linear in the number of rows."""
    if count <= 0 or not len(keys):
        return np.empty(0, np.intp)
    last = SKIP - np.uint32(1)
    if count < len(keys):
        last = min(last, np.partition(keys, count - 1)[count - 1])
    rows = np.flatnonzero(keys < last)
    ties = np.flatnonzero(keys == last)
    room = count - len(rows)
    if len(ties) > room:
        ties = ties[np.argpartition(_place(residents, ties), room - 1)[:room]]
    rows = np.concatenate((rows, ties))
    return rows[np.lexsort((_place(residents, rows), keys[rows]))]


def copied_first(
    residents: Residents, count: int, choose: Callable[[Residents], np.ndarray]
) -> np.ndarray:
    """The rows that ``choose`` would evict, of a pool whose disk tier is full: those first that
    have a copy or a place there, which costs no read of storage when they come back. One that
    nobody has touched since it came is on its way to a reader: it has no such preference, or it
    would leave first and come again, round and round."""
    if residents.copied is None:
        return choose(residents)
    first = residents.copied & (residents.touched != 0)
    rows = choose(replace(residents, pinned=residents.pinned | ~first))
    if len(rows) >= count:
        return rows
    others = choose(replace(residents, pinned=residents.pinned | first))
    return np.concatenate((rows, others))[:count]


def oldest_first(residents: Residents, among: np.ndarray) -> np.ndarray:
    """Keys for :func:`smallest`: the rows of a mask, the least recently touched first, those never
    touched last."""
    return np.where(among, np.minimum(residents.touched - np.uint32(1), SKIP - np.uint32(1)), SKIP)


def newest_first(residents: Residents, among: np.ndarray) -> np.ndarray:
    """The most recently touched first, those never touched last."""
    return np.where(among, np.minimum(~residents.touched, SKIP - np.uint32(1)), SKIP)


def farthest_first(distance: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Keys for :func:`smallest`: the rows of a mask, the greatest distance (uint32) first."""
    return np.where(among, SKIP - np.uint32(1) - distance, SKIP)


class LRU:
    """Least recently touched first. Never touched blocks are prefetched and still to be used, so
    they count as the most recent. For comparison: on a scan larger than the pool it hits
    nothing."""

    name = "lru"

    def victims(
        self, residents: Residents, readers: Sequence[BlockReader], count: int
    ) -> np.ndarray:
        """See :class:`Policy`."""
        return smallest(residents, oldest_first(residents, evictable(residents, readers)), count)


class Cyclic:
    """Farthest predicted use first, assuming that every reader goes round its range in order.

    A block's next use is the smallest circular distance ahead of a reader within its range. The
    victim is then just behind the last reader: a fixed part of the file stays from epoch to epoch,
    with hit rate capacity / size, where LRU evicts each block just before its next use.

    *Unclaimed blocks* (of a file without readers; outside of all ranges) have been used once each
    in some order, and a cycle or a permutation reuses last what it has used last: so the most
    recently touched goes first. That keeps a fixed part of a file read at random, of a data set in
    many files read one after the other, and of the training file while a validation set is read,
    where LRU would evict what training begins with. Their priority against claimed blocks is
    learned: they are evicted before all others (a file that was read once is not kept) unless they
    have been used again after a break, for at most BREAKS times the longest such break. Within that
    the n-th least recently touched of them counts as n blocks away. So a validation set read
    between the epochs loses its blocks to training once; from the next time on both keep their
    share. Each block of either is used once a cycle: any part is as good as any other, only
    exchanging them costs.

    Distances are in blocks of one reader and assume equal speeds; k readers of k parts make k steps
    at a time, so their distances count k-fold when compared with other files'.
    """

    name = "cyclic"

    def __init__(self) -> None:
        self._breaks = Breaks()

    def victims(
        self, residents: Residents, readers: Sequence[BlockReader], count: int
    ) -> np.ndarray:
        """See :class:`Policy`."""
        distance = distances(residents, readers)
        free = evictable(residents, readers)
        unclaimed = distance == NOBODY
        if not unclaimed.any():
            self._note_breaks(residents, unclaimed, readers)
            return smallest(residents, farthest_first(distance, free), count)
        expired = self._note_breaks(residents, unclaimed, readers)
        expired &= free
        first = smallest(residents, newest_first(residents, expired), count)
        if len(first) >= count:
            return first
        back = unclaimed & free & ~expired
        latest = smallest(residents, newest_first(residents, back), count - len(first))
        ranks = np.count_nonzero(back) - np.arange(1, len(latest) + 1)
        far = smallest(residents, farthest_first(distance, free & ~unclaimed), count - len(first))
        rows = np.concatenate((latest, far))
        keys = -np.concatenate((ranks, distance[far].astype(np.int64)))
        best = np.lexsort((_place(residents, rows), keys))[: count - len(first)]
        return np.concatenate((first, rows[best]))

    def _note_breaks(
        self, residents: Residents, unclaimed: np.ndarray, readers: Sequence[BlockReader]
    ) -> np.ndarray:
        """Note when unclaimed blocks (a mask) were used; returns which of them are not expected to
        be used again."""
        self._breaks.note(residents, unclaimed, {reader.file for reader in readers})
        files = residents.file[unclaimed]
        expired = unclaimed.copy()
        expired[unclaimed] = np.isin(files, self._breaks.expired())
        return expired


class Breaks:
    """Whether files that nobody reads just now are expected to be used again."""

    def __init__(self) -> None:
        self._now = 0  # ms: the latest touch seen
        self._of: dict[int, _Breaks] = {}

    def note(self, residents: Residents, among: np.ndarray, read_files: Container[int]) -> None:
        """Note when blocks of a mask were used, and which files have readers."""
        self._now = max(self._now, int(residents.touched.max(initial=0)))
        files = residents.file[among]
        newest: np.ndarray = np.zeros(int(files.max(initial=-1)) + 1, np.uint32)
        np.maximum.at(newest, files, residents.touched[among])
        for file in np.flatnonzero(np.bincount(files)).tolist():
            self._of.setdefault(file, _Breaks())
        for file, breaks in self._of.items():
            touch = int(newest[file]) if file < len(newest) else 0
            breaks.note(touch, file in read_files, self._now)

    def expired(self) -> list[int]:
        """Files of which no other use is expected."""
        return [file for file, breaks in self._of.items() if not breaks.expected(self._now)]


@dataclass
class _Breaks:
    """Uses of a file's unclaimed blocks. Times in ms."""

    newest: int = -1  # latest touch of one
    has_readers: bool = False  # whether the file had readers at the last note()
    read_ms: int = -1  # the last note() at which it had
    longest: int = 0

    @property
    def used(self) -> int:
        """When they were used last. Blocks mapped by a reader may show no touch; but unclaimed
        blocks of a file with readers are not those that are read."""
        return self.newest if self.has_readers else max(self.newest, self.read_ms)

    def note(self, touch: int, has_readers: bool, now: int) -> None:
        """Update: their latest touch, whether the file has readers."""
        if self.newest >= 0:
            if has_readers and not self.has_readers:
                self.longest = max(self.longest, now - self.used)
            elif has_readers == self.has_readers:  # else a reader's last touch has made them so
                self.longest = max(self.longest, touch - self.used)
        self.newest = max(self.newest, touch)
        self.has_readers = has_readers
        if has_readers:
            self.read_ms = now

    def expected(self, now: int) -> bool:
        """Whether another use is expected, by the breaks so far."""
        return self.longest > 0 and now - self.used <= BREAKS * self.longest


def distances(residents: Residents, readers: Sequence[BlockReader]) -> np.ndarray:
    """Blocks (uint32) that each row is ahead of its nearest reader, NOBODY outside of all ranges;
    k-fold for a file that is read in k parts."""
    distance: np.ndarray = np.full(len(residents.file), NOBODY, np.uint32)
    for rows, blocks, its in _by_file(residents, [r for r in readers if r.high > r.low]):
        least: np.ndarray = np.full(len(blocks), NOBODY, np.uint32)
        for reader in its:
            np.minimum(least, _circular(blocks, reader), out=least)
        parts = _parts(its)
        if parts > 1:
            least[least != NOBODY] *= np.uint32(parts)
        distance[rows] = least
    return distance


def _circular(blocks: np.ndarray, reader: BlockReader) -> np.ndarray:
    """How far ahead of one reader (uint32) blocks (int32) of its file are."""
    length = reader.high - reader.low
    at = np.int32((reader.position - reader.low) % length + reader.low)
    ahead = blocks - at if reader.direction > 0 else at - blocks
    # a negative distance is larger as unsigned: the length is added to those
    circular = np.minimum(ahead.view(np.uint32), (ahead + np.int32(length)).view(np.uint32))
    return np.where(_within(blocks, reader.low, reader.high), circular, NOBODY)


def _by_file(
    residents: Residents, readers: Sequence[BlockReader]
) -> Iterator[tuple[slice | np.ndarray, np.ndarray, list[BlockReader]]]:
    """(rows, their blocks as int32, readers) of each file that has readers, in pieces."""
    of_file: dict[int, list[BlockReader]] = {}
    for reader in readers:
        of_file.setdefault(reader.file, []).append(reader)
    for start in range(0, len(residents.file) if readers else 0, SLICE_ROWS):
        part = slice(start, start + SLICE_ROWS)
        files = residents.file[part]
        blocks: np.ndarray = residents.block[part].astype(np.int32)
        for file, its in of_file.items():
            mine = np.flatnonzero(files == file)
            if len(mine) == len(files):
                yield part, blocks, its
            elif len(mine):
                yield start + mine, blocks[mine], its


def _parts(readers: Sequence[BlockReader]) -> int:
    """The union of the readers' ranges, in multiples of their mean range."""
    union, end = 0, 0
    for low, high in sorted((r.low, r.high) for r in readers):
        union += max(0, high - max(low, end))
        end = max(end, high)
    return max(1, round(union * len(readers) / sum(r.high - r.low for r in readers)))


def _within(blocks: np.ndarray, first: int, end: int) -> np.ndarray:
    """Whether each block (int32) is in [first, end): below first is a large unsigned number."""
    return (blocks - np.int32(first)).view(np.uint32) < np.uint32(max(0, end - first))


def _place(residents: Residents, rows: np.ndarray) -> np.ndarray:
    """A sort key by file, then block."""
    return (residents.file[rows].astype(np.int64) << 31) + residents.block[rows]


#: Policies by their names for `--evict`.
POLICIES: dict[str, Callable[[], Policy]] = {"cyclic": Cyclic, "lru": LRU}
