# SPDX-License-Identifier: Apache-2.0
"""`top` on a terminal: the alternate screen, keys, resizing, and the terminal as it was afterwards.

Signals only set marks here and wake the loop: nothing is interrupted in the middle of a drawing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from uffdprefetch.view import render
from uffdprefetch.view.fetch import Fetcher
from uffdprefetch.view.glyphs import Glyphs
from uffdprefetch.view.model import ENDED, LOST

HINT = "q quits"


def console() -> Console:
    """A console of stdout. COLUMNS and LINES are not believed: they do not follow a resize."""
    environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    return Console(file=sys.stdout, _environ=environ, highlight=False, soft_wrap=False)


class Screen:
    """Shows a fetcher's snapshots until the user or the job has had enough."""

    def __init__(self, glyphs: Glyphs) -> None:
        self._glyphs = glyphs
        self._console = console()
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._signals: list[int] = []

    def wake(self) -> None:
        """Draw soon; from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def run(self, fetcher: Fetcher) -> int:
        """Returns 0 when the user left (q, Ctrl-C) or the job ended; a signal's number, negative,
        when one asked us to end. The terminal is as before on return."""
        with self._signals_marked():
            fetcher.start()
            try:
                with self._cbreak(), self._live:
                    return self._loop(fetcher)
            except OSError:  # the terminal is gone
                return -signal.SIGHUP

    def _loop(self, fetcher: Fetcher) -> int:
        stdin = 0 if os.isatty(0) else -1
        while True:
            self._draw(fetcher)
            if fetcher.latest.state in (ENDED, LOST):
                return 0
            watched = [self._wake_read] + ([stdin] if stdin >= 0 else [])
            ready, _, _ = select.select(watched, [], [])
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            if stdin in ready:
                keys = os.read(stdin, 64)
                if not keys or b"q" in keys.lower():
                    return 0
            while self._signals:
                number = self._signals.pop(0)
                if number == signal.SIGINT:
                    return 0
                if number in (signal.SIGTERM, signal.SIGHUP):
                    return -number
                if number == signal.SIGTSTP:
                    self._suspend()

    def _draw(self, fetcher: Fetcher) -> None:
        width, height = self._console.size
        picture = render.renderable(fetcher.latest, width, height, self._glyphs, HINT)
        self._live.update(picture, refresh=True)

    def _suspend(self) -> None:
        """Ctrl-Z: the terminal is the shell's until we are continued."""
        self._live.stop()
        ours = termios.tcgetattr(0) if os.isatty(0) else None
        if ours is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._mark)
        if ours is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, ours)
        self._live.start()

    @contextlib.contextmanager
    def _cbreak(self) -> Iterator[None]:
        """Keys come one by one and are not shown; Ctrl-C and Ctrl-Z are signals still."""
        if not os.isatty(0):
            yield
            return
        self._before = termios.tcgetattr(0)
        tty.setcbreak(0)
        try:
            yield
        finally:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def _mark(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    @contextlib.contextmanager
    def _signals_marked(self) -> Iterator[None]:
        numbers = (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGTSTP,
            signal.SIGWINCH,
        )
        before: dict[int, Any] = {}
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup's stays ignored
                before[number] = signal.signal(number, self._mark)
        old = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            for caught, handler in before.items():
                signal.signal(caught, handler)
