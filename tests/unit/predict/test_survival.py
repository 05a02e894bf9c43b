# SPDX-License-Identifier: Apache-2.0
"""How much further something goes: the law is what was seen, and what was seen last most of all."""

from __future__ import annotations

import pytest

from uffdprefetch.predict.bounds import LATELY_COUNT
from uffdprefetch.predict.survival import BINS, EDGES, Law, bin_of

FAR = 1 << 30


def goes(law: Law, length: int, dies: bool = True) -> None:
    """One comes to this length, and ends there or is seen no more."""
    law.passed(1, length)
    if dies:
        law.died(length)


def test_bins_hold_every_length_and_are_narrow() -> None:
    for length in (1, 2, 16, 17, 100, 1 << 20):
        j = bin_of(length)
        assert EDGES[j] <= length < EDGES[j + 1]
        assert length <= 16 or EDGES[j + 1] / EDGES[j] < 9 / 8
    assert bin_of(1 << 60) == BINS - 1 and EDGES[-1] == 1 << 24, "1 TiB in blocks of 64 KiB"


@pytest.mark.parametrize("length", [1, 7, 100, 5000])
def test_of_what_nothing_is_known_it_goes_twice_as_far_with_one_half(length: int) -> None:
    assert abs(Law().window(length, 0.5, FAR) - length) <= max(1, length // 50)


def test_the_surer_one_wants_to_be_the_less_far_it_goes() -> None:
    law = Law()
    windows = [law.window(64, p, FAR) for p in (0.9, 0.5, 0.1, 0.01)]
    assert windows == sorted(windows) and windows[0] < windows[-1]
    assert law.window(64, 1.0, FAR) == 0 and law.window(64, 0.0, 7) == 7
    assert law.window(64, 0.001, 100) == 100


def test_what_always_ends_at_a_length_is_followed_to_there_and_no_further() -> None:
    law = Law()
    for _ in range(50):
        goes(law, 8)
    assert law.window(4, 0.5, FAR) in (3, 4)
    assert law.hazard(bin_of(8)) > 0.95 and law.hazard(bin_of(5)) < 0.05


def test_who_ends_with_its_file_has_not_died() -> None:
    died, censored = Law(), Law()
    for _ in range(50):
        goes(died, 100)
        goes(censored, 100, dies=False)
    assert died.window(99, 0.5, FAR) < 10
    assert censored.window(99, 0.5, FAR) > 80
    assert censored.window(10, 0.8, FAR) >= 85


def test_one_that_is_seen_again_has_not_ended() -> None:
    law, other = Law(), Law()
    for each in (law, other):
        goes(each, 30)
    law.revived(30)
    assert law.hazard(bin_of(30)) < other.hazard(bin_of(30))


def test_a_new_file_is_read_as_its_kind_was() -> None:
    kind = Law()
    for _ in range(20):
        goes(Law(kind), 10)
    assert Law(kind).window(5, 0.5, FAR) in (4, 5)
    own = Law(kind)
    for _ in range(20):
        goes(own, 400, dies=False)
    assert own.window(5, 0.5, FAR) > 300


def test_what_was_long_ago_counts_less() -> None:
    law = Law()
    for _ in range(200):
        goes(law, 8)
    before = law.hazard(bin_of(8))
    for _ in range(2 * LATELY_COUNT):
        goes(law, 1000)
    assert before > 0.9 and law.hazard(bin_of(8)) < 0.5


def test_weights_stay_finite_over_a_long_run() -> None:
    law = Law()
    for _ in range(20_000):
        goes(law, 8)
    assert 0.9 < law.hazard(bin_of(8)) < 1.0


def test_the_expected_rest_is_what_is_left_of_a_scale_that_is_shorter() -> None:
    law = Law()
    for _ in range(60):
        goes(law, 1000, dies=False)
    assert law.expected(10, 50) == pytest.approx(50, rel=0.1)
    assert law.expected(1, 1e9) > law.expected(1, 50)
