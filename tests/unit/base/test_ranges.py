# SPDX-License-Identifier: Apache-2.0
"""Ranges in columns against the plainest model there is: Python sets of numbers."""

from __future__ import annotations

import numpy as np
import pytest
from test_intervals import runs

from uffdprefetch.base.ranges import (
    Ranges,
    covered,
    edges,
    holding,
    of_mask,
    overlapping,
    spread,
    subtract,
    total,
    union,
)

SPACE = 120


def some(rng: np.random.Generator, most: int = 12) -> Ranges:
    """Ranges in any order, empty ones too, perhaps none."""
    starts = rng.integers(0, SPACE, rng.integers(0, most))
    return starts, starts + rng.integers(-1, 9, len(starts))


def numbers(ranges: Ranges) -> set[int]:
    starts, ends = (column.tolist() for column in ranges)
    return {n for a, b in zip(starts, ends, strict=True) for n in range(a, b)}


def as_list(ranges: Ranges) -> list[tuple[int, int]]:
    return list(zip(*(column.tolist() for column in ranges), strict=True))


@pytest.mark.parametrize("seed", range(50))
def test_they_behave_as_sets_of_numbers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mine, other = some(rng), some(rng)
    one, two = union(*mine), union(*other)
    assert as_list(one) == runs(numbers(mine))  # sorted, disjoint, and joined where they touch
    assert total(one) == len(numbers(mine))
    less = subtract(one, two)
    assert numbers(less) == numbers(one) - numbers(two)
    assert (less[0][1:] >= less[1][:-1]).all()
    low = rng.integers(-3, SPACE + 20, 40)
    high = low + rng.integers(0, 15, 40)
    within = [set(range(a, b)) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    assert covered(one, low, high).tolist() == [len(numbers(one) & each) for each in within]
    for each, first, after in zip(within, *overlapping(one, low, high), strict=True):
        if each:
            met = [n for n, (a, b) in enumerate(as_list(one)) if each & set(range(a, b))]
            assert list(range(first, after)) == met
    assert [(n >= 0) for n in holding(one, low)] == [at in numbers(one) for at in low.tolist()]
    for at, n in zip(low.tolist(), holding(one, low).tolist(), strict=True):
        assert n < 0 or one[0][n] <= at < one[1][n]


@pytest.mark.parametrize("seed", range(10))
def test_a_mask_is_a_set_of_ranges(seed: int) -> None:
    mask = np.random.default_rng(seed).random(seed * 7) < 0.6
    assert as_list(of_mask(mask)) == runs(set(np.flatnonzero(mask).tolist()))


def test_edges_ascend_and_come_once() -> None:
    assert edges(np.array([4, 2]), np.array([2, 9])).tolist() == [2, 4, 9]


def test_counts_are_spread() -> None:
    owner, inner = spread(np.array([2, 0, 3]))
    assert (owner.tolist(), inner.tolist()) == ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])
