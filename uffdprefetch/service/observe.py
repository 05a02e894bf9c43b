# SPDX-License-Identifier: Apache-2.0
"""Processes whose mappings are found in /proc and followed by their page tables.

With `--engine off`, where nothing is interposed, all of the job's. Else what an LD_PRELOAD does
not see: static programs, Go, raw system calls, and processes that change their address space
without the interposers (Sightings.bypasses). Mappings that only read a file are found in
/proc/PID/maps. Nothing in the job is changed, so pages that stay mapped do not show again: later
epochs are only seen where the kernel has unmapped what it reclaimed.
"""

from __future__ import annotations

import time

from uffdprefetch.base.clock import MS
from uffdprefetch.base.procfs import (
    descendants,
    file_readers,
    maps_text,
    read_files,
    unserved_files,
)
from uffdprefetch.service.found import FoundMappings
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger

LOOK_NS = 250 * MS
#: Those of which agents tell: what was mapped past them is found.
LOOK_ALL_NS = 1000 * MS
#: Reading the maps takes one part in this many of a core at most: 37 ms where there are 32 000.
LOOK_COST = 100


class Observer:
    """Looks from time to time at what /proc shows of the job's processes."""

    def __init__(
        self, clients: dict[int, Client], found: FoundMappings, ledger: Ledger, min_bytes: int,
        everybody: bool,
    ) -> None:  # fmt: skip
        """``everybody``: `--engine off`, nobody else tells of mappings."""
        self._clients = clients
        self._found = found
        self._ledger = ledger
        self._min_bytes = min_bytes
        self._everybody = everybody
        self._next_ns = 0
        self._next_all_ns = 0
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
        agents = {c.pid: c for c in self._clients.values() if not c.observed}
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
            self._found.forget(pids - agents.keys())
            self._before, self._strangers = self._strangers, set()
        self._round = [
            pid for pid in pids | agents.keys() if self._every or agents[pid].sightings.bypasses
        ]

    def _look_at_next(self, agents: dict[int, Client]) -> None:
        """One of them a turn: its maps may have a thousand lines, and are locked while it forks."""
        pid = self._round.pop()
        self._look_at(pid, agents.get(pid), self._everybody or pid in self._before)
        if self._every:
            for path, position in read_files(pid, self._min_bytes):
                self._ledger.jobs.by_calls(pid, path, position)

    def _look_at(self, pid: int, client: Client | None, stranger: bool) -> None:
        """``stranger``: no agent will tell of this process."""
        maps = maps_text(pid)
        if maps is None:
            return
        self._found.name_unserved(pid, unserved_files(maps, self._min_bytes))
        mappings = file_readers(maps, self._min_bytes)
        client = client or self._clients.get(-pid)
        if client is None:
            if not mappings:
                return
            self._strangers.add(pid)
            if not stranger:
                return
            try:
                client = self._found.meet(pid, maps)
            except OSError:  # out of descriptors
                return
        self._found.reconcile(client, mappings)
