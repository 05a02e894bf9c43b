# SPDX-License-Identifier: Apache-2.0
"""How long a reader's threads stood still in page faults, and where in the file. Pure.

A major fault's duration contains its sleeps, so a WAIT within one is not counted again; other WAITs
are minor faults that had to wait for a page that was under way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import total, union
from uffdprefetch.trace.file.events import Kind

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
        """How long at least one of the threads stood still."""
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


def stalls(events: Array, start_ns: int, page_bytes: int) -> Stalls:
    """The stalls among the MAJOR and WAIT events of one rank and file, in the order of time."""
    some = events[np.isin(events["kind"], (Kind.MAJOR, Kind.WAIT))]
    order = np.lexsort((some["kind"] == Kind.MAJOR, some["time_ns"], some["tid"]))
    rows = some[order]
    end = rows["time_ns"].astype(np.int64) - start_ns
    took = rows["value"].astype(np.int64)
    major = rows["kind"] == Kind.MAJOR
    n = len(rows)
    # the major fault of the same thread that ends next
    upcoming = np.where(major, np.arange(n), n)[::-1]
    upcoming = np.minimum.accumulate(upcoming)[::-1] if n else upcoming
    safe = np.minimum(upcoming, n - 1)
    within = ~major & (upcoming < n)
    if n:
        within &= (rows["tid"][safe] == rows["tid"]) & (end - took >= end[safe] - took[safe])
    keep = ~within & (took > 0)
    page = rows["offset"].astype(np.int64) // page_bytes
    return Stalls(end[keep], took[keep], page[keep])
