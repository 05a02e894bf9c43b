# SPDX-License-Identifier: Apache-2.0
"""How large the node's pool may be, and what of it is kept for other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uffdprefetch.base.cache_call import CHUNK_MAX_BYTES
from uffdprefetch.base.clock import Clock
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native.memory_limits import Limit, Limits
from uffdprefetch.pool.files import PooledFiles
from uffdprefetch.predict import window
from uffdprefetch.state.ledger import Ledger

if TYPE_CHECKING:
    from uffdprefetch.native.memory import Pressure

#: Fill level from which a list of victims is kept ready.
NEARLY_FULL = 0.9
#: Blocks (units of eviction) in the pool at least, chunk size permitting: one too many is then
#: cheap.
BLOCKS_WANTED = 512
#: A unit of eviction is no larger: what one large request brings back.
BLOCK_MAX_BYTES = CHUNK_MAX_BYTES


def block_bytes(pool_bytes: int, chunk_bytes: int, wanted: int = BLOCKS_WANTED) -> int:
    """The unit of eviction with at least ``wanted`` blocks in a pool."""
    size = chunk_bytes
    while size < BLOCK_MAX_BYTES and pool_bytes // (2 * size) >= wanted:
        size *= 2
    return size


class LimitReport:
    """What the ledger is told of a pool that is smaller than --budget."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._reported: set[Limit] = set()

    def note(self, budget_bytes: int, limit: Limit) -> None:
        """Each limit once: the size changes all the time."""
        if limit not in self._reported:
            self._reported.add(limit)
            self._ledger.degrade(
                f"the pool holds {budget_bytes >> 20} MiB, not --budget: {limit.of_a_pool}"
            )


class PoolSize:
    """Of one pool, as memory leaves room for it."""

    def __init__(
        self, pool: uffd_pool.Pool, files: PooledFiles, limits: Limits, ledger: Ledger,
        clock: Clock, *, wanted_bytes: int, least_bytes: int, buffer_bytes: int,
    ) -> None:  # fmt: skip
        """``wanted_bytes``: --budget; ``least_bytes``: what it needs to work at all;
        ``buffer_bytes``: of its threads, beside it."""
        self._pool, self._files, self._clock = pool, files, clock
        self._limits, self._report = limits, LimitReport(ledger)
        self._wanted_bytes, self._least_bytes = wanted_bytes, least_bytes
        self._buffer_bytes = buffer_bytes
        self.budget_bytes, self.keep_bytes = wanted_bytes, 0
        self.limited_by: Limit | None = None
        self._fit_at_ns = 0

    def watched_by(self, pressure: Pressure) -> None:
        """From now on the size is what the C side finds, which asks many times a second."""
        self._limits.pressure = pressure

    @property
    def oom_canaries(self) -> int:
        """How often the OOM killer has taken a canary in our stead."""
        return self._limits.pressure.now().canaries if self._limits.pressure else 0

    def used_bytes(self) -> int:
        """What it holds."""
        return self._pool.used_bytes()

    @property
    def own_bytes(self) -> int:
        """What is never kept for other nodes."""
        return max(0, self.budget_bytes - self.keep_bytes)

    @property
    def is_nearly_full(self) -> bool:
        """Whether something has to leave soon."""
        return self.used_bytes() >= NEARLY_FULL * self.budget_bytes

    def window_bytes(self, places: int, stream: bool = False) -> int:
        """The most that a stream may have prefetched ahead of it, of so many ``places`` at which
        files are read: a part of what is not kept for other nodes. ``stream``: for one, and not for
        an order that is known: where several nodes walk through the same file, half of what is
        never kept, of which nothing stays for an epoch."""
        kept_bytes = self._pool.kept_bytes() if self.keep_bytes else 0
        room_bytes = max(0, self.budget_bytes - kept_bytes)
        reserve_bytes = 0  # it holds what this node alone will read again
        if stream and any(map(self._files.others.reads_alike, self._files.by_number)):
            reserve_bytes = self.budget_bytes - self.keep_bytes
        return window.pool_bytes(
            room_bytes,
            max(0, self._files.size_bytes - kept_bytes),
            places,
            min(reserve_bytes, room_bytes),
        )

    def fit(self) -> None:
        """Its size, and what of it is kept for other nodes, are what they may be now."""
        self._fit_at_ns = self._clock.now_ns() + uffd_pool.TICK_NS
        resident = self.used_bytes()
        allowed, limit = self._limits.pool_bytes(resident, self._buffer_bytes)
        self.budget_bytes = min(max(allowed, self._least_bytes), self._wanted_bytes)
        self.limited_by = None if self.budget_bytes == self._wanted_bytes else limit
        # else it makes no difference
        if self.limited_by and resident >= NEARLY_FULL * self.budget_bytes:
            self._report.note(self.budget_bytes, limit)
        self.keep_bytes = self._files.others.keeps(self.budget_bytes)
        self._pool.set_budget(self.budget_bytes, self.keep_bytes)

    def fit_if_short(self) -> None:
        """Others may have taken memory since."""
        if self.limited_by and self._clock.now_ns() >= self._fit_at_ns:
            self.fit()
