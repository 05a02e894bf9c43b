# SPDX-License-Identifier: Apache-2.0
"""How fast a reader goes, and whether what it needs is there before it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from uffdprefetch.predict.bounds import LATELY_NS

#: Touches closer than this are one sample: a page-table scan brings several at one time. Nor is a
#: sequence of records looked for, or judged whether to read a file whole, more often.
RATE_SAMPLE_NS = 20_000_000
#: A window grows to this many times what the rate asks for, at most.
BOOST_MAX = 4.0


class Rate:
    """Bytes per second: an exponentially weighted moving average, by time, so that a burst of short
    steps does not outvote a long pause. Its half-life is LATELY_NS: shorter follows batches instead
    of the job. Times in CLOCK_MONOTONIC ns."""

    def __init__(self, since_ns: int | None = None) -> None:
        """None: the first note() only begins it."""
        self.bytes_per_second = 0.0
        self._weight = 0.0
        self._sample_ns = since_ns
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
        keep = 0.5 ** (elapsed / LATELY_NS)
        self._weight = self._weight * keep + (1 - keep)
        sample = self._sample_bytes * 1e9 / elapsed
        self.bytes_per_second += (sample - self.bytes_per_second) * (1 - keep) / self._weight
        self._sample_ns, self._sample_bytes = now_ns, 0


@dataclass
class Feedback:
    """Whether extents were there before their reader; ``boost`` times what its rate asks for is
    then read ahead."""

    boost: float = 1.0
    late_extents: int = 0
    good_extents: int = 0  # one after the other

    def came(self, asked_bytes: int, brought_bytes: int, seconds: float) -> None:
        """An extent was there after so long; ``brought_bytes`` of it were not before."""

    def note(self, late: bool) -> None:
        """One extent more: the window grows at once when it was late, and shrinks by a fifth after
        64 in time."""
        if late:
            self.late_extents += 1
            self.good_extents = 0
            self.boost = min(BOOST_MAX, self.boost * 1.5)
            return
        self.good_extents += 1
        if self.good_extents >= 64:
            self.good_extents = 0
            self.boost = max(1.0, self.boost * 0.8)
