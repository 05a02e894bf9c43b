# SPDX-License-Identifier: Apache-2.0
"""A rate of going forward, by the method and with the half-life of predict/streams.Stream."""

from __future__ import annotations

from uffdprefetch.predict.streams import RATE_HALF_LIFE_NS, RATE_SAMPLE_NS


class Rate:
    """An average of bytes per second that is weighted by time; times in CLOCK_MONOTONIC ns."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._weight = 0.0
        self._sample_ns: int | None = None
        self._sample_bytes = 0

    def note(self, gone_bytes: int, now_ns: int) -> None:
        """So many bytes further at this time."""
        if self._sample_ns is None:
            self._sample_ns = now_ns
            return
        self._sample_bytes += gone_bytes
        elapsed = now_ns - self._sample_ns
        if elapsed < RATE_SAMPLE_NS:
            return
        keep = 0.5 ** (elapsed / RATE_HALF_LIFE_NS)
        self._weight = self._weight * keep + (1 - keep)
        sample = self._sample_bytes * 1e9 / elapsed
        self.bytes_per_second += (sample - self.bytes_per_second) * (1 - keep) / self._weight
        self._sample_ns, self._sample_bytes = now_ns, 0
