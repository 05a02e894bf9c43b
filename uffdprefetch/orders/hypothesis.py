# SPDX-License-Identifier: Apache-2.0
"""A hypothesis: which records of a file each sample of a data set reads. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from uffdprefetch.base.arrays import Array

Pair = tuple[Array, Array]

#: Samples per batch: bounds the keys in memory.
_AT_ONCE = 1 << 20
_NONE: Array = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """name: a line for people. samples: the data set's length. _find: records() of samples below
    it (int64)."""

    name: str
    samples: int
    _find: Callable[[Array], Pair]

    def records(self, samples: Array) -> Pair:
        """(records, and for each the index into ``samples`` of its sample), int64, in the order of
        ``samples``. A sample may have none, or several."""
        numbers = np.asarray(samples).astype(np.int64)
        records, which = [_NONE], [_NONE]
        for at in range(0, len(numbers), _AT_ONCE):
            part = numbers[at : at + _AT_ONCE]
            there = np.flatnonzero((part >= 0) & (part < self.samples))
            found, of = self._find(part[there])
            records.append(found)
            which.append(at + there[of])
        return np.concatenate(records), np.concatenate(which)
