# SPDX-License-Identifier: Apache-2.0
"""Where a process begins next: by the step that came after such a step before."""

from __future__ import annotations

from itertools import accumulate

from uffdprefetch.predict.steps import STEPS_MAX, Steps
from uffdprefetch.predict.storage import Link
from uffdprefetch.predict.survival import Law

BLOCK, LINK = 64 << 10, Link(300e6, 1e-3)


def begun(places: list[int]) -> Steps:
    steps = Steps(Law())
    for at in places:
        steps.begins(at)
    return steps


def told(steps: Steps, ahead: int = 64) -> list[int]:
    return steps.places(1, BLOCK, ahead * BLOCK, LINK)


def test_a_stride_that_holds_is_told_further_and_further() -> None:
    found = [len(told(begun(list(range(0, 32 * n, 32))))) for n in (2, 4, 10, 40)]
    assert found[0] == 0 and found == sorted(found) and found[-1] > 8
    assert told(begun(list(range(0, 320, 32))))[0] == 320


def test_columns_of_row_groups_are_a_chain_of_several_steps() -> None:
    places = list(accumulate([0] + [24, 130, 310] * 20))
    expected = list(accumulate([places[-1]] + [24, 130, 310] * 2))[1:]
    found = told(begun(places), ahead=6)
    assert found and found == expected[: len(found)]


def test_records_of_nearly_one_length_are_a_chain_too() -> None:
    assert told(begun([int(31.6 * i) for i in range(12)]))


def test_a_step_that_was_not_told_ends_the_chain() -> None:
    steps = begun(list(range(0, 640, 32)))
    assert not steps.begins(5000)
    assert steps.right == 0 and told(steps) == []


def test_random_places_are_none() -> None:
    assert told(begun([17, 900, 33, 4000, 250, 7, 1800])) == []


def test_no_more_is_told_than_a_reader_may_need_meanwhile() -> None:
    steps = begun(list(range(0, 32 * 60, 32)))
    assert len(told(steps, ahead=4)) <= 4


def test_few_steps_are_remembered() -> None:
    steps = begun([i * i for i in range(100)])
    assert len(steps._next) <= STEPS_MAX
