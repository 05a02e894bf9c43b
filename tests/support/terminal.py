# SPDX-License-Identifier: Apache-2.0
"""A terminal that a test can type into, look at and resize: a tmux server of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from conftest import require, wait_until

_numbers = itertools.count()
PROMPT = "ready$"
#: Lines that scroll out are kept: as many as a slow machine's job may write meanwhile.
HISTORY_LINES = 200_000


class Terminal:
    """One window with a shell in it."""

    def __init__(self, env: dict[str, str], cwd: Path, width: int = 80, height: int = 24) -> None:
        require(shutil.which("tmux"), "tmux is not installed")
        self._server = f"uffdprefetch-test-{os.getpid()}-{next(_numbers)}"
        environment = {**env, "PS1": PROMPT + " ", "TERM": "xterm-256color", "HISTFILE": ""}
        environment.setdefault("LANG", "C.UTF-8")
        environment.pop("TMUX", None)
        self._tmux(
            *("-f", os.devnull, "start-server", ";"),
            *("set", "-g", "history-limit", str(HISTORY_LINES), ";"),
            *("new-session", "-d", "-x", str(width), "-y", str(height)),
            *("-c", str(cwd), "bash", "--norc", "--noprofile"),
            env=environment,
        )
        self._tmux("set", "-g", "status", "off")
        self.resize(width, height)
        wait_until(lambda: PROMPT in self.screen(), "the shell's prompt")

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._server, *words],
            capture_output=True, text=True, timeout=60, env=env, check=True,
        )  # fmt: skip
        return done.stdout

    def screen(self) -> str:
        """What is on the screen now, without colours; lines end where their text ends."""
        return self._tmux("capture-pane", "-p")

    def coloured(self) -> str:
        """The same with its escape sequences."""
        return self._tmux("capture-pane", "-e", "-p")

    def everything(self) -> str:
        """The screen and all that has scrolled out of it, long lines in one piece."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-", "-E", "-")

    def lines(self) -> list[str]:
        """The screen, line by line, as many as it has rows."""
        return self.screen().split("\n")[:-1]

    def show(self, name: str) -> str:
        """A tmux variable, as cursor_y, alternate_on, scroll_region_lower, pane_tty."""
        return self._tmux("display-message", "-p", f"#{{{name}}}").strip()

    def type(self, text: str) -> None:
        """Type a line."""
        self._tmux("send-keys", "-l", text)
        self.key("Enter")

    def key(self, name: str) -> None:
        """Press a key: q, C-c, C-z, Enter."""
        self._tmux("send-keys", name)

    def resize(self, width: int, height: int) -> None:
        """Another size, while whatever runs runs."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def shows(self, *texts: str) -> str:
        """Wait until all these texts are on the screen at once; returns that very screen."""
        return self.matches(*map(re.escape, texts))

    def matches(self, *patterns: str) -> str:
        """The same for regular expressions, whose ^ and $ are a line's.

        What is seen at one look may be a part of what is being drawn: a test that wants several
        things of one picture asks for all of them here, and looks at what it is given.
        """
        last = ""

        def there() -> bool:
            nonlocal last
            last = self.screen()
            return all(re.search(pattern, last, re.MULTILINE) for pattern in patterns)

        wait_until(there, lambda: f"{' and '.join(patterns)} on the screen:\n{last}")
        return last

    def close(self) -> None:
        """End it and what runs in it."""
        with contextlib.suppress(subprocess.SubprocessError):
            self._tmux("kill-server")


@contextlib.contextmanager
def terminal(
    env: dict[str, str], cwd: Path, width: int = 80, height: int = 24
) -> Iterator[Terminal]:
    """A terminal that is gone when the block is left."""
    made = Terminal(env, cwd, width, height)
    try:
        yield made
    finally:
        made.close()
