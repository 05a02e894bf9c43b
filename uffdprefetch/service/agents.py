# SPDX-License-Identifier: Apache-2.0
"""What the agents of the job's processes say: messages, checked, to whoever manages mappings."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.native import uffd
from uffdprefetch.protocol import wire
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.processes import Watched
from uffdprefetch.state.publisher import EventPublisher

if TYPE_CHECKING:
    from uffdprefetch.pool.node_pool import NodePool

#: Mappings of one process: UP_REGIONS of csrc/job/job.h.
REGIONS_MAX = 1024
#: Addresses of a process end before this on every 64-bit Linux (five page-table levels).
ADDRESS_END = 1 << 56


class AgentHandler(Protocol):
    """Who manages them (coordinator.py), as far as agents have something to say."""

    def look_for_writer(self, a: wire.Attach) -> None:
        """Somebody may have opened the file for writing before it is mapped."""

    def attach(self, client: Client, a: wire.Attach, fd: int | None) -> None:
        """A mapping is offered."""

    def gone(self, client: Client, region_id: int, reason: int) -> None:
        """An agent does not manage a mapping any more (wire.Gone)."""

    def detached(self, client: Client, region_id: int) -> None:
        """A mapping is gone."""

    def laid(self, client: Client, ack: wire.Ack) -> None:
        """How many of a mapping's checkpoints are laid."""

    def heard(self, client: Client, said: wire.Statement) -> None:
        """The job has said something of a mapping."""

    def seen_last(self, client: Client, region_id: int, runs: list[tuple[int, int]]) -> None:
        """A mapping goes, and these runs of its file were in the page table."""

    def bypassed(self, client: Client, reason: int) -> None:
        """A process changes its address space without the interposers."""

    def on_events(self, client: Client, events: Iterable[uffd.Event]) -> None:
        """Checkpoints that were touched."""

    def on_pool_events(self) -> None:
        """What has happened in the pool, if there is one."""

    def account_all(self, client: Client) -> None:
        """Read all page tables of a process while they are there."""

    def sample(self, watched: Watched) -> None:
        """Read the counters of a process."""

    def left(self, client: Client) -> None:
        """The process is gone, and its mappings are."""


class Agents:
    """Those that are connected. The service's thread calls everything here."""

    def __init__(
        self, clients: dict[int, Client], mappings: AgentHandler, table: FileTable, ledger: Ledger,
        publisher: EventPublisher, wake_fd: int, pool: NodePool | None = None,
    ) -> None:  # fmt: skip
        """``clients``: by their sockets' descriptors. ``wake_fd`` goes to the agents: an event that
        they write to wake the service."""
        self._clients, self._mappings, self._table = clients, mappings, table
        self._ledger, self._publisher = ledger, publisher
        self._wake_fd, self._pool = wake_fd, pool

    @property
    def any(self) -> bool:
        """Whether one is connected, or is only observed."""
        return bool(self._clients)

    @property
    def any_orphan(self) -> bool:
        """Whether a process that has none any more still reads the pool's memory."""
        return self._pool is not None and bool(self._pool.orphans)

    def get(self, fd: int) -> Client | None:
        """The one behind a socket."""
        return self._clients.get(fd)

    def join(self, sock: socket.socket, hello: wire.Hello, pid: int, received: list[int]) -> None:
        """A process of the job says hello; of the descriptors that it has sent those are taken out
        of the list that are kept."""
        client = Client(sock, hello, pid)
        self._ledger.processes.hello(client)
        self._publisher.process(client)
        self._clients[client.fd] = client
        client.send(
            wire.pack(wire.Type.WELCOME, wire.WELCOME.pack(0)), [client.ring.fd, self._wake_fd]
        )
        os.close(client.ring.fd)
        pool = self._pool if hello.flags & wire.HELLO_SENDS_POOL else None
        if pool is not None and received and uffd.is_uffd(received[0]):
            with contextlib.suppress(OSError):  # without it: by page tables, or checkpoints
                pool.join(client, received[0])
                received.pop(0)  # the pool's from now on

    def message(self, client: Client, kind: wire.Type, body: bytes, received: list[int]) -> None:
        """See join() of ``received``. Raises WireError."""
        mappings = self._mappings
        if kind == wire.Type.ATTACH:
            self._attach(client, wire.attach(body), received)
        elif kind == wire.Type.GONE:
            self._take_touches(client)  # those before that
            number, reason = wire.GONE.unpack_from(body)
            mappings.gone(client, number, reason)
        elif kind == wire.Type.ACK:
            mappings.laid(client, wire.ack(body))
        elif kind == wire.Type.STATED:
            mappings.heard(client, wire.statement(body))
        elif kind == wire.Type.TOUCHED:
            mappings.seen_last(client, *wire.touched(body))
        elif kind == wire.Type.BYPASS:
            mappings.bypassed(client, wire.BYPASS.unpack_from(body)[0])
        elif kind == wire.Type.BYE:
            self._bye(client)
        else:
            raise wire.WireError(f"{kind.name} from an agent")

    def _attach(self, client: Client, a: wire.Attach, received: list[int]) -> None:
        _check_attach(client, a)
        if a.region % REGIONS_MAX == REGIONS_MAX - 1:  # its last slot: the first is free
            self._ledger.degrade(
                f"pid {client.pid} ({client.hello.command}) has {REGIONS_MAX} mappings at a "
                "time: more are left alone"
            )
        self._mappings.look_for_writer(a)
        self._mappings.attach(client, a, received.pop(0) if received else None)

    def _take_touches(self, client: Client) -> None:
        self._mappings.on_events(client, client.ring.drain())
        self._mappings.on_pool_events()

    def _bye(self, client: Client) -> None:
        """Its process ends, and waits for our answer."""
        self._take_touches(client)
        self._mappings.account_all(client)
        self._mappings.sample(client.watched)
        # Nothing is read for it any more, so that what it alone has mapped can be closed as soon as
        # it is gone. (The pool's mappings need us until then.)
        for region in list(client.regions.values()):
            if region.verdict != wire.ServingMode.POOL:
                self._mappings.detached(client, region.id)
        self._table.ended(client.pid)
        self._table.look(CLOCK.now_ns())
        client.send(wire.pack(wire.Type.BYE_OK))

    def drop(self, client: Client) -> None:
        """One has gone: read what it left in its ring, forget its regions."""
        self._mappings.on_events(client, client.ring.drain())
        self._mappings.sample(client.watched)
        client.watched.ended = True
        self._ledger.checkpoints.dropped_events += client.ring.counts().dropped
        if self._pool is not None:
            self._mappings.on_pool_events()
            self._pool.leave(client)
        for region in list(client.regions):
            self._mappings.detached(client, region)
        self._table.ended(client.pid)
        self._mappings.left(client)
        del self._clients[client.fd]


def _check_attach(client: Client, a: wire.Attach) -> None:
    if (
        a.address + a.length_bytes > ADDRESS_END
        or a.size_bytes >= 1 << 63
        or a.offset_bytes >= a.size_bytes
        # up to the last page of the file (job.h): so the file bounds all that we do for it
        or a.length_bytes >= a.size_bytes - a.offset_bytes + uffd.PAGE_BYTES
        or not a.length_bytes
        or a.address % uffd.PAGE_BYTES
        or a.length_bytes % uffd.PAGE_BYTES
        or a.offset_bytes % uffd.PAGE_BYTES
        or a.region in client.regions
        or a.region in client.opening
        or len(client.regions) + len(client.opening) >= REGIONS_MAX
    ):
        raise wire.WireError("an ATTACH that cannot be")
