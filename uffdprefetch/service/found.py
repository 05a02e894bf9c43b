# SPDX-License-Identifier: Apache-2.0
"""Mappings that were found in /proc (observe.py): offered as an agent would, and taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from uffdprefetch.base import file_systems
from uffdprefetch.base.identity import identify
from uffdprefetch.base.procfs import Mapping, environment, is_static, preloaded
from uffdprefetch.protocol import wire
from uffdprefetch.state.admission import FileTable, in_memory
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opened, Opener
from uffdprefetch.state.reader import FIRST_OBSERVED
from uffdprefetch.state.unserved import Reason, Refusal


class FoundHandler(Protocol):
    """Who manages them (mappings.py), as far as what is found concerns it."""

    def detached(self, client: Client, region_id: int) -> None:
        """A mapping is gone."""

    def forget(self, client: Client) -> None:
        """Who was met without an agent has ended, or has one by now."""


class FoundMappings:
    """Those of the job's processes; ``clients``: those without an agent by their negative pids."""

    def __init__(
        self, clients: dict[int, Client], mappings: FoundHandler,
        observed: Callable[[Client, wire.Attach, Opened], None], table: FileTable, opener: Opener,
        ledger: Ledger,
    ) -> None:  # fmt: skip
        """``observed``: told of a mapping of which no agent tells."""
        self._clients, self._mappings, self._observed = clients, mappings, observed
        self._table = table
        self._opener, self._ledger = opener, ledger
        self._regions = FIRST_OBSERVED

    def meet(self, pid: int, maps: str = "") -> Client:
        """A process without an agent that maps files, by its /proc/PID/maps. Raises OSError."""
        try:
            command = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        except OSError:
            command = "?"
        who = identify(environment(pid))
        rank, local, world = (-1 if n is None else n for n in (who.rank, who.local_rank, who.world))
        hello = wire.Hello(
            wire.Role.AGENT, pid, 0, rank, local, world, 0, 0, 0, 0, 0, 0, command[:15]
        )
        client = Client(None, hello, pid)
        client.sightings.is_static = bool(maps) and is_static(maps)
        client.sightings.is_loaded = preloaded(maps)
        self._ledger.processes.hello(client)
        self._clients[-pid] = client
        return client

    def forget(self, pids: set[int]) -> None:
        """All that are not these: they have ended, or have an agent now."""
        for key in [k for k, c in self._clients.items() if c.observed and c.pid not in pids]:
            self._mappings.forget(self._clients.pop(key))

    def reconcile(self, client: Client, mappings: list[Mapping]) -> None:
        """These are a process's: what is not known of them, and what is known and not of them."""
        mapped = [r for r in client.regions.values() if r.mode != wire.ServingMode.READS]
        told = [r for r in mapped if r.id < FIRST_OBSERVED]
        at = {m.start: m for m in mappings}
        for region in mapped:
            mapping = at.get(region.address)
            key = mapping and (mapping.inode, mapping.offset)
            if key == (region.file.key[1], region.offset_bytes):
                client.sightings.note_found(region.id)
            elif region.id >= FIRST_OBSERVED or client.sightings.was_missing(region.id):
                self._mappings.detached(client, region.id)  # gone, or another file's
            elif region.mode != wire.ServingMode.POOL:
                client.sightings.note_missing(region.id)
        known = {r.address for r in mapped}
        # Ours, not the job's; a child of fork(2) whose agent has said nothing yet has its parent's.
        known |= {r.agent.anchor for c in self._clients.values() for r in c.regions.values()}
        client.sightings.keep_only(at)
        eager = client.observed or client.sightings.bypasses
        new = set()
        if client.pending.by_agent:
            mappings = []  # one that an agent told of is not among the regions yet
        for mapping in mappings:
            if mapping.start in known or mapping.start in client.sightings.refused:
                continue
            if any(r.address <= mapping.start < r.address + r.length_bytes for r in told):
                continue
            # An agent may be about to tell of it.
            if eager or client.sightings.was_new(mapping.start):
                self._offer(client, mapping)
            else:
                new.add(mapping.start)
        client.sightings.note_new(new)

    def _offer(self, client: Client, mapping: Mapping) -> None:
        """Open it by its name, and serve it if it is still what is mapped."""
        client.sightings.refused.add(mapping.start)  # until it is served
        if self._table.has_changed(mapping.path):
            return  # not even opened: that alone may drop what the job has in memory of it
        self._opener.open(
            f"/proc/{client.pid}/root{mapping.path}",
            lambda opened: self._opened(client, mapping, opened),
        )

    def _opened(self, client: Client, mapping: Mapping, opened: Opened | OSError) -> None:
        if isinstance(opened, OSError):
            return
        st = opened.status
        number = st.st_dev, st.st_ino
        key = -client.pid if client.observed else client.agent.fd
        gone = self._clients.get(key) is not client
        another = st.st_ino != mapping.inode or mapping.offset >= st.st_size
        if gone or another or self._table.has_changed(mapping.path, number):
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
        self._observed(client, offered, opened)
        if offered.region in client.regions:
            client.sightings.refused.discard(mapping.start)

    def name_unserved(self, pid: int, unserved: Iterable[tuple[str, int, bool]]) -> None:
        """For the summary, once a file: (path, mapped bytes, whether it is deleted) of mappings of
        which no agent tells."""
        for path, mapped_bytes, deleted in unserved:
            if path in self._ledger.unserved:
                continue
            if deleted:
                why = Refusal(Reason.DELETED, "deleted while it was mapped")
                self._ledger.refuse(path, why, mapped_bytes)
                continue
            why = Refusal(Reason.SHARED_WRITABLE, "mapped shared and writable")
            self._ledger.refuse(path, why, mapped_bytes)
            self._opener.open(
                f"/proc/{pid}/root{path}", partial(self._is_in_memory, path, mapped_bytes)
            )

    def _is_in_memory(self, path: str, mapped_bytes: int, opened: Opened | OSError) -> None:
        if isinstance(opened, OSError):
            return
        file_system = file_systems.known(opened.f_type)
        opened.close()
        if file_system.in_memory:
            self._ledger.refuse(path, in_memory(file_system.name), mapped_bytes)
