# SPDX-License-Identifier: Apache-2.0
"""What others hear of a run: recorders, watchers, and at its end the launcher, by the summary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.base.config import Config
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.service.standstill import Standstill
from uffdprefetch.service.summary import read_so_far, summary
from uffdprefetch.service.timeline import TimelineNotes
from uffdprefetch.service.waits import Waits
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import DISK, DISK_FULL, DISK_OFF, NODES, EventPublisher

if TYPE_CHECKING:
    from uffdprefetch.protocol.snapshot import Snapshot
    from uffdprefetch.service.cluster import Cluster
    from uffdprefetch.service.live import Live
    from uffdprefetch.service.reads import FollowedReads


class Told:
    """Of one run."""

    def __init__(
        self, config: Config, run: str, core: Coordinator, ledger: Ledger,
        publisher: EventPublisher, waits: Waits, cluster: Cluster | None,
        cpu_seconds: Callable[[], float], jobs: Callable[[], list[int]],
        reads: FollowedReads | None = None,
    ) -> None:  # fmt: skip
        """``cpu_seconds``: of those that read for the service; ``jobs``: the pids of the commands
        that the connected launchers run."""
        self._config, self._run, self._core = config, run, core
        self._publisher, self._waits, self._cluster = publisher, waits, cluster
        self._cpu_seconds, self._jobs, self._reads = cpu_seconds, jobs, reads
        self._timeline = TimelineNotes(ledger, core.scheduler, core.mappings, core.windows)
        self.standstill = Standstill()
        self._live: Live | None = None

    # -------------------------------------------------------------- steps of the loop

    @property
    def due_ns(self) -> int:
        """When to look again for watchers; 0: when they ask."""
        return self._live.sampling.slow.due_ns if self._live is not None else 0

    def step(self, now: int) -> None:
        """Once a turn."""
        self._timeline.step(now)
        self._publisher.flush()
        if self._live is not None and self._live.sampling.slow.due_ns:
            self._live.sampling.slow.step(CLOCK.now_ns())

    def sample(self) -> None:
        """Read the counters of the job's processes."""
        for process in self._core.ledger.processes.single:
            self._publisher.sample(process.watched, CLOCK.now_ns())

    def tick(self, now: int, is_first: bool) -> None:
        """Once a second."""
        if self._cluster is not None:
            self._tell_what_went(self._cluster, now)
        self._tell_of_the_disk(now)
        if self._live is not None:
            self._live.tick(now)
        elif not is_first:
            with contextlib.suppress(OSError):  # no descriptor is free to load it by: later, then
                self._with_live()

    def _tell_what_went(self, cluster: Cluster, now: int) -> None:
        pool = self._core.pool
        if pool is None or not self._publisher.active:
            return
        for number, file in pool.files.by_number.items():
            if cluster.is_shared(number):
                counts = pool.pool.file_counts(number)
                self._publisher.put(
                    NODES, now, 0, file, counts.others_bytes, counts.given_bytes, counts.read_bytes
                )

    def _tell_of_the_disk(self, now: int) -> None:
        pool = self._core.pool
        if pool is None or pool.disk is None or not self._publisher.active:
            return
        state = DISK_FULL * pool.disk.is_full | DISK_OFF * pool.disk.is_off
        for number, file in pool.files.by_number.items():
            c = pool.pool.file_counts(number)
            if c.disk_written_bytes or c.disk_dropped_bytes:
                self._publisher.put(
                    DISK, now, 0, file, c.disk_read_bytes, c.disk_written_bytes,
                    c.disk_dropped_bytes, state,
                )  # fmt: skip

    # -------------------------------------------------------------- who asks

    def _with_live(self) -> Live:
        """What watchers are told of, and its history: made when the first one asks, or in the run's
        second second, as it takes longer to load than all that a short job needs of the service."""
        if self._live is None:
            from uffdprefetch.service.live import Live, LiveNode
            from uffdprefetch.service.live_ranks import LiveRanks
            from uffdprefetch.service.sampling import PoolTrack, Sampling

            core, ledger, scheduler = self._core, self._core.ledger, self._core.scheduler
            names = self._reads.names if self._reads is not None else None
            sampling = Sampling(
                core.table.files, core.mappings.clients, scheduler, ledger,
                names.bytes_ahead if names is not None else lambda: (0, 0),
            )  # fmt: skip
            ranks = LiveRanks(
                ledger.processes, core.mappings.readers, core.windows, scheduler, sampling.ranks
            )
            node = LiveNode(
                self._config, ledger, scheduler,
                lambda: (core.windows.allowed_bytes, core.windows.allowed_by), sampling.history,
                self._cpu_seconds, names.live if names is not None else lambda: None,
            )  # fmt: skip
            self._live = Live(
                self._config, self._run, ledger, scheduler, core.table, sampling, ranks, node,
                self._jobs, PoolTrack(core.pool) if core.pool else None, core.known_orders,
                self._described,
            )  # fmt: skip
            self._live.tick(CLOCK.now_ns())
        return self._live

    def snapshot(self, now: int) -> Snapshot:
        """For a watcher."""
        return self._with_live().snapshot(now)

    def summary(self) -> dict[str, Any]:
        """For a launcher whose job has ended."""
        self._timeline.note(CLOCK.now_ns())
        self.sample()
        core = self._core
        read = read_so_far(
            self._core.ledger, core.table, core.mappings.clients, core.windows, core.arbiter,
            core.known_orders, core.pool,
            self._reads.describe() if self._reads is not None else None,
        )  # fmt: skip
        return summary(
            self._config, self._run, self._core.ledger, core.scheduler, read, self._cpu_seconds(),
            self._waits, self._described(), self.standstill.ns,
        )  # fmt: skip

    def _described(self) -> dict[str, Any] | None:
        return self._cluster.describe() if self._cluster is not None else None
