# SPDX-License-Identifier: Apache-2.0
"""The processes of a job, and their counters."""

from __future__ import annotations

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.state.client import Client
from uffdprefetch.state.processes import Watched

PROCESSES_MAX = 1024


@dataclass
class JobProcess:
    """A process of the job and its counters; or ``count`` processes folded into one entry."""

    rank: int
    local_rank: int
    command: str
    watched: Watched
    count: int = 1


@dataclass
class JobProcesses:
    """All of a run, in bounded space."""

    single: list[JobProcess] = field(default_factory=list)
    folded: dict[int, JobProcess] = field(default_factory=dict)  # rank -> ended ones, together

    def hello(self, client: Client, met: Client | None = None) -> None:
        """A process of the job has connected, or was met without an agent; ``met``: so it was
        before it connected."""
        hello = client.hello
        if met is not None:
            self.single = [one for one in self.single if one.watched is not met.watched]
        one = JobProcess(client.rank, hello.local_rank, hello.command, Watched(client.pid))
        client.watched = one.watched
        self.single.append(one)
        if len(self.single) > PROCESSES_MAX:
            self._fold()

    def _fold(self) -> None:
        """Bounds the table: the oldest ended process is folded into its rank's entry."""
        for i, one in enumerate(self.single):
            if one.watched.ended:
                del self.single[i]
                into = self.folded.setdefault(
                    one.rank, JobProcess(one.rank, one.local_rank, "", Watched(0, ended=True), 0)
                )
                into.watched.now = into.watched.now.plus(one.watched.now)
                into.watched.pool_misses += one.watched.pool_misses
                into.count += 1
                return

    def all(self) -> list[JobProcess]:
        """Single and folded entries."""
        return [*self.single, *self.folded.values()]
