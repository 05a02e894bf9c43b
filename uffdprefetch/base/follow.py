# SPDX-License-Identifier: Apache-2.0
"""Follows a job that this process has started: what others do to this process happens to the job,
and what happens to the job is seen of this process.

Signals are passed on. When the job stops this process stops, of the same signal, so that a shell
or another parent sees it; when it goes on, so does this process; its status is told at the end.
"""

from __future__ import annotations

import errno
import os
import signal
import time

from uffdprefetch.base.bystander import SPREAD_SECONDS, Bystander
from uffdprefetch.base.messages import say
from uffdprefetch.base.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

#: Passed on to the job: batch systems signal the process that they started, which is the launcher
#: (Slurm's cgroup tracking signals the task, not its children). All that can be blocked, whatever
#: it does by default and whether it was ignored when we started: what it does is the job's to say.
#: But SIGCHLD is about our own children, and SIGWINCH the terminal sends to all. A fault of our own
#: (SIGSEGV) ends us though it is blocked; sent by kill(2) it is the job's.
PASSED_ON = frozenset(
    signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGWINCH}
)
#: Signals that, sent by the kernel, come from the terminal: to the whole group, so to the job, too.
FROM_TERMINAL = frozenset(
    {signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
)
#: Signals of the kernel that concern the launcher alone: its own CPU time.
_ON_OUR_ACCOUNT = frozenset({signal.SIGXCPU})
#: Interval of calls of ``awaits``: its least, its share of the time since the start, its most.
LOOK_SECONDS, LOOK_SHARE, LOOK_MOST_SECONDS = 0.01, 1 / 8, 1.0
#: Interval of looks whether a signal was sent to the job, too, which is known after SPREAD_SECONDS.
_JUDGE_SECONDS = SPREAD_SECONDS / 10


class Nothing:
    """A context in which nothing is different."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def pending(signals: Iterable[int]) -> list[signal.struct_siginfo]:
    """Takes all of these (blocked) signals that have come, in the kernel's order."""
    found = []
    while (info := signal.sigtimedwait(signals, 0)) is not None:
        found.append(info)
    return found


def send(job: int, number: int) -> None:
    """Pass a signal on to the job, which is not reaped yet, so that the pid is still its own."""
    try:
        os.kill(job, number)
    except OSError as error:
        # It has become another user's (sudo): who sent it could not either. Or a tracer of ours has
        # had us take what is no signal.
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise


def unless_it_fails(call: Callable[P, T], instead: T) -> Callable[P, T]:
    """``call``, whose first exception is a line on stderr; from then on only ``instead``."""
    failed = False

    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal failed
        if not failed:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                failed = True
                say(f"beside the job, which goes on: {type(error).__name__}: {error}")
        return instead

    return guarded


@record(frozen=True)
class _Taken:
    """A signal that this process has received, and when."""

    number: int
    sender: int
    seconds: float


class Follower:
    """Waits for a job, from its start to its end, and passes signals on."""

    def __init__(
        self,
        job: int,
        bystander: Bystander,
        child_changed: Callable[[], None],
        around_stop: Callable[[], AbstractContextManager[None]],
        awaits: Callable[[], bool],
    ) -> None:
        """``job``: its pid, a child of ours; see spawn.run() for the rest. PASSED_ON and SIGCHLD
        are blocked."""
        self._job, self._bystander = job, bystander
        self._child_changed = unless_it_fails(child_changed, None)
        self._around_stop = unless_it_fails(around_stop, Nothing())
        self._awaits = unless_it_fails(awaits, False)
        self._since = time.monotonic()
        self._taken: list[_Taken] = []  # not passed on yet, in order
        self._stopped_by = 0  # the job stopped, by this signal; we have not, yet

    def wait(self) -> int:
        """Until the job has ended: its status as of waitpid(2)."""
        while True:
            info = self._next_signal()
            if info is not None and info.si_signo == signal.SIGCHLD:
                status = self._look_at_job()
                if status is not None:
                    return status
                self._child_changed()
            elif info is not None and not self._is_ours(info):
                self._taken.append(_Taken(info.si_signo, info.si_pid, time.monotonic()))
            self._pass_on()
            if self._stopped_by:
                self._stop()

    def _next_signal(self) -> signal.struct_siginfo | None:
        """The next one; None when there is something to be looked at before it comes."""
        waited = {*PASSED_ON, signal.SIGCHLD}
        seconds = LOOK_MOST_SECONDS
        awaits = self._awaits()
        if awaits:
            seconds = max(LOOK_SECONDS, LOOK_SHARE * (time.monotonic() - self._since))
        if self._taken:
            seconds = min(seconds, _JUDGE_SECONDS)
        if awaits or self._taken:
            return signal.sigtimedwait(waited, min(seconds, LOOK_MOST_SECONDS))
        return signal.sigwaitinfo(waited)

    # ---- signals to us --------------------------------------------------------------------------

    def _is_ours(self, info: signal.struct_siginfo) -> bool:
        """Whether the job has nothing to do with it."""
        if info.si_code > 0:  # sent by the kernel; else by kill(2) or the like
            return info.si_signo in FROM_TERMINAL or info.si_signo in _ON_OUR_ACCOUNT
        # SIGPIPE and SIGXFSZ of a write of ours; SIGCONT of the bystander
        return info.si_pid in (os.getpid(), self._bystander.pid)

    def _pass_on(self) -> None:
        """Pass on taken signals, in order, up to one of which it is unknown whether the job got
        it."""
        while self._taken:
            first = self._taken[0]
            got = self._bystander.has_got(first.number, first.sender, first.seconds)
            if got is None:
                return
            del self._taken[0]
            if not got:
                if first.number == signal.SIGCONT:
                    self._bystander.go_on()
                send(self._job, first.number)

    # ---- the job's state ------------------------------------------------------------------------

    def _look_at_job(self) -> int | None:
        """Its status once it has ended."""
        while True:
            pid, status = os.waitpid(self._job, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return None
            if os.WIFSTOPPED(status):
                self._stopped_by = os.WSTOPSIG(status)
            elif os.WIFCONTINUED(status):
                self._stopped_by = 0
            else:
                return status

    def _stop(self) -> None:
        """Stop as the job did, unless it is about to be continued; returns when we are."""
        if signal.SIGCONT in signal.sigpending():
            return
        if any(each.number == signal.SIGCONT for each in self._taken):
            return
        number, self._stopped_by = self._stopped_by, 0
        with self._around_stop(), self._bystander.watching(self._job):
            _stop_by(number)


def _stop_by(number: int) -> None:
    """Stop by this signal, which our parent then sees; returns when we are continued."""
    if number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # blocked, hence pending until the next line
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        if signal.SIGCONT in signal.sigpending():  # it was that which continued us
            return
        # In an orphaned process group only SIGSTOP stops; the job has left ours.
    os.kill(os.getpid(), signal.SIGSTOP)
