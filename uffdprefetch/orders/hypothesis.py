# SPDX-License-Identifier: Apache-2.0
"""One way from the samples of a data set to the records of a file. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from uffdprefetch.base.arrays import Array

Pair = tuple[Array, Array]

#: Samples whose keys are in memory at a time.
_AT_ONCE = 1 << 20
_NONE: Array = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """name: a line for people. samples: how many the data set has. _find: for samples that it has
    (int64) what records() returns."""

    name: str
    samples: int
    _find: Callable[[Array], Pair]

    def records(self, samples: Array) -> Pair:
        """(records, for each the position in ``samples`` of the sample that reads it), int64, in
        the order of ``samples``. A sample may have none, or several."""
        numbers = np.asarray(samples).astype(np.int64)
        records, which = [_NONE], [_NONE]
        for at in range(0, len(numbers), _AT_ONCE):
            part = numbers[at : at + _AT_ONCE]
            there = np.flatnonzero((part >= 0) & (part < self.samples))
            found, of = self._find(part[there])
            records.append(found)
            which.append(at + there[of])
        return np.concatenate(records), np.concatenate(which)
