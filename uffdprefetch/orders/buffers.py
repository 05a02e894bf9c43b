# SPDX-License-Identifier: Apache-2.0
"""A data set's samples in the buffers of a table that maps Arrow files: from the buffers' addresses
to the records of the files, and to those of their columns that are read. Pure.

A buffer of which no mapping is known is in memory: nothing of it is read from a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.places import Strided
from uffdprefetch.orders import stated
from uffdprefetch.orders.stretches import Stretches, rows_of
from uffdprefetch.predict.order.order import Order

#: (address, offset in the file, bytes) of a mapping.
Mapped = tuple[int, int, int]
#: Stretches that columns of a file have: (first sample, samples, first record) of each.
Rows = list[tuple[int, int, int]]


@dataclass(frozen=True, eq=False)
class Buffers:
    """``files``: paths of those that the table maps. ``address``, ``first`` (sample), ``count``,
    ``row`` (of the first sample in the buffer): int64, one element a buffer."""

    files: Sequence[str]
    samples: int
    address: Array
    first: Array
    count: Array
    row: Array

    @classmethod
    def parse(cls, files: Sequence[str], numbers: Array, samples: int) -> Buffers:
        """Parse (address, first, count, row) of each buffer, flat, of a data set of ``samples``.
        Raises ValueError."""
        return cls(files, samples, *rows_of(numbers, samples, "buffer"))

    def offsets(self, mapped: Sequence[Mapped]) -> tuple[Array, Array]:
        """(which buffers are in these mappings of a file, the offset of each in the file)."""
        which: list[Array] = [np.zeros(0, np.int64)]
        offsets: list[Array] = [np.zeros(0, np.int64)]
        for address, offset, length in mapped:
            inside = np.flatnonzero((self.address >= address) & (self.address < address + length))
            which.append(inside)
            offsets.append(self.address[inside] - address + offset)
        return np.concatenate(which), np.concatenate(offsets)

    def columns(self, index: RecordIndex, mapped: Sequence[Mapped]) -> dict[int, Rows]:
        """Columns of a file with this index, mapped so: by column of the index, which of its
        records the samples are. Raises ValueError for rows that the file lacks."""
        which, offsets = self.offsets(mapped)
        column, part = _buffer_at(index, offsets)
        known = np.flatnonzero(column >= 0)
        which, column, part = which[known], column[known], part[known]
        rows, counts = index.places.parts.first, index.places.parts.counts
        beyond = np.flatnonzero(self.row[which] + self.count[which] > counts[part])
        if len(beyond):
            at = int(beyond[0])
            raise ValueError(f"a batch has {int(counts[part[at]])} records, not as many as are "
                             f"read of it: {int((self.row + self.count)[which[at]])}")  # fmt: skip
        group_of: Array = np.asarray(index.facts.get("groups", [0] * len(index.places.columns)))
        group = group_of[column]
        record = rows[part] + self.row[which]
        found: dict[int, Rows] = {}
        for one in np.unique(group).tolist():
            its = np.flatnonzero(group == one)
            places = np.stack([self.first[which], self.count[which], record])[:, its]
            stretches = [tuple(row) for row in np.unique(places, axis=1).T.tolist()]
            found |= {number: stretches for number in np.flatnonzero(group_of == one).tolist()}
        return found

    def order(
        self, index: RecordIndex, mapped: Sequence[Mapped], samples: Array, where: str
    ) -> Order:
        """The order in which these samples read such a file; ``item``: index into ``samples``.
        Raises ValueError, UffdPrefetchError."""
        none: Array = np.zeros(0, np.int64)
        orders = [(none, none, none)]
        for columns, rows in _together(self.columns(index, mapped)):
            numbers: Array = np.array([(0, *row) for row in rows], np.int64).reshape(-1)
            stretches = Stretches.parse([where], numbers, self.samples)
            ((records, which),) = stretches.records(samples)
            order = stated.of_records(where, records, index.only(columns))
            orders.append((order.starts, order.ends, which[order.item]))
        starts, ends, item = map(np.concatenate, zip(*orders, strict=True))
        by_item = np.argsort(item, kind="stable")
        return Order(starts[by_item], ends[by_item], item[by_item], len(samples))


def _together(rows_of: Mapping[int, Rows]) -> list[tuple[list[int], Rows]]:
    """The columns that have the same stretches, as one."""
    found: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
    for column, rows in sorted(rows_of.items()):
        found.setdefault(tuple(rows), []).append(column)
    return [(columns, list(rows)) for rows, columns in found.items()]


def _buffer_at(index: RecordIndex, offsets: Array) -> tuple[Array, Array]:
    """The column of the index of which a part's buffer begins at each offset of the file, or lies
    around it if it has no place for each record; and the part. -1: there is none."""
    column: Array = np.full(len(offsets), -1, np.int64)
    part: Array = np.zeros(len(offsets), np.int64)
    for number, each in enumerate(index.places.columns):
        if not isinstance(each, Strided):
            continue
        parts, low, high = each.regions(index.places.parts)
        if not len(parts):
            continue
        at = np.maximum(np.searchsorted(low, offsets, "right") - 1, 0)
        here = (offsets == low[at]) if each.bits else (offsets >= low[at]) & (offsets < high[at])
        here &= column < 0
        column[here], part[here] = number, parts[at[here]]
    return column, part
