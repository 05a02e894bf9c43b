# SPDX-License-Identifier: Apache-2.0
"""The launchers that are connected: each says how its job ended, gets the summary, and waits for
the service's end."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

from uffdprefetch.base.clock import CLOCK, MS
from uffdprefetch.protocol import wire
from uffdprefetch.protocol.document import encode
from uffdprefetch.state.client import Launcher
from uffdprefetch.state.job_reads import JobReads
from uffdprefetch.state.publisher import EventPublisher

#: How long a launcher's end waits for processes that its job has left.
PART_NS = 100 * MS


class Launchers:
    """Of one run."""

    def __init__(
        self, summary: Callable[[], dict[str, Any]], options: int, reads: JobReads,
        publisher: EventPublisher,
    ) -> None:  # fmt: skip
        """``options`` is the fingerprint of the service's, for those that were given other ones;
        ``reads`` hears what their jobs have read."""
        self._summary, self._options = summary, options
        self._reads, self._publisher = reads, publisher
        self._connected: dict[int, Launcher] = {}
        self._pids: set[int] = set()  # of all that have come
        self._parting: list[socket.socket] = []  # of those that have said good-bye
        self._parting_ns = 0

    @property
    def any(self) -> bool:
        """Whether one is connected."""
        return bool(self._connected)

    @property
    def parting(self) -> bool:
        """Whether one has told how its job ended, and waits for our own end."""
        return bool(self._parting)

    def has_come(self, pid: int) -> bool:
        """Whether this one has, ever."""
        return pid in self._pids

    def jobs(self) -> list[int]:
        """The pids of the commands that they run."""
        return [x.job_pid for x in self._connected.values() if x.job_pid and not x.finished]

    def get(self, fd: int) -> Launcher | None:
        """The one behind a socket."""
        return self._connected.get(fd)

    def welcome(self, sock: socket.socket, hello: wire.Hello, pid: int) -> None:
        """One says hello."""
        self._connected[sock.fileno()] = Launcher(sock, hello, pid)
        self._pids.add(pid)
        self._publisher.launcher(pid)
        with contextlib.suppress(OSError):
            message = wire.pack(wire.Type.WELCOME, wire.WELCOME.pack(self._options))
            sock.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def message(
        self, launcher: Launcher, kind: wire.Type, body: bytes, last_words: Callable[[], None]
    ) -> None:
        """``last_words``: called before the summary, to hear who has just come. Raises
        WireError."""
        if kind == wire.Type.JOB:
            launcher.job_pid = wire.JOB.unpack_from(body)[0]
        elif kind == wire.Type.FINISH:
            launcher.finished = True
            _, _, by_calls, storage, replay = wire.FINISH.unpack_from(body)
            self._reads.finished(
                by_calls if by_calls >= 0 else None, storage if storage >= 0 else None
            )
            if replay.rstrip(b"\0"):
                self._reads.replays.append(replay)
            last_words()
            self._send_summary(launcher)
        else:
            raise wire.WireError(f"{kind.name} from a launcher")

    def _send_summary(self, launcher: Launcher) -> None:
        others = [x for x in self._connected.values() if not x.finished]
        text = encode(self._summary()).encode()
        if not others:
            self._publisher.finished()
        memfd = os.memfd_create("uffdprefetch-summary", os.MFD_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # RLIMIT_FSIZE: the launcher says what it lacks
                os.write(memfd, text)
            os.lseek(memfd, 0, os.SEEK_SET)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memfd]))]
            message = wire.pack(wire.Type.SUMMARY, wire.SUMMARY.pack(len(text), not others))
            with contextlib.suppress(OSError):
                launcher.sock.sendmsg([message], rights, socket.MSG_DONTWAIT)
        finally:
            os.close(memfd)

    def left(self, fd: int) -> None:
        """One has hung up. If it has said good-bye it is not hung up on yet: see part()."""
        launcher = self._connected.pop(fd)
        if launcher.finished:
            self._parting.append(launcher.sock)
            self._parting_ns = CLOCK.now_ns()
        else:
            launcher.close()

    def part(self, now: bool = False) -> None:
        """Hang up on those that wait for it. Not at once where none is left but processes of the
        job are (not ``now``): most often they are just ending."""
        if self._connected or now or CLOCK.now_ns() - self._parting_ns > PART_NS:
            while self._parting:
                self._parting.pop().close()
