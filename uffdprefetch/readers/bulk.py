# SPDX-License-Identifier: Apache-2.0
"""Bulk warm: a file whose readers jump about is streamed whole, once, where that pays.

It is in charge of a reader that jumps about (predict/randomness.py) and wants nothing for it alone;
predict/bulk.py says whether the stream pays. This measures the storage where nothing else has,
streams behind everything else that is wanted, ends when the reason has gone, and says once why a
file was not streamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.units import format_size
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.predict import bulk
from uffdprefetch.predict.bulk import MISS_BYTES, MISS_READS, PROBE_BYTES
from uffdprefetch.predict.streams import Stream
from uffdprefetch.readers.predictor import Predictor
from uffdprefetch.state.files import BLOCK_BYTES, FileState, Key
from uffdprefetch.state.ledger import Ledger, describe_stream
from uffdprefetch.state.reader import Reader, Trait
from uffdprefetch.warm.consumer import Consumer, FileConsumer, PrefetchRange, Priority
from uffdprefetch.warm.limits import Limit, Limits
from uffdprefetch.warm.placement import CheckpointPlacer
from uffdprefetch.warm.scheduler import EXTENT_BYTES, Scheduler

if TYPE_CHECKING:
    from uffdprefetch.pool.node_pool import PoolFile

MIB, MS = 1 << 20, 1_000_000
#: Bytes asked for at once, and the backlog below which more is asked for. What is under way is the
#: scheduler's.
PIECE_BYTES = 32 * MIB
WAITING_BYTES = 8 * MIB
#: Extents checked in a turn: of a file that is there already nothing is asked for.
LOOKS_AT_ONCE = 256
JUDGE_NS = 100 * MS
MEMORY_NS = 1000 * MS
#: Between two batches nobody may map the file.
GONE_NS = 2000 * MS
#: Looks into the page table of a random reader of which all is decided.
REST_NS = 250 * MS
PASSES_MAX = 2
FILES_MAX = 256
#: More than an order that is to become known (readers/known_order.py) is not there; windows are
#: none of a reader that jumps about.
CONFIDENCE = 0.5


class Stage(Enum):
    """How far the bulk warm of a file is; the first three may become each other. The values are
    those of the summary (docs/bulk.md)."""

    WATCHED = "undecided"
    MEASURED = "measured"
    STREAMED = "streamed"
    DONE = "done"
    STOPPED = "stopped"
    REFUSED = "refused"


@dataclass
class BulkState:
    """One file: its readers, and how far its bulk warm is. Sizes in bytes, times in ns."""

    file: FileState
    stage: Stage = Stage.WATCHED
    why: str = "no reader jumps about"
    readers: dict[int, Reader] = field(default_factory=dict)  # by pid: who jump about now
    in_order: bool = False  # there is none left, and others read on
    in_pool: bool = False  # one of them had the pool's memory
    ranks: set[int] = field(default_factory=set)  # that were random
    told: set[int] = field(default_factory=set)  # ... and stand in the summary's streams
    consumer: FileConsumer | None = None
    cursor: int = 0  # asked for up to here
    limit: int = 0  # to be asked for in this step
    passes: int = 0
    began_bytes: int | None = None  # of file.prefetched_bytes, before the first probe
    before_bytes: int = 0  # read while the file was open before
    read_bytes: int = 0
    miss_ns: list[int] = field(default_factory=list)
    bandwidth: float = 0.0
    asked_ns: int = 0  # when the running probe was asked for; 0: none runs
    asked_bytes: int = 0
    judge_ns: int = 0
    memory_ns: int = 0
    mapped_ns: int = 0  # last seen mapped

    @property
    def pooled(self) -> PoolFile | None:
        """Where the file is read to; None: into the page cache."""
        return self.file.pooled if self.in_pool else None

    def missing_bytes(self, start: int = 0, end: int | None = None) -> int:
        """How much of [start, end) is not where it is read to."""
        return missing_bytes(self.file, start, end, self.pooled)


class Bulk(Predictor):
    """The files of a service whose readers may be random. The service's thread calls all of it."""

    name = "bulk warm"
    policies = frozenset({"auto"})
    trait = Trait.JUMPS

    def __init__(
        self, config: Config, scheduler: Scheduler, ledger: Ledger, layout: CheckpointPlacer,
        clock: Clock = CLOCK,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._limits = limits or Limits(config.budget_bytes)
        self._config, self._scheduler = config, scheduler
        self._ledger, self._layout = ledger, layout
        self.books: dict[Key, BulkState] = {}

    # -------------------------------------------------------------- who jumps about

    def confidence(self, reader: Reader, now_ns: int) -> float:
        """See Predictor."""
        return CONFIDENCE if reader.random else 0.0

    def demand(self, reader: Reader, now_ns: int) -> Iterable[tuple[Consumer, PrefetchRange]]:
        """See Predictor: nothing for this reader alone; step() asks for the file."""
        book = self._book(reader.file)
        book.readers[reader.pid] = reader
        book.ranks.add(reader.rank)
        book.in_order = False
        book.in_pool = book.in_pool or reader.pooled
        return ()

    def dismissed(self, reader: Reader) -> None:
        """See Predictor."""
        book = self.books.get(reader.file.key)
        if book is not None and book.readers.get(reader.pid) is reader:
            del book.readers[reader.pid]
            book.in_order = not book.readers and book.file.attached > 0

    def left(self, reader: Reader) -> None:
        """See Predictor."""
        self.dismissed(reader)

    def _book(self, file: FileState) -> BulkState:
        book = self.books.get(file.key)
        if book is None:
            book = self.books[file.key] = BulkState(file)
            if len(self.books) > FILES_MAX:
                idle = (key for key, one in self.books.items() if not one.file.attached)
                self.books.pop(next(idle, file.key), None)
        elif book.file is not file:  # it had been closed, and is mapped again
            book = self.books[file.key] = BulkState(
                file, readers=book.readers, ranks=book.ranks, told=book.told,
                miss_ns=book.miss_ns, bandwidth=book.bandwidth, judge_ns=book.judge_ns,
                read_bytes=book.read_bytes, before_bytes=book.read_bytes,
            )  # fmt: skip
        return book

    def rest_ns(self, reader: Reader) -> int:
        """How long the reader's page table need not be looked at."""
        book = self.books.get(reader.file.key)
        decided = book is not None and book.stage in (Stage.DONE, Stage.REFUSED)
        return REST_NS if decided and reader.random else 0

    def note_streams(self, reader: Reader) -> None:
        """Its last mapping ends: what the summary keeps of it, of a rank that has jumped about a
        single row, of where it was last."""
        book = self.books.get(reader.file.key)
        if book is None or reader.rank not in book.ranks or reader.order.followed:
            self._ledger.note_streams(reader)
        elif reader.rank not in book.told:
            book.told.add(reader.rank)
            start, end = reader.jumps.last
            last = Stream(0, reader.rank, reader.pid, start, end, reader.seen_ns, reader.seen_ns)
            self._ledger.streams.append({**describe_stream(reader, last), "pattern": "random"})

    # -------------------------------------------------------------- steps

    def step(self, now: int) -> None:
        """Once a turn: go on with what is due."""
        for book in self.books.values():
            if book.file.attached:
                book.mapped_ns = now
            if book.file.resting:
                continue
            if book.stage is Stage.WATCHED:
                if now >= book.judge_ns and book.readers and not book.file.changed:
                    book.judge_ns = now + JUDGE_NS
                    self._judge(book, now)
            elif book.stage is Stage.MEASURED:
                self._measure(book, now)
            elif book.stage is Stage.STREAMED:
                self._go_on(book, now)

    def _judge(self, book: BulkState, now: int) -> None:
        file, readers = book.file, list(book.readers.values())
        missing = book.missing_bytes()
        room, limit = self._room(book, missing)
        jumped = sum(reader.jumps.jumps for reader in readers)
        since_ns = min(reader.jumps.since_ns for reader in readers)
        watched = max(1, now - since_ns) / 1e9
        brings = min(MISS_BYTES, file.read_ahead_bytes() or uffd.PAGE_BYTES)
        inputs = bulk.BulkInputs(
            file_bytes=file.size_bytes,
            missing_bytes=missing,
            room_bytes=room,
            touches_per_second=jumped / watched,
            watched_seconds=watched,
            miss_seconds=min(book.miss_ns, default=0) / 1e9,
            miss_bytes=book.pooled.chunk_bytes if book.pooled else brings,
            bandwidth_bytes_per_second=book.bandwidth,
        )
        decision = bulk.judge(inputs)
        book.why = decision.why
        if decision.what is bulk.Choice.NO_ROOM:
            self._refuse(
                book, f"{decision.why} ({limit.value}): not warmed; with --budget "
                f"{format_size(file.size_bytes).replace(' ', '')} it could be, a plan needs less",
            )  # fmt: skip
        elif decision.what is bulk.Choice.NO_GAIN:
            self._refuse(book, f"{decision.why}: not warmed, nothing to do")
        elif decision.what is bulk.Choice.WAIT and not inputs.measured:
            book.stage, book.limit = Stage.MEASURED, 0
        elif decision.what is bulk.Choice.STREAM:
            book.stage, book.limit = Stage.STREAMED, file.size_bytes
        if book.stage in (Stage.MEASURED, Stage.STREAMED) and book.began_bytes is None:
            book.began_bytes = file.prefetched_bytes
        if book.stage in (Stage.MEASURED, Stage.STREAMED) and book.consumer is None:
            book.consumer = FileConsumer(readers[0].rank, readers[0].pid)

    def _refuse(self, book: BulkState, why: str) -> None:
        book.stage, book.why = Stage.REFUSED, why
        ranks = ", ".join(map(str, sorted(book.ranks)))
        many = "ranks" if len(book.ranks) > 1 else "rank"
        self._ledger.degrade(f"{book.file.path}: {many} {ranks} jumps about; {why}")

    def _room(self, book: BulkState, missing: int) -> tuple[int, Limit]:
        """How much of a file may be in memory, and which limit binds."""
        others = sum(
            one.file.size_bytes
            for one in self.books.values()
            if one is not book and one.stage in (Stage.STREAMED, Stage.DONE) and one.file.attached
        )
        pool = self._layout.pool
        if pool is not None and book.pooled is not None:
            return pool.budget_bytes - others, pool.limited_by or Limit.BUDGET
        allowed, limit = self._limits.ahead_bytes()
        if (
            limit is not Limit.BUDGET
        ):  # which is of memory that is free: what is cached already is not
            allowed = min(self._config.budget_bytes, allowed + book.file.size_bytes - missing)
        return allowed - others, limit

    # -------------------------------------------------------------- measuring

    def _measure(self, book: BulkState, now: int) -> None:
        """Single reads for the latency; then, where no window was read, the stream's beginning for
        the bandwidth. One at a time, each when the last is there."""
        if self._ends(book, now) or not self._idle(book):
            return
        if book.asked_ns:
            took, book.asked_ns = max(1, self._clock.now_ns() - book.asked_ns), 0
            if book.limit:
                book.bandwidth = book.asked_bytes * 1e9 / took
            else:
                book.miss_ns.append(took)
        if len(book.miss_ns) < MISS_READS and not book.limit:
            at = a_missing_piece(book.file, len(book.miss_ns), book.pooled)
            if at is not None:
                book.asked_ns = self._clock.now_ns()
                self._want(book, at, min(at + MISS_BYTES, book.file.size_bytes))
                return
        if not book.bandwidth:
            book.bandwidth = self._scheduler.meter.bandwidth
        if not book.bandwidth and not book.limit:
            book.limit = min(book.cursor + PROBE_BYTES, book.file.size_bytes)
            book.asked_ns, book.asked_bytes = self._clock.now_ns(), 0
            self._feed(book)
            return
        book.stage, book.judge_ns = Stage.WATCHED, now if book.miss_ns else now + JUDGE_NS
        self._count(book)

    def _idle(self, book: BulkState) -> bool:
        """Whether all that was asked for has come."""
        return not self._scheduler.queued_bytes and not self._scheduler.busy_with(book.file)

    # -------------------------------------------------------------- streaming

    def _go_on(self, book: BulkState, now: int) -> None:
        self._count(book)
        if self._ends(book, now):
            return
        if book.cursor < book.file.size_bytes:
            gone = now - book.mapped_ns > GONE_NS  # between two batches, or for good
            if self._scheduler.queued_bytes < WAITING_BYTES and not gone:
                self._feed(book)
        elif self._idle(book):
            book.passes += 1
            missing = book.missing_bytes()
            if missing * bulk.LITTLE_SHARE > book.file.size_bytes and book.passes < PASSES_MAX:
                book.cursor = 0  # the kernel has dropped what it was asked for, or given it back
                return
            book.stage, book.consumer = Stage.DONE, None

    @staticmethod
    def _count(book: BulkState) -> None:
        began_bytes = book.began_bytes or 0
        book.read_bytes = book.before_bytes + book.file.prefetched_bytes - began_bytes

    def _feed(self, book: BulkState) -> None:
        """Ask for the next piece, less what is there."""
        asked, looks = 0, 0
        while book.cursor < book.limit and asked < PIECE_BYTES and looks < LOOKS_AT_ONCE:
            start = book.cursor
            end = book.cursor = min((start // EXTENT_BYTES + 1) * EXTENT_BYTES, book.limit)
            looks += 1
            missing = book.missing_bytes(start, end)
            if missing:
                asked += self._want(book, start, end)
                book.asked_bytes += missing

    def _want(self, book: BulkState, start: int, end: int) -> int:
        assert book.consumer is not None
        # what is measured has to be fast
        streamed = book.stage is Stage.STREAMED
        priority = Priority.BACKGROUND if streamed else Priority.MEASURING
        pooled = book.pooled is not None
        wanted = PrefetchRange(book.file, start, end, start, priority, pooled=pooled)
        return self._scheduler.want(book.consumer, wanted)

    def _ends(self, book: BulkState, now: int) -> bool:
        """Stop where the reason has gone; whether it has."""
        file, stage, why = book.file, Stage.STOPPED, ""
        if file.changed or file.fd < 0:
            why = "the file is not managed any more"
        elif book.in_order:
            stage, why = Stage.WATCHED, "its readers go in order now, or their order is known"
        elif now >= book.memory_ns:
            book.memory_ns = now + MEMORY_NS
            room, limit = self._room(book, book.missing_bytes())
            if room < file.size_bytes:
                why = f"memory became short ({limit.value})"
                self._ledger.degrade(f"{file.path}: bulk warm stopped: {why}")
        if not why:
            return False
        if book.consumer is not None:
            self._scheduler.forget(book.consumer)
        book.stage, book.why, book.consumer = stage, why, None
        book.cursor = book.limit = book.asked_ns = 0
        return True

    # -------------------------------------------------------------- books

    def describe(self, path: str) -> dict[str, Any] | None:
        """What the summary says of a file (docs/bulk.md); None: nobody jumped about in it."""
        for book in self.books.values():
            if book.file.path == path and book.ranks:
                return {
                    "state": book.stage.value,
                    "why": book.why,
                    "ranks": sorted(book.ranks),
                    "read_bytes": book.read_bytes,
                    "miss_seconds": min(book.miss_ns, default=0) / 1e9 or None,
                    "bandwidth_bytes_per_second": round(book.bandwidth) or None,
                }
        return None


def missing_bytes(
    file: FileState, start: int = 0, end: int | None = None, pooled: PoolFile | None = None
) -> int:
    """How much of [start, end) is not in the pool (``pooled``), or not in the page cache; where
    nobody tells, what we have not read."""
    end = file.size_bytes if end is None else end
    if pooled is not None:
        chunks = pooled.state[start // pooled.chunk_bytes : -(-end // pooled.chunk_bytes)]
        absent = int((chunks != uffd_pool.PRESENT).sum()) * pooled.chunk_bytes
        return min(absent, end - start)
    there = file.resident_bytes(start, end - start)
    if there is None:
        read, unused, _ = file.block_counts(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        there = read + unused
    return max(0, end - start - there)


def a_missing_piece(file: FileState, turn: int, pooled: PoolFile | None = None) -> int | None:
    """The offset of MISS_BYTES that are not in memory, somewhere; None where all seems to be."""
    pieces = file.size_bytes // MISS_BYTES
    for i in range(16):  # the golden ratio spreads any number of them evenly
        at = int((turn * 16 + i + 1) * 0.6180339887 % 1 * pieces) * MISS_BYTES
        if missing_bytes(file, at, at + MISS_BYTES, pooled) == MISS_BYTES:
            return at
    return None
