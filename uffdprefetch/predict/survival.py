# SPDX-License-Identifier: Apache-2.0
"""How much further something goes that has come so far: survival analysis of those that have ended.

The Kaplan-Meier estimator on a grid of lengths: of those that came into a bin, the share that ended
in it is its hazard; the product of what the hazards leave is the probability to come further. One
that ends at the end of its file, or where another has been, is *censored*: it came so far, and has
not died. Each law is drawn to the one above it (a file's to its kind's, that to the run's, that to
a power law), which counts as one observation; what was seen earlier counts less and less. Lengths
are counts: blocks of a stream, touches, steps.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from itertools import pairwise

from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_COUNT

#: Bins: each length up to 16, from there on eight an octave, up to 2**24 (1 TiB in blocks of
#: 64 KiB): what lies in a bin differs by less than an eighth.
_OCTAVES = 20
EDGES = [*range(1, 17), *sorted({int(16 * 2 ** (k / 8)) for k in range(1, 8 * _OCTAVES + 1)})]
_LOG = [math.log(edge) for edge in EDGES]
_WIDTH = [after - before for before, after in pairwise(_LOG)]
BINS = len(_WIDTH)
#: Where nothing is known P(T > x) = 1 / x: twice as far with probability one half, which is what
#: windows that double suppose.
_PRIOR = [1 - math.exp(-width) for width in _WIDTH]


def bin_of(length: int) -> int:
    """The bin of a length of at least 1."""
    return min(bisect_right(EDGES, length) - 1, BINS - 1)


class Law:
    """Of one kind of thing. ``above``: the law of a larger kind, None for the power law."""

    def __init__(self, above: Law | None = None) -> None:
        self.above = above
        self._came = [0.0] * BINS
        self._ended = [0.0] * BINS
        self._one = 1.0

    def passed(self, before: int, after: int) -> None:
        """One has come from length ``before`` to ``after``, through the bins in between."""
        first, last = bin_of(before), bin_of(after)
        law: Law | None = self
        while law is not None and last > first:
            for j in range(first, last):
                law._came[j] += law._one
            law = law.above

    def died(self, length: int) -> None:
        """One has ended at this length."""
        j = bin_of(length)
        law: Law | None = self
        while law is not None:
            law._ended[j] += law._one
            law._came[j] += law._one
            law._age()
            law = law.above

    def revived(self, length: int) -> None:
        """One of which died(length) was said goes on."""
        j = bin_of(length)
        law: Law | None = self
        while law is not None:
            law._ended[j] = max(0.0, law._ended[j] - law._one)
            law._came[j] = max(0.0, law._came[j] - law._one)
            law = law.above

    def _age(self) -> None:
        self._one *= 2 ** (1 / LATELY_COUNT)
        if self._one > 1 / sys.float_info.epsilon:  # all are scaled, long before a float is full
            self._came = [value / self._one for value in self._came]
            self._ended = [value / self._one for value in self._ended]
            self._one = 1.0

    def hazard(self, j: int) -> float:
        """The probability to end in bin ``j`` for one that has come into it."""
        above = self.above.hazard(j) if self.above is not None else _PRIOR[j]
        # the law above counts as one observation; of no length is one more certain
        share = (self._ended[j] + self._one * above) / (self._came[j] + self._one)
        return min(1 - sys.float_info.epsilon, share)

    def window(self, length: int, probability: float, most: int) -> int:
        """The largest w of at most ``most`` such that one of this length comes to length + w with
        at least this probability."""
        if probability >= 1 or most <= 0:
            return 0
        if probability <= 0:
            return most
        left = -math.log(probability)
        j, at = bin_of(length), math.log(length)
        end = length + most
        while j < BINS and EDGES[j] < end:
            drop = -math.log1p(-self.hazard(j)) / _WIDTH[j]  # by logarithm of the length
            span = _LOG[j + 1] - at
            if drop * span > left:
                return min(most, max(0, int(math.exp(at + left / drop)) - length))
            left -= drop * span
            j, at = j + 1, _LOG[j + 1]
        return most

    def expected(self, length: int, scale: float) -> float:
        """The mean of how much further one of this length comes, each unit of that counted by
        exp(-further / scale)."""
        alive, at, kept, total = 1.0, float(length), 1.0, 0.0
        for j in range(bin_of(length), BINS):
            end = EDGES[j + 1]
            part = math.log(end / at) / _WIDTH[j]
            after = alive * math.exp(part * math.log1p(-self.hazard(j)))
            keeps = math.exp((length - end) / scale)
            total += (alive + after) / 2 * (kept - keeps)
            alive, at, kept = after, float(end), keeps
            if alive * kept < sys.float_info.epsilon:
                break
        return (total + alive * kept) * scale


class Laws:
    """How far streams, visits and chains of steps go, of all and by kind of file."""

    def __init__(self) -> None:
        self._streams, self._visits, self.steps = Law(), Law(), Law()
        self._kinds: dict[tuple[str, str], tuple[Law, Law]] = {}

    def of(self, kind: tuple[str, str]) -> tuple[Law, Law]:
        """Of streams and of visits, in files of this directory and suffix."""
        laws = self._kinds.get(kind)
        if laws is None:
            if len(self._kinds) >= ENTRIES_MAX:
                del self._kinds[next(iter(self._kinds))]
            laws = self._kinds[kind] = Law(self._streams), Law(self._visits)
        return laws
