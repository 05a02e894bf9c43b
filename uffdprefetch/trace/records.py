# SPDX-License-Identifier: Apache-2.0
"""Records: from the index of an LMDB file where it can be had, else from how readers walk.

Numbers of records count in the order of the file.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np

from uffdprefetch.errors import UffdPrefetchError
from uffdprefetch.trace.pieces import Ranges, pages_within
from uffdprefetch.trace.runs import AROUND_PAGES, below_resolution
from uffdprefetch.trace.strides import STEPS_MIN, regular, whole
from uffdprefetch.trace.walks import Walk

Array = np.ndarray[Any, Any]

#: Part of the runs that begin as another reader's do, from which on both read the same.
SAME = 0.3
#: Part of lengths below the resolution that must agree.
SURE = 0.8
#: Part of the runs whose end must be another reader's start to know what a record measures.
NEIGHBOURS = 0.6


class RecordIndex:
    """Which pages of an LMDB file hold which records; ``page_bytes`` is the system's page."""

    def __init__(self, index: Any, page_bytes: int) -> None:
        some = np.flatnonzero(index.length)
        start = index.offset[some].astype(np.int64)
        order = np.argsort(start, kind="stable")
        self._start = start[order]
        self._end = self._start + index.length[some].astype(np.int64)[order]
        self._page_bytes = page_bytes
        self._types = index.page_types()
        self._type_bytes = int(index.page_bytes)

    def __len__(self) -> int:
        return len(self._start)

    def of_pages(self, page: Array) -> Array:
        """The number of the record that each page holds (the last that begins there); -1: none."""
        if not len(self._start):
            return np.full(len(page), -1, np.int64)
        at = np.searchsorted(self._start, (page + 1) * self._page_bytes - 1, side="right") - 1
        holds = (at >= 0) & (self._end[np.maximum(at, 0)] > page * self._page_bytes)
        return np.where(holds, at, -1)

    def report(self, mapped: Ranges, sure: Ranges) -> dict[str, Any]:
        """The ``lmdb`` of a file: records and pages by type, of sorted ranges of pages."""
        from uffdprefetch.formats.lmdb import PAGE_TYPE_NAMES

        first = self._start // self._page_bytes
        end = -(-self._end // self._page_bytes)
        scale = self._page_bytes
        names = {}
        for number, name in enumerate(PAGE_TYPE_NAMES):
            pages: Array = np.flatnonzero(self._types == number).astype(np.int64) * self._type_bytes
            low: Array = pages // scale
            high: Array = -(-(pages + self._type_bytes) // scale)
            names[str(name)] = {
                "file": len(pages),
                "touched": int((pages_within(mapped, low, high) > 0).sum()),
            }
        return {
            "page_bytes": self._type_bytes,
            "records": len(self),
            "records_touched": int((pages_within(sure, first, end) > 0).sum()),
            "records_mapped": int((pages_within(mapped, first, end) > 0).sum()),
            "pages": names,
        }


def open_records(path: str, size_bytes: int, page_bytes: int) -> RecordIndex | None:
    """The index of an LMDB file; None when it is none, or not here, or not what it was."""
    try:
        if os.stat(path).st_size != size_bytes:
            return None
        from uffdprefetch.formats.lmdb import looks_like_lmdb, open_index

        with open(path, "rb") as file:
            if not looks_like_lmdb(file.read(64)):
                return None
        return RecordIndex(open_index(path), page_bytes)
    except (ImportError, OSError, UffdPrefetchError, ValueError, MemoryError):
        return None


# ---- without an index ---------------------------------------------------------------------------


def _bounds(walk: Walk, step: float) -> tuple[float, float]:
    """What a record may measure, in pages: between what was surely touched and what was mapped.

    Records of one size and different alignment narrow it down.
    """
    least, most = walk.runs.sure - walk.runs.start, walk.runs.high - walk.runs.start
    low, high = float(np.percentile(least, 95)), float(np.percentile(most, 5))
    if below_resolution(walk.runs):
        return 1.0, min(high, step)
    if low <= high:
        return low, high
    return float(least.mean()), float(most.mean())


def _by_places(walk: Walk, others: list[Walk]) -> int | None:
    """Ranks that skip alike stand at different places of one stride: their distance is a record."""
    stride = walk.stride_pages
    if stride is None or stride != int(stride):
        return None
    places = set()
    for one in [walk, *others]:
        if one.stride_pages == stride and len(one.runs):
            values, counts = np.unique(one.runs.start % int(stride), return_counts=True)
            if counts.max() >= 0.8 * counts.sum():
                places.add(int(values[counts.argmax()]))
    if len(places) < 2:
        return None
    ordered = sorted(places)
    apart = min(b - a for a, b in pairwise([*ordered, ordered[0] + int(stride)]))
    low, high = _bounds(walk, stride)
    fits = low - 1 <= apart <= high + 1 and int(stride) % apart == 0
    return int(stride) // apart if fits else None


def _usual(values: Array) -> Array:
    """Those near the middle if they are most: the others are tree pages, or were not told apart."""
    near = np.abs(values - np.median(values)) <= 1
    return values[near] if near.mean() >= NEIGHBOURS else values


def _by_neighbours(walk: Walk, step: Array, others: list[Walk]) -> int | None:
    """Where a run ends among what others begin with, it ends exactly there."""
    runs = walk.runs
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
    step = _usual(step) if walk.stride_pages is None else np.full(len(length), walk.stride_pages)
    if np.median(length) < AROUND_PAGES and (length == np.median(length)).mean() < SURE:
        return None  # some begin unseen, in what was mapped before: the mean would be too long
    return whole(length, step) if regular(length, step) else None


def _steps(walk: Walk) -> Array:
    step: Array = np.diff(walk.runs.start) * walk.direction
    return step[step > 0].astype(float)


def strided_by_neighbours(walk: Walk, others: list[Walk]) -> int | None:
    """The stride in records of a sequential walk, if where other ranks begin shows that it has one:
    records of varying size."""
    step = _steps(walk)
    n = _by_neighbours(walk, step, others) if len(step) >= STEPS_MIN else None
    return n if n is not None and n > 1 else None


def _alike(walk: Walk, other: Walk) -> bool:
    """Whether another reader's steps are as long, within a tenth."""
    mine, its = _steps(walk), _steps(other)
    if other.name != "strided" or not len(mine) or not len(its):
        return False
    return bool(abs(mine.mean() / its.mean() - 1) <= 0.1)


def stride_in_records(walk: Walk, others: list[Walk]) -> tuple[int | None, str]:
    """(n, how it is known) of a reader that reads one of n records; ``others``: those of the other
    readers of the file. (None, why) when it cannot be told."""
    if walk.indexed and walk.stride_records is not None:
        return walk.stride_records, "records from the LMDB index"
    step = _steps(walk)
    stride = walk.stride_pages or (float(step.mean()) if len(step) else 0.0)
    if stride <= 0:
        return walk.stride_records, "records from the part that is skipped"
    n = _by_places(walk, others) or _by_neighbours(walk, step, others)
    if n is not None and walk.stride_records not in (None, n):
        return None, f"one of {walk.stride_records} or of {n} records: two ways to tell disagree"
    if n is not None:
        return n, "records from where the other ranks begin"
    if walk.stride_records is not None:
        return walk.stride_records, "records from the part that is skipped"
    alike = {o.stride_records for o in others if _alike(walk, o)} - {None}
    if len(alike) == 1:
        return alike.pop(), "records as of the other ranks, which step alike"
    return _by_bounds(stride, *_bounds(walk, stride))


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
