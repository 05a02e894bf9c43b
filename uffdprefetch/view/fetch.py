# SPDX-License-Identifier: Apache-2.0
"""The fetching thread: asks the service, adds its own looks, leaves the newest picture's value."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from uffdprefetch.protocol.node import ServiceGone
from uffdprefetch.protocol.snapshot import Snapshot
from uffdprefetch.view.model import ENDED, LOST, SILENT, View
from uffdprefetch.view.sensors import Sensors
from uffdprefetch.view.watch import ANSWER_SECONDS, WatchClient

#: Least interval of reading births: a node that forks without end must not keep us busy.
BIRTHS_SECONDS = 0.05


def alive(pids: Iterable[int]) -> bool:
    """Whether any of the processes is there and has not ended (a zombie has)."""
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            if stat.rpartition(")")[2].split()[0] not in "ZX":
                return True
    return False


def state_after(snapshot: Snapshot, job_pid: int = 0) -> str:
    """The state after the service has hung up: the job has ended, or only the service has."""
    pids = [
        *([job_pid] if job_pid else []),
        *snapshot.job_pids,
        *(pid for rank in snapshot.ranks for pid in rank.pids),
    ]
    return LOST if alive(pids) else ENDED


class Fetcher:
    """Fetches in a thread of its own from :meth:`start` to :meth:`stop` or the service's end.

    The screen reads ``latest`` at any time. ``changed`` is called in the thread after each change.
    """

    def __init__(
        self,
        client: WatchClient,
        snapshot: Snapshot,
        interval_seconds: float,
        changed: Callable[[], None],
        sensors: Sensors | None = None,
        job_pid: int = 0,
    ) -> None:
        """``job_pid``: of a launcher's own job, of which the service may not have heard yet."""
        self._client = client
        self._interval_seconds = interval_seconds
        self._changed = changed
        self._job_pid = job_pid
        self._sensors = sensors or Sensors()
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="fetch", daemon=True)
        self._answered = time.monotonic()
        self._stopping = False  # it is us who hang up
        self.latest = View(snapshot)

    def start(self) -> None:
        """Begin; the first change comes at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the connection."""
        self._stopping = True
        os.write(self._stop_write, b"x")
        self._client.hang_up()
        if self._thread.ident is not None:
            self._thread.join(ANSWER_SECONDS)
        self._client.close()

    def _run(self) -> None:
        self._sensors.open()
        try:
            while self._fetch() and self._wait():
                pass
        finally:
            self._sensors.close()

    def _fetch(self) -> bool:
        """One question; False when the service is gone."""
        try:
            snapshot = self._client.snapshot(ANSWER_SECONDS)
            # a look of ours that fails must not end the picture: the service's part is there
            with contextlib.suppress(KeyError, TypeError, AttributeError):
                snapshot = self._sensors.add(snapshot)
            self.latest = View(snapshot)
            self._answered = time.monotonic()
        except TimeoutError:
            silent = time.monotonic() - self._answered
            self.latest = replace(self.latest, state=SILENT, silent_seconds=round(silent))
        except (ServiceGone, OSError, ValueError):
            if self._stopping:
                return False
            snapshot = self.latest.snapshot
            self.latest = View(snapshot, state_after(snapshot, self._job_pid))
            self._changed()
            return False
        self._changed()
        return True

    def _wait(self) -> bool:
        """Until the next question is due; births of processes are taken meanwhile. False: stop."""
        due = time.monotonic() + self._interval_seconds
        births = self._sensors.births
        while True:
            left = due - time.monotonic()
            if left <= 0 or self._client.answer_waits():
                return True
            listening = births.fileno()
            watched: list[Any] = [self._stop_read, self._client]
            ready, _, _ = select.select(
                watched + ([listening] if listening >= 0 else []), [], [], left
            )
            if self._stop_read in ready:
                return False
            if self._client in ready:  # a hang-up: the next question finds out
                return True
            if listening in ready:
                self._sensors.look(time.monotonic())
                time.sleep(min(BIRTHS_SECONDS, max(0.0, left)))
