# SPDX-License-Identifier: Apache-2.0
"""`wrap` as it is, `--policy auto`, as a replay policy. Pure.

The service's own rules decide: what is a walk (predict/streams.py), who jumps about
(predict/randomness.py), how far ahead to read (predict/window.py), where checkpoints lie
(predict/checkpoints.py), and whether streaming the whole file pays (predict/bulk.py). Replayed is
what they are told. A rank's threads and workers are one reader here. Not replayed are strides by a
record index, and windows that grow because a reader came too early.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.predict import bulk, checkpoints, window
from uffdprefetch.predict.randomness import RandomnessDetector
from uffdprefetch.predict.streams import PIECE_BYTES, Stream, StreamTable
from uffdprefetch.sim.replay.demand import Demand
from uffdprefetch.sim.replay.engine import Range, Resident
from uffdprefetch.sim.replay.keep import CHUNK_PAGES
from uffdprefetch.sim.replay.link import Storage
from uffdprefetch.sim.replay.policies import InPool, Plain, chunked, measured

#: Looks into a page table: at first and while they find something; then ever more seldom. Where a
#: walk is sure, eight times a window (sense/pagetable_scan.py). What a look finds so near each
#: other is one touch (sense/pagetables.CLUSTER_BYTES).
LOOK_SECONDS, LOOK_SLOWEST_SECONDS, LOOK_SLOWER = 0.002, 0.25, 1.5
POLL_FASTEST_SECONDS, POLL_SLOWEST_SECONDS, POLLS_PER_WINDOW = 0.004, 0.1, 8
CLUSTER_BYTES = 1 << 20
#: A checkpoint that has told is armed again after this; walks that have ended are looked for as
#: often (warm/placement.REARM_NS, service/coordinator.refresh_all).
REARM_SECONDS = 1.0
#: A file is judged so often (readers/bulk.JUDGE_NS).
JUDGE_SECONDS = 0.1


@dataclass
class _Reader:
    """A process's walks through a file."""

    file: int
    span: checkpoints.Span
    table: StreamTable
    jumps: RandomnessDetector
    mapped: Array  # (pages,) bool
    told: Array  # (pages,) bool: of those, what the service has heard of
    laid: frozenset[int]  # its checkpoints: pages
    fired: dict[int, float] = field(default_factory=dict)  # page (pool: cell) -> when
    found: list[tuple[int, int]] = field(default_factory=list)  # touched since the last look
    look_at: float = LOOK_SECONDS
    every: float = LOOK_SECONDS
    refresh_at: float = REARM_SECONDS
    jumped: int = 0  # touches since it is known to jump about
    since: float = 0.0  # when that began


@dataclass
class _Bulk:
    """Bulk warm of a file."""

    random: list[_Reader] = field(default_factory=list)
    judge_at: float = 0.0  # 0: the storage is not measured
    decided: bool = False
    pieces: deque[Range] = field(default_factory=deque)


class Auto(Plain):
    """Windows that follow walks, as large as the reader's rate asks for; a file whose readers jump
    about is streamed whole if that pays and ``room_bytes`` hold it."""

    def __init__(self, room_bytes: int = 1 << 50, request_bytes: int = 1 << 20) -> None:
        self.room_bytes, self.request_bytes = room_bytes, request_bytes

    def begin(self, demand: Demand, storage: Storage, resident: Resident) -> None:
        super().begin(demand, storage, resident)
        self.demand, self.storage, self.page = demand, storage, demand.page_bytes
        self.sizes = [demand.pages(file) * self.page for file in range(len(demand.files))]
        self.readers: dict[tuple[int, int], _Reader] = {}  # (rank, file)
        self.ahead: dict[int, tuple[Stream, deque[Range]]] = {}  # of walks, by id()
        self.bulks: dict[int, _Bulk] = {}  # files that somebody jumps about in

    # ---- what the service hears -----------------------------------------------------------------

    def touched(
        self, stream: int, access: int, file: int, first: int, end: int, now: float
    ) -> float:
        answering = super().touched(stream, access, file, first, end, now)
        reader = self._reader(self.demand.streams[stream].rank, file)
        reader.mapped[first:end] = True
        self._notice(reader, first, end, now)
        if now >= reader.refresh_at:
            reader.refresh_at = now + REARM_SECONDS
            reader.table.expire(int(now * 1e9))
            self._plan(reader, now)
        return answering

    def _reader(self, rank: int, file: int) -> _Reader:
        reader = self.readers.get((rank, file))
        if reader is None:
            pages = self.demand.pages(file)
            span = checkpoints.Span(0, self.sizes[file], self.page)
            laid = frozenset(checkpoints.fixed_set(span, None))
            reader = self.readers[rank, file] = _Reader(
                file,
                span,
                StreamTable(rank, rank),
                RandomnessDetector(self.sizes[file]),
                np.zeros(pages, bool),
                np.zeros(pages, bool),
                laid,
            )
        return reader

    def _notice(self, reader: _Reader, first: int, end: int, now: float) -> None:
        """Checkpoints tell at once, looks into the page table from time to time."""
        reader.found.append((first, end))
        for page in sorted(page for page in reader.laid if first <= page < end):
            if now - reader.fired.get(page, -1e9) > REARM_SECONDS:
                reader.fired[page] = now
                self._hear(reader, page, page + 1, now)
        if now >= reader.look_at:
            self._look(reader, now)

    def _look(self, reader: _Reader, now: float) -> None:
        """At all that was mapped since the last look."""
        clusters: list[list[int]] = []
        for first, end in sorted(reader.found):
            news = np.flatnonzero(~reader.told[first:end])
            if not len(news):
                continue
            first += int(news[0])
            if clusters and (first - clusters[-1][1]) * self.page <= CLUSTER_BYTES:
                clusters[-1][1] = max(clusters[-1][1], end)
            else:
                clusters.append([first, end])
            reader.told[first:end] = True
        reader.found.clear()
        for first, end in clusters:
            self._hear(reader, first, end, now)
        settled = [walk for walk in reader.table.active() if walk.settled]
        if settled:
            rate = max(walk.rate_bytes_per_second for walk in settled)
            step = max(self._lookahead(walk) for walk in settled) / POLLS_PER_WINDOW
            if any(walk.sparse_pieces for walk in reader.table.active()):
                step = min(step, PIECE_BYTES)
            due = step / rate if rate else POLL_SLOWEST_SECONDS
            reader.every = min(POLL_SLOWEST_SECONDS, max(POLL_FASTEST_SECONDS, due))
        else:
            slower = min(LOOK_SLOWEST_SECONDS, LOOK_SLOWER * reader.every)
            reader.every = LOOK_SECONDS if clusters else slower
        reader.look_at = now + reader.every

    def _hear(self, reader: _Reader, first: int, end: int, now: float) -> None:
        """A touch of pages [first, end): service/coordinator.Coordinator.touch."""
        start, stop, now_ns = first * self.page, end * self.page, int(now * 1e9)
        walk, forward = reader.table.touch(start, stop, now_ns)
        passed = end - first
        if forward:
            behind = walk.position_bytes - walk.direction * forward
            low, high = sorted((walk.position_bytes, behind))
            over = slice(low // self.page, -(-high // self.page))
            mapped = reader.mapped[over]
            # In a second epoch nothing is news; a random reader has been nearly everywhere at last.
            counts = mapped & ~reader.told[over] if reader.jumps.random else mapped
            passed += int(counts.sum())
            reader.told[over] |= mapped
        reader.told[first:end] = True
        before = reader.jumps.random
        reader.jumped += 1
        passed_over = 0 < forward <= bulk.PASSED_SHARE * passed * self.page
        reader.jumps.saw(start, stop, now_ns, passed_over)
        if reader.jumps.random != before:
            self._turned(reader)
        if reader.jumps.random:
            reader.table.absorbed += reader.table.streams
            reader.table.streams.clear()
        self._plan(reader, now)

    def _turned(self, reader: _Reader) -> None:
        """A reader jumps about from now on, or does not any more."""
        one = self.bulks.setdefault(reader.file, _Bulk())
        if reader.jumps.random:
            reader.jumped, since_ns = reader.jumps.jumped()
            reader.since = since_ns / 1e9
            one.random.append(reader)
            return
        one.random.remove(reader)
        if not one.random:
            one.pieces.clear()
            one.decided = False

    def left(self, file: int, first: int, end: int) -> None:
        for reader in self.readers.values():
            if reader.file == file:
                reader.mapped[first:end] = reader.told[first:end] = False

    # ---- what it does then ----------------------------------------------------------------------

    def _plan(self, reader: _Reader, now: float) -> None:
        """Windows ahead of the walks."""
        while reader.table.absorbed:
            self.ahead.pop(id(reader.table.absorbed.pop()), None)
        walks = reader.table.active()
        trusted = reader.jumps.count < bulk.DOUBT_TOUCHES or reader.jumps.trusted
        for walk in walks:
            far = self._lookahead(walk)
            more = None
            if trusted and not reader.table.random:
                more = window.auto(walk, reader.span.end_bytes, far)
            if more:
                pieces = self._pieces(reader.file, *more)
                self.ahead.setdefault(id(walk), (walk, deque()))[1].extend(
                    pieces[:: walk.direction]
                )

    def _lookahead(self, walk: Stream) -> int:
        return window.lookahead_bytes(walk, measured(self.storage), self._allowed())

    def _walks(self) -> int:
        return max(1, sum(len(reader.table.active()) for reader in self.readers.values()))

    def _allowed(self) -> int:
        """Ahead of one walk."""
        return self.room_bytes // self._walks()

    def _pieces(self, file: int, start: int, end: int) -> list[Range]:
        """[start, end) bytes in requests."""
        return [
            (file, at // self.page, -(-min(at + self.request_bytes, end) // self.page))
            for at in range(start, end, self.request_bytes)
        ]

    def wants(self, now: float) -> Range | None:
        """Kernel readahead; then what lies nearest before a walk; then bulk warm."""
        wanted = super().wants(now)
        while wanted is None and self.ahead:
            walk, pieces = min(self.ahead.values(), key=lambda one: self._gap(*one))
            wanted = self.resident.missing(pieces.popleft())
            if not pieces:
                del self.ahead[id(walk)]
        if wanted is None:
            for file, one in self.bulks.items():
                if one.random and not one.decided and now >= one.judge_at:
                    self._judge(file, one, now)
                while one.pieces and wanted is None:
                    wanted = self.resident.missing(one.pieces.popleft())
        return wanted

    def _gap(self, walk: Stream, pieces: deque[Range]) -> int:
        _, first, end = pieces[0]
        if walk.direction < 0:
            return walk.position_bytes - end * self.page
        return first * self.page - walk.position_bytes

    def _judge(self, file: int, one: _Bulk, now: float) -> None:
        """Stream a file whose readers jump about, if that pays."""
        rate = self.storage.bandwidth
        miss_seconds = self.storage.latency + bulk.MISS_BYTES / rate
        if not one.judge_at:
            measuring = bulk.MISS_READS * miss_seconds + bulk.PROBE_BYTES / rate
            one.judge_at = now + measuring + JUDGE_SECONDS
            return
        one.judge_at = now + JUDGE_SECONDS
        others = sum(
            self.sizes[other]
            for other, that in self.bulks.items()
            if that.decided and other != file
        )
        watched = max(1e-9, now - min(reader.since for reader in one.random))
        sight = bulk.BulkInputs(
            file_bytes=self.sizes[file],
            missing_bytes=int(np.isinf(self.resident.ready[file]).sum()) * self.page,
            room_bytes=self.room_bytes - others,
            touches_per_second=sum(reader.jumped for reader in one.random) / watched,
            watched_seconds=watched,
            miss_seconds=miss_seconds,
            miss_bytes=self._brings(file),
            bandwidth_bytes_per_second=rate,
        )
        what = bulk.judge(sight).what
        one.decided = what not in (bulk.Choice.WAIT, bulk.Choice.RESIDENT)
        if what == bulk.Choice.STREAM:
            one.pieces.extend(self._pieces(file, 0, self.sizes[file]))

    def _brings(self, file: int) -> int:
        """Bytes that a random miss reads."""
        return min(bulk.MISS_BYTES, self.around[file] * self.page)


class PoolAuto(InPool, Auto):
    """`--engine pool`: each touch that is answered tells, and one a cell of what the pool has kept;
    no more is read ahead than the pool spares for that."""

    def __init__(self, budget_bytes: int) -> None:
        InPool.__init__(self, budget_bytes)
        Auto.__init__(self, budget_bytes)

    def answered(self, stream: int, file: int, pages: list[int], now: float) -> None:
        reader = self._reader(self.ranks[stream], file)
        for page in pages:
            reader.fired[page * self.page // checkpoints.DISTANCE_MIN_BYTES] = now
            self._hear(reader, page, page + 1, now)

    def _notice(self, reader: _Reader, first: int, end: int, now: float) -> None:
        cell = first * self.page // checkpoints.DISTANCE_MIN_BYTES
        if now - reader.fired.get(cell, now) > REARM_SECONDS:
            reader.fired[cell] = now
            self._hear(reader, first, end, now)

    def _allowed(self) -> int:
        places = window.places(
            (reader.file, walk.position_bytes)
            for reader in self.readers.values()
            for walk in reader.table.active()
        )
        return window.pool_bytes(self.room_bytes, sum(self.sizes), places)

    def _brings(self, file: int) -> int:
        return CHUNK_PAGES * self.page

    def wants(self, now: float) -> Range | None:
        wanted = super().wants(now)
        return None if wanted is None else chunked(wanted)
