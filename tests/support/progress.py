# SPDX-License-Identifier: Apache-2.0
"""How far a run is, in a line every few seconds; at its end what was skipped, by reason.

`make test` asks for it (pytest --progress). It takes the place of pytest's dots, with workers or
without, on a terminal (the line is written over) or not.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

#: Between two lines: on a terminal, and in a log.
TERMINAL_SECONDS, LOG_SECONDS = 1.0, 5.0


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """The plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self._begin = time.monotonic()
        self._total = self._done = 0
        self._outcomes: Counter[str] = Counter()
        self._running: dict[str, float] = {}
        self._skipped: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._config = config
        self._thread = threading.Thread(target=self._report, name="progress", daemon=True)
        config.option.reportchars = "fE"  # what is skipped is told by us

    # ---- what happens ---------------------------------------------------------------------------

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = self._total or len(session.items)
        self._start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        self._total = len(ids)
        self._start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._done += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            self._skipped[reason][report.nodeid.partition("::")[0]] += 1
        if report.failed:
            self._outcomes["failed"] += 1
            part = "" if report.when == "call" else f" ({report.when})"
            self._write(f"FAILED {report.nodeid}{part}", lasting=True)
        elif report.skipped:
            self._outcomes["skipped"] += 1

    def pytest_report_teststatus(self, report: object) -> tuple[str, str, str] | None:
        """No dots while it runs; the summary has pytest's words."""
        if self._over.is_set() or not isinstance(report, pytest.TestReport):
            return None
        if report.failed:
            return ("failed" if report.when == "call" else "error"), "", ""
        if report.skipped:
            return ("xfailed" if hasattr(report, "wasxfail") else "skipped"), "", ""
        return ("passed" if report.when == "call" else ""), "", ""

    # ---- what is said ---------------------------------------------------------------------------

    @property
    def _terminal(self) -> Any:
        return self._config.pluginmanager.get_plugin("terminalreporter")

    def _start(self) -> None:
        if not self._thread.ident:
            self._thread.start()

    def _report(self) -> None:
        seconds = TERMINAL_SECONDS if self._terminal.isatty else LOG_SECONDS
        while not self._over.wait(seconds):
            self._write(self.line())

    def line(self) -> str:
        """Done of how many, what of them not well, the time, the test that has run the longest."""
        now = time.monotonic()
        words = [f"{self._done} of {self._total} tests", f"{self._outcomes['failed']} failed"]
        if self._outcomes["skipped"]:
            words.append(f"{self._outcomes['skipped']} skipped")
        words.append(clock(now - self._begin))
        running = list(self._running.items())
        if running:
            nodeid, since = min(running, key=lambda one: one[1])
            name = nodeid.rpartition("/")[2]
            words.append(f"in {name[:60]} {clock(now - since)}")
        return ", ".join(words)

    def _write(self, text: str, lasting: bool = False) -> None:
        with self._lock:
            if self._terminal.isatty:
                self._terminal.rewrite(text[: shutil.get_terminal_size().columns - 1], erase=True)
                if lasting:
                    self._terminal.write("\n")
            else:
                self._terminal.write(text + "\n", flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._over.set()
        if self._thread.ident:
            self._thread.join()
            self._write(self.line(), lasting=True)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._skipped:
            return
        terminalreporter.section("skipped, since something is missing here")
        for reason, files in sorted(self._skipped.items()):
            where = ", ".join(f"{name} ({count})" for name, count in sorted(files.items()))
            terminalreporter.write_line(f"{reason}: {where}")
        terminalreporter.write_line("(UFFDPREFETCH_TEST_FORCE=1 makes failures of these)")
