# SPDX-License-Identifier: Apache-2.0
"""Records: from the index of a file where it can be had, else from its readers' patterns.

Numbers of records count in the order of the file.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.ranges import Ranges, overlapping, total, union
from uffdprefetch.formats import index as formats
from uffdprefetch.formats import lmdb
from uffdprefetch.formats.cache import open_cached
from uffdprefetch.formats.places import Listed, RecordPlaces, one_part
from uffdprefetch.formats.reader import FileReader
from uffdprefetch.trace.analyse.runs import AROUND_PAGES, below_resolution
from uffdprefetch.trace.analyse.streams import StreamPattern
from uffdprefetch.trace.analyse.strides import STEPS_MIN, regular, whole

#: Share of runs that begin where another reader's do, from which both read the same records.
SAME = 0.3
#: Least share of equal lengths where these are below the resolution.
SURE = 0.8
#: Least share of runs that end where another reader's begin, to tell a record's size.
NEIGHBOURS = 0.6

#: Successive accesses to pages of several records for which the intended record is inferred; of
#: later ones the last record is taken.
SHARED_MAX = 16
#: Usual spellings of formats' names.
NAMES = {"lmdb": "LMDB", "npy": ".npy", "arrow": "Arrow", "tfrecord": "TFRecord"}


def _begun(first: Array, last: Array, end: Array) -> Array:
    """The record that each of a sequence of accesses begins at, of those from ``first`` to ``last``
    on its page: the one that the access before went up to (``end``) if it is there, else the last.
    """
    found = last.copy()
    alone = first == last
    alone[:1] = True
    place = np.arange(len(first))
    after = place - np.maximum.accumulate(np.where(alone, place, 0))
    for n in range(1, SHARED_MAX + 1):
        at: Array = np.flatnonzero(after == n)
        before = np.maximum(found[at - 1], end[at - 1])
        found[at] = np.where((first[at] <= before) & (before <= last[at]), before, last[at])
    return found


class RecordPages:
    """Which pages of a file hold which records; ``page_bytes`` is the system's page. ``tells``:
    whether a page tells which record was meant: not of records smaller than a page, nor where
    records are packed together."""

    def __init__(self, index: formats.RecordIndex, page_bytes: int) -> None:
        self.format = index.format
        self.tells = index.exact and index.file_bytes >= len(index) * page_bytes
        self._exact = index.exact
        self._places = index.places
        self._page_bytes = page_bytes

    def __len__(self) -> int:
        return len(self._places)

    def _bounds(self, page: Array, end: Array) -> tuple[Array, Array, Array]:
        """(first, last) record on each page, and the first one on the last page before ``end``."""

        def on(page: Array) -> Ranges:
            return self._places.bounds_in(page * self._page_bytes, (page + 1) * self._page_bytes)

        return *on(page), on(end - 1)[0]

    def of_accesses(self, page: Array, end: Array, tid: Array) -> Array:
        """The number of the record at which each access to the pages [page, end) begins; -1: none.
        They are in order of time; where records share a page, what the thread read before tells.
        """
        order = np.argsort(tid, kind="stable")
        found: Array = np.empty(len(page), np.int64)
        found[order] = _begun(*self._bounds(page[order], end[order]))
        return found

    def pages_of(self, records: Array) -> Ranges:
        """(first page, page after the last) of each of these records; -1 gives (-1, -1)."""
        known = np.flatnonzero(records >= 0)
        first: Array = np.full(len(records), -1, np.int64)
        end = first.copy()
        if len(known):
            starts, ends = self._places.extents(records[known])
            counts = self._places.extent_counts(records[known])
            begin = np.cumsum(counts) - counts
            some = np.flatnonzero(counts > 0)
            page = self._page_bytes
            first[known[some]] = np.minimum.reduceat(starts, begin[some]) // page
            end[known[some]] = -(-np.maximum.reduceat(ends, begin[some]) // page)
        return first, end

    def _within(self, pages: Ranges) -> int:
        """Records with a byte in sorted ranges of pages."""
        start, end = pages
        return self._places.count_in(start * self._page_bytes, end * self._page_bytes)

    def _least(self, pages: Ranges) -> int:
        """Records without which nobody can have been at these sorted ranges of pages."""
        first, last, end = self._bounds(*pages)
        order = np.argsort(last, kind="stable")  # the file's order, but for a column store
        low = _begun(first[order], last[order], end[order])
        end = np.maximum(low, end[order]) + 1
        return total(union(low[low >= 0], end[low >= 0]))

    def report(self, mapped: Ranges, sure: Ranges) -> dict[str, Any]:
        """A file's figures that need the index, for sorted ranges of pages."""
        records = {
            "format": self.format,
            "records": len(self),
            "records_touched": self._least(sure) if self._exact else None,
            "records_mapped": self._within(mapped),
        }
        return {"format": self.format, "lmdb": None, "records": records}


class LmdbIndex(RecordPages):
    """The same of an LMDB file, and what its pages are. Numbers are in the order of the file."""

    def __init__(self, index: lmdb.Index, page_bytes: int) -> None:
        some = np.flatnonzero(index.length)
        order = some[np.argsort(index.offset[some], kind="stable")]
        places = RecordPlaces(
            one_part(len(order)), [Listed(index.offset[order], index.length[order])]
        )
        super().__init__(formats.RecordIndex("lmdb", index.file_bytes, places), page_bytes)
        self._types = index.page_types()
        self._type_bytes = int(index.page_bytes)

    def report(self, mapped: Ranges, sure: Ranges) -> dict[str, Any]:
        """As RecordPages.report(): the ``lmdb`` of a file."""
        scale = self._page_bytes
        names = {}
        for number, name in enumerate(lmdb.PAGE_TYPE_NAMES):
            pages: Array = np.flatnonzero(self._types == number).astype(np.int64) * self._type_bytes
            first, after = overlapping(
                mapped, pages // scale, -(-(pages + self._type_bytes) // scale)
            )
            names[str(name)] = {
                "file": len(pages),
                "touched": int((first < after).sum()),
            }
        found = {
            "page_bytes": self._type_bytes,
            "records": len(self),
            "records_touched": self._within(sure),
            "records_mapped": self._within(mapped),
            "pages": names,
        }
        return {"format": self.format, "lmdb": found, "records": None}


def open_records(path: str, size_bytes: int, page_bytes: int) -> RecordPages | None:
    """The index of a file of a known format; None when it has none, is not here, or not what it
    was."""
    try:
        with FileReader(path) as reader:
            if reader.size_bytes != size_bytes:
                return None
            is_lmdb = lmdb.looks_like_lmdb(reader.read(0, 64))
        if is_lmdb:
            return LmdbIndex(lmdb.open_index(path), page_bytes)
        return RecordPages(open_cached(path), page_bytes)
    except (ImportError, OSError, UffdPrefetchError, ValueError, MemoryError):
        return None


# ---- without an index ---------------------------------------------------------------------------


def _bounds(pattern: StreamPattern, step: float) -> tuple[float, float]:
    """What a record may measure, in pages: between what was surely touched and what was mapped.

    Records of one size and different alignment narrow it down.
    """
    least, most = pattern.runs.sure - pattern.runs.start, pattern.runs.high - pattern.runs.start
    low, high = float(np.percentile(least, 95)), float(np.percentile(most, 5))
    if below_resolution(pattern.runs):
        return 1.0, min(high, step)
    if low <= high:
        return low, high
    return float(least.mean()), float(most.mean())


def _by_places(pattern: StreamPattern, others: list[StreamPattern]) -> int | None:
    """Ranks that skip alike stand at different places of one stride: their distance is a record."""
    stride = pattern.stride.pages
    if stride is None or stride != int(stride):
        return None
    places = set()
    for one in [pattern, *others]:
        if one.stride.pages == stride and len(one.runs):
            values, counts = np.unique(one.runs.start % int(stride), return_counts=True)
            if counts.max() >= 0.8 * counts.sum():
                places.add(int(values[counts.argmax()]))
    if len(places) < 2:
        return None
    ordered = sorted(places)
    apart = min(b - a for a, b in pairwise([*ordered, ordered[0] + int(stride)]))
    low, high = _bounds(pattern, stride)
    fits = low - 1 <= apart <= high + 1 and int(stride) % apart == 0
    return int(stride) // apart if fits else None


def _usual(values: Array) -> Array:
    """Those near the middle if they are most: the others are tree pages, or were not told apart."""
    near = np.abs(values - np.median(values)) <= 1
    return values[near] if near.mean() >= NEIGHBOURS else values


def _by_neighbours(pattern: StreamPattern, step: Array, others: list[StreamPattern]) -> int | None:
    """Where a run ends among what others begin with, it ends exactly there."""
    runs = pattern.runs
    # a rank that reads the same begins within what is read here
    apart = [o.runs.start for o in others if np.isin(o.runs.start, runs.start).mean() < SAME]
    starts = np.unique(np.concatenate(apart or [runs.start[:0]]))
    if not len(starts):
        return None
    at = np.searchsorted(starts, runs.sure)
    found = starts[np.minimum(at, len(starts) - 1)]
    fits = (at < len(starts)) & (found <= runs.high)
    if fits.mean() < NEIGHBOURS:
        return None
    length = (found - runs.start)[fits]
    length = _usual(length)
    step = (
        _usual(step) if pattern.stride.pages is None else np.full(len(length), pattern.stride.pages)
    )
    if np.median(length) < AROUND_PAGES and (length == np.median(length)).mean() < SURE:
        return None  # some begin unseen, in what was mapped before: the mean would be too long
    return whole(length, step) if regular(length, step) else None


def _steps(pattern: StreamPattern) -> Array:
    step: Array = np.diff(pattern.runs.start) * pattern.direction
    return step[step > 0].astype(float)


def strided_by_neighbours(pattern: StreamPattern, others: list[StreamPattern]) -> int | None:
    """The stride in records of a sequential stream, if where other ranks begin shows that it has
    one: records of varying size."""
    step = _steps(pattern)
    n = _by_neighbours(pattern, step, others) if len(step) >= STEPS_MIN else None
    return n if n is not None and n > 1 else None


def _alike(pattern: StreamPattern, other: StreamPattern) -> bool:
    """Whether another reader's steps are as long, within a tenth."""
    mine, its = _steps(pattern), _steps(other)
    if other.name != "strided" or not len(mine) or not len(its):
        return False
    return bool(abs(mine.mean() / its.mean() - 1) <= 0.1)


def stride_in_records(
    pattern: StreamPattern, others: list[StreamPattern], index: str | None
) -> tuple[int | None, str]:
    """(n, how it is known) of a reader that reads one of n records; ``others``: those of the other
    readers of the file, ``index``: the format of its index. (None, why) when it cannot be told."""
    if pattern.stride.indexed and pattern.stride.records is not None:
        return pattern.stride.records, f"records from the {NAMES.get(index or '', index)} index"
    step = _steps(pattern)
    stride = pattern.stride.pages or (float(step.mean()) if len(step) else 0.0)
    if stride <= 0:
        return pattern.stride.records, "records from the part that is skipped"
    n = _by_places(pattern, others) or _by_neighbours(pattern, step, others)
    if n is not None and pattern.stride.records not in (None, n):
        return None, f"one of {pattern.stride.records} or of {n} records: two ways to tell disagree"
    if n is not None:
        return n, "records from where the other ranks begin"
    if pattern.stride.records is not None:
        return pattern.stride.records, "records from the part that is skipped"
    alike = {o.stride.records for o in others if _alike(pattern, o)} - {None}
    if len(alike) == 1:
        return alike.pop(), "records as of the other ranks, which step alike"
    return _by_bounds(stride, *_bounds(pattern, stride))


def _by_bounds(step: float, low: float, high: float) -> tuple[int | None, str]:
    """By what a record may measure at most and at least: only where one number of records fits."""
    most = int(step / max(low - 0.5, 0.5))
    fits = [n for n in range(1, most + 1) if low - 0.5 <= step / n <= high + 0.5]
    if step == int(step):
        fits = [n for n in fits if step % n == 0] or fits
    if len(fits) == 1:
        return fits[0], "records from the part that is skipped"
    if not fits:
        return None, "how many records it skips is hidden in what a fault maps"
    return None, f"one of {fits[0]} to {fits[-1]} records: more is hidden in what a fault maps"
