# SPDX-License-Identifier: Apache-2.0
"""Records what a job reads when it starts, for its start profile (docs/learn.md).

A thread of its own asks file systems, /proc and page tables: the service's loop waits for none of
them. What processes open they have noted themselves (native/start_log.py), from the first on; what
they have mapped is seen from outside.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from uffdprefetch.base.clock import MS
from uffdprefetch.base.procfs import descendants
from uffdprefetch.native.start_log import Noted, StartLog
from uffdprefetch.orders.start_profile import StartEntry
from uffdprefetch.service import program_pages
from uffdprefetch.service.started_files import Number, StartedFiles

log = logging.getLogger("uffdprefetch.serve")

#: How often the log is read: paths that are not absolute mean something as long as their process
#: lives.
TICK_NS = 100 * MS
#: When the maps of a process are read, from when it was found on; then once in the last of these.
LOOKS_NS = (0, 100 * MS, 300 * MS, 1000 * MS, 3000 * MS, 10_000 * MS)
#: ... and as soon as it has opened something new, which comes with libraries: the last look may be
#: no older than this when it ends, and all looks take one part in so many of a core.
LOOK_NEWS_NS, LOOK_COST = 100 * MS, 20
#: A start is over when nothing new was opened for so long, ...
QUIET_NS = 10_000 * MS
#: ... or after this time, ...
MOST_NS = 60_000 * MS
#: ... or when so much of it is wanted.
MOST_BYTES = 4 << 30
#: Of the log, read in one go: between two of them it is looked whether the run is over.
TAKE_MOST = 1024
#: Names of programs that note nothing, for the summary.
NAMES_MOST = 16
#: How /proc/PID/maps shows the log.
_LOG_NAME = "/memfd:uffdprefetch-starts"
_AT_CWD = -100  # AT_FDCWD (linux/fcntl.h)


class StartState(Enum):
    """Where the record is."""

    RECORDING = "recording"
    WRITING = "being written"  # the job has ended meanwhile
    WRITTEN = "written"
    EMPTY = "nothing to record"
    FAILED = "not written"


@dataclass
class _ProgramLooks:
    """Of the job. ``looks``: how many; ``cost_ns``: of the last one."""

    found_ns: int
    looks: int = 0
    looked_ns: int = 0
    cost_ns: int = 0
    has_news: bool = False

    def due_ns(self) -> int:
        """Of the next look."""
        if self.looks < len(LOOKS_NS):
            due = self.found_ns + LOOKS_NS[self.looks]
        else:
            due = self.looked_ns + LOOKS_NS[-1]
        if self.has_news:
            due = min(due, self.looked_ns + LOOK_NEWS_NS)
        return max(due, self.looked_ns + LOOK_COST * self.cost_ns)


class _Names:
    """What paths that processes have opened mean here."""

    def __init__(self) -> None:
        self._began_in: dict[int, str] = {}  # working directories, by pid
        self._elsewhere: dict[int, bool] = {}
        self.unresolved = 0

    def began_in(self, pid: int, directory: str) -> None:
        """... when the process was loaded."""
        self._began_in[pid] = directory
        self._elsewhere.pop(pid, None)

    def meant(self, noted: Noted) -> str | None:
        """None: nothing here, or nobody knows any more."""
        if noted.pid not in self._elsewhere:
            self._elsewhere[noted.pid] = program_pages.is_elsewhere(noted.pid)
        if self._elsewhere[noted.pid]:
            return None
        return noted.path if noted.path.startswith("/") else self._absolute(noted)

    def _absolute(self, noted: Noted) -> str | None:
        at_cwd = noted.directory == _AT_CWD
        candidates = []
        try:
            link = "cwd" if at_cwd else f"fd/{noted.directory}"
            candidates.append(os.readlink(f"/proc/{noted.pid}/{link}"))
        except OSError:
            pass  # it has ended, or has closed it
        if at_cwd and noted.pid in self._began_in:
            candidates.append(self._began_in[noted.pid])
        paths = [
            os.path.normpath(os.path.join(one, noted.path))
            for one in candidates
            if one.startswith("/")
        ]
        if paths and (noted.is_missing or len(paths) == 1):
            return paths[0]
        for path in paths:
            if os.path.exists(path):
                return path
        self.unresolved += 1
        return None


class StartRecorder:
    """Of one job on one node. The service's thread calls what has no underscore."""

    def __init__(
        self, start_log: StartLog | None, write: Callable[[list[StartEntry]], None],
        ours: Callable[[StartedFiles], None] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """``start_log``: None where there is none: what is mapped is all that is seen then.
        ``write``: is handed what was read, once, in the thread; raises OSError. ``ours``: has it
        know what we have read ourselves; ``begin`` is called before anything is recorded; in the
        thread, too."""
        self._ours = ours
        self._log, self._write = start_log, write
        self._files = StartedFiles(time.time_ns())
        self._names = _Names()
        self._seen = _Programs(self._files)
        self._left_out: frozenset[Number] = frozenset()
        self._jobs: tuple[int, ...] = ()
        self._state, self._lost = StartState.RECORDING, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(begin,), name="learn", daemon=True)
        self._thread.start()

    def runs(self, jobs: Iterable[int]) -> None:
        """Pids of the commands that launchers run."""
        self._jobs = tuple(jobs)

    def leave_out(self, files: Iterable[Number]) -> None:
        """Files that are prefetched for otherwise, these too."""
        self._left_out = self._left_out.union(files)

    def describe(self) -> dict[str, Any]:
        """For the summary (docs/summary-schema.md, ``learn``)."""
        return {
            "record": self.state.value,
            "paths": self._files.paths,
            "bytes": self._files.wanted_bytes,
            "lost": self._lost,
            "looks": self._seen.looks,
            "unresolved": self._names.unresolved,
            "silent_programs": sorted(self._seen.silent),
        }

    @property
    def state(self) -> StartState:
        """Where the record is now."""
        is_ending = self._state is StartState.RECORDING and self._stop.is_set()
        return StartState.WRITING if is_ending else self._state

    def end(self) -> None:
        """The job is over: what is known is written, if it was not. Does not wait."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        """Wait until it is, no longer than this."""
        self._thread.join(seconds)

    # -------------------------------------------------------------- the thread's

    def _run(self, begin: Callable[[], None]) -> None:
        try:
            begin()
            self._record()
            self._state = self._written()
        except Exception:  # of the run nothing is lost but this
            log.exception("the start is not recorded")
            self._state = StartState.FAILED
        if self._log is not None:
            self._log.close()

    def _record(self) -> None:
        began = last = time.monotonic_ns()
        while True:
            ending = self._stop.wait(TICK_NS / 1e9)
            paths = self._files.paths
            self._take()
            now = time.monotonic_ns()
            self._seen.look(self._jobs, now)
            if self._files.paths > paths:
                last = now
            if ending or now - last > QUIET_NS or now - began > MOST_NS:
                break
            if self._files.is_full or self._files.wanted_bytes > MOST_BYTES:
                break
        if not ending:
            self._seen.look(self._jobs, now, at_once=True)

    def _take(self) -> None:
        if self._log is None:
            return
        while some := self._log.take(TAKE_MOST):
            for noted in some:
                if noted.is_directory:
                    self._names.began_in(noted.pid, noted.path)
                    continue
                path = self._names.meant(noted)
                if path is not None:
                    self._files.opened(path, is_missing=noted.is_missing)
                    self._seen.news(noted.pid)
        self._lost = self._log.lost

    def _written(self) -> StartState:
        if self._log is not None:
            self._log.end()
        if self._ours is not None and self._files.paths:
            self._ours(self._files)
        entries = self._files.entries(self._left_out.__contains__)
        if not entries:
            return StartState.EMPTY
        try:
            self._write(entries)
        except OSError as error:
            log.warning("the start profile is not written: %s", error)
            return StartState.FAILED
        return StartState.WRITTEN


class _Programs:
    """What processes of the job have mapped."""

    def __init__(self, files: StartedFiles) -> None:
        self._files = files
        self._processes: dict[int, _ProgramLooks] = {}
        self._walked_ns = self._walk_cost_ns = 0
        self.looks = 0  # at a process
        #: Names of programs that note nothing of what they open: static ones, those that have been
        #: given another environment, or other rights.
        self.silent: set[str] = set()

    def news(self, pid: int) -> None:
        """It has opened something new."""
        process = self._processes.get(pid)
        if process is not None:
            process.has_news = True

    def look(self, jobs: tuple[int, ...], now_ns: int, *, at_once: bool = False) -> None:
        """Look at those of whom it is time; ``at_once``: at all of them."""
        if at_once or now_ns - self._walked_ns >= LOOK_COST * self._walk_cost_ns:
            self._walk(jobs, now_ns)
        for pid, process in self._processes.items():
            if at_once or process.due_ns() <= now_ns:
                self._look_at(pid, process)

    def _walk(self, jobs: tuple[int, ...], now_ns: int) -> None:
        began = time.thread_time_ns()
        pids = {pid for job in jobs for pid in descendants(job)}
        self._processes = {
            pid: self._processes.get(pid) or _ProgramLooks(now_ns) for pid in pids
        }  # fmt: skip
        self._walked_ns, self._walk_cost_ns = now_ns, time.thread_time_ns() - began

    def _look_at(self, pid: int, process: _ProgramLooks) -> None:
        began = time.thread_time_ns()
        if not program_pages.is_elsewhere(pid):
            found = program_pages.look(pid)
            if found is not None:
                maps, files = found
                if _LOG_NAME not in maps:
                    self._note_silent(pid)
                for path, runs in files.items():
                    self._files.mapped(path, runs)
        self.looks += 1
        process.looks += 1
        process.has_news = False
        process.looked_ns = time.monotonic_ns()
        process.cost_ns = time.thread_time_ns() - began

    def _note_silent(self, pid: int) -> None:
        if len(self.silent) < NAMES_MOST:
            try:
                self.silent.add(os.path.basename(os.readlink(f"/proc/{pid}/exe")))
            except OSError:
                pass  # it has ended
