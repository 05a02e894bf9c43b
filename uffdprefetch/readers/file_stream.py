# SPDX-License-Identifier: Apache-2.0
"""Streams parts of a file, or all of it, once and in the file's order, beside its readers.

Who wants that, and when it ends, is its owner's affair (readers/whole_files.py,
readers/stated.py). There
is one stream of a file on the node, whatever the number of ranks; together they hold no more than
Room says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING

from uffdprefetch.base.config import Config
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.record import dataclass
from uffdprefetch.base.units import MIB
from uffdprefetch.native.memory_limits import Limit, Limits
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.storage import BLOCK_BYTES, SLOW_BYTES_PER_SECOND, UNKNOWN, Storage
from uffdprefetch.predict.visits import LITTLE_SHARE
from uffdprefetch.sense.pagetables import LOOK_AT_ONCE_BYTES
from uffdprefetch.state.files import FileState
from uffdprefetch.warm.consumer import Consumer, FileConsumer, PrefetchRange, Priority
from uffdprefetch.warm.scheduler import (
    EXTENT_BYTES,
    GUESSED_EXTENT_BYTES,
    Scheduler,
    yielding_bytes,
)
from uffdprefetch.warm.windows import Windows

if TYPE_CHECKING:
    from uffdprefetch.state.pool_file import PoolFile

#: Bytes asked for at once, ...
PIECE_BYTES = 32 * MIB
#: ... and the backlog below which more is asked for. What is under way is the scheduler's.
WAITING_BYTES = 8 * MIB
#: How often it is read where the kernel does not keep it.
PASSES_MAX = 2

#: See Arbiter.want().
Want = Callable[[Consumer, PrefetchRange], int]


class Stage(Enum):
    """How far the streaming of a file is; the first three may become each other. The values are
    those of the summary (docs/summary-schema.md)."""

    WATCHED = "undecided"
    STREAMED = "streamed"
    DONE = "done"
    STOPPED = "stopped"
    REFUSED = "refused"


@dataclass
class Terms:
    """How what a stream asks for stands to what others do: see PrefetchRange."""

    priority: Priority = Priority.BACKGROUND
    place: int = 0  # before it come so many bytes of other files
    yield_bytes: int = 0
    guess: bool = False


class FileStream:
    """One file. ``file`` outlives it; ``consumer``: for whom it is; ``in_pool``: it goes to the
    pool, as long as the file has a part of that."""

    def __init__(
        self, file: FileState, scheduler: Scheduler, want: Want, consumer: FileConsumer,
        in_pool: bool, now: int,
    ) -> None:  # fmt: skip
        self.file, self.consumer, self.in_pool = file, consumer, in_pool
        file.account.stream()
        self.terms = Terms()
        self.absent_bytes = 0  # asked for that was not there ...
        self.most_bytes: int | None = None  # ... and may be by now; None: all
        self._scheduler, self._want = scheduler, want
        self._ranges = IntervalSet()
        self._waiting = IntervalSet()  # of these: not asked for in this pass
        self._passes = 0
        self._mapped_ns = now  # last seen mapped

    def add(self, start: int, end: int) -> None:
        """Stream [start, end), too; what it streams already, or has, is not begun again."""
        for a, b in self._ranges.missing(start, end):
            self._waiting.add(a, b)
        self._ranges.add(start, end)

    def remove(self, start: int, end: int) -> None:
        """Stream [start, end) no more: of it, what waits to be read is taken back. As cheap as it
        is small, for a job may say so of each batch."""
        for a, b in self._scheduler.take_back(self.consumer, self.file, start, end):
            self._waiting.add(a, b)
            self.absent_bytes = max(0, self.absent_bytes - (b - a))
        self._ranges.remove(start, end)
        self._waiting.remove(start, end)

    def has_asked(self, at: int) -> bool:
        """Whether byte ``at`` of the file is one that it has asked for."""
        return self._ranges.contains(at) and not self._waiting.contains(at)

    @property
    def pooled(self) -> PoolFile | None:
        """Where the file is read to; None: into the page cache."""
        return self.file.pooled if self.in_pool else None

    def go_on(self, now: int) -> bool:
        """Once a turn: ask for more if it is time; whether all has come."""
        if self.file.mappings.attached:
            self._mapped_ns = now
        if self._waiting:
            gone = now - self._mapped_ns > LATELY_NS  # between two batches, or for good
            may = (
                self.most_bytes is None
                or self.most_bytes - self.absent_bytes >= GUESSED_EXTENT_BYTES
            )
            if (
                may
                and self._scheduler.device_of(self.file).queued_bytes < WAITING_BYTES
                and not gone
            ):
                self.feed()
            return False
        if not self.idle:
            return False
        self._passes += 1
        missing = sum(missing_bytes(self.file, a, b, self.pooled) for a, b in self._ranges)
        little = missing * LITTLE_SHARE <= self._ranges.total_bytes()
        if little or self._passes >= PASSES_MAX:
            return True
        for a, b in self._ranges:  # the kernel has dropped what it was asked for, or given it back
            self._waiting.add(a, b)
        return False

    @property
    def idle(self) -> bool:
        """Whether all that was asked for of its device, by whomever, has come."""
        return not self._scheduler.device_of(
            self.file
        ).queued_bytes and not self._scheduler.busy_with(self.file)

    def lets_pass(self, position_bytes: int, priority: Priority) -> None:
        """A reader is there. One that is beyond what comes next of this does not wait for it but
        goes on by itself: then its misses go first, else it is read with ``priority``."""
        begins = self._scheduler.first_queued(self.consumer)
        if begins is None:
            begins = next((start for start, _ in self._waiting), position_bytes)
        if begins < position_bytes:
            told = self._scheduler.meter.of_pages
            bandwidth = max(told.bandwidth_bytes_per_second, SLOW_BYTES_PER_SECOND)
            storage = Storage(bandwidth, told.latency_seconds or UNKNOWN.latency_seconds)
            self.give_way(Priority.BACKGROUND, yielding_bytes(storage))
        else:
            self.give_way(priority, 0)

    def give_way(self, priority: Priority, yield_bytes: int) -> None:
        """From now on this goes with ``priority`` and yields to demand misses (see
        PrefetchRange)."""
        if (priority, yield_bytes) != (self.terms.priority, self.terms.yield_bytes):
            self.terms.priority, self.terms.yield_bytes = priority, yield_bytes
            self._scheduler.change(self.consumer, priority, yield_bytes)

    def feed(self) -> int:
        """Ask for the next piece, less what is there; returns how much was not, in bytes."""
        asked, looked, absent = 0, 0, 0
        while self._waiting and asked < PIECE_BYTES and looked < LOOK_AT_ONCE_BYTES:
            start, end = next(iter(self._waiting))
            end = min((start // EXTENT_BYTES + 1) * EXTENT_BYTES, end)
            missing = missing_bytes(self.file, start, end, self.pooled)
            if missing and self.most_bytes is not None:
                room = self.most_bytes - self.absent_bytes - absent
                if room < GUESSED_EXTENT_BYTES:
                    break
                most = (start + room) // GUESSED_EXTENT_BYTES * GUESSED_EXTENT_BYTES
                if most < end:
                    end, missing = most, missing_bytes(self.file, start, most, self.pooled)
            self._waiting.remove(start, end)
            looked += EXTENT_BYTES  # whatever it holds: it is the call that costs
            if missing:
                asked += self.want(start, end)
                absent += missing
        self.absent_bytes += absent
        return absent

    def want(self, start: int, end: int) -> int:
        """Ask for [start, end) now; returns the bytes that are queued for it."""
        wanted = PrefetchRange(
            self.file, start, end, self.terms.place + start, self.terms.priority,
            pooled=self.pooled is not None, yield_bytes=self.terms.yield_bytes,
            guess=self.terms.guess,
        )  # fmt: skip
        return self._want(self.consumer, wanted)

    def end(self) -> None:
        """Take back what waits to be read."""
        waiting = self._scheduler.take_back(self.consumer, self.file, 0, self.file.size_bytes)
        self.absent_bytes = max(0, self.absent_bytes - sum(end - start for start, end in waiting))


@dataclass
class Streaming:
    """Of one file, by one owner: how far it is, and why; its stream, while there is one."""

    stage: Stage = Stage.WATCHED
    why: str = ""
    stream: FileStream | None = None
    ended_ns: int = 0
    memory_ns: int = 0  # when there may have become too little room
    told: bool = False  # that there is too little
    _ended_bytes: int = 0  # by streams that have ended

    @property
    def streamed_bytes(self) -> int:
        """By all its streams."""
        return self._ended_bytes + (self.stream.absent_bytes if self.stream is not None else 0)

    def begin(self, stream: FileStream, why: str) -> None:
        """It is streamed from now on."""
        self.stream, self.stage, self.why = stream, Stage.STREAMED, why

    def end(self, stage: Stage, why: str, now: int) -> None:
        """Its stream, if it has one."""
        if self.stream is not None:
            self.stream.end()
            self._ended_bytes += self.stream.absent_bytes
            self.stream, self.stage, self.why, self.ended_ns = None, stage, why, now

    def refuse(self, why: str) -> bool:
        """There is no room for it; whether that is news."""
        if self.stream is None:
            self.stage, self.why = Stage.REFUSED, why
        before, self.told = self.told, True
        return not before

    def is_memory_due(self, now: int) -> bool:
        """Whether to look if there is room still."""
        if now < self.memory_ns:
            return False
        self.memory_ns = now + LATELY_NS
        return True


class Room:
    """How much of a file may be streamed into memory, beside all that the streams of a service have
    streamed already."""

    def __init__(self, config: Config, windows: Windows, limits: Limits) -> None:
        self._config, self._windows, self._limits = config, windows, limits
        #: Each owner of streams says what it holds: (file, bytes).
        self.holders: list[Callable[[], Iterable[tuple[FileState, int]]]] = []

    def of(
        self, file: FileState, pooled: PoolFile | None, cached_bytes: int = 0
    ) -> tuple[int, Limit]:
        """How much of a file may be in memory, where so much of it is already, and which limit
        binds."""
        others = self._held_beside(file)
        pool = self._windows.pool
        if pool is not None and pooled is not None:
            return pool.budget_bytes - others, pool.limited_by or Limit.BUDGET
        allowed, limit = self._limits.ahead_bytes()
        if (
            limit is not Limit.BUDGET
        ):  # which is of memory that is free: what is cached already is not
            allowed = min(self._config.budget_bytes, allowed + cached_bytes)
        return allowed - others, limit

    def made_by(self, file: FileState, pooled: PoolFile | None, needed_bytes: int) -> str:
        """What would make room for so much of a file, for people: a larger --budget only where no
        other limit is in its way."""
        needed_bytes += self._held_beside(file)
        pool = self._windows.pool if pooled is not None else None
        resident = pool.used_bytes() if pool is not None else None
        return self._limits.at(needed_bytes, resident).raised_to(needed_bytes)

    def _held_beside(self, file: FileState) -> int:
        """What is streamed of other files."""
        return sum(
            held
            for holder in self.holders
            for one, held in holder()
            if one is not file and one.mappings.attached
        )


def missing_bytes(
    file: FileState, start: int = 0, end: int | None = None, pooled: PoolFile | None = None
) -> int:
    """How much of [start, end) is not in the pool (``pooled``), or not in the page cache; where
    nobody tells, what we have not read."""
    end = file.size_bytes if end is None else end
    if pooled is not None:
        return min(pooled.absent_chunks(start, end) * pooled.chunk_bytes, end - start)
    there = file.resident_bytes(start, end - start)
    if there is None:
        read, unused, _ = file.blocks.counts(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        there = read + unused
    return max(0, end - start - there)
