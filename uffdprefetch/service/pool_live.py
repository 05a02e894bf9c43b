# SPDX-License-Identifier: Apache-2.0
"""The pool as it stands now: its part of the snapshot (docs/summary-schema.md)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from uffdprefetch.native.pool import PoolCounts
from uffdprefetch.pool.node_pool import NodePool, quantiles

#: Seconds that rates and shares are of: as the ranks' (sampling.py).
TICKS = 10
SENSOR = (
    "exact, from the pool's own books, a second old at most; hit: faults of all processes that "
    "found their chunk there, of all that reached the pool (a page that is mapped already does not "
    "fault)"
)


@dataclass(frozen=True)
class PoolTick:
    """Running totals of the pool at one time."""

    at_ns: int
    faults: int
    present_faults: int
    read_bytes: int
    evicted_bytes: int


class PoolTrack:
    """The pool over the last seconds. Its counters are 8 KiB: read once a second, not at every
    question."""

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._ticks: deque[PoolTick] = deque(maxlen=TICKS + 1)
        self._now: PoolCounts | None = None

    def tick(self, now: int) -> None:
        """Once a second."""
        c = self._now = self._pool.pool.counts()
        self._ticks.append(PoolTick(now, c.faults, c.present_faults, c.read_bytes, c.evicted_bytes))

    def document(self, now: int) -> dict[str, Any]:
        """The ``pool`` of the snapshot."""
        if self._now is None:
            self.tick(now)
        c, pool = self._now, self._pool
        assert c is not None
        first, last = self._ticks[0], self._ticks[-1]
        seconds = (last.at_ns - first.at_ns) / 1e9
        faults = last.faults - first.faults
        return {
            "budget_bytes": c.budget_bytes,
            "limited_by": pool.limited_by.value if pool.limited_by else None,
            "chunk_bytes": pool.chunk_bytes,
            "huge_pages": pool.huge,
            "evict": "planned" if pool.planned else pool.policy.name,
            "resident_bytes": c.resident_bytes,
            "pinned_bytes": c.pinned_bytes,
            "read_bytes": c.read_bytes,
            "reread_bytes": c.read_bytes - c.unique_bytes,
            "evicted_bytes": c.evicted_bytes,
            "read_bytes_per_second": _rate(last.read_bytes - first.read_bytes, seconds),
            "evicted_bytes_per_second": _rate(last.evicted_bytes - first.evicted_bytes, seconds),
            "rate_seconds": round(seconds, 1) if seconds else None,
            "waiters": c.waiters,
            "waiters_peak": c.waiters_peak,
            "faults": c.faults,
            "missing_faults": c.missing_faults,
            "hit": {
                "share": (last.present_faults - first.present_faults) / faults if faults else None,
                "faults": faults,
                "seconds": round(seconds, 1) if seconds else None,
                "why": None if faults else "no fault in that time",
            },
            "demand_wait_ns": quantiles(c.wait_bin, c.wait_sum_ns, c.wait_max_ns),
            "fill_ns": quantiles(c.fill_bin, c.fill_sum_ns, c.fill_max_ns),
            "sensor": SENSOR,
        }


def _rate(difference: int, seconds: float) -> int | None:
    return round(difference / seconds) if seconds else None
