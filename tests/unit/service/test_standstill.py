# SPDX-License-Identifier: Apache-2.0
"""How long the service stood still, by a clock of the test's own."""

from __future__ import annotations

import pytest

from uffdprefetch.base.clock import MS, Clock
from uffdprefetch.service.standstill import LEAST_NS, Standstill

SECOND = 1000 * MS


class Times:
    def __init__(self) -> None:
        self.now = self.cpu = 5 * SECOND
        self.book = Standstill(Clock(lambda: self.now, lambda: self.cpu))

    def turn(self, at_most: int, waited: int, computed: int = 0, stopped: int = 0) -> int:
        self.now += waited + computed + stopped
        self.cpu += computed
        self.book.waited(at_most)
        return self.book.ns


def test_neither_waiting_nor_computing_is_standing_still() -> None:
    times = Times()
    assert times.turn(SECOND, SECOND) == 0
    assert times.turn(30 * SECOND, 30 * SECOND) == 0
    assert times.turn(0, 0, computed=20 * SECOND) == 0
    assert times.turn(SECOND, SECOND, computed=SECOND) == 0


def test_what_a_busy_machine_takes_is_not() -> None:
    times = Times()
    for _ in range(100):
        assert times.turn(SECOND, SECOND, stopped=LEAST_NS - MS) == 0


@pytest.mark.parametrize("waited", [0, SECOND])
@pytest.mark.parametrize("computed", [0, 3 * SECOND])
def test_a_stop_counts_wherever_it_falls_but_for_the_wait_in_which_it_began(
    waited: int, computed: int
) -> None:
    times = Times()
    missed = SECOND - waited  # of a wait that was cut short, or begun by the stop
    assert times.turn(SECOND, waited, computed, stopped=8 * SECOND) == 8 * SECOND - missed
    assert times.turn(SECOND, SECOND) == 8 * SECOND - missed
    assert times.turn(SECOND, SECOND, stopped=4 * SECOND) == 12 * SECOND - missed
