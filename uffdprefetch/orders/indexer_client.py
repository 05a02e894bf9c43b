# SPDX-License-Identifier: Apache-2.0
"""The service's end of its helper process (orders/indexer.py), which resolves orders to bytes.

Started at the first question. Questions and answers are lines of JSON through a non-blocking socket
pair; when a helper dies its open questions are answered with an error, and the next question starts
another, STARTS_MAX in all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uffdprefetch.protocol import leftovers

if TYPE_CHECKING:  # they bring numpy, which a service without plans spares
    import subprocess

    from uffdprefetch.formats.index import RecordIndex
    from uffdprefetch.orders.file_order import PathOrder
    from uffdprefetch.predict.order.extents import OrderExtents

log = logging.getLogger("uffdprefetch.serve")

#: Starts in a service's life: a helper that keeps dying is given up.
STARTS_MAX = 3
#: Wait for a killed helper's end, which a read of far storage may delay.
KILL_SECONDS = 0.5
#: Answers are small: orders come as files.
ANSWER_MAX_BYTES = 1 << 20

Answer = dict[str, Any]


class IndexerClient:
    """Asks questions and dispatches answers. Called from the service's thread only."""

    def __init__(self, socket_path: str, plan: str | None, poll: select.epoll) -> None:
        """The directory beside the socket is there already, perhaps with announcements, where a
        service was elected (protocol/leftovers.py); raises OSError when it cannot be made."""
        self._socket_path = socket_path
        self.directory = socket_path + leftovers.PLAN
        os.makedirs(self.directory, 0o700, exist_ok=True)
        self._plan = plan
        self._epoll = poll
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._starts = 0
        self._next = 1
        self._asked: dict[int, Callable[[Answer], None]] = {}
        self._out = b""
        self._in = b""

    @property
    def fd(self) -> int:
        """The descriptor to poll, -1 without a helper."""
        return -1 if self._sock is None else self._sock.fileno()

    def ask(self, question: dict[str, Any], done: Callable[[Answer], None]) -> None:
        """Ask; ``done`` gets the answer, or {"error": text}, now or later."""
        if not self.start():
            done({"error": "the helper process that finds the bytes of orders does not start"})
            return
        number, self._next = self._next, self._next + 1
        self._asked[number] = done
        self._out += json.dumps({"id": number, **question}).encode() + b"\n"
        self.ready()

    def start(self) -> bool:
        """Start the helper unless it runs; False when there can be none."""
        if self._sock is not None:
            return True
        if self._starts >= STARTS_MAX:
            return False
        import subprocess  # most services need no helper, and are up sooner

        self._starts += 1
        ours, its = socket.socketpair()
        # inherited: it ends with its standard input, so with us, and not when the job is asked to
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with its:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "uffdprefetch.orders.indexer", self.directory,
                     *([] if self._plan is None else [self._plan])],
                    stdin=its.fileno(), stdout=its.fileno(), stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as error:
                log.warning("plan helper: %s", error)
                ours.close()
                return False
            finally:
                signal.signal(signal.SIGTERM, before)
        ours.setblocking(False)
        self._sock, self._in, self._out = ours, b"", b""
        self._epoll.register(ours, select.EPOLLIN)
        return True

    def ready(self) -> None:
        """Send queued questions, dispatch answers that have come."""
        if self._sock is None:
            return
        try:
            while self._out:
                self._out = self._out[self._sock.send(self._out, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            pass
        except OSError:
            self._died()
            return
        self._epoll.modify(self._sock, select.EPOLLIN | (select.EPOLLOUT if self._out else 0))
        with contextlib.suppress(BlockingIOError):
            while self._sock is not None:
                try:
                    data = self._sock.recv(1 << 16)
                except ConnectionError:
                    data = b""
                if not data or len(self._in) > ANSWER_MAX_BYTES:
                    self._died()
                    return
                self._in += data
                *lines, self._in = self._in.split(b"\n")
                for line in lines:
                    self._on_answer(line)

    def _on_answer(self, line: bytes) -> None:
        answer = json.loads(line)
        # a provisional answer: another one follows
        done = (self._asked.get if answer.get("early") else self._asked.pop)(answer["id"], None)
        if done is not None:
            done(answer)

    def _died(self) -> None:
        self._hang_up()
        waiting, self._asked = list(self._asked.values()), {}
        log.warning("plan helper: it has ended, with %d questions open", len(waiting))
        for done in waiting:
            done({"error": "the helper process that finds the bytes of orders has ended"})

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._epoll.unregister(self._sock)
            self._sock.close()
            self._sock = None
        if self._process is not None:
            import subprocess

            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in a read of far storage
                self._process.wait(KILL_SECONDS)
            self._process = None

    def order(self, layout: dict[str, Any]) -> OrderExtents:
        """An order of an answer, mapped. Raises OSError, ValueError."""
        from uffdprefetch.orders import extents_file

        return extents_file.read(self.directory, layout)

    def file_order(self, layout: dict[str, Any]) -> PathOrder:
        """An order of whole files, of an answer, mapped. Raises OSError, ValueError."""
        from uffdprefetch.orders import paths_file

        return paths_file.read(self.directory, layout)

    def index(self, name: str) -> RecordIndex | None:
        """An index of an answer, mapped."""
        from uffdprefetch.formats import stored

        path = os.path.join(self.directory, name)
        found = stored.read(path, {"name": name})
        with contextlib.suppress(OSError):
            os.unlink(path)
        return found

    def close(self) -> None:
        """End it."""
        self._asked.clear()
        self._hang_up()
        leftovers.remove_plan(self._socket_path)
