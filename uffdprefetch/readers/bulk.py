# SPDX-License-Identifier: Apache-2.0
"""Bulk warm: a file whose readers jump about is streamed whole, once, where that pays.

It is in charge of a reader that jumps about (predict/randomness.py) and wants nothing for it alone;
predict/bulk.py says whether the stream pays. This measures the storage where nothing else has, has
the file streamed (readers/file_stream.py) behind everything else that is wanted, ends that when the
reason has gone, and says once why a file was not streamed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.native import uffd
from uffdprefetch.predict import bulk
from uffdprefetch.predict.bulk import MISS_BYTES, MISS_READS
from uffdprefetch.predict.streams import Stream
from uffdprefetch.readers import file_stream
from uffdprefetch.readers.file_stream import LOOKS_AT_ONCE, MEMORY_NS, FileStream, Room, Stage
from uffdprefetch.readers.predictor import Predictor
from uffdprefetch.readers.stated import StatedRanges
from uffdprefetch.state.files import BLOCK_BYTES, FileState, Key
from uffdprefetch.state.ledger import Ledger, describe_stream
from uffdprefetch.state.reader import Reader, Trait
from uffdprefetch.warm.consumer import Consumer, FileConsumer, PrefetchRange, Priority
from uffdprefetch.warm.scheduler import Scheduler

if TYPE_CHECKING:
    from uffdprefetch.pool.node_pool import PoolFile

MS = 1_000_000
#: How often a file is judged, and its stream held to its pace; asking what of it is cached may take
#: one part in JUDGE_COST of our core: that lasts no longer than the stream.
JUDGE_NS = 20 * MS
JUDGE_COST = 8
#: bench/bulk_share.py: what predict/bulk.RENT_SHARE would be.
_RENT_SHARE = "UFFDPREFETCH_TEST_RENT_SHARE"
#: Looks into the page table of a random reader of which all is decided.
REST_NS = 250 * MS
FILES_MAX = 256
#: More than an order that is to become known (readers/known_order.py) is not there; windows are
#: none of a reader that jumps about.
CONFIDENCE = 0.5


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
    stream: FileStream | None = None  # while it is measured or streamed
    began_bytes: int | None = None  # of file.prefetched_bytes, before the first probe
    before_bytes: int = 0  # read while the file was open before
    read_bytes: int = 0
    miss_ns: list[int] = field(default_factory=list)
    bandwidth: float = 0.0
    asked_ns: int = 0  # when the running probe was asked for; 0: none runs
    bandwidth_next: bool = False  # ... it is of the bandwidth, not of the latency
    asked_bytes: int = 0  # ... for so much of what was not there
    probe_bytes: int = 0  # probes of the bandwidth have read the file up to here
    judge_ns: int = 0
    pace: bulk.Pace | None = None  # from when it was first judged
    price_seconds: float = 0.0  # of its stream, when that began; 0: it has not
    seen_ns: int = 0  # its last touch by a reader that jumped about and has left
    memory_ns: int = 0

    @property
    def pooled(self) -> PoolFile | None:
        """Where the file is read to; None: into the page cache."""
        return self.file.pooled if self.in_pool else None

    def missing_bytes(self, start: int = 0, end: int | None = None) -> int:
        """How much of [start, end) is not where it is read to."""
        return file_stream.missing_bytes(self.file, start, end, self.pooled)


class Bulk(Predictor):
    """The files of a service whose readers may be random. The service's thread calls all of it."""

    name = "bulk warm"
    policies = frozenset({"auto"})
    trait = Trait.JUMPS

    def __init__(
        self, scheduler: Scheduler, ledger: Ledger, room: Room, stated: StatedRanges,
        clock: Clock = CLOCK,
    ) -> None:  # fmt: skip
        self._clock, self._stated = clock, stated
        self._scheduler, self._ledger, self._room = scheduler, ledger, room
        self.books: dict[Key, BulkState] = {}
        self._rent_share = float(os.environ.get(_RENT_SHARE, 0.0))
        room.holders.append(self._held)

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
        if book.stream is not None:
            book.stream.in_pool = book.in_pool
        return ()

    def dismissed(self, reader: Reader) -> None:
        """See Predictor."""
        book = self.books.get(reader.file.key)
        if book is not None and book.readers.get(reader.pid) is reader:
            del book.readers[reader.pid]
            book.seen_ns = max(book.seen_ns, reader.seen_ns)
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
            if book.file.resting:
                continue
            if book.stage is Stage.WATCHED:
                stated = self._stated.streams(book.file)
                if now >= book.judge_ns and book.readers and not (book.file.changed or stated):
                    began = self._clock.cpu_ns()
                    self._judge(book, now)
                    cost = self._clock.cpu_ns() - began
                    book.judge_ns = now + max(JUDGE_NS, JUDGE_COST * cost)
            elif book.stage is Stage.MEASURED:
                self._measure(book, now)
            elif book.stage is Stage.STREAMED:
                self._go_on(book, now)

    def _judge(self, book: BulkState, now: int) -> None:
        file, readers = book.file, list(book.readers.values())
        book.bandwidth = book.bandwidth or self._scheduler.meter.bandwidth
        missing = book.missing_bytes()
        self._note(book, missing)
        room, limit = self._room.of(file, book.pooled, file.size_bytes - missing)
        jumped = sum(reader.jumps.jumps for reader in readers)
        since_ns = min(reader.jumps.since_ns for reader in readers)
        watched = max(1, now - since_ns) / 1e9
        rent_share = self._rent_share
        if not rent_share and self._was_in_vain(self._left_last(book, since_ns)):
            rent_share = bulk.RENT_AGAIN
        inputs = bulk.BulkInputs(
            file_bytes=file.size_bytes,
            missing_bytes=missing,
            room_bytes=room,
            touches_per_second=jumped / watched,
            watched_seconds=watched,
            miss_seconds=min(book.miss_ns, default=0) / 1e9,
            miss_bytes=self._miss_bytes(book),
            bandwidth_bytes_per_second=book.bandwidth,
            rent_share=rent_share,
        )
        decision = bulk.judge(inputs)
        book.why = decision.why
        if decision.what is bulk.Choice.NO_ROOM:
            otherwise = self._room.made_by(file, book.pooled, file.size_bytes)
            self._refuse(
                book,
                f"{decision.why} ({limit.value}): not warmed; {otherwise} it could be, a plan needs"
                " less",
            )
        elif decision.what is bulk.Choice.NO_GAIN:
            self._refuse(book, f"{decision.why}: not warmed, nothing to do")
        elif decision.what is bulk.Choice.MEASURE:
            book.stage, book.bandwidth_next = Stage.MEASURED, inputs.miss_seconds > 0
            self._stream(book, readers[0], now).priority = Priority.MEASURING
        elif decision.what is bulk.Choice.STREAM:
            book.stage = Stage.STREAMED
            book.price_seconds = inputs.stream_seconds
            stream = self._stream(book, readers[0], now)
            stream.add(0, file.size_bytes)
            self._keep_pace(book, stream, missing)

    def _left_last(self, book: BulkState, since_ns: int) -> BulkState | None:
        """Of the files that were streamed for these ranks, the one that they jumped about in before
        this one; None: there is none, or they have read on in it since."""
        last, last_ns = None, 0
        for one in self.books.values():
            if one is book or not one.price_seconds or not one.ranks & book.ranks:
                continue
            seen_ns = max((reader.seen_ns for reader in one.readers.values()), default=one.seen_ns)
            if seen_ns > last_ns:
                last, last_ns = one, seen_ns
        return last if last_ns < since_ns else None

    def _was_in_vain(self, book: BulkState | None) -> bool:
        """Whether its readers' misses alone would have cost less than its stream."""
        if book is None:
            return False
        file = book.file
        both, _, other = file.block_counts(0, len(file.blocks))
        share = (both + other) / BLOCK_BYTES / max(1, len(file.blocks))
        alone = bulk.alone_seconds(
            file.size_bytes, share, BLOCK_BYTES, self._miss_bytes(book), min(book.miss_ns) / 1e9
        )
        return alone < book.price_seconds

    @staticmethod
    def _miss_bytes(book: BulkState) -> int:
        """What one miss brings."""
        if book.pooled:
            return book.pooled.chunk_bytes
        return min(MISS_BYTES, book.file.ahead_bytes or uffd.PAGE_BYTES)

    @staticmethod
    def _note(book: BulkState, missing: int) -> bulk.Pace:
        """Its misses up to now: what has come, and not by us."""
        if book.pace is None:
            touches = sum(reader.jumps.jumps for reader in book.readers.values())
            there = book.file.size_bytes - missing
            brought = min(there, touches * Bulk._miss_bytes(book))
            book.pace = bulk.Pace(missing + brought, brought, brought)
        arriving, part = 0, book.pooled
        for start, end in book.file.in_flight if part is None else part.in_flight:
            arriving += end - start - book.missing_bytes(start, end)
        began = book.began_bytes
        came = 0 if began is None else book.file.prefetched_bytes - began
        book.pace.note(missing, came + arriving)
        return book.pace

    def _keep_pace(self, book: BulkState, stream: FileStream, missing: int) -> None:
        """How far it may be by now. Where nobody tells what misses bring, it does not wait."""
        miss_seconds, keeps_pace = min(book.miss_ns) / 1e9, False
        if book.pooled or book.file.resident_bytes(0, uffd.PAGE_BYTES) is not None:
            pace = self._note(book, missing)
            lost_seconds = pace.demanded_bytes / self._miss_bytes(book) * miss_seconds
            may_bytes = pace.may_stream_bytes(missing, book.bandwidth, lost_seconds)
            keeps_pace = may_bytes is not None and not pace.is_behind(stream.most_bytes or 0)
            stream.most_bytes = may_bytes
        under_way_bytes = bulk.yield_bytes(miss_seconds, book.bandwidth, keeps_pace)
        stream.give_way(Priority.BACKGROUND, under_way_bytes)

    def _stream(self, book: BulkState, reader: Reader, now: int) -> FileStream:
        """Its stream, which measuring begins and streaming goes on with."""
        if book.began_bytes is None:
            book.began_bytes = book.file.prefetched_bytes
        if book.stream is None:
            consumer = FileConsumer(reader.rank, reader.pid)
            book.stream = FileStream(book.file, self._scheduler, consumer, book.in_pool, now)
        return book.stream

    def _refuse(self, book: BulkState, why: str) -> None:
        book.stage, book.why = Stage.REFUSED, why
        ranks = ", ".join(map(str, sorted(book.ranks)))
        many = "ranks" if len(book.ranks) > 1 else "rank"
        self._ledger.degrade(f"{book.file.path}: {many} {ranks} jumps about; {why}")

    def _held(self) -> Iterable[tuple[FileState, int]]:
        """See Room.holders."""
        for book in self.books.values():
            if book.stage in (Stage.STREAMED, Stage.DONE):
                yield book.file, book.file.size_bytes

    # -------------------------------------------------------------- measuring

    def _measure(self, book: BulkState, now: int) -> None:
        """Single reads for the latency, one at a time, each when the last is there; or the stream's
        beginning for the bandwidth."""
        stream = book.stream
        if self._ends(book, now) or stream is None or not stream.idle:
            return
        learned = bool(book.asked_ns) and self._learn(book, stream)
        if book.bandwidth_next:
            if not book.asked_ns:
                start, end = self._next_probe(book)
                stream.consumer.feedback.forget_times()
                stream.add(start, end)
                book.probe_bytes, book.asked_ns = end, self._clock.now_ns()
                book.asked_bytes = stream.feed()
                return
        elif len(book.miss_ns) < MISS_READS:
            at = a_missing_piece(book.file, len(book.miss_ns), book.pooled)
            if at is not None:
                stream.consumer.feedback.forget_times()
                book.asked_ns = self._clock.now_ns()
                stream.want(at, min(at + MISS_BYTES, book.file.size_bytes))
                return
        book.stage, book.asked_ns = Stage.WATCHED, 0
        book.judge_ns = now if learned else now + JUDGE_NS
        self._count(book)

    @staticmethod
    def _next_probe(book: BulkState) -> tuple[int, int]:
        """Where the bandwidth is measured: beyond what was tried, and beyond what is there."""
        size = bulk.probe_bytes(book.pace.plain_bytes if book.pace else 0.0)
        start, end = book.probe_bytes, min(book.probe_bytes + size, book.file.size_bytes)
        for _ in range(LOOKS_AT_ONCE):
            if end == book.file.size_bytes or book.missing_bytes(start, end):
                break
            start, end = end, min(end + size, book.file.size_bytes)
        return start, end

    def _learn(self, book: BulkState, stream: FileStream) -> bool:
        """What the read that was asked for tells; whether it tells anything."""
        took = stream.consumer.feedback.took_ns  # without our own way there and back
        took = took or max(1, self._clock.now_ns() - book.asked_ns)
        if not book.bandwidth_next:
            book.miss_ns.append(took)
            return True
        miss_ns = min(book.miss_ns)  # the latency is no part of the bandwidth
        if book.asked_bytes > 2 * MISS_BYTES:
            book.bandwidth = (book.asked_bytes - MISS_BYTES) * 1e9 / max(took - miss_ns, took // 4)
        return book.bandwidth > 0

    # -------------------------------------------------------------- streaming

    def _go_on(self, book: BulkState, now: int) -> None:
        self._count(book)
        if self._ends(book, now) or book.stream is None:
            return
        if now >= book.judge_ns and book.stream.most_bytes is not None:
            began = self._clock.cpu_ns()
            self._keep_pace(book, book.stream, book.missing_bytes())
            book.judge_ns = now + max(JUDGE_NS, JUDGE_COST * (self._clock.cpu_ns() - began))
        if book.stream.go_on(now):
            book.stage, book.stream = Stage.DONE, None

    @staticmethod
    def _count(book: BulkState) -> None:
        began_bytes = book.began_bytes or 0
        book.read_bytes = book.before_bytes + book.file.prefetched_bytes - began_bytes

    def _ends(self, book: BulkState, now: int) -> bool:
        """Stop where the reason has gone; whether it has."""
        file, stage, why = book.file, Stage.STOPPED, ""
        if file.changed or file.fd < 0:
            why = "the file is not managed any more"
        elif book.in_order:
            stage, why = Stage.WATCHED, "its readers go in order now, or their order is known"
        elif self._stated.streams(file):
            stage, why = Stage.WATCHED, "it is streamed since it was said to be needed"
        elif now >= book.memory_ns:
            book.memory_ns = now + MEMORY_NS
            cached = file.size_bytes - book.missing_bytes()
            room, limit = self._room.of(file, book.pooled, cached)
            if room < file.size_bytes:
                why = f"memory became short ({limit.value})"
                self._ledger.degrade(f"{file.path}: bulk warm stopped: {why}")
        if not why:
            return False
        if book.stream is not None:
            book.stream.end()
        book.stage, book.why, book.stream = stage, why, None
        book.probe_bytes = book.asked_ns = 0
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


def a_missing_piece(file: FileState, turn: int, pooled: PoolFile | None = None) -> int | None:
    """The offset of MISS_BYTES that are not in memory, somewhere; None where all seems to be."""
    pieces = file.size_bytes // MISS_BYTES
    for i in range(16):  # the golden ratio spreads any number of them evenly
        at = int((turn * 16 + i + 1) * 0.6180339887 % 1 * pieces) * MISS_BYTES
        if file_stream.missing_bytes(file, at, at + MISS_BYTES, pooled) == MISS_BYTES:
            return at
    return None
