# SPDX-License-Identifier: Apache-2.0
"""Replay policies: the kernel by itself, and `wrap` with fixed windows and known orders. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.predict import window
from uffdprefetch.predict.storage import Storage
from uffdprefetch.predict.streams import Rate
from uffdprefetch.sim.replay.demand import READ_AHEAD_BYTES, Demand, read_ahead_pages
from uffdprefetch.sim.replay.engine import Range, Resident
from uffdprefetch.sim.replay.eviction import CHUNK_PAGES
from uffdprefetch.sim.replay.link import StorageModel

#: Most bytes that a demand miss in a pool reads (csrc/service/pool/pool_faults.c).
DEMAND_MAX_BYTES = 128 << 10
#: Half as many misses at new places of a file tell whether a second chunk is to come with each, and
#: after so many those before count half; one in so many is asked again (the same).
BEGUN, ASKED_AGAIN = 32, 8
#: Most bytes that a touch in a pool maps, and the fraction of the pool (pool/node_pool.py).
RUN_MAX_BYTES, MAP_SHARE = 4 << 20, 64
#: Share of a reader's sequential bytes (one in this many) that is mapped ahead of it.
AHEAD_PART = 4
#: Latency of a touch that a pool answers, with another process busy (measured: docs/benchmarks.md,
#: a touched checkpoint).
ANSWER_SECONDS = 36e-6
#: Sequential bytes after which a window starts: the service's first checkpoints.
WALK_BYTES = 1 << 20
#: Distance of checkpoints in a settled stream.
DISTANCE_BYTES = 8 << 20
#: Greatest gap within a stream: records of other ranks lie between.
NEAR_BYTES = 1 << 20


def measured(storage: StorageModel) -> Storage:
    """As the service's meter measures it (warm/meter.py)."""
    return Storage(storage.bandwidth, storage.latency)


class Plain:
    """mmap without wrap: a miss brings what it brought in the recording, or else read-around, and
    another window is read when its mark is touched (mm/filemap.c, do_sync_mmap_readahead and
    do_async_mmap_readahead)."""

    request_bytes = READ_AHEAD_BYTES
    paced = False

    def on_request(self, wanted: Range, now: float, until: float) -> None:
        """Unused."""

    def due(self, now: float) -> float | None:
        """The kernel acts on faults only."""
        return None

    def begin(self, demand: Demand, storage: StorageModel, resident: Resident) -> None:
        self.resident, self.streams = resident, demand.streams
        self.around = [read_ahead_pages(file, demand.page_bytes) for file in demand.files]
        self.marks: list[dict[int, int]] = [{} for _ in demand.files]  # page -> window's end
        self.queue: deque[Range] = deque()

    def on_miss(self, stream: int, access: int, file: int, page: int, now: float) -> Range:
        around, one = self.around[file], self.streams[stream]
        before, after = int(one.before[access]), int(one.after[access])
        first = max(0, page - (before if after else around // 2))
        end = page + after if after else max(page + 1, first + around)
        # the mark lies a quarter of a window before the end, and not where the miss is
        mark = end - max(1, around // 4)
        if mark > page:
            self.marks[file][mark] = end
        return file, first, end

    def on_touch(
        self, stream: int, access: int, file: int, first: int, end: int, now: float
    ) -> float:
        one = self.streams[stream]
        if not one.goes_on[access]:  # of its access the page that faulted alone is sure
            page = int(one.end[access]) - 1 if one.down[access] else int(one.first[access])
            first, end = max(first, page), min(end, page + 1)
        self._pass_marks(file, first, end)
        return 0.0

    def on_wait(self, stream: int, access: int, file: int, page: int, now: float) -> None:
        self._pass_marks(file, page, page + 1)  # a mark counts before its page is there

    def _pass_marks(self, file: int, first: int, end: int) -> None:
        marks = self.marks[file]
        for page in (
            [p for p in marks if first <= p < end]
            if len(marks) < end - first
            else [p for p in range(first, end) if p in marks]
        ):
            start = marks.pop(page)
            after = start + self.around[file]
            marks[start] = after
            self.queue.append((file, start, after))

    def on_evict(self, file: int, first: int, end: int) -> None:
        """Unused."""

    def next_range(self, now: float) -> Range | None:
        while self.queue:
            wanted = self.resident.missing(self.queue.popleft())
            if wanted is not None:
                return wanted
        return None


class ReplayWindows(Plain):
    """`--policy fixed`: ``size`` bytes ahead of each sequential thread; the next window once it is
    past ``threshold`` of them, as observed at checkpoints ``distance`` bytes apart. Misses are the
    kernel's."""

    def __init__(
        self,
        size_bytes: int,
        distance_bytes: int = DISTANCE_BYTES,
        threshold: float = 0.75,
        request_bytes: int = 1 << 20,
    ) -> None:
        self.size_bytes, self.distance_bytes = size_bytes, distance_bytes
        self.threshold, self.request_bytes = threshold, request_bytes

    def begin(self, demand: Demand, storage: StorageModel, resident: Resident) -> None:
        super().begin(demand, storage, resident)
        self.page = demand.page_bytes
        self.size = max(1, self.size_bytes // self.page)
        self.distance = max(1, self.distance_bytes // self.page)
        self.begun = [-1] * len(demand.streams)  # where the stream began
        self.last = [(-1, -1)] * len(demand.streams)  # (file, page after the last touched)
        self.upto = [0] * len(demand.streams)  # end of its window
        self.next: list[int] = [0] * len(demand.streams)  # the page that triggers the next

    def on_touch(
        self, stream: int, access: int, file: int, first: int, end: int, now: float
    ) -> float:
        super().on_touch(stream, access, file, first, end, now)
        self._walks(stream, file, first, end)
        return 0.0

    def _walks(self, stream: int, file: int, first: int, end: int) -> None:
        before, at = self.last[stream]
        self.last[stream] = (file, max(end, at) if before == file and first >= at - 1 else end)
        if before != file or not 0 <= first - at <= NEAR_BYTES // self.page:
            if before == file and first < at and at - first <= NEAR_BYTES // self.page:
                return  # a page of the B-tree, or the record again
            self.begun[stream], self.upto[stream], self.next[stream] = first, 0, 0
            return
        if (end - self.begun[stream]) * self.page < WALK_BYTES:
            return
        # Checkpoints are dense until a stream is settled, then ``distance`` apart.
        seen = end // self.distance * self.distance if self.upto[stream] else end
        if seen < self.next[stream]:
            return
        start = max(end, self.upto[stream])
        self.upto[stream] = max(start, end + self.size)
        self.next[stream] = self.upto[stream] - int(self.size * (1 - self.threshold))
        step = max(1, self.request_bytes // self.page)
        for low in range(start, self.upto[stream], step):
            self.queue.append((file, low, min(low + step, self.upto[stream])))


class Planned(Plain):
    """`--plan`: each thread's accesses are known and prefetched in order, as far ahead as the
    service does (predict/window.py), ``allowed_bytes`` for all threads together."""

    def __init__(self, allowed_bytes: int = 1 << 40, request_bytes: int = 1 << 20) -> None:
        self.allowed_bytes, self.request_bytes = allowed_bytes, request_bytes

    def begin(self, demand: Demand, storage: StorageModel, resident: Resident) -> None:
        super().begin(demand, storage, resident)
        self.storage = measured(storage)
        self.allowed = max(1 << 20, self.allowed_bytes // len(demand.streams))
        # Bytes of the order up to each access.
        self.before = [
            np.r_[0, np.cumsum((s.end - s.first) * demand.page_bytes)] for s in self.streams
        ]
        self.at = [0] * len(self.streams)
        self.asked = [0] * len(self.streams)
        self.rates = [Rate() for _ in self.streams]
        self.lookahead = [0] * len(self.streams)  # bytes; 0 before the thread's first access

    def _reads(self, stream: int, access: int, now: float) -> None:
        """A thread is at this access. From its first one on its order is prefetched: before, no
        file is mapped."""
        before, rate = self.before[stream], self.rates[stream]
        if access > self.at[stream] or not self.lookahead[stream]:
            rate.note(int(before[access] - before[self.at[stream]]), int(now * 1e9))
            self.at[stream] = access
            self.lookahead[stream] = min(
                window.ahead_at_rate(rate.bytes_per_second, self.storage), self.allowed
            )

    def on_miss(self, stream: int, access: int, file: int, page: int, now: float) -> Range:
        self._reads(stream, self.at[stream], now)
        return super().on_miss(stream, access, file, page, now)

    def on_touch(
        self, stream: int, access: int, file: int, first: int, end: int, now: float
    ) -> float:
        answering = super().on_touch(stream, access, file, first, end, now)
        self._reads(stream, access, now)
        return answering

    def next_range(self, now: float) -> Range | None:
        """The next range of the thread with the least ahead of it."""
        while True:
            best, least = -1, 1 << 62
            for number, stream in enumerate(self.streams):
                self.asked[number] = max(self.asked[number], self.at[number])
                if self.asked[number] < len(stream):
                    ahead = int(
                        self.before[number][self.asked[number]]
                        - self.before[number][self.at[number]]
                    )
                    if ahead < min(least, self.lookahead[number]):
                        best, least = number, ahead
            if best < 0:
                return super().next_range(now)
            stream, k = self.streams[best], self.asked[best]
            self.asked[best] += 1
            wanted = self.resident.missing(
                (int(stream.file[k]), int(stream.first[k]), int(stream.end[k]))
            )
            if wanted is not None:
                return wanted


def chunked(wanted: Range) -> Range:
    """A range in whole chunks of the pool."""
    file, first, end = wanted
    return (file, first // CHUNK_PAGES * CHUNK_PAGES, -(-end // CHUNK_PAGES) * CHUNK_PAGES)


@dataclass
class NewPlaces:
    """What misses at new places of a file bring: first_run() of csrc/service/pool/pool_faults.c."""

    begun: int = 0  # they brought one chunk ...
    went_on: int = 0  # ... and the next missed after it
    paired: int = 0

    def pages(self, most: int, as_the_kernel: bool) -> int:
        """Of one more: two chunks ``as_the_kernel``; else one, or two where more than half of those
        with one went on."""
        if most < 2 * CHUNK_PAGES:
            return CHUNK_PAGES
        if as_the_kernel:
            return 2 * CHUNK_PAGES
        if self.begun >= BEGUN // 2 and 2 * self.went_on > self.begun:
            self.paired += 1
            if self.paired % ASKED_AGAIN:
                return 2 * CHUNK_PAGES
        self.begun += 1
        if self.begun > BEGUN:
            self.begun, self.went_on = self.begun // 2, self.went_on // 2
        return CHUNK_PAGES


class InPool(Plain):
    """The pool's faults: a miss reads a chunk, or two, doubling while a thread continues where its
    last miss ended (csrc/service/pool/pool_faults.c), without kernel readahead; two where there is
    room for all files, but for a page that was read alone (MADV_RANDOM). A touch of a
    resident, unmapped page maps a run of chunks, a part of what the reader has come over while it
    continues where the last run ended; that takes time (bench/faults.py), and is what the service
    observes."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.at_once = max(CHUNK_PAGES * 4096, min(RUN_MAX_BYTES, budget_bytes // MAP_SHARE))

    def begin(self, demand: Demand, storage: StorageModel, resident: Resident) -> None:
        super().begin(demand, storage, resident)
        self.page_bytes = demand.page_bytes
        self.demands: list[tuple[Range, int]] = [((-1, 0, 0), 0)] * len(demand.streams)
        self.places = [NewPlaces() for _ in demand.files]
        pages = sum(demand.pages(file) for file in range(len(demand.files)))
        self.all_fit = pages * demand.page_bytes <= self.budget_bytes
        #: Of each stream (file, page after the last run, page of the last touch, pages come over).
        self.runs = [(-1, 0, 0, 0)] * len(demand.streams)
        self.ranks = [stream.rank for stream in demand.streams]
        self.mapped: list[dict[int, Array]] = [  # of each file, by rank
            {rank: np.zeros(demand.pages(file), bool) for rank in set(self.ranks)}
            for file in range(len(demand.files))
        ]

    def on_miss(self, stream: int, access: int, file: int, page: int, now: float) -> Range:
        (of, _, reached), pages = self.demands[stream]
        first = page // CHUNK_PAGES * CHUNK_PAGES
        most = DEMAND_MAX_BYTES // self.page_bytes
        if (of, reached) == (file, first):
            self.places[file].went_on += pages == CHUNK_PAGES
            pages = min(2 * pages, most)
        else:
            one = self.streams[stream]
            alone = int(one.before[access]) == 0 and int(one.after[access]) == 1
            pages = self.places[file].pages(most, self.all_fit and not alone)
        wanted = file, first, first + pages
        self.demands[stream] = wanted, pages
        return wanted

    def on_touch(
        self, stream: int, access: int, file: int, first: int, end: int, now: float
    ) -> float:
        answering = super().on_touch(stream, access, file, first, end, now)
        touches = self._answered(stream, file, first, end, now)
        self.on_pool_touches(stream, file, touches, now)
        return answering + len(touches) * ANSWER_SECONDS

    def on_pool_touches(
        self, stream: int, file: int, touches: list[tuple[int, int]], now: float
    ) -> None:
        """The pool has answered touches of these (page, pages come over since the last one): what
        the service hears of."""

    def _answered(
        self, stream: int, file: int, first: int, end: int, now: float
    ) -> list[tuple[int, int]]:
        """The touches in [first, end) at which a thread faults."""
        mapped, ready = self.mapped[file][self.ranks[stream]], self.resident.ready[file]
        most = self.at_once // self.page_bytes
        touches = []
        while len(absent := np.flatnonzero(~mapped[first:end])):
            page = first + int(absent[0])
            chunk = page // CHUNK_PAGES * CHUNK_PAGES
            of, reached, at, over = self.runs[stream]
            goes_on = (of, reached) == (file, chunk)
            passed = chunk - at if goes_on else 0
            touches.append((page, passed))
            over = over + passed if goes_on else CHUNK_PAGES
            run = max(CHUNK_PAGES, min(most, over // AHEAD_PART) // CHUNK_PAGES * CHUNK_PAGES)
            late = np.flatnonzero(ready[chunk : chunk + run] > now)
            there = chunk + int(late[0]) if len(late) else min(chunk + run, len(ready))
            first = max(there, chunk + CHUNK_PAGES, page + 1)
            mapped[chunk:first] = True
            self.runs[stream] = file, first, chunk, over
        return touches

    def on_evict(self, file: int, first: int, end: int) -> None:
        super().on_evict(file, first, end)
        for mapped in self.mapped[file].values():
            mapped[first:end] = False


class PoolPlanned(InPool, Planned):
    """`--engine pool --plan`."""

    def __init__(self, budget_bytes: int, allowed_bytes: int) -> None:
        InPool.__init__(self, budget_bytes)
        self.allowed_bytes = allowed_bytes

    def on_miss(self, stream: int, access: int, file: int, page: int, now: float) -> Range:
        self._reads(stream, self.at[stream], now)
        return super().on_miss(stream, access, file, page, now)

    def next_range(self, now: float) -> Range | None:
        wanted = super().next_range(now)
        return None if wanted is None else chunked(wanted)
