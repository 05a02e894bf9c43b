# SPDX-License-Identifier: Apache-2.0
"""What a convener has started, also where that has become a daemon: it ends, within a bound.

An MPI's launcher leaves a daemon on each node that has a session of its own, and whose parent has
ended; it waits for minutes for a launcher that is gone. A *child subreaper* (prctl(2)) is the
parent of whatever its descendants leave behind, and a variable marks what is ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Sequence

from uffdprefetch.base import procfs

_PR_SET_CHILD_SUBREAPER = 36
#: Environment variable that marks started processes: "generation owner".
MARK = "UFFDPREFETCH_CLUSTER_STARTED"
LOOK_SECONDS = 0.02
#: Rounds of SIGKILL and the wait after each: a process may have started another before it died.
KILL_TIMES, KILL_SECONDS = 5, 0.1


def adopt() -> None:
    """Make this process the parent of what its descendants leave behind (a child subreaper)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def temporary(path: str) -> dict[str, str]:
    """The variable by which an MPI puts its temporary files into ``path``, where that can be: what
    is killed leaves them there, and not in /tmp."""
    with contextlib.suppress(OSError):
        os.makedirs(path, 0o700, exist_ok=True)
        return {"TMPDIR": path}
    return {}


def _has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in b"ZX"
    except (OSError, IndexError):
        return True


class Brood:
    """One convener's."""

    def __init__(self, owner: str) -> None:
        """``owner``: a name that no other one of this node has."""
        self._owner = owner

    def mark(self, generation: int) -> dict[str, str]:
        """A variable for what is started of a generation."""
        return {MARK: f"{generation} {self._owner}"}

    def _generation_of(self, pid: int) -> int | None:
        """None: it is none of ours, or has ended."""
        with contextlib.suppress(OSError, ValueError, StopIteration):
            with open(f"/proc/{pid}/environ", "rb") as file:
                words = file.read().split(b"\0")
            word = next(word for word in words if word.startswith(f"{MARK}=".encode()))
            generation, _, owner = word.decode()[len(MARK) + 1 :].partition(" ")
            return int(generation) if owner == self._owner else None
        return None

    def alive(self, most: int | None = None) -> list[int]:
        """Processes started and not ended; ``most``: the latest generation that counts."""
        found, left = list[int](), [os.getpid()]
        while left:
            children = procfs.children(left.pop())
            left += children
            for pid in children:
                number = None if _has_ended(pid) else self._generation_of(pid)
                if number is not None and (most is None or number <= most):
                    found.append(pid)
        return found

    def reap(self, but: Sequence[int]) -> None:
        """Take the status of adopted processes that have ended; ``but``: children that others wait
        for."""
        for pid in procfs.children(os.getpid()):
            if pid not in but and _has_ended(pid):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def until_gone(self, seconds: float) -> bool:
        """Wait until none is alive, or for the time given; whether none is."""
        end = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def end(self, own: float, asked: float) -> None:
        """All have ``own`` seconds to end by themselves, ``asked`` more after SIGTERM: a launcher
        removes what it has in files then. Whatever is there after that is killed."""
        if self.until_gone(own):
            return
        send(self.alive(), signal.SIGTERM)
        for _ in range(KILL_TIMES):
            if self.until_gone(asked):
                return
            send(self.alive(), signal.SIGKILL)
            asked = KILL_SECONDS


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """A signal to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
