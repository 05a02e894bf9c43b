# SPDX-License-Identifier: Apache-2.0
"""One reader: the accesses of a rank to a file become walks, epochs and what they cover. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from uffdprefetch.trace.analyse.records import RecordIndex
from uffdprefetch.trace.analyse.runs import (
    Runs,
    Steps,
    all_of,
    hull,
    long_enough,
    main_runs,
    runs_of,
)
from uffdprefetch.trace.analyse.walks import Walk

#: Fewer accesses of a thread are no walk of its own.
THREAD_ACCESSES = 16
#: Looks into a page table that each find pages over this part of the file: its order is unknown.
LOOKS_MIN, SPREAD = 4, 0.25
#: What is told within this time is of one look.
LOOK_NS = 1_000_000
#: Gaps below the resolution are the rule from this part of the accesses on.
AROUND_PAGES, SPARSE = sensors.AROUND_PAGES, 0.1


@dataclass
class Epoch:
    """The accesses [first, end) of a reader and what they covered."""

    first: int
    end: int
    touched_pages: int
    reread_pages: int
    walk: Walk


@dataclass
class Reader:
    """What is found of a reader; reader_report.py puts it into words."""

    rank: int
    file: int
    accesses: Accesses
    walk: Walk
    epochs: list[Epoch]
    # ranges of pages that may have been touched, probably were, certainly were
    mapped: Ranges
    walked: Ranges
    sure: Ranges
    index: str | None = None  # the format of the file's index

    @cached_property
    def span(self) -> tuple[int, int]:
        """(lowest page, end of the highest) of its walk, without headers and tree pages far off."""
        runs = self.walk.runs
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


def _walk_of(a: Accesses, steps: Steps, slack: int) -> tuple[Walk, Runs]:
    """The pattern of one process, by thread where that is clearer, and what it walked."""
    ranges = walked(steps, slack)
    if bool((a.sensor == sensors.TABLES).all()) and looks_are_spread(a):
        pages = int((steps.high - steps.page).sum())
        return Walk("random", 0, 1.0, len(a), pages, ranges), ranges
    walk = patterns.describe(steps, slack)
    if walk.name not in ("random", "mixed"):
        return walk, ranges
    threads = [g for g in _groups(a.tid) if len(g) >= THREAD_ACCESSES]
    if len(threads) < 2:
        return walk, ranges
    single = patterns.combine([patterns.describe(steps.part(g), slack) for g in threads])
    if single.name in ("random", "mixed", "unknown"):
        return walk, ranges
    return single, ranges


def looks_are_spread(a: Accesses) -> bool:
    """Whether what looks into the page table find lies all over the file. Within one look pages
    come in the order of the file, in whatever order they were read."""
    first = np.flatnonzero(np.r_[True, np.diff(a.time_ns) > LOOK_NS])
    if len(first) < LOOKS_MIN:
        return False
    low, high = np.minimum.reduceat(a.low, first), np.maximum.reduceat(a.high, first)
    count = np.diff(np.r_[first, len(a)])
    span = int(a.high.max() - a.low.min())
    found = np.add.reduceat(a.high - a.low, first)
    spread = (high - low > SPREAD * span) & (found < (high - low) / 2)
    return bool(count[spread].sum() > len(a) / 2)


def walked(steps: Steps, slack: int) -> Runs:
    """What was probably touched: all of a run between its faults; but where small gaps between
    runs tell of records below the resolution, only the pages that faulted."""
    runs = runs_of(steps, slack)
    gap = runs.start[1:] - runs.high[:-1]
    small = int(((gap > 0) & (gap < AROUND_PAGES)).sum())
    return runs_of(replace(steps, high=steps.sure), 0) if small > SPARSE * len(steps) else runs


def _begins(a: Accesses) -> list[int]:
    """Indices at which epochs begin. Where the pool is touched differs from epoch to epoch; what
    was come over, 64 KiB by 64 KiB, does not."""
    if sensors.POOL not in a.sensor:
        return epochs(a.page, a.pid)
    first = np.where(a.sensor == sensors.POOL, a.low, a.page) // AROUND_PAGES
    last = np.where(a.sensor == sensors.POOL, a.high - 1, a.page) // AROUND_PAGES
    count = last - first + 1
    owner, inner = spread(count)
    unit = first[owner] + inner
    return np.unique(owner[epochs(unit * AROUND_PAGES, a.pid[owner])]).tolist()


def find(
    rank: int,
    file: int,
    a: Accesses,
    cover: Coverage,
    index: RecordIndex | None,
    slack: int,
) -> Reader:
    """Take one rank's accesses to a file in. ``slack``: as in runs.follows()."""
    bounds = [*_begins(a), len(a)]
    seen: Array = np.zeros(len(cover.pieces), bool)
    found: list[Epoch] = []
    walks: list[Walk] = []
    runs: list[Runs] = []
    for first, end in pairwise(bounds):
        part = a.part(slice(first, end))
        mapped, low, high = cover.map(part)
        record = None
        if index is not None and index.tells:
            record = index.of_accesses(part.page, part.sure, part.tid)
        steps = Steps(part.page, low, part.sure, np.maximum(high, part.sure), record)
        mine: list[Walk] = []
        for group in _groups(part.pid):
            walk, ranges = _walk_of(part.part(group), steps.part(group), slack)
            mine.append(walk)
            runs.append(ranges)
        walks += mine
        again = cover.pieces.pages(mapped & seen)
        seen |= mapped
        found.append(Epoch(first, end, cover.pieces.pages(mapped), again, patterns.combine(mine)))
    all_runs = all_of(runs)
    return Reader(
        rank, file, a, patterns.combine(walks), found,
        cover.pieces.ranges(seen), cover.pieces.union(all_runs.start, all_runs.sure),
        cover.pieces.union(a.page, a.sure), None if index is None else index.format,
    )  # fmt: skip
