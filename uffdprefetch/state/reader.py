# SPDX-License-Identifier: Apache-2.0
"""A process that reads a file, its mappings of it, and what is known of how it reads.

It outlives its mappings: a job may map a file anew for each batch (nanoGPT does).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Protocol

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native import uffd
from uffdprefetch.native.uffd import PageTable
from uffdprefetch.predict.checkpoints import Span
from uffdprefetch.predict.randomness import Access, RandomnessDetector
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.streams import FORGET_NS, STREAMS_MAX, Stream, StreamTable
from uffdprefetch.predict.used import FirstMisses
from uffdprefetch.protocol import wire
from uffdprefetch.protocol.wire import ServingMode, Stated
from uffdprefetch.state import processes
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.region_state import AgentState, CheckpointState, ScanState

#: First number of regions that no agent numbered (service/observe.py); agents' numbers are below
#: (csrc/job/mapping.c, claim_region).
FIRST_OBSERVED = 1 << 32
#: How far from a mapping the position of a stream in it may be: that is the end of a page, or of
#: what one fault maps.
NEXT_TO_BYTES = 64 << 10
#: Readers of files that are not mapped now, kept for each process; the oldest goes first.
UNMAPPED_MAX = 256
#: Looks that tell what a miss brings.
FIRST_LOOKS = 64
#: Ranges that are kept of which a reader has no use; of more, from all over the file, none is.
UNNEEDED_MAX = 64


class Trait(Enum):
    """What was seen of a reader, once seen for good: whether a predictor may know something of it
    (readers/predictor.py)."""

    SKIPS = "one of its streams leaves something out"
    JUMPS = "it has jumped about"


@dataclass
class OrderState:
    """What is known of the order that a reader follows (readers/known_order.py)."""

    followed: bool = False  # there is one
    inferred: bool = False  # ... and it was taken from how the reader walks
    last_progress_ns: int = 0  # when it was last heard how far it is; 0: never
    pending_since_ns: int = 0  # since when an order is to become known; 0: none is
    #: What was found mapped meanwhile, and not before: [start, end) of the file.
    early: list[tuple[int, int]] = field(default_factory=list)
    left_until_ns: int = 0  # nothing is read ahead in it until then: that would save nothing

    @property
    def announced(self) -> bool:
        """Whether the order is known from elsewhere than from how the reader walks."""
        return self.followed and not self.inferred


@dataclass
class PoolTouches:
    """Touches of the pool's memory by a reader."""

    last_mode: ServingMode | None = None  # of the mapping that was touched last, the pool's or not
    planned: int = 0  # while its order was known
    #: thread -> (whose stream it is on, whose it touched last)
    walkers: dict[int, tuple[Stream, Stream]] = field(default_factory=dict)

    def follow(self, tid: int, stream: Stream) -> None:
        """A thread is on the stream of its last two touches: a single one may be a tree's page."""
        on, last = self.walkers.pop(tid, (stream, stream))
        self.walkers[tid] = (stream if stream is last else on), stream
        if len(self.walkers) > STREAMS_MAX:  # there are no more to follow
            del self.walkers[next(iter(self.walkers))]

    def followed(self, streams: Iterable[Stream], now: int) -> list[Stream]:
        """Those that threads are on: they predict the next uses of blocks. A stream that ended
        where another began, and a reader's few steps through a tree, do not count: each would
        protect blocks and be prefetched for."""
        since = now - FORGET_NS  # idle for longer it protects no blocks from eviction
        on = {id(stream) for stream, _ in self.walkers.values()}
        return [stream for stream in streams if id(stream) in on and stream.last_ns > since]


@dataclass
class Unneeded:
    """Of which parts of the file its job has said that it has no use for them now."""

    ranges: IntervalSet = field(default_factory=IntervalSet)
    said_ns: int = 0  # when it said so last

    def touched(self, start: int, end: int, at_ns: int) -> list[tuple[int, int]]:
        """[start, end) is read all the same: the ranges with which that is over."""
        if at_ns <= self.said_ns or not self.ranges.overlaps(start, end):
            return []
        over = [(a, b) for a, b in self.ranges if a < end and start < b]
        for a, b in over:
            self.ranges.remove(a, b)
        return over

    def clear(self) -> None:
        """Keep none."""
        self.ranges = IntervalSet()


@dataclass
class Region:
    """A managed mapping of one process. Addresses and offsets in bytes."""

    id: int
    file: FileState
    address: int
    length_bytes: int
    offset_bytes: int
    mode: ServingMode
    reader: Reader
    mapped_ns: int = 0  # since then it is ours
    reads: Stated = Stated.NORMAL  # how the job says that it reads it
    agent: AgentState = field(default_factory=AgentState)
    checkpoints: CheckpointState = field(default_factory=CheckpointState)
    scan: ScanState = field(default_factory=ScanState)

    @property
    def span(self) -> Span:
        """The mapped range of the file."""
        end = min(self.offset_bytes + self.length_bytes, self.file.size_bytes)
        return Span(self.offset_bytes, end, uffd.PAGE_BYTES)

    @property
    def lease_fd(self) -> int:
        """What its agent is to have, to give the file's lease back by; -1: nothing."""
        return self.file.opened.fd if self.agent.brings_lease and self.file.guard.leased else -1

    @property
    def streams(self) -> list[Stream]:
        """Of its reader's streams those that are in it."""
        low, high = self.offset_bytes - NEXT_TO_BYTES, self.offset_bytes + self.length_bytes
        return [
            s for s in self.reader.table.streams if low <= s.position_bytes <= high + NEXT_TO_BYTES
        ]

    def offset_of(self, address: int) -> int:
        """The file offset at an address of the mapping."""
        return self.offset_bytes + address - self.address

    def address_of(self, offset: int) -> int:
        """The address of a file offset."""
        return self.address + offset - self.offset_bytes


class AgentCommands(Protocol):
    """What an agent can be asked for (agent_link.py)."""

    def command(self, kind: wire.Type, region: int, pages: list[int]) -> None:
        """Do something with a mapping."""


class Process(Protocol):
    """Whose reader it is (client.py), as far as the core asks it something."""

    rank: int
    pid: int
    page_table: PageTable
    readers: dict[Key, Reader]
    regions: dict[int, Region]

    @property
    def world(self) -> int:
        """How many ranks there are; 0: nobody has said."""

    @property
    def agent(self) -> AgentCommands:
        """Its agent."""

    def descends_from(self, pid: int) -> bool:
        """Whether it is this process or one of its descendants."""


class FirstLooks:
    """What the misses of a process have brought of a file, by the first looks that have found
    nothing but that, one after another: nothing of it had been read ahead, or was under way, for
    which its reader may have waited. What the first look of all finds was touched since nobody
    knows when, beside faults of a program that starts."""

    def __init__(self, pid: int) -> None:
        self._pid, self._looks = pid, 0
        self._faults: int | None = None
        self._looked_ns = 0
        self.found = FirstMisses()

    @property
    def over(self) -> bool:
        """Whether none is to come."""
        return self._looks >= FIRST_LOOKS

    def look(self, region: Region, news: list[tuple[int, int]]) -> None:
        """``news``: what is mapped now, and was not at the last look, [start, end) bytes."""
        laid, blocks, mapped = region.checkpoints.laid, region.file.blocks, region.scan.mapped
        under_way = region.file.under_way
        since_ns = region.scan.last_end_ns - self._looked_ns
        self._looked_ns = region.scan.last_end_ns
        before, self._faults = self._faults, None
        own = list[tuple[int, int]]()
        for start, end in news:
            if end - start <= uffd.PAGE_BYTES and start // uffd.PAGE_BYTES in laid:
                continue
            if not blocks.is_own(start, end, *under_way):
                return
            own.append((start, end))
        self._faults = processes.major_faults(self._pid)
        if before is None or self._faults is None or not own:
            return
        self._looks += 1
        mapped_bytes = sum(end - start for start, end in own)
        around = _from_before(own, BLOCK_BYTES)
        lies_in = sum(max(1, -(-(end - start) // BLOCK_BYTES) - 1) for start, end in around)
        # each miss here has mapped a page at least; or of a block all but the page at which the
        # kernel would read on
        near, most = 1, mapped_bytes // uffd.PAGE_BYTES
        if 2 * mapped_bytes >= lies_in * BLOCK_BYTES:
            near, most = BLOCK_BYTES, lies_in
        runs = sum(
            not (mapped.overlaps(start, start + near) or mapped.overlaps(end, end + near))
            for start, end in _from_before(own, near)
        )
        # the process may have missed elsewhere, too
        faults = min(max(0, self._faults - before), most)
        misses = FirstMisses(faults, mapped_bytes, runs, lies_in, max(0, since_ns))
        self.found = self.found.plus(misses)


def _from_before(ranges: list[tuple[int, int]], near: int) -> IntervalSet:
    """Each of the ranges from so many bytes before it, with those that are that near."""
    found = IntervalSet()
    for start, end in ranges:
        found.add(start - near, end)
    return found


class Reader:
    """``table``: the streams of its touches; ``jumps``: whether they go in order; ``order``: the
    known order that it follows. Regions by their numbers."""

    def __init__(self, client: Process, file: FileState) -> None:
        self.client, self.file = client, file
        self.regions: dict[int, Region] = {}
        self._measure()
        self.jumps = RandomnessDetector(file.size_bytes)
        self.traits: set[Trait] = set()
        self.seen_ns = 0  # its last touch
        self.table = StreamTable(client.rank, client.pid)
        self.order = OrderState()
        self.pool = PoolTouches()
        self.unneeded = Unneeded()
        self._first_looks = FirstLooks(client.pid)

    @property
    def rank(self) -> int:
        """The rank of its process."""
        return self.client.rank

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.client.pid

    def add(self, region: Region) -> None:
        """A mapping of it has come."""
        self.regions[region.id] = region
        self.unneeded.clear()
        self._measure()

    def remove(self, region: Region) -> None:
        """One has gone."""
        del self.regions[region.id]
        self._measure()

    def _measure(self) -> None:
        spans = [region.span for region in self.regions.values()]
        start = min((span.start_bytes for span in spans), default=0)
        #: From the first to the last byte that it has mapped.
        self.span = Span(start, max((s.end_bytes for s in spans), default=0), uffd.PAGE_BYTES)

    @property
    def pooled(self) -> bool:
        """Whether a mapping of it is the pool's memory."""
        return any(region.mode == ServingMode.POOL for region in self.regions.values())

    @property
    def reads_pool(self) -> bool:
        """Whether what it needs next is to be in the pool's memory. A process may have mappings of
        both kinds: then it is where it was last touched that tells."""
        if any(region.mode == self.pool.last_mode for region in self.regions.values()):
            return self.pool.last_mode == ServingMode.POOL
        return self.pooled

    @property
    def access(self) -> Access:
        """How it goes through the file."""
        return self.jumps.access

    @property
    def says_random(self) -> bool:
        """Whether its job says so, of a mapping of it."""
        return any(region.reads == Stated.RANDOM for region in self.regions.values())

    def saw(self, start: int, end: int, at_ns: int, passed_over: bool) -> None:
        """A touch, see RandomnessDetector.saw."""
        self.seen_ns = at_ns
        self.jumps.saw(start, end, at_ns, passed_over)
        if self.jumps.access is Access.JUMPS:
            self.traits.add(Trait.JUMPS)

    def looked(self, region: Region, news: list[tuple[int, int]]) -> None:
        """A look at a mapping has found ``news``, [start, end) bytes. To the file's books, what its
        own misses have brought so far. (Of the pool's memory no touch is one of the kernel's.)"""
        if self._first_looks.over or self.pooled:
            return
        self._first_looks.look(region, news)
        used = self.file.blocks.used
        used.first = max(used.first, self._first_looks.found, key=lambda first: first.tells)

    def forget_jumps(self) -> None:
        """What it has touched so far is no sign of what it will touch."""
        self.jumps = RandomnessDetector(self.file.size_bytes)


def reader_of(client: Process, file: FileState) -> Reader:
    """The reader that a process is of a file, which it maps now."""
    reader = client.readers.pop(file.key, None) or Reader(client, file)
    client.readers[file.key] = reader  # the last one now: of those it maps no more the oldest go
    reader.file = file  # it may have been closed, and opened again
    return reader


def forget_unmapped(client: Process) -> list[Reader]:
    """Drop what is too much to keep of files that a process does not map: the readers that it was
    of those."""
    unmapped = [key for key, one in client.readers.items() if not one.regions]
    return [client.readers.pop(key) for key in unmapped[: max(0, len(unmapped) - UNMAPPED_MAX)]]


def readers_of(clients: Mapping[int, Process]) -> list[Reader]:
    """Those that have a mapping now."""
    return [r for client in clients.values() for r in client.readers.values() if r.regions]
