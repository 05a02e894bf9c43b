# SPDX-License-Identifier: Apache-2.0
"""What the agents of the job's processes say: messages, checked, to whoever manages mappings."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.base.limits import why_not_followed
from uffdprefetch.native import uffd
from uffdprefetch.protocol import wire
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.checkpoint_events import CheckpointEvents
from uffdprefetch.sense.pagetables import PagetableScanner
from uffdprefetch.service.attachments import Attachments
from uffdprefetch.service.mappings import ManagedMappings
from uffdprefetch.service.pool_bridge import PoolBridge
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import FIRST_OBSERVED
from uffdprefetch.state.unserved import Reason, Refusal

if TYPE_CHECKING:
    from uffdprefetch.pool.node_pool import NodePool

#: Mappings of one process: UP_REGIONS of csrc/job/job.h.
REGIONS_MAX = 1024
#: Addresses of a process end before this on every 64-bit Linux (five page-table levels).
ADDRESS_END = 1 << 56


class Agents:
    """Those that are connected. The service's thread calls everything here."""

    def __init__(
        self, mappings: ManagedMappings, attachments: Attachments, scanner: PagetableScanner,
        events: CheckpointEvents, table: FileTable, ledger: Ledger, publisher: EventPublisher,
        wake_fd: int, bridge: PoolBridge | None = None, pool: NodePool | None = None,
    ) -> None:  # fmt: skip
        """``wake_fd`` goes to the agents: an event that they write to wake the service."""
        self._mappings, self._attachments, self._table = mappings, attachments, table
        self._scanner, self._events, self._bridge = scanner, events, bridge
        self._ledger, self._publisher = ledger, publisher
        self._wake_fd, self._pool = wake_fd, pool

    @property
    def any(self) -> bool:
        """Whether one is connected, or is only observed."""
        return bool(self._mappings.clients)

    @property
    def any_orphan(self) -> bool:
        """Whether a process that has none any more still reads the pool's memory."""
        return self._pool is not None and bool(self._pool.processes.orphans)

    def get(self, fd: int) -> Client | None:
        """The one behind a socket."""
        return self._mappings.clients.get(fd)

    def join(self, sock: socket.socket, hello: wire.Hello, pid: int, received: list[int]) -> None:
        """A process of the job says hello; of the descriptors that it has sent those are taken out
        of the list that are kept."""
        try:
            client = Client(sock, hello, pid)
        except OSError as error:
            refusal = Refusal(Reason.NOT_FOLLOWED, why_not_followed(error))
            self._ledger.refuse(f"program {hello.command}", refusal)
            raise
        met = self._mappings.clients.pop(-pid, None)
        self._ledger.processes.hello(client, met)
        if met is not None:
            self._mappings.forget(met)
        self._publisher.process(client)
        self._mappings.clients[client.agent.fd] = client
        client.agent.send(
            wire.pack(wire.Type.WELCOME, wire.WELCOME.pack(0)), [client.ring.fd, self._wake_fd]
        )
        os.close(client.ring.fd)
        pool = self._pool if hello.flags & wire.HELLO_SENDS_POOL else None
        if pool is not None and received and uffd.is_uffd(received[0]):
            with contextlib.suppress(OSError):  # without it: by page tables, or checkpoints
                pool.processes.join(client, received[0])
                received.pop(0)  # the pool's from now on

    def message(self, client: Client, kind: wire.Type, body: bytes, received: list[int]) -> None:
        """See join() of ``received``. Raises WireError."""
        if kind == wire.Type.ATTACH:
            self._attach(client, wire.attach(body), received)
        elif kind == wire.Type.GONE:
            self._take_touches(client)  # those before that
            number, reason = wire.GONE.unpack_from(body)
            self._mappings.gone(client, number, reason)
        elif kind == wire.Type.ACK:
            self._attachments.laid(client, wire.ack(body))
        elif kind == wire.Type.STATED:
            self._attachments.heard(client, wire.statement(body))
        elif kind == wire.Type.TOUCHED:
            self._scanner.seen_last(client, *wire.touched(body))
        elif kind == wire.Type.BYPASS:
            self._mappings.bypassed(client, wire.BYPASS.unpack_from(body)[0])
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
        self._attachments.look_for_writer(a)
        self._attachments.attach(client, a, received.pop(0) if received else None)

    def _take_touches(self, client: Client) -> None:
        self._events.take(client, client.ring.drain())
        if self._bridge is not None:
            self._bridge.take_events()

    def _bye(self, client: Client) -> None:
        """Its process ends, and waits for our answer."""
        self._take_touches(client)
        pagetables.note_all_used(client)
        self._publisher.sample(client.watched, CLOCK.now_ns())
        # Nothing is read for it any more, so that what it alone has mapped can be closed as soon as
        # it is gone. (The pool's mappings need us until then.)
        for region in list(client.regions.values()):
            if region.mode != wire.ServingMode.POOL:
                self._mappings.detached(client, region.id)
        self._table.ended(client.pid)
        self._table.look(CLOCK.now_ns())
        client.agent.send(wire.pack(wire.Type.BYE_OK))

    def drop(self, client: Client) -> None:
        """One has gone: read what it left in its ring, forget its regions."""
        self._take_touches(client)
        self._publisher.sample(client.watched, CLOCK.now_ns())
        client.watched.ended = True
        self._ledger.checkpoints.dropped_events += client.ring.counts().dropped
        if self._pool is not None:
            self._pool.processes.leave(client)
        for region in list(client.regions):
            self._mappings.detached(client, region)
        self._table.ended(client.pid)
        self._mappings.left(client)
        del self._mappings.clients[client.agent.fd]


def _told(client: Client) -> int:
    """Mappings that its agent has told of: others were found, or are files that are read."""
    return sum(number < FIRST_OBSERVED for number in client.regions)


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
        or a.region in client.pending
        or _told(client) + len(client.pending) >= REGIONS_MAX
    ):
        raise wire.WireError("an ATTACH that cannot be")
