# SPDX-License-Identifier: Apache-2.0
"""A budget of seconds and bytes for measurements, shared by all curves."""

from __future__ import annotations

import time
from collections.abc import Callable

from uffdprefetch.sim.measure.intervals import Median, median

#: Runs of a point: fewest for an interval ([HDMLP] equation 5.1 has none below 6), and most.
RUNS_MIN, RUNS_MAX = 6, 40
#: Half-width of the interval, relative to the median, at which a point's runs end.
NARROW = 0.05


class Budget:
    """Remaining seconds and bytes. ``clock``: time.monotonic, except in tests."""

    def __init__(
        self, seconds: float, size_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.until = clock() + seconds
        self.size_bytes = size_bytes

    @property
    def seconds(self) -> float:
        """Remaining, at least 0."""
        return max(0.0, self.until - self.clock())

    def take(self, size_bytes: int) -> bool:
        """Take ``size_bytes`` from the budget; False when fewer remain."""
        if size_bytes > self.size_bytes:
            return False
        self.size_bytes -= size_bytes
        return True


def repeat(once: Callable[[], float | None], budget: Budget, points_left: int) -> Median | None:
    """The median of runs of ``once`` (MB/s; None: it cannot go on), at least one, within this
    point's share of the remaining time and bytes. None when the first run fails."""
    until = budget.clock() + budget.seconds / max(1, points_left)
    keep_bytes = budget.size_bytes - budget.size_bytes // max(1, points_left)
    values: list[float] = []
    while len(values) < RUNS_MAX:
        if values and (budget.clock() >= until or budget.size_bytes <= keep_bytes):
            break
        value = once()
        if value is None:
            break
        values.append(value)
        if len(values) >= RUNS_MIN and median(values).half_width <= NARROW:
            break
    return median(values) if values else None
