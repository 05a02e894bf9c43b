# SPDX-License-Identifier: Apache-2.0
"""Whatever is read ahead on a guess: walks, chains of steps, and files that are read whole.

One account bounds all of it (predict/price.py), one law per question says how much further a walk,
a chain or a visitor goes (predict/survival.py). Exact orders (readers/known_order.py) are no guess.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from uffdprefetch.predict.fronts import (
    AROUND_BLOCKS,
    ASKED,
    BLOCK_BYTES,
    TOUCHED,
    FileFronts,
    Front,
    State,
)
from uffdprefetch.predict.price import (
    FREE_SECONDS,
    SHARE,
    Account,
    Link,
    least_probability,
    walk_gain,
)
from uffdprefetch.predict.rate import Feedback, Rate
from uffdprefetch.predict.steps import PLACES_MAX, Steps
from uffdprefetch.predict.streams import Stream
from uffdprefetch.predict.survival import Law
from uffdprefetch.predict.visits import Visits
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.file_stream import FileStream
from uffdprefetch.readers.next_shard import NextShard
from uffdprefetch.readers.predictor import Observation, Predictor
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.reader import Reader
from uffdprefetch.state.region import Region
from uffdprefetch.warm.consumer import Consumer, FileConsumer, PrefetchRange, Priority
from uffdprefetch.warm.scheduler import Extent, Scheduler

MS = 1_000_000
#: It always knows something; whoever knows an order knows more.
CONFIDENCE = 0.1
#: What a miss brings where the kernel's readahead window is not known, and under MADV_RANDOM.
MISS_BYTES, PAGE_BYTES = 128 << 10, 4 << 10
#: The link before anything was measured: a slow one, on which a miss costs no more than its bytes.
UNKNOWN = Link(bandwidth=100e6, latency=1e-3)
#: A window grows by no less than this part of it.
STEP_PART = 8
#: The service sends the next request within so much, on a node whose cores are busy.
RESPONSE_SECONDS = 0.008
#: A guess is asked for by no more than so much at a time beside what keeps the link busy.
PIECE_BYTES = 256 << 10
#: Two looks of a walk that is young: what was touched may be told so late.
LOOK_SECONDS = 0.004
#: Whether a file is read whole is judged as often.
JUDGE_NS = 20 * MS
#: A file that is read whole and that nobody touches for as long is read no further.
QUIET_NS = 500 * MS
#: Of the touches of a file that is read whole so many must hit what was read, or it keeps pace.
HITS_LEAST = 0.25
HITS_KEPT = 0.97
#: A front that has come so far is worth a look at the file that follows.
SETTLED_BLOCKS = 64
#: How often, and by how much, the bandwidth is told: that is on the link for longer than a request
#: takes otherwise.
PROBES, PROBE_BLOCKS = 3, 16
#: Of the places that were asked for ahead of a process so many are kept: twice what is told.
PLACES_KEPT = 2 * PLACES_MAX
#: Directories and suffixes of which the laws are kept, and files.
KINDS_MAX = 1024
FILES_MAX = 4096


class Head:
    """A front, as the scheduler sees it."""

    def __init__(self, front: Front, reader: Reader, now_ns: int) -> None:
        self.front = front
        self.rank, self.reader = reader.rank, reader.pid
        self.feedback = Feedback()
        self._rate = Rate(now_ns)
        self._noted = front.position

    @property
    def direction(self) -> int:
        """See Consumer."""
        return self.front.direction

    @property
    def position_bytes(self) -> int:
        """See Consumer."""
        return self.front.position * BLOCK_BYTES

    @property
    def rate_bytes_per_second(self) -> float:
        """See Consumer."""
        return self._rate.bytes_per_second

    @property
    def last_ns(self) -> int:
        """When it went on last."""
        return self.front.last_ns

    @property
    def settled(self) -> bool:
        """Whether it has come so far that what follows its file may be what it comes to."""
        return self.front.length >= SETTLED_BLOCKS

    def moved(self, now_ns: int) -> None:
        """The front has."""
        gone = abs(self.front.position - self._noted) * BLOCK_BYTES
        self._rate.note(gone, now_ns)
        self._noted = self.front.position

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """See Consumer."""
        gone = self.rate_bytes_per_second * max(0, now_ns - self.front.last_ns) / 1e9
        return self.position_bytes + self.direction * min(int(gone), most_bytes)


class Places(FileConsumer):
    """Where a process begins next: its places come first, whatever lies between them."""

    def __init__(self, reader: Reader, scheduler: Scheduler) -> None:
        super().__init__(reader.rank, reader.pid, position_bytes=-1)
        self._scheduler = scheduler

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """See Consumer."""
        return self._scheduler.first_queued(self) or 0


@dataclass
class _Process:
    """One process in one file."""

    steps: Steps
    consumer: Places
    last: int = 0  # where it began when it was looked at before: in the middle of those places ...
    began: list[int] = field(default_factory=list)  # ... and since
    pending: list[tuple[int, int]] = field(default_factory=list)  # touched since, blocks
    places: dict[int, int] = field(default_factory=dict)  # asked for ahead of it: start -> end


@dataclass
class _File:
    """One file that is mapped."""

    file: FileState
    fronts: FileFronts
    visits: Visits
    heads: dict[Front, Head] = field(default_factory=dict)
    processes: dict[int, _Process] = field(default_factory=dict)
    touched: int = 0  # blocks
    hits: float = 0.0
    looks: float = 0.0
    judge_ns: int = 0
    touched_ns: int = 0
    stream: FileStream | None = None


class Ahead(Predictor):
    """See readers/predictor.py. The service's thread calls all of it."""

    name = "ahead"
    policies = frozenset({"survival"})

    def __init__(
        self, scheduler: Scheduler, room_bytes: Callable[[FileState], int], next_shard: NextShard
    ) -> None:
        """``room_bytes``: how much may lie ahead of one reader of a file."""
        self._scheduler, self._room_bytes = scheduler, room_bytes
        self._next_shard = next_shard
        #: How many readers wait at one time, side by side.
        self.waiting: Callable[[], float] = lambda: 1.0
        self.account = Account()
        self._walks, self._visits, self._steps = Law(), Law(), Law()
        self._kinds: dict[tuple[str, str], tuple[Law, Law]] = {}
        self._files: dict[Key, _File] = {}
        self._probed: dict[int, int] = {}  # device: how many times
        #: When a process was last seen to have missed, and where.
        self._missed: dict[int, tuple[int, Front]] = {}

    # ---- what is known --------------------------------------------------------------------------

    def _of(self, file: FileState) -> _File:
        found = self._files.get(file.key)
        if found is None or found.file is not file:
            directory, name = os.path.split(file.path)
            kind = directory, os.path.splitext(name)[1]
            laws = self._kinds.get(kind)
            if laws is None:
                if len(self._kinds) >= KINDS_MAX:
                    del self._kinds[next(iter(self._kinds))]
                laws = self._kinds[kind] = Law(self._walks), Law(self._visits)
            blocks = -(-file.size_bytes // BLOCK_BYTES)
            fronts = FileFronts(
                blocks, Law(laws[0]), self.account, lambda front: self._ending(file, front)
            )
            found = self._files[file.key] = _File(file, fronts, Visits(laws[1]))
        return found

    def _measured(self, miss_bytes: int = MISS_BYTES) -> Link:
        found, waiting = self._scheduler.meter.link, self.waiting()
        if found is None:
            return replace(UNKNOWN, waiting=waiting, miss_bytes=miss_bytes)
        bandwidth, latency = found.bandwidth_bytes_per_second, found.latency_seconds
        return Link(bandwidth, latency, waiting, miss_bytes)

    def _link(self, reader: Reader) -> Link:
        """As measured, for this reader."""
        if reader.says_random:
            return self._measured(PAGE_BYTES)
        return self._measured(reader.file.ahead_bytes or MISS_BYTES)

    # ---- what is seen ---------------------------------------------------------------------------

    def confidence(self, reader: Reader, now_ns: int) -> float:
        """See Predictor."""
        return CONFIDENCE

    def observe(
        self, reader: Reader, region: Region, seen: Observation, walk: Stream | None
    ) -> None:
        """See Predictor. A checkpoint has the page table looked at, which tells of what lies before
        it as well: out of turn it would begin another walk."""
        by_faults = region.verdict == ServingMode.POOL or reader.client.pagemap_fd < 0
        if seen.told and by_faults:
            self._pend(reader, seen.start, seen.end)

    def scanned(self, region: Region, found: list[tuple[int, int]], now_ns: int) -> bool:
        """See Predictor."""
        for start, end in found:
            self._pend(region.reader, start, end)
        return bool(found)

    def _pend(self, reader: Reader, start: int, end: int) -> None:
        if reader.in_charge is not self and reader.in_charge is not None:
            return
        of = self._of(reader.file)
        process = of.processes.get(reader.pid)
        if process is None:
            process = of.processes[reader.pid] = _Process(
                Steps(self._steps), Places(reader, self._scheduler)
            )
        process.pending.append((start // BLOCK_BYTES, -(-end // BLOCK_BYTES)))

    def dismissed(self, reader: Reader) -> None:
        """See Predictor."""
        of = self._files.get(reader.file.key)
        if of is not None:
            self._closed(of, reader.pid)

    def left(self, reader: Reader) -> None:
        """See Predictor."""
        self.dismissed(reader)
        self._missed.pop(reader.pid, None)

    def unmapped(self, region: Region) -> None:
        """See Predictor."""
        of = self._files.get(region.file.key)
        if of is not None and not region.reader.regions:
            self._closed(of, region.reader.pid)

    def _closed(self, of: _File, pid: int) -> None:
        process = of.processes.pop(pid, None)
        if process is not None:
            self._end_places(of, process)
        for front in of.fronts.closed(pid, bool(of.processes)):
            of.heads.pop(front, None)
        if not of.processes:
            of.heads.clear()
            of.visits.over()
            of.touched, of.hits, of.looks = 0, 0.0, 0.0
            self._end_stream(of)
            self._files[of.file.key] = self._files.pop(of.file.key)  # the last one to be closed
            if len(self._files) > FILES_MAX:
                self._forget_one()

    def _forget_one(self) -> None:
        """Of the files that nobody maps, the one that was closed first."""
        for key, of in self._files.items():
            if not of.processes:
                del self._files[key]
                return

    def look_ns(self, region: Region, now_ns: int) -> int | None:
        """In how long a front of a mapping's reader will have come over half of what is ahead of
        it, at its rate; None: none moves."""
        of, found = self._files.get(region.file.key), list[float]()
        for head in of.heads.values() if of is not None else ():
            rate, ahead = head.rate_bytes_per_second, head.front.ahead * BLOCK_BYTES
            if head.front.pid == region.reader.pid and rate and now_ns - head.last_ns < QUIET_NS:
                found.append(ahead / rate / 2 * 1e9)
        return int(min(found)) if found else None

    # ---- what is wanted -------------------------------------------------------------------------

    def demand(self, reader: Reader, now_ns: int) -> Iterator[tuple[Consumer, PrefetchRange]]:
        """See Predictor."""
        of = self._of(reader.file)
        process = of.processes.get(reader.pid)
        if process is None or not process.pending:
            return
        pending, process.pending = _merged(process.pending), []
        link, moved = self._link(reader), set[Front]()
        of.touched_ns = now_ns
        for start, end in self._probe(of, pending[-1][1]):
            of.fronts.ask(start, end)
            probe = PrefetchRange(
                of.file, start * BLOCK_BYTES, end * BLOCK_BYTES, 0, pooled=reader.reads_pool
            )
            yield FileConsumer(reader.rank, reader.pid), probe
        for start, end in pending:
            front = self._touch(of, process, reader, start, end, now_ns, link)
            if front is not None:
                moved.add(front)
        if process.began:
            process.last, process.began = process.began[len(process.began) // 2], []
        for front in of.fronts.looked(reader.pid, moved):
            of.heads.pop(front, None)
        for front in moved:
            if front.state is State.ALIVE:
                yield from self._ahead_of(of, front, reader, link, now_ns)
        for start, end in self._places(of, process, link):
            yield process.consumer, self._range(of, reader, start, end, link, now_ns)
        if now_ns >= of.judge_ns:
            of.judge_ns = now_ns + JUDGE_NS
            self._judge(of, reader, link, now_ns)

    def _ahead_of(
        self, of: _File, front: Front, reader: Reader, link: Link, now_ns: int
    ) -> Iterator[tuple[Consumer, PrefetchRange]]:
        window, wanted = self._window(of, front, reader, link)
        beyond = front.position + window - of.fronts.blocks if front.direction > 0 else 0
        if wanted is None and beyond <= 0:
            return
        head = self._head(of, front, reader, now_ns)
        if wanted is not None:
            yield head, self._range(of, reader, *wanted, link, now_ns, front)
        for consumer, more in self._next_shard.beyond(reader, head, window * BLOCK_BYTES, now_ns):
            depth = self._depth_bytes(link, now_ns, reader, front)
            yield consumer, replace(more, yield_bytes=depth, guess=True)

    def _touch(
        self, of: _File, process: _Process, reader: Reader, start: int, end: int, now_ns: int,
        link: Link,
    ) -> Front | None:  # fmt: skip
        fronts = of.fronts
        end = min(end, fronts.blocks)
        if start >= end:
            return None
        flags = fronts.flags[start:end]
        was_asked = bool(flags[0] & ASKED)
        is_miss = not any(flags)
        of.touched += sum(not flag & TOUCHED for flag in flags)
        of.hits = of.hits * HITS_KEPT + was_asked
        of.looks = of.looks * HITS_KEPT + 1
        front, begins = fronts.touch(reader.pid, start, end, now_ns, link)
        if is_miss:
            self._missed[reader.pid] = now_ns, front
        if begins:
            # what one look finds has no order: it lies before, or behind, what was found before
            of.visits.begins(start < process.last, not was_asked, now_ns)
            process.began.append(start)
            if not process.steps.begins(start):
                self._end_places(of, process)
        head = of.heads.get(front)
        if head is not None:
            head.moved(now_ns)
        return front

    def _head(self, of: _File, front: Front, reader: Reader, now_ns: int) -> Head:
        head = of.heads.get(front)
        if head is None:
            head = of.heads[front] = Head(front, reader, now_ns)
        return head

    def _range(
        self, of: _File, reader: Reader, start: int, end: int, link: Link, now_ns: int,
        front: Front | None = None,
    ) -> PrefetchRange:  # fmt: skip
        first, last = start * BLOCK_BYTES, min(end * BLOCK_BYTES, of.file.size_bytes)
        return PrefetchRange(
            of.file, first, last, pooled=reader.reads_pool,
            yield_bytes=self._depth_bytes(link, now_ns, reader, front), guess=True,
        )  # fmt: skip

    def _depth_bytes(
        self, link: Link, now_ns: int, reader: Reader, front: Front | None = None
    ) -> int:
        """How much of what is guessed for a reader, or a front of it, may be under way: what keeps
        the link busy, and until the next is sent where nobody else has missed just now, who would
        wait for it."""
        since = now_ns - int(2 * LOOK_SECONDS * 1e9)
        others = any(
            at_ns > since and (pid != reader.pid or (front is not None and front is not where))
            for pid, (at_ns, where) in self._missed.items()
        )
        seconds = link.latency + (0.0 if others else RESPONSE_SECONDS)
        return int(link.bandwidth * seconds) + PIECE_BYTES

    def _window(
        self, of: _File, front: Front, reader: Reader, link: Link
    ) -> tuple[int, tuple[int, int] | None]:
        """How many blocks ahead of a front are worth reading, be they in its file or not; and of
        those in it [start, end) that was not asked for, None: too little."""
        fronts, length = of.fronts, max(1, front.length)
        density, runs = min(1.0, front.touched / length), front.runs / length
        gain = walk_gain(density, runs, front.direction < 0, link, BLOCK_BYTES)
        least = least_probability(gain, min(1.0, density + AROUND_BLOCKS * runs))
        room = self.account.room_bytes(link.bandwidth) // BLOCK_BYTES + front.ahead
        most = min(room, self._room_bytes(of.file) // BLOCK_BYTES)
        window = fronts.walks.window(length, least, most)
        target = max(0, min(fronts.blocks, front.position + front.direction * window))
        if not front.ahead:
            front.wanted = front.position
        more = (target - front.wanted) * front.direction
        at_end = target in (0, fronts.blocks)
        if more <= 0 or (more * STEP_PART < window and not at_end):
            return window, None
        start, end = sorted((front.wanted, target))
        front.wanted = target
        return window, self._ask(of, start, end)

    @staticmethod
    def _ask(of: _File, start: int, end: int) -> tuple[int, int] | None:
        """[start, end) blocks, unless all of it is in memory."""
        low, high = start * BLOCK_BYTES, min(end * BLOCK_BYTES, of.file.size_bytes)
        there = of.file.resident_bytes(low, high - low)
        return None if there is not None and there >= high - low else (start, end)

    def _ending(self, file: FileState, front: Front) -> None:
        of = self._files.get(file.key)
        head = of.heads.get(front) if of is not None else None
        if head is not None:
            self._scheduler.forget(head)

    def sent(self, extent: Extent) -> None:
        """The scheduler has had something read."""
        if extent.guess:
            fronts = self._of(extent.file).fronts
            fronts.ask(extent.start // BLOCK_BYTES, -(-extent.end // BLOCK_BYTES))

    def said(self, stream: FileStream) -> tuple[int, int]:
        """Of what a job has said that it will need: how much may be asked for by now, and be under
        way at one time, bytes. What is free at first, and as much again as was used."""
        link, fronts = self._measured(), self._of(stream.file).fronts
        most = int(FREE_SECONDS * link.bandwidth) + 2 * fronts.used_bytes
        room = self.account.room_bytes(link.bandwidth)
        return min(most, stream.absent_bytes + room), int(link.reach_bytes) + PIECE_BYTES

    def _places(self, of: _File, process: _Process, link: Link) -> list[tuple[int, int]]:
        """Where a process begins next, by its steps."""
        steps, fronts, found = process.steps, of.fronts, list[tuple[int, int]]()
        if not steps.right:
            return found
        first = least_probability(walk_gain(1.0, 0.0, False, link, BLOCK_BYTES), 1.0)
        size = 1 + fronts.walks.window(1, first, fronts.blocks)
        seconds = link.latency + LOOK_SECONDS + RESPONSE_SECONDS
        ahead = 4 * link.bandwidth * seconds
        for at in steps.places(size, BLOCK_BYTES, ahead, link):
            end = min(fronts.blocks, at + size)
            room = self.account.room_bytes(link.bandwidth)
            if not 0 <= at < end or (end - at) * BLOCK_BYTES > room:
                break
            if at in process.places or fronts.flags[at] & (ASKED | TOUCHED):
                continue
            process.places[at] = end
            wanted = self._ask(of, at, end)
            if wanted is not None:
                found.append(wanted)
        while len(process.places) > PLACES_KEPT:
            del process.places[next(iter(process.places))]
        return found

    def _end_places(self, of: _File, process: _Process) -> None:
        self._scheduler.forget(process.consumer)
        for place in process.places.items():
            of.fronts.lose(*place)
        process.places.clear()

    def _probe(self, of: _File, start: int) -> list[tuple[int, int]]:
        """What tells the link, PROBES times for a device: some blocks for its bandwidth, one for
        its latency. Nobody has touched them, and they lie beyond what the kernel reads ahead of the
        last touch: [start, end)."""
        device, untouched = of.file.key[0], bytes(PROBE_BLOCKS)
        times = self._probed.get(device, 0)
        if times >= 2 * PROBES or self._scheduler.under_way_bytes:
            return []
        last = of.fronts.blocks - PROBE_BLOCKS
        beyond = (start // PROBE_BLOCKS + 2) * PROBE_BLOCKS  # as the scheduler cuts it: in one
        for at in (*range(beyond, last, PROBE_BLOCKS), *range(0, last, PROBE_BLOCKS)):
            if of.fronts.flags[at : at + PROBE_BLOCKS] == untouched:
                self._probed[device] = times + 1
                wanted = self._ask(of, at, at + (1 if times % 2 else PROBE_BLOCKS))
                return [wanted] if wanted is not None else []
        return []

    # ---- whole files ----------------------------------------------------------------------------

    def _judge(self, of: _File, reader: Reader, link: Link, now_ns: int) -> None:
        if of.stream is not None or not of.visits.places:
            return
        size, missing = of.file.size_bytes, of.fronts.unknown * BLOCK_BYTES
        room = self._room_bytes(of.file)
        touched = of.touched * BLOCK_BYTES
        worth = of.visits.is_worth_it(size, missing, touched, BLOCK_BYTES, now_ns, link)
        if worth and missing <= room:
            consumer = FileConsumer(reader.rank, reader.pid)
            of.stream = FileStream(of.file, self._scheduler, consumer, reader.reads_pool, now_ns)
            of.stream.priority, of.stream.guess = Priority.BACKGROUND, True
            of.stream.yield_bytes = int(link.reach_bytes) + PIECE_BYTES
            of.stream.add(0, size)

    def step(self, now_ns: int) -> None:
        """Once a turn: files that are read whole go on, at their pace."""
        for of in self._files.values():
            stream = of.stream
            if stream is None:
                continue
            if of.file.changed or of.file.fd < 0 or now_ns - of.touched_ns > QUIET_NS:
                self._end_stream(of)
                continue
            each = max(MISS_BYTES, of.touched * BLOCK_BYTES / max(1, of.visits.places))
            missed, used = int(of.visits.missed * each), of.fronts.used_bytes
            free = int(FREE_SECONDS * self._measured().bandwidth)
            stream.most_bytes = free + used + int(SHARE * (used + missed))
            if of.hits < HITS_LEAST * of.looks:
                stream.most_bytes = min(stream.most_bytes, int(of.visits.pace() * missed))
            if stream.go_on(now_ns):
                self._end_stream(of)

    @staticmethod
    def _end_stream(of: _File) -> None:
        if of.stream is not None:
            of.stream.end()
            of.stream = None

    @property
    def streams(self) -> bool:
        """Whether a file is being read whole."""
        return any(of.stream is not None for of in self._files.values())


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, those that meet joined."""
    found = list[tuple[int, int]]()
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
