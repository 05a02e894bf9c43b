# SPDX-License-Identifier: Apache-2.0
"""Who brought how many of a file's pages into the cache, and what readahead decided. Pure.

Of what a rank's own thread brings, the page of a major fault, or the range that read(2) is asked
for, is the rank's demand; the rest is the kernel's readahead, done in its name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import total, union
from uffdprefetch.trace.analyse.accesses import MOMENT_NS, Accesses
from uffdprefetch.trace.analyse.coverage import Coverage
from uffdprefetch.trace.analyse.ranks import NOBODY, SERVICE
from uffdprefetch.trace.analyse.stall import places_in_thread
from uffdprefetch.trace.file.events import Kind, ReadaheadSite

#: A thread's last fills before a major fault's end that are searched for its page: readahead may
#: read around a page in two fills.
FILLS_BACK = 2


def extents(events: Array, start_ns: int, page_bytes: int) -> tuple[Array, Array, Array]:
    """(first page, end, time) of events that have a range."""
    low: Array = events["offset"].astype(np.int64) // page_bytes
    top = events["offset"].astype(np.int64) + events["length"].astype(np.int64)
    high = -(-top // page_bytes)
    return low, np.maximum(high, low + 1), events["time_ns"].astype(np.int64) - start_ns


def _last_fill(tid: Array, at_ns: Array, fill_tid: Array, fill_ns: Array) -> Array:
    """Index of the last fill of thread ``tid[i]`` that began up to ``at_ns[i]``, or -1. The fills
    are in the order of (thread, time)."""
    found = places_in_thread(tid, at_ns, fill_tid, fill_ns) - 1
    return np.where((found >= 0) & (fill_tid[found] == tid), found, -1)


def _fill_with_page(late: Accesses, fills: Array, start_ns: int, page: int) -> Array:
    """Of each major fault the index of the fill that brought its page, or -1. The fills are in the
    order of (thread, time)."""
    found: Array = np.full(len(late), -1)
    if not len(late) or not len(fills):
        return found
    low, high, began = extents(fills, start_ns, page)
    ended = began + fills["value"].astype(np.int64)
    last = _last_fill(late.tid, late.until_ns + MOMENT_NS, fills["tid"], began)
    for back in range(FILLS_BACK):
        at = np.maximum(last - back, 0)
        fits = (found < 0) & (last - back >= 0) & (fills["tid"][at] == late.tid)
        fits &= (low[at] <= late.page) & (late.page < high[at]) & (ended[at] >= late.time_ns)
        found[fits] = at[fits]
    return found


def brought_by_misses(
    a: Accesses, fills: Array, start_ns: int, page_bytes: int, most: int
) -> tuple[Array, Array]:
    """(pages before its own, pages from it on) that each access's miss brought, at most ``most``
    to each side; 0, 0 of those that brought nothing.

    One fill holds what a thread brought for misses that follow each other in the file: they share
    it evenly.
    """
    before: Array = np.zeros(len(a), np.int64)
    after: Array = np.zeros(len(a), np.int64)
    fills = fills[np.lexsort((fills["time_ns"], fills["tid"]))]
    late = np.flatnonzero(a.major)
    fill = _fill_with_page(a.part(late), fills, start_ns, page_bytes)
    late, fill = late[fill >= 0], fill[fill >= 0]
    if not len(late):
        return before, after
    low, high, _ = extents(fills, start_ns, page_bytes)
    sharing = np.bincount(fill, minlength=len(fills))[fill]
    alone, page = sharing == 1, a.page[late]
    before[late] = np.where(alone, page - low[fill], 0)
    after[late] = np.where(alone, high[fill] - page, -(-(high - low)[fill] // sharing))
    return np.minimum(before, most), np.minimum(after, max(1, most))


def _demand_pages(fills: Array, late: Accesses, reads: Array, start_ns: int, page: int) -> int:
    """Pages of these fills by ranks that were asked for: by major faults (``late``), or read."""
    if not len(fills):
        return 0
    fills = fills[np.lexsort((fills["time_ns"], fills["tid"]))]
    low, high, began = extents(fills, start_ns, page)
    ended = began + fills["value"].astype(np.int64)
    tid = fills["tid"]
    pages = int((_fill_with_page(late, fills, start_ns, page) >= 0).sum())
    if len(reads):
        reads = reads[np.lexsort((reads["time_ns"], reads["tid"]))]
        first, end, at_ns = extents(reads, start_ns, page)
        last = _last_fill(reads["tid"], at_ns - 1, tid, began)
        at = np.maximum(last, 0)
        # a later read of what was read ahead is no demand: it filled nothing itself
        earlier = np.r_[-1, at_ns[:-1]]
        earlier[1:][reads["tid"][1:] != reads["tid"][:-1]] = -1
        fits = (last >= 0) & (ended[at] > earlier)
        common = np.minimum(end, high[at]) - np.maximum(first, low[at])
        pages += int(np.maximum(0, common[fits]).sum())
    return pages


def fill_report(
    fills: Array,
    owner: Array,
    faults: list[Accesses],
    reads: Array,
    start_ns: int,
    page_bytes: int,
) -> dict[str, Any]:
    """``filled_pages``, ``fill_bytes``, ``fill_by`` and ``refilled_bytes`` of one file.

    ``owner``: each fill's, as Ranks.of() tells it; ``faults``: accesses by reader; ``reads``: READ
    events of ranks.
    """
    low, high, _ = extents(fills, start_ns, page_bytes)
    size = (high - low) * page_bytes
    fill_bytes = int(size.sum())
    unique = total(union(low, high)) * page_bytes
    by_ranks = int(size[owner >= 0].sum())
    demand = 0
    if by_ranks and faults:
        late = Accesses.joined([a.part(a.major) for a in faults])
        demand = _demand_pages(fills[owner >= 0], late, reads, start_ns, page_bytes) * page_bytes
    demand = min(demand, by_ranks)
    return {
        "filled_pages": unique // page_bytes,
        "fill_bytes": fill_bytes,
        "fill_by": {
            "ranks": demand,
            "kernel": by_ranks - demand,
            "service": int(size[owner == SERVICE].sum()),
            "others": int(size[owner == NOBODY].sum()),
        },
        "refilled_bytes": fill_bytes - unique,
    }


def decisions(events: Array) -> tuple[Array, Array]:
    """(those READAHEAD events that say what will be read, whether a marked page triggered each).

    An ORDER that cannot be met in large folios goes on as an UNBOUNDED of the same thread within
    the same range: one decision.
    """
    rows = events[np.lexsort((events["time_ns"], events["tid"]))]
    how = rows["aux"] >> 8 & 0xFF
    n = len(rows)
    if not n:
        return rows, np.zeros(0, bool)
    same = np.r_[False, rows["tid"][1:] == rows["tid"][:-1]]
    before = np.maximum(np.arange(n) - 1, 0)
    end = rows["offset"] + rows["length"]
    inside = (rows["offset"] >= rows["offset"][before]) & (rows["offset"] < end[before])
    again = (how == ReadaheadSite.UNBOUNDED) & same & (how[before] == ReadaheadSite.ORDER) & inside
    chosen = ((how == ReadaheadSite.ORDER) | (how == ReadaheadSite.UNBOUNDED)) & ~again
    triggered = same & (how[before] == ReadaheadSite.ASYNC)
    return rows[chosen], triggered[chosen]


def readahead_report(events: Array, cover: Coverage, start_ns: int, page_bytes: int) -> Any:
    """``readahead`` of one file from the READAHEAD events of ranks; None when there are none."""
    made, triggered = decisions(events)
    if not len(made):
        return None
    low, high, at_ns = extents(made, start_ns, page_bytes)
    pages = total((low, high))
    return {
        "decisions": len(made),
        "sync": int((~triggered).sum()),
        "async": int(triggered.sum()),
        "bytes": pages * page_bytes,
        "mean_bytes": pages * page_bytes // len(made),
        "used_share": cover.used_since(low, high, at_ns) / pages,
    }


def evicted_bytes(events: Array) -> int:
    """Bytes that left the cache."""
    return int(events["length"][events["kind"] == Kind.EVICT].sum())
