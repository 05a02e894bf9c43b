# SPDX-License-Identifier: Apache-2.0
"""Event-driven replay of a job's accesses with a policy and a link. Pure.

A thread touches the pages of an access in order, upwards or downwards. A resident page costs
nothing; one in flight is waited for; any other is a demand miss, and the policy says what is read
with it. Prefetches are
issued while the link's backlog is below its depth, as in the service's scheduler, so that a miss
does not queue behind megabytes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import of_mask
from uffdprefetch.sim.replay.demand import Demand, ThreadAccesses
from uffdprefetch.sim.replay.eviction import CHUNK_PAGES, EvictionPolicy
from uffdprefetch.sim.replay.link import StorageModel, StorageQueue

#: Backlog of prefetches on the link: this many latencies, at least this long.
DEPTH_LATENCIES, DEPTH_SECONDS = 2.0, 0.002
ABSENT = np.inf
#: (file, first page, page after the last)
Range = tuple[int, int, int]


class ReplayPolicy(Protocol):
    """Decides what is read, and when. The engine clips ranges to the file."""

    request_bytes: int  # of prefetches
    paced: bool  # it limits its bytes in flight itself

    def begin(self, demand: Demand, storage: StorageModel, resident: Resident) -> None:
        """Before the first access."""

    def on_miss(self, stream: int, access: int, file: int, page: int, now: float) -> Range:
        """The range read on a thread's demand miss of ``page`` in its access; it contains the
        page."""

    def on_wait(self, stream: int, access: int, file: int, page: int, now: float) -> None:
        """A thread begins to wait for a page of its access that has been requested."""

    def on_touch(
        self, stream: int, access: int, file: int, first: int, end: int, now: float
    ) -> float:
        """A thread has touched these pages of its access, ``now`` seconds after the start. Returns
        the seconds that mapping them took, beyond the kernel's."""

    def on_evict(self, file: int, first: int, end: int) -> None:
        """These pages have been evicted."""

    def next_range(self, now: float) -> Range | None:
        """The next range to prefetch; None for nothing now. Called until then."""

    def on_request(self, wanted: Range, now: float, until: float) -> None:
        """Its range has been requested, and arrives at ``until``."""

    def due(self, now: float) -> float | None:
        """When to call next_range() without an event; None: not before one."""


class Resident:
    """Arrival times of pages; ABSENT where not requested."""

    def __init__(self, demand: Demand) -> None:
        self.ready: list[Array] = [
            np.full(demand.pages(f), ABSENT) for f in range(len(demand.files))
        ]

    def missing(self, wanted: Range) -> Range | None:
        """``wanted`` without resident or in-flight pages at its ends; None when none is absent."""
        file, first, end = wanted
        absent = np.flatnonzero(np.isinf(self.ready[file][max(0, first) : end]))
        if not len(absent):
            return None
        low = max(0, first)
        return file, low + int(absent[0]), low + int(absent[-1]) + 1


@dataclass
class ReplayOutcome:
    """Result of a policy. Bytes are of whole pages."""

    seconds: float
    stall_seconds: float  # of the thread that waited longest
    misses: int  # demand misses
    hit_bytes: int  # touched and resident
    touched_bytes: int
    read_bytes: int
    requests: int

    @property
    def hits(self) -> float:
        """Share of the touched bytes that were resident."""
        return self.hit_bytes / max(1, self.touched_bytes)


class _Replay:
    def __init__(
        self,
        demand: Demand,
        storage: StorageModel,
        policy: ReplayPolicy,
        eviction: EvictionPolicy | None,
    ) -> None:
        self.demand, self.policy, self.eviction = demand, policy, eviction
        self.link = StorageQueue(storage)
        self.resident = Resident(demand)
        self.depth = max(DEPTH_SECONDS, DEPTH_LATENCIES * storage.latency)
        self.events: list[tuple[float, int, int]] = []
        self.count = 0
        self.misses = self.hit_pages = self.touched_pages = 0
        # Threads that wait for the page at which they continue.
        self.waited = [False] * len(demand.streams)
        # Seconds that answering a thread's touches takes.
        self.answering = [0.0] * len(demand.streams)
        # (access, the page up to which, or down to which, its chunks are counted)
        self.counted = [(-1, 0)] * len(demand.streams)

    def at(self, when: float, stream: int) -> None:
        """Schedule an event; stream -1 is _pump()."""
        self.count += 1
        heapq.heappush(self.events, (when, self.count, stream))

    def run(self) -> ReplayOutcome:
        streams = self.demand.streams
        thinks = [(s.think_ns / 1e9).tolist() for s in streams]
        turn, place = [0] * len(streams), [self._begin(s, 0) for s in streams]
        stalls, ends = [0.0] * len(streams), [0.0] * len(streams)
        self.pumped = -1.0
        self.policy.begin(self.demand, self.link.storage, self.resident)
        for number, think in enumerate(thinks):
            self.at(think[0], number)
        running = len(streams)
        while running:
            now, _, number = heapq.heappop(self.events)
            if number >= 0:
                stream, k = streams[number], turn[number]
                until = self._touch(number, stream, k, place[number], now)
                answered = now + self.answering[number]
                self.answering[number] = 0.0
                stalls[number] += answered - now
                if until is not None:
                    when, place[number] = max(answered, until[0]), until[1]
                    stalls[number] += when - answered
                    self.at(when, number)
                elif k + 1 < len(stream):
                    turn[number] = k + 1
                    place[number] = self._begin(stream, k + 1)
                    self.at(answered + thinks[number][k + 1], number)
                else:
                    ends[number] = answered + stream.tail_ns / 1e9
                    running -= 1
            self._pump(now, number < 0)
        page = self.demand.page_bytes
        return ReplayOutcome(
            max(ends),
            max(stalls),
            self.misses,
            self.hit_pages * page,
            self.touched_pages * page,
            self.link.read_bytes,
            self.link.requests,
        )

    def _begin(self, stream: ThreadAccesses, k: int) -> int:
        """The page at which an access begins."""
        if not stream.down[k]:
            return int(stream.first[k])
        return min(int(stream.end[k]), len(self.resident.ready[int(stream.file[k])])) - 1

    def _touch(
        self, number: int, stream: ThreadAccesses, k: int, place: int, now: float
    ) -> tuple[float, int] | None:
        """Continue an access at page ``place``; (time, page) to continue at if it has to wait."""
        file, down = int(stream.file[k]), bool(stream.down[k])
        of_file = self.resident.ready[file]
        if self.waited[number]:
            # Its page has arrived, even if it is evicted by now.
            self.waited[number] = False
            self._touched_pages(number, k, file, place, place + 1, now)
            place += -1 if down else 1
        if down:
            rest = of_file[int(stream.first[k]) : place + 1][::-1]
        else:
            rest = of_file[place : int(stream.end[k])]
        late = np.flatnonzero(rest > now)
        there = int(late[0]) if len(late) else len(rest)
        if there:
            low = place - there + 1 if down else place
            self.hit_pages += there
            self._touched_pages(number, k, file, low, low + there, now)
            place += -there if down else there
        if not len(late):
            return None
        when = float(of_file[place])
        if np.isinf(when):
            self.misses += 1
            self._read(self.policy.on_miss(number, k, file, place, now), now, None)
            when = float(of_file[place])
            if np.isinf(when):  # evicted by its own request
                when = self.link.free + self.link.storage.latency
        else:
            self.policy.on_wait(number, k, file, place, now)
        self.waited[number] = True
        return when, place

    def _touched_pages(
        self, number: int, k: int, file: int, first: int, end: int, now: float
    ) -> None:
        self.answering[number] += self.policy.on_touch(number, k, file, first, end, now)
        self.touched_pages += end - first
        if self.eviction is not None:
            # Each chunk counts once an access, however many parts its pages are touched in.
            (counted, edge), down = self.counted[number], self.demand.streams[number].down[k]
            if counted == k:
                first, end = (first, min(end, edge)) if down else (max(first, edge), end)
            if first < end:
                self.eviction.access(file, first, end)
                edge = first if down else end + CHUNK_PAGES - 1
                self.counted[number] = k, edge // CHUNK_PAGES * CHUNK_PAGES

    def _read(self, wanted: Range, now: float, request_bytes: int | None) -> float:
        """Request the absent pages of a range, ``request_bytes`` at a time. Returns when all of it
        is resident."""
        file, first, end = wanted
        ready = self.resident.ready[file]
        first, end = max(0, first), min(end, len(ready))
        absent = of_mask(np.isinf(ready[first:end]))
        page = self.demand.page_bytes
        step = (end - first) if request_bytes is None else max(1, request_bytes // page)
        for a, b in zip(*((edge + first).tolist() for edge in absent), strict=True):
            for low in range(a, b, step):
                high = min(b, low + step)
                ready[low:high] = self.link.request((high - low) * page, now)
                if self.eviction is not None:
                    for gone in self.eviction.insert(file, low, high, self.resident.ready):
                        self.policy.on_evict(*gone)
        asked = ready[first:end]
        return float(max(now, asked[np.isfinite(asked)].max(initial=now)))

    def _pump(self, now: float, is_pump: bool) -> None:
        """Issue prefetches while the link's backlog is below the depth; reschedule itself."""
        while self.policy.paced or self.link.backlog(now) < self.depth:
            wanted = self.policy.next_range(now)
            if wanted is None:
                break
            self.policy.on_request(wanted, now, self._read(wanted, now, self.policy.request_bytes))
        else:
            if is_pump or self.pumped <= now:
                self.pumped = now + max(1e-5, self.link.backlog(now) - self.depth / 2)
                self.at(self.pumped, -1)
            return
        due = self.policy.due(now)
        if due is not None and (is_pump or self.pumped <= now or due < self.pumped):
            self.pumped = max(due, now + 1e-6)
            self.at(self.pumped, -1)


def replay(
    demand: Demand,
    storage: StorageModel,
    policy: ReplayPolicy,
    eviction: EvictionPolicy | None = None,
) -> ReplayOutcome:
    """Play ``demand`` through ``policy``. ``eviction``: None where memory holds everything."""
    return _Replay(demand, storage, policy, eviction).run()
