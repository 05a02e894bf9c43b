# SPDX-License-Identifier: Apache-2.0
"""Which blocks of the pool to punch next, best victim first. Pure: books in, row numbers out.

Belady's rule (MIN; IBM Systems Journal 5(2), 1966) evicts the block whose next use is farthest
away. The policies differ in what they know of the future: :class:`LRU` nothing (it takes the past
for the future), :class:`Cyclic` that readers go on in order and begin again, and
bench/belady.py all of it. Blocks are numbered per file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

#: A file that nobody reads is expected back for so many times the longest break that it has come
#: back from: of files that are read once an epoch in a new order each time, a break lasts between
#: none and two epochs, one in the mean.
BREAKS = 2
#: The distance of a block that no reader is going to.
NOBODY = np.uint32(0xFFFFFFFF)
#: The key of a row that is not to be chosen.
SKIP = np.uint32(0xFFFFFFFF)
#: Rows that are worked on at a time: their arrays stay in the processor's cache.
SLICE_ROWS = 1 << 16


@dataclass(frozen=True)
class Reader:
    """One active stream, in blocks of its file."""

    file: int  # number of the file in the pool
    position: int  # where it is now
    direction: int  # +1 / -1
    low: int  # [low, high): what it walks through in an epoch; the whole file when not known
    high: int
    ahead: int  # announced: so many after the position (its window), never evicted
    behind: int = 1  # to spare just behind it: a record may straddle

    @property
    def spared(self) -> tuple[int, int]:
        """[first, end) of the blocks never to be evicted: behind it, where it is, announced."""
        if self.direction < 0:
            return self.position - self.ahead, self.position + self.behind + 1
        return self.position - self.behind, self.position + self.ahead + 1


@dataclass
class Residents:
    """What is in the pool now: parallel arrays, one row a resident block, in any order."""

    file: np.ndarray  # int32
    block: np.ndarray  # int64, below 2^31 (128 TiB of 64 KiB)
    touched: np.ndarray  # uint32, ms since the pool began (from 1 on), 0 never
    pinned: np.ndarray  # bool: may not be evicted


class Policy(Protocol):
    """What the engine asks; a policy may remember what it was shown, and has no other input."""

    name: str

    def victims(self, residents: Residents, readers: Sequence[Reader], count: int) -> np.ndarray:
        """Row numbers of at most ``count`` rows to evict, best victim first; never a pinned one
        nor one of :attr:`Reader.spared`. Ties go to the lower file, then the lower block."""


def evictable(residents: Residents, readers: Sequence[Reader]) -> np.ndarray:
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
    file and block; never one whose key is SKIP. Linear, and not a sort, in the number of rows."""
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


def oldest_first(residents: Residents, among: np.ndarray) -> np.ndarray:
    """Keys for :func:`smallest`: the rows of a mask, the least recently touched first, those never
    touched last."""
    return np.where(among, np.minimum(residents.touched - np.uint32(1), SKIP - np.uint32(1)), SKIP)


def newest_first(residents: Residents, among: np.ndarray) -> np.ndarray:
    """The same in the opposite order, but those never touched last again."""
    return np.where(among, np.minimum(~residents.touched, SKIP - np.uint32(1)), SKIP)


def farthest_first(distance: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Keys for :func:`smallest`: the rows of a mask, the greatest distance (uint32) first."""
    return np.where(among, SKIP - np.uint32(1) - distance, SKIP)


class LRU:
    """Least recently touched first. What was never touched is prefetched and still to be used, so
    it is the most recent of all. For comparison: on a scan larger than the pool it hits nothing."""

    name = "lru"

    def victims(self, residents: Residents, readers: Sequence[Reader], count: int) -> np.ndarray:
        """See :class:`Policy`."""
        return smallest(residents, oldest_first(residents, evictable(residents, readers)), count)


class Cyclic:
    """Farthest predicted use first, when every reader goes on in order and begins again.

    A block's next use by a reader is the circular distance ahead of it within its range, and of
    several readers the nearest one's. The victim is then what lies just behind the last reader:
    a part of the file stays from epoch to epoch, and capacity / size of it is hit, where LRU has
    thrown away each block just before its turn.

    *Blocks that no reader is going to* (a file without readers; outside of all ranges) have been
    used once each in some order, and a cycle or a permutation uses last what it has used last: so
    the most recently touched goes first. That keeps a fixed part of a file that is read at random,
    of a data set in many files that are read one after the other, and of the training file while
    a validation set is read, of which least recently touched first would throw away just what
    training begins with. How they stand against the blocks of readers is learned: they go before
    all others (a file that was read once is not kept) unless they have been used, left alone and
    used again, and not for longer than BREAKS times the longest such break. Then the n-th least
    recently touched of them counts as n blocks away. So a validation set read between the epochs
    loses its blocks to training once; from the next time on both keep their part. Each block of
    either is used once a cycle: any part is as good as any other, only exchanging them costs.

    Distances are in blocks of one reader, which assumes readers of one speed; k readers of k parts
    make k steps at a time, so their distances count k-fold when compared with other files'.
    """

    name = "cyclic"

    def __init__(self) -> None:
        self._now = 0  # ms: the latest touch seen
        self._breaks: dict[int, _Breaks] = {}

    def victims(self, residents: Residents, readers: Sequence[Reader], count: int) -> np.ndarray:
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
        self, residents: Residents, unclaimed: np.ndarray, readers: Sequence[Reader]
    ) -> np.ndarray:
        """Note when the blocks that no reader is going to (a mask) were used; answers which of
        them are not expected to be used again."""
        self._now = max(self._now, int(residents.touched.max(initial=0)))
        files = residents.file[unclaimed]
        newest: np.ndarray = np.zeros(int(files.max(initial=-1)) + 1, np.uint32)
        np.maximum.at(newest, files, residents.touched[unclaimed])
        for file in np.flatnonzero(np.bincount(files)).tolist():
            self._breaks.setdefault(file, _Breaks())
        read_files = {reader.file for reader in readers}
        expired_file: np.ndarray = np.zeros(len(newest), bool)
        for file, breaks in self._breaks.items():
            touch = int(newest[file]) if file < len(newest) else 0
            breaks.note(touch, file in read_files, self._now)
            if file < len(newest):
                expired_file[file] = not breaks.expected(self._now)
        expired = unclaimed.copy()
        expired[unclaimed] = expired_file[files]
        return expired


@dataclass
class _Breaks:
    """When those blocks of a file were used that no reader is going to. Times in ms."""

    newest: int = -1  # latest touch of one
    has_readers: bool = False  # whether the file had readers at the last note()
    read_ms: int = -1  # the last note() at which it had
    longest: int = 0

    @property
    def used(self) -> int:
        """When they were used last. Blocks that a reader has mapped may show no touch; but of a
        file that has readers, these are not the blocks that are read."""
        return self.newest if self.has_readers else max(self.newest, self.read_ms)

    def note(self, touch: int, has_readers: bool, now: int) -> None:
        """Note what is seen now: their latest touch, whether the file has readers."""
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
        """Whether they will be used again, by the breaks so far."""
        return self.longest > 0 and now - self.used <= BREAKS * self.longest


def distances(residents: Residents, readers: Sequence[Reader]) -> np.ndarray:
    """How many blocks (uint32) each row is ahead of the reader that comes to it first, NOBODY
    when it is in no reader's range; k-fold for a file that is read in k parts."""
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


def _circular(blocks: np.ndarray, reader: Reader) -> np.ndarray:
    """How far ahead of one reader (uint32) blocks (int32) of its file are."""
    length = reader.high - reader.low
    at = np.int32((reader.position - reader.low) % length + reader.low)
    ahead = blocks - at if reader.direction > 0 else at - blocks
    # what is negative is the larger number when seen as unsigned: the length is added to those
    circular = np.minimum(ahead.view(np.uint32), (ahead + np.int32(length)).view(np.uint32))
    return np.where(_within(blocks, reader.low, reader.high), circular, NOBODY)


def _by_file(
    residents: Residents, readers: Sequence[Reader]
) -> Iterator[tuple[slice | np.ndarray, np.ndarray, list[Reader]]]:
    """(rows, their blocks as int32, readers) of each file that has readers, in pieces."""
    of_file: dict[int, list[Reader]] = {}
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


def _parts(readers: Sequence[Reader]) -> int:
    """How many times the readers' usual range the union of their ranges is."""
    union, end = 0, 0
    for low, high in sorted((r.low, r.high) for r in readers):
        union += max(0, high - max(low, end))
        end = max(end, high)
    return max(1, round(union * len(readers) / sum(r.high - r.low for r in readers)))


def _within(blocks: np.ndarray, first: int, end: int) -> np.ndarray:
    """Whether each block (int32) is in [first, end): below first is a large unsigned number."""
    return (blocks - np.int32(first)).view(np.uint32) < np.uint32(max(0, end - first))


def _place(residents: Residents, rows: np.ndarray) -> np.ndarray:
    """One integer a row in the order of file, then block."""
    return (residents.file[rows].astype(np.int64) << 31) + residents.block[rows]


#: The policies that need no plan, by the name that `--evict` knows.
POLICIES: dict[str, Callable[[], Policy]] = {"cyclic": Cyclic, "lru": LRU}
