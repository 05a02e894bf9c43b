# SPDX-License-Identifier: Apache-2.0
"""Who has connected to the service and has not said yet who it is."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct

from uffdprefetch.base.clock import CLOCK, MS

log = logging.getLogger("uffdprefetch.serve")

#: Who has connected and not said hello by then is no agent and no launcher: they do it at once.
HELLO_NS = 2000 * MS


class Arrivals:
    """By their sockets' descriptors. Only processes of our own user are listened to."""

    def __init__(self, listener: socket.socket, poll: select.epoll) -> None:
        self._listener, self._epoll = listener, poll
        self._unknown: dict[int, socket.socket] = {}
        self._since_ns: dict[int, int] = {}
        self._deaf = False  # no descriptor left to accept with
        poll.register(listener, select.EPOLLIN)

    @property
    def all(self) -> list[int]:
        """Those that are there."""
        return list(self._unknown)

    @property
    def may_come(self) -> bool:
        """Whether the name that we listen by is there still: what cleans up /tmp removes it."""
        return os.path.lexists(self._listener.getsockname())

    def get(self, fd: int) -> socket.socket | None:
        """The one behind a descriptor."""
        return self._unknown.get(fd)

    def accept(self) -> None:
        """Take who has come."""
        while not self._deaf:
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
            _, uid, _ = credentials(sock)
            if uid != os.geteuid():
                log.warning("uid %d is not served", uid)
                sock.close()
                continue
            sock.setblocking(False)
            self._unknown[sock.fileno()] = sock
            self._since_ns[sock.fileno()] = CLOCK.now_ns()
            self._epoll.register(sock, select.EPOLLIN)

    def known(self, fd: int, has_time: bool = False) -> socket.socket | None:
        """It has said who it is, or has gone; ``has_time``: it is dropped like who says nothing all
        the same, if it says no more."""
        if not has_time:
            self._since_ns.pop(fd, None)
        return self._unknown.pop(fd, None)

    def late(self, now: int) -> list[int]:
        """Once a second: listen again; those that should have said more by now."""
        if self._deaf:
            self._deaf = False
            self._epoll.register(self._listener, select.EPOLLIN)
        return [fd for fd, since in self._since_ns.items() if now - since > HELLO_NS]


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the peer, from the kernel."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("iII", data)
    return pid, uid, gid
