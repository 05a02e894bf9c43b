# SPDX-License-Identifier: Apache-2.0
"""Regions, files and processes of the job on this node: what comes in, and what is told to whom
(docs/architecture.md).

A turn of the service: events and scans -> the arbiter (readers/arbiter.py) -> ranges -> the
scheduler (warm/scheduler.py) -> checkpoints armed again behind. Nothing here blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.procfs import may_write
from uffdprefetch.native import uffd
from uffdprefetch.native.memory_limits import Limits
from uffdprefetch.predict import window
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol import wire
from uffdprefetch.readers.advice import Advice
from uffdprefetch.readers.ahead import Ahead
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.readers.file_stream import Room
from uffdprefetch.readers.fixed_windows import FixedWindows
from uffdprefetch.readers.next_shard import NextShard
from uffdprefetch.readers.stated import StatedRanges
from uffdprefetch.readers.tensor_starts import TensorStarts
from uffdprefetch.readers.walks import Walks
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.sense.pagetable_scan import LOOK_FIRST_NS, PagetableScanner
from uffdprefetch.service.brief import BriefKinds
from uffdprefetch.service.offers import Offers
from uffdprefetch.service.pool_bridge import PoolBridge
from uffdprefetch.service.serving import Serving, by_page_tables, serving_of
from uffdprefetch.state.admission import REUSED, FileTable
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opened, Opener
from uffdprefetch.state.processes import Watched
from uffdprefetch.state.publisher import MAJORS, TOUCH, EventPublisher
from uffdprefetch.state.reader import (
    FIRST_OBSERVED,
    Reader,
    Region,
    forget_unmapped,
    reader_of,
    readers_of,
)
from uffdprefetch.state.region_state import AgentState, ScanState
from uffdprefetch.state.unserved import FOR_GOOD, Coarse, Reason, Refusal
from uffdprefetch.warm.placement import CheckpointPlacer
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.windows import Windows

if TYPE_CHECKING:
    from uffdprefetch.pool.node_pool import NodePool
    from uffdprefetch.readers.known_order import KnownOrders

#: Counting the places at which files are read may take one part in this many of a core.
PLACES_COST = 25
NEVER_NS = 1 << 62
#: Why a file is given up of which somebody wants the lease.
OPENED_FOR_WRITING = "opened for writing"
#: Statements kept of a mapping whose file is being opened: as many as its agent keeps
#: (csrc/job/agent.h, UP_STATEMENTS).
EARLY_MAX = 64


_BYPASS = {
    wire.Bypass.UNMAPPED: "one was unmapped or replaced",
    wire.Bypass.MOVED: "one was moved",
    wire.Bypass.REPLACED: "another lies where one was",
    wire.Bypass.PATCHED: "a library has overwritten munmap or the like, as UCX and libfabric do",
}


def _not_opened(error: OSError) -> Refusal:
    return Refusal(Reason.NOT_OPENED, f"it cannot be opened ({error.strerror})")


class Coordinator:
    """Regions, streams and checkpoints of all processes of the job on this node."""

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        ledger: Ledger,
        publisher: EventPublisher | None = None,
        opener: Opener | None = None,
        clock: Clock = CLOCK,
        limits: Limits | None = None,
        waiting: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Without an ``opener``: one that nobody steps, for tests of what needs none. ``waiting``:
        how many readers wait at one time, side by side."""
        self.opener = opener or Opener(-1)
        self.clock = clock
        self.limits = limits or Limits(config.budget_bytes)
        self.config = config
        self.scheduler = scheduler
        self.ledger = ledger
        self.publisher = publisher or EventPublisher()
        guesses = config.policy in Ahead.policies
        self.windows = Windows(config, scheduler)
        self.layout = CheckpointPlacer(self.windows, ledger, clock)
        self.walks = Walks(config.policy, ledger, self.windows)
        self.room = Room(config, self.windows, self.limits)
        self.arbiter = Arbiter(
            config.policy, scheduler, self.layout, self.walks, clock, self.readers
        )
        want = self.arbiter.want
        self.stated = StatedRanges(
            config, scheduler, want, ledger, self.room, clock,
            (lambda stream: self.ahead.said(stream)) if guesses else None,
        )  # fmt: skip
        self._table = FileTable(config, scheduler, ledger, clock)
        self._brief = BriefKinds()
        self.next_shard = NextShard(self._table, self.opener, scheduler)
        self.advice = Advice(config.policy, self.arbiter, self.stated, clock)
        self.arbiter.add(FixedWindows(config, scheduler, self.publisher, self.windows))
        self.ahead = Ahead(
            scheduler, ledger, self.publisher, self.room, self._share_bytes, self.next_shard,
            self.arbiter.in_charge, want, self.windows, waiting,
        )  # fmt: skip
        if guesses:
            self.arbiter.add(self.ahead)
            scheduler.on_sent = self.ahead.sent
        self.tensor_starts = TensorStarts(
            config.policy, want, self.walks, self.windows, self.opener, self.ahead.room_bytes
        )
        self._looks = PagetableScanner(
            self.windows, self.publisher, self._seen, clock,
            pace=self.ahead.look_ns if guesses else None,
        )  # fmt: skip
        self.clients: dict[int, Client] = {}
        self.pool: NodePool | None = None
        self._bridge: PoolBridge | None = None
        self.known_orders: KnownOrders | None = None
        self._offers = Offers(scheduler, ledger, clock) if config.lays_checkpoints else None
        self._places_due_ns = 0

    @property
    def files(self) -> dict[Key, FileState]:
        """The files under management."""
        return self._table.files

    @property
    def table(self) -> FileTable:
        """All of them, and those that nobody maps now."""
        return self._table

    def readers(self) -> list[Reader]:
        """Who has mapped what, now."""
        return readers_of(self.clients)

    def use_pool(self, pool: NodePool) -> None:
        """`--engine pool`: mappings that can be are served from there."""
        self.pool = self._table.pool = pool
        self._bridge = PoolBridge(
            pool, self, self.arbiter, self.windows, self.ledger, self.publisher
        )
        self.scheduler.pool = pool.pool
        self.windows.pool = pool

    def use_known_orders(self, known_orders: KnownOrders) -> None:
        """The orders of some readers are known, or may be told."""
        self.known_orders = known_orders

    # -------------------------------------------------------------- regions come and go

    def attach(self, client: Client, a: wire.Attach, fd: int | None) -> None:
        """An agent offers a mapping: decide how it is served and tell it. ``fd``: what is mapped,
        None where an earlier one of the same file must do."""
        for region in [
            r for r in client.regions.values() if r.address == a.address and r.id >= FIRST_OBSERVED
        ]:  # found in /proc before its agent told of it
            self.detached(client, region.id)
        file = self._table.known(a, fd)
        if file is not None:
            if fd is not None:
                uffd.close_file(fd)
            self._decide(client, a, file, file.path, None)
            return
        if fd is None:  # inherited, and not open here (yet): it is found in /proc (observe.py)
            client.tell(a.region, wire.ServingMode.REFUSE, [])
            return
        # of O_PATH, which an agent sends where it can, the agent has looked
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            # who may open it again could read it all the same: it was not meant to be
            uffd.close_file(fd)
            self._decide(client, a, None, f"inode {a.inode}", REUSED)
            return
        client.opening.add(a.region)
        self.opener.open(fd, lambda opened: self._opened(client, a, opened))

    def look_for_writer(self, a: wire.Attach) -> None:
        """Before attach(): somebody may have opened the file for writing while this process stood
        still."""
        file = self.files.get((a.device, a.inode, a.size_bytes, a.mtime_ns))
        if (
            file is not None
            and file.guard.changed is None
            and file.guard.lease_breaking(file.opened.fd)
        ):
            self.give_up(file, OPENED_FOR_WRITING)

    def observed(self, client: Client, a: wire.Attach, opened: Opened) -> None:
        """A mapping was found in /proc of which no agent tells."""
        client.opening.add(a.region)
        self._opened(client, a, opened)

    def _opened(self, client: Client, a: wire.Attach, opened: Opened | OSError) -> None:
        if a.region not in client.opening:  # gone meanwhile
            if not isinstance(opened, OSError):
                opened.close()
            return
        client.opening.discard(a.region)
        file, path, why = None, f"inode {a.inode}", None
        if isinstance(opened, OSError):
            path, why = opened.filename or path, _not_opened(opened)
        else:
            try:
                file, path, why = self._table.admit(a, opened)
            except OSError as error:
                why = _not_opened(error)
            except (MemoryError, OverflowError):
                why = Refusal(Reason.TOO_LARGE, "too large for the service's memory")
        self._decide(client, a, file, path, why)

    def _decide(
        self, client: Client, a: wire.Attach, file: FileState | None, path: str,
        why: Refusal | None,
    ) -> None:  # fmt: skip
        if file is None:
            assert why is not None
            self._refuse(client, a, path, why, [])
            return
        if self.config.keeps_copies and not file.guard.changed:
            self._look_for_writer_in(client, a, file)
        serving, fds = self._serving_of(client, a, file)
        wanted: list[int] = []
        # a mapping that can be written says nothing of the others, nor does one of many at once
        apart = wire.ATTACH_WRITABLE | wire.ATTACH_COPIES | wire.ATTACH_INHERITED | wire.ATTACH_MANY
        settled = self.pool is None and not a.flags & apart
        if serving.mode == wire.ServingMode.CHECKPOINTS and self._offers is not None:
            wanted, fds, unsettled = self._offers.wanted(
                a, reader_of(client, file), self.config.spacing_bytes
            )
            settled = settled and not unsettled
        if a.flags & wire.ATTACH_INHERITED and self.config.keeps_copies:
            fds = [*fds, file.opened.map_fd] if fds else [file.opened.map_fd, file.opened.map_fd]
        if serving.refusal is not None:
            self._refuse(client, a, path, serving.refusal, fds)
            return
        region = self.adopt(client, a, file, serving.mode)  # before its first fault
        if serving.mode != wire.ServingMode.POOL:
            self.arbiter.begin(file, a.offset_bytes)
        if wanted and self._offers is not None:
            self._offers.make(client, region, wanted, fds[0])
        else:
            client.tell(a.region, serving.mode, fds, settled, lease_fd=region.lease_fd)
        self.advice.attached(region, a.advice)
        if a.flags & wire.ATTACH_STATED:
            self.advice.populated(region)
        for said in client.early.pop(a.region, ()):
            self._said(region, said)
        self.publisher.region(client, region)
        self.ledger.attached(file, serving.mode, serving.reason, serving.coarse)

    def _serving_of(
        self, client: Client, a: wire.Attach, file: FileState
    ) -> tuple[Serving, list[int]]:
        """How the mapping is served, and what the job maps in its place: the pool's memory."""
        serving = serving_of(client, a, file, self.config)
        if self._bridge is None or serving.mode != wire.ServingMode.CHECKPOINTS:
            return serving, []
        is_new = file.pooled is None and self.config.cluster is None  # no other node can have it
        if is_new and self._brief.has(file.path):
            return by_page_tables(client, Coarse.BRIEF), []
        fds, told = self._bridge.accept(client, file)
        if fds:
            return Serving(wire.ServingMode.POOL, told), fds
        if file.pooled is not None or not self.config.lays_checkpoints:
            # (of what the pool has pages and checkpoints are not compared at once)
            serving = by_page_tables(client, Coarse.NOT_POOLED, f": {told}")
        return serving, []

    def _look_for_writer_in(self, client: Client, a: wire.Attach, file: FileState) -> None:
        """Whether the process has the file open for writing, where no lease would tell."""
        if a.flags & wire.ATTACH_WRITABLE or (
            not (file.guard.leased or file.guard.writer) and may_write(client.pid, file.path)
        ):
            self.writer_came(file)

    def _refuse(
        self, client: Client, a: wire.Attach, path: str, why: Refusal, fds: list[int]
    ) -> None:
        client.early.pop(a.region, None)
        client.refused.add(a.address)
        client.tell(a.region, wire.ServingMode.REFUSE, fds, settled=why.reason in FOR_GOOD)
        self.ledger.refuse(path, why, a.length_bytes)

    def heard(self, client: Client, said: wire.Statement) -> None:
        """A job has said something of a mapping."""
        region = client.regions.get(said.region)
        if region is not None:
            self._said(region, said)
        elif said.region in client.opening:
            early = client.early.setdefault(said.region, [])
            if len(early) < EARLY_MAX:
                early.append(said)

    def _said(self, region: Region, said: wire.Statement) -> None:
        span = region.span
        start, end = max(said.start_bytes, span.start_bytes), min(said.end_bytes, span.end_bytes)
        if start < end:
            self.advice.said(region, said.what, start, end)

    # -------------------------------------------------------------- what agents tell

    def seen_last(self, client: Client, region_id: int, runs: list[tuple[int, int]]) -> None:
        """A mapping goes, and these runs of its file were in the page table."""
        region = client.regions.get(region_id)
        if region is None or region.verdict == wire.ServingMode.POOL:
            return
        low, high, touched = (
            region.offset_bytes,
            region.offset_bytes + region.length_bytes,
            IntervalSet(),
        )
        for start, end in runs:
            if max(start, low) < min(end, high):
                touched.add(max(start, low), min(end, high))
        if touched:
            found = [(start, end - start) for start, end in touched]
            self._looks.last_look(region, found, self.clock.now_ns())

    def laid(self, client: Client, ack: wire.Ack) -> None:
        """The agent says how many of a mapping's checkpoints it has laid; of a command, what
        failed, which changes nothing: page tables tell as well."""
        region = client.regions.get(ack.region)
        if region is None or ack.sequence:
            return
        if ack.error and region.verdict == wire.ServingMode.POOL:
            self._without_pool(client, region, ack.error)
        if self._offers is not None:
            self._offers.laid(client, region, ack.done, ack.error)

    def _without_pool(self, client: Client, region: Region, error: int) -> None:
        """The agent has not mapped the pool's memory: the mapping is the file's."""
        why = (
            "the service did not answer in time when it was mapped"
            if error == errno.ETIMEDOUT
            else os.strerror(error)
        )
        self.ledger.degrade(f"a mapping is not served by the pool: {why}", region.file.path)
        if client.pagemap_fd < 0:
            self.give_back(client, region)
            return
        if self.pool is not None:
            self.pool.detach(client, region)
        region.verdict = wire.ServingMode.PAGE_TABLES
        region.scan.due_ns = self.clock.now_ns() + LOOK_FIRST_NS
        coarse = Coarse.NOT_POOLED
        if not any(one.pooled for one in self.readers() if one.file is region.file):
            self.ledger.serving.unserved(region.file)
        self.ledger.attached(region.file, region.verdict, f"{coarse.words}: {why}", coarse)

    def bypassed(self, client: Client, reason: int) -> None:
        """A process changes its address space without the interposers: from now on it is followed
        by what /proc says of it (service/observe.py)."""
        if client.bypasses:
            return
        client.bypasses = True
        how = _BYPASS[wire.Bypass(reason)] if reason in _BYPASS else f"reason {reason}"
        self.ledger.bypassing += 1
        self.ledger.degrade(
            f"pid {client.pid} ({client.hello.command}) changes its mappings without libc's "
            f"functions ({how}): followed by page tables, nothing is laid over them"
        )
        for region in list(client.regions.values()):
            if region.verdict != wire.ServingMode.POOL:
                self.detached(client, region.id)

    def adopt(
        self, client: Client, a: wire.Attach, file: FileState, verdict: wire.ServingMode
    ) -> Region:
        """A mapping is managed from now on, in this way."""
        now = self.clock.now_ns()
        region = Region(
            id=a.region,
            file=file,
            address=a.address,
            length_bytes=a.length_bytes,
            offset_bytes=a.offset_bytes,
            verdict=verdict,
            reader=reader_of(client, file),
            mapped_ns=now,
            scan=ScanState(now + LOOK_FIRST_NS, now),
            agent=AgentState(a.anchor),
        )
        file.mappings.came(copies=bool(a.flags & wire.ATTACH_COPIES))
        client.regions[region.id] = region
        region.agent.brings_lease = not any(n < FIRST_OBSERVED for n in region.reader.regions)
        region.reader.add(region)
        if self.known_orders is not None:  # its order begins before its first touch
            self.known_orders.mapped(client)
            self.arbiter.due(region)
        copied = a.flags & wire.ATTACH_INHERITED and a.flags & wire.ATTACH_COPIES
        if copied or a.flags & wire.ATTACH_STATED:
            pagetables.note_mapped(region)  # by fork(2), which copies page tables; or populated
        if verdict == wire.ServingMode.POOL and self.pool:
            region.scan.due_ns = NEVER_NS  # its faults tell
            self.pool.attach(client, region)
        self.stated.mapped(region)
        self.tensor_starts.mapped(region)
        return region

    def detached(self, client: Client, region_id: int) -> None:
        """The mapping is gone from our management (unmapped, or given back)."""
        client.opening.discard(region_id)
        client.early.pop(region_id, None)
        region = client.regions.pop(region_id, None)
        if region is None:
            return
        region.file.mappings.went()
        if self.pool:
            self._brief.note(region.file.path, self.clock.now_ns() - region.mapped_ns)
        if self.pool and region.verdict == wire.ServingMode.POOL:
            self.pool.detach(client, region)
        reader = region.reader
        reader.remove(region)
        self.arbiter.unmapped(region)
        if not reader.regions:
            self.arbiter.take_back(reader)
            for old in forget_unmapped(client):
                self._left(old)
        self._table.left(region.file, client.pid)

    def gone(self, client: Client, region_id: int, reason: int) -> None:
        """Its agent does not manage a mapping any more (wire.Gone)."""
        region = client.regions.get(region_id)
        wanted = reason == wire.Gone.WANTED
        if wanted and region is not None:
            client.refused.add(region.address)  # else it is found in /proc (observe.py)
        self.detached(client, region_id)
        if wanted and region is not None and not region.file.mappings.attached:
            self._table.hurry(region.file)
        if reason == wire.Gone.WRITTEN and region is not None:
            self.writer_came(region.file)

    def left(self, client: Client) -> None:
        """The process is gone, and its mappings are."""
        for reader in client.readers.values():
            self._left(reader)

    def _left(self, reader: Reader) -> None:
        self.ledger.note_streams(
            reader, self.windows.late_extents, is_served=self.config.policy in Ahead.policies
        )
        self.arbiter.left(reader)

    def give_up(self, file: FileState, why: str) -> None:
        """The file changes: every region of it becomes the job's own mapping again."""
        if file.guard.changed is None:
            file.guard.give_up(why)
            self._table.note_changed(file)
            self.ledger.degrade(f"{why} during the run; given back to the kernel", file.path)
        self.scheduler.forget_file(file)
        for client in self.clients.values():
            for region in [r for r in client.regions.values() if r.file is file]:
                self.give_back(client, region)

    def give_back(self, client: Client, region: Region) -> None:
        """The mapping becomes the job's own again: by its agent, if it told of it. Else nothing of
        ours lies there."""
        if region.id >= FIRST_OBSERVED:
            self.detached(client, region.id)
        elif not region.agent.detaching:
            region.agent.detaching = True
            client.command(wire.Type.DETACH, region.id, [])

    def writer_came(self, file: FileState) -> None:
        """A process of the job has the file open for writing. Where there is no lease to tell of
        its first write, nothing is laid over the file from now on: copies of ours would not show
        it, and who writes it from its own mapping would wait for the pool's read of that, and this
        for the writer (csrc/job/writer.c)."""
        if file.guard.writer or file.guard.leased:
            return
        file.guard.writer_came()
        for client in self.clients.values():
            for region in client.regions.values():
                if region.file is file and region.verdict != wire.ServingMode.PAGE_TABLES:
                    self.give_back(client, region)

    # -------------------------------------------------------------- progress

    def on_events(self, client: Client, events: Iterable[uffd.Event]) -> None:
        """Armed checkpoints that were touched: the page tables, which are looked at in this turn,
        tell where their readers have begun. Where they cannot be read the touch itself tells."""
        now, told = self.clock.now_ns(), dict[int, Batch]()
        for event in events:
            region = client.regions.get(event.region)
            self.ledger.checkpoints.fault_wait.add(event.handle_ns)
            start = event.page * uffd.PAGE_BYTES
            # the ring is the client's memory: believe what can be
            if region is None or not region.span.start_bytes <= start < region.span.end_bytes:
                continue
            at_ns = min(event.time_ns, now)
            if event.page in region.checkpoints.laid:
                region.checkpoints.fired[event.page] = at_ns
            region.scan.due_ns = min(region.scan.due_ns, now)
            region.scan.news_ns = now
            self.publisher.put(
                TOUCH, at_ns, client.pid, region.file, start, uffd.PAGE_BYTES, event.handle_ns,
                tid=event.tid,
            )  # fmt: skip
            if client.pagemap_fd < 0:
                end = start + uffd.PAGE_BYTES
                around = start - BLOCK_BYTES, end + BLOCK_BYTES
                new = region.scan.mapped.missing(*around) == [around]
                seen = Observation(start, end, at_ns, new)
                told.setdefault(region.id, Batch(region, now)).touches.append(seen)
        for batch in told.values():
            self.arbiter.observe(batch)

    def on_pool_events(self) -> None:
        """What has happened in the pool, if there is one."""
        if self._bridge is not None:
            self._bridge.take_events()

    def _seen(self, batch: Batch) -> None:
        """A look at a mapping has found something."""
        if batch.region.file.blocks.tensor_starts:
            self.tensor_starts.scanned(batch.region, batch.found)
        self.arbiter.observe(batch)

    def look(self, now: int) -> None:
        """Read the page tables that are due: new streams, and progress where no uffd tells."""
        self.windows.begin_turn()
        known = sum(len(r.regions) for r in self.readers() if r.order.announced)
        crowd = sum(len(client.regions) for client in self.clients.values())
        for client in self.clients.values():
            for region in client.regions.values():
                if now >= region.scan.due_ns and not region.agent.detaching:
                    announced = region.reader.order.announced
                    self._looks.look(region, now, known if announced else 1, crowd)
        if self.stated.books:
            self.stated.step(now)
        self.ahead.step(now)

    # -------------------------------------------------------------- windows

    @property
    def due_ns(self) -> int | None:
        """When plan() is due though nothing happens."""
        offered_ns = self._offers.due_ns if self._offers is not None else None
        due = [at for at in (offered_ns, self.arbiter.due_ns) if at is not None]
        return min(due, default=None)

    def plan(self) -> None:
        """Windows for every region that was touched since the last turn, checkpoints for those that
        have just been mapped."""
        if self._offers is not None:
            self._offers.hand_out()
        if self.arbiter.idle:
            return
        if self.clock.now_ns() >= self._places_due_ns:
            self._count_places()
        self.arbiter.plan()

    def _count_places(self) -> None:
        """At how many places files are read, which share what may be ahead of them: 12 ms of ten
        thousand readers."""
        began = self.clock.cpu_ns()
        readers = self.readers()
        self.windows.places = window.places(
            (id(reader.file), stream.position_bytes)
            for reader in readers
            for stream in reader.table.active()
        )
        if self.pool is not None:
            self.pool.note_places(
                (reader.file, stream)
                for reader in readers
                if reader.pooled
                for stream in reader.table.active()
            )
        cost_ns = self.clock.cpu_ns() - began
        self._places_due_ns = self.clock.now_ns() + PLACES_COST * cost_ns

    def window_bytes(self, stream: Stream) -> int:
        """What a walk has, or is to have, ahead of it."""
        if self.config.policy in Ahead.policies:
            return self.windows.ahead_bytes(stream)
        return self.windows.of(stream).size_bytes

    def room_bytes(self, file: FileState) -> int:
        """How much of a file may be in memory."""
        if self.pool is not None and file.pooled is not None:
            return self.pool.budget_bytes
        return self.windows.allowed_bytes

    def _share_bytes(self, file: FileState) -> tuple[int, int]:
        """How much of a file may lie ahead of one place at which it is read, and of all
        together."""
        room = self.room_bytes(file)
        if self.pool is not None and file.pooled is not None:
            return self.pool.window_bytes(walk=True), room
        return room // max(1, self.windows.places), room

    def allowed_bytes(self, pooled: bool) -> int:
        """How much may lie ahead of a reader, of the pool or not."""
        if self.pool is not None and pooled:
            return self.pool.window_bytes()
        return self.windows.allowed_bytes // max(1, len(self.clients))

    def plan_evictions(self) -> None:
        """Have blocks ready to leave the pool, if there is one."""
        if self._bridge is not None:
            self._bridge.plan_evictions(self.clock.now_ns(), self.known_orders, self.next_shard)

    def refresh_all(self) -> None:
        """Once a second: what has fired long ago is armed again even where nothing moves."""
        for file in self.files.values():
            file.cache.forget_recent()
        for reader in [one for client in self.clients.values() for one in client.readers.values()]:
            reader.table.expire(self.clock.now_ns())
            self.arbiter.end_walks(reader)
            for region in reader.regions.values():
                if not region.agent.detaching:
                    self.layout.refresh(region)

    # -------------------------------------------------------------- end

    def sample(self, watched: Watched) -> None:
        """Read the counters of a process; a recorder hears of its major faults."""
        before = watched.now.major_faults
        watched.sample()
        more = watched.now.major_faults - before
        if more > 0:
            self.publisher.put(MAJORS, self.clock.now_ns(), watched.pid, None, 0, 0, more)

    def account_all(self, client: Client) -> None:
        """Read all page tables of a process while they are there: what was used."""
        for region in client.regions.values():
            start = region.offset_bytes
            if region.verdict == wire.ServingMode.POOL:
                continue
            while start < region.span.end_bytes:
                found = pagetables.runs(region, start, region.span.end_bytes)
                pagetables.note_used(region, found)
                if len(found) < uffd.RUNS_AT_ONCE:
                    break
                start = found[-1][0] + found[-1][1]
