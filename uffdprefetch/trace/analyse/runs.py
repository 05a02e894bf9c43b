# SPDX-License-Identifier: Apache-2.0
"""A stream through a file, cut into runs that were read without a gap. Pure.

An access is a page fault, so it has a resolution: the page that faulted is exact, but the kernel
maps what is cached of the 64 KiB around it (fault-around), and what is touched there later is not
seen. So an access has a first page (`page`), and ends somewhere between `sure` and `high`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from uffdprefetch.base.arrays import Array

#: Largest share of the accesses that are taken out as visits elsewhere (a B-tree's pages).
VISITS_MAX = 0.2
#: A stream's few outermost pages are not its own (headers, tree pages) where they are at most this
#: part of its pages, and a gap of this part of its span lies between.
OFF_MAX, FAR = 0.02, 0.1
#: Share of the typical run's length below which a run is no record (a header, a tree page).
SHORT = 0.1


@dataclass(frozen=True)
class AccessStream:
    """A stream: accesses of one thread of control, in order. Columns of page numbers, int64."""

    page: Array  # the first page, exact
    low: Array  # of what was mapped with it
    sure: Array  # end of what was certainly touched
    high: Array  # end of what may have been touched
    record: Array | None = None  # number of the page's record in the order of the file; -1: none

    def __len__(self) -> int:
        return len(self.page)

    def part(self, which: Any) -> AccessStream:
        """The accesses that a mask, slice or list of indices selects."""
        record = None if self.record is None else self.record[which]
        return AccessStream(
            self.page[which], self.low[which], self.sure[which], self.high[which], record
        )

    def mirrored(self) -> AccessStream:
        """The same stream seen from the file's other end."""
        record = None if self.record is None else -self.record
        return AccessStream(-self.page, 1 - self.high, 1 - self.page, 1 - self.low, record)


@dataclass(frozen=True)
class Runs:
    """Stretches that were read without a gap: pages as in AccessStream, ``count`` accesses each."""

    start: Array
    low: Array
    sure: Array
    high: Array
    count: Array

    COLUMNS: ClassVar = ("start", "low", "sure", "high", "count")

    def __len__(self) -> int:
        return len(self.start)

    def part(self, which: Any) -> Runs:
        """The runs that a mask, slice or list of indices selects."""
        return Runs(*(getattr(self, c)[which] for c in self.COLUMNS))

    def mirrored(self) -> Runs:
        """The same runs seen from the file's other end; where they began is not exact then."""
        return Runs(1 - self.sure, 1 - self.high, 1 - self.start, 1 - self.low, self.count)

    def joined(self, first: Array) -> Runs:
        """Runs ``first[i]`` to ``first[i + 1]`` become one."""
        if len(first) == len(self):
            return self
        return Runs(
            self.start[first],
            np.minimum.reduceat(self.low, first),
            np.maximum.reduceat(self.sure, first),
            np.maximum.reduceat(self.high, first),
            np.add.reduceat(self.count, first),
        )


NO_RUNS = Runs(*(np.zeros(0, np.int64) for _ in Runs.COLUMNS))


def all_of(parts: list[Runs]) -> Runs:
    """The runs of several streams, one stream after the other."""
    return Runs(*(np.concatenate([getattr(r, c) for r in parts]) for c in Runs.COLUMNS))


def follows(stream: AccessStream, slack: int, distance: int = 1) -> Array:
    """Whether access i + distance starts within or right after access i.

    ``slack``: pages that may be missing between two accesses (a page that a checkpoint lies over
    faults elsewhere).
    """
    page = stream.page
    after = page[distance:]
    return (after >= page[:-distance]) & (after <= stream.high[:-distance] + slack)


def runs_of(stream: AccessStream, slack: int = 0) -> Runs:
    """Cut a stream into runs."""
    if not len(stream):
        return NO_RUNS
    each = Runs(stream.page, stream.low, stream.sure, stream.high, np.ones(len(stream), np.int64))
    return each.joined(np.flatnonzero(np.r_[True, ~follows(stream, slack)]))


def on_the_way(stream: AccessStream, slack: int) -> Array:
    """Which accesses are no short visits elsewhere after which the stream goes on where it was."""
    n = len(stream)
    keep: Array = np.ones(n, bool)
    joins = follows(stream, slack)
    for length in (1, 2, 3):
        if n <= length + 1:
            break
        back = follows(stream, slack, length + 1)
        visit = ~joins[: len(back)] & back
        # of overlapping ones only the first: two streams in turns are no visits
        visit[1:] &= ~visit[:-1]
        for k in range(length):
            keep[1 + k : 1 + k + len(back)] &= ~visit
    return keep if keep.sum() >= (1 - VISITS_MAX) * n else np.ones(n, bool)


#: Values up to which the median is found by counting, not by sorting.
TABLE = 1 << 20
#: The kernel's fault-around (64 KiB, mm/memory.c), and the share of the gaps that must be as wide
#: for records to be no smaller.
AROUND_PAGES, WIDE = 16, 0.3


def below_resolution(runs: Runs) -> bool:
    """Whether gaps between runs are so small that what is touched and what is left out is mostly
    hidden in what a fault maps."""
    if float((runs.high - runs.sure).mean()) < 1:
        return False
    gap = np.maximum(runs.start[1:] - runs.high[:-1], runs.low[:-1] - runs.high[1:])
    wide, some = int((gap >= AROUND_PAGES).sum()), int((gap > 0).sum())
    return wide < WIDE * some or not some


def weighted_median(values: Array, weights: Array) -> float:
    """The value that half of the weight lies at or below; 0 of none."""
    if not len(values):
        return 0.0
    if values.min() >= 0 and values.max() < TABLE:
        counts = np.cumsum(np.bincount(values, weights))
        return float(np.searchsorted(counts, counts[-1] / 2))
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, sums[-1] / 2)])


def _between(start: Array, long: Array) -> Array:
    """Whether each run begins between the long ones before and after it, upwards or downwards."""
    place = np.arange(len(start))
    before = np.maximum.accumulate(np.where(long, place, -1))
    after = np.minimum.accumulate(np.where(long, place, len(start))[::-1])[::-1]
    known = (before >= 0) & (after < len(start))
    a, b = start[np.maximum(before, 0)], start[np.minimum(after, len(start) - 1)]
    return known & (((a < start) & (start < b)) | ((b < start) & (start < a)))


def long_enough(runs: Runs) -> Array:
    """Which runs are not short beside the others and off their way, as tree pages and headers."""
    length = runs.sure - runs.start
    typical = weighted_median(length, length)
    long = length >= SHORT * typical
    keep = long | _between(runs.start, long)
    # records below the resolution show as single pages
    if typical < AROUND_PAGES or runs.count[~keep].sum() > VISITS_MAX * runs.count.sum():
        keep[:] = True
    return keep


def hull(runs: Runs) -> tuple[int, int]:
    """(lowest page, end of the highest) of runs, but for a few pages far from all others."""
    if not len(runs):
        return 0, 0
    order = np.argsort(runs.start, kind="stable")
    start, high = runs.start[order], np.maximum.accumulate(runs.high[order])
    passed = np.cumsum((runs.sure - runs.start)[order])
    far = np.flatnonzero(start[1:] - high[:-1] > FAR * (high[-1] - start[0]))
    few = OFF_MAX * passed[-1]
    below = far[passed[far] <= few]
    above = far[passed[-1] - passed[far] <= few]
    low = start[below[-1] + 1] if len(below) else start[0]
    top = high[above[0]] if len(above) else high[-1]
    return int(low), int(top)


def main_runs(runs: Runs, slack: int, keep: Array) -> Runs:
    """The runs in ``keep``, long_enough(); those that follow each other then are one."""
    if keep.all():
        return runs
    kept = runs.part(keep)
    apart = (kept.start[1:] < kept.start[:-1]) | (kept.start[1:] > kept.high[:-1] + slack)
    return kept.joined(np.flatnonzero(np.r_[True, apart]))
