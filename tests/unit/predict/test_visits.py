# SPDX-License-Identifier: Apache-2.0
"""Whether a file that is read here and there is worth reading whole."""

from __future__ import annotations

import random

import pytest

from uffdprefetch.predict.storage import Link
from uffdprefetch.predict.survival import Law
from uffdprefetch.predict.visits import Visits

BLOCK, MIB = 64 << 10, 1 << 20
LINK = Link(300e6, 1e-3)
SIZE = 100 * MIB


def visited(law: Law, places: list[int]) -> Visits:
    visits, last = Visits(law), 0
    for i, at in enumerate(places):
        visits.begins(at < last, True, i * 2_000_000)
        last = at
    return visits


def places(n: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1600) for _ in range(n)]


def worth(visits: Visits, n: int, size: int = SIZE) -> bool:
    return visits.is_worth_it(size, size - n * 128 * 1024, n * BLOCK, BLOCK, n * 2_000_000, LINK)


def test_who_walks_in_steps_visits_nothing() -> None:
    assert visited(Law(), list(range(0, 1600, 16))).number == 0
    assert visited(Law(), places(100)).number > 60


def test_a_random_reader_of_a_file_that_fits_makes_it_worth_reading() -> None:
    assert worth(visited(Law(), places(300)), 300)


def test_a_few_places_of_a_large_file_do_not() -> None:
    assert not worth(visited(Law(), places(20)), 20, size=4096 * MIB)


def test_where_such_readers_always_went_on_it_is_worth_it_sooner() -> None:
    law = Law()
    for seed in range(10):
        visited(law, places(2000, seed)).over()
    few = next(n for n in range(2, 400) if worth(visited(Law(law), places(n)), n))
    many = next(n for n in range(2, 400) if worth(visited(Law(), places(n)), n))
    assert few < many


def test_a_file_of_which_little_is_missing_is_left() -> None:
    visits = visited(Law(), places(300))
    assert not visits.is_worth_it(SIZE, SIZE // 100, SIZE, BLOCK, 600_000_000, LINK)


def test_who_maps_it_anew_for_each_batch_goes_on() -> None:
    law, kept = Law(), Law()
    visits, never_left = visited(law, places(50)), visited(kept, places(50))
    for _ in range(3):
        visits.over()
        visits.goes_on()
    assert (visits.number, visits.places) == (never_left.number, never_left.places)
    assert law.hazard(10) == pytest.approx(kept.hazard(10), rel=0.05)


def test_long_after_it_begins_anew() -> None:
    visits = visited(Law(), places(50))
    visits.over()
    visits.forget()
    assert visits.number == visits.places == visits.missed == 0 and not visits.is_over
