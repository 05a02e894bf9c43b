# SPDX-License-Identifier: Apache-2.0
"""The steps of a stream that goes one way: are they of one size, in pages or records? Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.analyse.runs import AROUND_PAGES, Runs, below_resolution

#: Share of the steps that must agree for a stride: to a page, or as multiples of one number.
NEAR, AGREE = 0.75, 0.85
#: Least steps, and largest error, of a count of records of varying size.
STEPS_MIN = 32
EXACT = 0.4
#: Largest ratio of the steps' variance to that of sums of n records, if each n-th is read: records
#: that are left out at random give more.
BY_CHANCE = 2.0
#: Least share of the way that a stride skips where its gaps are within a fault-around, which hides
#: most of them.
SKIPPED_MIN = 0.1
#: Most frequent values among which a common divisor is looked for.
VALUES_MAX = 256


@dataclass(frozen=True)
class Stride:
    """``pages``: None where it varies; ``records``: None where it is not known; ``share``: part of
    the steps that have it. ``pages`` may be broken (a record of 10 000 bytes). ``indexed``: the
    records are an index's."""

    pages: float | None = None
    records: int | None = None
    share: float = 0.0
    indexed: bool = False

    def differs(self, other: Stride) -> bool | None:
        """Whether two are not the same one; None: it cannot be told."""
        if self.indexed and other.indexed and self.records and other.records:
            return self.records != other.records
        if self.pages and other.pages:
            return not 2 / 3 <= self.pages / other.pages <= 1.5
        return None


#: Of what has none.
NO_STRIDE = Stride()


def common_divisor(values: Array) -> tuple[int, float]:
    """(d, share): the largest d that divides AGREE of the values, taking them from the most
    frequent on. A step that is not seen (its page was mapped already) makes a multiple of d."""
    found, counts = np.unique(values, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:VALUES_MAX]
    total, divisor, taken = int(counts.sum()), 0, 0
    for value, count in zip(found[order].tolist(), counts[order].tolist(), strict=True):
        divisor = int(np.gcd(divisor, value))
        taken += count
        if taken >= AGREE * total:
            break
    if divisor == 0:
        return 0, 0.0
    return divisor, float((values % divisor == 0).mean())


def _all_seen(gap: Array, stride: float) -> bool:
    """Whether no member of the stride was passed over: what is mapped hides some of them, but the
    next page after it that is a member's faults."""
    return float((gap <= stride).mean()) >= AGREE


def _in_pages(step: Array, gap: Array) -> tuple[float, float] | None:
    """(stride, share that has it) of positive steps in pages; None when they do not agree."""
    divisor, divided = common_divisor(step)
    if divisor > 1 and divided >= AGREE and _all_seen(gap, divisor):
        return float(divisor), divided
    middle = float(np.median(step))
    near = np.abs(step - middle) <= 1
    share = float(near.mean())
    if share < NEAR:
        return None
    exact = float((step[near] == middle).mean()) >= 0.95
    return (middle if exact else float(step[near].mean())), share


def _in_records(record: Array, step: Array, gap: Array) -> tuple[int, float] | None:
    """(records per step, share of the steps that are a multiple of it); ``record``: of each access,
    rising. None when records are left out at will."""
    jumps = np.diff(record)
    jumps = jumps[jumps != 0]
    if len(jumps) < 3 or (jumps > 0).mean() < AGREE:
        return None
    divisor, share = common_divisor(jumps[jumps > 0])
    span = int(record.max() - record.min())
    record_pages = float(step.sum() / max(1, span))
    if divisor < 1 or share < AGREE or not _all_seen(gap, divisor * record_pages * 2):
        return None
    return divisor, share


def _spread(values: Array) -> float:
    """The variance that the middle half of the values would have in a normal distribution."""
    middle_half: float = np.percentile(values, 75) - np.percentile(values, 25)
    return float((middle_half / 1.35) ** 2)


def regular(length: Array, step: Array) -> bool:
    """Whether records of these lengths are left out by number and not by chance: the step to the
    n-th is the sum of n records, of n times the variance of one. By chance it has more."""
    n = float(step.mean() / length.mean())
    return _spread(step) <= BY_CHANCE * n * _spread(length)


def whole(length: Array, step: Array) -> int | None:
    """Mean number of records of these lengths in a step; None where there are too few to
    tell, or it is no whole number."""
    part = float(length.mean() / step.mean())
    error = float(length.std() / length.mean()) * np.sqrt((1 + part) / len(step)) / part
    n = round(1 / part)
    return n if n >= 1 and error <= EXACT and abs(1 / part - n) <= EXACT else None


def _by_size(runs: Runs, step: Array) -> tuple[bool, int | None]:
    """(whether every n-th record is read, n) where sizes vary and no index tells: n is the way over
    what was read of it, None where that is not exact enough."""
    length = (runs.sure + runs.high) / 2 - runs.start
    part = float(length.mean() / step.mean())
    if part >= 1 or len(step) < STEPS_MIN or below_resolution(runs):
        return False, None
    if not regular(length, step):
        return False, None
    n = whole(length, step)
    return round(1 / part) >= 2, n if n is not None and n >= 2 else None


def stride_of(
    runs: Runs, step: Array, gap: Array, slack: int, record: Array | None
) -> Stride | None:
    """The stride of steps that go one way, all positive; None when they have none.

    ``gap``: pages left out at each; ``record``: number of the record of each access, rising, None
    without an index.
    """
    if len(step) < 3 or float((gap > slack).mean()) < 0.5:
        return None
    skipped = float(gap.sum() / step.sum())
    in_records = None if record is None else _in_records(record, step, gap)
    in_pages = _in_pages(step, gap)
    hidden = skipped < SKIPPED_MIN and float(np.median(gap)) < AROUND_PAGES
    if in_pages is not None and hidden:
        in_pages = None
    if in_records is not None and in_records[0] > 1:
        return Stride(in_pages[0] if in_pages else None, in_records[0], in_records[1])
    if in_pages is not None:
        return Stride(in_pages[0], in_records[0] if in_records else None, in_pages[1])
    if record is None and not hidden:
        every_nth, n = _by_size(runs, step)
        if every_nth:
            return Stride(None, n, 1.0)
    return None
