# SPDX-License-Identifier: Apache-2.0
"""Bounds on the places of records, learned from what is seen; pages missed and read in vain."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from conftest import warnings_fail
from paths import BENCH

from uffdprefetch.orders import placement_estimator
from uffdprefetch.orders.placement_estimator import PlacementEstimator, order

sys.path.insert(0, str(BENCH / "lab"))

from speculated import Followed, Part, count, stretch

pytestmark = warnings_fail
PAGE = 4096


def boundaries(pages_each: list[int], leaf_every: int = 150) -> np.ndarray:
    """Where records of so many pages begin (pages), a tree page before every so many of them."""
    tree = np.arange(len(pages_each)) % leaf_every == 0
    return np.append(0, np.cumsum(np.array(pages_each) + tree)) + 2


def sizes(seed: int, number: int, least: int, most: int) -> list[int]:
    source = random.Random(seed)
    return [source.randint(least, most) for _ in range(number)]


def at_start(stride_pages: float = 1) -> PlacementEstimator:
    return PlacementEstimator(stride_pages * PAGE, 2 * PAGE, 1 << 50)


def batches(
    place: np.ndarray, readers: int, batch: int, stride_pages: int
) -> tuple[list[int], list[int]]:
    """(missed, redundant) pages of each iteration of the paper's experiment."""
    parts = [Part(at_start(stride_pages), reader, readers, batch) for reader in range(readers)]
    missed, redundant = [], []
    for _ in range((len(place) - 1) // batch):
        missed.append(0)
        redundant.append(0)
        for part in parts:
            start, end = part.next()
            first, last = int(place[part.record]), int(place[part.record + part.count])
            pages = count([(start // PAGE, end // PAGE)], [(first, last)])
            missed[-1] += pages.missed
            redundant[-1] += pages.redundant
            part.read(first * PAGE, last * PAGE)
    return missed, redundant


# ---- the paper ----------------------------------------------------------------------------------


def test_the_first_records_size_is_the_first_guess_for_all() -> None:
    assert at_start(3).range(10, 4) == ((2 + 30) * PAGE, (2 + 42) * PAGE)


@pytest.mark.parametrize("pages", [1, 48])
@pytest.mark.parametrize("readers", [8, 32])
def test_of_equal_records_pages_are_missed_in_the_first_two_iterations_only(
    pages: int, readers: int
) -> None:
    missed, _ = batches(boundaries([pages] * 10_000), readers, 512, pages)
    assert missed[0] > 0 and sum(missed[2:]) <= readers // 4 and not any(missed[6:])


def test_redundant_pages_of_equal_records_become_a_page_or_two_for_each_reader() -> None:
    _, redundant = batches(boundaries([1] * 30_000), 32, 512, 1)
    assert max(redundant[-20:]) <= 3 * 32
    assert max(redundant[-20:]) - min(redundant[-20:]) <= 16


def test_of_uneven_records_fewer_pages_are_missed_and_more_read_in_vain_as_time_goes() -> None:
    place = boundaries(sizes(0, 30_000, 3, 48))
    missed, redundant = batches(place, 8, 512, int(place[1] - place[0]))
    third = len(missed) // 3
    assert sum(missed[-third:]) < sum(missed[:third]) / 5
    assert sum(redundant[-third:]) > sum(redundant[:third])


def test_a_batch_must_be_made_of_equal_parts() -> None:
    with pytest.raises(ValueError, match="10 records a batch, in 4 equal parts"):
        Part(at_start(), 0, 4, 10)


# ---- bounds -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_every_stretch_that_was_seen(seed: int) -> None:
    source = random.Random(seed)
    place = boundaries(sizes(seed, 3000, 1, source.choice([1, 4, 48])), source.choice([7, 150]))
    guess, seen = at_start(), []
    for _ in range(60):
        record = source.randrange(2900)
        length = source.choice([1, 1, 8, 64])
        start, end = int(place[record]) * PAGE, int(place[record + length]) * PAGE
        guess.learn(record, start, end, length)
        seen.append((record, length, start, end))
        for one, of, first, last in seen:
            low, high = guess.range(one, of)
            assert low <= first and last <= high


@pytest.mark.parametrize("seed", range(10))
def test_a_distance_that_was_seen_anywhere_is_within_the_bounds_everywhere(seed: int) -> None:
    """As the paper's readers: what their next part's distance has been, it may be again."""
    source = random.Random(seed)
    place = boundaries(sizes(seed, 4000, 1, 20))
    guess, apart = at_start(), source.randrange(2, 500)
    seen = []
    for record in range(0, 3000, 600):
        for at in (record, record + apart):
            guess.learn(at, int(place[at]) * PAGE, int(place[at + 1]) * PAGE)
        seen.append(int(place[record + apart] - place[record + 1]))
    last = 2400 + apart  # the boundary behind it is the last one that is known
    low, high = guess.places(np.array([last + apart]))
    least, most = (int(place[last + 1]) + each for each in (min(seen), max(seen)))
    assert low[0] <= least * PAGE and most * PAGE <= high[0]


def test_between_two_known_records_bounds_are_narrower_than_beyond_them() -> None:
    place = boundaries(sizes(5, 2000, 1, 20))
    guess = at_start()
    for record in (0, 1, 2, 3, 400, 800, 1200):
        guess.learn(record, int(place[record]) * PAGE, int(place[record + 1]) * PAGE)
    low, high = guess.places(np.array([1000, 1800]))
    assert high[0] - low[0] < (high[1] - low[1]) / 2


def test_the_number_of_records_tells_the_mean_before_any_is_seen() -> None:
    guess = PlacementEstimator(PAGE, 2 * PAGE, 1002 * 50 * PAGE, records=1000)
    low, high = guess.range(500)
    assert abs(low - 501 * 50 * PAGE) < 100 * PAGE and high - low < 100 * PAGE


def test_places_that_do_not_ascend_widen_the_bounds_and_break_nothing() -> None:
    guess = at_start()
    guess.learn(10, 500 * PAGE, 501 * PAGE)
    guess.learn(20, 100 * PAGE, 101 * PAGE)
    guess.learn(15, 300 * PAGE, 301 * PAGE)
    low, high = guess.range(15)
    assert low <= 300 * PAGE and high >= 301 * PAGE
    low, high = guess.range(17)
    assert 0 <= low <= high


def test_known_places_that_contradict_each_other_are_both_within_the_bounds() -> None:
    guess = at_start()
    guess.learn(10, 500 * PAGE, 501 * PAGE)
    guess.learn(20, 100 * PAGE, 101 * PAGE, rates=False)
    low, high = guess.places(np.array([15]))
    assert low[0] <= 100 * PAGE and high[0] >= 501 * PAGE


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_estimator, "KNOWN_MAX", 100)
    guess = at_start()
    for record in range(0, 2000, 2):
        guess.learn(record, (2 + record) * PAGE, (3 + record) * PAGE)
    assert guess.known <= 102
    assert guess.range(1001) == (1003 * PAGE, 1004 * PAGE)


@pytest.mark.parametrize("wrong", [(-1, 0, 1, 1), (0, 5, 4, 1), (0, -1, 4, 1), (0, 0, 1, 0)])
def test_what_cannot_be_is_refused(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError):
        at_start().learn(*wrong)


# ---- an order -----------------------------------------------------------------------------------


def test_successive_records_are_one_stretch_without_overlaps() -> None:
    place = boundaries(sizes(1, 1000, 1, 20))
    guess = at_start()
    for record in range(0, 900, 50):
        guess.learn(record, int(place[record]) * PAGE, int(place[record + 1]) * PAGE)
    records = np.arange(20, 700)
    found = order(records, guess)
    assert found is not None and found.items == len(records)
    assert (found.item == np.arange(len(records))).all()
    assert (found.starts[1:] == found.ends[:-1]).all()
    assert found.starts[0] <= place[20] * PAGE and found.ends[-1] >= place[700] * PAGE


def test_runs_of_records_do_not_disturb_each_other() -> None:
    place = boundaries([1] * 1000)
    guess = at_start()
    for record in range(0, 1000, 10):
        guess.learn(record, int(place[record]) * PAGE, int(place[record + 1]) * PAGE)
    records = np.array([700, 701, 702, 100, 101, 500, 30, 31, 32, 33])
    found = order(records, guess, redundant_max=2.0)
    assert found is not None
    for item, start, end in zip(found.item, found.starts, found.ends, strict=True):
        assert abs(start - place[records[item]] * PAGE) <= 3 * PAGE
        assert start <= end <= start + 6 * PAGE


def test_a_record_whose_bounds_cost_too_much_is_left_out() -> None:
    place = boundaries(sizes(1, 1000, 3, 48))
    guess = at_start()
    for record in (0, 1, 2, 3, 500, 501):
        guess.learn(record, int(place[record]) * PAGE, int(place[record + 1]) * PAGE)
    found = order(np.array([500, 250, 501]), guess)
    assert found is not None and found.item.tolist() == [0, 2] and found.items == 3
    assert order(np.array([250]), guess) is None
    assert order(np.array([250]), guess, redundant_max=1e9) is not None


def test_places_that_are_known_are_taken_as_they_are() -> None:
    exact = (np.array([100, -1, 7]), np.array([200, -1, 7]))
    found = order(np.array([3, 4, 5]), None, exact)
    assert found is not None and found.items == 3
    assert (found.item.tolist(), found.starts.tolist(), found.ends.tolist()) == (
        [0, 2], [100, 7], [200, 7],
    )  # fmt: skip


# ---- following ----------------------------------------------------------------------------------


def test_touches_in_order_teach_the_places_of_its_records() -> None:
    place = boundaries([4] * 500)
    guess, records = at_start(4), np.arange(0, 500, 5)
    follower = Followed(guess, records)
    for record in records[:50].tolist():
        at = int(place[record + 1]) - 4
        assert follower.touched(at * PAGE, (at + 4) * PAGE) == record
    low, high = guess.range(int(records[50]))
    assert low <= place[records[50]] * PAGE and place[records[50] + 1] * PAGE <= high
    assert high - low <= 8 * PAGE


def test_a_record_read_early_is_known_by_its_bounds() -> None:
    follower = Followed(at_start(4), np.arange(100))
    assert follower.touched((2 + 40) * PAGE, (2 + 44) * PAGE) == 10
    assert follower.touched(2 * PAGE, 6 * PAGE) == 0


def test_a_tree_page_teaches_nothing() -> None:
    follower = Followed(at_start(4), np.arange(100))
    assert follower.touched(5000 * PAGE, 5001 * PAGE) is None
    assert follower.touched(2 * PAGE, 6 * PAGE) == 0


def test_after_the_last_record_nothing_is_learned() -> None:
    follower = Followed(at_start(4), [7])
    assert follower.touched(30 * PAGE, 34 * PAGE) == 7
    assert follower.touched(34 * PAGE, 38 * PAGE) is None


# ---- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_counts_are_those_of_the_sets_of_pages(seed: int) -> None:
    source = random.Random(seed)

    def ranges() -> list[tuple[int, int]]:
        starts = [source.randrange(60) for _ in range(source.randrange(6))]
        return [(start, start + source.randrange(10)) for start in starts]

    def pages(of: list[tuple[int, int]]) -> set[int]:
        return {page for first, end in of for page in range(first, end)}

    warmed, touched = ranges(), ranges()
    warm, used = pages(warmed), pages(touched)
    assert count(warmed, touched) == (len(used), len(warm), len(used - warm), len(warm - used))


def test_the_stretch_that_most_touches_lie_in_is_found_among_tree_pages() -> None:
    pages = np.array([0, 1, 900, *range(5000, 5020), *range(5022, 5030), 7000])
    assert stretch(pages) == (5000, 5030)
    assert stretch(np.array([3])) == (3, 4)
