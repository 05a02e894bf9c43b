# SPDX-License-Identifier: Apache-2.0
"""How long the job's readers wait for storage: their threads' states, looked at from time to time.

A thread that waits for a page of a file sleeps uninterruptibly (state D in /proc/PID/task/TID/stat,
mm/filemap.c); no counter that an unprivileged user may read adds that up. So states are sampled,
of each process that has a mapping of ours. Who waits for the pool is counted there, exactly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.predict.gain import ReadersTime
from uffdprefetch.state.client import Client
from uffdprefetch.state.reader import Reader

MS = 1_000_000
#: Between two samples of a process, at last, and at first: one part in YOUNG of the run so far, by
#: which a wait that was met or missed by chance is off. What samples take is one part in COST of a
#: core at most.
EVERY_NS, FIRST_NS = 50 * MS, 10 * MS
YOUNG = 32
COST = 100
#: A round over all processes is spread over turns that hold the service for no longer than this.
AT_ONCE_NS = 2 * MS
#: Threads of a process that are looked at in one sample, at 11 us each.
THREADS_MOST = 64
#: Weight of the last round of what is so lately.
LATELY = 0.2
#: A sample stands for the time since the last one, but not for a time in which the service slept:
#: it may be so much later than it was due.
LATE_NS = 3 * EVERY_NS


def thread_states(pid: int, turn: int = 0) -> str:
    """The states of a process's threads, one letter each (proc(5)); empty where it has ended.

    Of more than THREADS_MOST every n-th is looked at, in another ``turn`` others, and stands for
    the n.
    """
    states, n = [], 1
    try:
        tids = os.listdir(f"/proc/{pid}/task")
        n = max(1, -(-len(tids) // THREADS_MOST))  # of one that just ends none may be listed
        for tid in tids[turn % n :: n]:
            with open(f"/proc/{pid}/task/{tid}/stat", "rb", buffering=0) as file:
                states.append(file.read(128).rpartition(b")")[2][1:2].decode())
    except OSError:  # a thread, or all of it, has ended meanwhile
        pass
    return "".join(states) * n


def _last_touch_ns(readers: Iterable[Reader]) -> int:
    """Of all of them, as far as it was seen; 0: none."""
    return max((one.seen_ns for one in readers), default=0)


@dataclass
class Reading:
    """One process. Times in ns; ``threads``: sum over samples in which one waited of those that
    waited or ran."""

    begin_ns: int = 0
    end_ns: int = 0
    sampled_ns: int = 0
    waited_ns: float = 0.0  # of its threads that had something to do, on average
    samples: int = 0
    threads: int = 0
    waiting_share: float = 0.0  # of the last sample

    def note(self, states: str, touched_ns: int, now: int, every_ns: int = EVERY_NS) -> None:
        """A sample. ``touched_ns``: its last touch, as far as it was seen; ``every_ns``: how long
        after the one before it was due."""
        since_ns = min(now - self.sampled_ns, every_ns + LATE_NS) if self.sampled_ns else 0
        self.sampled_ns = now
        waiting, running = states.count("D"), states.count("R")
        self.waiting_share = waiting / (waiting + running) if waiting else 0.0
        if waiting:
            self.waited_ns += since_ns * self.waiting_share
            self.samples += 1
            self.threads += waiting + running
        last = now if waiting else touched_ns
        if last:
            self.begin_ns = self.begin_ns or (now - since_ns if waiting else touched_ns)
            self.end_ns = max(self.end_ns, last)

    def over(self, touched_ns: int) -> None:
        """There is no more to come; its last touch was seen since the last sample, or before."""
        if self.sampled_ns and touched_ns > max(self.sampled_ns, self.end_ns):
            since_ns = touched_ns - self.sampled_ns
            self.waited_ns += min(since_ns, EVERY_NS) * self.waiting_share
            self.end_ns = touched_ns

    @property
    def side_by_side(self) -> float:
        """Threads that read at a time."""
        return self.threads / self.samples if self.samples else 1.0

    @property
    def thread_ns(self) -> float:
        """The time of all of these."""
        return (self.end_ns - self.begin_ns) * self.side_by_side

    @property
    def waited_thread_ns(self) -> float:
        """What of that they waited."""
        return self.waited_ns * self.side_by_side


@dataclass
class _Round:
    """Over all processes."""

    left: list[tuple[int, Client]] = field(default_factory=list)  # who is still to be looked at
    number: int = 0
    since_ns: int = 0
    rests_ns: int = 0
    waiting: int = 0  # threads that wait, so far


class Waits:
    """The readers of a run. The service's thread calls everything here."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self.due_ns, self._began_ns, self._every_ns = 0, 0, FIRST_NS
        self._round = _Round()
        self._read: dict[int, tuple[Client, Reading]] = {}
        self._seen = 0  # how many there were
        self._when = IntervalSet()  # in which those have read that have ended
        self._thread_ns = self._waited_ns = 0.0  # of those
        #: Threads that wait at one time, where any does: lately.
        self.side_by_side = 1.0

    def step(self, clients: dict[int, Client]) -> None:
        """Take samples if they are due, for AT_ONCE_NS or as long as one process takes."""
        now = self._clock.now_ns()
        if now < self.due_ns:
            return
        began = self._clock.cpu_ns()
        if not self._round.left:
            self._begin_round(clients, now)
        while self._round.left and self._clock.cpu_ns() - began < AT_ONCE_NS:
            key, client = self._round.left.pop()
            readers = [one for one in client.readers.values() if one.regions]
            if not readers or clients.get(key) is not client:
                continue
            if key not in self._read:
                # its mapping has been followed since then, and the waits with it
                since_ns = min(r.mapped_ns for one in readers for r in one.regions.values())
                self._read[key] = client, Reading(sampled_ns=since_ns)
                self._seen += 1
                self._began_ns = self._began_ns or since_ns
            _, reading = self._read[key]
            touched_ns = _last_touch_ns(readers)
            states = thread_states(client.pid, self._round.number)
            reading.note(states, touched_ns, now, self._every_ns)
            self._round.waiting += states.count("D")
        rest = COST * (self._clock.cpu_ns() - began)
        self._round.rests_ns += rest
        self.due_ns = now + rest
        if not self._round.left:
            if self._round.waiting:
                self.side_by_side += (self._round.waiting - self.side_by_side) * LATELY
            self.due_ns = max(self.due_ns, self._round.since_ns + self._period_ns(now))

    def _period_ns(self, now: int) -> int:
        age_ns = now - self._began_ns if self._began_ns else 0
        return max(FIRST_NS, min(EVERY_NS, age_ns // YOUNG))

    def _begin_round(self, clients: dict[int, Client], now: int) -> None:
        for key, (client, reading) in list(self._read.items()):
            if clients.get(key) is not client:
                del self._read[key]
                self._fold(client, reading)
        self._every_ns = max(self._period_ns(now), self._round.rests_ns)
        self._round = _Round(list(clients.items()), self._round.number + 1, now)

    def _fold(self, client: Client, reading: Reading) -> None:
        reading.over(_last_touch_ns(client.readers.values()))
        if reading.end_ns > reading.begin_ns:
            self._when.add(reading.begin_ns, reading.end_ns)
            self._thread_ns += reading.thread_ns
            self._waited_ns += reading.waited_thread_ns

    def watched(self, counted_ns: int = 0) -> ReadersTime:
        """All of them, up to now, with ``counted_ns`` of waits that were counted elsewhere: where
        all was over before a second sample, each is thought to have read as long as all waited."""
        for client, reading in self._read.values():
            self._fold(client, reading)
        self._read.clear()
        if not self._when and self._seen:
            counted = counted_ns / 1e9
            return ReadersTime(counted, counted * self._seen, counted)
        return ReadersTime(
            self._when.total_bytes() / 1e9,
            self._thread_ns / 1e9,
            (self._waited_ns + counted_ns) / 1e9,
        )
