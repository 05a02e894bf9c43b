# SPDX-License-Identifier: Apache-2.0
"""Nonparametric confidence intervals of a median ([HDMLP] equation 5.1). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05


def ranks(n: int, alpha: float = ALPHA) -> tuple[int, int] | None:
    """The closest (j, k = n + 1 - j), from 1, such that the j-th and k-th smallest of n values
    enclose the median with probability 1 - alpha; None where n is too small.

    B(k - 1) - B(j - 1) >= 1 - alpha, B the distribution function of the binomial distribution with
    n trials of 1/2.
    """
    below = 0.0  # B(j - 1)
    found = None
    for j in range(1, n // 2 + 1):
        below += math.comb(n, j - 1) / 2**n
        # Symmetric: B(n - j) = 1 - B(j - 1).
        if 1 - 2 * below < 1 - alpha:
            break
        found = (j, n + 1 - j)
    return found


@dataclass(frozen=True)
class Median:
    """A median and its interval; low and high are None with too few measurements."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def half_width(self) -> float:
        """Half-width of the interval, relative to the median; infinite without one."""
        if self.low is None or self.high is None:
            return math.inf
        return (self.high - self.low) / 2 / self.value


def median(values: Sequence[float], alpha: float = ALPHA) -> Median:
    """Median of at least one value."""
    ordered = sorted(values)
    n = len(ordered)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    pair = ranks(n, alpha)
    if pair is None:
        return Median(middle, None, None, n)
    return Median(middle, ordered[pair[0] - 1], ordered[pair[1] - 1], n)
