# SPDX-License-Identifier: Apache-2.0
"""Who is connected to the service: agents (agents.py), launchers, and who says nothing yet.

Peers are processes of our own user (SO_PEERCRED), messages fixed-size and versioned (wire.py): a
peer that says what cannot be is dropped, and none keeps the others waiting.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uffdprefetch.base.clock import CLOCK, MS
from uffdprefetch.native import uffd
from uffdprefetch.protocol import wire
from uffdprefetch.protocol.document import encode
from uffdprefetch.readers.order_sources import Announcements
from uffdprefetch.service.agents import Agents
from uffdprefetch.service.watchers import Watchers
from uffdprefetch.state.client import Client, Launcher
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.unserved import Reason, Refusal

if TYPE_CHECKING:
    from uffdprefetch.service.cluster import Cluster

log = logging.getLogger("uffdprefetch.serve")

#: Who has connected and not said hello by then is no agent and no launcher: they do it at once.
HELLO_NS = 2000 * MS
#: How long a launcher's end waits for processes that its job has left.
PART_NS = 100 * MS


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
        self._listener = listener
        self._epoll = poll
        self._agents = agents
        self._publisher = publisher
        self._ledger = ledger
        self._summary = summary
        self._options = options
        self._watchers = watchers
        self._announcements = announcements
        self._cluster = cluster
        self._planners: dict[int, tuple[socket.socket, int]] = {}  # and their pids
        self.launchers: dict[int, Launcher] = {}
        self.parting: list[socket.socket] = []  # of launchers that have said good-bye
        self._parting_ns = 0
        self.launcher_pids: set[int] = set()  # of all that have come
        self._unknown: dict[int, socket.socket] = {}
        self._accepted_ns: dict[int, int] = {}
        self._deaf = False  # no descriptor left to accept with
        poll.register(listener, select.EPOLLIN)

    @property
    def none(self) -> bool:
        """Whether nobody is connected."""
        return not (self._agents.any or self.launchers or self._unknown or self._agents.any_orphan)

    @property
    def over(self) -> bool:
        """Whether the last launcher has told how its job ended and waits for our own end."""
        reading = self._agents.any or self._agents.any_orphan
        return bool(self.parting) and not (self.launchers or reading)

    def part(self, now: bool = False) -> None:
        """Hang up on launchers that wait for it. Not at once where none is left but processes of
        the job are (not ``now``): most often they are just ending."""
        if self.launchers or now or CLOCK.now_ns() - self._parting_ns > PART_NS:
            while self.parting:
                self.parting.pop().close()

    @property
    def only_strangers(self) -> bool:
        """Whether nobody is connected but who has not yet said who it is."""
        return not (self._agents.any or self.launchers)

    def jobs(self) -> list[int]:
        """The pids of the commands that the connected launchers run."""
        return [x.job_pid for x in self.launchers.values() if x.job_pid and not x.finished]

    def housekeep(self, now: int) -> None:
        """Once a second: listen again, and drop who never said who it is."""
        if self._deaf:
            self._deaf = False
            self._epoll.register(self._listener, select.EPOLLIN)
        for fd, accepted in list(self._accepted_ns.items()):
            if now - accepted > HELLO_NS:
                self._hang_up(fd)

    def accept(self) -> None:
        """Take who has come; only processes of our own user are listened to."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # EMFILE: whoever waits stays in the backlog, and epoll would tell us so without end
                log.warning("accept: %s; trying again in a second", error)
                self._epoll.unregister(self._listener)
                self._deaf = True
                return
            _, uid, _ = _credentials(sock)
            if uid != os.geteuid():
                log.warning("uid %d is not served", uid)
                sock.close()
                continue
            sock.setblocking(False)
            self._unknown[sock.fileno()] = sock
            self._accepted_ns[sock.fileno()] = CLOCK.now_ns()
            self._epoll.register(sock, select.EPOLLIN)

    def _hear_who_came_last(self) -> None:
        """A program that is left alone says one word and ends: it belongs into the summary."""
        if not self._deaf:
            self.accept()
        for fd in list(self._unknown):
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
            except Exception:  # out of descriptors or memory, or a fault of ours: one peer's loss
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
        return self._unknown.get(fd)

    def _message(self, fd: int, kind: wire.Type, body: bytes, received: list[int]) -> None:
        agent = self._agents.get(fd)
        if fd in self._unknown:
            if kind != wire.Type.HELLO:
                raise wire.WireError(f"{kind.name} before HELLO")
            self._hello(fd, wire.hello(body), received)
        elif fd in self.launchers:
            self._from_launcher(self.launchers[fd], kind, body)
        elif agent is not None:
            self._agents.message(agent, kind, body, received)
        elif self._watchers.socket_of(fd) is not None:
            self._watchers.message(fd, kind, CLOCK.now_ns())
        elif fd in self._planners:
            self._from_planner(self._planners[fd][1], kind, body)
        else:
            raise wire.WireError(f"{kind.name} from a peer that only listens")

    def _hello(self, fd: int, hello: wire.Hello, received: list[int]) -> None:
        sock = self._unknown[fd]
        pid, _, _ = _credentials(sock)
        if hello.role == wire.Role.LAUNCHER:
            launcher = Launcher(sock, hello, pid)
            del self._unknown[fd]
            self.launchers[fd] = launcher
            self._publisher.launcher(pid)
            self.launcher_pids.add(pid)
            _reply(sock, wire.pack(wire.Type.WELCOME, wire.WELCOME.pack(self._options)))
        elif hello.role == wire.Role.AGENT and hello.flags == wire.HELLO_LEFT_ALONE:
            why = wire.LEFT_ALONE.get(hello.uffd_error, "for no reason that we know")
            self._ledger.refuse(f"program {hello.command}", Refusal(Reason.PROGRAM, why))
            return  # that was all: it closes
        elif hello.role == wire.Role.AGENT:
            self._agents.join(sock, hello, pid, received)
            del self._unknown[fd]
        elif hello.role == wire.Role.RECORDER:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            if not self._publisher.join(sock):
                raise wire.WireError("a recorder too many")
            del self._unknown[fd]
            self._accepted_ns.pop(fd, None)
            return  # it does not keep the service alive
        elif hello.role == wire.Role.WATCHER:
            if not self._watchers.welcome(sock):
                raise wire.WireError("a watcher too many")
            del self._unknown[fd]
            self._accepted_ns.pop(fd, None)
            return  # nor does it
        elif hello.role == wire.Role.TRANSPORT and self._cluster is not None:
            if not self._cluster.join(sock, pid, hello.job_pid):
                raise wire.WireError("a transport of an older generation")
            del self._unknown[fd]
            self._accepted_ns.pop(fd, None)
            return  # nor does it
        elif hello.role == wire.Role.PLANNER and self._announcements is not None:
            del self._unknown[fd]
            self._planners[fd] = sock, pid  # and is dropped like who says nothing, if it does not
            return
        else:
            raise wire.WireError(f"role {hello.role}")
        self._accepted_ns.pop(fd, None)

    def _from_launcher(self, launcher: Launcher, kind: wire.Type, body: bytes) -> None:
        if kind == wire.Type.JOB:
            launcher.job_pid = wire.JOB.unpack_from(body)[0]
        elif kind == wire.Type.FINISH:
            launcher.finished = True
            _, _, by_calls, storage = wire.FINISH.unpack_from(body)
            self._ledger.jobs.finished(
                by_calls if by_calls >= 0 else None, storage if storage >= 0 else None
            )
            self._hear_who_came_last()
            self._send_summary(launcher)
        else:
            raise wire.WireError(f"{kind.name} from a launcher")

    def _from_planner(self, peer: int, kind: wire.Type, body: bytes) -> None:
        """An order has been announced (job/channel.py)."""
        if kind != wire.Type.PLAN or self._announcements is None:
            raise wire.WireError(f"{kind.name} from a planner")
        _, pid, number = wire.PLAN.unpack_from(body)
        try:
            self._announcements.announced(peer, pid, number)
        except ValueError as error:
            raise wire.WireError(f"announcement {pid}-{number}: {error}") from None

    def _send_summary(self, launcher: Launcher) -> None:
        others = [x for x in self.launchers.values() if not x.finished]
        text = encode(self._summary()).encode()
        if not others:
            self._publisher.finished()
        memfd = os.memfd_create("uffdprefetch-summary", os.MFD_CLOEXEC)
        try:
            os.write(memfd, text)
            os.lseek(memfd, 0, os.SEEK_SET)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memfd]))]
            message = wire.pack(wire.Type.SUMMARY, wire.SUMMARY.pack(len(text), not others))
            with contextlib.suppress(OSError):
                launcher.sock.sendmsg([message], rights, socket.MSG_DONTWAIT)
        finally:
            os.close(memfd)

    def _hang_up(self, fd: int) -> None:
        if (agent := self._agents.get(fd)) is not None:
            self.drop_client(fd, agent)
            return
        if self._cluster is not None and self._cluster.is_transport(fd):
            self._epoll.unregister(fd)
            self._cluster.left()
            return
        peer: Any = self.launchers.pop(fd, None) or self._unknown.pop(fd, None)
        peer = peer or self._publisher.leave(fd) or self._watchers.leave(fd)
        if fd in self._planners:
            peer = self._planners.pop(fd)[0]
        self._accepted_ns.pop(fd, None)
        if peer is not None:
            self._epoll.unregister(fd)
            if isinstance(peer, Launcher) and peer.finished:
                self.parting.append(peer.sock)
                self._parting_ns = CLOCK.now_ns()
            else:
                peer.close()

    def drop_client(self, fd: int, client: Client) -> None:
        """An agent has gone."""
        self._agents.drop(client)
        if self._announcements is not None:
            self._announcements.forget_process(client.pid)
        self._unknown.pop(fd, None)
        self._accepted_ns.pop(fd, None)
        self._epoll.unregister(fd)
        client.close()


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the peer, from the kernel."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("iII", data)
    return pid, uid, gid


def _reply(sock: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
