# SPDX-License-Identifier: Apache-2.0
"""Processes whose mappings are found in /proc and followed by their page tables.

With `--engine off`, where nothing is interposed, all of the job's. Else what an LD_PRELOAD does
not see: static programs, Go, raw system calls, and processes that change their address space
without the interposers (Client.bypasses). Mappings that only read a file are found in
/proc/PID/maps. Nothing in the job is changed, so pages that stay mapped do not show again: later
epochs are only seen where the kernel has unmapped what it reclaimed.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from uffdprefetch.base import file_systems
from uffdprefetch.base.clock import MS
from uffdprefetch.base.identity import identify
from uffdprefetch.base.procfs import (
    Mapping,
    descendants,
    file_readers,
    is_static,
    maps_text,
    read_files,
    unserved_files,
)
from uffdprefetch.protocol import wire
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.state.admission import in_memory
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opened
from uffdprefetch.state.reader import FIRST_OBSERVED
from uffdprefetch.state.unserved import Reason, Refusal

LOOK_NS = 250 * MS
#: Those of which agents tell: what was mapped past them is found.
LOOK_ALL_NS = 1000 * MS
#: Reading the maps takes one part in this many of a core at most: 37 ms where there are 32 000.
LOOK_COST = 100


class Observer:
    """Keeps the coordinator's clients equal to what /proc shows of the job's processes."""

    def __init__(
        self, coordinator: Coordinator, ledger: Ledger, min_bytes: int, everybody: bool
    ) -> None:
        """``everybody``: `--engine off`, nobody else tells of mappings."""
        self._coordinator = coordinator
        self._ledger = ledger
        self._min_bytes = min_bytes
        self._everybody = everybody
        self._next_ns = 0
        self._next_all_ns = 0
        self._regions = FIRST_OBSERVED
        #: Without an agent at the last look. That of a forked child may be starting.
        self._strangers: set[int] = set()
        self._before: set[int] = set()  # at the look before that
        # a round over the processes: those still to be looked at, whether that is all of them, and
        # what it has cost
        self._round: list[int] = []
        self._every, self._cost_ns = False, 0

    @property
    def due_ns(self) -> int:
        """When look() is due."""
        return self._next_ns

    def look(self, jobs: list[int], now_ns: int) -> None:
        """Find processes and mappings that have come or gone: where nothing else tells of them
        every LOOK_NS, else every LOOK_ALL_NS. One process in a turn, so that nothing else waits for
        all of them."""
        if now_ns < self._next_ns:
            return
        began = time.thread_time_ns()
        agents = {c.pid: c for c in self._coordinator.clients.values() if not c.observed}
        if not self._round:
            self._begin(jobs, now_ns, agents)
        if self._round:
            self._look_at_next(agents)
        self._cost_ns += time.thread_time_ns() - began
        if not self._round:
            self._next_ns = now_ns + max(LOOK_NS, LOOK_COST * self._cost_ns)
            if self._every:
                wait = LOOK_NS if self._strangers - self._before else LOOK_ALL_NS
                self._next_all_ns = now_ns + max(wait, LOOK_COST * self._cost_ns)

    def _begin(self, jobs: list[int], now_ns: int, agents: dict[int, Client]) -> None:
        """A round over the processes: which they are."""
        self._cost_ns = 0
        self._every = self._everybody or now_ns >= self._next_all_ns
        pids = {pid for job in jobs for pid in descendants(job)} if self._every else set()
        if self._every:
            self._forget(pids - agents.keys())
            self._before, self._strangers = self._strangers, set()
        self._round = [pid for pid in pids | agents.keys() if self._every or agents[pid].bypasses]

    def _look_at_next(self, agents: dict[int, Client]) -> None:
        """One of them a turn: its maps may have a thousand lines, and are locked while it forks."""
        pid = self._round.pop()
        self._look_at(pid, agents.get(pid), self._everybody or pid in self._before)
        if self._every:
            for path, position in read_files(pid, self._min_bytes):
                self._ledger.jobs.by_calls(pid, path, position)

    def _forget(self, pids: set[int]) -> None:
        """All that are not these: they have ended, or have an agent now."""
        clients = self._coordinator.clients
        for key in [k for k, c in clients.items() if c.observed and c.pid not in pids]:
            client = clients.pop(key)
            for region in list(client.regions):
                self._coordinator.detached(client, region)
            self._coordinator.left(client)
            client.close()

    def _look_at(self, pid: int, client: Client | None, stranger: bool) -> None:
        """``stranger``: no agent will tell of this process."""
        maps = maps_text(pid)
        if maps is None:
            return
        self._name_unserved(pid, maps)
        mappings = file_readers(maps, self._min_bytes)
        client = client or self._coordinator.clients.get(-pid)
        if client is None:
            if not mappings:
                return
            self._strangers.add(pid)
            if not stranger:
                return
            try:
                client = self._coordinator.clients[-pid] = self._meet(pid, is_static(maps))
            except OSError:  # out of descriptors
                return
        self._reconcile(client, mappings)

    def _name_unserved(self, pid: int, maps: str) -> None:
        """For the summary, once a file: no agent tells of these."""
        for path, mapped_bytes, deleted in unserved_files(maps, self._min_bytes):
            if path in self._ledger.unserved:
                continue
            if deleted:
                why = Refusal(Reason.DELETED, "deleted while it was mapped")
                self._ledger.refuse(path, why, mapped_bytes)
                continue
            why = Refusal(Reason.SHARED_WRITABLE, "mapped shared and writable")
            self._ledger.refuse(path, why, mapped_bytes)
            self._coordinator.opener.open(
                f"/proc/{pid}/root{path}", partial(self._is_in_memory, path, mapped_bytes)
            )

    def _is_in_memory(self, path: str, mapped_bytes: int, opened: Opened | OSError) -> None:
        if isinstance(opened, OSError):
            return
        file_system = file_systems.known(opened.f_type)
        opened.close()
        if file_system.in_memory:
            self._ledger.refuse(path, in_memory(file_system.name), mapped_bytes)

    def _reconcile(self, client: Client, mappings: list[Mapping]) -> None:
        told = [r for r in client.regions.values() if r.id < FIRST_OBSERVED]
        at = {m.start: m for m in mappings}
        for region in list(client.regions.values()):
            mapping = at.get(region.address)
            key = mapping and (mapping.inode, mapping.offset)
            if key == (region.file.key[1], region.offset_bytes):
                client.missed.discard(region.id)
            elif region.id >= FIRST_OBSERVED or region.id in client.missed:
                self._coordinator.detached(client, region.id)  # gone, or another file's
            elif region.verdict != wire.ServingMode.POOL:
                client.missed.add(region.id)  # its agent tells, if it knows
        known = {r.address for r in client.regions.values()}
        # Ours, not the job's; a child of fork(2) whose agent has said nothing yet has its parent's.
        known |= {
            r.agent.anchor for c in self._coordinator.clients.values() for r in c.regions.values()
        }
        client.refused &= at.keys()
        eager = client.observed or client.bypasses
        sighted = set()
        if any(number < FIRST_OBSERVED for number in client.opening):
            mappings = []  # one that an agent told of is not among the regions yet
        for mapping in mappings:
            if mapping.start in known or mapping.start in client.refused:
                continue
            if any(r.address <= mapping.start < r.address + r.length_bytes for r in told):
                continue
            # An agent may be about to tell of it.
            if eager or mapping.start in client.sighted:
                self._offer(client, mapping)
            else:
                sighted.add(mapping.start)
        client.sighted = sighted

    def _meet(self, pid: int, static: bool) -> Client:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        except OSError:
            environ, command = [], "?"
        pairs = (entry.decode(errors="replace").partition("=") for entry in environ)
        who = identify({name: value for name, _, value in pairs})
        rank, local, world = (-1 if n is None else n for n in (who.rank, who.local_rank, who.world))
        hello = wire.Hello(
            wire.Role.AGENT, pid, 0, rank, local, world, 0, 0, 0, 0, 0, 0, command[:15]
        )
        client = Client(None, hello, pid)
        client.static = static
        self._ledger.processes.hello(client)
        return client

    def _offer(self, client: Client, mapping: Mapping) -> None:
        """Open it by its name, and serve it if it is still what is mapped."""
        client.refused.add(mapping.start)  # until it is served
        if self._coordinator.table.has_changed(mapping.path):
            return  # not even opened: that alone may drop what the job has in memory of it
        self._coordinator.opener.open(
            f"/proc/{client.pid}/root{mapping.path}",
            lambda opened: self._opened(client, mapping, opened),
        )

    def _opened(self, client: Client, mapping: Mapping, opened: Opened | OSError) -> None:
        if isinstance(opened, OSError):
            return
        st = opened.status
        number = st.st_dev, st.st_ino
        key = -client.pid if client.observed else client.fd
        gone = self._coordinator.clients.get(key) is not client
        another = st.st_ino != mapping.inode or mapping.offset >= st.st_size
        if gone or another or self._coordinator.table.has_changed(mapping.path, number):
            opened.close()
            return
        self._regions += 1
        length = min(mapping.end - mapping.start, st.st_size - mapping.offset)
        offered = wire.Attach(
            region=self._regions,
            flags=wire.ATTACH_COPIES if mapping.copies else 0,
            address=mapping.start,
            length_bytes=length,
            offset_bytes=mapping.offset,
            device=st.st_dev,
            inode=st.st_ino,
            size_bytes=st.st_size,
            mtime_ns=st.st_mtime_ns,
            map_flags=1 if mapping.shared else 2,
            advice=0,
        )
        self._coordinator.observed(client, offered, opened)
        if offered.region in client.regions:
            client.refused.discard(mapping.start)
