# SPDX-License-Identifier: Apache-2.0
"""`--learn`, in the service: the start is recorded beside the loop, and kept as a start profile; so
is what ranks touch of mapped files, as orders."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from uffdprefetch.base.clock import MS
from uffdprefetch.base.config import LearnOptions
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.start_key import profile_directory, profile_path
from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.native.start_log import StartLog
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_fit import learned, used_files
from uffdprefetch.orders.start_profile import StartEntry, StartProfile
from uffdprefetch.protocol.replayed import merged
from uffdprefetch.readers.learned_plans import LearnedPlans
from uffdprefetch.service import our_files
from uffdprefetch.service.learned_orders import LearnedOrders
from uffdprefetch.service.start_recorder import StartRecorder
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opener

#: How often the files are told that are prefetched for otherwise.
LEAVE_OUT_NS = 1000 * MS
#: The end of a job waits so long for what is written of it: of 2,500 paths that takes 0.03 s (two
#: busy cores, a local disk). A job manager may kill who is not done by then.
END_SECONDS = 0.2
#: Nobody waits any more: so long it goes on where the file system of the user's home is slow.
AFTER_SECONDS = 4.0


class Learning:
    """Of one run. The service's thread calls everything here."""

    def __init__(
        self, options: LearnOptions, start_log_fd: int | None, jobs: Callable[[], list[int]],
        table: FileTable, ledger: Ledger,
    ) -> None:  # fmt: skip
        """``start_log_fd``: of protocol/start_log.py, which stays open, as the job finds it by its
        number; ``jobs``: pids of the commands that launchers run. Raises OSError."""
        if start_log_fd is None:
            ledger.not_done("--learn: there is no memory in which the job could note what it opens")
        self._options, self._kept = options, KeptStart(options)
        self._jobs, self._table, self._ledger = jobs, table, ledger
        self._leave_out_ns = 0
        log = StartLog(start_log_fd) if start_log_fd is not None else None
        self._recorder = StartRecorder(log, self._kept.keep, our_files.note, self._kept.begin)
        self._orders: LearnedOrders | None = None
        self._has_ended = False

    def learn_orders(self, plans: LearnedPlans, opener: Opener) -> None:
        """Of mapped files, too: something is read ahead of them."""
        self._orders = LearnedOrders(self._options, plans, opener)

    def step(self, now_ns: int) -> None:
        """Once a turn."""
        self._recorder.runs(self._jobs())
        if now_ns >= self._leave_out_ns:
            self._leave_out_ns = now_ns + LEAVE_OUT_NS
            self._recorder.leave_out([key[:2] for key in self._table.files])

    def recorded(self) -> dict[str, Any]:
        """How far the record is (docs/summary-schema.md, ``learn.recorded``)."""
        told = self._recorder.describe()
        del told["lost"]
        return told

    def describe(self) -> dict[str, Any]:
        """For the summary (docs/summary-schema.md, ``learn``). Where no job runs any more the
        record is ended, and waited for once, END_SECONDS."""
        if not self._jobs():
            self.end()
        told = self._recorder.describe()
        try:
            replays = merged(self._ledger.jobs.replays)
        except (ValueError, KeyError):
            replays = {}  # each launcher has its own
        return {
            **replays,
            "used": self._kept.used, "ring_losses": told.pop("lost"), "recorded": told,
            "orders": self._orders.describe() if self._orders is not None else None,
        }  # fmt: skip

    def end(self) -> None:
        """What was recorded is to be kept. Waits once, END_SECONDS."""
        if not self._has_ended:
            self._has_ended = True
            self._recorder.leave_out([key[:2] for key in self._table.files])
            self._recorder.end()
            if self._orders is not None:
                self._orders.end()
            self._join(END_SECONDS)
        for why in self._kept.not_done:
            self._ledger.not_done(why)

    def close(self) -> None:
        """What is still being written is waited for, AFTER_SECONDS: nobody waits for us."""
        self._join(AFTER_SECONDS)

    def _join(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._recorder.join(seconds)
        if self._orders is not None:
            self._orders.join(max(0.0, until - time.monotonic()))


class KeptStart:
    """The start profile of a run's program."""

    def __init__(self, options: LearnOptions) -> None:
        self._options = options
        self._began_with: tuple[int, int] | None = None  # of the file, in which it was not yet
        #: Of what was known, how many files were opened; None: nothing was, or it is not yet known.
        self.used: int | None = None
        self.not_done: list[str] = []  # of what the user has asked for

    def begin(self) -> None:
        """The run begins: what it finds is of runs before it. Waits for the home's file system."""
        directory = profile_directory(os.environ)
        if directory is not None:
            self._began_with = _version(profile_path(directory, self._options.name or ""))

    def keep(self, run: Sequence[StartEntry]) -> None:
        """Merge a run into it. Raises OSError."""
        try:
            self._keep(run)
        except OSError as error:
            self.not_done.append(f"--learn: the start is not kept: {error}")
            raise
        site = self._options.directory
        if site is not None and not os.path.isdir(site):
            self.not_done.append(f"--learn-dir: {site} is no directory")

    def _keep(self, run: Sequence[StartEntry]) -> None:
        name, directory = self._options.name, profile_directory(os.environ)
        if not name:
            return
        if directory is None:
            raise OSError("neither XDG_CACHE_HOME nor HOME names a place for it")
        path = profile_path(directory, name)
        run = self._from_the_program_on(run)
        with profile_store.only_writer(directory):
            own = known = _loaded(path)
            if known is None and self._options.directory is not None:
                known = _loaded(profile_path(self._options.directory, name))
            if known is not None:
                self.used = used_files(known, run)
            # A job's nodes start together: who has written meanwhile has been one of them, or has
            # run beside it, which is no run after it either.
            is_joined = _version(path) != self._began_with
            profile_store.store(path, learned(own, run, is_joined=is_joined), self._options.of)

    def _from_the_program_on(self, run: Sequence[StartEntry]) -> list[StartEntry]:
        """Nothing is opened before the program itself is read, which is seen only when it runs. By
        it the replay knows whose profile it is: one that lies on no storage, or has ended (env,
        nice) before anybody has seen it, is there as a name."""
        program = self._options.program
        if not program:
            return [*run]
        first = [entry for entry in run if entry.path == program]
        others = [entry for entry in run if entry.path != program]
        return [*(first or [StartEntry(EntryKind.STAT, program)]), *others]


def _version(path: str) -> tuple[int, int] | None:
    """Another one as soon as somebody has put another file there; None: there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _loaded(path: str) -> StartProfile | None:
    """None: there is none, or what lies there is none."""
    try:
        return profile_store.load(path)
    except (OSError, UffdPrefetchError):
        return None
