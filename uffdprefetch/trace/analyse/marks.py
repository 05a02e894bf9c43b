# SPDX-License-Identifier: Apache-2.0
"""The access map's marks: where in a file, when, by whom, and of which kind. Pure.

A mark is an access, a miss, a stretch read ahead or one evicted, as `MarkStream`s of columns, one
stream per file, rank and kind. Nothing is left out or thinned here; density.py bins the marks for
a first look at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.analyse.ranks import NOBODY, SERVICE, Ranks
from uffdprefetch.trace.analyse.stall import major_faults_at, stalling
from uffdprefetch.trace.file.events import (
    FAULT_AFTER_AROUND,
    NO_PAGE,
    POOL_BACKWARD,
    POOL_MISS,
    POOL_TOUCH,
    Kind,
    of_kind,
)
from uffdprefetch.trace.file.trace_file import Trace

#: Kinds of marks by the layer on which they are drawn.
LAYERS: dict[str, tuple[str, ...]] = {
    "demand": ("around", "fault", "touch", "pool", "seen", "read"),
    "miss": ("major", "late", "missed"),
    "ahead": ("warm", "kernel", "other"),
    "evict": ("evict", "punch"),
}
KINDS = tuple(kind for kinds in LAYERS.values() for kind in kinds)
LAYER_OF = {kind: layer for layer, kinds in LAYERS.items() for kind in kinds}
COLUMNS = ("start_ns", "offset", "before", "length", "duration_ns")
#: log2 of the resolution, bytes, of the first use of prefetched bytes: a fault-around.
_USE_STEP_BITS = 16


@dataclass(frozen=True)
class MarkStream:
    """Marks of one kind of one rank in one file, by time; columns of int64 and equal length.

    A mark was entered at `offset`, at `start_ns` of the trace, and covers `length` bytes from
    `offset - before` on; it lasts `duration_ns`: a wait, or how long what was read ahead lay there
    until its first use.
    """

    file: int
    rank: int
    kind: str
    start_ns: Array
    offset: Array
    before: Array
    length: Array
    duration_ns: Array

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def layer(self) -> str:
        """The layer of LAYERS that it is drawn on."""
        return LAYER_OF[self.kind]

    def part(self, which: Any) -> MarkStream:
        """The marks that a slice, mask or list of indices selects."""
        return MarkStream(
            self.file, self.rank, self.kind, *(getattr(self, name)[which] for name in COLUMNS)
        )


# ---- marks of each kind --------------------------------------------------------------------------


@dataclass
class _Raw:
    """Marks of one kind that are not sorted into streams yet."""

    kind: str
    file: Array
    rank: Array
    start_ns: Array
    offset: Array
    before: Array
    length: Array
    duration_ns: Array

    @classmethod
    def of(cls, kind: str, events: Array, ranks: Ranks, start_ns: int) -> _Raw:
        """One mark per event, at its time, without duration."""
        zeros: Array = np.zeros(len(events), np.int64)
        return cls(
            kind,
            events["file"].astype(np.int64),
            ranks.of(events["pid"]),
            events["time_ns"].astype(np.int64) - start_ns,
            events["offset"].astype(np.int64),
            zeros,
            events["length"].astype(np.int64),
            zeros,
        )

    def streams(self) -> Iterator[MarkStream]:
        if not len(self.file):
            return
        starts = np.maximum(self.start_ns, 0)
        order = np.lexsort((starts, self.rank, self.file))
        file, rank = self.file[order], self.rank[order]
        cuts: Array = np.flatnonzero((np.diff(file) != 0) | (np.diff(rank) != 0)) + 1
        for at in np.split(order, cuts):
            yield MarkStream(
                int(self.file[at[0]]),
                int(self.rank[at[0]]),
                self.kind,
                starts[at],
                *(getattr(self, name)[at] for name in COLUMNS[1:]),
            )


def _ends_then_begins(raw: _Raw, value: Array) -> _Raw:
    """Of events that tell their end and how long it took: a mark where it began."""
    took: Array = value.astype(np.int64)
    raw.start_ns = raw.start_ns - took
    raw.duration_ns = took
    return raw


def _around(events: Array, ranks: Ranks, start_ns: int, page_bytes: int) -> _Raw:
    """Fault-around: entered at the page that was touched, where it is known."""
    raw = _Raw.of("around", events, ranks, start_ns)
    page: Array = events["aux"].astype(np.int64)
    before = np.where(page == NO_PAGE, 0, page * page_bytes)
    before = np.where(before < raw.length, before, 0)
    raw.offset, raw.before = raw.offset + before, before
    return raw


def _demand(trace: Trace, ranks: Ranks, start_ns: int, page_bytes: int) -> list[_Raw]:
    faults = of_kind(trace.events, Kind.FAULT)
    # A fault that fault-around was tried for first is in the trace as that already.
    faults = faults[(faults["aux"] & FAULT_AFTER_AROUND) == 0]
    seen = of_kind(trace.events, Kind.SEEN)
    # Where the kernel's own events tell of a file, page-table scans add nothing but blur.
    faulted = np.unique(of_kind(trace.events, Kind.FAULT, Kind.AROUND)["file"])
    seen = seen[~np.isin(seen["file"], faulted)]
    touched = of_kind(trace.events, Kind.TOUCH)
    of_pool = touched["aux"] & POOL_TOUCH > 0
    touched, pooled = touched[~of_pool], touched[of_pool]
    touches = _Raw.of("touch", touched, ranks, start_ns)
    touches.duration_ns = touched["value"].astype(np.int64)
    return [
        _around(of_kind(trace.events, Kind.AROUND), ranks, start_ns, page_bytes),
        _Raw.of("fault", faults, ranks, start_ns),
        touches,
        _reached_pool(pooled, ranks, start_ns, page_bytes),
        _ends_then_begins(_Raw.of("seen", seen, ranks, start_ns), seen["value"]),
        _Raw.of("read", of_kind(trace.events, Kind.READ), ranks, start_ns),
    ]


def _reached_pool(events: Array, ranks: Ranks, start_ns: int, page_bytes: int) -> _Raw:
    """Touches of the pool: at the page that was touched, over what was come over to it."""
    raw = _Raw.of("pool", events, ranks, start_ns)
    backward = events["aux"] & POOL_BACKWARD > 0
    raw.before = np.where(backward, 0, np.maximum(0, raw.length - page_bytes))
    raw.offset = raw.offset + raw.before
    return raw


def _misses(trace: Trace, ranks: Ranks, start_ns: int, page_bytes: int) -> list[_Raw]:
    stalls = of_kind(trace.events, Kind.MAJOR, Kind.WAIT)
    stalls = stalls[stalling(stalls)]
    touched = of_kind(trace.events, Kind.TOUCH)
    missed = touched[touched["aux"] & (POOL_TOUCH | POOL_MISS) == POOL_TOUCH | POOL_MISS]
    waited = _reached_pool(missed, ranks, start_ns, page_bytes)
    waited.kind, waited.before = "missed", np.zeros_like(waited.offset)
    waited.length = np.full_like(waited.offset, page_bytes)
    kinds = {"major": of_kind(stalls, Kind.MAJOR), "late": of_kind(stalls, Kind.WAIT)}
    return [
        *(
            _ends_then_begins(_Raw.of(kind, some, ranks, start_ns), some["value"])
            for kind, some in kinds.items()
        ),
        waited,
    ]


def _first_use(ahead: _Raw, demand: list[_Raw]) -> Array:
    """ns from a mark's start to the first access to its first, middle or last part; -1: none."""
    none: Array = np.full(len(ahead.file), -1, np.int64)
    parts = [d for d in demand if len(d.file)]
    if not len(none) or not parts:
        return none
    # One key orders places, then times: file, step within it, ns. Floats would round, so the
    # places are numbered.
    files = np.concatenate([d.file for d in parts])
    steps = np.concatenate([d.offset for d in parts]) >> _USE_STEP_BITS
    times = np.maximum(np.concatenate([d.start_ns for d in parts]), 0)
    span = int(max(times.max(), ahead.start_ns.max())) + 1
    width = int(max(steps.max(), ((ahead.offset + ahead.length) >> _USE_STEP_BITS).max())) + 1
    places, number = np.unique(files * width + steps, return_inverse=True)
    if len(places) * span >= 2**63:  # beyond any trace that fits in memory; then no durations
        return none
    keys = np.sort(number.astype(np.int64) * span + times)
    best = none
    for offset in (ahead.offset, ahead.offset + ahead.length // 2, ahead.offset + ahead.length - 1):
        place = ahead.file * width + (offset >> _USE_STEP_BITS)
        index = np.minimum(np.searchsorted(places, place), len(places) - 1)
        at = np.searchsorted(keys, index * span + np.maximum(ahead.start_ns, 0))
        at = np.minimum(at, len(keys) - 1)
        wait = keys[at] - index * span - ahead.start_ns
        known = (places[index] == place) & (keys[at] // span == index) & (wait >= 0)
        best = np.where(known & ((best < 0) | (wait < best)), wait, best)
    return best


def _ahead(
    trace: Trace, ranks: Ranks, start_ns: int, page_bytes: int, demand: list[_Raw]
) -> list[_Raw]:
    """Marks of pages that came in before they were asked for, by who brought them.

    A fill is drawn whole: one by a rank's own process if it is more than the page of a fault, that
    is the kernel's readahead. (How many of its pages were demand is fills.py's question.) Fills by
    our service are in the trace as WARM already, if it says so: that tells when it asked.
    """
    warmed = of_kind(trace.events, Kind.WARM)
    warm = _Raw.of("warm", warmed, ranks, start_ns)
    warm.duration_ns = warmed["value"].astype(np.int64)
    fills = of_kind(trace.events, Kind.FILL)
    who = ranks.of(fills["pid"])
    as_warm = np.isin(fills["file"], np.unique(warmed["file"]))
    groups = [warm]
    for kind, chosen in (
        ("warm", (who == SERVICE) & ~as_warm),
        ("kernel", (who >= 0) & (fills["length"] > page_bytes)),
        ("other", who == NOBODY),
    ):
        some = fills[chosen]
        raw = _Raw.of(kind, some, ranks, start_ns)
        raw.duration_ns = some["value"].astype(np.int64)
        raw.rank = np.where(raw.rank == SERVICE, NOBODY, raw.rank)
        if kind == "kernel":
            groups.append(_used(raw, demand, _waited_for(some, trace.events, start_ns)))
        else:
            groups.append(raw)
    groups[0] = _used(warm, demand)
    return groups


def _waited_for(fills: Array, events: Array, start_ns: int) -> Array:
    """When the major faults ended in which these fills were made; -1: in none."""
    majors = of_kind(events, Kind.MAJOR)
    number = major_faults_at(fills["tid"], fills["time_ns"].astype(np.int64), majors)
    if not len(majors):
        return number
    return np.where(number < 0, -1, majors["time_ns"][number].astype(np.int64) - start_ns)


def _used(raw: _Raw, demand: list[_Raw], ends_ns: Array | None = None) -> _Raw:
    """Let what lay ready last until its first use, and what a fault waited for until its end."""
    use = _first_use(raw, demand)
    if ends_ns is not None:
        use = np.where(ends_ns >= 0, ends_ns - raw.start_ns, use)
    raw.duration_ns = np.maximum(raw.duration_ns, use)
    return raw


def collect(trace: Trace) -> list[MarkStream]:
    """All marks of a trace, by file, rank and kind; events of no file are no marks."""
    ranks, start_ns, page_bytes = Ranks(trace), trace.start_ns, trace.page_bytes
    demand = _demand(trace, ranks, start_ns, page_bytes)
    evict = _Raw.of("evict", of_kind(trace.events, Kind.EVICT), ranks, start_ns)
    punch = _Raw.of("punch", of_kind(trace.events, Kind.PUNCH), ranks, start_ns)
    for removal in (evict, punch):
        removal.rank = np.full(len(removal.file), NOBODY)
    raw = [
        *demand,
        *_misses(trace, ranks, start_ns, page_bytes),
        *_ahead(trace, ranks, start_ns, page_bytes, demand),
        evict,
        punch,
    ]
    found: dict[tuple[int, int, str], MarkStream] = {}
    for group in raw:
        for stream in group.streams():
            # Our own service's reading is no rank's access.
            if stream.file and not (stream.rank == SERVICE and stream.layer in ("demand", "miss")):
                found[stream.file, stream.rank, stream.kind] = stream
    return [found[key] for key in sorted(found, key=lambda k: (k[0], k[1], KINDS.index(k[2])))]
