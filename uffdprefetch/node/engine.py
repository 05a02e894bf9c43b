# SPDX-License-Identifier: Apache-2.0
"""The `cache` engine: touches in, windows and checkpoints out (design, section 2).

The order of one turn of the service: take events -> streams (progress/) -> windows (plan/) ->
extents (warm/) -> checkpoints laid ahead, armed again or taken away behind. Nothing here blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from uffdprefetch import uffd
from uffdprefetch.config import Config
from uffdprefetch.intervals import IntervalSet
from uffdprefetch.node import pagetables, pool_bridge, wire
from uffdprefetch.node.admission import FileTable
from uffdprefetch.node.bulk import Bulk
from uffdprefetch.node.client import Client, Region
from uffdprefetch.node.files import BLOCK_BYTES, FileState, Key
from uffdprefetch.node.layout import Layout
from uffdprefetch.node.ledger import Ledger
from uffdprefetch.node.looking import LOOK_FIRST_NS, PageTableLooks, tell_seen
from uffdprefetch.node.processes import Watched
from uffdprefetch.node.tap import MAJORS, TOUCH, WINDOW, Tap
from uffdprefetch.plan import checkpoints, window
from uffdprefetch.progress.streams import Stream, StreamTable
from uffdprefetch.warm.scheduler import Scheduler, now_ns

if TYPE_CHECKING:
    from uffdprefetch.node.planned import Plans
    from uffdprefetch.node.pool import NodePool
    from uffdprefetch.node.strided import Strides

MS = 1_000_000
#: The set over the whole file is one small read each on cold storage: later than the first window.
SPARSE_DELAY_NS = 100 * MS
STARTS_MAX = 32
#: A known order is looked at so often: what lies ahead lasts much longer.
PLAN_NS = 10 * MS
#: Laying failed: the commands of the last moment fail for the same reason.
HALVE_NS = 1000 * MS
NEVER_NS = 1 << 62
#: While an order is to become known, for so long at most, only walks that leave out less than this
#: get windows: of records in a shuffled order some follow each other by chance.
AWAIT_NS = 2000 * MS
AWAIT_DENSITY = 0.5


class CacheEngine:
    """Regions, streams and checkpoints of all processes of the job on this node."""

    def __init__(
        self, config: Config, scheduler: Scheduler, ledger: Ledger, tap: Tap | None = None
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.ledger = ledger
        self.tap = tap or Tap()
        self.layout = Layout(config, scheduler, ledger)
        self.bulk = Bulk(config, scheduler, ledger, self.layout)
        self._looks = PageTableLooks(self.layout, self.tap, self._mapped, self._looked)
        self._table = FileTable(config, scheduler, ledger)
        self.clients: dict[int, Client] = {}
        self.resolver: uffd.Resolver | None = None
        self.pool: NodePool | None = None
        self.plans: Plans | None = None
        self.strides: Strides | None = None
        self._touched: dict[int, tuple[Client, Region]] = {}

    @property
    def files(self) -> dict[Key, FileState]:
        """The files under management."""
        return self._table.files

    def use_pool(self, pool: NodePool) -> None:
        """`--engine pool`: mappings that can be are served from there."""
        self.pool = self._table.pool = pool
        self.scheduler.pool = pool.pool
        self.layout.pool = pool

    def use_plans(self, plans: Plans) -> None:
        """The orders of some readers are known, or may be told."""
        self.plans = self.layout.plans = plans

    def use_strides(self, strides: Strides) -> None:
        """Orders of readers that skip are inferred."""
        self.strides = strides

    def plans_came(self) -> None:
        """Orders have come, or readers have said how far they are: every mapping is looked at."""
        for client in self.clients.values():
            for region in client.regions.values():
                self._touched[id(region)] = (client, region)

    # -------------------------------------------------------------- regions come and go

    def attach(self, client: Client, a: wire.Attach, fd: int | None) -> None:
        """A mapping is offered: decide how it is served and tell the agent."""
        file, path, why = None, f"inode {a.inode}", ""
        try:
            file, path, why = self._table.find(a, fd)
        except OSError as error:
            why = f"cannot open it for warming: {error.strerror}"
        except (MemoryError, OverflowError):
            why = f"{a.size_bytes} bytes are too many for our books"
        verdict = wire.Verdict.CHECKPOINTS
        reason = "userfaultfd with kernel faults works in the job"
        if file is None or file.changed:
            verdict = wire.Verdict.REFUSE
            if file is not None and file.changed:
                why = file.changed
        elif a.flags & wire.ATTACH_WRITABLE:
            verdict = wire.Verdict.PAGE_TABLES
            self._writer_came(file)
            reason = "opened for writing (O_RDWR); open it read-only (lmdb: readonly=True)"
        elif file.writer:
            verdict = wire.Verdict.PAGE_TABLES
            reason = "a writer has it open; open it read-only everywhere (lmdb: readonly=True)"
        elif not client.has_uffd:
            verdict = wire.Verdict.PAGE_TABLES
            reason = (
                "engine off: later epochs hardly show"
                if client.observed
                else f"no userfaultfd ({os.strerror(client.hello.uffd_error)}): see doctor"
            )
        if verdict == wire.Verdict.PAGE_TABLES and client.pagemap_fd < 0:
            verdict, why = wire.Verdict.REFUSE, f"page table of the job: {client.pagemap_error}"
        fds: list[int] = []
        if file is not None and verdict == wire.Verdict.CHECKPOINTS and self.pool:
            fds, told = pool_bridge.accept(self, self.pool, client, a, file)
            if fds:
                verdict, reason = wire.Verdict.POOL, told
            elif file.pooled is not None:
                verdict, why = wire.Verdict.REFUSE, "the pool has the file, and cannot serve this"
        if file is not None and verdict not in (wire.Verdict.REFUSE, wire.Verdict.POOL):
            try:
                fds = [file.checkpoint_fds()[1]]
            except OSError as error:
                verdict, why = wire.Verdict.REFUSE, str(error)
        if a.flags & wire.ATTACH_INHERITED and file is not None:
            fds = [*fds, file.map_fd] if fds else [file.map_fd, file.map_fd]
        if verdict == wire.Verdict.REFUSE or file is None:
            client.send(wire.pack(wire.Type.FILE, wire.FILE.pack(a.region, verdict)), fds)
            self.ledger.refuse(path, why)
            return
        self._adopt(client, a, file, verdict)  # before its first fault
        client.send(wire.pack(wire.Type.FILE, wire.FILE.pack(a.region, verdict)), fds)
        self.layout.refresh(client, client.regions[a.region])
        self.tap.region(client, client.regions[a.region])
        self.ledger.attached(file, verdict, reason)

    def _adopt(
        self, client: Client, a: wire.Attach, file: FileState, verdict: wire.Verdict
    ) -> None:
        end = min(a.offset_bytes + a.length_bytes, file.size_bytes)
        region = Region(
            id=a.region,
            file=file,
            address=a.address,
            length_bytes=a.length_bytes,
            offset_bytes=a.offset_bytes,
            verdict=verdict,
            shared=a.map_flags & wire.MAP_TYPE != wire.MAP_PRIVATE,
            table=StreamTable(client.rank, client.pid),
            span=checkpoints.Span(a.offset_bytes, end, uffd.PAGE_BYTES),
            sparse_from_ns=now_ns() + SPARSE_DELAY_NS,
            look_at_ns=now_ns() + LOOK_FIRST_NS,
            look_every_ns=LOOK_FIRST_NS,
        )
        file.attached += 1
        client.regions[region.id] = region
        if self.plans is not None:  # its order begins before its first touch
            self.plans.mapped(client)
            self._touched[id(region)] = (client, region)
        if self.resolver and client.resolver_slot >= 0:
            self.resolver.map(
                client.resolver_slot, region.id, a.address, a.length_bytes, a.offset_bytes
            )
        if verdict == wire.Verdict.CHECKPOINTS:
            # all together a quarter, however many mappings there are: the dense sets need the rest
            quarter = client.overlay_share // 4
            used = sum(len(other.sparse) for other in client.regions.values())
            most = min(quarter // len(client.regions), quarter - used)
            region.sparse = checkpoints.sparse(region.span, most, self.config.distance_bytes)
        elif verdict == wire.Verdict.POOL and self.pool:
            region.look_at_ns = NEVER_NS  # its faults tell
            self.pool.attach(client, region)

    def detached(self, client: Client, region_id: int) -> None:
        """The mapping is gone from our management (unmapped, or given back)."""
        region = client.regions.pop(region_id, None)
        if region is None:
            return
        region.file.attached -= 1
        if self.pool and region.verdict == wire.Verdict.POOL:
            self.pool.detach(client, region)
        for stream in region.table.streams:
            self.scheduler.forget(stream)
        if self.plans is not None:
            self.plans.left(region)
        self.bulk.note_streams(client, region)
        if self.resolver and client.resolver_slot >= 0:
            self.resolver.unmap(client.resolver_slot, region_id)
        self._touched.pop(id(region), None)

    def give_up(self, file: FileState, why: str) -> None:
        """The file changes: every region of it becomes the job's own mapping again."""
        if file.changed is None:
            file.changed = why
            self.ledger.degrade(f"{file.path}: {why} during the run; given back to the kernel")
        self.scheduler.forget_file(file)
        for client in self.clients.values():
            for region in client.regions.values():
                if region.file is file and not region.detaching:
                    region.detaching = True
                    client.command(wire.Type.DETACH, region.id, [])

    def _writer_came(self, file: FileState) -> None:
        """A process of the job has the file open for writing. Where there is no lease to tell of
        its first write, checkpoints of other processes end now and are not laid again."""
        if file.writer or file.leased:
            return
        file.writer = True
        for client in self.clients.values():
            for region in client.regions.values():
                ours = region.verdict != wire.Verdict.PAGE_TABLES
                if region.file is file and ours and not region.detaching:
                    region.detaching = True
                    client.command(wire.Type.DETACH, region.id, [])

    def lay_failed(self, client: Client, ack: wire.Ack) -> None:
        """The agent could not do all of a command (out of mappings, memory): want less."""
        region = client.regions.get(ack.region)
        pages = client.laying.pop(ack.sequence, None)
        if region is None or not ack.error or pages is None:
            return
        region.laid.difference_update(pages[ack.done :])
        now = now_ns()
        if now - client.halved_ns < HALVE_NS:  # the rest of one burst
            return
        client.halved_ns = now
        client.overlay_share = max(8, client.overlay_share // 2)
        self.ledger.degrade(
            f"pid {client.pid}: a checkpoint could not be laid ({os.strerror(ack.error)}); "
            f"now at most {client.overlay_share}"
        )

    # -------------------------------------------------------------- progress

    def on_events(self, client: Client, events: Iterable[uffd.Event]) -> None:
        """Armed checkpoints that were touched."""
        now = now_ns()
        for event in events:
            region = client.regions.get(event.region)
            self.ledger.fault_wait.add(event.handle_ns)
            start = event.page * uffd.PAGE_BYTES
            # the ring is the client's memory: believe what can be
            if region is None or not region.span.start_bytes <= start < region.span.end_bytes:
                continue
            at_ns = min(event.time_ns, now)
            if event.page in region.laid:
                region.fired[event.page] = at_ns
            self.tap.put(
                TOUCH, at_ns, client.pid, region.file, start, uffd.PAGE_BYTES, event.handle_ns,
                tid=event.tid,
            )  # fmt: skip
            end = start + uffd.PAGE_BYTES
            if region.known:
                self.touch_planned(client, region, start, end, at_ns)
            else:
                around = start - BLOCK_BYTES, end + BLOCK_BYTES
                new = region.seen.missing(*around) == [around]
                self.touch(client, region, start, end, at_ns, new=new)
            if self.plans is not None:
                self.plans.touch(client, region, start, end, at_ns)

    def on_pool_events(self) -> None:
        """What has happened in the pool, if there is one."""
        if self.pool is not None:
            pool_bridge.take_events(self, self.pool)

    def touch(
        self, client: Client, region: Region, start: int, end: int, at_ns: int, *,
        new: bool = False,
    ) -> tuple[Stream, int]:  # fmt: skip
        """Progress: (whose walk it is, how many bytes that went on). ``new``: the reader was never
        here before."""
        stream, forward = region.table.touch(start, end, at_ns)
        self._forget_absorbed(region)
        if self.config.policy == "fixed" and region.verdict == wire.Verdict.CHECKPOINTS:
            stream.active = True  # paper 1: the checkpoint that is hit first triggers
        self.ledger.touch(stream.rank, start, at_ns)
        news = mapped = end - start
        if forward:
            first = stream.position_bytes - (forward if stream.direction > 0 else 0)
            if region.verdict == wire.Verdict.POOL:
                found = [(first, forward)]  # mapped in runs: more is not known
            else:
                found = pagetables.runs(client, region, first, first + forward)
            pagetables.note_used(region, found)
            stream.saw(forward, found)
            for a, n in found:
                mapped += n
                for low, high in region.seen.missing(a, a + n):
                    news += high - low
                    if self.tap.active and region.verdict != wire.Verdict.POOL:
                        tell_seen(self.tap, client, region, low, high)
                region.seen.add(a, a + n)
        if self.bulk.saw(
            region, stream, (start, end, at_ns), forward, (news, news if new else mapped)
        ):
            region.table.absorbed += region.table.streams
            region.table.streams.clear()  # what looks like walks is none
            self._forget_absorbed(region)
        elif stream.active and len(region.starts) < STARTS_MAX:
            region.starts |= checkpoints.near(region.span, stream.start_bytes - BLOCK_BYTES)
        self._touched[id(region)] = (client, region)
        if self.strides is not None:
            self.strides.touch(client, region, stream, at_ns)
        return stream, forward

    def _mapped(
        self, client: Client, region: Region, start: int, end: int, at_ns: int
    ) -> None:
        """A look has found pages that are mapped between two places, and booked each of them."""
        if region.known:
            self._gone_on(client, region, start, end, at_ns)
        else:
            self.touch(client, region, start, end, at_ns, new=True)

    def touch_planned(
        self, client: Client, region: Region, start: int, end: int, at_ns: int
    ) -> None:
        """Progress of a reader whose order is known, which has been told of: streams would say
        nothing more."""
        self._gone_on(client, region, start, end, at_ns)
        region.file.mark_used(start, end)
        region.seen.add(start, end)

    def _gone_on(
        self, client: Client, region: Region, start: int, end: int, at_ns: int
    ) -> None:
        self._touched[id(region)] = (client, region)
        self.ledger.touch(region.table.rank, start, at_ns)
        self.bulk.saw_planned(region, start, end, at_ns)

    def _forget_absorbed(self, region: Region) -> None:
        while region.table.absorbed:
            self.scheduler.forget(region.table.absorbed.pop())

    def _looked(self, client: Client, region: Region, found: list[tuple[int, int]]) -> None:
        """What one look has found mapped."""
        if self.plans is not None and self.plans.looked(client, region, found, now_ns()):
            self._touched[id(region)] = (client, region)

    def look(self, now: int) -> None:
        """Read the page tables that are due: new streams, and progress where no uffd tells."""
        known = sum(r.known for c in self.clients.values() for r in c.regions.values())
        for client in self.clients.values():
            for region in client.regions.values():
                if now >= region.look_at_ns and not region.detaching:
                    self._looks.look(client, region, now, known if region.known else 1)
                    rest = self.bulk.rest_ns(region)
                    region.look_at_ns = max(region.look_at_ns, now + rest)
                    if region.sparse_from_ns <= now < region.sparse_from_ns + region.look_every_ns:
                        self._touched[id(region)] = (client, region)
        self.bulk.step(now)

    # -------------------------------------------------------------- windows

    @property
    def due_ns(self) -> int | None:
        """When plan() is due though nothing happens."""
        return min((r.planned_ns + PLAN_NS for _, r in self._touched.values()), default=None)

    def plan(self) -> None:
        """Windows and checkpoints for every region that was touched since the last turn."""
        if not self._touched:
            return
        self.ledger.active_streams = sum(
            len(r.table.active()) for c in self.clients.values() for r in c.regions.values()
        )
        if self.pool is not None:
            self.pool.note_places(
                (region.file, stream)
                for client in self.clients.values()
                for region in client.regions.values()
                if region.verdict == wire.Verdict.POOL
                for stream in region.table.active()
            )
        touched, self._touched = self._touched, {}
        now = now_ns()
        for client, region in touched.values():
            if region.file.changed or region.detaching:
                continue
            if region.known and now - region.planned_ns < PLAN_NS:
                self._touched[id(region)] = (client, region)
                continue
            planned = self.plans.reader(client, region) if self.plans is not None else None
            if planned is not None and not region.planned:
                for stream in region.table.streams:
                    self.scheduler.forget(stream)
            if planned is None and region.followed is not None and not region.followed.dropped:
                self.bulk.forget(region)  # it has come to its end: what follows is another matter
            region.followed = planned
            region.planned = planned is not None
            region.known = planned is not None and not planned.inferred
            region.planned_ns = now
            awaited = self.plans is not None and self.plans.pending(client, region)
            region.awaited_ns = (region.awaited_ns or now) if awaited else 0
            self.bulk.planned(region, region.planned or awaited)
            if self.plans is not None and planned is not None:
                region.heard_ns = max(planned.touched_ns, planned.said_ns)
                self.plans.plan(planned, self.scheduler.meter.storage, self._allowed(region))
            else:
                pooled = region.verdict == wire.Verdict.POOL
                for stream in pool_bridge.readers(region) if pooled else region.table.active():
                    self._plan_stream(region, stream)
            self.layout.refresh(client, region)

    def _allowed(self, region: Region) -> int:
        if self.pool is not None and region.verdict == wire.Verdict.POOL:
            return self.pool.window_bytes()
        return self.layout.allowed_bytes // max(1, len(self.clients))

    def _plan_stream(self, region: Region, stream: Stream) -> None:
        file = region.file
        if self.config.policy in ("none", "plan") or region.table.random:
            return
        if not self.bulk.trusts(region):
            return
        awaited = region.awaited_ns and now_ns() - region.awaited_ns < AWAIT_NS
        if awaited and not (stream.settled and (stream.density or 0.0) >= AWAIT_DENSITY):
            return
        if self.strides is not None and self.strides.holds(region, stream, now_ns()):
            return
        ahead = self.layout.lookahead(stream, region)
        if self.config.policy == "fixed":
            wanted = window.fixed(stream, region.span.end_bytes, ahead, self.config.threshold)
        else:
            wanted = window.auto(stream, region.span.end_bytes, ahead)
        if wanted:
            self.scheduler.want(file, stream, *wanted)
            start, end = wanted
            self.tap.put(WINDOW, now_ns(), stream.reader, file, start, end - start, 0)

    def plan_evictions(self) -> None:
        """Have blocks ready to leave the pool, if there is one."""
        if self.pool is not None:
            pool_bridge.plan_evictions(self, self.pool)

    # -------------------------------------------------------------- checkpoints

    def pages_written(self, file: FileState, pages: list[int]) -> None:
        """Checkpoint pages are in the memfd: they may be laid now."""
        for client in self.clients.values():
            for region in client.regions.values():
                if region.file is file:
                    self._touched.setdefault(id(region), (client, region))

    def refresh_all(self) -> None:
        """Once a second: what has fired long ago is armed again even where nothing moves."""
        for file in self.files.values():
            file.recent = IntervalSet()  # the kernel may have taken it back
        for client in self.clients.values():
            for region in client.regions.values():
                region.table.expire(now_ns())
                self._forget_absorbed(region)
                if not region.detaching:
                    self.layout.refresh(client, region)

    # -------------------------------------------------------------- end

    def sample(self, watched: Watched) -> None:
        """Read the counters of a process; a recorder hears of its major faults."""
        before = watched.now.major_faults
        watched.sample()
        more = watched.now.major_faults - before
        if more > 0:
            self.tap.put(MAJORS, now_ns(), watched.pid, None, 0, 0, more)

    def account_all(self, client: Client) -> None:
        """Read all page tables of a process while they are there: what was used."""
        for region in client.regions.values():
            start = region.offset_bytes
            if region.verdict == wire.Verdict.POOL:
                continue
            while start < region.span.end_bytes:
                found = pagetables.runs(client, region, start, region.span.end_bytes)
                pagetables.note_used(region, found)
                if len(found) < uffd.RUNS_AT_ONCE:
                    break
                start = found[-1][0] + found[-1][1]
