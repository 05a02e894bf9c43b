# SPDX-License-Identifier: Apache-2.0
"""What is stated: the job has said that it will need a range of a file (MADV_WILLNEED,
MAP_POPULATE), or the user that a file will be needed whole (--whole).

What fits is streamed in the file's order (readers/file_stream.py), behind the windows of whoever
reads already. Ranges that do not fit are left to the windows ahead of their readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.base.units import format_size
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_NS
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.visits import LITTLE_SHARE
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers import file_stream
from uffdprefetch.readers.file_stream import (
    FileStream,
    Room,
    Stage,
    Streaming,
    Want,
)
from uffdprefetch.readers.predictor import RangeSource
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Reader, Region
from uffdprefetch.warm.consumer import FileConsumer, Priority
from uffdprefetch.warm.scheduler import Scheduler


class Sayer(Enum):
    """Who has said that something will be needed; its value is for people."""

    JOB = "the job"
    USER = "--whole"


@dataclass
class SaidRanges:
    """Of one file, what was said to be needed."""

    pending: IntervalSet = field(default_factory=IntervalSet)  # not decided
    streamed: IntervalSet = field(default_factory=IntervalSet)  # is, or was
    settled: IntervalSet = field(default_factory=IntervalSet)  # did not fit, or was there
    withdrawn_bytes: int = 0  # said, and then that there is no use for it

    @property
    def decided_bytes(self) -> int:
        """Of which it was decided what to do."""
        return self.streamed.total_bytes() + self.settled.total_bytes()

    @property
    def asked_bytes(self) -> int:
        """Of which it was, ever."""
        return self.decided_bytes + self.withdrawn_bytes

    def add(self, start: int, end: int) -> None:
        """[start, end) is; what is decided, is."""
        for a, b in self.streamed.missing(start, end):
            for low, high in self.settled.missing(a, b):
                self.pending.add(low, high)

    def remove(self, start: int, end: int) -> None:
        """[start, end) is not, all the same."""
        before = self.decided_bytes
        for ranges in (self.pending, self.streamed, self.settled):
            ranges.remove(start, end)
        self.withdrawn_bytes += before - self.decided_bytes

    def forget(self) -> None:
        """What was said long ago is news again."""
        self.streamed, self.settled = IntervalSet(), IntervalSet()


@dataclass
class HeldBytes:
    """How much lies ahead of a file's readers by what is streamed, or will."""

    at_ns: int = 0  # when it was counted ...
    of_bytes: int = 0  # ... of so much
    found: int = 0

    def count(self, file: FileState, streamed: IntervalSet, now: int) -> int:
        """Once in LATELY_NS, and when more is streamed."""
        held = streamed.total_bytes()
        if now < self.at_ns + LATELY_NS and held == self.of_bytes:
            return self.found
        self.at_ns, self.of_bytes, used = now, held, 0
        for start, end in streamed:
            blocks = start // BLOCK_BYTES, -(-end // BLOCK_BYTES)
            both, _, demanded = file.blocks.counts(*blocks)
            used += both + demanded
        self.found = max(0, held - used)
        return self.found


@dataclass
class StatedFile:
    """One file of which something was said. Times in ns."""

    file: FileState
    place: int  # base offset among all stated files, in the order in which they were named, bytes
    rank: int
    pid: int
    by: Sayer
    is_guess: bool = False  # what it says may be more than it will touch
    in_pool: bool = False
    said: SaidRanges = field(default_factory=SaidRanges)
    streaming: Streaming = field(default_factory=Streaming)
    readers: dict[int, Reader] = field(default_factory=dict)  # by pid: who have said it, and map it
    _held: HeldBytes = field(default_factory=HeldBytes)

    def held_bytes(self, now: int) -> int:
        """What lies ahead of its readers by this, or will."""
        return self._held.count(self.file, self.said.streamed, now)


class StatedRanges(RangeSource):
    """What was said of the files of a service, whose thread calls everything here."""

    def __init__(
        self, config: Config, scheduler: Scheduler, want: Want, ledger: Ledger, room: Room,
        clock: Clock = CLOCK, bound: Callable[[FileStream], tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        """``bound``: how much of what a job has said may be asked for by now, and what of it may be
        under way at one time, bytes; None: all of it."""
        self._config, self._scheduler, self._want = config, scheduler, want
        self._ledger, self._room, self._clock = ledger, room, clock
        self.books: dict[Key, StatedFile] = {}
        self._bound = bound
        self.busy = False  # until something is said
        self._place = 0
        room.holders.append(self._held)

    # -------------------------------------------------------------- what is said

    def attached(self, region: Region) -> bool:
        """See RangeSource: a file of which the user may have said that all of it will be needed."""
        if self._config.policy != "none" and self._config.files.wants_whole(region.file.path):
            self._say(region, 0, region.file.size_bytes, Sayer.USER, False)
        return False

    def needed(self, region: Region, start: int, end: int, is_populated: bool = False) -> None:
        """The job says that it will need [start, end) of the file, in bytes. Cheap, and the same
        as nothing where it has been said before. ``is_populated``: the kernel would have read all
        of it; else a little, and what is said is more than what will be needed with many programs
        (pyarrow says it of all columns of a table)."""
        if self._config.policy == "auto":
            self._say(region, start, end, Sayer.JOB, not is_populated)

    def unneeded(self, region: Region, start: int, end: int) -> None:
        """The job has no use for [start, end) now: it need not come any more, if only the process
        that has asked for it maps the file. What the user has said holds."""
        book = self.books.get(region.file.key)
        if book is None or book.by is not Sayer.JOB or list(book.readers) != [region.reader.pid]:
            return
        if region.file.mappings.attached > len(region.reader.regions):
            return
        book.said.remove(start, end)
        if book.streaming.stream is not None:
            book.streaming.stream.remove(start, end)

    def _say(self, region: Region, start: int, end: int, by: Sayer, is_guess: bool) -> None:
        book = self._book(region, by)
        stream = book.streaming.stream
        if stream is None and self._clock.now_ns() - book.streaming.ended_ns > LATELY_NS:
            book.said.forget()
        any_said = book.said.streamed or book.said.pending
        book.is_guess = is_guess and (book.is_guess or not any_said)
        if stream is not None and not book.is_guess:
            stream.terms.guess, stream.most_bytes = False, None
        book.readers[region.reader.pid] = region.reader
        book.in_pool = book.in_pool or region.mode == ServingMode.POOL
        book.said.add(start, min(end, book.file.size_bytes))

    def _book(self, region: Region, by: Sayer) -> StatedFile:
        file, reader = region.file, region.reader
        book = self.books.get(file.key)
        if book is None or book.file is not file:
            if book is not None and book.streaming.stream is not None:
                book.streaming.stream.end()
            book = StatedFile(file, self._place, reader.rank, reader.pid, by)
            self.books[file.key] = book
            self.busy = True
            self._place += file.size_bytes
            if len(self.books) > ENTRIES_MAX:
                idle = (key for key, one in self.books.items() if not one.file.mappings.attached)
                self.books.pop(next(idle, file.key), None)
        return book

    # -------------------------------------------------------------- steps

    def step(self, now_ns: int) -> None:
        """See RangeSource: decide of what was said, go on with what is streamed."""
        for book in self.books.values():
            if book.file.mappings.resting:
                continue
            if book.said.pending and not book.file.guard.changed:
                self._decide(book, now_ns)
            stream = book.streaming.stream
            if stream is not None and not self._ends(book, stream, now_ns):
                stream.in_pool = book.in_pool
                book.readers = {pid: one for pid, one in book.readers.items() if one.regions}
                streams = [
                    stream
                    for reader in book.readers.values()
                    for stream in reader.table.streams
                    if now_ns - stream.last_ns < LATELY_NS
                ]
                if stream.terms.guess and self._bound is not None:
                    stream.most_bytes, depth = self._bound(stream)
                    stream.give_way(Priority.STATED, depth)
                else:
                    ahead = max((w.position_bytes for w in streams), default=0)
                    stream.lets_pass(ahead, Priority.STATED)
                if stream.go_on(now_ns):
                    book.streaming.end(Stage.DONE, book.streaming.why, now_ns)

    def _decide(self, book: StatedFile, now: int) -> None:
        """Stream what fits of what was said, range by range."""
        file, pooled = book.file, book.file.pooled if book.in_pool else None
        room, limit = self._room.of(file, pooled)
        room -= book.held_bytes(now)
        said, streaming = book.said, book.streaming
        for start, end in said.pending:
            if file_stream.missing_bytes(file, start, end, pooled) * LITTLE_SHARE <= end - start:
                said.settled.add(start, end)
                if streaming.stream is None:
                    streaming.stage, streaming.why = Stage.DONE, "it was in memory already"
                continue
            if end - start > room:
                said.settled.add(start, end)
                size, left = format_size(end - start), format_size(max(0, room))
                otherwise = self._room.made_by(file, pooled, end - start)
                self._refuse(book, f"{size} do not fit in {left} ({limit.value})", otherwise)
                continue
            room -= end - start
            stream = streaming.stream
            if stream is None:
                consumer = FileConsumer(book.rank, book.pid)
                stream = FileStream(file, self._scheduler, self._want, consumer, book.in_pool, now)
                stream.terms.priority, stream.terms.place = Priority.STATED, book.place
                stream.terms.guess = book.is_guess and self._bound is not None
                streaming.begin(stream, f"{book.by.value} has said that it will be needed")
                streaming.memory_ns = now + LATELY_NS
            said.streamed.add(start, end)
            stream.add(start, end)
        if streaming.stream is None:
            streaming.ended_ns = now
        said.pending = IntervalSet()

    def _refuse(self, book: StatedFile, why: str, otherwise: str) -> None:
        news = book.streaming.refuse(f"{book.by.value} has said that it will be needed, but {why}")
        if book.by is Sayer.USER and news:
            self._ledger.degrade(
                f"--whole: {why}: not read whole; what lies ahead of its readers "
                f"is; {otherwise} it would be",
                book.file.path,
            )

    def _ends(self, book: StatedFile, stream: FileStream, now: int) -> bool:
        file = book.file
        if file.guard.changed or file.opened.fd < 0:
            book.streaming.end(Stage.STOPPED, "the file is not managed any more", now)
        elif (
            book.by is Sayer.JOB
            and book.readers
            and all(one.order.followed for one in book.readers.values())
        ):
            # pyarrow says it of all columns of a table, an order has those that are read
            why = "the order in which it will be read is known"
            book.streaming.end(Stage.STOPPED, why, now)
        elif book.streaming.is_memory_due(now):
            room, limit = self._room.of(file, stream.pooled)
            if room < book.held_bytes(now):
                why = f"memory became short ({limit.value})"
                self._ledger.degrade(f"what was said to be needed is not read: {why}", file.path)
                book.streaming.end(Stage.STOPPED, why, now)
        return book.streaming.stream is None

    # -------------------------------------------------------------- for others

    def streams(self, file: FileState) -> bool:
        """Whether the file, or a part of it, is being streamed."""
        book = self.books.get(file.key)
        return book is not None and book.streaming.stream is not None

    def _held(self) -> Iterable[tuple[FileState, int]]:
        """See Room.holders."""
        now = self._clock.now_ns()
        for book in self.books.values():
            if book.file.mappings.attached and book.file.opened.fd >= 0:
                yield book.file, book.held_bytes(now)

    def describe_file(self, path: str) -> dict[str, dict[str, Any] | None]:
        """See RangeSource; None: nothing was said of it."""
        return {"stated": self._describe(path)}

    def _describe(self, path: str) -> dict[str, Any] | None:
        for book in self.books.values():
            if book.file.path == path and book.streaming.stage is not Stage.WATCHED:
                return {
                    "state": book.streaming.stage.value,
                    "why": book.streaming.why,
                    "by": book.by.value,
                    "asked_bytes": book.said.asked_bytes,
                    "read_bytes": book.streaming.streamed_bytes,
                }
        return None
