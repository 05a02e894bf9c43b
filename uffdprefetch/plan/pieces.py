# SPDX-License-Identifier: Apache-2.0
"""From the pages that are needed next to requests: without those handed out already, merged. Pure.

Ranges are half-open, of pages of a file (int64), and in a set of ranges they ascend and are
disjoint. Everything here costs as much as sorting what comes in and what is held.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_NONE: Array = np.zeros(0, np.int64)


class Held:
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
        first, end, turn, last = union(first, end, turn)
        new_first, new_end = subtract(first, end, self.first, self.end)
        owner = np.searchsorted(first, new_first, "right") - 1
        asked = self._joined(new_first, new_end, turn[owner], last[owner], gap_pages)
        self._overlay(first, end, last)
        self._overlay(asked[0], asked[1], asked[3])  # what lies in the gaps, too
        return asked[0], asked[1], asked[2]

    def _joined(
        self, first: Array, end: Array, turn: Array, last: Array, gap_pages: int
    ) -> tuple[Array, Array, Array, Array]:
        if not len(first):
            return first, end, turn, last
        low, high = end[:-1], first[1:]
        held = np.searchsorted(self.end, low, "right") < np.searchsorted(self.first, high, "left")
        begins = np.flatnonzero(np.append(True, (high - low > gap_pages) | held))
        return (
            first[begins],
            end[np.append(begins[1:], len(end)) - 1],
            np.minimum.reduceat(turn, begins),
            np.maximum.reduceat(last, begins),
        )

    def _overlay(self, first: Array, end: Array, last: Array) -> None:
        """Put a set of ranges in; where there is one already, the later ``last`` counts."""
        if not len(first):
            return
        edges = np.unique(np.concatenate((first, end, self.first, self.end)))
        low, high = edges[:-1], edges[1:]
        lasts = np.maximum(
            _value(first, end, last, low), _value(self.first, self.end, self.last, low)
        )
        some = lasts >= 0
        low, high, lasts = low[some], high[some], lasts[some]
        begins: Array = np.append(True, (low[1:] != high[:-1]) | (lasts[1:] != lasts[:-1]))
        at = np.flatnonzero(begins)
        self.first, self.last = low[at], lasts[at]
        self.end = high[np.append(at[1:], len(high)) - 1]


def union(first: Array, end: Array, turn: Array) -> tuple[Array, Array, Array, Array]:
    """The union of ranges in any order as a set, adjacent ones joined: (first, end, the earliest
    turn of each, the latest)."""
    if not len(first):
        return _NONE, _NONE, _NONE, _NONE
    order = np.argsort(first, kind="stable")
    first, end, turn = first[order], np.maximum.accumulate(end[order]), turn[order]
    begins = np.flatnonzero(np.append(True, first[1:] > end[:-1]))
    return (
        first[begins],
        end[np.append(begins[1:], len(end)) - 1],
        np.minimum.reduceat(turn, begins),
        np.maximum.reduceat(turn, begins),
    )


def subtract(first: Array, end: Array, less_first: Array, less_end: Array) -> tuple[Array, Array]:
    """A set of ranges less another; what touches stays apart where the other set ends in it."""
    if not len(first) or not len(less_first):
        return first, end
    edges = np.unique(np.concatenate((first, end, less_first, less_end)))
    low, high = edges[:-1], edges[1:]
    ones: Array = np.zeros(len(first), np.int64)
    keep = _value(first, end, ones, low) == 0
    keep &= _value(less_first, less_end, np.zeros(len(less_first), np.int64), low) < 0
    return low[keep], high[keep]


def _value(first: Array, end: Array, value: Array, at: Array) -> Array:
    """For each page the value of the range that it is in, -1 outside."""
    if not len(first):
        return np.full(len(at), -1, np.int64)
    index = np.searchsorted(first, at, "right") - 1
    return np.where((index >= 0) & (at < end[index]), value[index], -1)
