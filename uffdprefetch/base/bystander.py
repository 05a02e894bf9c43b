# SPDX-License-Identifier: Apache-2.0
"""Was a signal sent to the job as well, or to the launcher alone?

The kernel tells who sent a signal, not to whom else. So the launcher has a second child beside the
job, in the same session, process group, control group and tree of processes, which does nothing but
note the signals that it gets: who signals all of a group or of a tree reaches it as he reaches the
job, and who signals the launcher alone reaches neither.

A signal goes to the processes one after the other, so the launcher waits a moment for the note.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

#: What one sender sends to all comes to all within this. A signal to the launcher alone is passed
#: on so much later.
SPREAD_SECONDS = 0.1
#: What the bystander noted so long ago may still be news to a launcher that did not run (no CPU was
#: free, its control group had used up its share).
LATE_SECONDS = 1.0
#: signal, sender's pid, time.monotonic()
_NOTE = struct.Struct("iid")
_KEPT = 256


@dataclass(frozen=True)
class Note:
    """A signal that the bystander got."""

    number: int
    sender: int
    seconds: float


class Bystander:
    """The launcher's side. Where there is no bystander (no process to be had), nobody has got
    anything: every signal is passed on."""

    def __init__(self, pid: int, fd: int) -> None:
        self._pid = pid
        self._fd = fd
        self._notes: list[Note] = []
        self._stopped_seconds = 0.0  # when we stopped
        self._resumed_seconds = 0.0

    @classmethod
    def start(cls, handled: Iterable[int]) -> Bystander:
        """Fork it. The signals ``handled`` are blocked by the caller already, so none is missed;
        the caller has one thread."""
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
        """Whether a signal that we have just taken went to the bystander too: the same signal of
        the same sender. Waits SPREAD_SECONDS at most, less where the sender has ended."""
        now = time.monotonic()
        since = now - LATE_SECONDS
        if now - self._resumed_seconds < LATE_SECONDS:
            since = min(since, self._stopped_seconds - LATE_SECONDS)
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

    @contextlib.contextmanager
    def ours_is_late(self) -> Iterator[None]:
        """Around a stop of ours: what is sent meanwhile comes to us when we are continued."""
        self._stopped_seconds = time.monotonic()
        try:
            yield
        finally:
            self._resumed_seconds = time.monotonic()

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
        """The notes that have come."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, _NOTE.size * _KEPT):  # whole notes: short writes to a
                self._notes += [Note(*each) for each in _NOTE.iter_unpack(data)]  # pipe are atomic
            os.close(self._fd)  # somebody has killed it
            self._fd = -1
        del self._notes[:-_KEPT]

    def _is_pending(self, number: int) -> bool:
        """Whether the bystander has got it and has not run since."""
        try:
            status = Path(f"/proc/{self._pid}/status").read_text()
        except OSError:
            return False
        return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) >> (number - 1) & 1)


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, so that what it sent has been sent; 0: no process that we see."""
    if pid <= 0:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")


def _stand_by(fd: int, waited: set[int]) -> NoReturn:
    """The bystander: notes signals until the launcher is gone (its end of the pipe is closed)."""
    try:
        # the launcher's connections and locks are the launcher's alone
        for name in os.listdir("/proc/self/fd"):
            if int(name) != fd:
                with contextlib.suppress(OSError):
                    os.close(int(name))
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
