# SPDX-License-Identifier: Apache-2.0
"""The mappings that are managed: they come, are told of, and become the job's own again."""

from __future__ import annotations

import errno
import os

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.protocol import wire
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.pagetables import LOOK_FIRST_NS
from uffdprefetch.service.brief import BriefKinds
from uffdprefetch.service.pooled import PooledMappings
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import (
    FIRST_OBSERVED,
    Reader,
    Region,
    forget_unmapped,
    reader_of,
    readers_of,
)
from uffdprefetch.state.region_state import AgentState, ScanState
from uffdprefetch.state.unserved import Coarse
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.windows import Windows

NEVER_NS = 1 << 62
#: Of these no look into a page table tells: the pool's faults do, and sightings of calls.
TOLD = (wire.ServingMode.POOL, wire.ServingMode.READS)

_BYPASS = {
    wire.Bypass.UNMAPPED: "one was unmapped or replaced",
    wire.Bypass.MOVED: "one was moved",
    wire.Bypass.REPLACED: "another lies where one was",
    wire.Bypass.PATCHED: "a library has overwritten munmap or the like, as UCX and libfabric do",
}


class ManagedMappings:
    """Those of all processes of the job on this node."""

    def __init__(
        self, config: Config, table: FileTable, arbiter: Arbiter, scheduler: Scheduler,
        windows: Windows, ledger: Ledger, clock: Clock, pooled: PooledMappings | None,
    ) -> None:  # fmt: skip
        #: The processes: agents by their sockets' descriptors, who is only observed by -pid.
        self.clients: dict[int, Client] = {}
        self.brief = BriefKinds()
        self._config, self._table, self._arbiter = config, table, arbiter
        self._scheduler, self._windows, self._ledger = scheduler, windows, ledger
        self._clock, self._pooled = clock, pooled

    def readers(self) -> list[Reader]:
        """Who has mapped what, now."""
        return readers_of(self.clients)

    # -------------------------------------------------------------- they come and go

    def adopt(
        self, client: Client, a: wire.Attach, file: FileState, mode: wire.ServingMode
    ) -> Region:
        """A mapping is managed from now on, in this way."""
        now = self._clock.now_ns()
        region = Region(
            id=a.region,
            file=file,
            address=a.address,
            length_bytes=a.length_bytes,
            offset_bytes=a.offset_bytes,
            mode=mode,
            reader=reader_of(client, file),
            mapped_ns=now,
            scan=ScanState(now + LOOK_FIRST_NS, now),
            agent=AgentState(a.anchor),
        )
        file.mappings.came(copies=bool(a.flags & wire.ATTACH_COPIES))
        client.regions[region.id] = region
        region.agent.brings_lease = not any(n < FIRST_OBSERVED for n in region.reader.regions)
        region.reader.add(region)
        self._arbiter.attached(region)
        copied = a.flags & wire.ATTACH_INHERITED and a.flags & wire.ATTACH_COPIES
        if copied or a.flags & wire.ATTACH_STATED:
            pagetables.note_mapped(region)  # by fork(2), which copies page tables; or populated
        if mode in TOLD:
            region.scan.due_ns = NEVER_NS
        if self._pooled is not None:
            self._pooled.attached(client, region)
        return region

    def detached(self, client: Client, region_id: int) -> None:
        """The mapping is gone from our management (unmapped, or given back)."""
        client.pending.drop(region_id)
        region = client.regions.pop(region_id, None)
        if region is None:
            return
        self._note_gone(region)
        if self._pooled is not None:
            self._pooled.detached(client, region)
        reader = region.reader
        reader.remove(region)
        self._arbiter.unmapped(region)
        if not reader.regions:
            self._arbiter.take_back(reader)
            for old in forget_unmapped(client):
                self._left(old)
        self._table.left(region.file, client.pid)

    def _note_gone(self, region: Region) -> None:
        file, lived_ns = region.file, self._clock.now_ns() - region.mapped_ns
        file.mappings.went()
        in_vain = file.mappings.gone == 1 and not file.blocks.any_gained
        self.brief.note(file.path, lived_ns, in_vain)

    def gone(self, client: Client, region_id: int, reason: int) -> None:
        """Its agent does not manage a mapping any more (wire.Gone)."""
        region = client.regions.get(region_id)
        wanted = reason == wire.Gone.WANTED
        if wanted and region is not None:
            client.sightings.refused.add(region.address)  # else it is found in /proc (observe.py)
        self.detached(client, region_id)
        if wanted and region is not None and not region.file.mappings.attached:
            self._table.hurry(region.file)
        if reason == wire.Gone.WRITTEN and region is not None:
            self.writer_came(region.file)

    def forget(self, client: Client) -> None:
        """A process that was met without an agent has ended, or has one by now."""
        for region in list(client.regions):
            self.detached(client, region)
        self.left(client)
        client.close()

    def left(self, client: Client) -> None:
        """The process is gone, and its mappings are."""
        for reader in client.readers.values():
            self._left(reader)

    def _left(self, reader: Reader) -> None:
        self._ledger.note_streams(
            reader, self._windows.late_extents, is_served=self._config.guesses
        )
        self._arbiter.left(reader)

    # -------------------------------------------------------------- what agents tell of them

    def not_pooled(self, client: Client, region: Region, error: int) -> None:
        """The agent has not mapped the pool's memory: the mapping is the file's."""
        why = (
            "the service did not answer in time when it was mapped"
            if error == errno.ETIMEDOUT
            else os.strerror(error)
        )
        self._ledger.degrade(f"a mapping is not served by the pool: {why}", region.file.path)
        if not client.page_table.is_readable:
            self.give_back(client, region)
            return
        if self._pooled is not None:
            self._pooled.refused(client, region)
        region.mode = wire.ServingMode.PAGE_TABLES
        region.scan.due_ns = self._clock.now_ns() + LOOK_FIRST_NS
        coarse = Coarse.NOT_POOLED
        if not any(one.pooled for one in self.readers() if one.file is region.file):
            self._ledger.serving.unserved(region.file)
        self._ledger.attached(region.file, region.mode, f"{coarse.words}: {why}", coarse)

    def bypassed(self, client: Client, reason: int) -> None:
        """A process changes its address space without the interposers: from now on it is followed
        by what /proc says of it (service/observe.py)."""
        if client.sightings.bypasses:
            return
        client.sightings.bypasses = True
        how = _BYPASS[wire.Bypass(reason)] if reason in _BYPASS else f"reason {reason}"
        self._ledger.bypassing += 1
        self._ledger.degrade(
            f"pid {client.pid} ({client.hello.command}) changes its mappings without libc's "
            f"functions ({how}): followed by page tables, nothing is laid over them"
        )
        for region in list(client.regions.values()):
            if region.mode != wire.ServingMode.POOL:
                self.detached(client, region.id)

    # -------------------------------------------------------------- the job's own again

    def give_up(self, file: FileState, why: str) -> None:
        """The file changes: every region of it becomes the job's own mapping again."""
        if file.guard.changed is None:
            file.guard.give_up(why)
            self._table.note_changed(file)
            self._ledger.degrade(f"{why} during the run; given back to the kernel", file.path)
        self._scheduler.forget_file(file)
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
            client.agent.command(wire.Type.DETACH, region.id, [])

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
                if region.file is file and region.mode != wire.ServingMode.PAGE_TABLES:
                    self.give_back(client, region)
