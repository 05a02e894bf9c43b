# SPDX-License-Identifier: Apache-2.0
"""`--engine pool`: the node's own page pool, as the coordinator uses it (docs/pool.md).

The C side (csrc/service/pool/pool.h) resolves faults, reads and evicts. Here: which files are in
the pool, who maps them, its size, and the list of victims.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.units import HUGE_BYTES, MIB
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native.memory_limits import Limit, Limits
from uffdprefetch.pool import disk_tier
from uffdprefetch.pool.files import PooledFiles
from uffdprefetch.pool.loader import Loader
from uffdprefetch.pool.other_nodes import OtherNodes
from uffdprefetch.pool.processes import PoolProcesses
from uffdprefetch.pool.size import NEARLY_FULL, PoolSize, block_bytes
from uffdprefetch.predict.storage import BLOCK_BYTES, FREE_BYTES
from uffdprefetch.protocol.snapshot import PoolState
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Histogram, Ledger
from uffdprefetch.warm.meter import LATENCY_LEAST, SAMPLES_LEAST, UNLIKELY

if TYPE_CHECKING:
    from uffdprefetch.pool.victims import Victims

#: Fill threads.
THREADS = 16
#: Fill threads where memory is short: two for demand alone, and two.
THREADS_LEAST = 4
#: A fill thread's buffer, whole huge pages (csrc/service/pool/pool_fill.c).
BUFFER_BYTES = 6 * MIB
#: Fraction of the pool's size for all buffers.
BUFFER_SHARE = 8
SHMEM_HUGE = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def huge_pages(wanted: str) -> tuple[bool, str]:
    """Whether the pool's memory comes in huge pages, and why (not): ``--huge-pages``."""
    if wanted == "off":
        return False, "--huge-pages off"
    try:
        with open(SHMEM_HUGE) as file:
            words = file.read()
    except OSError as error:
        return False, f"{SHMEM_HUGE}: {error.strerror}"
    chosen = words.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "advise", "force"):
        return True, f"shmem_enabled is {chosen}"
    return False, f"shmem_enabled is {chosen}: as root, `echo advise > {SHMEM_HUGE}`"


def is_short(room_bytes: float) -> bool:
    """Whether all threads fill it by four buffers each: it takes 0.1 to 0.2 s to load who chooses
    what leaves."""
    return room_bytes <= 4 * THREADS * BUFFER_BYTES


class NodePool:
    """The pool of one service: its parts."""

    def __init__(
        self, config: Config, event_fd: int, ledger: Ledger, clock: Clock = CLOCK,
        limits: Limits | None = None, make: Callable[..., uffd_pool.Pool] = uffd_pool.Pool,
    ) -> None:  # fmt: skip
        """``event_fd``: counts what has happened in it. Raises OSError."""
        limits = limits or Limits(config.budget_bytes)
        allowed, limit = limits.pool_bytes(0)
        self.huge, self.huge_reason = huge_pages(config.pool.huge_pages)
        if self.huge and config.budget_bytes < 8 * HUGE_BYTES:
            self.huge, self.huge_reason = False, "--budget is below eight of them"
        self.chunk_bytes = HUGE_BYTES if self.huge else BLOCK_BYTES
        threads = THREADS
        if limit is not Limit.BUDGET:
            most = allowed // BUFFER_SHARE // BUFFER_BYTES
            threads = min(THREADS, max(THREADS_LEAST, most))
        self.pool = make(
            config.budget_bytes, self.chunk_bytes, threads, event_fd,
            huge=self.huge, guardian=True, free_bytes=FREE_BYTES,
        )  # fmt: skip
        self.disk: disk_tier.DiskTier | None = None
        if config.pool.spill is not None:
            self.disk = disk_tier.begin(self.pool, config.pool.spill, ledger)
        self.files = PooledFiles(self.pool, self.chunk_bytes, self.disk)
        self.size = PoolSize(
            self.pool, self.files, limits, ledger, clock,
            wanted_bytes=config.budget_bytes,
            least_bytes=max(2 * self.chunk_bytes, MIB),  # csrc/service/pool/pool_yield.c
            buffer_bytes=threads * BUFFER_BYTES,
        )  # fmt: skip
        self.processes = PoolProcesses(self.pool, self.files, self.size, clock)
        self._config, self._clock = config, clock
        self.chooses = False  # whether `victims` is there
        self.loader = Loader("uffdprefetch.pool.victims", partial(_not_loaded, ledger))

    @cached_property
    def victims(self) -> Victims:
        """Who chooses what leaves. Made when first asked for: it brings numpy."""
        from uffdprefetch.pool.victims import Victims

        self.chooses = True
        return Victims(
            self.pool, self.files, self.size, self._clock,
            wanted_bytes=self._config.budget_bytes, chunk_bytes=self.chunk_bytes,
            evict=self._config.pool.evict, disk=self.disk,
        )  # fmt: skip

    def can_choose(self) -> bool:
        """Whether who chooses is there, and something may have to leave soon: it is loaded when
        the time for it has come. Without it the C side takes what is next in turn."""
        room_bytes = NEARLY_FULL * self.size.budget_bytes - self.size.used_bytes()
        # to a disk what will leave is written before it does
        is_near = not self.loader.aside or self.disk is not None or is_short(room_bytes)
        return is_near and self.loader.has_loaded()

    def sample(self, file: FileState, most: int) -> list[int]:
        """See PooledFiles."""
        return self.files.sample(file, most) if self.loader.has_loaded() else []

    def _evicts(self) -> tuple[str, int]:
        """(rule, bytes that leave at once)"""
        if self.chooses:
            return self.victims.rule, self.victims.block_bytes
        return self._config.pool.evict, block_bytes(self._config.budget_bytes, self.chunk_bytes)

    def housekeep(self) -> None:
        """Once a second: free changed files, fit the size to memory, release orphans."""
        self.files.forget_changed()
        self.size.fit()
        if self.disk is not None:
            self.disk.fit()
        self.processes.look_for_orphans()

    def share_with(self, others: OtherNodes) -> None:
        """From now on other nodes may have what is in it."""
        self.files.others = others
        self.size.fit()

    def summary(self) -> dict[str, Any]:
        """The ``pool`` object of docs/summary-schema.md; the files' counts are taken as well."""
        for file in self.files.by_number.values():
            self.files.note_counts(file)
        c = self.pool.counts()
        ways = {"O_DIRECT": c.direct_bytes, "buffered, FADV_DONTNEED": c.buffered_bytes}
        return {
            **vars(self.state(c)),
            "block_bytes": self._evicts()[1],
            "huge_pages_reason": self.huge_reason,
            "resident_peak_bytes": c.peak_bytes,
            "demand_read_bytes": c.demand_read_bytes,
            "prefetch_read_bytes": c.read_bytes - c.demand_read_bytes,
            "unique_bytes": c.unique_bytes,
            "mapped_bytes": c.continued_bytes + c.collapsed_bytes,
            "mapped_huge_bytes": c.collapsed_bytes,
            "from_page_cache_bytes": c.cached_bytes,
            "stand_in_bytes": c.stand_in_bytes,
            "mapped_for_writers": c.rescues,
            "oom_canaries": self.size.oom_canaries,
            "present_faults": c.present_faults,
            "source": max(ways, key=lambda way: ways[way]) if any(ways.values()) else None,
            "lost_events": c.lost_events,
            "mappings_given_back": self.processes.given_back,
        }

    def quickest_fills(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of as many as tell of the reads that took the least time of all that
        took longer than memory does, but for a few that the page cache may have answered in part:
        what a thread waits for is read by single chunks at first, alone."""
        c = self.pool.counts()
        fills = Histogram.of_bins(c.fill_bin, c.fill_sum_ns, c.fill_max_ns)
        count = SAMPLES_LEAST + fills.count // UNLIKELY
        quickest = fills.least(count, int(LATENCY_LEAST * 1e9))[-SAMPLES_LEAST:]
        return [(self.chunk_bytes, ns / 1e9) for ns in quickest]

    def state(self, c: uffd_pool.PoolCounts) -> PoolState:
        """What both documents of a run tell, of these counts."""
        waits = Histogram.of_bins(c.wait_bin, c.wait_sum_ns, c.wait_max_ns)
        fills = Histogram.of_bins(c.fill_bin, c.fill_sum_ns, c.fill_max_ns)
        return PoolState(
            budget_bytes=c.budget_bytes,
            limited_by=limit.value if (limit := self.size.limited_by) else None,
            chunk_bytes=self.chunk_bytes,
            huge_pages=self.huge,
            evict=self._evicts()[0],
            resident_bytes=c.resident_bytes,
            pinned_bytes=c.pinned_bytes,
            read_bytes=c.read_bytes,
            reread_bytes=c.read_bytes + c.others_bytes - c.unique_bytes,
            others_bytes=c.others_bytes,
            evicted_bytes=c.evicted_bytes,
            waiters=c.waiters,
            waiters_peak=c.waiters_peak,
            faults=c.faults,
            missing_faults=c.missing_faults,
            demand_wait_ns=waits.quantiles(total=True),
            fill_ns=fills.quantiles(total=True),
            spill=self.disk.state() if self.disk is not None else None,
        )

    def close(self) -> None:
        """End the threads."""
        self.pool.close()
        if self.disk is not None:
            self.disk.close()
        self.files.close()
        self.loader.close()


def _not_loaded(ledger: Ledger, why: str) -> None:
    ledger.degrade(f"what leaves the pool is next in turn, as numpy cannot be loaded: {why}")
