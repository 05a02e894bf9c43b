# SPDX-License-Identifier: Apache-2.0
"""A set of half-open byte ranges: sorted, disjoint, never touching."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import sub


class IntervalSet:
    """Ranges [start, end) in bytes. All calls are O(number of ranges they meet + log n)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))

    def __len__(self) -> int:
        return len(self._starts)

    def copy(self) -> IntervalSet:
        """Another set of the same ranges."""
        other = IntervalSet()
        other._starts, other._ends = self._starts.copy(), self._ends.copy()
        return other

    def total_bytes(self) -> int:
        """The sum of the lengths."""
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        """Put [start, end) in, joining what it touches."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        """Take [start, end) out."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        if first >= last:
            return
        kept = []
        if self._starts[first] < start:
            kept.append((self._starts[first], start))
        if self._ends[last - 1] > end:
            kept.append((end, self._ends[last - 1]))
        self._starts[first:last] = [a for a, _ in kept]
        self._ends[first:last] = [b for _, b in kept]

    def replace(self, start: int, end: int, ranges: list[tuple[int, int]]) -> None:
        """Make [start, end) hold just ``ranges``: sorted, apart from one another, all within."""
        self.remove(start, end)
        if not ranges:
            return
        at = bisect_left(self._starts, start)
        self._starts[at:at] = [a for a, _ in ranges]
        self._ends[at:at] = [b for _, b in ranges]
        self.add(*ranges[0])
        self.add(*ranges[-1])

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are not in the set, in order."""
        gaps = []
        i = bisect_right(self._ends, start)
        while start < end and i < len(self._starts) and self._starts[i] < end:
            if self._starts[i] > start:
                gaps.append((start, self._starts[i]))
            start = max(start, self._ends[i])
            i += 1
        if start < end:
            gaps.append((start, end))
        return gaps

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of [start, end) is in the set, in order: (start, length)."""
        found = []
        i = bisect_right(self._ends, start)
        while i < len(self._starts) and self._starts[i] < end:
            low, high = max(start, self._starts[i]), min(end, self._ends[i])
            found.append((low, high - low))
            i += 1
        return found

    def changed(self, start: int, end: int, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of ``ranges`` of [start, end), as (start, length), those that are not just so in the
        set."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        starts, ends = self._starts[first:last], self._ends[first:last]
        known = set(zip(starts, map(sub, ends, starts), strict=True))
        return [one for one in ranges if one not in known]

    def keep(self, others: IntervalSet) -> None:
        """Keep what is in ``others``, too."""
        for start, end in list(self):
            for gap in others.missing(start, end):
                self.remove(*gap)

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any of [start, end) is in the set."""
        i = bisect_right(self._ends, start)
        return i < len(self._starts) and self._starts[i] < end

    def contains(self, at: int) -> bool:
        """Whether byte ``at`` is in the set."""
        i = bisect_right(self._starts, at) - 1
        return i >= 0 and at < self._ends[i]
