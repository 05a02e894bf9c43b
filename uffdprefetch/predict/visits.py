# SPDX-License-Identifier: Apache-2.0
"""Whether a file that is read here and there is worth reading whole.

How often processes begin at places of it that nobody can tell has a law (predict/survival.py): of
so many more places some would hit what is missing, and each would be a miss. Who walks in steps
never goes back, so a place counts twice for each that lies behind the last one, or before it.
"""

from __future__ import annotations

from uffdprefetch.base.record import dataclass
from uffdprefetch.predict.storage import SHY, Link
from uffdprefetch.predict.survival import Law

#: The link's time is worth this part of its price where random readers leave it idle.
IDLE = 0.25
#: Less than this part of a file is little: nothing to read it for where no more is missing.
LITTLE_SHARE = 64


@dataclass
class Visits:
    """Of one file, since it was mapped. ``law``: of how many visits such files have."""

    law: Law
    number: int = 0  # of random places ...
    places: int = 0  # ... of all
    missed: int = 0  # ... that had not been read ahead
    since_ns: int = 0
    is_over: bool = False
    _on: int = 0
    _back: int = 0

    def begins(self, back: bool, missed: bool, now_ns: int) -> None:
        """A process begins at a place, before (``back``) or behind its last one."""
        self.since_ns = self.since_ns or now_ns
        self.places += 1
        self.missed += missed
        self._back += back
        self._on += not back
        number = 2 * min(self._back, self._on)
        if number > self.number:
            self.law.passed(max(1, self.number), number)
            self.number = number

    def over(self) -> None:
        """Nobody maps the file any more."""
        if self.places and not self.is_over:
            self.law.died(max(1, self.number))
            self.is_over = True

    def goes_on(self) -> None:
        """It is mapped again, soon after: a job may do so for each batch."""
        if self.is_over:
            self.law.revived(max(1, self.number))
            self.is_over = False

    def forget(self) -> None:
        """It is mapped again, long after."""
        self.is_over = False
        self.number = self.places = self.missed = self.since_ns = self._on = self._back = 0

    def each_bytes(self, touched_bytes: int, block_bytes: int, link: Link) -> float:
        """What one visit brings: its miss, and what else is read there."""
        return link.miss_bytes + max(0.0, touched_bytes / max(1, self.places) - block_bytes)

    def is_worth_it(
        self, size: int, missing: int, touched: int, block_bytes: int, now_ns: int, link: Link
    ) -> bool:
        """Whether the misses to be expected cost more than reading what is ``missing`` (bytes)."""
        if self.places <= 1 or missing * LITTLE_SHARE <= size:
            return False
        each = self.each_bytes(touched, block_bytes, link)
        # the share exp(-n * each / size) of the missing part is still missing after n more visits
        hits = self.law.expected(max(1, self.number), size / each) * missing / size
        alone = link.miss_seconds + link.in_order_seconds(each - link.miss_bytes)
        took = min(alone, max(1e-5, (now_ns - self.since_ns) / 1e9 / max(1, self.missed)))
        busy = min(1.0, max(IDLE, link.stream_seconds(each) / took))
        return hits * took >= busy * SHY * link.stream_seconds(missing)
