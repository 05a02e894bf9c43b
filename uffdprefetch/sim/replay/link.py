# SPDX-License-Identifier: Apache-2.0
"""Storage behind a link: a shared bandwidth and a latency. Pure.

As the slow bed (bench/slowfs.c), and as a parallel file system appears to one client: transfers
queue for the link, latencies overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Storage:
    """``bandwidth`` in bytes/s, ``latency`` in seconds a request."""

    bandwidth: float
    latency: float

    @classmethod
    def fitted(cls, rates: Mapping[int, Mapping[int, float]]) -> Storage:
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


class Link:
    """The link's queue over time."""

    def __init__(self, storage: Storage) -> None:
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
