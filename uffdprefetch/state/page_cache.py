# SPDX-License-Identifier: Apache-2.0
"""What the service has brought, or is bringing, of a file into the page cache, and whether all of
it is there."""

from __future__ import annotations

from dataclasses import dataclass, field

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.state.cached import AllCached


@dataclass
class PageCache:
    """Of one file; ranges in bytes."""

    all: AllCached
    in_flight: IntervalSet = field(default_factory=IntervalSet)
    recent: IntervalSet = field(default_factory=IntervalSet)  # made resident within a second

    def fresh(self, start: int, end: int) -> bool:
        """Whether any byte of [start, end) is neither in flight nor recently made resident."""
        return any(self.recent.missing(a, b) for a, b in self.in_flight.missing(start, end))

    def forget_recent(self) -> None:
        """The kernel may have taken it back."""
        self.recent = IntervalSet()
