# SPDX-License-Identifier: Apache-2.0
"""The launcher's second child: it tells what only a process beside the job can.

*Whether a signal was sent to the job as well, or to the launcher alone.* The kernel tells a
signal's sender, not its other receivers. The bystander is in the same session, process group,
control group and process tree as the job and records the signals that it receives: a signal to a
whole group or tree reaches it as it reaches the job, one to the launcher alone reaches neither.
Receivers are signalled one after the other, so the launcher waits a moment for the record.

*Whether the job goes on while the launcher is stopped*, which can then see nothing itself: the
bystander looks at the job's state meanwhile, and continues the launcher.
"""

from __future__ import annotations

import _socket  # the standard socket module loads enum, selectors and collections around it
import fcntl
import os
import signal
import struct
import time

from uffdprefetch.base.oom import SCORE_LATER, goes_first
from uffdprefetch.base.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import NoReturn

#: Greatest delay between the receivers of one signal; a signal to the launcher alone is passed on
#: this much later.
SPREAD_SECONDS = 0.1
#: Age up to which a record may belong to a signal that the launcher has only just taken, not having
#: been scheduled (no free CPU, cgroup throttling).
LATE_SECONDS = 1.0
#: Interval of looks at a stopped job: a share of the time since the stop, within bounds. A process
#: that is not its parent gets no event.
LOOK_SHARE, LOOK_LEAST_SECONDS, LOOK_MOST_SECONDS = 1 / 8, 0.02, 0.5
#: To the launcher: signal, sender's pid, time.monotonic().
_NOTE = struct.Struct("iid")
#: To the bystander: the pid of the job to look at, or 0.
_WATCH = struct.Struct("i")
_KEPT = 256


@record(frozen=True)
class ReceivedSignal:
    """A signal that the bystander received."""

    number: int
    sender: int
    seconds: float


class _LauncherStop:
    """Around a stop of the launcher; signals sent meanwhile reach it when it is continued."""

    def __init__(self, bystander: Bystander, job: int) -> None:
        self._bystander, self._job = bystander, job

    def __enter__(self) -> None:
        self._bystander.stopped_seconds = time.monotonic()
        self._bystander.tell(self._job)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bystander.resumed_seconds = time.monotonic()
        self._bystander.tell(0)


class Bystander:
    """The launcher's side. Without a bystander (fork failed) every signal is passed on."""

    def __init__(self, pid: int, link: _socket.socket | None) -> None:
        self.pid = pid
        self.stopped_seconds = self.resumed_seconds = 0.0  # the launcher's last stop
        self._link = link
        self._notes: list[ReceivedSignal] = []

    @classmethod
    def start(cls, handled: Iterable[int]) -> Bystander:
        """Fork it. The caller has one thread and has blocked ``handled``, so that none is
        missed."""
        try:
            ours, its = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        except OSError:
            return cls(-1, None)
        ours.setblocking(False)
        launcher = os.getpid()
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
        try:
            pid = os.fork()
            if pid == 0:
                _stand_by(its.fileno(), launcher, {*handled, signal.SIGIO})
        except OSError:
            ours.close()
            return cls(-1, None)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            its.close()
        return cls(pid, ours)

    def watching(self, job: int) -> _LauncherStop:
        """A context in which the launcher may stop: it is continued when the job is not stopped."""
        return _LauncherStop(self, job)

    def tell(self, watched: int) -> None:
        """Which stopped job to look at; 0: none."""
        if self._link is not None:
            try:
                self._link.send(_WATCH.pack(watched))
            except OSError:  # it was killed, or is itself stopped and has been told too much
                pass

    def has_got(self, number: int, sender: int, taken_seconds: float) -> bool | None:
        """Whether the bystander received the signal of this sender that the launcher took at that
        time; None while that cannot be told: up to SPREAD_SECONDS, less where the sender has
        ended."""
        all_sent = time.monotonic() - taken_seconds >= SPREAD_SECONDS or _has_ended(sender)
        self._take()
        if self._link is None:
            return False
        since = taken_seconds - LATE_SECONDS
        if taken_seconds - self.resumed_seconds < LATE_SECONDS:
            since = min(since, self.stopped_seconds - LATE_SECONDS)
        for note in self._notes:
            if (note.number, note.sender) == (number, sender) and note.seconds >= since:
                return True
        return self._is_pending(number) if all_sent else None

    def go_on(self) -> None:
        """Continue it: what has stopped the job may have stopped it as well."""
        if self.pid > 0:
            os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """End it, reap it."""
        if self.pid > 0:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self._link is not None:
            self._link.close()
        self.pid, self._link = -1, None

    def _take(self) -> None:
        """Read new records."""
        if self._link is None:
            return
        lives = False
        try:
            while data := self._link.recv(_NOTE.size):
                self._notes.append(ReceivedSignal(*_NOTE.unpack(data)))
        except BlockingIOError:
            lives = True
        except OSError:  # ECONNRESET: it was killed before it had read what it was told
            pass
        if not lives:
            self._link.close()
            self._link = None
        del self._notes[:-_KEPT]

    def _is_pending(self, number: int) -> bool:
        """Whether the signal is pending in the bystander, which has not run since."""
        try:
            with open(f"/proc/{self.pid}/status") as file:
                status = file.read()
        except OSError:
            return False
        return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) >> (number - 1) & 1)


def state_of(pid: int) -> str:
    """The letter of its state in /proc/PID/stat; "X" where there is no such process, "" where it is
    not known."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except (OSError, IndexError):
        return ""


def _has_ended(pid: int) -> bool:
    """Whether the sender has ended, so that all its signals are sent; 0: not in our namespace, or
    the kernel."""
    return pid > 0 and state_of(pid) in ("Z", "X")


# ---- the bystander itself -----------------------------------------------------------------------


def _stand_by(fd: int, launcher: int, waited: set[int]) -> NoReturn:
    """Record signals and look at a stopped job, until the launcher has ended (its end of the socket
    closes)."""
    try:
        goes_first(SCORE_LATER)  # its memory is the launcher's
        # close the launcher's connections and locks
        for name in os.listdir("/proc/self/fd"):
            if int(name) != fd:
                try:
                    os.close(int(name))
                except OSError:
                    pass
        os.chdir("/")
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)  # SIGIO: told, or closed
        watched, since = 0, 0.0
        while True:
            try:
                while data := os.read(fd, _WATCH.size):
                    (watched,), since = _WATCH.unpack(data), time.monotonic()
                break
            except BlockingIOError:
                pass
            if watched:
                seconds = max(LOOK_LEAST_SECONDS, LOOK_SHARE * (time.monotonic() - since))
                info = signal.sigtimedwait(waited, min(seconds, LOOK_MOST_SECONDS))
                if state_of(watched) not in ("T", "t") and os.getppid() == launcher:
                    os.kill(launcher, signal.SIGCONT)
            else:
                info = signal.sigwaitinfo(waited)
            # si_code > 0: by the kernel, for the socket
            if info is not None and not (info.si_signo == signal.SIGIO and info.si_code > 0):
                try:
                    os.write(fd, _NOTE.pack(info.si_signo, info.si_pid, time.monotonic()))
                except BlockingIOError:  # the launcher has been stopped for long
                    pass
    finally:
        os._exit(0)
