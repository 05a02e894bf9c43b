# SPDX-License-Identifier: Apache-2.0
"""The files of a data set, one after the other, as one file with one index: so that what finds the
records of samples in a file (orders/mapping.py, orders/evidence.py) finds them in several. Pure.

File i begins at byte ``bases[i]`` of the sequence, and its records after those of the files before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.keys import Keys
from uffdprefetch.formats.places import Column, Parts, RecordPlaces
from uffdprefetch.orders.residency_evidence import AROUND_BYTES
from uffdprefetch.orders.stretches import in_the_whole
from uffdprefetch.predict.order.order import Order

#: Sequences that are tried for a data set: bounds the work for a job that maps thousands of files.
SEQUENCES_MAX = 8


class _JoinedPlaces(RecordPlaces):
    """The extents of the records of several files, at their places in the sequence."""

    def __init__(self, indices: Sequence[RecordIndex], bases: Array) -> None:
        most: tuple[Column, ...] = max((i.places.columns for i in indices), key=len)
        counts = [len(index) for index in indices]
        super().__init__(Parts(np.append(0, np.cumsum(counts)).astype(np.int64)), most)
        self._indices, self._bases = indices, bases

    def _pieces(self, records: Any) -> tuple[Array, Array, Array]:
        numbers = np.atleast_1d(np.asarray(records)).astype(np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"no such record: there are {len(self)}")
        starts: Array = np.zeros((len(numbers), len(self.columns)), np.int64)
        ends: Array = np.zeros_like(starts)
        there: Array = np.zeros(starts.shape, bool)
        file, inner = self.parts.of(numbers)
        for i in np.unique(file).tolist():
            its = np.flatnonzero(file == i)
            low, high, has = self._indices[i].places._pieces(inner[its])
            columns = low.shape[1]
            starts[its, :columns] = low + self._bases[i]
            ends[its, :columns] = high + self._bases[i]
            there[its, :columns] = has
        return starts, ends, there


@dataclass(frozen=True, eq=False)
class FileSequence:
    """``files``: MappedFile each, in the data set's order; ``bases``, ``sizes``: where each begins
    in the sequence, and its bytes. ``indices``: of each; ``index``: of all of them."""

    files: Sequence[Any]
    indices: Sequence[RecordIndex]
    bases: Array
    sizes: Array
    index: RecordIndex

    @classmethod
    def of(cls, files: Sequence[Any], indices: Sequence[RecordIndex]) -> FileSequence:
        """The sequence of files of one format."""
        sizes: Array = np.array([index.file_bytes for index in indices], np.int64)
        # no fault in one file maps a page of the next
        rooms = (-(-sizes // AROUND_BYTES) + 1) * AROUND_BYTES
        bases = np.cumsum(rooms) - rooms
        first = indices[0]
        columns = {}
        if all("leaf_page" in index.columns for index in indices):
            page_bytes = int(first.facts["page_bytes"])
            columns["leaf_page"] = np.concatenate(
                [
                    index.columns["leaf_page"].astype(np.int64) + base // page_bytes
                    for index, base in zip(indices, bases.tolist(), strict=True)
                ]
            )
        index = RecordIndex(
            first.format,
            int(rooms.sum()),
            _JoinedPlaces(indices, bases),
            _joined_keys([index.keys for index in indices]),
            "record" if all(index.exact for index in indices) else "batch",
            facts=first.facts,
            columns=columns,
        )
        return cls(files, indices, bases, sizes, index)

    @property
    def path(self) -> str:
        """Its name for people."""
        return f"{os.path.basename(self.files[0].path)} and {len(self.files) - 1} more"

    def present(self, starts: Array, ends: Array) -> Array:
        """See MappedFile.present(). A range that goes through several files: of all of them."""
        lengths = np.maximum(ends - starts, 1).astype(np.float64)
        share: Array = np.zeros(len(starts))
        for file, base, limit in zip(
            self.files, self.bases.tolist(), (self.bases + self.sizes).tolist(), strict=True
        ):
            some = np.flatnonzero((starts < limit) & (ends > base))
            if len(some):
                low, high = np.maximum(starts[some], base), np.minimum(ends[some], limit)
                found = file.present(low - base, high - base)
                share[some] += found * (high - low) / lengths[some]
        return share

    def orders(self, order: Order) -> list[tuple[int, Order]]:
        """An order of the sequence as (number of the file, Order) of the files that it reads of."""
        file = np.searchsorted(self.bases, order.starts, "right") - 1
        numbers = np.unique(file).tolist()
        parts = []
        for number in numbers:
            its, base = file == number, int(self.bases[number])
            made = Order(order.starts[its] - base, order.ends[its] - base, order.item[its])
            parts.append(replace(made, items=order.items))
        return list(zip(numbers, in_the_whole(parts), strict=True))


def _joined_keys(keys: Sequence[Keys | None]) -> Keys | None:
    """As those of a file with several databases."""
    found = [each for each in keys if each is not None]
    if len(found) < len(keys):
        return None
    begins = np.cumsum([0, *(len(each.data) for each in found)])[:-1].tolist()
    records = np.cumsum([0, *(len(each.offset) for each in found)])[:-1].tolist()
    return Keys(
        np.concatenate(
            [
                each.offset.astype(np.int64) + begin
                for each, begin in zip(found, begins, strict=True)
            ]
        ),
        np.concatenate([each.length for each in found]),
        np.concatenate([each.data for each in found]),
        tuple(
            (low + first, high + first, ascending)
            for each, first in zip(found, records, strict=True)
            for low, high, ascending in each.ranges
        ),
    )


# ---- which sequences a data set may be -----------------------------------------------------------


def sequences(files: Sequence[tuple[str, RecordIndex]], samples: int) -> list[tuple[int, ...]]:
    """Which of these (path, index), in the order in which they were mapped, may be the files of a
    data set of so many samples: files of one format side by side, by number in their names or as
    they were mapped. Of a format without keys as many as have its records, where some have exactly
    these; with keys all of them."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, (path, index) in enumerate(files):
        groups.setdefault((index.format, *_siblings(path)), []).append(number)
    found: dict[tuple[int, ...], None] = {}
    for group in groups.values():
        for row in (sorted(group, key=lambda i: _by_number(files[i][0])), group):
            counts = [len(files[i][1]) for i in row]
            if files[row[0]][1].keys is not None:
                chosen = [tuple(row)]
            else:
                chosen = _runs(row, counts, samples)
                if not chosen and sum(counts) > samples:
                    chosen = [tuple(row)]
            found |= {each: None for each in chosen if len(each) > 1}
    return list(found)[:SEQUENCES_MAX]


def _runs(row: Sequence[int], counts: Sequence[int], samples: int) -> list[tuple[int, ...]]:
    """The runs of a row that have this number of records."""
    ends = np.append(0, np.cumsum(counts))
    last = np.searchsorted(ends, ends + samples, "right") - 1
    return [
        tuple(row[low:high])
        for low, high in enumerate(last.tolist())
        if high > low and ends[high] - ends[low] == samples
    ]


def _siblings(path: str) -> tuple[str, str]:
    """The common part of the names of one data set's files: the directory and the ending, or, of
    databases that are directories, the one above and the name."""
    directory, name = os.path.split(path)
    if name == "data.mdb":
        return os.path.dirname(directory), name
    return directory, os.path.splitext(name)[1]


def _by_number(path: str) -> list[tuple[int, str]]:
    """Sorts "part-2" before "part-10"."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)
    ]
