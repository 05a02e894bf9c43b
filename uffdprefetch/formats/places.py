# SPDX-License-Identifier: Apache-2.0
"""Extents of a file's records: columns of pieces, at fixed strides or listed. Pure.

A file's records are in parts (an Arrow file's batches; most files are one part). In each part a
record has a piece in each column: a Strided is computed, a Listed takes 12 bytes a record. Offsets
and lengths are in bytes of the file; ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import Ranges, holding, overlapping, spread, total, union

#: Bound on offsets, which are multiplied by 8 (bits) in int64.
OFFSET_MAX = 1 << 59

Pair = tuple[Array, Array]


def within_a_file(starts: Any, ends: Any) -> Ranges:
    """As a set of ranges of bytes that a file may have."""
    low, high = (np.clip(edge, 0, OFFSET_MAX).astype(np.int64) for edge in (starts, ends))
    return union(low, high)


def expanded(low: Array, high: Array) -> Array:
    """All numbers of the ranges [low[i], high[i]), ascending, each once."""
    low, high = union(low, high)
    owner, inner = spread(high - low)
    numbers: Array = low[owner] + inner
    return numbers


def small_lengths(length: Array) -> Array:
    """``length`` as uint32 where all fit, else int64."""
    fits = not len(length) or int(length.max()) < 1 << 32
    return length.astype(np.uint32 if fits else np.int64)


@dataclass(frozen=True, eq=False)
class Parts:
    """The records of each part: ``first[p]`` is part p's first, the last element the number of
    records (int64)."""

    first: Array

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def records(self) -> int:
        return int(self.first[-1])

    @property
    def counts(self) -> Array:
        return np.diff(self.first)

    def of(self, records: Array) -> Pair:
        """Each record's part, and its index in it."""
        if len(self) == 1:
            return np.zeros(len(records), np.int64), records
        part: Array = np.searchsorted(self.first, records, "right") - 1
        return part, records - self.first[part]


def one_part(records: int) -> Parts:
    return Parts(np.array([0, records], np.int64))


@dataclass(frozen=True, eq=False)
class Strided:
    """The piece of record i of part p is [base[p] + floor(i * bits / 8), base[p] + ceil((i + 1) *
    bits / 8) + extra[p]). ``base`` -1: that part has none. int64, one element a part.

    The regions of different parts must not overlap.
    """

    bits: int
    base: Array
    extra: Array

    def extents(self, part: Array, inner: Array) -> tuple[Array, Array, Array]:
        base = self.base[part]
        starts = base + inner * self.bits // 8
        ends = base - (-(inner + 1) * self.bits // 8) + self.extra[part]
        return starts, ends, base >= 0

    def regions(self, parts: Parts) -> tuple[Array, Array, Array]:
        """(part, start, end) of the non-empty ones, in the file's order."""
        counts = parts.counts
        ends: Array = self.base - (-counts * self.bits // 8) + self.extra
        some: Array = np.flatnonzero((self.base >= 0) & (counts > 0) & (ends > self.base))
        some = some[np.argsort(self.base[some], kind="stable")]
        return some, self.base[some], ends[some]

    def _numbers(self, parts: Parts, part: Array, low: Array, high: Array) -> Pair:
        """The records [first, last) of each part with a byte in [low, high) after its base."""
        counts = parts.counts[part]
        if self.bits == 0:
            first, last = np.zeros_like(counts), counts
        else:
            first = np.clip(8 * (low - self.extra[part]) // self.bits, 0, counts)
            last = np.clip(-(-8 * high // self.bits), first, counts)
        return parts.first[part] + first, parts.first[part] + last

    def ranges_in(self, parts: Parts, starts: Array, ends: Array) -> Pair:
        part, low, high = self.regions(parts)
        first, after = overlapping((low, high), starts, ends)
        query, inner = spread(np.maximum(after - first, 0))
        region = first[query] + inner
        part, base = part[region], low[region]
        return self._numbers(parts, part, starts[query] - base, ends[query] - base)

    def bounds_in(self, parts: Parts, starts: Array, ends: Array) -> Pair:
        part, low, high = self.regions(parts)
        first, after = overlapping((low, high), starts, ends)
        some = first < after
        found: Array = np.full((2, len(starts)), -1, np.int64)
        for side, at in enumerate((first[some], after[some] - 1)):
            inside = starts[some] - low[at], ends[some] - low[at]
            found[side, some] = self._numbers(parts, part[at], *inside)[side] - side
        return found[0], found[1]

    def records_at(self, parts: Parts, offsets: Array) -> Array:
        part, low, high = self.regions(parts)
        if not len(part):
            return np.full(offsets.shape, -1, np.int64)
        at = holding((low, high), offsets)
        inside = at >= 0
        within = np.where(inside, offsets - low[at], 0)
        first, _ = self._numbers(parts, part[at], within, within + 1)
        return np.where(inside, first, -1)

    def covered_bytes(self, parts: Parts) -> int:
        _, low, high = self.regions(parts)
        return int((high - low).sum())

    def sizes(self, parts: Parts) -> Array | None:
        """Bytes of a record, one element a part; None when they differ within a part."""
        if self.bits % 8 and self.bits != 1:
            return None
        whole: Array = -(-self.bits // 8) + self.extra
        return np.where(self.base >= 0, whole, 0)


@dataclass(frozen=True, eq=False)
class Listed:
    """The piece of record i is [start[i], start[i] + length[i]); int64, and uint32 or int64.

    Non-empty pieces ordered by start have ascending ends too.
    """

    start: Array
    length: Array

    def extents(self, part: Array, records: Array) -> tuple[Array, Array, Array]:
        starts: Array = self.start[records].astype(np.int64)
        return starts, starts + self.length[records], np.ones(len(records), bool)

    @cached_property
    def _in_order(self) -> tuple[Array | None, Array, Array]:
        """(record, start, end) of the non-empty ones, in the file's order; record None: all, by
        number."""
        order: Array | None = None
        starts = self.start
        if len(self.length) and not self.length.all():
            order = np.flatnonzero(self.length)
            starts = starts[order]
        if (starts[1:] < starts[:-1]).any():
            by_start = np.argsort(starts, kind="stable")
            order = by_start if order is None else order[by_start]
            starts = self.start[order]
        return order, starts, starts + (self.length if order is None else self.length[order])

    def _positions(self, starts: Array, ends: Array) -> Pair:
        _, low, high = self._in_order
        first, after = overlapping((low, high), starts, ends)
        return first, np.maximum(after, first)

    def ranges_in(self, starts: Array, ends: Array) -> Pair:
        order, (first, last) = self._in_order[0], self._positions(starts, ends)
        if order is None:
            return first, last
        numbers: Array = order[expanded(first, last)]
        return numbers, numbers + 1

    def records_in(self, starts: Array, ends: Array) -> Array:
        order, numbers = self._in_order[0], expanded(*self._positions(starts, ends))
        return numbers if order is None else np.sort(order[numbers])

    def bounds_in(self, starts: Array, ends: Array) -> Pair:
        order, (first, last) = self._in_order[0], self._positions(starts, ends)
        found: Array = np.full((2, len(starts)), -1, np.int64)
        some = first < last
        positions = np.stack([first[some], last[some] - 1])
        found[:, some] = positions if order is None else order[positions]
        return found[0], found[1]

    def records_at(self, offsets: Array) -> Array:
        order, low, high = self._in_order
        at = holding((low, high), offsets)
        if order is None or not len(order):
            return at
        return np.where(at >= 0, order[at], -1)

    def covered_bytes(self) -> int:
        """Bytes of the union: pieces may overlap."""
        _, low, high = self._in_order
        shared = np.maximum(high[:-1] - low[1:], 0).sum()
        return int((high - low).sum() - shared)


Column = Strided | Listed


class RecordPlaces:
    """The records' pieces, one in each column, in this order."""

    def __init__(self, parts: Parts, columns: Sequence[Column]) -> None:
        self.parts = parts
        self.columns = tuple(columns)

    def __len__(self) -> int:
        return self.parts.records

    def arrays(self) -> dict[str, Array]:
        """All arrays, by name; from_arrays() takes them."""
        found = {"first": self.parts.first}
        for number, column in enumerate(self.columns):
            kinds = ("base", "extra") if isinstance(column, Strided) else ("start", "length")
            found |= {f"{number}.{kind}": getattr(column, kind) for kind in kinds}
        return found

    def shape(self) -> list[int]:
        """The bits of each Strided, -1 for a Listed."""
        return [column.bits if isinstance(column, Strided) else -1 for column in self.columns]

    @classmethod
    def from_arrays(cls, shape: Sequence[int], arrays: dict[str, Array]) -> RecordPlaces:
        """The inverse of shape() and arrays(). Raises KeyError."""
        columns: list[Column] = []
        for number, bits in enumerate(shape):
            if bits < 0:
                columns.append(Listed(arrays[f"{number}.start"], arrays[f"{number}.length"]))
            else:
                columns.append(Strided(bits, arrays[f"{number}.base"], arrays[f"{number}.extra"]))
        return cls(Parts(arrays["first"]), columns)

    def _pieces(self, records: Any) -> tuple[Array, Array, Array]:
        """(starts, ends, there), each of shape (records, columns)."""
        numbers = np.atleast_1d(np.asarray(records)).astype(np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"no such record: there are {len(self)}")
        part, inner = self.parts.of(numbers)
        starts: Array = np.empty((len(numbers), len(self.columns)), np.int64)
        ends: Array = np.empty_like(starts)
        there: Array = np.empty(starts.shape, bool)
        for i, column in enumerate(self.columns):
            which = inner if isinstance(column, Strided) else numbers
            starts[:, i], ends[:, i], there[:, i] = column.extents(part, which)
        return starts, ends, there

    def extents(self, records: Any) -> Pair:
        """(starts, ends) of the pieces of these records, record by record."""
        starts, ends, there = self._pieces(records)
        return starts[there], ends[there]

    def extent_counts(self, records: Any) -> Array:
        """The number of pieces of each of these records."""
        return self._pieces(records)[2].sum(1)

    def records_in(self, starts: Any, ends: Any) -> Array:
        """The records, ascending, with a byte in one of the ranges [starts[i], ends[i])."""
        low, high = within_a_file(starts, ends)
        found = [
            expanded(*column.ranges_in(self.parts, low, high))
            if isinstance(column, Strided)
            else column.records_in(low, high)
            for column in self.columns
        ]
        if len(found) == 1:
            return found[0]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *found]))

    def count_in(self, starts: Any, ends: Any) -> int:
        """len(records_in()), without making the array where records are in file order."""
        low, high = within_a_file(starts, ends)
        found = [
            column.ranges_in(self.parts, low, high)
            if isinstance(column, Strided)
            else column.ranges_in(low, high)
            for column in self.columns
        ]
        none: Array = np.zeros(0, np.int64)
        first, last = (np.concatenate([none, *edges]) for edges in zip(*found, strict=True))
        return total(union(first, last))

    def bounds_in(self, starts: Array, ends: Array) -> Pair:
        """(first, last) record, in the file's order, with a byte in each of the non-empty ranges
        [starts[i], ends[i]), by the last column with one; -1: none."""
        found: Array = np.full((2, len(starts)), -1, np.int64)
        for column in self.columns:
            if isinstance(column, Strided):
                here = column.bounds_in(self.parts, starts, ends)
            else:
                here = column.bounds_in(starts, ends)
            found = np.where(np.stack(here) < 0, found, here)
        return found[0], found[1]

    def records_at(self, offsets: Any) -> Array:
        """A record that contains each byte offset (in a bitmap several do), -1: none."""
        wanted = np.clip(np.asarray(offsets).astype(np.int64), -1, OFFSET_MAX)
        found: Array = np.full(wanted.shape, -1, np.int64)
        for column in self.columns:
            if isinstance(column, Strided):
                here = column.records_at(self.parts, wanted)
            else:
                here = column.records_at(wanted)
            found = np.where(found < 0, here, found)
        return found

    def covered_bytes(self) -> int:
        """Bytes of any record. (Different columns do not overlap.)"""
        return sum(
            column.covered_bytes(self.parts)
            if isinstance(column, Strided)
            else column.covered_bytes()
            for column in self.columns
        )

    def sizes(self) -> Pair:
        """(sizes of records, number of records of each), unordered, sizes may repeat: one element a
        part where all its records have one size, else one a record."""
        alike: Array = np.zeros(len(self.parts), np.int64)
        apart: list[Column] = []
        for column in self.columns:
            sizes = column.sizes(self.parts) if isinstance(column, Strided) else None
            if sizes is None:
                apart.append(column)
            else:
                alike = alike + sizes
        counts = self.parts.counts
        if not apart:
            return alike, counts
        total: Array = np.repeat(alike, counts)
        for column in apart:
            if isinstance(column, Listed):
                total += column.length
            else:
                part, inner = self.parts.of(np.arange(len(self), dtype=np.int64))
                starts, ends, there = column.extents(part, inner)
                total += np.where(there, ends - starts, 0)
        return total, np.ones(len(total), np.int64)
