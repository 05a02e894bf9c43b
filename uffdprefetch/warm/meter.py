# SPDX-License-Identifier: Apache-2.0
"""How fast storage is, from the extents that were read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from uffdprefetch.native import uffd
from uffdprefetch.predict.window import Storage

#: Latencies that are remembered.
RECENT = 64
#: Bandwidth is taken over busy stretches of this length.
METER_NS = 50_000_000


@dataclass
class Meter:
    """Bandwidth and base latency of storage, from finished extents (Little's law)."""

    bandwidth: float = 0.0
    _from_ns: int = 0  # a busy stretch that is being measured
    _bytes: int = 0
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def note(self, result: uffd.WarmResult, was_idle: bool, alone: bool) -> float | None:
        """Feed an extent that was really read; returns bytes/s when a busy stretch was long enough.

        ``was_idle``: nothing was under way before it. ``alone``: nothing was when it was sent, so
        that it did not stand behind others of ours.
        """
        sample = None
        if was_idle or not self._from_ns:
            self._from_ns, self._bytes = result.start_ns, 0
        self._bytes += result.bytes
        elapsed = result.done_ns - self._from_ns
        if elapsed >= METER_NS:
            sample = self._bytes * 1e9 / elapsed
            share = 0.3 if self.bandwidth else 1.0
            self.bandwidth += (sample - self.bandwidth) * share
            self._from_ns, self._bytes = result.done_ns, 0
        if alone and self.bandwidth:
            took = (result.done_ns - result.start_ns) / 1e9
            self._latencies.append(max(1e-4, took - result.bytes / self.bandwidth))
        return sample

    @property
    def storage(self) -> Storage:
        """What the planner needs to know."""
        latency = min(self._latencies) if self._latencies else 0.0
        return Storage(self.bandwidth, latency)
