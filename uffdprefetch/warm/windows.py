# SPDX-License-Identifier: Apache-2.0
"""How far ahead of a stream to be: one Window of each in a turn, for all who ask; and of what
memory leaves for all of them the share of each."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.record import dataclass, field, replace
from uffdprefetch.native.memory_limits import Limit, Limits
from uffdprefetch.predict import checkpoints, window
from uffdprefetch.predict.bounds import CPU_PART
from uffdprefetch.predict.streams import Feedback, Stream
from uffdprefetch.predict.window import Window
from uffdprefetch.state.file_pool import PoolRoom
from uffdprefetch.state.files import FileState
from uffdprefetch.state.reader import Reader
from uffdprefetch.warm.scheduler import Scheduler


@dataclass
class _Asked:
    """Of a stream: up to where, as whoever reads ahead of it tells, and what came of it."""

    frontier_bytes: int
    feedback: Feedback = field(default_factory=Feedback)


class ReadPlaces:
    """At how many places files are read: readers near each other share a window."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.all = self.in_pool = 1
        self._due_ns = 0

    def count(self, readers: Iterable[Reader], has_pool: bool) -> None:
        """Now and then only: it takes 12 ms of ten thousand readers."""
        if self._clock.now_ns() < self._due_ns:
            return
        began = self._clock.cpu_ns()
        streams = [(reader, stream) for reader in readers for stream in reader.table.active()]
        self.all = _places(streams) if len(streams) > 1 else 1
        if has_pool:
            self.in_pool = _places([(one, stream) for one, stream in streams if one.pooled])
        self._due_ns = self._clock.now_ns() + CPU_PART * (self._clock.cpu_ns() - began)


def _places(streams: Iterable[tuple[Reader, Stream]]) -> int:
    return window.places((id(one.file), stream.position_bytes) for one, stream in streams)


class Windows:
    """Of the streams of one service, whose thread calls everything here."""

    def __init__(
        self, config: Config, scheduler: Scheduler, limits: Limits | None = None,
        pool: PoolRoom | None = None, clock: Clock = CLOCK,
    ) -> None:  # fmt: skip
        """``pool``: of `--engine pool`."""
        self._config, self._scheduler, self._clock = config, scheduler, clock
        self._limits = limits or Limits(config.budget_bytes)
        self.allowed_bytes, self.allowed_by = config.budget_bytes, Limit.BUDGET
        self._noted_bytes = 0  # the scheduler's when that was asked
        self.pool = pool
        self.places = ReadPlaces(clock)
        self._asked: WeakKeyDictionary[Stream, _Asked] = WeakKeyDictionary()
        self._made: dict[tuple[Stream, bool], Window] = {}  # in this turn

    # -------------------------------------------------------------- how much there is for all

    def ask_memory(self, files_bytes: int) -> bool:
        """What may lie ahead of all readers together is what memory leaves now; whether that is
        less than half of --budget, and than what there is to read (``files_bytes``)."""
        self.allowed_bytes, self.allowed_by = self._limits.ahead_bytes()
        self._noted_bytes = self._scheduler.results.prefetched_bytes
        least = min(self._config.budget_bytes // 2, files_bytes)
        return self.allowed_by is not Limit.BUDGET and self.allowed_bytes < least

    @property
    def read_since_bytes(self) -> int:
        """What was read since memory was asked."""
        return self._scheduler.results.prefetched_bytes - self._noted_bytes

    def count_places(self, readers: Iterable[Reader]) -> None:
        """At how many places files are read, which share what may be ahead of them."""
        self.places.count(readers, self.pool is not None)

    def room_bytes(self, file: FileState) -> int:
        """How much of a file may be in memory."""
        if self.pool is not None and file.pooled is not None:
            return self.pool.budget_bytes
        return self.allowed_bytes

    def share_bytes(self, file: FileState) -> tuple[int, int]:
        """How much of a file may lie ahead of one place at which it is read, and of all
        together."""
        room = self.room_bytes(file)
        if self.pool is not None and file.pooled is not None:
            return self.pool.window_bytes(self.places.in_pool, stream=True), room
        return room // max(1, self.places.all), room

    def reader_bytes(self, pooled: bool, processes: int) -> int:
        """How much may lie ahead of a reader, of the pool or not, where so many processes read."""
        if self.pool is not None and pooled:
            return self.pool.window_bytes(self.places.in_pool)
        return self.allowed_bytes // max(1, processes)

    # -------------------------------------------------------------- of one stream

    def begin_turn(self) -> None:
        """What has been seen, and measured, since the last one counts from now on."""
        self._made.clear()

    def of(self, stream: Stream, pooled: bool = False) -> Window:
        """A stream's window in this turn; ``pooled``: in the pool's memory."""
        found = self._made.get((stream, pooled))
        if found is None:
            found = self._made[stream, pooled] = self._make(stream, pooled)
        return found

    def _make(self, stream: Stream, pooled: bool) -> Window:
        share = self.allowed_bytes // self.places.all
        if self.pool and pooled:
            share = self.pool.window_bytes(self.places.in_pool, stream=True)
        asked = self._asked.get(stream)
        if self._config.policy == "fixed":
            size_bytes = min(self._config.fixed.size_bytes, max(share, window.MIB))
        else:
            boost = asked.feedback.boost if asked is not None else 1.0
            rate, storage = stream.rate_bytes_per_second, self._scheduler.meter.storage
            size_bytes = window.lookahead_bytes(rate, storage, share, boost)
        step_bytes = checkpoints.distance_bytes(
            stream.rate_bytes_per_second, size_bytes, self._config.fixed.distance_bytes
        )
        frontier_bytes = asked.frontier_bytes if asked is not None else stream.position_bytes
        return Window(size_bytes, frontier_bytes, step_bytes)

    def asked(self, stream: Stream, frontier_bytes: int, feedback: Feedback) -> None:
        """Something is asked for ahead of a stream, up to there; what comes of it is told there."""
        self._asked[stream] = _Asked(frontier_bytes, feedback)
        for key in ((stream, False), (stream, True)):
            made = self._made.get(key)
            if made is not None:
                self._made[key] = replace(made, frontier_bytes=frontier_bytes)

    def ahead_bytes(self, stream: Stream) -> int:
        """What was asked for, and lies ahead of it."""
        asked = self._asked.get(stream)
        if asked is None:
            return 0
        return max(0, (asked.frontier_bytes - stream.position_bytes) * stream.direction)

    def shown_bytes(self, stream: Stream) -> int:
        """What it has, or is to have, ahead of it: who guesses has no window of a size."""
        return self.ahead_bytes(stream) if self._config.guesses else self.of(stream).size_bytes

    def late_extents(self, stream: Stream) -> int:
        """Of what was read ahead of it, what came too late."""
        asked = self._asked.get(stream)
        return asked.feedback.late_extents if asked is not None else 0
