# SPDX-License-Identifier: Apache-2.0
"""A data set's samples in the sequence of its files: which record of which file each one is, and
one order through several files as an Order of each. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import spread
from uffdprefetch.predict.order.order import Order

#: Records of one order in all files: bounds its memory, as stated.ITEMS_MAX.
RECORDS_MAX = 1 << 26


def rows_of(numbers: Array, samples: int, what: str) -> Array:
    """Four rows: (where, first sample, samples, first record there) of each ``what``, from these
    one after the other, of a data set of so many samples. Raises ValueError."""
    if len(numbers) % 4:
        raise ValueError(f"a {what} has four numbers: {len(numbers)} are too many, or too few")
    rows: Array = numbers.reshape(-1, 4).T
    _, first, count, record = rows
    if len(numbers) and not (
        numbers.min() >= 0
        and record.max() < 1 << 62
        and (first <= samples).all()
        and (count <= samples - first).all()
    ):
        raise ValueError(f"a {what} that is none of {samples} samples")
    return rows


@dataclass(frozen=True, eq=False)
class Stretches:
    """Samples that follow each other as records of one file do. ``files``: their paths;
    ``file`` (an index into these), ``first`` (sample), ``count``, ``record`` (of the first sample):
    int64, one element a stretch. Stretches may share samples: each of these reads a record in
    several files, or in several places of one.
    """

    files: Sequence[str]
    file: Array
    first: Array
    count: Array
    record: Array

    @classmethod
    def parse(cls, files: Sequence[str], numbers: Array, samples: int) -> Stretches:
        """Parse (file, first, count, record) of each stretch, flat, of a data set of ``samples``.
        Raises ValueError."""
        file, first, count, record = rows_of(numbers, samples, "stretch")
        if len(file) and file.max() >= len(files):
            raise ValueError(f"a stretch that is none of {len(files)} files")
        return cls(files, file, first, count, record)

    def records(self, samples: Array) -> list[tuple[Array, Array]]:
        """For each file the (records, indices into ``samples`` of their samples) that are read of
        it; int64, in the order of ``samples``. Raises ValueError for more than RECORDS_MAX."""
        by_number = np.argsort(samples, kind="stable")
        ascending = samples[by_number]
        low = np.searchsorted(ascending, self.first)
        high = np.searchsorted(ascending, self.first + self.count)
        if int((high - low).sum()) > RECORDS_MAX:
            raise ValueError(f"more than {RECORDS_MAX} records of {len(samples)} samples")
        stretch, inner = spread(high - low)
        which = by_number[low[stretch] + inner]
        records = samples[which] + (self.record - self.first)[stretch]
        # by file, then by place in ``samples``
        file = self.file[stretch]
        order = np.argsort(file * max(1, len(samples)) + which, kind="stable")
        records, which = records[order], which[order]
        edges = np.searchsorted(file[order], np.arange(len(self.files) + 1))
        return [
            (records[a:b], which[a:b])
            for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ]


def in_the_whole(orders: Sequence[Order]) -> list[Order]:
    """The orders of several files as parts of one: with the plan coordinate of all of them.

    ``item`` of each is that of the whole. What an item reads in several files comes in their order.
    """
    if len(orders) < 2:
        return list(orders)
    items = max(order.items for order in orders)
    item = np.concatenate([order.item for order in orders])
    by_item = np.argsort(item, kind="stable")
    lengths = np.concatenate([order.ends - order.starts for order in orders])[by_item]
    after = np.cumsum(lengths)
    before: Array = np.empty(len(item), np.int64)
    before[by_item] = after - lengths
    parts = np.split(before, np.cumsum([len(order.item) for order in orders])[:-1])
    whole_bytes = int(after[-1]) if len(after) else 0
    return [
        replace(order, items=items, before=part, whole_bytes=whole_bytes)
        for order, part in zip(orders, parts, strict=True)
    ]
