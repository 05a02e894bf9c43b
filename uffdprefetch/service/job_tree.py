# SPDX-License-Identifier: Apache-2.0
"""Which processes a job consists of: short ones, too, of which no agent tells; and the end of some
of them at once."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

from uffdprefetch.base.clock import CLOCK, MS, Clock
from uffdprefetch.base.procfs import descendants, newest_pid
from uffdprefetch.base.record import dataclass
from uffdprefetch.predict.bounds import CPU_PART, LATELY_NS
from uffdprefetch.sense.pagetables import LOOK_SLOWEST_NS, LOOKS

#: A process that reads for a tenth of a second is found in its first tenth.
LOOK_NS = 10 * MS


@dataclass
class JobTree:
    """Of one run. ``seen``: how many processes there were, by the walks that met them."""

    clock: Clock = CLOCK
    due_ns: int = 0
    seen: int = 0
    _pids: frozenset[int] = frozenset()
    _again: frozenset[int] = frozenset()
    _changed_ns: int = 0
    _looked_ns: int = 0
    _newest: tuple[int | None, ...] = ()  # the process that was made last, and the jobs

    def look(self, jobs: list[int], now_ns: int) -> tuple[frozenset[int], frozenset[int]]:
        """Those that have come and those that have gone since the last look, if one is due: the
        longer none has, the rarer, and where nobody on this node has, who has gone is told once in
        LATELY_NS. ``jobs``: pids of the commands that launchers run; where these are others than
        at the last look, one is due."""
        if now_ns < self.due_ns and self._newest[1:] == (*jobs,):
            return frozenset(), frozenset()
        began = self.clock.cpu_ns()
        newest, before = (newest_pid(), *jobs), self._newest
        self._newest = newest
        same = newest[0] is not None and newest == before and not self._again
        if same and now_ns - self._looked_ns < LATELY_NS:
            self._wait(now_ns, began)  # nobody has come; of who has gone it may be heard later
            return frozenset(), frozenset()
        self._looked_ns = now_ns
        known, self._pids = self._pids, frozenset(pid for job in jobs for pid in descendants(job))
        again, self._again = self._again & self._pids, frozenset()
        if self._pids != known:
            self._changed_ns = now_ns
            self.seen += len(self._pids - known)
        self._wait(now_ns, began)
        return self._pids - known | again, known - self._pids

    @property
    def pids(self) -> frozenset[int]:
        """Those of the latest walk; of each walk another object."""
        return self._pids

    def again(self, pids: Iterable[int]) -> None:
        """These come again with the next look, if they are there still."""
        self._again |= frozenset(pids)

    def _wait(self, now_ns: int, began_ns: int) -> None:
        quiet_ns = (now_ns - self._changed_ns) // LOOKS
        wait_ns = max(LOOK_NS, min(LOOK_SLOWEST_NS, quiet_ns))
        self.due_ns = now_ns + max(wait_ns, CPU_PART * (self.clock.cpu_ns() - began_ns))


class Exits:
    """Processes of whose end somebody has to hear at once: what they had open is to be closed
    before who waits for them unmounts or deletes it."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._poll = select.epoll()
        self._pids: dict[int, int] = {}  # by descriptor (pidfd)
        self._fds: dict[int, int] = {}

    def fileno(self) -> int:
        """Readable when one has ended."""
        return self._poll.fileno()

    def watch(self, pid: int) -> None:
        """... this one, too; where no descriptor is left, it is not heard of."""
        if pid in self._fds:
            return
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # it is gone: JobTree tells
            return
        self._poll.register(fd, select.EPOLLIN)
        self._pids[fd], self._fds[pid] = pid, fd

    def forget(self, pid: int) -> None:
        """It does not matter any more."""
        fd = self._fds.pop(pid, None)
        if fd is not None:
            del self._pids[fd]
            os.close(fd)

    def take(self) -> list[int]:
        """Those that have ended; of each it is told until it is forgotten."""
        return [self._pids[fd] for fd, _ in self._poll.poll(0)] if self._pids else []

    def close(self) -> None:
        """End it."""
        for pid in list(self._fds):
            self.forget(pid)
        self._poll.close()
