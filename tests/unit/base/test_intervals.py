# SPDX-License-Identifier: Apache-2.0
"""IntervalSet against the plainest model there is: a Python set of byte numbers."""

from __future__ import annotations

import random

import pytest

from uffdprefetch.base.intervals import IntervalSet

SPACE = 64


def runs(numbers: set[int]) -> list[tuple[int, int]]:
    """The maximal ranges [start, end) of a set of numbers, in order."""
    found: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if found and found[-1][1] == n:
            found[-1] = (found[-1][0], n + 1)
        else:
            found.append((n, n + 1))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_it_behaves_as_a_set_of_bytes(seed: int) -> None:
    chance = random.Random(seed)
    intervals, model = IntervalSet(), set[int]()
    for _ in range(400):
        # lengths 0 and below are part of the contract: they do nothing
        start = chance.randrange(SPACE)
        end = start + chance.choice((-2, 0, 1, 2, 3, 5, 8, 20))
        what = chance.random()
        if what < 0.5:
            intervals.add(start, end)
            model |= set(range(start, end))
        elif what < 0.65:
            some = {n for n in range(start, end) if chance.random() < 0.7}
            intervals.replace(start, end, runs(some))
            model = model - set(range(start, end)) | some
        else:
            intervals.remove(start, end)
            model -= set(range(start, end))
        assert list(intervals) == runs(model)  # sorted, disjoint, and joined where they touch
        assert len(intervals) == len(runs(model))
        assert intervals.total_bytes() == len(model)
        low = chance.randrange(-3, SPACE)
        high = low + chance.randrange(0, SPACE)
        assert intervals.missing(low, high) == runs(set(range(low, high)) - model)
        at = chance.randrange(-3, SPACE + 30)
        assert intervals.contains(at) == (at in model)


def test_the_parts_that_are_missing_fill_it_up() -> None:
    """What the scheduler relies on: adding missing() of a range adds each byte once."""
    chance = random.Random(7)
    intervals = IntervalSet()
    added = 0
    for _ in range(500):
        start = chance.randrange(1 << 20)
        end = start + chance.randrange(1 << 16)
        for a, b in intervals.missing(start, end):
            intervals.add(a, b)
            added += b - a
        assert intervals.missing(start, end) == []
    assert added == intervals.total_bytes()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_not_just_so_has_changed(seed: int) -> None:
    draw, ranges = random.Random(seed), IntervalSet()
    for _ in range(30):
        at = draw.randrange(1000)
        ranges.add(at, at + draw.randint(1, 30))
    held = {(a, b - a) for a, b in ranges}
    told = [
        one if draw.random() < 0.5 else (one[0], one[1] + draw.choice((-1, 1)))
        for one in sorted(held)
    ]
    assert ranges.changed(0, 2000, told) == [one for one in told if one not in held]
    start, end = sorted(draw.sample(range(1000), 2))
    inside = [one for one in told if start <= one[0] and sum(one) <= end]
    assert ranges.changed(start, end, inside) == [one for one in inside if one not in held]


def test_neighbours_become_one_range() -> None:
    intervals = IntervalSet()
    for start in (30, 10, 20):
        intervals.add(start, start + 10)
    assert list(intervals) == [(10, 40)]


def test_taking_out_of_the_middle_leaves_both_ends() -> None:
    intervals = IntervalSet()
    intervals.add(0, 100)
    intervals.remove(40, 60)
    assert list(intervals) == [(0, 40), (60, 100)]
    assert not intervals.contains(40)
    assert intervals.contains(60)
