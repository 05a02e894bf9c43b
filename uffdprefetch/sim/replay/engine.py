# SPDX-License-Identifier: Apache-2.0
"""A job's accesses, event by event, through a policy and a link. Pure.

A thread touches the pages of an access in order. A page that is there costs nothing; one that is
under way is waited for; one that is neither is a demand miss, of which the policy says what is read
with it. What a policy wants ahead is asked for as long as the pipe has less than DEPTH of it to do,
as the service's scheduler does it, so that a miss does not queue behind megabytes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import of_mask
from uffdprefetch.sim.replay.demand import Demand, Stream
from uffdprefetch.sim.replay.keep import CHUNK_PAGES, Keep
from uffdprefetch.sim.replay.link import Link, Storage

#: Of what is read ahead, so many times the latency is queued for the pipe, at least so long.
DEPTH_LATENCIES, DEPTH_SECONDS = 2.0, 0.002
ABSENT = np.inf
#: (file, first page, page after the last)
Range = tuple[int, int, int]


class Policy(Protocol):
    """What is read, and when. All ranges are cut to the file by the engine."""

    request_bytes: int  # of what is read ahead
    paced: bool  # it keeps as much under way as it should itself

    def begin(self, demand: Demand, storage: Storage, resident: Resident) -> None:
        """Before the first access."""

    def miss(self, stream: int, file: int, page: int, now: float) -> Range:
        """What is read on a thread's demand miss of ``page``; it contains the page."""

    def touched(
        self, stream: int, access: int, file: int, first: int, end: int, now: float
    ) -> float:
        """A thread has come through these pages of its access, ``now`` seconds after the start.
        Returns the seconds that it took to map them for it, beyond what the kernel takes."""

    def left(self, file: int, first: int, end: int) -> None:
        """Pages have been pushed out of memory."""

    def wants(self, now: float) -> Range | None:
        """What to read ahead next; None for nothing now. It is asked again after that."""

    def requested(self, wanted: Range, now: float, until: float) -> None:
        """What it wanted has been asked for, and is there at ``until``."""

    def due(self, now: float) -> float | None:
        """When it wants to be asked though nothing happens; None: not before something does."""


class Resident:
    """Which pages are there, or when they will be."""

    def __init__(self, demand: Demand) -> None:
        self.ready: list[Array] = [
            np.full(demand.pages(f), ABSENT) for f in range(len(demand.files))
        ]

    def missing(self, wanted: Range) -> Range | None:
        """``wanted`` without what is there or under way at its ends; None when nothing is left."""
        file, first, end = wanted
        absent = np.flatnonzero(np.isinf(self.ready[file][max(0, first) : end]))
        if not len(absent):
            return None
        low = max(0, first)
        return file, low + int(absent[0]), low + int(absent[-1]) + 1


@dataclass
class Outcome:
    """What a policy would bring. Bytes are of whole pages."""

    seconds: float
    stall_seconds: float  # of the thread that waits longest
    misses: int  # demand misses
    hit_bytes: int  # touched and there
    touched_bytes: int
    read_bytes: int
    requests: int

    @property
    def hits(self) -> float:
        """Part of the touched bytes that were there when they were touched."""
        return self.hit_bytes / max(1, self.touched_bytes)


class _Replay:
    def __init__(self, demand: Demand, storage: Storage, policy: Policy, keep: Keep | None) -> None:
        self.demand, self.policy, self.keep = demand, policy, keep
        self.link = Link(storage)
        self.resident = Resident(demand)
        if keep is not None:
            keep.gone = policy.left
        self.depth = max(DEPTH_SECONDS, DEPTH_LATENCIES * storage.latency)
        self.events: list[tuple[float, int, int]] = []
        self.count = 0
        self.misses = self.hit_pages = self.touched_pages = 0
        # Threads that were waiting for the page at which they go on.
        self.waited = [False] * len(demand.streams)
        # Seconds that answering a thread's touches takes before it can go on.
        self.answering = [0.0] * len(demand.streams)
        self.told = [(-1, 0)] * len(demand.streams)  # (access, page up to which memory knows)

    def at(self, when: float, stream: int) -> None:
        """Stream -1 is the pump."""
        self.count += 1
        heapq.heappush(self.events, (when, self.count, stream))

    def run(self) -> Outcome:
        streams = self.demand.streams
        thinks = [(s.think_ns / 1e9).tolist() for s in streams]
        turn, place = [0] * len(streams), [int(s.first[0]) for s in streams]
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
                    place[number] = int(stream.first[k + 1])
                    self.at(answered + thinks[number][k + 1], number)
                else:
                    ends[number] = answered + stream.tail_ns / 1e9
                    running -= 1
            self._pump(now, number < 0)
        page = self.demand.page_bytes
        return Outcome(
            max(ends),
            max(stalls),
            self.misses,
            self.hit_pages * page,
            self.touched_pages * page,
            self.link.read_bytes,
            self.link.requests,
        )

    def _touch(
        self, number: int, stream: Stream, k: int, place: int, now: float
    ) -> tuple[float, int] | None:
        """Go through an access from ``place`` on; (when to go on, where) if it has to wait."""
        file, end = (
            int(stream.file[k]),
            min(int(stream.end[k]), len(self.resident.ready[int(stream.file[k])])),
        )
        if self.waited[number]:
            # It has got its page, whoever needs the room for it next.
            self.waited[number] = False
            self._came_through(number, k, file, place, place + 1, now)
            place += 1
        ready = self.resident.ready[file][place:end]
        late = np.flatnonzero(ready > now)
        upto = place + int(late[0]) if len(late) else end
        if upto > place:
            self.hit_pages += upto - place
            self._came_through(number, k, file, place, upto, now)
        if not len(late):
            return None
        when = float(self.resident.ready[file][upto])
        if np.isinf(when):
            self.misses += 1
            self._read(self.policy.miss(number, file, upto, now), now, None)
            when = float(self.resident.ready[file][upto])
            if np.isinf(when):  # its own request has pushed it out again
                when = self.link.free + self.link.storage.latency
        self.waited[number] = True
        return when, upto

    def _came_through(
        self, number: int, k: int, file: int, first: int, end: int, now: float
    ) -> None:
        self.answering[number] += self.policy.touched(number, k, file, first, end, now)
        self.touched_pages += end - first
        if self.keep is not None:
            # Each chunk once an access, in however many parts its pages are come through.
            told, upto = self.told[number]
            low = max(first, upto) if told == k else first
            if low < end:
                self.keep.touch(file, low, end)
                self.told[number] = k, -(-end // CHUNK_PAGES) * CHUNK_PAGES

    def _read(self, wanted: Range, now: float, request_bytes: int | None) -> float:
        """Ask for what is absent of a range, in requests of at most so many bytes; when all of it
        is there."""
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
                if self.keep is not None:
                    self.keep.add(file, low, high, self.resident.ready)
        asked = ready[first:end]
        return float(max(now, asked[np.isfinite(asked)].max(initial=now)))

    def _pump(self, now: float, is_pump: bool) -> None:
        """Ask ahead, as far as the pipe's backlog lets us; come back when it is shorter."""
        while self.policy.paced or self.link.backlog(now) < self.depth:
            wanted = self.policy.wants(now)
            if wanted is None:
                break
            self.policy.requested(wanted, now, self._read(wanted, now, self.policy.request_bytes))
        else:
            if is_pump or self.pumped <= now:
                self.pumped = now + max(1e-5, self.link.backlog(now) - self.depth / 2)
                self.at(self.pumped, -1)
            return
        due = self.policy.due(now)
        if due is not None and (is_pump or self.pumped <= now or due < self.pumped):
            self.pumped = max(due, now + 1e-6)
            self.at(self.pumped, -1)


def replay(demand: Demand, storage: Storage, policy: Policy, keep: Keep | None = None) -> Outcome:
    """What ``demand`` comes to. ``keep``: what leaves when memory is full; None: nothing leaves."""
    return _Replay(demand, storage, policy, keep).run()
