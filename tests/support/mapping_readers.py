# SPDX-License-Identifier: Apache-2.0
"""Record indexes without files, and readers whose page tables are a bitmap: for the tests of what
sample reads which record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.keys import Keys
from uffdprefetch.formats.places import Listed, RecordPlaces, one_part
from uffdprefetch.job.channel import packed
from uffdprefetch.orders.mapping import KeyList

PAGE = 4096
#: Values that are larger than this leave LMDB's leaf pages.
INLINE_MAX = 2038


def keys_of(keys: Sequence[bytes], ascending: bool = True) -> Keys:
    length = np.array([len(key) for key in keys], np.uint16)
    ends = np.cumsum(length, dtype=np.int64)
    data = np.frombuffer(b"".join(keys), np.uint8)
    return Keys(ends - length, length, data, ((0, len(keys), ascending),))


def lmdb_index(records: Sequence[tuple[bytes, int]]) -> RecordIndex:
    """As LMDB has it of these (key, bytes), written in this order: large values in pages of their
    own in the order of writing, small ones in leaf pages in the order of their keys."""
    order = sorted(range(len(records)), key=lambda i: records[i][0])
    size = np.array([records[i][1] for i in order], np.int64)
    written = np.empty(len(order), np.int64)
    written[np.array(order, np.int64)] = np.arange(len(order))  # writing turn -> record
    start = np.zeros(len(order), np.int64)
    large = written[size[written] > INLINE_MAX]
    pages = (size[large] + 16 + PAGE - 1) // PAGE
    first = np.cumsum(pages) - pages + 2
    start[large] = first * PAGE + 16
    at = int(pages.sum() + 2) * PAGE
    for record in np.flatnonzero(size <= INLINE_MAX).tolist():
        if at % PAGE + size[record] > PAGE:
            at = -(-at // PAGE) * PAGE
        start[record] = at
        at += int(size[record])
    end = -(-at // PAGE) * PAGE
    places = RecordPlaces(one_part(len(order)), [Listed(start, size.astype(np.uint32))])
    return RecordIndex("lmdb", end, places, keys_of([records[i][0] for i in order]))


def plain_index(sizes: Sequence[int]) -> RecordIndex:
    """Records without keys, one after the other."""
    length = np.array(sizes, np.int64)
    start = np.cumsum(length) - length
    places = RecordPlaces(one_part(len(length)), [Listed(start, length.astype(np.uint32))])
    return RecordIndex("raw", int(length.sum()), places)


@dataclass
class Readers:
    """Which pages of a file the readers have mapped. around_pages: a fault maps so many, aligned
    to what the mapping's address makes of it (phase, in pages); 1: only its own."""

    index: RecordIndex
    around_pages: int = 16
    phase: int = 0
    asked: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.mapped = np.zeros(-(-self.index.file_bytes // PAGE), bool)

    def read(self, records: np.ndarray) -> None:
        """Touch all bytes of these records."""
        starts, ends = self.index.extents(records)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if start < end:
                low, high = start // PAGE, -(-end // PAGE)
                n, phase = self.around_pages, self.phase
                low = (low + phase) // n * n - phase
                high = -(-(high + phase) // n) * n - phase
                self.mapped[max(0, low) : high] = True

    def hide(self, every: int, pages: int = 1) -> None:
        """So many pages out of ``every`` are overlaid, or dropped from the table."""
        for first in range(every // 2, len(self.mapped), every):
            self.mapped[first : first + pages] = False

    def present(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        self.asked += len(starts)
        assert (starts >= 0).all() and (ends <= self.index.file_bytes).all()
        before = np.concatenate([[0], np.cumsum(self.mapped)])
        low, high = starts // PAGE, -(-ends // PAGE)
        return (before[high] - before[low]) / np.maximum(high - low, 1)


def texts(name: str, elements: Sequence[str]) -> KeyList:
    return KeyList.parse(name, "text", packed([each.encode() for each in elements]))


def byte_keys(name: str, elements: Sequence[bytes]) -> KeyList:
    return KeyList.parse(name, "bytes", packed(elements))


def ints(name: str, numbers: Sequence[int]) -> KeyList:
    return KeyList.parse(name, "ints", np.array(numbers, np.int64).tobytes())
