# SPDX-License-Identifier: Apache-2.0
"""predict/randomness.py: who goes in order, and who jumps about."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from uffdprefetch.base.units import GIB, KIB, MIB
from uffdprefetch.predict.bounds import LATELY_COUNT
from uffdprefetch.predict.randomness import (
    EVERY,
    JUMPS_RANDOM,
    NEAR_SHARE,
    RECENT,
    TREND,
    Access,
    RandomnessDetector,
    trend,
)

SIZE, BLOCK = 4 * GIB, 64 * KIB
#: Further from each other than what is next to a touch.
STEP = 5 * MIB


def read(
    places: Iterable[int], seen: RandomnessDetector | None = None, together: int = 1
) -> RandomnessDetector:
    """These are touched one after the other; so many are seen at a time."""
    seen = seen or RandomnessDetector(SIZE)
    for number, at in enumerate(places, seen.count):
        seen.saw(at, at + BLOCK, number // together)
    return seen


def anywhere(count: int, seed: int = 1, size: int = SIZE) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(size // BLOCK) * BLOCK for _ in range(count)]


def test_who_reads_anywhere_jumps_about() -> None:
    found = [read(anywhere(LATELY_COUNT, seed)).access for seed in range(100)]
    assert found.count(Access.JUMPS) >= 90 and Access.WALKS not in found


def test_next_to_no_random_reader_ever_walks() -> None:
    for seed in range(20):
        reader = RandomnessDetector(SIZE)
        for at in anywhere(500, seed):
            assert read([at], reader).access is not Access.WALKS


def test_so_many_jumps_it_takes() -> None:
    few = [n * BLOCK for n in range(LATELY_COUNT - JUMPS_RANDOM + 1)]
    assert read([*few, *anywhere(JUMPS_RANDOM - 1)]).access is not Access.JUMPS
    assert read([*few[1:], *anywhere(JUMPS_RANDOM)]).access is Access.JUMPS


def test_random_records_of_three_blocks_are_jumps() -> None:
    records = [at + n * BLOCK for at in anywhere(100) for n in range(4)]
    assert read(records).access is Access.JUMPS


@pytest.mark.parametrize("way", [1, -1])
def test_who_goes_in_wide_steps_walks(way: int) -> None:
    places = [SIZE // 2 + way * n * STEP for n in range(RECENT + EVERY)]
    assert read(places).access is Access.WALKS


def test_so_does_one_that_reads_a_page_of_a_tree_between_its_records() -> None:
    """One jump in six goes back to it."""
    places = [n * STEP - 3 * STEP * (n % 6 == 5) for n in range(LATELY_COUNT)]
    assert read(places).access is Access.WALKS


def test_so_do_two_threads_and_one_that_begins_again() -> None:
    both = [at for n in range(LATELY_COUNT // 2) for at in (n * STEP, SIZE // 2 + n * STEP)]
    assert read(both).access is Access.WALKS
    again = [n % (LATELY_COUNT // 2) * STEP for n in range(LATELY_COUNT)]
    assert read(again).access is Access.WALKS


def test_who_goes_on_in_order_walks_after_the_last_touches_and_jumps_no_more() -> None:
    reader = read(anywhere(LATELY_COUNT))
    read([n * BLOCK for n in range(LATELY_COUNT // 2)], reader)
    assert reader.access is Access.WALKS
    assert read([n * BLOCK for n in range(RECENT)]).access is Access.UNKNOWN
    assert read([n * BLOCK for n in range(RECENT + EVERY)]).access is Access.WALKS


def test_who_jumps_about_does_so_until_a_trend_is_sure() -> None:
    """Half of what makes a walk of others leaves it open."""
    reader = read(anywhere(LATELY_COUNT))
    assert reader.access is Access.JUMPS
    walk = [SIZE // 8 + n * STEP for n in range(LATELY_COUNT)]
    for at in walk:
        read([at], reader)
        if reader.access is not Access.JUMPS:
            break
    assert reader.access is Access.WALKS


def test_what_is_seen_together_has_no_order_of_its_own() -> None:
    """A look at a page table brings it in the order of the file."""
    at_once = [at for n in range(8) for at in sorted(anywhere(20, n))]
    assert read(at_once, together=20).access is Access.JUMPS
    walk = [n * STEP for n in range(160)]
    assert read(walk, together=20).access is Access.WALKS
    assert read(sorted(anywhere(RECENT)), together=RECENT).access is Access.UNKNOWN


def test_one_long_look_is_no_more_than_some_touches() -> None:
    reader = read(anywhere(LATELY_COUNT))
    for n in range(1000):
        reader.saw(n * STEP, n * STEP + BLOCK, 10**9)
    assert len(reader._touches) == LATELY_COUNT
    assert sum(touch[0] == 10**9 for touch in reader._touches) <= RECENT


def test_in_a_small_file_near_is_nearer() -> None:
    size = 32 * MIB
    near = size // NEAR_SHARE
    for step, access in ((near, Access.WALKS), (near + BLOCK, Access.UNKNOWN)):
        reader = RandomnessDetector(size)
        for n in range(RECENT + EVERY):
            at = n * (BLOCK + step) * (1 if access is Access.WALKS else -1) % size
            reader.saw(at, at + BLOCK, 0)
        assert reader.access is access
    assert read(anywhere(LATELY_COUNT, size=size), RandomnessDetector(size)).access is Access.JUMPS


def test_the_trend_of_chance_is_within_a_few_deviations() -> None:
    found = [trend(enumerate(anywhere(LATELY_COUNT, seed))) for seed in range(400)]
    assert abs(sum(found)) / 400 < 0.2
    assert 0.8 < sum(z * z for z in found) / 400 < 1.2, "standard deviations"
    assert max(map(abs, found)) < TREND
    ties = [(n // 8, at) for n, at in enumerate(anywhere(LATELY_COUNT))]
    assert abs(trend(ties)) < TREND < trend([(n // 8, n) for n in range(LATELY_COUNT)])
    assert trend([]) == trend([(0, 1)]) == trend([(0, 1), (0, 2)]) == 0.0
