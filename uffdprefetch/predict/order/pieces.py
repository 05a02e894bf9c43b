# SPDX-License-Identifier: Apache-2.0
"""From the pages that are needed next to requests: without those handed out already, merged. Pure.

Ranges are half-open, of pages of a file (int64), and in a set of ranges they ascend and are
disjoint. Everything here costs as much as sorting what comes in and what is held.
"""

from __future__ import annotations

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import edges, grouped, holding, overlapping, subtract

Set = tuple[Array, Array, Array]

_NONE: Array = np.zeros(0, np.int64)


class OutstandingPages:
    """The pages that were handed out and are still to be used: ``first``, ``end`` (a set of
    ranges) and ``last``, the turn after which each is done with."""

    def __init__(self) -> None:
        self.first, self.end, self.last = _NONE, _NONE, _NONE

    def forget(self, before: int) -> None:
        """Those of which no turn from ``before`` on is to come."""
        keep = self.last >= before
        if not keep.all():
            self.first, self.end, self.last = self.first[keep], self.end[keep], self.last[keep]

    def add(
        self, first: Array, end: Array, turn: Array, gap_pages: int
    ) -> tuple[Array, Array, Array]:
        """Hand out the ranges [first[i], end[i]) that are needed at turn[i], in any order, less
        what is held: (first, end, turn) of the requests, ascending in the file. Two with no more
        than ``gap_pages`` between them become one, unless a page between them is held."""
        first, end, turn, last = with_turns(first, end, turn)
        near = self._meets(first, end)
        new_first, new_end = subtract((first, end), (self.first[near], self.end[near]))
        owner = np.searchsorted(first, new_first, "right") - 1
        asked = self._joined(new_first, new_end, turn[owner], last[owner], gap_pages)
        # what lies in the gaps, too
        self._overlay(*overlaid((first, end, last), (asked[0], asked[1], asked[3])))
        return asked[0], asked[1], asked[2]

    def _meets(self, first: Array, end: Array) -> Array:
        """Which of those that are held overlap a set of ranges; bool."""
        low, high = overlapping((self.first, self.end), first, end)
        some = high > low
        ones: Array = np.zeros(len(self.first) + 1, np.int64)
        np.add.at(ones, low[some], 1)
        np.add.at(ones, high[some], -1)
        meets: Array = ones.cumsum()[:-1] > 0
        return meets

    def _joined(
        self, first: Array, end: Array, turn: Array, last: Array, gap_pages: int
    ) -> tuple[Array, Array, Array, Array]:
        if not len(first):
            return first, end, turn, last
        low, high = end[:-1], first[1:]
        one, after = overlapping((self.first, self.end), low, high)
        begins = np.flatnonzero(np.append(True, (high - low > gap_pages) | (one < after)))
        return (
            first[begins],
            end[np.append(begins[1:], len(end)) - 1],
            np.minimum.reduceat(turn, begins),
            np.maximum.reduceat(last, begins),
        )

    def _overlay(self, first: Array, end: Array, last: Array) -> None:
        """Put a set of ranges in; where there is one already, the later ``last`` counts. Only those
        that it meets are looked at: it is short, and what is held is not."""
        near = self._meets(first, end)
        first, end, last = overlaid(
            (first, end, last), (self.first[near], self.end[near], self.last[near])
        )
        far = ~near
        at = np.searchsorted(self.first[far], first) + np.arange(len(first))
        old: Array = np.ones(len(first) + int(far.sum()), np.bool_)
        old[at] = False
        for name, values in (("first", first), ("end", end), ("last", last)):
            every: Array = np.empty(len(old), np.int64)
            every[at], every[old] = values, getattr(self, name)[far]
            setattr(self, name, every)


def overlaid(one: Set, other: Set) -> Set:
    """Two sets of ranges as one, (first, end, value of each, 0 or more): where both are, the
    larger value."""
    if not len(one[0]) or not len(other[0]):
        return one if len(one[0]) else other
    cuts = edges(*one[:2], *other[:2])
    low, high = cuts[:-1], cuts[1:]
    values = np.maximum(_value(*one, low), _value(*other, low))
    some = values >= 0
    low, high, values = low[some], high[some], values[some]
    at = np.flatnonzero(np.append(True, (low[1:] != high[:-1]) | (values[1:] != values[:-1])))
    return low[at], high[np.append(at[1:], len(high)) - 1], values[at]


def with_turns(first: Array, end: Array, turn: Array) -> tuple[Array, Array, Array, Array]:
    """The union of ranges in any order, none of them empty, and what union() of base/ranges.py does
    not say: (first, end, the earliest turn of each, the latest)."""
    order, begins = grouped(first, end)
    turn = turn[order]
    return (
        first[order[begins]],
        np.maximum.reduceat(end[order], begins),
        np.minimum.reduceat(turn, begins),
        np.maximum.reduceat(turn, begins),
    )


def _value(first: Array, end: Array, value: Array, at: Array) -> Array:
    """For each page the value of the range that it is in, -1 outside."""
    index = holding((first, end), at)
    return np.where(index >= 0, value[index], -1)
