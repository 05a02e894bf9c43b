# SPDX-License-Identifier: Apache-2.0
"""The service's own core (service/coordinator.py) on a replayed kernel.

ReplayPageTable stands in for a page table, ReplayFile for the page cache, ReplayWorkers for the
storage; the clock is the replay's. No decision is implemented twice.
"""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.ranges import of_mask
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.native.memory_limits import Limit, Limits
from uffdprefetch.predict.checkpoints import fixed_set
from uffdprefetch.protocol import wire
from uffdprefetch.service.door import (
    EXTENT_BYTES,
    AgentLink,
    Client,
    FileCall,
    FileState,
    Ledger,
    Opened,
    PageTable,
    PendingMappings,
    Region,
    Watched,
    build,
    make_pool,
)

#: Addresses of a mapping of file f begin at (f + 1) << ADDRESS_BITS.
ADDRESS_BITS = 48
#: CLOCK_MONOTONIC at the replay's time 0: 0 means "never" to the service.
START_NS = 1_000_000_000
#: CPU time of a page-table scan, and of each range that it finds (docs/facts.md).
SCAN_CPU_NS, RUN_CPU_NS = 1_000, 100
#: Fault-around: the kernel maps the cached pages of the aligned 64 KiB around a fault.
AROUND_PAGES = 16
#: (file, first page, page after the last)
Range = tuple[int, int, int]


class ReplayPageTable(PageTable):
    """A rank's. ``mapped``: which pages of each file are in it."""

    def __init__(self, page_bytes: int, on_scan: Callable[[int], None]) -> None:
        """``on_scan``: called with the number of ranges that a scan found."""
        self.mapped: dict[int, Array] = {}
        self._page_bytes, self._on_scan = page_bytes, on_scan

    @property
    def is_readable(self) -> bool:
        """See PageTable."""
        return True

    def runs(self, address: int, length: int) -> list[tuple[int, int]]:
        """See PageTable."""
        file, at = (address >> ADDRESS_BITS) - 1, address & (1 << ADDRESS_BITS) - 1
        first = at // self._page_bytes
        mapped = of_mask(self.mapped[file][first : -(-(at + length) // self._page_bytes)])
        starts, ends = (
            edge[: uffd.RUNS_AT_ONCE] * self._page_bytes + address - at + first * self._page_bytes
            for edge in mapped
        )
        self._on_scan(len(starts))
        return list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))


class ReplayAgent(AgentLink):
    """There is none: who is told that checkpoints are armed again is the replay."""

    def __init__(self, rank: int, on_rearm: Callable[[int, int, list[int]], None]) -> None:
        """``on_rearm``: called with (rank, file, pages)."""
        self._rank, self._on_rearm = rank, on_rearm

    def send(self, message: bytes, fds: list[int] | None = None) -> None:
        """See AgentLink."""

    def command(self, kind: wire.Type, region: int, pages: list[int]) -> None:
        """See AgentLink."""
        if kind == wire.Type.REARM:
            self._on_rearm(self._rank, region, pages)


class ReplayProcess(Client):
    """A rank."""

    page_table: ReplayPageTable

    def __init__(self, rank: int, page_table: ReplayPageTable, agent: ReplayAgent) -> None:
        self.rank, self.pid, self.pool_slot = rank, rank + 1, rank
        self.page_table, self.agent = page_table, agent
        self.regions: dict[int, Region] = {}
        self.readers = {}
        self.pending = PendingMappings()
        self.watched = Watched(self.pid, ended=True)

    def descends_from(self, pid: int) -> bool:
        """See Client."""
        return pid == self.pid


@dataclass
class ReplayFile(FileState):
    """A recorded file. ``resident``: how many bytes of [start, +length) are now."""

    resident: Callable[[int, int], int] = field(kw_only=True)

    def resident_bytes(self, start: int, length: int) -> int | None:
        """See FileState."""
        return self.resident(start, length)


class ReplayWorkers(uffd.Workers):
    """Requests sent, until the replay has put them on the link and they have completed."""

    def __init__(self, file_of: Callable[[int], int], page_bytes: int) -> None:
        self._file_of, self._page_bytes = file_of, page_bytes
        self.sent: list[tuple[int, Range, int]] = []  # (request number, pages, bytes)
        self._under_way: list[tuple[int, int, Range, int, int]] = []  # heap by completion time

    def submit(self, job_id: int, fd: int, offset: int, length: int, **_: Any) -> bool:
        """See uffd.Workers."""
        page = self._page_bytes
        wanted = self._file_of(fd), offset // page, -(-(offset + length) // page)
        self.sent.append((job_id, wanted, length))
        return True

    def start(self) -> None:
        """See uffd.Workers."""

    def asked(self, number: int, wanted: Range, length: int, now: int, done: int) -> None:
        """A request is on the link; ``done``: its completion time, ``now`` where all of it is in
        memory, or on its way."""
        heapq.heappush(self._under_way, (done, number, wanted, length, now))

    @property
    def due_ns(self) -> int | None:
        """Completion time of the next request."""
        return self._under_way[0][0] if self._under_way else None

    def take(self, now: int) -> list[uffd.WarmResult]:
        """Requests completed by now."""
        done = []
        while self._under_way and self._under_way[0][0] <= now:
            at, number, _, length, sent = heapq.heappop(self._under_way)
            read = length if at > sent else 0
            done.append(uffd.WarmResult(
                id=number, submit_ns=sent, start_ns=sent, done_ns=at, resident_bytes=length - read,
                bytes=read, copied=0, method=uffd.WARM_READAHEAD, chunk_bytes=EXTENT_BYTES,
                error=0, asked_bytes=length, came_bytes=length,
            ))  # fmt: skip
        return done


class ReplayPool(uffd_pool.Pool):
    """Stands in for the pool's C side. Eviction is the replay's."""

    def __init__(self, budget_bytes: int, chunk_bytes: int, *_: Any, **__: Any) -> None:
        self._chunk_bytes = chunk_bytes
        self.events: list[uffd_pool.PoolEvent] = []
        self.workers: ReplayWorkers | None = None
        self._files: dict[int, Array] = {}

    def add_file(
        self, fd: int, size_bytes: int, unit_bytes: int = 0, was: object = None
    ) -> tuple[int, int]:
        """See uffd_pool.Pool."""
        self._files[fd] = np.zeros(-(-size_bytes // self._chunk_bytes), np.uint8)
        return fd, -1

    def books(self, number: int) -> uffd_pool.Books:
        """See uffd_pool.Pool."""
        state = self._files[number]
        kept, refaults = np.zeros((2, len(state)), np.uint8)
        touched_ms, left = np.zeros((2, len(state)), np.uint32)
        return uffd_pool.Books(state.data, touched_ms.data, kept.data, refaults.data, left.data)

    def evictions(self) -> int:
        """See uffd_pool.Pool."""
        return 0

    def submit(
        self, job_id: int, file: int, offset: int, length: int, due_ns: int = 0,
        record: bool = False,
    ) -> bool:  # fmt: skip
        """See uffd_pool.Pool."""
        assert self.workers is not None
        return self.workers.submit(job_id, file, offset, length)

    def say_random(self, file: int, so: bool) -> None:
        """See uffd_pool.Pool: what a miss brings is the replay's."""

    def reap(self) -> list[uffd.WarmResult]:
        """See uffd_pool.Pool: ReplayWorkers.take() has them."""
        return []

    def drain(self) -> list[uffd_pool.PoolEvent]:
        """See uffd_pool.Pool."""
        events, self.events = self.events, []
        return events

    def map(self, *_: int) -> None:
        """See uffd_pool.Pool."""

    def set_budget(self, budget_bytes: int, keep_bytes: int = 0) -> None:
        """See uffd_pool.Pool."""

    def used_bytes(self) -> int:
        """See uffd_pool.Pool."""
        return 0


class _Room(Limits):
    """A constant budget."""

    def ahead_bytes(self) -> tuple[int, Limit]:
        return self.budget_bytes, Limit.BUDGET

    def pool_bytes(self, resident_bytes: int, reserve_bytes: int = 0) -> tuple[int, Limit]:
        return self.budget_bytes, Limit.BUDGET


class ReplayNode:
    """A service and its job. Times are seconds of the replay."""

    def __init__(
        self, sizes: list[int], paths: list[str], page_bytes: int, around_bytes: list[int],
        there: Callable[[int, int, int], int], config: Config,
        on_rearm: Callable[[int, int, list[int]], None],
    ) -> None:  # fmt: skip
        """``there``: (file, start, length) -> resident bytes now; ``on_rearm`` is called with
        (rank, file, pages) that are armed again."""
        self._page_bytes, self._config = page_bytes, config
        self._now_ns = START_NS
        self._cpu_ns = 0
        self.files = [
            self._file(f, size, paths[f], around_bytes[f], there) for f, size in enumerate(sizes)
        ]
        self.workers = ReplayWorkers(lambda fd: fd, page_bytes)
        clock, limits = (
            Clock(lambda: self._now_ns, lambda: self._cpu_ns),
            _Room(config.budget_bytes),
        )
        ledger = Ledger()
        self.workers.reap = lambda: self.workers.take(self._now_ns)  # type: ignore[method-assign]
        self.pool: ReplayPool | None = None
        node_pool = None
        if config.engine == "pool":
            node_pool = make_pool(config, -1, ledger, clock, limits, ReplayPool)
            assert isinstance(node_pool.pool, ReplayPool)
            self.pool = node_pool.pool
            self.pool.workers = self.workers
        self.core = build(config, self.workers, ledger, clock=clock, limits=limits, pool=node_pool)
        self._refresh_ns = START_NS
        self._on_rearm = on_rearm

    @staticmethod
    def _file(
        number: int, size: int, path: str, around_bytes: int, there: Callable[[int, int, int], int]
    ) -> ReplayFile:
        call = FileCall(
            "replay", ahead_bytes=around_bytes, method=uffd.WARM_READAHEAD, chunk_bytes=EXTENT_BYTES
        )
        status = os.stat_result((stat.S_IFREG, number, 0, 1, 0, 0, size, 0, 0, 0))
        opened = Opened(number, number, number, status, None, 0)
        file = ReplayFile(
            key=(0, number, size, 0), path=path, opened=opened,
            size_bytes=size, call=call, resident=partial(there, number),
        )  # fmt: skip
        file.blocks.tensor_starts = IntervalSet()  # its bytes are not there to tell
        return file

    # ---- the job --------------------------------------------------------------------------------

    def region(self, rank: int, file: int) -> tuple[ReplayProcess, Region]:
        """A rank's mapping of a file, made on first use."""
        process = self.core.mappings.clients.get(rank)
        if process is None:
            process = self.core.mappings.clients[rank] = ReplayProcess(
                rank,
                ReplayPageTable(self._page_bytes, self._scanned),
                ReplayAgent(rank, self._on_rearm),
            )
        assert isinstance(process, ReplayProcess)
        region = process.regions.get(file)
        if region is None:
            state, size = self.files[file], self.files[file].size_bytes
            process.page_table.mapped[file] = np.zeros(-(-size // self._page_bytes), bool)
            mode = wire.ServingMode.PAGE_TABLES
            if self._config.lays_checkpoints:
                mode = wire.ServingMode.CHECKPOINTS
            if self.pool is not None and self.core.pool is not None:
                mode = wire.ServingMode.POOL
                self.core.pool.processes.slots[process.pool_slot] = process
            a = wire.Attach(file, 0, (file + 1) << ADDRESS_BITS, size, 0, 0, file, size, 0, 1, 0)
            region = self.core.mappings.adopt(process, a, state, mode)
            if mode == wire.ServingMode.CHECKPOINTS:
                spacing_bytes = self._config.spacing_bytes
                region.checkpoints.laid = set(fixed_set(region.span, spacing_bytes))
        return process, region

    def _scanned(self, ranges: int) -> None:
        self._cpu_ns += SCAN_CPU_NS + RUN_CPU_NS * ranges

    def touched(self, rank: int, file: int, first: int, end: int, ready: Array, now: float) -> None:
        """A thread has touched pages [first, end); ``ready``: arrival times of the file's pages."""
        process, region = self.region(rank, file)
        low, high = first // AROUND_PAGES * AROUND_PAGES, -(-end // AROUND_PAGES) * AROUND_PAGES
        mapped = process.page_table.mapped[file]
        mapped[low:high] |= ready[low:high] <= now
        mapped[first:end] = True
        self._now_ns = START_NS + int(now * 1e9)
        checkpoints = region.checkpoints
        events = [
            uffd.Event(self._now_ns, page, region.id, 0, 0, 0)
            for page in checkpoints.laid
            if first <= page < end and page not in checkpoints.fired
        ]
        if events:
            self.core.events.take(process, sorted(events))

    def on_pool_touches(
        self, rank: int, file: int, touches: Iterable[tuple[int, int]], thread: int, now: float
    ) -> None:
        """The pool has answered a thread's touches: (page, pages come over since the last one)."""
        process, region = self.region(rank, file)
        self._now_ns = START_NS + int(now * 1e9)
        assert self.pool is not None
        for page, passed in touches:
            self.pool.events.append(uffd_pool.PoolEvent(
                self._now_ns, page * self._page_bytes, self._page_bytes, uffd_pool.TOUCH, file,
                process.pool_slot, region.id, thread, 0, passed=passed * self._page_bytes,
            ))  # fmt: skip
        assert self.core.bridge is not None
        self.core.bridge.take_events()

    def on_evict(self, file: int, first: int, end: int) -> None:
        """These pages have been evicted."""
        self.files[file].cache.recent.remove(first * self._page_bytes, end * self._page_bytes)
        for process in self.core.mappings.clients.values():
            assert isinstance(process, ReplayProcess)
            if file in process.page_table.mapped:
                process.page_table.mapped[file][first:end] = False

    # ---- the service ----------------------------------------------------------------------------

    def turn(self, now: float) -> None:
        """One iteration of the service's loop."""
        self._now_ns = START_NS + int(now * 1e9)
        core = self.core
        core.scheduler.reap()
        core.look(self._now_ns)
        if self._now_ns >= self._refresh_ns:
            self._refresh_ns = self._now_ns + START_NS
            core.refresh_all()
        core.plan()
        core.scheduler.pump(self._now_ns)

    def asked(self, number: int, wanted: Range, length: int, now: float, until: float) -> None:
        """A sent request is on the link; it completes at ``until``."""
        start, end = START_NS + int(now * 1e9), START_NS + int(until * 1e9)
        self.workers.asked(number, wanted, length, start, end)

    def due(self) -> float | None:
        """Time of its next work without an event."""
        due = [self.workers.due_ns, self.core.due_ns]
        due += [
            region.scan.due_ns
            for process in self.core.mappings.clients.values()
            for region in process.regions.values()
        ]
        first = min((at for at in due if at is not None), default=None)
        if first is None:
            return None
        # epoll_wait(2) counts whole milliseconds, rounded up
        return (max(first, self._now_ns + 1_000_000) - START_NS) / 1e9
