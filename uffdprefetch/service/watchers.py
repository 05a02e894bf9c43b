# SPDX-License-Identifier: Apache-2.0
"""Those who watch a run (`top`, `wrap --live`): they ask, and are told the snapshot.

A watcher is nobody's client: it holds the service alive no longer, and whatever it does costs the
job nothing. At most WATCHERS_MAX at a time; the document is made at most every DOCUMENT_NS, once
for all of them, and the time that this takes is at most one part in COST of a core; who asks
without end, or does not take the answers, is hung up on.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from uffdprefetch.base.clock import MS
from uffdprefetch.base.record import dataclass
from uffdprefetch.protocol import wire
from uffdprefetch.protocol.document import encode

if TYPE_CHECKING:
    from uffdprefetch.protocol.snapshot import Snapshot

WATCHERS_MAX = 16
#: Questions of one watcher within a second.
ASKS_MAX = 32
DOCUMENT_NS = 200 * MS
COST = 25
#: The least that the kernel gives (SOCK_MIN_SNDBUF, include/net/sock.h): a few answers unread.
SEND_BUFFER_BYTES = 4608
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass
class Watcher:
    """One connection, and the questions of the present second."""

    sock: socket.socket
    second_ns: int = 0
    asked: int = 0


class Watchers:
    """The watchers of one service; its thread calls everything here."""

    def __init__(self, snapshot: Callable[[int], Snapshot]) -> None:
        """``snapshot`` makes that of a time in CLOCK_MONOTONIC ns."""
        self._snapshot = snapshot
        self._watchers: dict[int, Watcher] = {}
        self._memfd = -1
        self._length = 0
        self._due_ns = 0

    def welcome(self, sock: socket.socket) -> bool:
        """Take a watcher and tell it so; False: there are too many, and it has been told that."""
        full = len(self._watchers) >= WATCHERS_MAX
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            message = wire.pack(wire.Type.WELCOME, wire.WELCOME.pack(int(full)))
            sock.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if not full:
            self._watchers[sock.fileno()] = Watcher(sock)
        return not full

    def socket_of(self, fd: int) -> socket.socket | None:
        """The watcher with this descriptor."""
        watcher = self._watchers.get(fd)
        return watcher.sock if watcher else None

    def leave(self, fd: int) -> socket.socket | None:
        """A watcher has gone; its socket, to be closed. With the last one goes the document."""
        watcher = self._watchers.pop(fd, None)
        if not self._watchers and self._memfd >= 0:
            os.close(self._memfd)
            self._memfd = -1
        return watcher.sock if watcher else None

    def message(self, fd: int, kind: wire.Type, now: int) -> None:
        """Answer a watcher; raises wire.WireError for one that is to be hung up on."""
        watcher = self._watchers[fd]
        if kind != wire.Type.SNAPSHOT:
            raise wire.WireError(f"{kind.name} from a watcher")
        if now - watcher.second_ns >= 1000 * MS:
            watcher.second_ns, watcher.asked = now, 0
        watcher.asked += 1
        if watcher.asked > ASKS_MAX:
            raise wire.WireError(f"a watcher asks more than {ASKS_MAX} times a second")
        if self._memfd < 0 or now >= self._due_ns:
            self._make(now)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._memfd]))]
        answer = wire.pack(wire.Type.SUMMARY, wire.SUMMARY.pack(self._length, 0))
        try:
            watcher.sock.sendmsg([answer], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            raise wire.WireError(f"a watcher does not read ({error.strerror})") from None

    def _make(self, now: int) -> None:
        """A new document in a sealed memfd: watchers that share it cannot change it."""
        began = time.thread_time_ns()
        text = encode(self._snapshot(now)).encode()
        memfd = os.memfd_create("uffdprefetch-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(memfd, text)
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            os.close(memfd)
            raise
        if self._memfd >= 0:
            os.close(self._memfd)
        self._memfd, self._length = memfd, len(text)
        self._due_ns = now + max(DOCUMENT_NS, COST * (time.thread_time_ns() - began))
