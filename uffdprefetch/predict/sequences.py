# SPDX-License-Identifier: Apache-2.0
"""Rising runs through touches among which others lie (patience sorting: M. L. Fredman, Discrete
Mathematics 11, 1975). Pure."""

from __future__ import annotations

from bisect import bisect_left

#: Touches, or records, that are judged at a time, and held at the most until they are.
JUDGED = 32
#: A longest increasing subsequence of so many among the last JUDGED is a reader's way: by chance it
#: has 2 sqrt(32). Records so near to each other in an order are of one way.
WAY = 16
#: So many agree: a reader is where the last of its way were, and items of
#: the next order begin the next epoch (predict/order/epochs.py). A single one is by chance, or of
#: a worker that is late.
AGREE = 4


def longest_increasing_subsequence(units: list[int]) -> list[int]:
    """The longest rising run through these, in which others may lie between."""
    tails: list[int] = []  # places in ``units`` of the last of the best run of each length
    before: list[int] = []
    for place, unit in enumerate(units):
        length = bisect_left([units[tail] for tail in tails], unit)
        before.append(tails[length - 1] if length else -1)
        tails[length : length + 1] = [place]
    way, place = [], tails[-1] if tails else -1
    while place >= 0:
        way.append(units[place])
        place = before[place]
    return way[::-1]
