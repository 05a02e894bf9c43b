# SPDX-License-Identifier: Apache-2.0
"""The replay of a start profile, beside the program that is starting (csrc/replay/, docs/learn.md).

It is started before the launcher loads the rest of itself, which may lie on the same slow file
system, and nobody waits for it: it is a child of the launcher, which it does not outlive.
"""

from __future__ import annotations

import os
import signal
import time

import uffdprefetch
from uffdprefetch.base import rundir
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.identity import file_name_safe
from uffdprefetch.base.messages import say
from uffdprefetch.base.start_key import (
    SUFFIX,
    described,
    profile_directory,
    profile_path,
    start_key,
    started,
)
from uffdprefetch.launch.address import address_of
from uffdprefetch.protocol import leftovers
from uffdprefetch.protocol.replayed import BUSY, learned, told_by
from uffdprefetch.protocol.start_log import SUFFIX as STARTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from uffdprefetch.base.config import Config, LearnOptions
    from uffdprefetch.protocol.node import JobRead

#: The program, as setup.py builds it.
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(uffdprefetch.__file__)), "_replay")
#: In place of a control group in the name of its lock: one replay for a node, user and key at a
#: time.
_GROUP = "start"
#: What a start takes on slow storage, and more: who comes there after that waits for no replay.
MOST_SECONDS = 30
#: Between two looks whether it has ended, of who waits for that.
WAIT_SECONDS = 0.02
#: Its standard input, which it needs for nothing else.
_RESULT_FD = 0
#: Its exit statuses (csrc/replay/replay.c).
_BUSY, _NO_LOCK = 3, 4


def why_not() -> str | None:
    """Why nothing can be replayed here."""
    if os.access(PROGRAM, os.X_OK):
        return None
    return f"the program that reads ahead ({PROGRAM}) was not built; run `make setup`"


def key_of(
    learn: LearnOptions, command: Sequence[str], environ: Mapping[str, str]
) -> tuple[str, tuple[str, str, str]]:
    """The name of the command's start profile: the user's, or the program's own; and what starts
    (base/start_key.py)."""
    start = started(command, _found(command[0], environ))
    return learn.name or start_key(start, environ), start


def _found(program: str, environ: Mapping[str, str]) -> str:
    """The file that execvp(3) would run."""
    if "/" in program:
        return program
    for directory in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory or os.curdir, program)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return program


def profiles(learn: LearnOptions, key: str, environ: Mapping[str, str]) -> list[str]:
    """Where a profile of that key may lie: the user's own first. (Whether it does the replay finds
    out: storage that does not answer must not hold up the job.)"""
    directories = (profile_directory(environ), learn.directory)
    return [os.path.abspath(profile_path(one, key)) for one in directories if one is not None]


def key_in(path: str) -> str:
    """The key of a profile's file."""
    return os.path.basename(path).removesuffix(SUFFIX)


#: Of csrc/replay/replay.c: all of what it tells, behind which it is told.
_RESULT_BYTES = 1024


class Replay:
    """What is replayed of a start, or why nothing is."""

    def __init__(self, key: str, state: str, start: tuple[str, str, str] = ("", "", "")) -> None:
        """``state``: as the summary tells it, until there is a process; ``start``: what starts
        (base/start_key.py)."""
        self.key, self.of, self.program = key, described(start), start[0]
        self._state = state
        self._pid = 0
        self._result = -1  # a descriptor of the file by which it tells how far it is
        self._lock = ""  # the path
        self._run: tuple[str, int] | None = None  # of the run's lock: its path, our descriptor
        self._told: dict[str, Any] = {}
        self.read: JobRead | None = None  # what it has read, which counts for us from then on

    def is_first(self, environ: Mapping[str, str]) -> bool:
        """Whether no other launcher of the run, on this node, has replayed its start; then none
        does, as long as we run. Raises UffdPrefetchError, OSError."""
        address = address_of(environ)
        if not address.is_shared:
            return True
        path = address.socket + leftovers.REPLAY
        fd = leftovers.hold(path)
        if fd is None:
            self._state = BUSY
            return False
        from uffdprefetch.base import spawn

        self._run = path, spawn.above_standard(fd)
        return True

    def begin(
        self, paths: Sequence[str], learn: LearnOptions, rate: int | None, *, has_job: bool = False
    ) -> None:
        """Start it, with profiles of which the first sound one counts; ``rate``: bytes a second;
        ``has_job``: it goes on as a job uses what it reads, of which it is told by follow(). Raises
        UffdPrefetchError where there is no runtime directory, OSError."""
        directory = rundir.runtime_directory()
        name = rundir.lock_path(directory, file_name_safe(self.key), _GROUP)
        self._lock = name + leftovers.REPLAY
        self._result = os.memfd_create("uffdprefetch-replay")
        words = [
            PROGRAM, str(os.getpid()), str(MOST_SECONDS), str(learn.depth or 0),
            str(learn.budget_bytes), str(rate or 0), str(_RESULT_FD), self._lock, str(int(has_job)),
            self.program, *paths,
        ]  # fmt: skip
        result = (os.POSIX_SPAWN_DUP2, self._result, _RESULT_FD)
        # No fork(2): what we write meanwhile would be copied. LD_PRELOAD is the job's.
        self._pid = os.posix_spawn(PROGRAM, words, {}, file_actions=[result])

    def follow(self, socket: str) -> None:
        """Of the job's service, beside which the job notes what it opens. Who is not told goes no
        further than it may without (RLIMIT_FSIZE: EFBIG)."""
        if self._result >= 0:
            try:  # not contextlib.suppress: a launcher loads nothing that it can do without
                os.pwrite(self._result, os.fsencode(socket + STARTS), _RESULT_BYTES)
            except OSError:
                pass

    def child_changed(self) -> None:
        """A child of ours has ended, perhaps this one."""
        self._reap(os.WNOHANG)

    def wait(self) -> None:
        """Until it has ended. (Whoever waits in waitpid(2) may sleep over a signal that has come
        just before.)"""
        while self._pid:
            self._reap(os.WNOHANG)
            if self._pid:
                time.sleep(WAIT_SECONDS)

    def end(self) -> dict[str, Any]:
        """End it; what came of it, as the summary has it. Does not wait."""
        self._reap(os.WNOHANG)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._reap(os.WNOHANG)
            self._read()
            leftovers.unlink(self._lock)
            self._state = "cut short"
        if self._result >= 0:
            os.close(self._result)
            self._result = -1
        if self._run is not None:
            leftovers.release(*self._run)
            self._run = None
        return learned(self.key, self._state, self._told)

    def _reap(self, options: int) -> None:
        if not self._pid:
            return
        from uffdprefetch.protocol.node import JobRead

        before = JobRead.now()
        try:
            pid, status = os.waitpid(self._pid, options)
        except ChildProcessError:  # we were started with SIGCHLD ignored
            pid, status = self._pid, 0
        if not pid:
            return
        self._pid, self.read = 0, JobRead.now().since(before)
        code = os.waitstatus_to_exitcode(status)
        if code in (_BUSY, _NO_LOCK):
            self._state = BUSY if code == _BUSY else "no room in the run directory"
            return
        self._read()
        self._state = self._told.get("state", "failed") if code == 0 else "killed"
        if code:
            leftovers.unlink(self._lock)

    def _read(self) -> None:
        """How far it is, if it tells."""
        try:
            self._told = told_by(os.pread(self._result, _RESULT_BYTES, 0).decode())
        except (OSError, ValueError):
            pass


def start(config: Config, command: Sequence[str], environ: Mapping[str, str]) -> Replay | None:
    """The replay of a command that is about to start; None: nothing is learned.

    Never a reason not to run the job: what cannot be had is a line, or the job's own to tell.
    """
    learn = config.learn
    if learn.name is None:
        return None
    key, begins = key_of(learn, command, environ)
    replay = Replay(key, "first run", begins)
    paths = profiles(learn, replay.key, environ)
    if not paths:
        return replay
    why = why_not()
    if why is not None:
        say(f"--learn: {why}")
        return Replay(key, "not built", begins)
    try:
        if replay.is_first(environ):
            replay.begin(paths, learn, config.max_rate_bytes_per_second, has_job=True)
    except (OSError, UffdPrefetchError):  # of the runtime directory the service's start tells
        replay.end()
        return Replay(key, "not started", begins)
    return replay
