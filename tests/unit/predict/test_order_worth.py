# SPDX-License-Identifier: Apache-2.0
"""predict/order/worth.py: an order in which reading ahead takes longer than it saves."""

from __future__ import annotations

import pytest

from uffdprefetch.predict.bounds import CPU_PART
from uffdprefetch.predict.order.guard import SAMPLE_BYTES, SAMPLES
from uffdprefetch.predict.order.worth import AskedInOrder, OrderWorth

TRIAL_BYTES = SAMPLES * SAMPLE_BYTES
MS = 1_000_000


def came(worth: OrderWorth, part: float, seconds: float) -> None:
    """What is asked for in a trial, in records of 256 KiB: that part of them was not there."""
    count = TRIAL_BYTES // SAMPLE_BYTES
    for number in range(count):
        worth.came(SAMPLE_BYTES, SAMPLE_BYTES * (number < part * count), seconds)


@pytest.mark.parametrize(
    ("part", "seconds", "leaves"),
    [(1.0, 2e-3, False), (1.0, 1e-4, False), (0.2, 2e-3, False), (0.2, 1e-4, True), (0, 0, True)],
)
def test_what_is_saved_is_measured_against_what_it_takes(
    part: float, seconds: float, leaves: bool
) -> None:
    """10 ms of the service's time for 256 records."""
    worth = OrderWorth()
    assert not worth.leaves_alone(0, 0)
    came(worth, part, seconds)
    assert worth.leaves_alone(50 * MS, 10 * MS) is leaves


def test_before_as_much_was_asked_for_as_tells_it_is_followed() -> None:
    worth = OrderWorth()
    assert not worth.leaves_alone(0, 0)
    worth.came(TRIAL_BYTES - 1, 0, 1.0)
    assert not worth.leaves_alone(MS, 10**12)


def test_it_is_tried_again_when_that_took_little_of_the_time() -> None:
    worth = OrderWorth()
    worth.leaves_alone(0, 0)
    came(worth, 0, 0)
    assert worth.leaves_alone(10 * MS, 5 * MS)
    assert worth.leaves_alone((10 + 10 * CPU_PART) * MS - 1, 6 * MS)
    assert not worth.leaves_alone((10 + 10 * CPU_PART) * MS, 900 * MS)
    came(worth, 1.0, 2e-3)
    assert not worth.leaves_alone(400 * MS, 910 * MS), "what was taken meanwhile is not its own"


def test_of_several_orders_each_has_its_part_of_the_time() -> None:
    asked = AskedInOrder()
    near, far = OrderWorth(of_all=asked), OrderWorth(of_all=asked)
    near.leaves_alone(0, 0), far.leaves_alone(0, 0)
    for _ in range(9):
        came(far, 1.0, 1e-2)
    came(near, 0.5, 1e-4)
    assert not near.leaves_alone(50 * MS, 100 * MS), "10 of the 100 ms, and 12 saved"


def test_the_quickest_tells_what_a_miss_takes_and_of_large_ones_each_part() -> None:
    worth = OrderWorth()
    worth.leaves_alone(0, 0)
    worth.came(TRIAL_BYTES // 2, TRIAL_BYTES // 2, 1.0)
    worth.came(4096, 4096, 1e-3)
    worth.came(TRIAL_BYTES // 2, 4096, 1e-6)  # it was under way for somebody else
    assert not worth.leaves_alone(50 * MS, 256 * MS)
    worth.came(TRIAL_BYTES, TRIAL_BYTES, 1.0)
    assert worth.leaves_alone(100 * MS, 800 * MS), "512 misses of 1 ms"


def test_where_all_was_under_way_in_part_it_is_followed() -> None:
    worth = OrderWorth()
    worth.leaves_alone(0, 0)
    worth.came(TRIAL_BYTES, TRIAL_BYTES // 2, 1e-6)
    assert not worth.leaves_alone(50 * MS, 256 * MS)
