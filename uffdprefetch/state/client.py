# SPDX-License-Identifier: Apache-2.0
"""One connection: a process of the job (its agent), or a launcher."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from dataclasses import dataclass

from uffdprefetch.native import uffd
from uffdprefetch.protocol import wire
from uffdprefetch.state.files import Key
from uffdprefetch.state.processes import Watched, ancestors, rights
from uffdprefetch.state.reader import FIRST_OBSERVED, Reader, Region

#: Queued messages at which a client that does not read is disconnected.
OUTBOX_MAX = 4096


class Client:
    """One process of the job, as its agent reports it."""

    def __init__(self, sock: socket.socket | None, hello: wire.Hello, pid: int) -> None:
        """``sock``: None for a process that is only observed and gets no commands."""
        self.sock = sock
        self.fd = sock.fileno() if sock is not None else -1
        self.observed = sock is None
        self.watched = Watched(pid, ended=True)  # replaced by the ledger at hello
        self.refused: set[int] = set()  # addresses of refused mappings
        self.opening: set[int] = set()  # regions whose file is being opened
        self.early: dict[int, list[wire.Statement]] = {}  # what the job has said of those
        # of the last scan of /proc/PID/maps: new addresses, regions not found
        self.sighted: set[int] = set()
        self.missed: set[int] = set()
        self.hello = hello
        self.pid = pid
        self.rank = hello.rank if hello.rank >= 0 else 0
        self._ancestors: frozenset[int] | None = None
        self.regions: dict[int, Region] = {}
        self.readers: dict[Key, Reader] = {}
        self.ring = uffd.Ring()
        self.pagemap_fd = -1
        self.pagemap_error = ""
        self.pool_slot = -1
        #: it changes its address space past the interposers: observed by page tables alone
        self.bypasses = False
        self.static = False  # of one that is only observed: its program is statically linked
        self._outbox: deque[bytes] = deque()
        self._sequence = 0
        self.gone = False
        self._rights = None if self.observed else rights(pid)
        try:
            self.pagemap_fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.pagemap_error = error.strerror or str(error)

    def touched_runs(self, address: int, length: int) -> list[tuple[int, int]]:
        """Runs of pages present in its page table in [address, +length), as (address, bytes), in
        order; at most one call's (512 runs), none where the table cannot be read."""
        if self.pagemap_fd < 0:
            return []
        try:
            return uffd.touched_runs(self.pagemap_fd, address, length)[0]
        except OSError:
            return []

    def descends_from(self, pid: int) -> bool:
        """Whether it is this process or one of its descendants."""
        if self._ancestors is None:
            self._ancestors = frozenset(ancestors(self.pid))
        return pid == self.pid or pid in self._ancestors

    def look_for_lost_rights(self) -> None:
        """End the agent of a process that has dropped privileges past our interposers: the agent's
        thread still has them."""
        if self._rights is None:
            return
        now = rights(self.pid)
        if now is not None and self._rights.lost(now):
            self._rights = None
            self.send(wire.pack(wire.Type.QUIT))

    @property
    def has_uffd(self) -> bool:
        """Whether something of ours can lie over its mappings."""
        return bool(self.hello.flags & wire.HELLO_UFFD)

    def tell(
        self, region: int, verdict: wire.ServingMode, fds: list[int], settled: bool = False,
        pages: list[int] | None = None, lease_fd: int = -1,
    ) -> None:  # fmt: skip
        """Tell the agent how a mapping is served, if it was the agent's. ``settled``: so is each of
        the file. ``pages``: its checkpoints. ``lease_fd``: what the agent can give the file's lease
        back by."""
        if region >= FIRST_OBSERVED:
            return
        leased = lease_fd >= 0
        message = wire.file(region, verdict, pages or [], settled, leased)
        self.send(message, [*fds, lease_fd] if leased else fds)

    def send(self, message: bytes, fds: list[int] | None = None) -> None:
        """Queue a message; descriptors can only be sent with an empty queue."""
        if self.sock is None:
            return
        if fds:
            self._send_fds(message, fds)
        elif self._outbox or not self._send_now(message):
            self._outbox.append(message)
            if len(self._outbox) > OUTBOX_MAX:
                self.gone = True

    def _send_fds(self, message: bytes, fds: list[int]) -> None:
        assert self.sock is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            self.sock.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            self.gone = True  # a full socket means that the agent does not read

    def _send_now(self, message: bytes) -> bool:
        assert self.sock is not None
        try:
            self.sock.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
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
        while self._outbox and not self.gone and self._send_now(self._outbox[0]):
            self._outbox.popleft()

    def command(self, kind: wire.Type, region: int, pages: list[int]) -> None:
        """Have the agent arm pages again, or detach the region; split into messages."""
        for i in range(0, max(1, len(pages)), wire.PAGES_MAX):
            self._sequence += 1
            some = pages[i : i + wire.PAGES_MAX]
            self.send(wire.command(kind, self._sequence & 0xFFFFFFFF, region, some))

    def close(self) -> None:
        """Close the connection and its resources."""
        if self.sock is not None:
            self.sock.close()
        else:
            os.close(self.ring.fd)
        self.ring.close()
        if self.pagemap_fd >= 0:
            os.close(self.pagemap_fd)
            self.pagemap_fd = -1


@dataclass
class Launcher:
    """A connected ``wrap``: keeps the service alive and requests the summary."""

    sock: socket.socket
    hello: wire.Hello
    pid: int
    job_pid: int = 0
    finished: bool = False

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()
