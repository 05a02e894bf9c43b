# SPDX-License-Identifier: Apache-2.0
"""Who touched what of a file and when: events become accesses. Pure.

BPF's events come first; where a reader has none, what our service saw of it (page tables, then
checkpoints). Page numbers are int64, times int64 ns since the start of the trace.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import spread
from uffdprefetch.trace.file.events import (
    FAULT_AFTER_AROUND,
    NO_PAGE,
    POOL_BACKWARD,
    POOL_MISS,
    POOL_TOUCH,
    Call,
    Kind,
)

#: Pages of a fault-around where its size is unknown: 64 KiB (mm/memory.c).
AROUND_PAGES = 16
#: Pages of a huge page, which the kernel maps whole where the cache holds one (2 MiB,
#: filemap_map_pmd).
HUGE_PAGES = 512
#: Time between a fault of a checkpoint's page and the service's report up to which they are one
#: touch.
SAME_NS = 50_000_000
#: Time between the events of one page's fault and fill, at most (bpf/faults.c, bpf/cache.c).
MOMENT_NS = 100_000
#: Most mappings of a file by one process that are tried to find an address's page.
BASES_MAX = 32

#: Span of numbers up to which the distinct ones are found by a table of bytes, not by sorting.
TABLE = 1 << 24

BPF, READS, TABLES, CHECKPOINTS, POOL = range(5)
SENSORS = {
    BPF: "tracepoints mm_filemap_fault and mm_filemap_map_pages",
    READS: "tracepoint mm_filemap_get_pages",
    TABLES: "page tables",
    CHECKPOINTS: "checkpoints",
    POOL: "touches that reached the pool",
}


@dataclass(frozen=True)
class Mapped:
    """What accesses brought into the page table, columns of equal length: the pages [low, high),
    at ``at_ns``."""

    low: Array
    high: Array
    at_ns: Array

    def __getitem__(self, which: Any) -> Mapped:
        return Mapped(self.low[which], self.high[which], self.at_ns[which])


@dataclass(frozen=True)
class Accesses:
    """Columns of equal length, in the order of time.

    An access began at ``time_ns`` with ``page``; ``sure`` is the end of what it certainly touched,
    ``mapped`` what may have been mapped with it; ``until_ns`` is when the page was there.
    ``present``: the page was mapped by fault-around, so it was cached before.
    """

    time_ns: Array
    until_ns: Array
    page: Array
    sure: Array
    mapped: Mapped
    pid: Array  # uint32
    tid: Array
    major: Array  # bool
    present: Array  # bool
    exact: Array  # bool: the page is known, not only its range
    sensor: Array  # uint8: BPF ... POOL

    def __len__(self) -> int:
        return len(self.time_ns)

    def part(self, which: Any) -> Accesses:
        """The accesses that a mask, slice or list of indices selects."""
        return Accesses(*(getattr(self, f.name)[which] for f in fields(self)))

    @classmethod
    def joined(cls, parts: list[Accesses]) -> Accesses:
        """All of them in the order of time; ``parts`` is not empty."""
        if len(parts) == 1:
            return parts[0]
        whole = _concatenated(parts)
        return whole.part(np.argsort(whole.time_ns, kind="stable"))


def _concatenated(tables: list[Any]) -> Any:
    """The rows of tables, one after the other, and of their columns that are tables."""
    if not is_dataclass(tables[0]):
        return np.concatenate(tables)
    names = [f.name for f in fields(tables[0])]
    columns = [_concatenated([getattr(table, name) for table in tables]) for name in names]
    found: Any = type(tables[0])
    return found(*columns)


def distinct(values: Array) -> Array:
    """The different values of a column of whole numbers, in order."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    if high - low >= TABLE:
        return np.unique(values)
    marked: Array = np.zeros(high - low + 1, bool)
    marked[values - values.dtype.type(low)] = True
    return np.flatnonzero(marked) + low


def _of_ranges(events: Array, start_ns: int, page_bytes: int, sensor: int) -> Accesses:
    """READ, SEEN and TOUCH: each a range that was touched."""
    low: Array = events["offset"].astype(np.int64) // page_bytes
    top = events["offset"].astype(np.int64) + np.maximum(1, events["length"].astype(np.int64))
    high = -(-top // page_bytes)
    sure = high
    if sensor == TABLES:
        events, low, sure, high = _windows(events, low, high)
    time_ns: Array = events["time_ns"].astype(np.int64) - start_ns
    no: Array = np.zeros(len(events), bool)
    return Accesses(
        time_ns, time_ns, low, sure, Mapped(low, high, time_ns), events["pid"], events["tid"],
        no, ~no, ~no, np.full(len(events), sensor, np.uint8),
    )  # fmt: skip


def _steps(events: Array, page_bytes: int) -> Array:
    """READ events of one file, each with what lies before the next one of the same call: the kernel
    tells of the rest of the call with every batch of pages that it copies. A CALL event of that
    file, which is a call's end, parts what does not belong together, and says where it began: of a
    batch whose last page it had to wait for the kernel tells nothing (filemap_get_pages())."""
    rows = events[np.lexsort((events["time_ns"], events["tid"]))]
    told = np.flatnonzero(rows["kind"] == Kind.READ)
    ended = np.cumsum(rows["kind"] == Kind.CALL)[told]
    calls = rows[np.minimum(told + 1, len(rows) - 1)]  # where a call's last batch is before it
    rows = rows[told]
    end = rows["offset"] + rows["length"]
    same = (rows["tid"][1:] == rows["tid"][:-1]) & (end[1:] == end[:-1])
    same &= ended[1:] == ended[:-1]
    first = np.flatnonzero(np.r_[True, ~same])
    last = np.r_[first[1:] - 1, len(rows) - 1]
    begin = _begin(rows[last], calls[last]) // page_bytes * page_bytes
    lower = np.minimum(begin.astype(np.int64), rows["offset"][first].astype(np.int64))
    rows["length"][first] += rows["offset"][first] - lower.astype(np.uint64)
    rows["offset"][first] = lower
    goes_on = same & (rows["offset"][1:] >= rows["offset"][:-1])
    rows["length"][:-1][goes_on] = (rows["offset"][1:] - rows["offset"][:-1])[goes_on]
    rows = rows[rows["length"] > 0]
    found: Array = rows[np.argsort(rows["time_ns"], kind="stable")]
    return found


def _begin(batches: Array, calls: Array) -> Array:
    """Where the calls of these batches began, each the last one of its call, in bytes: as a pread
    says, or as much before the end as was read; the batch's own offset where its call is not
    known."""
    what = calls["aux"] & 0xFF
    known = (calls["kind"] == Kind.CALL) & (calls["tid"] == batches["tid"]) & (calls["length"] > 0)
    end, taken = batches["offset"] + batches["length"], calls["length"]
    begin = np.where(what == Call.PREAD, calls["offset"], end - np.minimum(taken, end))
    known &= ((what == Call.PREAD) & (begin + taken <= end)) | (what == Call.READ)
    found: Array = np.where(known, begin, batches["offset"])
    return found


def _of_pool(events: Array, start_ns: int, page_bytes: int) -> Accesses:
    """TOUCH of the pool: what was come over up to the page that was touched, which alone is sure.
    What the pool maps was there, whether or not it had to be read first."""
    whole = _of_ranges(events, start_ns, page_bytes, POOL)
    backward = events["aux"] & POOL_BACKWARD > 0
    page = np.where(backward, whole.mapped.low, whole.mapped.high - 1)
    return replace(whole, page=page, sure=page + 1, major=events["aux"] & POOL_MISS > 0)


def _windows(events: Array, low: Array, high: Array) -> tuple[Array, Array, Array, Array]:
    """(events, low, sure, high): what was found in a page table, 64 KiB by 64 KiB, as fault-around
    put it there. What was touched of a range may begin and end within its outer ones."""
    first: Array = low // AROUND_PAGES
    count = -(-high // AROUND_PAGES) - first
    owner, inner = spread(count)
    window = first[owner] + inner
    start = np.maximum(low[owner], window * AROUND_PAGES)
    end = np.minimum(high[owner], (window + 1) * AROUND_PAGES)
    blurred = end == high[owner]
    sure = np.where(blurred, np.maximum(start + 1, end - 2 * (AROUND_PAGES - 1)), end)
    return events[owner], start, sure, end


def _last(mask: Array) -> Array:
    """For each place the last place up to it where ``mask`` is true, or -1."""
    return np.maximum.accumulate(np.where(mask, np.arange(len(mask)), -1))


def _bases(events: Array, maps: Array, pid: int, page_bytes: int) -> Array:
    """Where byte 0 of the file would lie in the process: from its mappings, else from faults whose
    page and address are both known. Most frequent first."""
    mappings = maps[maps["pid"] == pid]
    known = events[(events["kind"] == Kind.FAULT) & (events["value"] > 0)]
    from_maps = (mappings["value"] - mappings["offset"]).astype(np.int64)
    from_faults = (known["value"] // page_bytes * page_bytes - known["offset"]).astype(np.int64)
    found, counts = np.unique(from_faults, return_counts=True)
    found = found[np.argsort(-counts, kind="stable")]
    both = np.concatenate([np.unique(from_maps), found])
    return both[np.sort(np.unique(both, return_index=True)[1])][:BASES_MAX]


def _around_pages(demand: Array, maps: Array, page_bytes: int) -> tuple[Array, Array]:
    """(page, whether it is exact) of each AROUND; of other events their page.

    The address tells the page if the mapping is known; ``aux`` counts from a multiple of the
    range's size in the address space, which is not its start where the mapping begins within.
    """
    page: Array = demand["offset"].astype(np.int64) // page_bytes
    is_around = demand["kind"] == Kind.AROUND
    exact = ~is_around
    pages = np.maximum(1, demand["length"].astype(np.int64) // page_bytes)
    aux: Array = demand["aux"].astype(np.int64)
    counted = is_around & (demand["aux"] != NO_PAGE) & (pages <= AROUND_PAGES)
    result = np.where(counted, page + np.minimum(aux, pages - 1), page)
    exact |= counted
    if not is_around.any():
        return result, exact
    order = np.argsort(demand["pid"], kind="stable")
    cuts: Array = np.flatnonzero(np.diff(demand["pid"][order])) + 1
    for group in np.split(order, cuts):
        some = demand[group]
        open_ = is_around[group] & (some["value"] > 0)
        address = some["value"].astype(np.int64)
        low, count = page[group], pages[group]
        for base in _bases(some, maps, int(some["pid"][0]), page_bytes).tolist():
            if not open_.any():
                break
            at = (address - base) // page_bytes
            fits = open_ & (at >= low) & (at < low + count)
            result[group[fits]] = at[fits]
            exact[group[fits]] = True
            open_ &= ~fits
    return result, exact


def _of_faults(demand: Array, maps: Array, start_ns: int, page_bytes: int) -> Accesses:
    """FAULT, AROUND, MAPPED and MAJOR of one file become one access per fault."""
    order = np.argsort(demand["tid"], kind="stable")
    rows = demand[order]
    kind, tid = rows["kind"], rows["tid"]
    time_ns = rows["time_ns"].astype(np.int64) - start_ns
    page, exact = _around_pages(rows, maps, page_bytes)
    low = rows["offset"].astype(np.int64) // page_bytes
    high = low + np.maximum(1, rows["length"].astype(np.int64) // page_bytes)
    is_fault, is_around = kind == Kind.FAULT, kind == Kind.AROUND
    last_fault = _last(is_fault)

    mapped_ns, until_ns = time_ns.copy(), time_ns.copy()
    present = is_around.copy()
    major: Array = np.zeros(len(rows), bool)
    drop = ~(is_fault | is_around)
    # a fault whose fault-around did not bring the page: two events, one access
    after = np.flatnonzero(is_fault & (rows["aux"] & FAULT_AFTER_AROUND > 0))
    pair = _last(is_around)[after]
    before = np.where(after > 0, last_fault[after - 1], -1)
    fits = (pair > before) & (pair >= 0)
    fits &= (tid[pair] == tid[after]) & (low[pair] <= page[after]) & (page[after] < high[pair])
    after, pair = after[fits], pair[fits]
    drop[pair] = True
    low[after], high[after] = low[pair], high[pair]
    # what ended a fault belongs to the last one of its thread
    for wanted in (Kind.MAPPED, Kind.MAJOR):
        ends = np.flatnonzero(kind == wanted)
        fault = last_fault[ends]
        fits = (fault >= 0) & (tid[fault] == tid[ends])
        fits &= (low[ends] <= page[fault]) & (page[fault] < high[ends])
        ends, fault = ends[fits], fault[fits]
        until_ns[fault] = np.maximum(until_ns[fault], time_ns[ends])
        if wanted == Kind.MAPPED:
            low[fault], high[fault], mapped_ns[fault] = low[ends], high[ends], time_ns[ends]
        else:
            major[fault] = True
    keep = np.flatnonzero(~drop)
    keep = keep[np.argsort(order[keep], kind="stable")]
    page = page[keep]
    mapped = Mapped(low[keep], np.maximum(high[keep], page + 1), mapped_ns[keep])
    return Accesses(
        time_ns[keep], until_ns[keep], page, page + 1, mapped,
        rows["pid"][keep], tid[keep], major[keep], present[keep], exact[keep],
        np.full(len(keep), BPF, np.uint8),
    )  # fmt: skip


def _checkpoints(a: Accesses, touches: Accesses) -> Accesses:
    """The accesses with the touches of checkpoints put in.

    A checkpoint's page is no page of the file, so the kernel tells nothing of its fault: a recorder
    that knows the address only may take it for a huge page's. Of those the touch remains.
    """
    wide = np.flatnonzero((a.sensor == BPF) & (a.mapped.high - a.mapped.low >= HUGE_PAGES))
    keep: Array = np.ones(len(a), bool)
    order = np.lexsort((touches.time_ns, touches.page))
    known = touches.page[order]
    at: Array = np.asarray(np.searchsorted(known, a.page[wide]))
    ends: Array = np.asarray(np.searchsorted(known, a.page[wide], side="right"))
    for k, i in enumerate(wide.tolist()):
        near = order[at[k] : ends[k]]
        near = near[touches.pid[near] == a.pid[i]]
        keep[i] = not (np.abs(touches.time_ns[near] - a.time_ns[i]) < SAME_NS).any()
    return Accesses.joined([a.part(keep), touches])


def accesses(events: Array, maps: Array, start_ns: int, page_bytes: int) -> Accesses:
    """The accesses of one rank to one file.

    ``events`` are those of the rank's processes and this file, in the order of time, ``maps`` the
    MAP events of the file.
    """
    kind = events["kind"]
    faults = np.isin(kind, (Kind.FAULT, Kind.AROUND, Kind.MAPPED, Kind.MAJOR))
    parts = []
    if faults.any():
        parts.append(_of_faults(events[faults], maps, start_ns, page_bytes))
    reads, calls = kind == Kind.READ, kind == Kind.CALL
    if reads.any():
        parts.append(
            _of_ranges(_steps(events[reads | calls], page_bytes), start_ns, page_bytes, READS)
        )
    is_touch = kind == Kind.TOUCH
    of_pool = is_touch & (events["aux"] & POOL_TOUCH > 0)
    if of_pool.any():
        parts.append(_of_pool(events[of_pool], start_ns, page_bytes))
    touches = _of_ranges(events[is_touch & ~of_pool], start_ns, page_bytes, CHECKPOINTS)
    if sum(map(len, parts)):
        found = Accesses.joined(parts)
        return _checkpoints(found, touches) if len(touches) else found
    seen = kind == Kind.SEEN
    if seen.any():
        return _of_ranges(events[seen], start_ns, page_bytes, TABLES)
    return touches
