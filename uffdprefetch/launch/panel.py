# SPDX-License-Identifier: Apache-2.0
"""`wrap --live`: progress on stderr while the job runs.

The job's stdin, stdout and stderr are untouched. On a terminal a panel of a few lines at the bottom
of the screen, else a line every --interval. Drawn by a thread, started after the job (fork needs a
single thread); the main thread waits for signals. Errors here do not affect the job.

One launcher of a job and node shows it, and a terminal has at most one panel.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.messages import PREFIX
from uffdprefetch.protocol import leftovers

if TYPE_CHECKING:
    from uffdprefetch.view.fetch import Fetcher
    from uffdprefetch.view.glyphs import Glyphs
    from uffdprefetch.view.model import View

#: Interval at which the service is queried and the panel redrawn.
PANEL_SECONDS = 1.0
#: Values of TERM without the control sequences that the panel needs.
DUMB = ("", "dumb", "unknown")
#: Longest wait at the job's end for a drawing blocked by a stopped terminal (Ctrl-S).
JOIN_SECONDS = 1.0


class LivePanel:
    """The view of one `wrap`, from :meth:`start` to :meth:`stop`."""

    def __init__(self, socket: str, interval_seconds: float, environ: Mapping[str, str]) -> None:
        """``socket``: the service's path; ``environ``: the user's environment."""
        self._socket = socket
        self._interval_seconds = interval_seconds
        self._environ = environ
        self._terminal = os.isatty(2) and environ.get("TERM", "") not in DUMB
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # of writes to the terminal
        self._suspended = False
        self._screen = (0, 0, 0)  # (width, height, panel's rows) as drawn; rows 0: no panel
        self._locks: list[int] = []
        self._shows = False  # we hold the job's lock
        self._job_pid = 0

    def start(self, job_pid: int) -> None:
        """Start; called by the main thread after the job's start.

        SIGWINCH is blocked here, and so in the thread, which waits for it. It is not forwarded: the
        job gets its own from the terminal.
        """
        if sys.stderr is None:  # closed when we started: descriptor 2 may be anything by now
            return
        self._job_pid = job_pid
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
        thread = threading.Thread(target=self._run, name="live", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the user's limit of threads
            self._write(f"{PREFIX}no live view: {error}\n".encode())
        else:
            self._thread = thread

    def stop(self) -> None:
        """The job has ended: restore the terminal."""
        self._stopping.set()
        if self._thread is not None:
            self._wake()
            self._thread.join(JOIN_SECONDS)
        if self._shows:
            with contextlib.suppress(OSError):
                os.unlink(self._socket + leftovers.LIVE)
        for fd in self._locks:
            os.close(fd)
        self._locks.clear()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Around a stop (Ctrl-Z): the shell has the terminal meanwhile."""
        locked = self._lock.acquire(timeout=JOIN_SECONDS)
        self._suspended = True
        if locked:
            self._erase()
            self._lock.release()
        try:
            yield
        finally:
            self._suspended = False
            self._wake()

    def _wake(self) -> None:
        thread = self._thread
        if thread is not None and thread.ident is not None and thread.is_alive():
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(thread.ident, signal.SIGWINCH)

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._show()
        except UffdPrefetchError as error:
            self._write(f"{PREFIX}no live view: {error.message}\n".encode())
        except Exception as error:  # the job must not hear of it
            self._write(f"{PREFIX}no live view: {type(error).__name__}: {error}\n".encode())

    def _show(self) -> None:
        if not self._alone():
            return
        from uffdprefetch.protocol.node import ServiceGone
        from uffdprefetch.view.fetch import Fetcher
        from uffdprefetch.view.watch import WatchClient

        try:
            client = WatchClient.open(self._socket)
            snapshot = client.snapshot()
        except (OSError, ServiceGone, TimeoutError) as error:
            raise UffdPrefetchError(f"the service does not answer ({error})") from None
        period = PANEL_SECONDS
        if not self._terminal:  # a line tells of its own time
            period = min(period, self._interval_seconds / 2)
        fetcher = Fetcher(client, snapshot, period, self._wake, job_pid=self._job_pid)
        fetcher.start()
        try:
            if self._terminal:
                self._panel(fetcher)
            else:
                self._lines(fetcher)
        finally:
            with self._lock:
                self._erase()
            fetcher.stop()

    def _alone(self) -> bool:
        """Whether no other launcher shows this job, or has a panel on this terminal."""
        places = [(self._socket + leftovers.LIVE, os.O_CREAT | os.O_RDWR)]
        if self._terminal:
            with contextlib.suppress(OSError):
                places.append((os.ttyname(2), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
        for path, flags in places:
            try:
                fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            except OSError:  # another user's terminal (su): unknown
                continue
            self._locks.append(fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            self._shows = True  # the first place is the job's
        return True

    def _sleep(self, seconds: float) -> None:
        """Sleep, until SIGWINCH at most: the terminal was resized, or _wake() was called."""
        signal.sigtimedwait({signal.SIGWINCH}, seconds)

    def _write(self, data: bytes) -> None:
        """Write all of it, by one write(2) if possible. Not by sys.stderr, whose lock a write to a
        stopped terminal would hold at the interpreter's end."""
        while data:
            try:
                data = data[os.write(2, data) :]
            except BlockingIOError:  # the job has set O_NONBLOCK on the shared description
                poll = select.poll()
                poll.register(2, select.POLLOUT)
                poll.poll(1000)
                if self._stopping.is_set():
                    return
            except OSError:
                self._stopping.set()
                return

    # ---- lines ----------------------------------------------------------------------------------

    def _lines(self, fetcher: Fetcher) -> None:
        from uffdprefetch.view import model, words

        due = time.monotonic() + self._interval_seconds
        told = ""
        while not self._stopping.is_set():
            latest = fetcher.latest
            if latest.state in (model.ENDED, model.LOST):
                if latest.state == model.LOST:
                    self._write(f"{PREFIX}{words.state(latest)}\n".encode())
                return
            now = time.monotonic()
            # the service may answer as before; the next answer wakes us
            if now >= due and (line := words.one_line(latest)) != told:
                self._write(f"{PREFIX}{line}\n".encode())
                told, due = line, now + self._interval_seconds
            self._sleep(due - now if due > now else self._interval_seconds)

    # ---- panel ----------------------------------------------------------------------------------

    def _panel(self, fetcher: Fetcher) -> None:
        from uffdprefetch.view import glyphs

        # with `stty tostop` a write from the background must not stop us
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        characters = glyphs.choose(getattr(sys.stderr, "encoding", None), self._environ)
        while not self._stopping.is_set():
            with self._lock:
                if not self._suspended:
                    self._draw(fetcher.latest, characters)
            self._sleep(2 * PANEL_SECONDS)

    def _draw(self, view: View, characters: Glyphs) -> None:
        from uffdprefetch.view import panel

        try:
            width, height = os.get_terminal_size(2)
            ours = os.tcgetpgrp(2) == os.getpgrp()
        except OSError:
            self._stopping.set()
            return
        rows = panel.rows_for(view, width, height) if ours else 0
        old_width, old_height, old_rows = self._screen
        out = ""
        if old_rows and (old_width, old_height) != (width, height):
            out, old_rows = panel.leave_after_resize(), 0
        elif old_rows != rows and old_rows:
            out, old_rows = panel.leave(height, old_rows), 0
        if rows and not old_rows:
            out += panel.enter(height, rows)
        if rows:
            lines = panel.panel(view, width, rows, characters)
            colour = not self._environ.get("NO_COLOR")
            out += panel.drawing(panel.to_ansi(lines, width, colour), height)
        self._screen = (width, height, rows)
        self._write(out.encode(errors="replace"))

    def _erase(self) -> None:
        """Erase the panel; the caller holds the lock."""
        width, height, rows = self._screen
        if not rows:
            return
        from uffdprefetch.view import panel

        self._screen = (0, 0, 0)
        with contextlib.suppress(OSError):
            same = os.get_terminal_size(2) == (width, height)
            out = panel.leave(height, rows) if same else panel.leave_after_resize()
            self._write(out.encode())
