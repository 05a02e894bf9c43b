# SPDX-License-Identifier: Apache-2.0
"""Who is connected to the service: agents (agents.py), launchers, and who says nothing yet.

Peers are processes of our own user (SO_PEERCRED), messages fixed-size and versioned (wire.py): a
peer that says what cannot be is dropped, and none keeps the others waiting.
"""

from __future__ import annotations

import array
import logging
import select
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uffdprefetch.base import limits
from uffdprefetch.base.clock import CLOCK
from uffdprefetch.native import uffd
from uffdprefetch.protocol import wire
from uffdprefetch.readers.order_sources import Announcements
from uffdprefetch.service.agents import Agents
from uffdprefetch.service.arrivals import Arrivals, credentials
from uffdprefetch.service.launchers import Launchers
from uffdprefetch.service.watchers import Watchers
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.unserved import Reason, Refusal

if TYPE_CHECKING:
    from uffdprefetch.service.cluster import Cluster

log = logging.getLogger("uffdprefetch.serve")


class Peers:
    """The connections of one service."""

    def __init__(
        self,
        listener: socket.socket,
        poll: select.epoll,
        agents: Agents,
        publisher: EventPublisher,
        ledger: Ledger,
        summary: Callable[[], dict[str, Any]],
        options: int,
        watchers: Watchers,
        announcements: Announcements | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        """``options`` is the fingerprint of the service's, for launchers that were given other
        ones."""
        self._epoll, self._agents, self._publisher = poll, agents, publisher
        self._ledger, self._watchers = ledger, watchers
        self._announcements, self._cluster = announcements, cluster
        self._planners: dict[int, tuple[socket.socket, int]] = {}  # and their pids
        self._arrivals = Arrivals(listener, poll)
        self.launchers = Launchers(summary, options, ledger.jobs, publisher)

    @property
    def none(self) -> bool:
        """Whether nobody is connected."""
        return not (
            self._agents.any or self.launchers.any or self._arrivals.all or self._agents.any_orphan
        )

    @property
    def may_come(self) -> bool:
        """Whether there is still a name by which others come."""
        return self._arrivals.may_come

    @property
    def over(self) -> bool:
        """Whether the last launcher has told how its job ended and waits for our own end."""
        reading = self._agents.any or self._agents.any_orphan
        return self.launchers.parting and not (self.launchers.any or reading)

    @property
    def only_strangers(self) -> bool:
        """Whether nobody is connected but who has not yet said who it is."""
        return not (self._agents.any or self.launchers.any)

    def housekeep(self, now: int) -> None:
        """Once a second: drop who never said who it is; see to the other nodes."""
        for fd in self._arrivals.late(now):
            self._hang_up(fd)
        if self._cluster is not None:
            self._cluster.housekeep()

    def accept(self) -> None:
        """Take who has come."""
        self._arrivals.accept()

    def _hear_who_came_last(self) -> None:
        """A program that is left alone says one word and ends: it belongs into the summary."""
        self._arrivals.accept()
        for fd in self._arrivals.all:
            self.receive(fd)

    def receive(self, fd: int) -> None:
        """Take what a peer sent, at most 64 messages a turn: no peer keeps the others waiting."""
        for _ in range(64):
            sock = self._socket(fd)
            if sock is None:
                return
            received: list[int] = []
            try:
                data, ancillary, flags, _ = sock.recvmsg(
                    wire.MESSAGE_BYTES + 1, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, ancillary, flags = b"", [], 0
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % 4])
                    received += numbers
            try:
                if not data:
                    self._hang_up(fd)
                    return
                if flags & socket.MSG_CTRUNC:
                    raise wire.WireError("more descriptors than any message of ours has")
                kind_, body = wire.unpack(data)
                self._message(fd, kind_, body, received)
            except (wire.WireError, struct.error) as error:
                log.warning("peer dropped: %s", error)
                self._hang_up(fd)
                return
            except Exception as error:  # a limit, or a fault of ours: one peer's loss
                if isinstance(error, OSError) and limits.is_of_a_limit(error):
                    log.warning("peer dropped: %s", limits.words_of(error))
                else:
                    log.exception("peer dropped")
                self._hang_up(fd)
                return
            finally:
                for number in received:  # whoever kept one has taken it out of the list
                    uffd.close_file(number)

    def _socket(self, fd: int) -> socket.socket | None:
        agent, launcher = self._agents.get(fd), self.launchers.get(fd)
        if agent is not None:
            return agent.agent.sock
        if launcher is not None:
            return launcher.sock
        recorder = self._publisher.socket_of(fd) or self._watchers.socket_of(fd)
        if recorder is not None:
            return recorder
        if self._cluster is not None and self._cluster.is_transport(fd):
            return self._cluster.transport_socket
        if fd in self._planners:
            return self._planners[fd][0]
        return self._arrivals.get(fd)

    def _message(self, fd: int, kind: wire.Type, body: bytes, received: list[int]) -> None:
        agent, launcher = self._agents.get(fd), self.launchers.get(fd)
        sock = self._arrivals.get(fd)
        if sock is not None:
            if kind != wire.Type.HELLO:
                raise wire.WireError(f"{kind.name} before HELLO")
            self._hello(fd, sock, wire.hello(body), received)
        elif launcher is not None:
            self.launchers.message(launcher, kind, body, self._hear_who_came_last)
        elif agent is not None:
            self._agents.message(agent, kind, body, received)
        elif self._watchers.socket_of(fd) is not None:
            self._watchers.message(fd, kind, CLOCK.now_ns())
        elif fd in self._planners:
            self._from_planner(self._planners[fd][1], kind, body)
        else:
            raise wire.WireError(f"{kind.name} from a peer that only listens")

    def _hello(self, fd: int, sock: socket.socket, hello: wire.Hello, received: list[int]) -> None:
        """Of those who come, recorders, watchers and transports do not keep the service alive."""
        pid, _, _ = credentials(sock)
        if hello.role == wire.Role.LAUNCHER:
            self.launchers.welcome(sock, hello, pid)
        elif hello.role == wire.Role.AGENT and hello.flags == wire.HELLO_LEFT_ALONE:
            why = wire.LEFT_ALONE.get(hello.uffd_error, "for no reason that we know")
            self._ledger.refuse(f"program {hello.command}", Refusal(Reason.PROGRAM, why))
            return  # that was all: it closes
        elif hello.role == wire.Role.AGENT:
            self._agents.join(sock, hello, pid, received)
        elif hello.role == wire.Role.RECORDER:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            if not self._publisher.join(sock):
                raise wire.WireError("a recorder too many")
        elif hello.role == wire.Role.WATCHER:
            if not self._watchers.welcome(sock):
                raise wire.WireError("a watcher too many")
        elif hello.role == wire.Role.TRANSPORT and self._cluster is not None:
            if not self._cluster.join(sock, pid, hello.job_pid):
                raise wire.WireError("a transport of an older generation")
        elif hello.role == wire.Role.PLANNER and self._announcements is not None:
            self._planners[fd] = sock, pid
        else:
            raise wire.WireError(f"role {hello.role}")
        self._arrivals.known(fd, has_time=hello.role == wire.Role.PLANNER)

    def _from_planner(self, peer: int, kind: wire.Type, body: bytes) -> None:
        """An order has been announced (job/channel.py)."""
        if kind != wire.Type.PLAN or self._announcements is None:
            raise wire.WireError(f"{kind.name} from a planner")
        _, pid, number = wire.PLAN.unpack_from(body)
        try:
            self._announcements.announced(peer, pid, number)
        except ValueError as error:
            raise wire.WireError(f"announcement {pid}-{number}: {error}") from None

    def _hang_up(self, fd: int) -> None:
        if (agent := self._agents.get(fd)) is not None:
            self.drop_client(fd, agent)
            return
        if self._cluster is not None and self._cluster.is_transport(fd):
            self._epoll.unregister(fd)
            self._cluster.left()
            return
        if self.launchers.get(fd) is not None:
            self._epoll.unregister(fd)
            self.launchers.left(fd)
            return
        unknown = self._arrivals.known(fd)
        peer = unknown or self._publisher.leave(fd) or self._watchers.leave(fd)
        if fd in self._planners:
            peer = self._planners.pop(fd)[0]
        if peer is not None:
            self._epoll.unregister(fd)
            peer.close()

    def drop_client(self, fd: int, client: Client) -> None:
        """An agent has gone."""
        self._agents.drop(client)
        if self._announcements is not None:
            self._announcements.forget_process(client.pid)
        self._arrivals.known(fd)
        self._epoll.unregister(fd)
        client.close()
