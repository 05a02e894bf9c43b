# SPDX-License-Identifier: Apache-2.0
"""Batched key look-up in a file's record index, and samples of its keys. Pure.

Keys of one length are rows of one array: numpy compares them as fast as numbers, and a million
shuffled ones are found in about a second (formats/keys.Keys.find() takes them one by one, and goes
through all of them for one that is not there).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import spread
from uffdprefetch.formats.index import RecordIndex

Pair = tuple[Array, Array]

#: Records of one key above which it is not found: bounds a hostile file's cost.
DUPLICATES_MAX = 64
#: Keys sampled to find their forms: at random, and neighbours at the beginning, middle and end.
_SAMPLE_RANDOM, _SAMPLE_NEIGHBOURS = 512, 32
_NONE: Array = np.zeros(0, np.int64)


class KeyTable:
    """The keys of a RecordIndex that has some."""

    def __init__(self, index: RecordIndex) -> None:
        assert index.keys is not None
        self._keys = index.keys
        self._groups: dict[int, Pair] = {}

    def __len__(self) -> int:
        return len(self._keys.offset)

    @property
    def ranges(self) -> tuple[tuple[int, int, bool], ...]:
        return self._keys.ranges

    def key(self, record: int) -> bytes:
        return self._keys.key(record)

    @property
    def lengths(self) -> Array:
        """Length of each record's key."""
        return self._keys.length

    @cached_property
    def longest(self) -> int:
        return int(self._keys.length.max()) if len(self) else 0

    # ---- many at once ---------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> Pair:
        """(records, and for each the index into ``keys`` of its key), in the order of ``keys``;
        int64. A key with no record, or more than DUPLICATES_MAX, is left out."""
        lengths: Array = np.fromiter(map(len, keys), np.int64, len(keys))
        records, which = [_NONE], [_NONE]
        for length in np.unique(lengths).tolist():
            asked = np.flatnonzero(lengths == length)
            have, record_of = self._group(length)
            if not len(have):
                continue
            of_length = keys if len(asked) == len(keys) else [keys[i] for i in asked.tolist()]
            want = np.frombuffer(b"".join(of_length), f"S{length}")
            # sorted look-ups are five times as fast
            order = np.argsort(want, kind="stable")
            want = want[order]
            low: Array = np.atleast_1d(np.searchsorted(have, want, "left"))
            count: Array = np.searchsorted(have, want, "right") - low
            count[count > DUPLICATES_MAX] = 0
            owner, inner = spread(count)
            records.append(record_of[low[owner] + inner])
            which.append(asked[order[owner]])
        found, of = np.concatenate(records), np.concatenate(which)
        back = np.argsort(of, kind="stable")
        return found[back], of[back]

    def _group(self, length: int) -> Pair:
        """The keys of one length, ascending, as numpy's S, and the record of each. (S leaves out
        zeros at the end, which is no matter among keys of one length.)"""
        if length not in self._groups:
            self._groups[length] = self._grouped(length)
        return self._groups[length]

    def _grouped(self, length: int) -> Pair:
        if not 0 < length <= self.longest:
            return np.zeros(0, "S1"), _NONE
        keys = self._keys
        records: Array = np.flatnonzero(keys.length == length)
        if not len(records):
            return np.zeros(0, "S1"), records
        offset: Array = keys.offset[records].astype(np.int64)
        if (offset[1:] - offset[:-1] == length).all():  # side by side: no copy
            rows = keys.data[offset[0] : offset[0] + len(offset) * length]
        else:
            rows = keys.data[offset[:, None] + np.arange(length)].reshape(-1)
        have: Array = np.ascontiguousarray(rows).view(f"S{length}")
        if (have[1:] < have[:-1]).any():  # of several databases, or in an order of their own
            order = np.argsort(have, kind="stable")
            have, records = have[order], records[order]
        return have, records

    # ---- samples --------------------------------------------------------------------------------

    def sample(self) -> list[tuple[int, bytes]]:
        """(record, key) of a few hundred records of each range of keys: some at random, and runs of
        neighbours (every other key may be of another kind)."""
        source = random.Random(len(self))
        chosen: set[int] = set()
        for first, end, _ in self.ranges[:_SAMPLE_NEIGHBOURS]:
            count = end - first
            if count <= _SAMPLE_RANDOM:
                chosen.update(range(first, end))
                continue
            chosen.update(source.sample(range(first, end), _SAMPLE_RANDOM))
            for at in (first, first + count // 2, end - _SAMPLE_NEIGHBOURS):
                chosen.update(range(at, at + _SAMPLE_NEIGHBOURS))
        return [(record, self.key(record)) for record in sorted(chosen)]

    def starting_with(self, stem: bytes, most: int = 8) -> list[bytes]:
        """The first ``most`` keys with this prefix of each range in which keys ascend."""
        found: list[bytes] = []
        for first, end, ascending in self.ranges[:_SAMPLE_NEIGHBOURS]:
            if not ascending:
                continue
            at = bisect_left(range(end), stem, first, end, key=self.key)
            for record in range(at, min(at + most, end)):
                key = self.key(record)
                if not key.startswith(stem):
                    break
                found.append(key)
        return found
