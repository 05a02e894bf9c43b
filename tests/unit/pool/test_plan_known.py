# SPDX-License-Identifier: Apache-2.0
"""pool/order_eviction.py: against Belady's count, and where orders end."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from uffdprefetch.pool import order_eviction
from uffdprefetch.pool.eviction import BlockReader, Residents
from uffdprefetch.predict.order.cursor import OrderCursor
from uffdprefetch.predict.order.order import Order

BLOCK = 65536
NOBODY: list[BlockReader] = []


def residents(blocks: list[int], touched: list[int] | None = None, file: int = 0) -> Residents:
    n = len(blocks)
    return Residents(
        np.full(n, file, np.int32), np.array(blocks, np.int64),
        np.array(touched or range(1, n + 1), np.uint32), np.zeros(n, bool),
    )  # fmt: skip


def chosen(r: Residents, away: list[float], told: list[bool], count: int = 1) -> list[int]:
    rows = order_eviction.victims(
        r, NOBODY, count, np.array(away), np.array(told), BLOCK, int(r.touched.max()), 1e8
    )
    return [int(r.block[row]) for row in rows]


def test_what_is_needed_last_goes_first() -> None:
    r = residents([5, 6, 7, 8])
    assert chosen(r, [4e6, 9e6, 1e6, 2e6], [True] * 4, 3) == [6, 5, 8]


def test_what_is_used_up_goes_before_what_is_needed_the_newest_first() -> None:
    r = residents([5, 6, 7, 8], [30, 40, 10, 20])
    assert chosen(r, [np.inf, np.inf, 1e6, np.inf], [True] * 4, 4) == [6, 5, 8, 7]


def test_a_trees_page_that_is_read_all_the_time_stays() -> None:
    r = residents([1, 6, 7], [1000, 400, 900])
    away, told = [np.inf, 4e7, 9e7], [False, True, True]
    assert chosen(r, away, told, 3) == [7, 6, 1]
    old = residents([1, 6, 7], [1, 400, 2000])  # 2 s ago: at 100 MB/s that is 200 MB
    assert chosen(old, away, told, 3) == [1, 7, 6]


def test_pinned_and_spared_blocks_stay() -> None:
    r = residents([5, 6, 7, 8])
    r.pinned[1] = True
    rows = order_eviction.victims(
        r, [BlockReader(0, 7, 1, 0, 100, ahead=0)], 4, np.array([4e6, 9e6, 1e6, 2e6]),
        np.ones(4, bool), BLOCK, 4, 1e8,
    )  # fmt: skip
    assert [int(r.block[row]) for row in rows] == [5, 8]  # 6 is pinned, the reader is at 7


def guessed(
    touched: list[int], readers: list[BlockReader], rate: float, now_ms: int = 2000
) -> list[int]:
    """Of blocks 1 to 3, which no order tells of, and 6 and 7, needed after 40 and 90 MB: all, the
    first to go first."""
    r = residents([1, 2, 3, 6, 7], [*touched, 1, 1])
    away = np.array([np.inf] * 3 + [4e7, 9e7])
    told = np.array([False] * 3 + [True] * 2)
    rows = order_eviction.victims(r, readers, 5, away, told, BLOCK, now_ms, rate)
    assert np.isinf(away[:3]).all(), "it is the caller's"
    return [int(r.block[row]) for row in rows]


def test_what_no_order_tells_of_goes_by_its_age_at_the_readers_speed() -> None:
    assert guessed([1900, 1400, 900], NOBODY, 1e8) == [3, 7, 2, 6, 1]
    assert guessed([1900, 1400, 900], NOBODY, 1e7) == [7, 6, 3, 2, 1]


def test_where_the_readers_speed_is_not_known_age_counts_as_on_a_slow_link() -> None:
    now_ms = 10**6
    assert guessed([now_ms - 500, now_ms - 600, 1], NOBODY, 0.0, now_ms) == [3, 7, 2, 1, 6]


def test_what_was_touched_after_the_clock_was_read_stays() -> None:
    assert guessed([2001, 1400, 2500], NOBODY, 1e8) == [7, 2, 6, 1, 3]


def test_what_lies_on_a_readers_way_goes_by_that() -> None:
    """Not by its age; in bytes, as orders do."""
    reader = BlockReader(0, 0, 1, 0, 1200, ahead=0, behind=0)
    assert guessed([1, 1, 1], [reader], 1e8) == [7, 6, 3, 2, 1]
    behind = BlockReader(0, 4, 1, 0, 1200, ahead=0, behind=0)  # they are 1197 to 1199 blocks away
    assert guessed([2000, 2000, 2000], [behind], 1e8) == [7, 3, 2, 1, 6]


def test_used_up_blocks_are_spared_as_others_are_and_count() -> None:
    r = residents([5, 6, 7, 8])
    r.pinned[0] = True
    away, told = [np.inf, np.inf, 9e6, 1e6], [True] * 4
    assert chosen(r, away, told, 2) == [6, 7]
    assert chosen(r, away, told, 4) == [6, 7, 8]


@pytest.mark.parametrize("seed", range(6))
def test_shuffled_epochs_hit_as_often_as_belady_allows(seed: int) -> None:
    source = np.random.default_rng(seed)
    blocks, room, epochs = 200, 80, 4
    orders = [source.permutation(blocks) for _ in range(epochs)]
    assert abs(_misses(orders, blocks, room, True) - _belady(orders, room)) <= 0.01 * blocks
    # the next epoch's order is known only when it begins: what stays is as good as any other
    expected = blocks + (epochs - 1) * (blocks - room)
    assert _misses(orders, blocks, room, False) <= 1.08 * expected


def _walk(order: Any, blocks: int) -> OrderCursor:
    items = np.arange(len(order))
    return OrderCursor(Order(order * BLOCK, (order + 1) * BLOCK, items), blocks * BLOCK)


def _misses(orders: list[Any], blocks: int, room: int, ahead: bool) -> int:
    held: dict[int, int] = {}
    misses = clock = 0
    for epoch, order in enumerate(orders):
        walk = _walk(order, blocks)
        upcoming = _walk(orders[epoch + 1], blocks) if ahead and epoch + 1 < len(orders) else None
        for i, block in enumerate(order.tolist()):
            clock += 1
            if block not in held:
                misses += 1
                if len(held) >= room:
                    r = residents(list(held), list(held.values()))
                    away = walk.future(r.block, BLOCK)
                    if upcoming is not None:
                        left = walk.total_bytes - walk.position_bytes
                        never = np.isinf(away)
                        away[never] = left + upcoming.future(r.block[never], BLOCK)
                    [row] = order_eviction.victims(
                        r, NOBODY, 1, away, walk.knows(r.block, BLOCK), BLOCK, clock, 1e8
                    )
                    del held[int(r.block[row])]
            held[block] = clock
            walk.said(i + 1, clock)
    return misses


def _belady(orders: list[Any], room: int) -> int:
    sequence = [int(block) for order in orders for block in order]
    held: set[int] = set()
    misses = 0
    for i, block in enumerate(sequence):
        if block in held:
            continue
        misses += 1
        if len(held) >= room:
            rest = sequence[i + 1 :]
            next_use = {b: rest.index(b) if b in rest else len(rest) + 1 for b in held}
            held.remove(max(held, key=lambda b: next_use[b]))
        held.add(block)
    return misses


def test_no_choice_is_made_of_nothing() -> None:
    assert chosen(residents([3], [1]), [np.inf], [True], 5) == [3]
    empty = Residents(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.uint32),
                      np.zeros(0, bool))  # fmt: skip
    rows = order_eviction.victims(empty, NOBODY, 3, np.zeros(0), np.zeros(0, bool), BLOCK, 0, 0.0)
    assert len(rows) == 0


def test_distances_beyond_what_can_be_counted_are_the_farthest() -> None:
    source = random.Random(1)
    away = [source.uniform(0, 1e18) for _ in range(50)]
    r = residents(list(range(50)))
    assert set(chosen(r, away, [True] * 50, 50)) == set(range(50))
