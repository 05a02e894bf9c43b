# SPDX-License-Identifier: Apache-2.0
"""How fast may be read: a token bucket."""

from __future__ import annotations


class TokenBucket:
    """``--max-rate``: at most rate bytes/s over any time longer than a burst. None: no cap."""

    def __init__(self, rate_bytes_per_second: int | None, burst_bytes: int) -> None:
        self.rate = rate_bytes_per_second
        self.burst_bytes = burst_bytes
        self._tokens = float(burst_bytes)
        self._at_ns: int | None = None

    def wait_ns(self, now_ns: int) -> int:
        """0 when something may be sent now, else ns until it may."""
        if not self.rate:
            return 0
        if self._at_ns is not None:
            self._tokens += (now_ns - self._at_ns) * self.rate / 1e9
            self._tokens = min(self._tokens, float(self.burst_bytes))
        self._at_ns = now_ns
        return 0 if self._tokens > 0 else int((1 - self._tokens) * 1e9 / self.rate) + 1

    def take(self, length_bytes: int) -> None:
        """Account bytes sent; may go below zero by one extent, which is then waited for."""
        if self.rate:
            self._tokens -= length_bytes
