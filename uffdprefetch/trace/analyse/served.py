# SPDX-License-Identifier: Apache-2.0
"""What our own service did, as its events tell it. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import Ranges, total, union
from uffdprefetch.trace.analyse.accesses import POOL, Accesses
from uffdprefetch.trace.analyse.coverage import NEVER, Coverage
from uffdprefetch.trace.analyse.fills import extents
from uffdprefetch.trace.analyse.pieces import Pieces
from uffdprefetch.trace.file.events import DISK_OFF, POOL_MISS, POOL_TOUCH, Kind

#: Extents searched for the one with a page: the last that begin at or before it.
EXTENTS_BACK = 4
SERVICE_KINDS = (Kind.TOUCH, Kind.SEEN, Kind.WARM, Kind.WINDOW, Kind.MAJORS, Kind.PUNCH)


def late_extents(warm: Array, accesses: list[Accesses], start_ns: int, page_bytes: int) -> int:
    """Number of prefetched extents to which a rank came before they were there."""
    if not len(warm):
        return 0
    low, high, asked_ns = extents(warm, start_ns, page_bytes)
    done_ns = asked_ns + warm["value"].astype(np.int64)
    order = np.lexsort((asked_ns, low))
    low, high, asked_ns, done_ns = low[order], high[order], asked_ns[order], done_ns[order]
    late: Array = np.zeros(len(low), bool)
    for a in accesses:
        # of the pool's touches those that had to wait say it; of the others it was there
        a = a.part((a.sensor != POOL) | a.major)
        last = np.searchsorted(low, a.page, side="right") - 1
        for back in range(EXTENTS_BACK):
            at = np.maximum(last - back, 0)
            fits = (last - back >= 0) & (a.page < high[at])
            fits &= (a.time_ns >= asked_ns[at]) & (a.time_ns < done_ns[at])
            late[at[fits]] = True
    return int(late.sum())


def pool_report(events: Array, start_ns: int, page_bytes: int) -> dict[str, int | None] | None:
    """The ``pool`` of one file: touches, what left and came again, and what went between nodes;
    None where the pool did not serve it. Bytes read on demand make no event: their touches are
    ``missed``."""
    touches = events[events["kind"] == Kind.TOUCH]
    touches = touches[touches["aux"] & POOL_TOUCH > 0]
    punched = events[events["kind"] == Kind.PUNCH]
    if not len(touches) and not len(punched):
        return None
    warm = events[events["kind"] == Kind.WARM]
    last = events[events["kind"] == Kind.NODES][-1:]
    came, went, read = (
        int(last[name][0]) if len(last) else None for name in ("offset", "length", "value")
    )
    disk = events[events["kind"] == Kind.DISK][-1:]
    back, written, dropped = (
        int(disk[name][0]) if len(disk) else None for name in ("offset", "length", "value")
    )
    return {
        "touches": len(touches),
        "missed": int((touches["aux"] & POOL_MISS > 0).sum()),
        "warm_bytes": int(warm["length"].sum()),
        "warm_again_bytes": _again(warm, punched, start_ns, page_bytes) * page_bytes,
        "punched_bytes": int(punched["length"].sum()),
        "from_nodes_bytes": came,
        "to_nodes_bytes": went,
        "storage_bytes": read,
        "disk_read_bytes": back,
        "disk_written_bytes": written,
        "disk_dropped_bytes": dropped,
        "disk_is_off": bool(disk["aux"][0] & DISK_OFF) if len(disk) else None,
    }


def _again(warm: Array, punched: Array, start_ns: int, page_bytes: int) -> int:
    """Pages that were warmed after they had been punched, each time counted."""
    if not len(warm) or not len(punched):
        return 0
    low, high, asked_ns = extents(warm, start_ns, page_bytes)
    first, end, punched_ns = extents(punched, start_ns, page_bytes)
    pieces = Pieces([low, high, first, end])
    first_punched_ns: Array = np.full(len(pieces), NEVER, np.int64)
    for owner, piece in pieces.pairs(first[::-1], end[::-1]):  # the earliest comes last
        first_punched_ns[piece] = punched_ns[::-1][owner]
    return sum(
        int(pieces.sizes[piece[first_punched_ns[piece] < asked_ns[owner]]].sum())
        for owner, piece in pieces.pairs(low, high)
    )


class Served:
    """Sums over the files of a trace."""

    def __init__(self) -> None:
        self._extents = self._late = self._windows = self._touches = self._pool_touches = 0
        self._pages = self._used_pages = 0
        self._cached_bytes = self._bytes = 0
        self._waits: list[Array] = []
        self._took: list[Array] = []
        self._under_way: list[Ranges] = []  # (asked, there), ns, of extents that were not cached

    def add(
        self, events: Array, accesses: list[Accesses], cover: Coverage, start_ns: int, page: int
    ) -> None:
        """Take in one file's service events."""
        warm = events[events["kind"] == Kind.WARM]
        touches = events[events["kind"] == Kind.TOUCH]
        of_pool = touches["aux"] & POOL_TOUCH > 0
        self._pool_touches += int(of_pool.sum())
        touches = touches[~of_pool]
        self._windows += int((events["kind"] == Kind.WINDOW).sum())
        self._touches += len(touches)
        self._waits.append(touches["value"])
        if not len(warm):
            return
        low, high, at_ns = extents(warm, start_ns, page)
        self._extents += len(warm)
        self._bytes += int(warm["length"].sum())
        self._cached_bytes += int(warm["aux"].astype(np.int64).sum()) * 1024
        self._pages += int((high - low).sum())
        self._used_pages += cover.used_since(low, high, at_ns)
        self._late += late_extents(warm, accesses, start_ns, page)
        self._took.append(warm["value"])
        read = warm["aux"].astype(np.int64) * 1024 < warm["length"].astype(np.int64)
        done_ns = at_ns + warm["value"].astype(np.int64)
        self._under_way.append((at_ns[read], done_ns[read]))

    def report(self) -> dict[str, Any]:
        """The ``service`` of the document."""

        def middle(parts: list[Array]) -> int | None:
            values = np.concatenate(parts) if parts else np.zeros(0)
            return int(np.median(values)) if len(values) else None

        none: Array = np.zeros(0, np.int64)
        asked, there = (np.concatenate(c) for c in zip((none, none), *self._under_way, strict=True))
        return {
            "warm_bytes": self._bytes,
            "warm_cached_bytes": self._cached_bytes,
            "warm_extents": self._extents,
            "warm_late_extents": self._late,
            "warm_ns_p50": middle(self._took),
            "warm_busy_seconds": total(union(asked, there)) / 1e9,
            "warm_span_seconds": int(there.max() - asked.min()) / 1e9 if len(asked) else 0.0,
            "warm_used_share": self._used_pages / self._pages if self._pages else None,
            "windows": self._windows,
            "touches": self._touches,
            "touch_wait_ns_p50": middle(self._waits),
            "pool_touches": self._pool_touches,
        }
