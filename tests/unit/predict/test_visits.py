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


def worth(visits: Visits, n: int, size: int = SIZE, link: Link = LINK) -> bool:
    return visits.is_worth_it(size, size - n * 128 * 1024, n * BLOCK, BLOCK, n * 2_000_000, link)


def test_who_walks_in_steps_visits_nothing() -> None:
    assert visited(Law(), list(range(0, 1600, 16))).number == 0
    assert visited(Law(), places(100)).number > 60


def test_a_random_reader_of_a_file_that_fits_makes_it_worth_reading() -> None:
    assert worth(visited(Law(), places(300)), 300)


def test_over_a_link_that_others_keep_busy_it_is_not() -> None:
    busy = Link(300e6, 1e-3, waiting=5, beside=4)
    assert not worth(visited(Law(), places(300)), 300, link=busy)


def test_a_few_places_of_a_large_file_do_not() -> None:
    assert not worth(visited(Law(), places(20)), 20, size=4096 * MIB)


def test_where_such_readers_always_went_on_it_is_worth_it_sooner() -> None:
    law = Law()
    for seed in range(10):
        visited(law, places(2000, seed)).over()
    few = next(n for n in range(2, 400) if worth(visited(Law(law), places(n)), n))
    many = next(n for n in range(2, 400) if worth(visited(Law(), places(n)), n))
    assert few < many


def enough(visits: Visits, n: int, size: int = SIZE) -> bool:
    """After n visits to blocks that nobody had touched."""
    return visits.are_enough(size, n * BLOCK, BLOCK, LINK)


def test_all_of_a_file_is_read_when_visits_have_brought_more_than_half_of_it() -> None:
    """Where nothing is known of such files."""
    first = next(n for n in range(2, 1600) if enough(visited(Law(), places(n)), n))
    share = visited(Law(), places(first)).brought_bytes(SIZE, first * BLOCK, BLOCK, LINK) / SIZE
    assert 0.5 < share < 2 / 3, "two thirds are what has paid"


def test_where_such_readers_always_went_on_half_is_not_waited_for() -> None:
    law = Law()
    for seed in range(10):
        visited(law, places(1600, seed)).over()
    first = next(n for n in range(2, 1600) if enough(visited(Law(law), places(n)), n))
    unknown = next(n for n in range(2, 1600) if enough(visited(Law(), places(n)), n))
    assert first < unknown / 2
    stopped = Law()
    for seed in range(10):
        visited(stopped, places(unknown, seed)).over()
    assert not enough(visited(Law(stopped), places(unknown - 1)), unknown - 1)


def test_what_visits_bring_is_what_lies_around_them_too() -> None:
    visits = visited(Law(), places(400))
    assert visits.brought_bytes(SIZE, 400 * BLOCK, BLOCK, LINK) == pytest.approx(
        SIZE * (1 - (1 - 400 / 1600) ** 2)
    )
    by_page = Link(300e6, 1e-3, miss_bytes=4096)  # MADV_RANDOM
    assert visits.brought_bytes(SIZE, 400 * BLOCK, BLOCK, by_page) < 400 * 4096
    assert visits.brought_bytes(SIZE, SIZE, BLOCK, LINK) == SIZE


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


def gains(
    n: int, link: Link, spared: int = 0, each_ns: int = 9_000_000, known: Law | None = None
) -> bool:
    """After n visits to blocks that nobody had touched, a miss every so many ns."""
    visits = visited(Law(known), places(n))
    now_ns = visits.since_ns + n * each_ns
    return visits.will_gain(SIZE, n * BLOCK, spared, BLOCK, now_ns, link)


def test_of_a_file_more_is_read_where_its_visits_will_save_a_tenth_of_their_time_by_it() -> None:
    """The longer a miss takes beside its bytes the sooner: half of a file that visits will have
    brought a while later saves them time; before that it would have been for nothing."""

    def first(link: Link, spared: int = 0) -> float:
        n = next(n for n in range(2, 1600) if gains(n, link, spared))
        return visited(Law(), places(n)).brought_bytes(SIZE, n * BLOCK, BLOCK, link) / SIZE

    far, near = first(Link(300e6, 5e-3)), first(Link(300e6, 1e-3))
    assert 0.4 < far < near, "a third of the file tells nothing"
    assert first(Link(300e6, 5e-3), 3 * MIB) < far, "what was spared is saved already"
    late = round(0.6 * SIZE / BLOCK)
    assert gains(late, LINK) and not gains(late, LINK, each_ns=360_000), "four keep the link busy"


def test_where_such_readers_have_stopped_no_more_is_read() -> None:
    far, stopped = Link(300e6, 5e-3), Law()
    first = next(n for n in range(2, 1600) if gains(n, far))
    for seed in range(10):
        visited(stopped, places(first + 20, seed)).over()
    assert not gains(first, far, known=stopped)
