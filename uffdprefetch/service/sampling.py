# SPDX-License-Identifier: Apache-2.0
"""What a watcher wants to see and nobody else needs: rates of the last seconds, a history of the
last minutes, and counts that are too dear to be made at once.

Two paces. :meth:`Sampling.tick` runs once a second in every run, a sum over what is in memory
anyway, so that a watcher that comes late sees the last minutes. The slow pass (residency, unused
blocks) runs only while somebody watches, in pieces of a few milliseconds at most, and takes at most
one part in COST of a core. Neither writes into the books of the run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from uffdprefetch.base.clock import MS
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import uffd
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.protocol.snapshot import PoolActivity, PoolHit
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.warm.scheduler import Scheduler

if TYPE_CHECKING:  # a service without a pool does without numpy
    from uffdprefetch.native.pool import PoolCounts
    from uffdprefetch.pool.node_pool import NodePool
    from uffdprefetch.state.pool_file import PoolFile

#: One a second: three minutes of it are kept.
HISTORY_TICKS = 180
#: A watcher's first question takes a sample, too: one that follows at once is no rate.
TICK_LEAST_NS = 500 * MS
#: Ticks over which counts of a rank or the pool are compared: a batch must not look like a phase.
RANK_TICKS = 10
RANKS_MAX = 256
#: Separate stretches that are remembered of one rank in one file: a stream has one.
STRETCHES_MAX = 1024
#: The slow pass: cachestat counts a GiB in 2.4 ms, mincore in 12 ms (docs/facts.md) ...
RESIDENT_PIECE_BYTES = 256 << 20
#: ... and a MiB of block books, which stands for 64 GiB of a file, is counted in about 1 ms.
BLOCKS_PIECE = 1 << 20
PASS_EVERY_NS = 2000 * MS
PIECE_EVERY_NS = 20 * MS
COST = 50
#: Time for counting at a watcher's first question: small files are in the first answer.
FIRST_PASS_NS = 5 * MS
#: Without a question for this long nobody watches.
WATCHED_NS = 10_000 * MS
POOL_SENSOR = (
    "exact, from the pool's own books, a second old at most; hit: faults of all processes that "
    "found their chunk there, of all that reached the pool (a page that is mapped already does not "
    "fault)"
)


@dataclass(frozen=True)
class RankTick:
    """Running totals of a rank at one time."""

    at_ns: int
    misses: int
    touched_bytes: int


@dataclass
class RankTrack:
    """One rank over the last seconds. ``passed``: stretches walked over, by file."""

    ticks: deque[RankTick] = field(default_factory=lambda: deque(maxlen=RANK_TICKS + 1))
    touched_bytes: int = 0
    passed: dict[Key, IntervalSet] = field(default_factory=dict)
    wasted_bytes: dict[Key, int] = field(default_factory=dict)  # by the slow pass


@dataclass(frozen=True)
class Counted:
    """What the slow pass found out about a file. ``resident_bytes`` None: ``sensor`` says why.

    Of what was prefetched ``unused_bytes`` are in nobody's page table, ``wasted_bytes`` of them lie
    where readers have passed, and the others are ``used_bytes``.
    """

    at_ns: int
    resident_bytes: int | None
    sensor: str
    used_bytes: int
    unused_bytes: int
    wasted_bytes: int | None  # nobody was seen to pass
    demand_bytes: int


class HistoryTick(NamedTuple):
    """One second of the node: bytes/s, bytes/s, major faults/s."""

    prefetch_bytes_per_second: int
    reader_bytes_per_second: int
    misses_per_second: float


class PoolTrack:
    """The pool over the last seconds. Its counters are 8 KiB: read once a second, not at every
    question."""

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._ticks: deque[tuple[int, PoolCounts]] = deque(maxlen=RANK_TICKS + 1)

    def tick(self, now: int) -> None:
        """Once a second."""
        self._ticks.append((now, self._pool.pool.counts()))

    def resident_bytes(self, part: PoolFile) -> int:
        """Of a file, what is in the pool now."""
        return self._pool.pool.file_counts(part.number).resident_bytes

    def snapshot(self, now: int) -> PoolActivity:
        """The ``pool`` of the snapshot."""
        if not self._ticks:
            self.tick(now)
        (began, first), (ended, last) = self._ticks[0], self._ticks[-1]
        seconds = (ended - began) / 1e9

        def rate(difference: int) -> int | None:
            return round(difference / seconds) if seconds else None

        rate_seconds = round(seconds, 1) if seconds else None
        faults = last.faults - first.faults
        hits = last.present_faults - first.present_faults
        why = None if faults else "no fault in that time"
        return PoolActivity(
            **vars(self._pool.state(last)),
            read_bytes_per_second=rate(last.read_bytes - first.read_bytes),
            evicted_bytes_per_second=rate(last.evicted_bytes - first.evicted_bytes),
            rate_seconds=rate_seconds,
            hit=PoolHit(hits / faults if faults else None, faults, rate_seconds, why),
            sensor=POOL_SENSOR,
        )


class SlowPass:
    """What is known of files once each has been looked at, piece by piece."""

    def __init__(
        self, files: dict[Key, FileState], ranks: dict[int, RankTrack],
        passed: dict[Key, IntervalSet],
    ) -> None:  # fmt: skip
        """``passed``: what any rank has walked over."""
        self._files, self._ranks, self._passed = files, ranks, passed
        self.counted: dict[Key, Counted] = {}
        self._pass: Iterator[None] | None = None
        self._pass_began_ns = 0
        self._asked_ns = 0
        self.due_ns = 0  # of the next piece; 0: nothing to do

    def asked(self, now: int) -> None:
        """A watcher wants a snapshot: keep the slow counts fresh for a while."""
        if now - self._asked_ns > WATCHED_NS:  # what was counted for who has gone is old
            self.counted.clear()
            self._pass = None
        first = not self.counted and self._pass is None
        self._asked_ns = now
        if not self.due_ns:
            self.due_ns = now
        began = time.monotonic_ns()
        while first and time.monotonic_ns() - began < FIRST_PASS_NS and not self.counted_all:
            self.due_ns = 0
            self.step(now)

    @property
    def counted_all(self) -> bool:
        """Whether the slow pass has seen every file that is open."""
        return all(key in self.counted for key, f in self._files.items() if f.opened.fd >= 0)

    def step(self, now: int) -> None:
        """One piece of the slow pass, when it is due."""
        if now < self.due_ns:
            return
        if now - self._asked_ns > WATCHED_NS:
            self.due_ns, self._pass = 0, None
            return
        began = time.thread_time_ns()
        if self._pass is None:
            self._pass, self._pass_began_ns = self._pieces(), now
        try:
            next(self._pass)
            rest = PIECE_EVERY_NS
        except StopIteration:
            self._pass = None
            rest = max(PIECE_EVERY_NS, self._pass_began_ns + PASS_EVERY_NS - now)
        self.due_ns = now + max(rest, COST * (time.thread_time_ns() - began))

    def _pieces(self) -> Iterator[None]:
        """One pass over all files, those that are mapped first."""
        for file in sorted(self._files.values(), key=lambda f: -f.mappings.attached):
            known, sensor = yield from self._resident(file)
            if file.opened.fd < 0:  # closed meanwhile
                continue
            used = unused = demand = 0
            for a in range(0, len(file.blocks.flags), BLOCKS_PIECE):
                counts = file.blocks.counts(a, a + BLOCKS_PIECE)
                used, unused, demand = used + counts[0], unused + counts[1], demand + counts[2]
                yield
            passed, marked = self._passed.get(file.key), used + unused
            wasted = yield from self._unused_in(file, passed)
            used, unused, wasted = (
                file.account.of_prefetched(part, marked) for part in (used, unused, wasted)
            )
            self.counted[file.key] = Counted(
                time.monotonic_ns(), known, sensor, used, unused,
                wasted if passed else None, demand,
            )  # fmt: skip
            for track in list(self._ranks.values()):
                stretches = track.passed.get(file.key)
                if stretches is not None:
                    behind = yield from self._unused_in(file, stretches)
                    part = file.account.of_prefetched(behind, marked)
                    track.wasted_bytes[file.key] = part

    def _resident(self, file: FileState) -> Generator[None, None, tuple[int | None, str]]:
        """Returns what uffd.resident_bytes() says of the whole file."""
        resident, sensor = 0, ""
        for at in range(0, file.size_bytes, RESIDENT_PIECE_BYTES):
            if file.opened.fd < 0:
                break
            length = min(RESIDENT_PIECE_BYTES, file.size_bytes - at)
            known, sensor = uffd.resident_bytes(file.opened.fd, at, length)
            if known is None:
                return None, sensor
            resident += known
            yield
        return resident, sensor

    def _unused_in(
        self, file: FileState, stretches: IntervalSet | None
    ) -> Generator[None, None, int]:
        """Returns the bytes within the stretches that were prefetched and are unused."""
        found = counted = 0
        for start, end in list(stretches or ()):
            # whole blocks only: the one that the reader stands in is not behind it yet
            first, last = -(-start // BLOCK_BYTES), end // BLOCK_BYTES
            for a in range(first, last, BLOCKS_PIECE):
                b = min(last, a + BLOCKS_PIECE)
                found += file.blocks.unused_bytes(a, b)
                counted += b - a
                if counted >= BLOCKS_PIECE:
                    counted = 0
                    yield
        return found


class ReadByAnybody:
    """Bytes that the job's readers came to. Of streams all that they go over is known, in each
    epoch; who jumps about is on none: blocks tell of that, when it is come to first."""

    def __init__(
        self, files: dict[Key, FileState], small_bytes: Callable[[], tuple[int, int]]
    ) -> None:
        self._files, self._small_bytes = files, small_bytes
        self._blocks: dict[Key, int] = {}
        self._on_streams = self._bytes = 0

    def count(self, on_streams: int) -> tuple[int, int]:
        """What was read ahead of small files so far, and what was read by anybody;
        ``on_streams``: bytes that streams have gone over."""
        blocks = {key: file.blocks.used.blocks for key, file in self._files.items()}
        new = sum(max(0, count - self._blocks.get(key, 0)) for key, count in blocks.items())
        self._bytes += max(on_streams - self._on_streams, new * BLOCK_BYTES)
        self._blocks, self._on_streams = blocks, on_streams
        small_read, small_used = self._small_bytes()
        return small_read, self._bytes + small_used


class Sampling:
    """Samples of a run; the service's thread calls everything here."""

    def __init__(
        self, files: dict[Key, FileState], clients: dict[int, Client], scheduler: Scheduler,
        ledger: Ledger, small_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:  # fmt: skip
        """``small_bytes``: of small files, what was read ahead, and what of that was opened."""
        self._files, self._clients = files, clients
        self._read = ReadByAnybody(files, small_bytes)
        self._scheduler = scheduler
        self._ledger = ledger
        self.ranks: dict[int, RankTrack] = {}
        self.history: deque[HistoryTick] = deque(maxlen=HISTORY_TICKS)
        self.ticked_ns = 0
        self._touched: dict[tuple[int, Key, int], int] = {}  # stream -> its bytes at the last tick
        self._passed: dict[Key, IntervalSet] = {}  # by any rank
        self._totals = (0, 0, 0)
        self.slow = SlowPass(files, self.ranks, self._passed)

    # -------------------------------------------------------------- once a second

    def tick(self, now: int) -> None:
        """Take a sample of everything that is counted in memory."""
        self._follow_streams()
        faults = dict(self._ledger.jobs.missed_blocks)
        for process in self._ledger.processes.all():
            rank = process.rank
            faults[rank] = faults.get(rank, 0) + process.watched.misses
        for rank, count in faults.items():
            track = self._track(rank)
            if track is not None:
                track.ticks.append(RankTick(now, count, track.touched_bytes))
        self._note_history(now, sum(faults.values()))
        for books in (self.slow.counted, self._passed):
            for key in [k for k in books if k not in self._files]:
                del books[key]

    def _track(self, rank: int) -> RankTrack | None:
        track = self.ranks.get(rank)
        if track is None and len(self.ranks) < RANKS_MAX:
            track = self.ranks[rank] = RankTrack()
        return track

    def _follow_streams(self) -> None:
        seen: dict[tuple[int, Key, int], int] = {}
        for client in self._clients.values():
            track = self._track(client.rank)
            if track is None:
                continue
            for reader in client.readers.values():
                for stream in reader.table.streams:
                    name = (client.pid, reader.file.key, stream.id)
                    seen[name] = stream.passed.touched_bytes
                    more = stream.passed.touched_bytes - self._touched.get(name, 0)
                    track.touched_bytes += max(0, more)
                    if stream.active:
                        low, high = sorted((stream.start_bytes, stream.position_bytes))
                        for books in (track.passed, self._passed):
                            stretches = books.setdefault(reader.file.key, IntervalSet())
                            if len(stretches) < STRETCHES_MAX:
                                stretches.add(low, high)
        self._touched = seen
        for track in self.ranks.values():
            for key in [k for k in track.passed if k not in self._files]:
                del track.passed[key]
                track.wasted_bytes.pop(key, None)

    def _note_history(self, now: int, faults: int) -> None:
        if now - self.ticked_ns < TICK_LEAST_NS:
            return
        on_streams = sum(track.touched_bytes for track in self.ranks.values())
        small_read, read = self._read.count(on_streams)
        totals = (self._scheduler.results.prefetched_bytes + small_read, read, faults)
        if self.ticked_ns:
            seconds = max(1e-3, (now - self.ticked_ns) / 1e9)
            a, b, c = (max(0, n - o) / seconds for n, o in zip(totals, self._totals, strict=True))
            self.history.append(HistoryTick(round(a), round(b), round(c, 1)))
        self._totals, self.ticked_ns = totals, now

    def columns(self) -> Iterator[tuple[float, ...]]:
        """The history by its three values, each from the oldest to the latest."""
        return (tuple(tick[i] for tick in self.history) for i in range(3))
