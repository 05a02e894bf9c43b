# SPDX-License-Identifier: Apache-2.0
"""A random reader of a file on a modelled storage, and bulk warm for it as predict/bulk.py has it.

The storage is that of bench/slowfs.c: one pipe of so many bytes a second in which requests stand
one behind the other, and a latency after it. The reader touches single pages, each once, and waits
for what is not there; a miss brings what lies around it. The stream goes through the file in order
with so much under way as it may. No clock, no storage: a run is a second or less.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from uffdprefetch.predict import bulk
from uffdprefetch.predict.bulk import MISS_BYTES, PIECE_BYTES, BulkInputs, Choice, Pace

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4 * KIB
#: Touches after which a reader is known to be random, as seen on the slow bed: 32 to 64.
KNOWN_TOUCHES = 48
#: How often the service judges (readers/bulk.JUDGE_NS), and when it comes to look at what has come.
JUDGE_SECONDS, TURN_SECONDS = 0.020, 0.002


@dataclass(frozen=True)
class Bed:
    """The storage and the file. Seconds, bytes."""

    latency: float
    bandwidth: float
    file_bytes: int = 256 * MIB

    @property
    def miss_seconds(self) -> float:
        """One miss, with nothing else under way."""
        return self.latency + MISS_BYTES / self.bandwidth

    @property
    def stream_seconds(self) -> float:
        """The whole file in order."""
        return self.file_bytes / self.bandwidth

    @property
    def miss_to_bytes(self) -> float:
        """How many times as long as its bytes a miss takes."""
        return self.miss_seconds * self.bandwidth / MISS_BYTES


@dataclass
class Link:
    """What is there of the file, in pieces, and what is under way to it."""

    bed: Bed
    free: float = 0.0  # when the pipe is
    read_bytes: int = 0
    due: dict[int, float] = field(default_factory=dict)  # by piece

    def ask(self, piece: int, now: float) -> float:
        """Ask for one; returns when it is there."""
        self.free = max(self.free, now) + PIECE_BYTES / self.bed.bandwidth
        self.read_bytes += PIECE_BYTES
        self.due[piece] = self.free + self.bed.latency
        return self.due[piece]


class Streaming:
    """The service: judges, measures and streams. ``until(now)`` lets it do what it does by then."""

    def __init__(self, bed: Bed, link: Link) -> None:
        self.bed, self.link = bed, link
        self.touches = 0
        self.judged: float | None = None  # when it is next
        self._pieces = bed.file_bytes // PIECE_BYTES
        self._bandwidth = 0.0
        self._pace: Pace | None = None
        self._next, self._end = 0, 0  # pieces to be read in order
        self._most: int | None = None
        self._yield_bytes = 16 * PIECE_BYTES  # while the bandwidth is measured
        self._streams = False
        self._streamed = 0
        self._sent = 0.0
        self._under_way: list[float] = []

    def until(self, now: float) -> None:
        while True:
            sends, judges = self._may_send(), self.judged
            if sends is not None and sends <= now and (judges is None or sends < judges):
                self._send(sends)
            elif judges is not None and judges <= now:
                self._judge(judges)
            else:
                return

    def _may_send(self) -> float | None:
        if self._next >= self._end:
            return None
        if self._most is not None and self._streamed + PIECE_BYTES > self._most:
            return None
        if len(self._under_way) < self._yield_bytes // PIECE_BYTES:
            return self._sent
        return max(self._sent, self._under_way[0])

    def _send(self, now: float) -> None:
        self._sent, done = now, now
        while self._under_way and self._under_way[0] <= now:
            heapq.heappop(self._under_way)
        if self._next not in self.link.due:
            done = self.link.ask(self._next, now)
            heapq.heappush(self._under_way, done)
            self._streamed += PIECE_BYTES
        self._next += 1
        if self._next == self._end and not self._streams:
            self._bandwidth, self.judged = self.bed.bandwidth, done + TURN_SECONDS

    @property
    def _missing_bytes(self) -> int:
        return (self._pieces - len(self.link.due)) * PIECE_BYTES

    def _judge(self, now: float) -> None:
        self._sent, missing = max(self._sent, now), self._missing_bytes
        if self._pace is None:
            there = self.bed.file_bytes - missing
            self._pace = Pace(self.bed.file_bytes, there, there)
        self._pace.note(missing, self._streamed)
        self.judged = now + JUDGE_SECONDS
        if not self._streams:
            self._decide(now, self._pace, missing)
        if self._streams:
            lost = self._pace.demanded_bytes / MISS_BYTES * self.bed.miss_seconds
            may = self._pace.may_stream_bytes(missing, self._bandwidth, lost)
            keeps_pace = may is not None and not self._pace.is_behind(self._most or 0)
            self._yield_bytes = bulk.yield_bytes(self.bed.miss_seconds, self._bandwidth, keeps_pace)
            self._most = may
            self.judged = None if may is None else self.judged

    def _decide(self, now: float, pace: Pace, missing: int) -> None:
        decision = bulk.judge(
            BulkInputs(
                file_bytes=self.bed.file_bytes, missing_bytes=missing, room_bytes=1 << 50,
                touches_per_second=self.touches / now, watched_seconds=now,
                miss_seconds=self.bed.miss_seconds, miss_bytes=MISS_BYTES,
                bandwidth_bytes_per_second=self._bandwidth,
            )
        )  # fmt: skip
        if decision.what is Choice.MEASURE:
            self._end = -(-bulk.probe_bytes(pace.plain_bytes) // PIECE_BYTES)
            self.judged = None
        elif decision.what is Choice.STREAM:
            self._streams, self._end = True, self._pieces
        elif decision.what in (Choice.NO_GAIN, Choice.RESIDENT):
            self.judged = None


def course(bed: Bed, share: float, warmed: bool, seed: int = 0) -> list[tuple[float, int]]:
    """(seconds, bytes read) after each touch, of which the last is that of this share of the pages;
    ``warmed``: with bulk warm."""
    pages = bed.file_bytes // PAGE
    link, now, found = Link(bed), 0.0, []
    service = Streaming(bed, link)
    for page in random.Random(seed).sample(range(pages), round(share * pages)):
        service.until(now)
        service.touches += 1
        if warmed and service.touches == KNOWN_TOUCHES:  # three single reads come first
            service.judged = now + 3 * (bed.miss_seconds + TURN_SECONDS)
        piece = page * PAGE // PIECE_BYTES
        due = link.due.get(piece)
        now = max(now, link.ask(piece, now) if due is None else due)
        found.append((now, link.read_bytes))
    return found
