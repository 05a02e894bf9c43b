# SPDX-License-Identifier: Apache-2.0
"""One reader: the accesses of a rank to a file become streams, epochs and what they cover. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import Ranges, spread, total
from uffdprefetch.trace.analyse import accesses as sensors
from uffdprefetch.trace.analyse import patterns
from uffdprefetch.trace.analyse.accesses import Accesses
from uffdprefetch.trace.analyse.coverage import Coverage
from uffdprefetch.trace.analyse.epochs import epochs
from uffdprefetch.trace.analyse.records import RecordPages
from uffdprefetch.trace.analyse.runs import (
    AccessStream,
    Runs,
    all_of,
    hull,
    long_enough,
    main_runs,
    runs_of,
)
from uffdprefetch.trace.analyse.streams import StreamPattern

#: Least accesses of a thread's own stream: one in a hundred random orders of this length seems to
#: have a direction.
THREAD_ACCESSES = 8
#: Least page-table scans that tell an order, and the share of the file over which the pages of one
#: scan are too spread to tell it.
SCANS_MIN, SPREAD = 4, 0.25
#: Time within which touches are of one scan.
SCAN_NS = 1_000_000
#: Share of the accesses followed by a gap below the resolution, from which records are that small.
AROUND_PAGES, SPARSE = sensors.AROUND_PAGES, 0.1


@dataclass
class EpochAccesses:
    """The accesses [first, end) of a reader and what they covered."""

    first: int
    end: int
    touched_pages: int
    reread_pages: int
    pattern: StreamPattern


@dataclass
class ReaderAnalysis:
    """The findings about a reader; reader_report.py puts them into words."""

    rank: int
    file: int
    accesses: Accesses
    pattern: StreamPattern
    epochs: list[EpochAccesses]
    # ranges of pages that may have been touched, probably were, certainly were
    mapped: Ranges
    probable: Ranges
    sure: Ranges
    index: str | None = None  # the format of the file's index
    #: Of several processes each by itself.
    processes: list[ReaderAnalysis] = field(default_factory=list)

    @cached_property
    def span(self) -> tuple[int, int]:
        """(lowest page, end of the highest) of its streams, without headers and tree pages."""
        runs = self.pattern.runs
        return hull(main_runs(runs, 0, long_enough(runs)))

    @cached_property
    def touched_pages(self) -> int:
        """Pages that may have been touched: an upper bound."""
        return total(self.mapped)


def _groups(key: Array) -> list[Array]:
    """Indices of each value of ``key``, in order."""
    order = np.argsort(key, kind="stable")
    cuts: Array = np.flatnonzero(np.diff(key[order])) + 1
    return np.split(order, cuts) if len(order) else []


def _pattern_of(a: Accesses, stream: AccessStream, slack: int) -> tuple[StreamPattern, Runs]:
    """The pattern of one process, by thread where that is clearer, and what it probably touched."""
    ranges = probable_runs(stream, slack)
    if bool((a.sensor == sensors.TABLES).all()) and scans_are_spread(a):
        pages = int((stream.high - stream.page).sum())
        return StreamPattern("random", 0, 1.0, len(a), pages, ranges), ranges
    whole = patterns.describe(stream, slack)
    threads = [g for g in _groups(a.tid) if len(g) >= THREAD_ACCESSES]
    if whole.name == "consecutive" or len(threads) < 2:
        return whole, ranges
    by_thread = patterns.combine([patterns.describe(stream.part(g), slack) for g in threads])
    if by_thread.name in ("random", "mixed", "unknown"):
        return whole, ranges
    # several that take turns jump from one's place to the next one's, up or down, as a stride does
    clearer = whole.name in ("random", "mixed") or by_thread.share >= whole.share
    return (by_thread if clearer else whole), ranges


def scans_are_spread(a: Accesses) -> bool:
    """Whether what page-table scans find lies all over the file. Within one scan pages come in the
    order of the file, in whatever order they were read."""
    first = np.flatnonzero(np.r_[True, np.diff(a.time_ns) > SCAN_NS])
    if len(first) < SCANS_MIN:
        return False
    low, high = np.minimum.reduceat(a.mapped.low, first), np.maximum.reduceat(a.mapped.high, first)
    count = np.diff(np.r_[first, len(a)])
    span = int(a.mapped.high.max() - a.mapped.low.min())
    found = np.add.reduceat(a.mapped.high - a.mapped.low, first)
    spread = (high - low > SPREAD * span) & (found < (high - low) / 2)
    return bool(count[spread].sum() > len(a) / 2)


def probable_runs(stream: AccessStream, slack: int) -> Runs:
    """What was probably touched: all of a run between its faults; but where small gaps between
    runs tell of records below the resolution, only the pages that faulted."""
    runs = runs_of(stream, slack)
    gap = runs.start[1:] - runs.high[:-1]
    small = int(((gap > 0) & (gap < AROUND_PAGES)).sum())
    return runs_of(replace(stream, high=stream.sure), 0) if small > SPARSE * len(stream) else runs


def _begins(a: Accesses) -> list[int]:
    """Indices at which epochs begin. Where the pool is touched differs from epoch to epoch; what
    was come over, 64 KiB by 64 KiB, does not."""
    if sensors.POOL not in a.sensor:
        return epochs(a.page, a.pid)
    first = np.where(a.sensor == sensors.POOL, a.mapped.low, a.page) // AROUND_PAGES
    last = np.where(a.sensor == sensors.POOL, a.mapped.high - 1, a.page) // AROUND_PAGES
    count = last - first + 1
    owner, inner = spread(count)
    unit = first[owner] + inner
    return np.unique(owner[epochs(unit * AROUND_PAGES, a.pid[owner])]).tolist()


def find(
    rank: int,
    file: int,
    a: Accesses,
    cover: Coverage,
    index: RecordPages | None,
    slack: int,
) -> ReaderAnalysis:
    """Take one rank's accesses to a file in, or those of one process. ``slack``: as in
    runs.follows()."""
    bounds = [*_begins(a), len(a)]
    seen: Array = np.zeros(len(cover.pieces), bool)
    found: list[EpochAccesses] = []
    all_patterns: list[StreamPattern] = []
    runs: list[Runs] = []
    for first, end in pairwise(bounds):
        part = a.part(slice(first, end))
        mapped, low, high = cover.map(part)
        record = None
        if index is not None and index.tells:
            record = index.of_accesses(part.page, part.sure, part.tid)
        stream = AccessStream(part.page, low, part.sure, np.maximum(high, part.sure), record)
        mine: list[StreamPattern] = []
        for group in _groups(part.pid):
            pattern, ranges = _pattern_of(part.part(group), stream.part(group), slack)
            mine.append(pattern)
            runs.append(ranges)
        all_patterns += mine
        again = cover.pieces.pages(mapped & seen)
        seen |= mapped
        found.append(
            EpochAccesses(first, end, cover.pieces.pages(mapped), again, patterns.combine(mine))
        )
    all_runs = all_of(runs)
    return ReaderAnalysis(
        rank, file, a, patterns.combine(all_patterns), found,
        cover.pieces.ranges(seen), cover.pieces.union(all_runs.start, all_runs.sure),
        cover.pieces.union(a.page, a.sure), None if index is None else index.format,
    )  # fmt: skip
