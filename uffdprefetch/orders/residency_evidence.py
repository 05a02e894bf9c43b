# SPDX-License-Identifier: Apache-2.0
"""What page tables say of records that should have been read. Pure.

A fault maps neighbours too, other samples have been read ahead, and overlays or dropped pages are
missing: no share of mapped records proves anything by itself. So two shares are compared, of
records that were read if something is true and of records that were not, by the logarithm of the
likelihood ratio between "two rates" and "one rate" (half the G statistic: Sokal and Rohlf,
Biometry, chapter 17).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import overlapping, union
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.orders.hypothesis import Hypothesis

Pair = tuple[Array, Array]
Present = Callable[[Array, Array], Array]

#: A likelihood ratio of e^12: chance alone gives it to one of a million.
CERTAIN = 12.0
#: Records of a true hypothesis that are mapped, at least: overlays and dropped pages hide some.
TRUE_SHARE = 0.9
#: A record counts as mapped when this share of its bytes is: the ends of one that was not read are
#: mapped around its neighbours.
MAPPED_SHARE = 0.5
#: What is whole differs more, between neighbours, than what is half mapped.
_LEAST = (MAPPED_SHARE, 1 - 1e-9)
#: A fault maps so much around it most of the time (fault_around_bytes).
TOGETHER_BYTES = 64 << 10
#: A fault maps no more than so much around it, wherever in that it was: a huge page of the page
#: cache (files written not long ago, Linux 6.18).
AROUND_BYTES = 2 << 20


@dataclass(frozen=True)
class Share:
    """``hits`` of ``count``, each of which proves as much as ``weight`` independent ones."""

    hits: int
    count: int
    weight: float = 1.0

    def __str__(self) -> str:
        return f"{self.hits} of {self.count}"

    @property
    def share(self) -> float:
        return self.hits / self.count if self.count else 0.0

    def likelihood(self, rate: float) -> float:
        """The logarithm of this one's likelihood at a rate."""
        rest = self.count - self.hits
        of_hits = self.hits * log(rate) if self.hits else 0.0
        return self.weight * (of_hits + (rest * log(1 - rate) if rest else 0.0))

    @property
    def below(self) -> float:
        """How sure it is that the rate behind it is less than TRUE_SHARE; 0 when it is not."""
        if self.share >= TRUE_SHARE:
            return 0.0
        return self.likelihood(self.share) - self.likelihood(TRUE_SHARE)

    @property
    def holds(self) -> bool:
        """Whether as good as all are hits, so far as can be said."""
        return self.count > 0 and self.below < CERTAIN / 4


def certainty(one: Share, other: Share) -> float:
    """How sure it is that the rate behind ``one`` is the greater: the logarithm of the likelihood
    ratio, negative when it is the smaller."""
    if not one.count or not other.count:
        return 0.0
    hits = one.weight * one.hits + other.weight * other.hits
    both = hits / (one.weight * one.count + other.weight * other.count)
    apart = one.likelihood(one.share) + other.likelihood(other.share)
    ratio = apart - one.likelihood(both) - other.likelihood(both)
    return ratio if one.share >= other.share else -ratio


class ResidencyEvidence:
    """What is mapped of each record that somebody asks for; asked once."""

    def __init__(self, index: RecordIndex, present: Present) -> None:
        self.index, self._present = index, present
        self._known: Array = np.zeros(0, np.int64)
        self._shares: Array = np.zeros(0)
        self._places: Array = np.zeros(0, np.int64)

    def look(self, records: Array) -> None:
        """Ask for these."""
        new = np.setdiff1d(records, self._known)
        if not len(new):
            return
        starts, ends = self.index.extents(new)
        shares = np.asarray(self._present(starts, ends), np.float64)
        owner: Array = np.repeat(np.arange(len(new)), self.index.extent_counts(new))
        lengths = (ends - starts).astype(np.float64)
        total = np.bincount(owner, lengths, len(new))
        mapped = np.bincount(owner, lengths * shares, len(new))
        # a record of no bytes shows nothing
        share = np.divide(mapped, total, out=np.full(len(new), np.nan), where=total > 0)
        place: Array = np.zeros(len(new), np.int64)
        by_length = np.argsort(lengths, kind="stable")
        place[owner[by_length]] = starts[by_length]  # of its longest extent, which is the last
        known = np.concatenate([self._known, new])
        order = np.argsort(known)
        self._known = known[order]
        self._shares = np.concatenate([self._shares, share])[order]
        self._places = np.concatenate([self._places, place])[order]

    def share(self, records: Array, least: float = MAPPED_SHARE) -> Share:
        """Of how many of these records, that have been asked for, so much is mapped."""
        at: Array = np.atleast_1d(np.searchsorted(self._known, records))
        at = at[~np.isnan(self._shares[at])]
        return _share(self._shares[at], self._places[at], least)

    def shares_of(self, ranges: Pair) -> Array:
        """How much of each of these ranges of the file is mapped."""
        if not len(ranges[0]):
            return np.zeros(0)
        return np.asarray(self._present(*ranges), np.float64)

    @cached_property
    def mapped_bytes(self) -> float:
        """Of the whole file."""
        size = self.index.file_bytes
        starts, ends = np.array([0], np.int64), np.array([size], np.int64)
        return float(np.asarray(self._present(starts, ends))[0]) * size

    def extents(self, records: Array) -> Pair:
        """Those that have bytes."""
        starts, ends = self.index.extents(records)
        some = starts < ends
        return starts[some], ends[some]


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a hypothesis says: ``read``: the records of the last samples that were read; ``known``:
    these and those of all others that were or may have been read; ``other``: of some that were not,
    as far as is known. Ascending."""

    hypothesis: Hypothesis
    read: Array
    known: Array
    other: Array

    def seen(self, sight: ResidencyEvidence) -> Share:
        return sight.share(self.read)

    def proof(self, sight: ResidencyEvidence) -> float:
        """How sure it is that the records were read because the hypothesis is true."""
        return certainty(self.seen(sight), sight.share(self.other))

    def stands(
        self, rival: Prediction, all_others: Array, sight: ResidencyEvidence
    ) -> tuple[bool, bool]:
        """Whether it is proven even if the rival is true, by records that the rival does not have:
        (by those far from the rival's, by those that a fault on the rival's may map as well).
        ``all_others``: the records that all other claims say may have been read.

        The latter are compared with what lies as far away on the other side. That is no proof that
        the rival is wrong: a third one's records may lie there.
        """
        starts, ends = sight.extents(np.setdiff1d(self.read, rival.known))
        around = union(*sight.extents(rival.known))
        near, mirrored = _mirrored(starts, ends, around, sight.index.file_bytes)
        mirrored = _apart(mirrored, union(*sight.extents(np.union1d(self.known, all_others))))
        shares, beyond = sight.shares_of((starts, ends)), sight.shares_of(mirrored)
        far = _share(shares[~near], starts[~near])
        others = sight.share(np.setdiff1d(self.other, rival.known))
        # between two that were read, a record is mapped from both sides
        near &= ~_between(starts, ends, union(*sight.extents(all_others)))
        close = [_share(shares[near], starts[near], least) for least in _LEAST]
        beyonds = [_share(beyond, mirrored[0], least) for least in _LEAST]
        return (
            far.holds and certainty(far, others) >= CERTAIN,
            close[0].holds
            and any(certainty(*two) >= CERTAIN for two in zip(close, beyonds, strict=True)),
        )

    def beats(self, rival: Prediction, sight: ResidencyEvidence) -> bool:
        """Whether what only it says is touched more than what only the rival says: a record that
        was read is mapped no less surely than one that was not."""
        only, rivals = np.setdiff1d(self.read, rival.known), np.setdiff1d(rival.read, self.known)
        return any(
            certainty(sight.share(only, least), sight.share(rivals, least)) >= CERTAIN
            for least in _LEAST
        )


def _share(shares: Array, places: Array, least: float = MAPPED_SHARE) -> Share:
    """Of how many so much is mapped. Those that one fault may have mapped together prove as much as
    one of them; ``places``: their offsets."""
    if not len(shares):
        return Share(0, 0)
    apart = len(np.unique(places // TOGETHER_BYTES))
    return Share(int((shares >= least).sum()), len(shares), apart / len(shares))


def _mirrored(starts: Array, ends: Array, around: Pair, file_bytes: int) -> tuple[Array, Pair]:
    """Which ranges are so near to one of ``around`` (ascending, apart) that a fault there may map
    them; and these, laid over to its other side, where that is in the file."""
    low, high = around
    if not len(low) or not len(starts):
        return np.zeros(len(starts), bool), (starts[:0], ends[:0])
    after: Array = np.minimum(np.searchsorted(low, starts), len(low) - 1)
    before = np.maximum(after - 1, 0)
    nearer = _gap(starts, ends, low[before], high[before]) < _gap(
        starts, ends, low[after], high[after]
    )
    at = np.where(nearer, before, after)
    near: Array = _gap(starts, ends, low[at], high[at]) < AROUND_BYTES
    both = (low[at] + high[at])[near]
    new_starts, new_ends = both - ends[near], both - starts[near]
    inside = (new_starts >= 0) & (new_ends <= file_bytes)
    return near, (new_starts[inside], new_ends[inside])


def _between(starts: Array, ends: Array, around: Pair) -> Array:
    """Which ranges have one of ``around`` near on both sides."""
    low, high = around
    after = np.searchsorted(low, starts, "right")
    lows: Array = np.append(low, np.iinfo(np.int64).max)
    highs: Array = np.append(-TOGETHER_BYTES, high)  # highs[i] is of the range before lows[i]
    both: Array = (starts - highs[after] < TOGETHER_BYTES) & (lows[after] - ends < TOGETHER_BYTES)
    return both


def _gap(starts: Array, ends: Array, low: Array, high: Array) -> Array:
    """Bytes between two ranges; not more than 0 when they touch."""
    return np.maximum(starts - high, low - ends)


def _apart(ranges: Pair, others: Pair) -> Pair:
    """Those ranges that share no byte with any of the others (ascending, apart)."""
    starts, ends = ranges
    first, after = overlapping(others, starts, ends)
    free = first >= after
    return starts[free], ends[free]
