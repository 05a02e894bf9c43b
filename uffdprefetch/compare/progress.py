# SPDX-License-Identifier: Apache-2.0
"""How a comparison goes, on stderr: one line that changes on a terminal, else a line a run."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from uffdprefetch.base.messages import PREFIX, say
from uffdprefetch.compare import show
from uffdprefetch.compare.figures import MeasuredRun

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

#: Updates a second: each takes a millisecond of a core that the job may want.
PICTURES = 4
#: Where there is no picture, a line about what takes longer than this: by then people ask whether
#: it hangs.
SILENT_SECONDS = 10.0


class Progress:
    """From __enter__ to __exit__. ``total``: runs that are measured; ``is_quiet``: the terminal is
    the job's."""

    def __init__(self, total: int, is_quiet: bool = False) -> None:
        self._total = total
        self._what, self._since, self._so_far = "", time.monotonic(), ""
        self._files, self._told = 0, self._since
        self._live: Live | None = None
        if not is_quiet and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False)
            if not console.is_dumb_terminal:
                self._live = Live(
                    self, console=console, transient=True, refresh_per_second=PICTURES,
                    redirect_stdout=False, redirect_stderr=False,
                )  # fmt: skip

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __rich__(self) -> Text:
        from rich.text import Text

        seconds = f"{time.monotonic() - self._since:.1f} s"
        parts = [f"{self._step}: {seconds}", self._so_far]
        return Text("; ".join(filter(None, parts)), no_wrap=True, overflow="ellipsis")

    @property
    def _step(self) -> str:
        return self._what + (f", {self._files:,} so far" if self._files else "")

    def begins(self, what: str) -> None:
        """A step of a run, or the run itself."""
        self._what, self._since, self._files = what, time.monotonic(), 0

    def counted(self, files: int) -> None:
        """So many files of the present step are done."""
        self._files = files
        if self._live is None and (now := time.monotonic()) - self._told > SILENT_SECONDS:
            self._told = now
            say(self._step)

    def ended(self, what: str, seconds: float, runs: Sequence[MeasuredRun]) -> None:
        """The same run; ``runs``: all that have been measured."""
        if self._live is None:
            say(f"{what}: {show.seconds_text(seconds)} s")
            self._told = time.monotonic()
        times: dict[str, list[float]] = {}
        for run in runs:
            times.setdefault(run.variant, []).append(run.seconds)
        medians = {name: statistics.median(some) for name, some in times.items()}
        left = None
        if runs:
            mean = sum(run.seconds for run in runs) / len(runs)
            left = mean * (self._total - len(runs))
        self._so_far = show.so_far(medians, left)

    def said(self, text: str) -> None:
        """The last words of a run that failed."""
        if self._live is not None:
            self._live.stop()
        for line in text.splitlines():
            sys.stderr.write(f"{PREFIX}| {line}\n")
