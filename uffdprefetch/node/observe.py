# SPDX-License-Identifier: Apache-2.0
"""`--engine off`: nothing is interposed; the job's mappings are found in /proc and watched there.

For what an LD_PRELOAD cannot enter (static programs, Go), and as a baseline. Read-only file
mappings of the job's process tree are read from /proc/PID/maps a few times a second; progress comes
from the page tables. Nothing in the job can be changed from outside, so pages that stay mapped do
not show again: later epochs are only seen where the kernel has unmapped what it reclaimed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from uffdprefetch.identity import identify
from uffdprefetch.node import wire
from uffdprefetch.node.client import Client
from uffdprefetch.node.engine import MS, CacheEngine
from uffdprefetch.node.ledger import Ledger

LOOK_NS = 250 * MS
PROCESSES_MAX = 1024


@dataclass(frozen=True)
class Mapping:
    """A line of /proc/PID/maps that is worth watching. Addresses and sizes in bytes."""

    start: int
    end: int
    offset: int
    inode: int
    shared: bool
    path: str


def read_only_files(maps: str, min_bytes: int) -> list[Mapping]:
    """The read-only, not executable file mappings of at least min_bytes in a maps text."""
    found = []
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) < 6 or fields[1][:3] != "r--" or not fields[5].startswith("/"):
            continue
        start, end = (int(x, 16) for x in fields[0].split("-"))
        if end - start >= min_bytes and not fields[5].endswith(" (deleted)"):
            shared = fields[1][3] == "s"
            found.append(
                Mapping(start, end, int(fields[2], 16), int(fields[4]), shared, fields[5])
            )
    return found


def descendants(pid: int) -> list[int]:
    """``pid`` and its children's children, by /proc/PID/task/TID/children."""
    found: list[int] = []
    queue = [pid]
    while queue and len(found) < PROCESSES_MAX:
        one = queue.pop()
        found.append(one)
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                queue += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except (OSError, ValueError):
            continue
    return found


class Observer:
    """Keeps the engine's clients equal to what /proc shows of the job's processes."""

    def __init__(self, engine: CacheEngine, ledger: Ledger, min_bytes: int) -> None:
        self._engine = engine
        self._ledger = ledger
        self._min_bytes = min_bytes
        self.next_ns = 0
        self._regions = 0

    def look(self, jobs: list[int], now_ns: int) -> None:
        """Once every LOOK_NS: find processes and mappings that have come or gone."""
        if now_ns < self.next_ns:
            return
        self.next_ns = now_ns + LOOK_NS
        pids = {pid for job in jobs for pid in descendants(job)}
        clients = self._engine.clients
        for key in [k for k, c in clients.items() if c.observed and c.pid not in pids]:
            client = clients.pop(key)
            for region in list(client.regions):
                self._engine.detached(client, region)
            self._engine.bulk.left(client)
            client.close()
        for pid in pids:
            self._look_at(pid)

    def _look_at(self, pid: int) -> None:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
        except OSError:
            return
        mappings = {m.start: m for m in read_only_files(maps, self._min_bytes)}
        client = self._engine.clients.get(-pid)
        if client is None:
            if not mappings:
                return
            try:
                client = self._engine.clients[-pid] = self._meet(pid)
            except OSError:  # out of descriptors
                return
        for region in list(client.regions.values()):
            mapping = mappings.get(region.address)
            key = mapping and (mapping.inode, mapping.offset)
            if key != (region.file.key[1], region.offset_bytes):  # gone, or another file's
                self._engine.detached(client, region.id)
        known = {r.address for r in client.regions.values()}
        client.refused &= set(mappings)
        for address, mapping in mappings.items():
            if address not in known and address not in client.refused:
                self._offer(client, mapping)

    def _meet(self, pid: int) -> Client:
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
        self._ledger.hello(client)
        return client

    def _offer(self, client: Client, mapping: Mapping) -> None:
        try:
            fd = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            client.refused.add(mapping.start)
            return
        st = os.fstat(fd)
        if st.st_ino != mapping.inode or mapping.offset >= st.st_size:
            os.close(fd)
            client.refused.add(mapping.start)
            return
        self._regions += 1
        length = min(mapping.end - mapping.start, st.st_size - mapping.offset)
        offered = wire.Attach(
            region=self._regions,
            flags=0,
            address=mapping.start,
            length_bytes=length,
            offset_bytes=mapping.offset,
            device=st.st_dev,
            inode=st.st_ino,
            size_bytes=st.st_size,
            mtime_ns=st.st_mtime_ns,
            map_flags=1 if mapping.shared else 2,
            advice_swallowed=0,
        )
        self._engine.attach(client, offered, fd)
        if offered.region not in client.regions:
            client.refused.add(mapping.start)
