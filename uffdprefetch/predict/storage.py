# SPDX-License-Identifier: Apache-2.0
"""What storage costs a reader: the one model, which everybody asks who decides or keeps books.

A request takes its latency and its bytes' share of the bandwidth; of a stream, where the next
requests are under way meanwhile, the bandwidth alone counts. warm/meter.py measures both. What a
guess may cost is predict/price.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

#: The unit of all books: what one fault maps of the page cache (fault_around_bytes, mm/memory.c).
BLOCK_BYTES = 64 << 10
#: What a miss brings where the kernel's readahead window is not known: read_ahead_kb's default, and
#: what the kernel reads around a miss (mm/filemap.c).
MISS_BYTES = 128 << 10


@dataclass(frozen=True)
class Storage:
    """Its bandwidth in bytes/s and the latency of a request in s; 0: not known."""

    bandwidth_bytes_per_second: float = 0.0
    latency_seconds: float = 0.0

    def request_seconds(self, size_bytes: float) -> float:
        """That a reader waits for one request of so much, with nothing beside it."""
        return self.latency_seconds + self.stream_seconds(size_bytes)

    def stream_seconds(self, size_bytes: float) -> float:
        """That so much takes on the link."""
        return size_bytes / self.bandwidth_bytes_per_second

    def busy_bytes(self, more_seconds: float = 0.0) -> int:
        """What, under way at one time, keeps it busy for its latency and so much longer (Little's
        law)."""
        return int(self.bandwidth_bytes_per_second * (self.latency_seconds + more_seconds))


@dataclass(frozen=True)
class Link(Storage):
    """Storage as one reader meets it. ``waiting``: how many readers wait at one time, whose waits
    overlap; ``miss_bytes``: what one miss brings without us; ``waits_a_byte``: the seconds that who
    goes on in order waits at the most."""

    waiting: float = 1.0
    miss_bytes: int = MISS_BYTES
    waits_a_byte: float = inf

    def as_seen(self, plain_bytes_per_second: float, best_bytes_per_second: float) -> Link:
        """With what readers have shown who went on in order while nothing was read ahead for them
        (0: none has): so much it does bring, and beyond what it takes, or the best one would, they
        have not waited."""
        plain = plain_bytes_per_second
        if not plain:
            return self
        bandwidth = max(plain, self.bandwidth_bytes_per_second)
        return replace(
            self,
            bandwidth_bytes_per_second=bandwidth,
            waits_a_byte=1 / plain - 1 / max(bandwidth, best_bytes_per_second),
        )

    @property
    def miss_seconds(self) -> float:
        """That a miss costs its reader."""
        return self.request_seconds(self.miss_bytes)

    def in_order_seconds(self, size_bytes: float) -> float:
        """That who goes on in order waits for the latency of so much: the kernel's next request is
        under way when it comes to the first page of the last one, for half of that."""
        waits = size_bytes / self.miss_bytes * self.latency_seconds / 2
        return min(waits, size_bytes * self.waits_a_byte)

    def beside_others(self, seconds: float) -> float:
        """What of a wait counts for the run, where others wait beside it."""
        return seconds / max(1.0, self.waiting)

    @property
    def reach_bytes(self) -> int:
        """The gap that costs to read what a miss costs."""
        return self.busy_bytes() + self.miss_bytes


#: A link is thought no slower than this (bytes/s) until some large reads have told
#: (warm/meter.py): who reads little ahead because the first one stood behind others never learns
#: better.
SLOW_BYTES_PER_SECOND = 100e6
#: The link before anything was measured: a slow one, on which a miss costs no more than its bytes.
UNKNOWN = Link(SLOW_BYTES_PER_SECOND, 1e-3)
