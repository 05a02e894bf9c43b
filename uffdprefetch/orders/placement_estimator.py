# SPDX-License-Identifier: Apache-2.0
"""Bounds on where records lie in a file whose index is not there yet, corrected by observations.
Pure.

[LMDBIO-DM] section V-B: a reader takes the first record's size for all, and keeps for the pages
between its last part and its next one a minimum and a maximum, which it corrects when it turns out
to have been too far ahead or behind; it warms all between the two. Here the same for any distance:
the bounds are of bytes per record over stretches of 1, 2 to 3, 4 to 7, ... records, since the mean
over a long stretch varies less than over a short one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from uffdprefetch.base.arrays import Array

if TYPE_CHECKING:
    from uffdprefetch.predict.order.order import Order


#: Redundant bytes allowed for each needed one: a record with wider bounds is left to demand or to
#: the index. Redundant bytes share the bandwidth: at 1 it would be halved.
REDUNDANT_MAX = 0.5
#: Boundaries kept; beyond it every second one is dropped.
KNOWN_MAX = 1 << 16
#: Classes of stretches, by the power of two of their length in records.
_SCALES = 48


class PlacementEstimator:
    """Bounds on the offset of each record of a file in which offsets ascend with record numbers.

    Boundary b is where record b begins and b - 1 has ended, tree pages between them counting as
    either's. ``first_bytes``: boundary 0. ``stride_bytes``: initial estimate of a record's distance
    to the next. ``records`` lie before ``end_bytes`` of the file, if known (from an LMDB's meta
    page): then the mean over the whole file is known from the beginning.

    Where offsets do not ascend (an LMDB written by many transactions, which reused pages) the
    bounds become so wide that order() leaves the records out.
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
        # bytes per record over stretches of [2^k, 2^(k+1)) records, where observed
        self._least: list[float] = [math.inf] * _SCALES
        self._most: list[float] = [-math.inf] * _SCALES
        self._filled: tuple[Array, Array] | None = None
        self._arrays: tuple[Array, Array, Array] | None = None
        if records:
            mean = (end_bytes - first_bytes) / records
            self._observe(records, mean, mean)

    @property
    def known(self) -> int:
        """Boundaries observed."""
        return len(self._at)

    # ---- observations ---------------------------------------------------------------------------

    def learn(self, record: int, start: int, end: int, count: int = 1, rates: bool = True) -> None:
        """``count`` records from ``record`` on lie in [start, end) of the file. Without ``rates``
        they do not update the bytes per record, which costs a search at each scale."""
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
        """Of each scale the nearest observed boundary before and after the i-th."""
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

    # ---- estimates ------------------------------------------------------------------------------

    def rates(self) -> tuple[Array, Array]:
        """(least, most) bytes per record over stretches of [2^k, 2^(k+1)) records, for each k.

        A stretch's deviation in bytes from the longest ones' mean grows with its length: an
        observed scale deviates at least as much as the shorter ones that it contains (few of its
        stretches may have had a tree page). Between observed scales it grows with the root of the
        length, as sums of independent sizes do.
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
        """(least, most) offsets of these boundaries in the file, float64.

        From the nearest observed ones on both sides: the intersection of both bounds, or their
        union where they contradict each other (offsets that do not ascend).
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
        """The bytes to prefetch for records [records[i], +counts[i]): (starts, ends), int64, in
        whole pages, from their least possible start to their greatest possible end."""
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
        """Per record, over the longest stretch observed."""
        least, most = self.rates()
        return float(max(least[-1] + most[-1], 2.0) / 2)


def _grown(deviation_bytes: Array, seen: list[int]) -> Array:
    """For all scales, from the observed ones (see rates())."""
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
    """The order of these record numbers, with extents where known or bounded: item i is records[i].

    ``exact``: (starts, ends) of each of them in the file, -1 where not known. Of the others each
    run of successive records is one range of the file, from its least possible start to its
    greatest possible end, if that is at most 1 + redundant_max times its mean (and a page); else
    these items have no extent. None when no item has any.
    """
    from uffdprefetch.predict.order.order import Order

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
    # bytes that are needed for certain, or in the mean
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
