# SPDX-License-Identifier: Apache-2.0
"""What processes of the job read by calls, not by mappings: seen from outside, and read ahead of
them into the page cache (docs/reads.md). No call of the job is changed, and none waits for us."""

from __future__ import annotations

import errno
import select
from collections.abc import Callable
from typing import Any

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.base.config import Config
from uffdprefetch.base.procfs import maps_text
from uffdprefetch.sense.read_calls import ReadCalls
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.service.followed_names import FollowedNames
from uffdprefetch.service.found import FoundMappings
from uffdprefetch.service.job_tree import Exits, JobTree
from uffdprefetch.service.kept_reads import KeptReads
from uffdprefetch.service.opened_files import OpenedFiles
from uffdprefetch.service.read_touches import ReadTouches
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opener
from uffdprefetch.state.publisher import EventPublisher


class FollowedReads:
    """Of one run. The service's thread calls everything here."""

    def __init__(
        self, config: Config, core: Coordinator, found: FoundMappings, opener: Opener,
        ledger: Ledger, publisher: EventPublisher, jobs: Callable[[], list[int]], wake_fd: int,
        rundir: str, poll: select.epoll,
    ) -> None:  # fmt: skip
        """``jobs``: pids of the commands that launchers run; ``rundir``: where the service's socket
        is. Raises OSError."""
        self._core, self._found, self._jobs, self._ledger = core, found, jobs, ledger
        self._min_bytes = config.files.min_size_bytes
        self._tree, self._exits = JobTree(), Exits()
        poll.register(self._exits.fileno(), select.EPOLLIN)
        self._calls = ReadCalls(self._is_written, event_fd=wake_fd)
        self._touches = ReadTouches(core.arbiter, core.scheduler, core.windows, ledger, publisher)
        self._opened = OpenedFiles(
            self._client_of, core.mappings, core.table, opener, self._touches,
            KeptReads(ledger, CLOCK), self._exits,
        )  # fmt: skip
        self.names = FollowedNames(rundir, self._min_bytes, core, opener, ledger)

    def hears(self, fd: int) -> bool:
        """Whether a descriptor of the service's loop is one of ours: step() takes what it has."""
        return fd == self._exits.fileno()

    @property
    def processes(self) -> frozenset[int]:
        """The job's on this node (JobTree.pids)."""
        return self._tree.pids

    @property
    def due_ns(self) -> int:
        """When step() is due though nothing happens."""
        names_ns = self.names.due_ns
        return self._tree.due_ns if names_ns is None else min(self._tree.due_ns, names_ns)

    def step(self, now_ns: int) -> None:
        """Once a turn: who has come and gone, and what was read."""
        come, gone = self._tree.look(self._jobs(), now_ns)
        for pid in gone:
            self._calls.remove(pid)
        self._tree.again(self._look_at(list(come)))
        gone = gone.union(self._exits.take())
        if gone:
            self._opened.ended(gone)
            self._core.table.look(CLOCK.now_ns())  # now: the turn began before they were to go
        seen = self._calls.reap()
        self._opened.seen(one for one in seen if one.size_bytes >= self._min_bytes)
        self._opened.step(now_ns)
        small = [one for one in seen if one.waiting and one.size_bytes < self._min_bytes]
        self.names.step(now_ns, small)

    def _look_at(self, pids: list[int]) -> list[int]:
        """Look at these processes, too: those for whom there is no room."""
        for i, pid in enumerate(pids):
            try:
                self._calls.add(pid)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    return pids[i:]
        return []

    def _client_of(self, pid: int) -> Client | None:
        """The process of a pid, be it met for the first time; None: it has ended."""
        clients = self._core.mappings.clients
        for client in clients.values():
            if client.pid == pid and not client.agent.gone:
                return client
        if maps_text(pid) is None:
            return None
        try:
            return self._found.meet(pid)
        except OSError:  # out of descriptors
            return None

    def _is_written(self, number: tuple[int, int]) -> bool:
        return any(
            file.guard.writer for key, file in self._core.table.files.items() if key[:2] == number
        )

    def describe(self) -> dict[str, Any]:
        """For the summary (docs/summary-schema.md, ``reads``)."""
        self._tree.due_ns = 0
        self.step(CLOCK.now_ns())  # a job's last process may have ended just now
        counts = self._calls.counts()
        return {
            "read_bytes": self._touches.read_bytes + self.names.used_bytes,
            "processes": self._tree.seen,
            "looks": counts.looks,
            "lost_sightings": counts.lost,
            "small_files": self.names.describe(),
            "left_alone": [
                {"path": path, "why": why.value} for path, why in self._calls.left_alone.items()
            ],
        }

    def close(self) -> None:
        """End it."""
        self.names.close()
        self._calls.close()
        self._exits.close()
