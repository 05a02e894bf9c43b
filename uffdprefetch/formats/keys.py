# SPDX-License-Identifier: Apache-2.0
"""The keys of records, where a format has them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from uffdprefetch.formats.reader import Array

#: Records per batch of a linear scan, where binary search does not apply.
_SCAN_RECORDS = 1 << 20


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys of records: that of record i is ``data[offset[i] : offset[i] + length[i]]`` (uint8).
    ``ranges``: first record, end, and whether the keys between them ascend (as bytes compare), for
    all records."""

    offset: Array
    length: Array
    data: Array
    ranges: tuple[tuple[int, int, bool], ...]

    def key(self, record: int) -> bytes:
        """The record's key."""
        at = int(self.offset[record])
        return self.data[at : at + int(self.length[record])].tobytes()

    def find(self, key: bytes) -> Array:
        """The records with this key, ascending."""
        found = [self._within(key, *part) for part in self.ranges]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _within(self, key: bytes, first: int, end: int, ascending: bool) -> Array:
        if ascending:
            at = bisect_left(range(end), key, first, end, key=self.key)
            last = at
            while last < end and self.key(last) == key:
                last += 1
            if last > at:
                return np.arange(at, last, dtype=np.int64)
        # absent, or in a custom order (mdb_set_compare)
        found = [
            self._scan(key, at, min(at + _SCAN_RECORDS, end))
            for at in range(first, end, _SCAN_RECORDS)
        ]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _scan(self, key: bytes, first: int, end: int) -> Array:
        """A linear scan, by the last byte first, in which most keys differ."""
        same: Array = first + np.flatnonzero(self.length[first:end] == len(key))
        for place in reversed(range(len(key))):
            if not len(same):
                break
            same = same[self.data[self.offset[same].astype(np.int64) + place] == key[place]]
        return same
