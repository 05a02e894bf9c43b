# SPDX-License-Identifier: Apache-2.0
"""Where records lie in a file whose index is not there yet: estimates with bounds, corrected by
what is seen. Pure.

Paper 2 (LMDBIO-DM), section V-B: a reader takes the first record's size for all, and keeps for the
pages between its last part and its next one a minimum and a maximum, which it corrects when it
turns out to have been too far ahead or behind; it warms all between the two. Here the same for any
distance: the bounds are of bytes for a record over stretches of 1, 2 to 3, 4 to 7, ... records, for
of uneven sizes a long stretch tells the mean much better than a short one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from uffdprefetch.base.arrays import Array

if TYPE_CHECKING:
    from uffdprefetch.predict.order.cursor import Order


#: Bytes warmed in vain that are worth it, for a byte that is needed: a record whose bounds are
#: farther apart is left to be read when it is read, or to the index. (Useless bytes take from the
#: useful ones' bandwidth; at 1 the warming would be no faster than half of the storage.)
REDUNDANT_MAX = 0.5
#: Places that are remembered; of more every second one is forgotten.
KNOWN_MAX = 1 << 16
#: Stretches are told apart by the power of two of their length in records.
_SCALES = 48


class PlacementEstimator:
    """Bounds on the place of each record of a file in which places ascend with record numbers.

    Boundary b is where record b begins and b - 1 has ended, tree pages between them counting as
    either's. ``first_bytes``: boundary 0. ``stride_bytes``: from a record's beginning to the next
    one's, the first guess. ``records`` lie before ``end_bytes`` of the file, if that is known (an
    LMDB's meta page tells): then the mean over the whole file is known from the beginning.

    Where places do not ascend after all (an LMDB that was written by many transactions, which used
    pages again) the bounds get so wide that order() leaves the records out.
    """

    def __init__(
        self,
        stride_bytes: float,
        first_bytes: int,
        end_bytes: int,
        records: int | None = None,
        page_bytes: int = 4096,
    ) -> None:
        if stride_bytes <= 0 or first_bytes < 0 or end_bytes < first_bytes:
            raise ValueError(f"records of {stride_bytes} bytes in [{first_bytes}, {end_bytes})")
        self.page_bytes = page_bytes
        self._end_bytes = end_bytes
        self._stride = float(stride_bytes)
        self._at = [0]
        self._low, self._high = [first_bytes], [first_bytes]
        # bytes for a record over stretches of [2^k, 2^(k+1)) records, where such were seen
        self._least: list[float] = [math.inf] * _SCALES
        self._most: list[float] = [-math.inf] * _SCALES
        self._filled: tuple[Array, Array] | None = None
        self._arrays: tuple[Array, Array, Array] | None = None
        if records:
            mean = (end_bytes - first_bytes) / records
            self._observe(records, mean, mean)

    @property
    def known(self) -> int:
        """How many boundaries have been seen."""
        return len(self._at)

    # ---- what was seen --------------------------------------------------------------------------

    def learn(self, record: int, start: int, end: int, count: int = 1, rates: bool = True) -> None:
        """``count`` records from ``record`` on lie in [start, end) of the file. Without ``rates``
        it is not compared with the others at all distances: thousands are learned in no time."""
        if record < 0 or count < 1 or not 0 <= start <= end:
            raise ValueError(f"records [{record}, +{count}) in [{start}, {end})")
        self._note(int(record), int(start), rates)
        self._note(int(record) + int(count), int(end), rates)
        if len(self._at) > KNOWN_MAX:
            self._at, self._low = self._at[::2], self._low[::2]
            self._high = self._high[::2]
        self._filled = self._arrays = None

    def _note(self, boundary: int, place: int, rates: bool) -> None:
        i = bisect_left(self._at, boundary)
        if i < len(self._at) and self._at[i] == boundary:
            self._low[i], self._high[i] = min(self._low[i], place), max(self._high[i], place)
        else:
            self._at.insert(i, boundary)
            self._low.insert(i, place)
            self._high.insert(i, place)
        if not rates:
            return
        low, high = self._low[i], self._high[i]
        for j in self._partners(i, boundary):
            apart = abs(boundary - self._at[j])
            if j < i:
                least, most = low - self._high[j], high - self._low[j]
            else:
                least, most = self._low[j] - high, self._high[j] - low
            self._observe(apart, least / apart, most / apart)

    def _partners(self, i: int, boundary: int) -> Iterator[int]:
        """Of each scale the nearest known boundary before and after the i-th."""
        step, j = 1, i
        while j > 0 and step <= boundary:
            j = bisect_right(self._at, boundary - step) - 1
            if j >= 0:
                step = 1 << (boundary - self._at[j]).bit_length()
                yield j
        step, j = 1, i
        while True:
            j = bisect_left(self._at, boundary + step)
            if j == len(self._at):
                return
            step = 1 << (self._at[j] - boundary).bit_length()
            yield j

    def _observe(self, apart: int, least: float, most: float) -> None:
        scale = min(apart.bit_length() - 1, _SCALES - 1)
        if least < self._least[scale]:
            self._least[scale] = least
        if most > self._most[scale]:
            self._most[scale] = most

    # ---- what follows ---------------------------------------------------------------------------

    def rates(self) -> tuple[Array, Array]:
        """(least, most) bytes for a record over stretches of [2^k, 2^(k+1)) records, for each k.

        The bytes by which a stretch deviates from the mean of the longest ones grow with its
        length: no scale that was seen counts for less than a shorter one, which it contains (few of
        it may have been seen with a tree page in them). Between scales that were seen they grow
        with the root of the length, as sums of independent sizes do.
        """
        if self._filled is None:
            seen = [scale for scale, most in enumerate(self._most) if most > -math.inf]
            mean = (self._least[seen[-1]] + self._most[seen[-1]]) / 2 if seen else self._stride
            length = 2.0 ** np.arange(_SCALES)
            below = _grown((mean - np.array(self._least)) * length, seen)
            above = _grown((np.array(self._most) - mean) * length, seen)
            self._filled = mean - below / length, mean + above / length
        return self._filled

    def places(self, boundaries: Array) -> tuple[Array, Array]:
        """(least, most) bytes of the file at which these boundaries lie, float64.

        From the nearest known ones on both sides; where these contradict each other (places that do
        not ascend) what either says.
        """
        if self._arrays is None:
            at, low, high = (np.array(each) for each in (self._at, self._low, self._high))
            self._arrays = at, low, high
        at, low, high = self._arrays
        boundaries = np.maximum(np.asarray(boundaries, np.int64), 0)
        before = np.searchsorted(at, boundaries, "right") - 1
        after = np.minimum(before + 1, len(at) - 1)
        apart = boundaries - at[before]
        least, most = self._rates_of(apart)
        first, last = low[before] + apart * least, high[before] + apart * most
        apart = at[after] - boundaries
        least, most = self._rates_of(apart)
        first2, last2 = low[after] - apart * most, high[after] - apart * least
        one_side = (apart < 0) | (boundaries == at[before])
        both_first, both_last = np.maximum(first, first2), np.minimum(last, last2)
        apart_from_each_other = both_first > both_last
        both_first[apart_from_each_other] = np.minimum(first, first2)[apart_from_each_other]
        both_last[apart_from_each_other] = np.maximum(last, last2)[apart_from_each_other]
        first = np.where(one_side, first, both_first)
        last = np.where(one_side, last, both_last)
        return np.clip(first, 0, self._end_bytes), np.clip(last, 0, self._end_bytes)

    def _rates_of(self, apart: Array) -> tuple[Array, Array]:
        least, most = self.rates()
        # frexp: 2^(e-1) <= apart < 2^e; of 0 and less it does not matter
        scale = np.clip(np.frexp(np.maximum(apart, 1))[1] - 1, 0, _SCALES - 1)
        return least[scale], most[scale]

    def ranges(self, records: Array, counts: Array | int = 1) -> tuple[Array, Array]:
        """For records [records[i], +counts[i]) what to warm: (starts, ends), int64, bytes in whole
        pages, from the least that they may begin at to the most that they may end at."""
        records = np.asarray(records, np.int64)
        starts, ends = self.places(records)[0], self.places(records + counts)[1]
        page = self.page_bytes
        first = np.floor(starts / page).astype(np.int64) * page
        return first, np.maximum(np.ceil(ends / page).astype(np.int64) * page, first)

    def range(self, record: int, count: int = 1) -> tuple[int, int]:
        """The same for ``count`` records from ``record`` on."""
        starts, ends = self.ranges(np.array([record]), count)
        return int(starts[0]), int(ends[0])

    def mean_bytes(self) -> float:
        """For a record, over the longest stretch that was seen."""
        least, most = self.rates()
        return float(max(least[-1] + most[-1], 2.0) / 2)


def _grown(deviation_bytes: Array, seen: list[int]) -> Array:
    """For all scales, from those that were seen (see rates())."""
    grown: Array = np.zeros(_SCALES)
    if not seen:
        return grown
    known: Array = np.maximum.accumulate(np.maximum(deviation_bytes[seen], 0.0))
    scales: Array = np.arange(_SCALES)
    at: Array = np.array(seen, np.int64)
    after: Any = np.searchsorted(at, scales)  # mypy takes it for a number
    before: Array = np.maximum(np.searchsorted(at, scales, "right") - 1, 0)
    apart: Array = np.maximum(scales - at[before], 0)
    grown[:] = known[before] * 2.0 ** (apart / 2)
    between = scales <= seen[-1]
    grown[between] = np.minimum(grown[between], known[after[between]])
    return grown


# ---- an order in record numbers -----------------------------------------------------------------


def order(
    records: Array,
    guess: PlacementEstimator | None,
    exact: tuple[Array, Array] | None = None,
    redundant_max: float = REDUNDANT_MAX,
) -> Order | None:
    """The order of these record numbers as far as it can be told: item i is records[i].

    ``exact``: (starts, ends) of each of them in the file, -1 where it is not known: these are taken
    as they are. Of the others each run of successive records is one stretch of the file, from the
    least that it may begin at to the most that it may end at, if that is at most 1 + redundant_max
    times its mean (and a page); else these items have no extent. None when no item has any.
    """
    from uffdprefetch.predict.order.cursor import Order

    records = np.asarray(records, np.int64)
    starts: Array = np.full(len(records), -1, np.int64)
    ends = starts.copy()
    if exact is not None:
        starts[:], ends[:] = exact
    guessed = np.flatnonzero(starts < 0)
    if guess is not None and len(guessed):
        starts[guessed], ends[guessed] = _runs(records, guessed, guess, redundant_max)
    item = np.flatnonzero(starts >= 0)
    if not len(item):
        return None
    return Order(starts[item], ends[item], item, len(records))


def _runs(
    records: Array, guessed: Array, guess: PlacementEstimator, redundant_max: float
) -> tuple[Array, Array]:
    """Starts and ends of records[guessed], -1 where it would cost too much."""
    numbers = records[guessed]
    breaks = (np.diff(numbers) != 1) | (np.diff(guessed) != 1)
    begins = np.flatnonzero(np.append(True, breaks))
    counts: Array = np.diff(np.append(begins, len(numbers)))
    run: Array = np.repeat(np.arange(len(begins)), counts)
    first, last = guess.ranges(numbers[begins], counts)
    # needed for certain, or in the mean
    sure = guess.places(numbers[begins] + counts)[0] - guess.places(numbers[begins])[1]
    wanted = np.maximum(counts * guess.mean_bytes(), sure)
    good = last - first <= (1 + redundant_max) * wanted + guess.page_bytes
    # Within a run one item's range ends where the next one's begins: nothing is asked for twice.
    # (Each run's ends are made to ascend, all runs at once: behind the widths of those before.)
    width = last - first
    before = (np.cumsum(width + 1) - width)[run] - first[run]
    inside = np.clip(guess.ranges(numbers)[1], first[run], last[run])
    ends = np.maximum.accumulate(inside + before) - before
    ends[np.append(begins[1:], len(numbers)) - 1] = last
    starts: Array = np.append(0, ends[:-1])
    starts[begins] = first
    kept = good[run]
    return np.where(kept, starts, -1), np.where(kept, ends, -1)
