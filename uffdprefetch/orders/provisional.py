# SPDX-License-Identifier: Apache-2.0
"""A provisional order of an LMDB, from a few of its pages, before its index is there.

The first records of the order exactly, from their own leaves; of the others those that are located
closely enough (orders/placement_estimator.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from uffdprefetch.formats.lmdb_head import HeadReader, Leaves
from uffdprefetch.formats.reader import Array, FormatError, RangeReader
from uffdprefetch.orders import placement_estimator
from uffdprefetch.predict.order.order import Order

#: Most items of a provisional order: no more are read in the seconds that the index takes.
ITEMS_MAX = 1 << 16
#: Most leaves read, in the order of first use: 4 MiB of pages. A leaf holds a hundred records or
#: more, but each of a shuffled order's first records is in another one.
LEAVES_MAX = 1024
#: Time limit for reading leaves: the readers wait for the order.
SECONDS = 0.5
#: Leaves, of leaves_max, spread over the file to estimate the others from, where more are needed.
SPREAD = 64
#: Share of the held-out records that must lie within the bounds.
RIGHT_MIN = 0.9
#: Leaves whose records update the bytes per record; others only add boundaries.
COMPARED = 48
#: Leaves per read: a few round trips of eight threads on slow storage.
_AT_ONCE = 128


@dataclass(frozen=True, eq=False)
class ProvisionalOrder:
    """``order``'s item i is the i-th record asked for.

    exact: items whose extents are known; guessed: estimated; without: neither. ``how``: by what a
    record's leaf is known."""

    order: Order
    exact: int
    guessed: int
    without: int
    leaves_read: int
    how: str


def provisional_order(
    reader: RangeReader,
    records: Array,
    leaves_max: int = LEAVES_MAX,
    seconds: float = SECONDS,
    redundant_max: float = placement_estimator.REDUNDANT_MAX,
) -> ProvisionalOrder | None:
    """The order of these record numbers (of the file's index) as far as it is known without the
    index, its first ITEMS_MAX items at most. Raises OSError.

    None for anything but a whole LMDB of one database without duplicates; for records that it
    lacks; where it is not known which records are in which leaf.
    """
    records = np.asarray(records, np.int64)
    head = None
    try:
        head = HeadReader(reader)
        leaves = head.leaves()
        if leaves is None or not len(records):
            return None
        if int(records.min()) < 0 or int(records.max()) >= leaves.records:
            return None
        return _provisional(head, leaves, records, leaves_max, seconds, redundant_max)
    except (FormatError, MemoryError):
        return None  # the index says what is wrong with it
    finally:
        if head is not None:
            head.close()


def _provisional(
    head: HeadReader,
    leaves: Leaves,
    records: Array,
    leaves_max: int,
    seconds: float,
    redundant_max: float,
) -> ProvisionalOrder | None:
    items, records = len(records), records[:ITEMS_MAX]
    wanted = np.searchsorted(leaves.firsts, records, "right") - 1
    which, first_use = np.unique(wanted, return_index=True)
    which = which[np.argsort(first_use)]
    if len(which) > leaves_max:  # the rest is estimated from some spread over the file
        spread = np.linspace(0, len(leaves.numbers) - 1, min(SPREAD, leaves_max)).astype(np.int64)
        which = np.concatenate((spread, which[~np.isin(which, spread)]))[:leaves_max]
    found: list[tuple[Array, Array, Array]] = []
    end = time.monotonic() + seconds
    done = 0
    while done < len(which) and (not done or time.monotonic() < end):
        found.append(head.extents(leaves, np.sort(which[done : done + _AT_ONCE])))
        done += _AT_ONCE
    numbers, starts, ends = (np.concatenate(part) for part in zip(*found, strict=True))
    by_number = np.argsort(numbers)
    numbers, starts, ends = numbers[by_number], starts[by_number], ends[by_number]
    at = np.minimum(np.searchsorted(numbers, records), max(len(numbers) - 1, 0))
    known = numbers[at] == records if len(numbers) else np.zeros(len(records), bool)
    exact: tuple[Array, Array] = (np.full(len(records), -1), np.full(len(records), -1))
    exact[0][known], exact[1][known] = starts[at[known]], ends[at[known]]
    guess = None
    if len(numbers) and not known.all():
        guess = guess_from(leaves, numbers, starts, ends)
    order = placement_estimator.order(records, guess, exact, redundant_max)
    if order is None:
        return None
    exact_items = int(known.sum())
    guessed = len(np.unique(order.item)) - exact_items
    without = items - exact_items - guessed
    order = Order(order.starts, order.ends, order.item, items)
    return ProvisionalOrder(order, exact_items, guessed, without, min(done, len(which)), leaves.how)


def guess_from(
    leaves: Leaves, numbers: Array, starts: Array, ends: Array
) -> placement_estimator.PlacementEstimator | None:
    """An estimator from these records (ascending numbers); None when those of every fourth leaf,
    held out, are not within its bounds."""
    page = leaves.meta.page_bytes
    low: Array = starts // page * page
    high: Array = -(-ends // page) * page
    last = (leaves.meta.last_page + 1) * page
    stride = max(1.0, float((high - low).mean()))
    guess = placement_estimator.PlacementEstimator(stride, 2 * page, last, leaves.records, page)
    begins = np.flatnonzero(np.append(True, np.diff(numbers) != 1))
    counts: Array = np.diff(np.append(begins, len(numbers)))

    def learn(runs: Array) -> None:
        compared = set(runs[:: max(1, len(runs) // COMPARED)].tolist())
        for run in runs.tolist():
            begin, count = int(begins[run]), int(counts[run])
            number, start = int(numbers[begin]), int(low[begin])
            end = int(high[begin : begin + count].max())
            guess.learn(number, start, end, count, run in compared)
            # the next leaf itself lies before its first record, or does not
            guess.learn(number, start, min(end + page, last), count, run in compared)
            for inner in {0, 1, 2, 4, 8, 16, count // 4, count // 2, count - 1}:
                if run in compared:
                    i = begin + min(inner, count - 1)
                    guess.learn(number + i - begin, int(low[i]), int(high[i]))

    runs: Array = np.arange(len(begins))
    learn(runs[runs % 4 != 1])
    held = np.isin(np.repeat(runs, counts), runs[runs % 4 == 1])
    first, end = guess.ranges(numbers[held])
    right = (first <= low[held]) & (high[held] <= end)
    if not len(right) or right.mean() < RIGHT_MIN:
        return None
    learn(runs[runs % 4 == 1])
    return guess
