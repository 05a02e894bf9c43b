# SPDX-License-Identifier: Apache-2.0
"""How long threads stood still in page faults, and where in a file. Pure.

A major fault's duration contains its sleeps, so a WAIT within one is not counted again; other WAITs
are minor faults that had to wait for a page that was under way. Reports and pictures have it from
here. Not from here: a replay's stall (sim/replay/demand.py), which is what a thread's computing
leaves of its time, so without minor waits; the overview's, of which only sums were kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from uffdprefetch.base.arrays import Array, BoolArray, Int64Array
from uffdprefetch.base.ranges import total, union
from uffdprefetch.trace.file.events import Kind

#: Bins of a file for a reader's stall.
BINS = 64


@dataclass(frozen=True)
class Stalls:
    """Columns of equal length: a stall ended at ``end_ns`` after ``took_ns``, at ``page``."""

    end_ns: Array
    took_ns: Array
    page: Array

    def seconds(self) -> float:
        """Their sum over all threads."""
        return float(self.took_ns.sum() / 1e9)

    def seconds_between(self, start_ns: Array, end_ns: Array) -> Array:
        """The sum of those that ended in each [start, end)."""
        order = np.argsort(self.end_ns, kind="stable")
        at, sums = self.end_ns[order], np.r_[0, np.cumsum(self.took_ns[order])]
        between = sums[np.searchsorted(at, end_ns)] - sums[np.searchsorted(at, start_ns)]
        return between / 1e9

    def seconds_of_run(self) -> float:
        """Time during which at least one of the threads stalled."""
        return total(union(self.end_ns - self.took_ns, self.end_ns)) / 1e9

    def by_offset(self, page_bytes: int) -> list[list[float]]:
        """[offset in bytes, seconds] of at most BINS bins over the pages that were waited for;
        those without any are left out."""
        if not len(self.page):
            return []
        low, top = int(self.page.min()), int(self.page.max()) + 1
        width = -(-(top - low) // BINS)
        sums = np.bincount((self.page - low) // width, weights=self.took_ns)
        return [
            [(low + i * width) * page_bytes, float(sums[i] / 1e9)]
            for i in np.flatnonzero(sums).tolist()
        ]


def places_in_thread(tid: Array, at_ns: Array, of_tid: Array, of_ns: Array) -> Array:
    """How many of some events, in the order of (thread, time), come up to a moment of a thread, for
    each (``tid``, ``at_ns``): the one before that place is its last by then, if it is of the thread
    at all, the one at that place its next."""
    threads = np.unique(of_tid)
    # threads and times as one number that rises: times are given places first
    moments = np.unique(np.concatenate([of_ns, at_ns]))
    width = len(moments) + 1
    events = np.searchsorted(threads, of_tid) * width + np.searchsorted(moments, of_ns)
    wanted = np.searchsorted(threads, tid) * width + np.searchsorted(moments, at_ns)
    return np.asarray(np.searchsorted(events, wanted, side="right"))


def major_faults_at(tid: Array, at_ns: Array, majors: Array) -> Int64Array:
    """The number of the MAJOR event of whose fault each moment of a thread is, by the clock of the
    events; -1: of none."""
    if not len(majors):
        return np.full(len(tid), -1)
    order = np.lexsort((majors["time_ns"], majors["tid"]))
    end = majors["time_ns"][order].astype(np.int64)
    begin = end - majors["value"][order].astype(np.int64)
    upcoming = places_in_thread(tid, at_ns - 1, majors["tid"][order], end)
    upcoming = np.minimum(upcoming, len(majors) - 1)
    within = (majors["tid"][order][upcoming] == tid) & (begin[upcoming] <= at_ns)
    return np.where(within & (at_ns <= end[upcoming]), order[upcoming], -1)


def stalling(events: Array) -> BoolArray:
    """Which of the events are stalls: all MAJOR, and each WAIT that lies within none of them."""
    found: BoolArray = events["kind"] == Kind.MAJOR
    at = np.flatnonzero(events["kind"] == Kind.WAIT)
    waits = events[at]
    middle = waits["time_ns"].astype(np.int64) - waits["value"].astype(np.int64) // 2
    found[at] = major_faults_at(waits["tid"], middle, events[found]) < 0
    return found


def stalls(events: Array, start_ns: int, page_bytes: int) -> Stalls:
    """The stalls among the events of one rank and file, which are in the order of time."""
    rows = events[stalling(events)]
    rows = rows[rows["value"] > 0]
    end = rows["time_ns"].astype(np.int64) - start_ns
    page = rows["offset"].astype(np.int64) // page_bytes
    return Stalls(end, rows["value"].astype(np.int64), page)
