# SPDX-License-Identifier: Apache-2.0
"""What a process's agent is told: messages through its socket, of which some may wait for room."""

from __future__ import annotations

import array
import socket
from collections import deque

from uffdprefetch.protocol import wire
from uffdprefetch.state.processes import rights
from uffdprefetch.state.reader import FIRST_OBSERVED

#: Queued messages at which a client that does not read is disconnected.
OUTBOX_MAX = 4096


class AgentLink:
    """To one process; where that is only observed it has none, and nothing is sent."""

    def __init__(self, sock: socket.socket | None, pid: int) -> None:
        self.sock = sock
        self.gone = False
        self._pid = pid
        self._outbox: deque[bytes] = deque()
        self._sequence = 0
        self._rights = None if sock is None else rights(pid)

    @property
    def fd(self) -> int:
        """The socket's; -1: there is none."""
        return self.sock.fileno() if self.sock is not None else -1

    def look_for_lost_rights(self) -> None:
        """End the agent of a process that has dropped privileges past our interposers: the agent's
        thread still has them."""
        if self._rights is None:
            return
        now = rights(self._pid)
        if now is not None and self._rights.lost(now):
            self._rights = None
            self.send(wire.pack(wire.Type.QUIT))

    def tell(
        self, region: int, mode: wire.ServingMode, fds: list[int], settled: bool = False,
        pages: list[int] | None = None, lease_fd: int = -1, brief: wire.Brief = wire.Brief.NO,
    ) -> None:  # fmt: skip
        """Tell the agent how a mapping is served, if it was the agent's. ``settled``: so is each of
        the file. ``pages``: its checkpoints. ``lease_fd``: what the agent can give the file's lease
        back by. ``brief``: how mappings of about its size live."""
        if region >= FIRST_OBSERVED:
            return
        leased = lease_fd >= 0
        message = wire.file(region, mode, pages or [], settled, leased, brief)
        self.send(message, [*fds, lease_fd] if leased else fds)

    def command(self, kind: wire.Type, region: int, pages: list[int]) -> None:
        """Have the agent arm pages again, or detach the region; split into messages."""
        for i in range(0, max(1, len(pages)), wire.PAGES_MAX):
            self._sequence += 1
            some = pages[i : i + wire.PAGES_MAX]
            self.send(wire.command(kind, self._sequence & 0xFFFFFFFF, region, some))

    def send(self, message: bytes, fds: list[int] | None = None) -> None:
        """Queue a message; descriptors can only be sent with an empty queue."""
        if self.sock is None:
            return
        if fds:
            self._send_fds(self.sock, message, fds)
        elif self._outbox or not self._send_now(self.sock, message):
            self._outbox.append(message)
            if len(self._outbox) > OUTBOX_MAX:
                self.gone = True

    def _send_fds(self, sock: socket.socket, message: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            sock.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            self.gone = True  # a full socket means that the agent does not read

    def _send_now(self, sock: socket.socket, message: bytes) -> bool:
        try:
            sock.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            self.gone = True
        return True

    @property
    def waiting(self) -> bool:
        """Whether messages are queued for room in the socket."""
        return bool(self._outbox)

    def flush(self) -> None:
        """Send queued messages."""
        while self.sock is not None and self._outbox and not self.gone:
            if not self._send_now(self.sock, self._outbox[0]):
                break
            self._outbox.popleft()

    def close(self) -> None:
        """Hang up."""
        if self.sock is not None:
            self.sock.close()
