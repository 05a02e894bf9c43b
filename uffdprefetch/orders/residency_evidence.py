# SPDX-License-Identifier: Apache-2.0
"""Evidence of page tables on which records were read. Pure.

A fault maps neighbours too, other samples have been read ahead, and overlays or dropped pages are
missing: a share of mapped records proves nothing by itself. So the share among records that were
read under a hypothesis is compared with the share among others, by the logarithm of the likelihood
ratio between "two rates" and "one rate" (half the G statistic: Sokal and Rohlf, Biometry,
chapter 17).
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

#: Log likelihood ratio that counts as proof: one in a million by chance.
CERTAIN = 12.0
#: Least share of a true hypothesis's records that is mapped: overlays and dropped pages hide some.
TRUE_SHARE = 0.9
#: Share of a record's bytes from which it counts as mapped: faults on its neighbours map its ends.
MAPPED_SHARE = 0.5
#: Neighbours are also compared by wholly mapped records, which differ more.
_LEAST = (MAPPED_SHARE, 1 - 1e-9)
#: Bytes that a fault usually maps (fault_around_bytes): touches within them are not independent.
TOGETHER_BYTES = 64 << 10
#: Most bytes that a fault maps: a huge page of the page cache (files written recently, Linux 6.18).
AROUND_BYTES = 2 << 20


@dataclass(frozen=True)
class Share:
    """``hits`` of ``count``, each worth ``weight`` independent observations."""

    hits: int
    count: int
    weight: float = 1.0

    def __str__(self) -> str:
        return f"{self.hits} of {self.count}"

    @property
    def share(self) -> float:
        return self.hits / self.count if self.count else 0.0

    def likelihood(self, rate: float) -> float:
        """Its log likelihood at a rate."""
        rest = self.count - self.hits
        of_hits = self.hits * log(rate) if self.hits else 0.0
        return self.weight * (of_hits + (rest * log(1 - rate) if rest else 0.0))

    @property
    def below(self) -> float:
        """Log likelihood ratio that its rate is below TRUE_SHARE; 0 when its share is not."""
        if self.share >= TRUE_SHARE:
            return 0.0
        return self.likelihood(self.share) - self.likelihood(TRUE_SHARE)

    @property
    def holds(self) -> bool:
        """Whether a rate of TRUE_SHARE is plausible."""
        return self.count > 0 and self.below < CERTAIN / 4


def certainty(one: Share, other: Share) -> float:
    """Log likelihood ratio that the rate of ``one`` is the greater; negative when it is smaller."""
    if not one.count or not other.count:
        return 0.0
    hits = one.weight * one.hits + other.weight * other.hits
    both = hits / (one.weight * one.count + other.weight * other.count)
    apart = one.likelihood(one.share) + other.likelihood(other.share)
    ratio = apart - one.likelihood(both) - other.likelihood(both)
    return ratio if one.share >= other.share else -ratio


class ResidencyEvidence:
    """The mapped share of each record, asked for once."""

    def __init__(self, index: RecordIndex, present: Present) -> None:
        self.index, self._present = index, present
        self._known: Array = np.zeros(0, np.int64)
        self._shares: Array = np.zeros(0)
        self._places: Array = np.zeros(0, np.int64)

    def measure(self, records: Array) -> None:
        """Ask for the shares of these, unless they are known."""
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
        place[owner[by_length]] = starts[by_length]  # of its longest extent, assigned last
        known = np.concatenate([self._known, new])
        order = np.argsort(known)
        self._known = known[order]
        self._shares = np.concatenate([self._shares, share])[order]
        self._places = np.concatenate([self._places, place])[order]

    def share(self, records: Array, least: float = MAPPED_SHARE) -> Share:
        """Share of these measured records of which at least ``least`` is mapped."""
        at: Array = np.atleast_1d(np.searchsorted(self._known, records))
        at = at[~np.isnan(self._shares[at])]
        return _share(self._shares[at], self._places[at], least)

    def shares_of(self, ranges: Pair) -> Array:
        """The mapped share of each of these ranges of the file."""
        if not len(ranges[0]):
            return np.zeros(0)
        return np.asarray(self._present(*ranges), np.float64)

    @cached_property
    def mapped_bytes(self) -> float:
        """Mapped bytes of the whole file."""
        size = self.index.file_bytes
        starts, ends = np.array([0], np.int64), np.array([size], np.int64)
        return float(np.asarray(self._present(starts, ends))[0]) * size

    def extents(self, records: Array) -> Pair:
        """Their non-empty extents."""
        starts, ends = self.index.extents(records)
        some = starts < ends
        return starts[some], ends[some]


@dataclass(frozen=True, eq=False)
class Prediction:
    """Records under a hypothesis, ascending. ``read``: of the last samples read; ``known``: of all
    that were or may have been read; ``other``: of some that were not."""

    hypothesis: Hypothesis
    read: Array
    known: Array
    other: Array

    def seen(self, evidence: ResidencyEvidence) -> Share:
        return evidence.share(self.read)

    def proof(self, evidence: ResidencyEvidence) -> float:
        """certainty() that its records are mapped more than others."""
        return certainty(self.seen(evidence), evidence.share(self.other))

    def is_proven_beside(
        self, rival: Prediction, all_others: Array, evidence: ResidencyEvidence
    ) -> tuple[bool, bool]:
        """Whether it is proven even if the rival is true, by records that only it has: (by those
        far from the rival's, by those that a fault on the rival's may have mapped).
        ``all_others``: the records that may have been read under any other hypothesis.

        The near ones are compared with their mirror images on the rival's other side. That does not
        refute the rival: a third one's records may lie there.
        """
        starts, ends = evidence.extents(np.setdiff1d(self.read, rival.known))
        around = union(*evidence.extents(rival.known))
        near, mirrored = _mirrored(starts, ends, around, evidence.index.file_bytes)
        mirrored = _apart(mirrored, union(*evidence.extents(np.union1d(self.known, all_others))))
        shares, beyond = evidence.shares_of((starts, ends)), evidence.shares_of(mirrored)
        far = _share(shares[~near], starts[~near])
        others = evidence.share(np.setdiff1d(self.other, rival.known))
        # between two that were read, a record is mapped from both sides
        near &= ~_between(starts, ends, union(*evidence.extents(all_others)))
        close = [_share(shares[near], starts[near], least) for least in _LEAST]
        beyonds = [_share(beyond, mirrored[0], least) for least in _LEAST]
        return (
            far.holds and certainty(far, others) >= CERTAIN,
            close[0].holds
            and any(certainty(*two) >= CERTAIN for two in zip(close, beyonds, strict=True)),
        )

    def beats(self, rival: Prediction, evidence: ResidencyEvidence) -> bool:
        """Whether the records that only it has are mapped more than those that only the rival
        has."""
        only, rivals = np.setdiff1d(self.read, rival.known), np.setdiff1d(rival.read, self.known)
        return any(
            certainty(evidence.share(only, least), evidence.share(rivals, least)) >= CERTAIN
            for least in _LEAST
        )


def _share(shares: Array, places: Array, least: float = MAPPED_SHARE) -> Share:
    """Share of which at least ``least`` is mapped. Those that one fault may have mapped count as
    one observation; ``places``: their offsets."""
    if not len(shares):
        return Share(0, 0)
    apart = len(np.unique(places // TOGETHER_BYTES))
    return Share(int((shares >= least).sum()), len(shares), apart / len(shares))


def _mirrored(starts: Array, ends: Array, around: Pair, file_bytes: int) -> tuple[Array, Pair]:
    """Which ranges are so near to one of ``around`` (ascending, disjoint) that a fault there may
    map them; and their mirror images on its other side, where these are in the file."""
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
    """Which ranges have one of ``around`` within TOGETHER_BYTES on both sides."""
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
    """The ranges that overlap none of the others (ascending, disjoint)."""
    starts, ends = ranges
    first, after = overlapping(others, starts, ends)
    free = first >= after
    return starts[free], ends[free]
