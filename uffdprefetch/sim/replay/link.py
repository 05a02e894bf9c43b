# SPDX-License-Identifier: Apache-2.0
"""Storage behind a link: a shared bandwidth and a latency. Pure.

As the slow bed (bench/slowfs.c), and as a parallel file system appears to one client: transfers
queue for the link, latencies overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Reads that tell a storage's rate, and what memory takes, seconds (warm/meter.py).
READS_LEAST, LATENCY_LEAST = 8, 1e-4


@dataclass(frozen=True)
class StorageModel:
    """``bandwidth`` in bytes/s, ``latency`` in seconds a request."""

    bandwidth: float
    latency: float

    @classmethod
    def fitted(cls, rates: Mapping[int, Mapping[int, float]]) -> StorageModel:
        """Fit to calibrate's rates: request bytes -> threads -> bytes/s.

        The bandwidth is the greatest rate; the latency that of a single thread's smallest requests,
        which hardly queue. Raises ValueError without a single thread's rate.
        """
        bandwidth = max(rate for curve in rates.values() for rate in curve.values())
        alone = {request: curve[1] for request, curve in rates.items() if 1 in curve}
        if not alone:
            raise ValueError("no figure of a single thread")
        request = min(alone)
        latency = max(0.0, request / alone[request] - request / bandwidth)
        return cls(bandwidth, latency)

    @classmethod
    def seen(cls, reads: Sequence[tuple[float, float, int]]) -> StorageModel | None:
        """The model that fits observed reads, (begin, end, bytes) of each, seconds. The bandwidth
        is what came while several were under way at once: one alone waits for its latency, too.
        That is what the quickest one took beyond its bytes. None of fewer than READS_LEAST such."""
        busy, taken, moved = 0.0, 0, 0
        began, until, count, total = 0.0, 0.0, 0, 0  # of a stretch in which some are under way
        for begin, end, size in [*sorted(reads), (float("inf"), 0.0, 0)]:
            if begin >= until:
                if count > 1:
                    busy, taken, moved = busy + until - began, taken + count, moved + total
                began, until, count, total = begin, end, 0, 0
            until, count, total = max(until, end), count + 1, total + size
        if taken < READS_LEAST or busy <= 0 or not moved:
            return None
        bandwidth = moved / busy
        alone = min(end - begin - size / bandwidth for begin, end, size in reads)
        return cls(bandwidth, max(LATENCY_LEAST, alone))


class StorageQueue:
    """The link's queue over time."""

    def __init__(self, storage: StorageModel) -> None:
        self.storage = storage
        self.free = 0.0  # when the queue is empty
        self.requests = 0
        self.read_bytes = 0

    def request(self, size_bytes: int, now: float) -> float:
        """Completion time of a request made at ``now``; calls are in the order of time."""
        self.requests += 1
        self.read_bytes += size_bytes
        self.free = max(self.free, now) + size_bytes / self.storage.bandwidth
        return self.free + self.storage.latency

    def backlog(self, now: float) -> float:
        """Seconds until the queue is empty."""
        return max(0.0, self.free - now)
