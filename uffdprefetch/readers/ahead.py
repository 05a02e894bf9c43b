# SPDX-License-Identifier: Apache-2.0
"""Whatever is read ahead on a guess: streams, chains of steps, and files that are read whole.

One account bounds all of it (predict/storage.py), one law per question says how much further a
stream, a chain or a visitor goes (predict/survival.py). Exact orders (readers/known_order.py) are
no guess.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from uffdprefetch.base.config import GUESSING
from uffdprefetch.base.record import dataclass, field, replace
from uffdprefetch.base.units import PAGE_BYTES, format_size
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_COUNT, LATELY_NS
from uffdprefetch.predict.fronts import (
    ASKED,
    BROUGHT,
    TOUCHED,
    FileFronts,
    Front,
    State,
)
from uffdprefetch.predict.randomness import NEAR_BYTES
from uffdprefetch.predict.steps import Steps
from uffdprefetch.predict.storage import (
    BLOCK_BYTES,
    FREE_BYTES,
    FREE_SECONDS,
    MISS_BYTES,
    PIECE_BYTES,
    RANDOM_FREE_BYTES,
    UNKNOWN,
    Account,
    Link,
    least_gain,
    least_probability,
    stream_gain,
)
from uffdprefetch.predict.streams import OwnPace, Stream
from uffdprefetch.predict.survival import Law, Laws
from uffdprefetch.predict.visits import FREE_SHARE, Visits
from uffdprefetch.readers.file_stream import FileStream, Room, Stage, Want
from uffdprefetch.readers.next_shard import NextShard
from uffdprefetch.readers.predictor import Confidence, Predictor
from uffdprefetch.readers.reader_streams import Head, come_over
from uffdprefetch.readers.whole_files import VisitedFile, WholeFiles, describe
from uffdprefetch.sense.observation import Batch
from uffdprefetch.sense.pagetables import LOOK_FIRST_NS
from uffdprefetch.state import processes
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import WINDOW, EventPublisher
from uffdprefetch.state.reader import Reader, Region
from uffdprefetch.warm.consumer import Consumer, FileConsumer, PrefetchRange
from uffdprefetch.warm.depth import MAX_SECONDS
from uffdprefetch.warm.meter import SAMPLES_LEAST
from uffdprefetch.warm.scheduler import (
    GUESSED_EXTENT_BYTES,
    RESPONSE_SECONDS,
    Extent,
    Scheduler,
)
from uffdprefetch.warm.windows import Windows

#: What a disk here or a link of 20 Gb/s brings, bytes/s.
NEARBY_BYTES_PER_SECOND = 2.5e9
#: A window grows by no less than this part of it; and of how far a stream has come this part may be
#: under way at one time, but for MAX_SECONDS at most: where streams have no usual length
#: (predict/survival.py) one ends within it in 1 of 9 cases.
STEP_PART = 8
#: By how much the bandwidth is told: that is on the link for longer than a request takes otherwise.
PROBE_BLOCKS = GUESSED_EXTENT_BYTES // BLOCK_BYTES
#: Of what is to be read so many runs that were touched before are looked at: is it there?
RUNS_MAX = 8


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
    maps: bool = True  # else it may again: a mapping for each batch
    last: int = 0  # where it began when it was looked at before: in the middle of those places ...
    began: list[int] = field(default_factory=list)  # ... and since
    pending: list[tuple[int, int]] = field(default_factory=list)  # touched since, blocks ...
    pended_ns: int = 0  # ... and when that was seen
    seen_ns: int | None = None  # when something was before
    places: dict[int, int] = field(default_factory=dict)  # asked for ahead of it: start -> end
    pace: OwnPace = field(default_factory=OwnPace)


@dataclass
class _File:
    """One file that is mapped."""

    file: FileState
    fronts: FileFronts
    visited: VisitedFile
    heads: dict[Front, Head] = field(default_factory=dict)
    processes: dict[int, _Process] = field(default_factory=dict)
    said: FileStream | None = None  # of what a job has said that it will need ...
    said_used: int = 0  # ... and of that, bytes that were used
    visit_came: bool = False  # since it was judged whether to read it whole


class Miss(NamedTuple):
    """Of a process: when it was seen, and where it was."""

    at_ns: int
    pid: int
    of: _File
    front: Front

    def is_of(self, front: Front) -> bool:
        """Whether it lies where another front has been, or is to come."""
        low, high = sorted((front.start, front.wanted))
        return front in self.of.heads and low <= self.front.position <= high


@dataclass
class Traffic:
    """What goes on in this turn: who has missed, and the length of the longest stream."""

    turn_ns: int = 0
    wanted_bytes: int = 0  # guesses that are to be sent
    longest: int = 0
    #: The last of each process.
    missed: dict[int, Miss] = field(default_factory=dict)
    #: Files that have heads, of the thousands that may be mapped.
    walked: dict[Key, _File] = field(default_factory=dict)

    def step(self, files: dict[Key, _File], now_ns: int) -> None:
        """Another turn; these are mapped."""
        self.begins(now_ns)
        for key, of in list(self.walked.items()):
            if not of.heads or files.get(key) is not of:
                del self.walked[key]
        fronts = chain.from_iterable(of.heads for of in self.walked.values())
        moving = (front.length for front in fronts if now_ns - front.last_ns < LATELY_NS)
        self.longest = max(moving, default=0)

    def begins(self, now_ns: int) -> None:
        """What is wanted from now on; all that was before has been sent, or waits behind others."""
        if now_ns != self.turn_ns:
            self.turn_ns, self.wanted_bytes = now_ns, 0

    def is_missed_beside(self, file: FileState) -> bool:
        """Whether somebody has missed in another file."""
        return any(miss.of.file is not file for miss in self.just_missed())

    def just_missed(self) -> list[Miss]:
        """Of late. It may be told two looks late, and so may the other."""
        since = self.turn_ns - 4 * LOOK_FIRST_NS
        return [miss for miss in self.missed.values() if miss.at_ns > since]

    def missed_beside(self, pid: int, front: Front | None) -> int:
        """Fronts at which others have missed, but for this one and that at which this process has:
        ranks that go side by side wait for one request."""
        own = self.missed.get(pid)
        others = {miss.front for miss in self.just_missed() if miss.pid != pid}
        return len(others - {front, own.front if own is not None else None})


class Ahead(Predictor):
    """See readers/predictor.py. The service's thread calls all of it."""

    name = "ahead"
    policies = frozenset(GUESSING)

    def __init__(
        self, scheduler: Scheduler, ledger: Ledger, publisher: EventPublisher, room: Room,
        next_shard: NextShard,
        in_charge: Callable[[Reader], Predictor | None], want: Want, windows: Windows,
        waiting: Callable[[], float] = lambda: 1.0,
    ) -> None:  # fmt: skip
        """``in_charge``, ``want``: see Arbiter. ``waiting``: how many readers wait at one
        time, side by side."""
        self._scheduler, self._ledger = scheduler, ledger
        self._publisher, self._in_charge, self._windows = publisher, in_charge, windows
        self._next_shard = next_shard
        next_shard.in_vain = self._in_vain
        self._waiting = waiting
        self.account = Account()
        self._laws = Laws()
        self._files: dict[Key, _File] = {}
        self._traffic = Traffic()
        self._whole = WholeFiles(
            scheduler, want, ledger, room, self.measured, self.account,
            self._traffic.is_missed_beside,
        )  # fmt: skip

    # ---- what is known --------------------------------------------------------------------------

    def _of(self, file: FileState) -> _File:
        found = self._files.get(file.key)
        if found is None or found.file is not file:
            directory, name = os.path.split(file.path)
            laws = self._laws.of((directory, os.path.splitext(name)[1]))
            blocks = -(-file.size_bytes // BLOCK_BYTES)
            law, ending = Law(laws[0]), lambda front: self._ending(file, front)
            try:
                fronts = FileFronts(blocks, law, self.account, ending)
            except MemoryError:
                fronts = FileFronts(0, law, self.account, ending)
                self._ledger.degrade(
                    "too large for the service's memory: nothing is read ahead of"
                    " whoever reads it in no known order; let it have more (ulimit -v)",
                    file.path,
                )
            visited = VisitedFile(file, fronts, Visits(laws[1]))
            found = self._files[file.key] = _File(file, fronts, visited)
        return found

    def side_by_side(self) -> float:
        """How many readers wait at one time."""
        return self._waiting()

    def measured(self, miss_bytes: int = MISS_BYTES) -> Link:
        """The link, as far as it is known."""
        found, waiting = self._scheduler.meter.link, self.side_by_side()
        if found is None:
            return replace(UNKNOWN, waiting=waiting, miss_bytes=miss_bytes)
        bandwidth, latency = found.bandwidth_bytes_per_second, found.latency_seconds
        return Link(bandwidth, latency, waiting, miss_bytes)

    def _link(self, reader: Reader) -> Link:
        """As measured, for this reader."""
        ahead = reader.file.call.ahead_bytes
        plain = MISS_BYTES if ahead is None else max(PAGE_BYTES, ahead)
        # a miss brings a page; how many of a block are touched nobody sees
        link = self.measured(BLOCK_BYTES if reader.says_random else plain)
        if reader.reads_pool:  # whose threads read what is missed as well
            link = replace(link, takes_a_byte=0.0)
        best = NEARBY_BYTES_PER_SECOND if self._scheduler.meter.link is None else 0.0
        return link.as_seen(self._scheduler.device_of(reader.file).plain.bytes_per_second, best)

    def _beside(self, link: Link, reader: Reader, front: Front | None = None) -> Link:
        """The link with who waits for others' requests over it, beside this reader, or a front of
        it."""
        if link.waiting <= 1:
            return link
        beside = self._traffic.missed_beside(reader.pid, front)
        return replace(link, beside=min(link.waiting - 1, beside))

    # ---- what is seen ---------------------------------------------------------------------------

    def confidence(self, reader: Reader, now_ns: int) -> Confidence:
        """See Predictor."""
        return Confidence.GUESS

    def observe(self, batch: Batch, streams: Sequence[Stream | None]) -> bool:
        """See Predictor. Where no scan has found exactly what was touched the touches tell it."""
        told = [come_over(seen) for seen in batch.touches if seen.told]
        if told or batch.found:
            self._pend(batch.region.reader, [*told, *batch.found], batch.at_ns)
        return bool(batch.found)

    def _pend(self, reader: Reader, ranges: list[tuple[int, int]], now_ns: int) -> None:
        if self._in_charge(reader) not in (None, self):
            return
        of = self._of(reader.file)
        process = of.processes.get(reader.pid)
        if process is None:
            process = of.processes[reader.pid] = _Process(
                Steps(self._laws.steps), Places(reader, self._scheduler)
            )
        process.maps = True
        process.pending += [_blocks(a, b) for a, b in ranges]
        process.pended_ns = now_ns

    def dismissed(self, reader: Reader) -> None:
        """See Predictor."""
        self._leave(reader)
        self._next_shard.dismissed(reader)

    def left(self, reader: Reader) -> None:
        """See Predictor."""
        self._leave(reader)
        self._next_shard.left(reader)

    def _leave(self, reader: Reader) -> None:
        of = self._files.get(reader.file.key)
        if of is not None:
            self._closed(of, reader)
            of.processes.pop(reader.pid, None)
            if not any(one.maps for one in of.processes.values()):
                of.visited.streaming.end(
                    Stage.STOPPED, "nobody reads it here and there any more", of.visited.touched_ns
                )
        self._traffic.missed.pop(reader.pid, None)

    def unmapped(self, region: Region) -> None:
        """See Predictor."""
        of = self._files.get(region.file.key)
        if of is not None and not region.reader.regions:
            self._closed(of, region.reader)

    def _closed(self, of: _File, reader: Reader) -> None:
        process = of.processes.get(reader.pid)
        if process is None or not process.maps:
            return
        process.maps = False
        process.pace.pause()
        self._absorb(of, process, reader, process.pended_ns)
        self._end_places(of, process)
        mapped = any(one.maps for one in of.processes.values())
        for front in of.fronts.closed(reader.pid, mapped):
            of.heads.pop(front, None)
        if not mapped:
            of.heads.clear()
            of.visited.left(process.pended_ns)
            self._files[of.file.key] = self._files.pop(of.file.key)  # the last one to be closed
            if len(self._files) > ENTRIES_MAX:
                self._forget_one()

    def _forget_one(self) -> None:
        """Of the files that nobody maps, the one that was closed first."""
        for key, of in self._files.items():
            if not any(one.maps for one in of.processes.values()):
                del self._files[key]
                return

    def look_ns(self, region: Region, now_ns: int) -> int | None:
        """In how long a front of a mapping's reader will have come over half of what is ahead of
        it, at its rate; None: none moves."""
        of, found = self._files.get(region.file.key), list[float]()
        for head in of.heads.values() if of is not None else ():
            rate, ahead = head.rate_bytes_per_second, head.front.ahead * BLOCK_BYTES
            if head.front.pid == region.reader.pid and rate and now_ns - head.last_ns < LATELY_NS:
                found.append(ahead / rate / 2 * 1e9)
        return int(min(found)) if found else None

    # ---- what is wanted -------------------------------------------------------------------------

    def demand(self, reader: Reader, now_ns: int) -> Iterator[tuple[Consumer, PrefetchRange]]:
        """See Predictor."""
        of = self._of(reader.file)
        process = of.processes.get(reader.pid)
        if process is None or not process.pending:
            return
        self._traffic.begins(now_ns)
        for start, end in self._probe(of, reader, max(end for _, end in process.pending)):
            of.fronts.ask(start, end)
            of.fronts.lose(start, end)  # unless somebody comes to it
            probe = PrefetchRange(
                of.file, start * BLOCK_BYTES, end * BLOCK_BYTES, 0, pooled=reader.reads_pool
            )
            yield FileConsumer(reader.rank, reader.pid), probe
        moved = self._absorb(of, process, reader, now_ns)
        if process.pace.waits and not reader.reads_pool:
            self.take_back(reader, 0, of.file.size_bytes)
            return
        link = self._link(reader)
        for front in moved:
            if front.state is State.ALIVE:
                beside = self._beside(link, reader, front)
                yield from self._ahead_of(of, front, reader, beside, now_ns)
        for start, end in self._places(of, reader, process, link):
            for part in self._ranges(of, reader, start, end):
                yield process.consumer, part
        if of.visit_came and now_ns >= of.visited.judge_ns:
            of.visit_came = False
            self._whole.judge(of.visited, reader, self._beside(link, reader), now_ns)

    def _absorb(self, of: _File, process: _Process, reader: Reader, now_ns: int) -> list[Front]:
        """Book what a process has touched: the fronts that have gone on by it, in order."""
        pending, process.pending = _merged(process.pending), []
        link, moved = self._beside(self._link(reader), reader), dict[Front, None]()
        if not pending:
            return []
        self._note_pace(of, reader, process, pending)
        of.fronts.look(self._scheduler.device_of(of.file).idle_ns(now_ns))
        process.seen_ns = process.pended_ns
        if of.visited.streaming.stream is not None or of.visited.visits.is_over:
            of.visited.touched(now_ns)
        for start, end in pending:
            front = self._touch(of, process, reader, start, end, now_ns, link)
            if front is not None:
                moved[front] = None
        if process.began:
            process.last, process.began = process.began[len(process.began) // 2], []
        for front in of.fronts.looked(reader.pid, moved):
            of.heads.pop(front, None)
        return list(moved)

    def _note_pace(
        self, of: _File, reader: Reader, process: _Process, pending: list[tuple[int, int]]
    ) -> None:
        """How fast it has gone on by itself: of who reads what is in memory that tells nothing, so
        what lies beyond must not be there."""
        start, end = max(pending, key=lambda run: run[1] - run[0])
        asked = sum(flag & ASKED for flag in of.fronts.flags[start:end]) // ASKED
        rate = process.pace.saw(
            end - start, asked, process.seen_ns, process.pended_ns,
            lambda: processes.run_delay_ns(reader.pid),
        )  # fmt: skip
        beyond = (end + 2 * PROBE_BLOCKS) * BLOCK_BYTES
        if rate and of.file.resident_bytes(beyond, BLOCK_BYTES) == 0:
            self._scheduler.device_of(of.file).plain.note(rate, process.pended_ns)

    def _ahead_of(
        self, of: _File, front: Front, reader: Reader, link: Link, now_ns: int
    ) -> Iterator[tuple[Consumer, PrefetchRange]]:
        window, least, wanted = self._window(of, front, reader, link)
        beyond = front.position + window - of.fronts.blocks if front.direction > 0 else 0
        if wanted is None and beyond <= 0:
            return
        head = self._head(of, front, reader, now_ns)
        self._show(reader, head)
        if wanted is not None:
            for part in self._ranges(of, reader, *wanted, front):
                yield head, part
        if beyond <= 0:
            return
        ahead_bytes = window * BLOCK_BYTES
        for consumer, more in self._next_shard.beyond(reader, head, ahead_bytes, least, now_ns):
            depth = self._depth_of_all_bytes(reader, front)
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
        of.visited.blocks += fronts.untouched(start, end)
        of.visited.used_bytes += flags.count(BROUGHT) * BLOCK_BYTES
        used = fronts.used_bytes
        front, begins = fronts.touch(reader.pid, start, end, now_ns, link)
        if of.said is not None and of.said.has_asked(start * BLOCK_BYTES):
            of.said_used += fronts.used_bytes - used
        if is_miss:
            self._traffic.missed[reader.pid] = Miss(now_ns, reader.pid, of, front)
        if begins:
            of.visit_came = True
            of.visited.touched(now_ns)
            # what one look finds has no order: it lies before, or behind, what was found before
            of.visited.visits.begins(start < process.last, not was_asked, now_ns)
            process.began.append(start)
            if not process.steps.begins(start):
                self._end_places(of, process)
            elif is_miss and process.steps.right:  # as of who goes on in a stream
                self.account.allowed += int(FREE_SHARE * (end - start) * BLOCK_BYTES)
        head = of.heads.get(front)
        if head is not None:
            head.moved(now_ns)
        return front

    def _head(self, of: _File, front: Front, reader: Reader, now_ns: int) -> Head:
        head = of.heads.get(front)
        if head is None:
            self._traffic.walked[of.file.key] = of
            head = of.heads[front] = Head(
                front,
                reader,
                now_ns,
                (
                    lambda front: self._depth_bytes(reader, front.length),
                    lambda front: self._depth_of_all_bytes(reader, front),
                ),
            )
        return head

    def _show(self, reader: Reader, head: Head) -> None:
        """What is read ahead of a front, to who looks at the streams of its reader."""
        for stream in reader.table.streams:
            if abs(stream.position_bytes - head.position_bytes) <= NEAR_BYTES:
                self._windows.asked(stream, head.front.wanted * BLOCK_BYTES, head.feedback)

    def _ranges(
        self, of: _File, reader: Reader, start: int, end: int, front: Front | None = None
    ) -> Iterator[PrefetchRange]:
        """[start, end) blocks, without what the job has said that it has no use for."""
        first, last = start * BLOCK_BYTES, min(end * BLOCK_BYTES, of.file.size_bytes)
        depth_bytes = self._depth_of_all_bytes(reader, front)
        for low, high in reader.unneeded.ranges.missing(first, last):
            if self._publisher.active:
                now_ns = self._traffic.turn_ns
                self._publisher.put(WINDOW, now_ns, reader.pid, of.file, low, high - low, 0)
            self._traffic.wanted_bytes += high - low
            yield PrefetchRange(
                of.file, low, high, pooled=reader.reads_pool, yield_bytes=depth_bytes, guess=True
            )

    def _depth_bytes(self, reader: Reader, length: int) -> int:
        """How much may be under way ahead of a stream that has come so far, in blocks: what lasts
        until the next is sent, and the more the longer it is."""
        link = self._link(reader)
        most = int(MAX_SECONDS * link.bandwidth_bytes_per_second)
        long_bytes = min(length * BLOCK_BYTES // STEP_PART, most)
        # of requests that cost the same whatever they bring, one beside the one that is served
        least = max(
            2 * reader.file.call.unit_bytes, PIECE_BYTES + link.busy_bytes(RESPONSE_SECONDS)
        )
        return max(least, long_bytes)

    @staticmethod
    def _lasting_blocks(reader: Reader, link: Link) -> int:
        """What lasts a stream until it was looked at again and the next was sent."""
        # requests of the largest size, one that is used up and one that is asked for meanwhile,
        # and what a link needs that takes long for them
        least = 2 * GUESSED_EXTENT_BYTES + link.busy_bytes()
        lasts = PIECE_BYTES + link.busy_bytes(2 * LOOK_FIRST_NS / 1e9 + RESPONSE_SECONDS)
        lasts = max(least, min(lasts, FREE_BYTES), 2 * reader.file.call.unit_bytes)
        return lasts // BLOCK_BYTES

    def _depth_of_all_bytes(self, reader: Reader, front: Front | None = None) -> int:
        """How much of what is guessed may be under way in all where something of a reader, or a
        front of it, is to go with it: what is so ahead of the longest stream, of several the one
        that is nearest goes first. Where somebody else has missed just now, who would wait for it,
        only what keeps the link busy. Who misses where the stream has been or is to come, a rank
        beside it, waits for what is read ahead of it."""
        missed, length = self._traffic.just_missed(), 0
        if front is None:
            others = any(miss.pid != reader.pid for miss in missed)
        else:
            others = any(not miss.is_of(front) for miss in missed)
            length = front.length if missed else self._traffic.longest
        if others:
            busy = self._link(reader).busy_bytes(0.0) + PIECE_BYTES
            return max(2 * reader.file.call.unit_bytes, busy)
        return self._depth_bytes(reader, length)

    def _window(
        self, of: _File, front: Front, reader: Reader, link: Link
    ) -> tuple[int, float, tuple[int, int] | None]:
        """How many blocks ahead of a front are worth reading, be they in its file or not; the least
        probability of use that pays; and of those in it [start, end) that was not asked for, None:
        too little."""
        fronts, length = of.fronts, max(1, front.length)
        gain = stream_gain(front.density, front.gaps, front.direction < 0, self._doubted(link))
        self._leave_alone(of, front, reader, link)
        least = least_probability(gain, link, front.plain)
        each, together = self._windows.share_bytes(of.file)
        room = min(self._room_of(reader, link), max(0, together - self.account.open))
        most = min(room // BLOCK_BYTES + front.ahead, each // BLOCK_BYTES)
        window = fronts.streams.window(length, least, most)
        if reader.reads_pool and front.direction > 0 and length > 1:
            window = max(window, link.miss_bytes // BLOCK_BYTES)  # as the kernel would
        first = reader.span.start_bytes // BLOCK_BYTES
        last = min(fronts.blocks, -(-reader.span.end_bytes // BLOCK_BYTES))
        # who goes on all the time needs what lasts, and who stops leaves it all for nothing
        lasting = self._lasting_blocks(reader, link)
        spare = self.account.spare_bytes(
            front.ahead * BLOCK_BYTES, free_bytes=FREE_BYTES, share=FREE_SHARE
        )
        ahead = min(window, max(spare // BLOCK_BYTES, front.rests.burst + lasting))
        if not front.ahead:
            front.wanted = front.position
        target = self._whole_requests(reader, front, ahead, most)
        target = max(first, min(last, target))
        more = (target - front.wanted) * front.direction
        at_end = target in (first, last)
        window = window if at_end else ahead  # the file that follows comes after this one's end
        if more <= 0 or (more * STEP_PART < ahead and not at_end):
            return window, least, None
        start, end = sorted((front.wanted, target))
        front.wanted = target
        return window, least, self._unless_there(of, reader, start, end)

    @staticmethod
    def _whole_requests(reader: Reader, front: Front, ahead: int, most: int) -> int:
        """Up to where to read, so many blocks ahead of a front, or ``most``. Where a request costs
        more than its bytes it brings all that it can, if half of what is missing of that is worth
        it and as much may be; who has so far to go waits for it until then."""
        way, unit = front.direction, reader.file.call.unit_bytes // BLOCK_BYTES
        end, wanted = front.position * way + ahead, front.wanted * way
        if unit and end > wanted:
            start = max(wanted, end // unit * unit)
            over = (start // unit + 1) * unit
            if over <= front.position * way + most:
                if 2 * (end - start) >= over - start:
                    end = over
                elif 2 * ahead >= unit:
                    end = start
        return end * way

    def _doubted(self, link: Link) -> Link:
        """As long as few requests tell the latency it may be half of what they say: what pays by
        that goes on, and else the link comes to rest, and requests that are alone tell it."""
        meter = self._scheduler.meter
        if meter.link is None or meter.is_sure:
            return link
        return replace(link, latency_seconds=link.latency_seconds / 2)

    def _leave_alone(self, of: _File, front: Front, reader: Reader, link: Link) -> None:
        """Say so, where the kernel's own readahead hides the latency of who reads in order."""
        by_itself = replace(link, waiting=1.0, beside=0.0)
        alone = stream_gain(1.0, 0.0, front.direction < 0, by_itself)
        if not reader.reads_pool and alone <= least_gain(link) and front.length >= LATELY_COUNT:
            self._ledger.leave_alone(
                f"left to the kernel, whose readahead of {format_size(link.miss_bytes)} suffices",
                of.file.path,
            )

    @staticmethod
    def _unless_there(of: _File, reader: Reader, start: int, end: int) -> tuple[int, int] | None:
        """[start, end) blocks, unless all of it is in memory. What was touched there and has left
        memory is as if it had never been."""
        pooled = of.file.pooled if reader.reads_pool else None

        def is_there(first: int, last: int) -> bool:
            low, high = first * BLOCK_BYTES, min(last * BLOCK_BYTES, of.file.size_bytes)
            if pooled is not None:
                return not pooled.absent(low, high)
            there = of.file.resident_bytes(low, high - low)
            return there is not None and there >= high - low

        if is_there(start, end):
            return None
        for run in of.fronts.touched_runs(start, end, RUNS_MAX):
            if not is_there(*run):
                of.fronts.renew(*run)
        return start, end

    def _ending(self, file: FileState, front: Front) -> None:
        of = self._files.get(file.key)
        head = of.heads.pop(front, None) if of is not None else None
        if head is not None:
            self._scheduler.forget(head)

    def sent(self, extent: Extent) -> None:
        """The scheduler has had something read."""
        if extent.wanted.guess:
            of = self._of(extent.file)
            first, last = _blocks(extent.start, extent.end)
            stream = of.visited.streaming.stream
            if stream is not None and extent.consumer is stream.consumer:
                of.fronts.bring(first, last)
                return
            of.fronts.ask(first, last)
            # what a whole request brings beside that is for nothing, unless somebody comes to it
            low, high = _blocks(*extent.cut) if extent.consumer is not None else (last, last)
            of.fronts.lose(first, low)
            of.fronts.lose(high, last)

    def may_begin(self, size_bytes: int) -> bool:
        """Whether so much of a file may be read that is mapped just now, before anybody has come to
        it."""
        return self.account.spare_bytes(0, FREE_BYTES, 1.0) >= size_bytes

    def _in_vain(self, file: FileState) -> None:
        """It was read ahead, and nobody comes to it."""
        of = self._files.get(file.key)
        if of is not None and of.file is file:
            of.fronts.lose(0, of.fronts.blocks)

    def _room_of(self, reader: Reader, link: Link) -> int:
        """So much more may be asked for on a guess ahead of it."""
        room = self.account.room_bytes(link, free_bytes=self._free_bytes(reader))
        return max(0, room - self._traffic.wanted_bytes)

    @staticmethod
    def _free_bytes(reader: Reader) -> int:
        """So much may be lost ahead of it that is not used."""
        return RANDOM_FREE_BYTES if reader.says_random else FREE_BYTES

    def room_bytes(self) -> int:
        """So much more may be asked for on a guess now."""
        return self.account.room_bytes(self.measured())

    def take_back(self, reader: Reader, start: int, end: int) -> None:
        """See Predictor: of its fronts those for which a part of that was asked."""
        of = self._files.get(reader.file.key)
        for front, head in list(of.heads.items()) if of is not None else ():
            low, high = sorted((front.position * BLOCK_BYTES, front.wanted * BLOCK_BYTES))
            if head.reader == reader.pid and low < end and start < high:
                self._scheduler.forget(head)
                front.wanted = front.position

    def said(self, stream: FileStream) -> tuple[int, int]:
        """Of what a job has said that it will need: how much may be asked for by now, and be under
        way at one time, bytes. What is free at first, and as much again as was used."""
        link, of = self.measured(), self._of(stream.file)
        if of.said is not stream:
            of.said, of.said_used = stream, 0
        free = min(FREE_BYTES, int(FREE_SECONDS * link.bandwidth_bytes_per_second))
        most = free + 2 * of.said_used
        room = self.account.room_bytes(link, 1.0)  # of a table some columns are read
        depth = link.reach_bytes + PIECE_BYTES
        if self._scheduler.meter.link is None:  # one at a time: what is read alone tells it
            room = 0 if self._scheduler.under_way_bytes else GUESSED_EXTENT_BYTES
            depth = 2 * GUESSED_EXTENT_BYTES
        return min(most, stream.absent_bytes + room), depth

    def _places(
        self, of: _File, reader: Reader, process: _Process, link: Link
    ) -> list[tuple[int, int]]:
        """Where a process begins next, by its steps."""
        steps, fronts, found = process.steps, of.fronts, list[tuple[int, int]]()
        if not steps.right:
            return found
        first = least_probability(stream_gain(1.0, 0.0, False, link), link, 1.0)
        size = 1 + fronts.streams.window(1, first, fronts.blocks)
        ahead = 4 * link.busy_bytes(2 * LOOK_FIRST_NS / 1e9 + RESPONSE_SECONDS)
        for at in steps.places(size, BLOCK_BYTES, ahead, link):
            end = min(fronts.blocks, at + size)
            room = self._room_of(reader, link)
            if not 0 <= at < end or (end - at) * BLOCK_BYTES > room:
                break
            if at in process.places or fronts.flags[at] & (ASKED | TOUCHED):
                continue
            process.places[at] = end
            wanted = self._unless_there(of, reader, at, end)
            if wanted is not None:
                found.append(wanted)
        while len(process.places) > ENTRIES_MAX:
            del process.places[next(iter(process.places))]
        return found

    def _end_places(self, of: _File, process: _Process) -> None:
        self._scheduler.forget(process.consumer)
        for place in process.places.items():
            of.fronts.lose(*place)
        process.places.clear()

    def _probe(self, of: _File, reader: Reader, start: int) -> list[tuple[int, int]]:
        """What tells the link, so many times for a device: some blocks for its bandwidth, one for
        its latency. Nobody has touched them, and they lie beyond what the kernel reads ahead of the
        last touch: [start, end)."""
        device, untouched = self._scheduler.device_of(of.file), bytes(PROBE_BLOCKS)
        meter = self._scheduler.meter
        is_told = meter.is_sure and not meter.lacks_large
        is_told = is_told or device.probes >= 4 * SAMPLES_LEAST  # beside some there are readers'
        if is_told or self._scheduler.under_way_bytes or self._is_near(reader):
            return []
        size = PROBE_BLOCKS if meter.lacks_large else 1
        opened, free_bytes = self.account.open, self._free_bytes(reader)
        if self.account.spare_bytes(opened, free_bytes, FREE_SHARE) < size * BLOCK_BYTES:
            return []
        last = of.fronts.blocks - PROBE_BLOCKS
        beyond = (start // PROBE_BLOCKS + 2) * PROBE_BLOCKS  # as the scheduler cuts it: in one
        for at in chain(range(beyond, last, PROBE_BLOCKS), range(0, last, PROBE_BLOCKS)):
            if of.fronts.flags[at : at + PROBE_BLOCKS] == untouched:
                device.probes += 1
                wanted = self._unless_there(of, reader, at, at + size)
                return [wanted] if wanted is not None else []
        return []

    def _is_near(self, reader: Reader) -> bool:
        """Whether a single page has come so fast that the kernel's readahead is enough even on a
        link that brings what a disk here does."""
        latency = self._scheduler.meter.of_pages.latency_seconds
        link = Link(NEARBY_BYTES_PER_SECOND, latency, 1.0, self._link(reader).miss_bytes)
        return latency > 0 and stream_gain(1.0, 0.0, False, link) <= least_gain(link)

    # ---- whole files, and what is told ----------------------------------------------------------

    def step(self, now_ns: int) -> None:
        """Once a turn: files that are read whole go on."""
        self._traffic.step(self._files, now_ns)
        if self._whole.running:
            self._whole.step(now_ns)

    def describe_file(self, path: str) -> dict[str, dict[str, Any] | None]:
        """See RangeSource: of a file that is read here and there; None: this one is not."""
        of = next((one for one in self._files.values() if one.file.path == path), None)
        return {"whole": describe(of.visited) if of is not None else None}


def _blocks(start: int, end: int) -> tuple[int, int]:
    """Those that [start, end) bytes lie in."""
    return start // BLOCK_BYTES, -(-end // BLOCK_BYTES)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, those that meet joined."""
    found = list[tuple[int, int]]()
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
