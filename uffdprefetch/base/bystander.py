# SPDX-License-Identifier: Apache-2.0
"""Whether a signal was sent to the job as well, or to the launcher alone.

The kernel tells a signal's sender, not its other receivers. So the launcher has a second child
beside the job, in the same session, process group, control group and process tree, which only
records the signals that it receives: a signal to a whole group or tree reaches it as it reaches the
job, one to the launcher alone reaches neither.

Receivers are signalled one after the other, so the launcher waits a moment for the record.
"""

from __future__ import annotations

import fcntl
import os
import select
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

#: Greatest delay between the receivers of one signal; a signal to the launcher alone is forwarded
#: this much later.
SPREAD_SECONDS = 0.1
#: Age up to which a record may belong to a signal that the launcher has only just taken, not having
#: been scheduled (no free CPU, cgroup throttling).
LATE_SECONDS = 1.0
#: signal, sender's pid, time.monotonic()
_NOTE = struct.Struct("iid")
_KEPT = 256


@record(frozen=True)
class Note:
    """A signal that the bystander received."""

    number: int
    sender: int
    seconds: float


class _Late:
    """Around a stop of ours: signals sent meanwhile reach us when we are continued."""

    def __init__(self) -> None:
        self.stopped_seconds = self.resumed_seconds = 0.0  # when

    def __enter__(self) -> None:
        self.stopped_seconds = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.resumed_seconds = time.monotonic()


class Bystander:
    """The launcher's side. Without a bystander (fork failed) every signal is forwarded."""

    def __init__(self, pid: int, fd: int) -> None:
        self._pid = pid
        self._fd = fd
        self._notes: list[Note] = []
        self.ours_is_late = _Late()

    @classmethod
    def start(cls, handled: Iterable[int]) -> Bystander:
        """Fork it. The caller has one thread and has blocked ``handled``, so that none is
        missed."""
        try:
            reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return cls(-1, -1)
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
        try:
            pid = os.fork()
            if pid == 0:
                _stand_by(writer, {*handled, signal.SIGIO})
        except OSError:
            os.close(reader)
            return cls(-1, -1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            os.close(writer)
        return cls(pid, reader)

    def has_got(self, number: int, sender: int) -> bool:
        """Whether the bystander received the signal of this sender that we have just taken. Waits
        up to SPREAD_SECONDS, less where the sender has ended."""
        now = time.monotonic()
        since = now - LATE_SECONDS
        if now - self.ours_is_late.resumed_seconds < LATE_SECONDS:
            since = min(since, self.ours_is_late.stopped_seconds - LATE_SECONDS)
        while self._fd >= 0:
            timed_out = time.monotonic() - now >= SPREAD_SECONDS or _has_ended(sender)
            self._take()
            for note in self._notes:
                if (note.number, note.sender) == (number, sender) and note.seconds >= since:
                    return True
            if timed_out:
                return self._is_pending(number)
            self._poll(SPREAD_SECONDS / 10)
        return False

    def end(self) -> None:
        """End it, reap it."""
        if self._pid > 0:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        if self._fd >= 0:
            os.close(self._fd)
        self._pid = self._fd = -1

    def _poll(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll(seconds * 1000)

    def _take(self) -> None:
        """Read new records."""
        try:
            while data := os.read(self._fd, _NOTE.size * _KEPT):  # whole notes: short writes to a
                self._notes += [Note(*each) for each in _NOTE.iter_unpack(data)]  # pipe are atomic
            os.close(self._fd)  # the bystander has been killed
            self._fd = -1
        except BlockingIOError:
            pass
        del self._notes[:-_KEPT]

    def _is_pending(self, number: int) -> bool:
        """Whether the signal is pending in the bystander, which has not run since."""
        try:
            with open(f"/proc/{self._pid}/status") as file:
                status = file.read()
        except OSError:
            return False
        return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) >> (number - 1) & 1)


def _has_ended(pid: int) -> bool:
    """Whether the sender has ended, so that all its signals are sent; 0: not in our namespace."""
    if pid <= 0:
        return False
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")


def _stand_by(fd: int, waited: set[int]) -> NoReturn:
    """The bystander: records signals until the launcher has ended (its end of the pipe closes)."""
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
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)  # SIGIO when it is closed
        poll = select.poll()
        poll.register(fd, 0)
        while not poll.poll(0):
            info = signal.sigwaitinfo(waited)
            if info.si_signo != signal.SIGIO:
                os.write(fd, _NOTE.pack(info.si_signo, info.si_pid, time.monotonic()))
    finally:
        os._exit(0)
