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


class _Events:
    """What happens next: (when, thread); thread -1 is _Replay.pump()."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []
        self._count = 0

    def at(self, when: float, thread: int) -> None:
        """Schedule one."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, thread))

    def next(self) -> tuple[float, int]:
        """The earliest; of one time the first that was scheduled."""
        when, _, thread = heapq.heappop(self._heap)
        return when, thread


class _Thread:
    """A thread of the job: which access it is in, and at which page of it."""

    def __init__(self, number: int, accesses: ThreadAccesses) -> None:
        self.number, self.accesses = number, accesses
        self.thinks: list[float] = (accesses.think_ns / 1e9).tolist()
        self.turn = self.place = 0
        self.waited = False  # for the page at which it continues
        self.answering = 0.0  # seconds that answering its touches takes
        # (access, the page up to which, or down to which, its chunks are counted)
        self.counted = -1, 0
        self.stall = self.end = 0.0

    def begin(self, turn: int, pages: int) -> None:
        """An access, in a file of so many pages."""
        self.turn = turn
        self.place = int(self.accesses.first[turn])
        if self.accesses.down[turn]:
            self.place = min(int(self.accesses.end[turn]), pages) - 1

    def answered(self, now: float) -> float:
        """When what it has touched is answered."""
        until = now + self.answering
        self.answering = 0.0
        self.stall += until - now
        return until

    def uncounted(self, first: int, end: int) -> tuple[int, int]:
        """Of touched pages those whose chunks do not count yet: each chunk counts once an access,
        however many parts its pages are touched in."""
        (counted, edge), down = self.counted, self.accesses.down[self.turn]
        if counted == self.turn:
            first, end = (first, min(end, edge)) if down else (max(first, edge), end)
        if first < end:
            edge = first if down else end + CHUNK_PAGES - 1
            self.counted = self.turn, edge // CHUNK_PAGES * CHUNK_PAGES
        return first, end


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
        self.events = _Events()
        self.threads = [_Thread(number, one) for number, one in enumerate(demand.streams)]
        self.misses = self.hit_pages = self.touched_pages = 0
        self.pumped = -1.0

    def run(self) -> ReplayOutcome:
        self.policy.begin(self.demand, self.link.storage, self.resident)
        for thread in self.threads:
            self._begin(thread, 0)
            self.events.at(thread.thinks[0], thread.number)
        running = len(self.threads)
        while running:
            now, number = self.events.next()
            if number >= 0:
                running -= self._go_on(self.threads[number], now)
            self._pump(now, number < 0)
        page = self.demand.page_bytes
        return ReplayOutcome(
            max(thread.end for thread in self.threads),
            max(thread.stall for thread in self.threads),
            self.misses,
            self.hit_pages * page,
            self.touched_pages * page,
            self.link.read_bytes,
            self.link.requests,
        )

    def _go_on(self, thread: _Thread, now: float) -> bool:
        """A thread touches what it comes to; whether that was its end."""
        until = self._touch(thread, now)
        answered = thread.answered(now)
        if until is not None:
            when = max(answered, until)
            thread.stall += when - answered
            self.events.at(when, thread.number)
        elif thread.turn + 1 < len(thread.accesses):
            self._begin(thread, thread.turn + 1)
            self.events.at(answered + thread.thinks[thread.turn], thread.number)
        else:
            thread.end = answered + thread.accesses.tail_ns / 1e9
            return True
        return False

    def _begin(self, thread: _Thread, turn: int) -> None:
        thread.begin(turn, len(self.resident.ready[int(thread.accesses.file[turn])]))

    def _touch(self, thread: _Thread, now: float) -> float | None:
        """Continue a thread's access; when to go on with it if it has to wait."""
        stream, k = thread.accesses, thread.turn
        file, down = int(stream.file[k]), bool(stream.down[k])
        of_file = self.resident.ready[file]
        if thread.waited:
            # Its page has arrived, even if it is evicted by now.
            thread.waited = False
            self._touched_pages(thread, file, thread.place, thread.place + 1, now)
            thread.place += -1 if down else 1
        place = thread.place
        if down:
            rest = of_file[int(stream.first[k]) : place + 1][::-1]
        else:
            rest = of_file[place : int(stream.end[k])]
        late = np.flatnonzero(rest > now)
        there = int(late[0]) if len(late) else len(rest)
        if there:
            low = place - there + 1 if down else place
            self.hit_pages += there
            self._touched_pages(thread, file, low, low + there, now)
            thread.place = place = place - there if down else place + there
        if not len(late):
            return None
        when = float(of_file[place])
        if np.isinf(when):
            self.misses += 1
            self._read(self.policy.on_miss(thread.number, k, file, place, now), now, None)
            when = float(of_file[place])
            if np.isinf(when):  # evicted by its own request
                when = self.link.free + self.link.storage.latency
        else:
            self.policy.on_wait(thread.number, k, file, place, now)
        thread.waited = True
        return when

    def _touched_pages(self, thread: _Thread, file: int, first: int, end: int, now: float) -> None:
        k = thread.turn
        thread.answering += self.policy.on_touch(thread.number, k, file, first, end, now)
        self.touched_pages += end - first
        if self.eviction is not None:
            first, end = thread.uncounted(first, end)
            if first < end:
                self.eviction.access(file, first, end)

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
                self.events.at(self.pumped, -1)
            return
        due = self.policy.due(now)
        if due is not None and (is_pump or self.pumped <= now or due < self.pumped):
            self.pumped = max(due, now + 1e-6)
            self.events.at(self.pumped, -1)


def replay(
    demand: Demand,
    storage: StorageModel,
    policy: ReplayPolicy,
    eviction: EvictionPolicy | None = None,
) -> ReplayOutcome:
    """Play ``demand`` through ``policy``. ``eviction``: None where memory holds everything."""
    return _Replay(demand, storage, policy, eviction).run()
