# SPDX-License-Identifier: Apache-2.0
"""predict/order/cursor.py: what is handed out, against a model that counts pages one by one, and
where
readers are, however they read."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import warnings_fail
from walked_orders import GIB, KIB, MIB, PAGE, fixed_records, shuffled

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.orders import extents_file
from uffdprefetch.predict import window
from uffdprefetch.predict.order.cursor import OrderCursor, OrderRange, lookahead_bytes
from uffdprefetch.predict.order.extents import OrderExtents
from uffdprefetch.predict.order.order import Order
from uffdprefetch.predict.order.seen import SeenCursor
from uffdprefetch.predict.storage import Storage

pytestmark = warnings_fail

SEEDS = range(6)


def any_order(rng: random.Random, file_bytes: int) -> Order:
    """Items of none to three extents of all sizes, some of them empty, some shared, some again."""
    kinds = [(rng.randrange(file_bytes), rng.choice((0, 1, 100, PAGE, 9 * PAGE, 3 * MIB)))
             for _ in range(rng.randint(1, 60))]  # fmt: skip
    starts, ends, item = [], [], []
    count = rng.randint(1, 200)
    for number in range(count):
        for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 3))):
            start, length = rng.choice(kinds)
            if rng.random() < 0.5:
                start = rng.randrange(file_bytes)
            starts.append(start)
            ends.append(min(file_bytes, start + length))
            item.append(number)
    if not starts:
        starts, ends, item = [0], [1], [count - 1]
    return Order(np.array(starts), np.array(ends), np.array(item), count)


def pages_of(start: int, end: int) -> range:
    return range(start // PAGE, -(-end // PAGE)) if end > start else range(0)


def extents(order: Order) -> list[tuple[int, int, int]]:
    return list(zip(order.starts.tolist(), order.ends.tolist(), order.item.tolist(), strict=True))


class Model:
    """The plan byte by byte of the definition: which pages the plan bytes [a, b) need."""

    def __init__(self, order: Order) -> None:
        self.parts: list[tuple[int, int, int, int]] = []  # coordinate, its end, start, item
        at = 0
        for start, end, item in extents(order):
            self.parts.append((at, at + end - start, start, item))
            at += end - start
        self.total = at

    def pages(self, first: int, end: int) -> set[int]:
        found: set[int] = set()
        for low, high, start, _ in self.parts:
            a, b = max(low, first), min(high, end)
            if a < b:
                found.update(pages_of(start + a - low, start + b - low))
        return found

    def first_need(self, page: int, first: int, end: int) -> int:
        """The coordinate of the first byte in [first, end) that lies in the page."""
        for low, high, start, _ in self.parts:
            a, b = max(low, first), min(high, end)
            if a < b and page in pages_of(start + a - low, start + b - low):
                return max(a, low + page * PAGE - start)
        raise AssertionError(f"nobody needs page {page} in [{first}, {end})")


def read_in_order(order: Order) -> Iterator[list[tuple[int, int]]]:
    """Item by item: the touches of it, a page each."""
    by_item: list[list[tuple[int, int]]] = [[] for _ in range(order.items)]
    for start, end, item in extents(order):
        by_item[item] += [(page * PAGE, page * PAGE + PAGE) for page in pages_of(start, end)]
    yield from by_item


# ---- what is handed out -------------------------------------------------------------------------


def check_pieces(
    model: Model,
    walk: SeenCursor,
    pieces: list[OrderRange],
    before: int,
    file_bytes: int,
    gap: int,
) -> set[int]:
    """What one due() has handed out, against the definition; the pages."""
    position, sent = walk.position_bytes, walk.sent_bytes
    held = model.pages(position, max(before, position))
    new = model.pages(max(before, position), sent)
    out: list[int] = []
    assert [p.need_bytes for p in pieces] == sorted(p.need_bytes for p in pieces)
    for piece in pieces:
        assert 0 <= piece.start < piece.end <= file_bytes
        assert piece.start % PAGE == 0
        assert piece.end % PAGE == 0 or piece.end == file_bytes
        pages = pages_of(piece.start, piece.end)
        out += pages
        assert pages[0] in new and pages[-1] in new  # no longer than needed
        unneeded = 0
        for page in pages:
            unneeded = 0 if page in new else unneeded + 1
            assert unneeded * PAGE <= gap
            if page in new:
                assert piece.need_bytes <= model.first_need(page, max(before, position), sent)
        assert max(before, position) <= piece.need_bytes + MIB and piece.need_bytes < sent
    assert len(out) == len(set(out))  # each page once
    assert not set(out) & held  # nor one that was handed out and is still to be used
    return set(out)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_each_page_is_handed_out_before_it_is_needed_and_once_a_window(seed: int) -> None:
    rng = random.Random(seed)
    file_bytes = rng.randint(1, 40 * MIB)
    order, gap = any_order(rng, file_bytes), rng.choice((0, PAGE, 64 * KIB, MIB))
    model = Model(order)
    walk = SeenCursor(
        order, file_bytes, page_bytes=PAGE, merge_gap_bytes=gap,
        slice_bytes=rng.choice((PAGE, MIB, 4 * MIB)),
    )  # fmt: skip
    ahead = rng.choice((1, PAGE, 300 * KIB, 5 * MIB, 100 * MIB))
    assert walk.total_bytes == model.total
    out: set[int] = set()
    for number, touches in enumerate(read_in_order(order)):
        if rng.random() < 0.9:
            before = walk.sent_bytes
            out |= check_pieces(model, walk, walk.due(ahead), before, file_bytes, gap)
            position = walk.position_bytes
            assert walk.sent_bytes >= min(model.total, position + ahead)
            assert walk.sent_bytes <= position + ahead + max(ahead // 4, 1) + MIB
            assert model.pages(position, walk.sent_bytes) <= out
            assert walk.due(ahead) == []
        for touch in touches:
            walk.saw(*touch, number)
        walk.said(number + 1, number)
        assert walk.position >= number + 1
    assert walk.wrong is None
    assert (walk.position, walk.position_bytes) == (order.items, model.total)


def test_what_is_between_position_and_sent_is_not_handed_out_again_but_later_it_is() -> None:
    size, far = 32 * KIB, 400
    near = fixed_records(np.array([*range(8), *range(8)]), size)
    walk = SeenCursor(near, GIB)
    assert walk.due(GIB) == [OrderRange(0, 8 * size, 0)]
    again = fixed_records(np.array([*range(8), *range(100, 100 + far), *range(8)]), size)
    walk = SeenCursor(again, GIB)
    pieces = []
    for item in range(again.items):
        pieces += walk.due(MIB)
        walk.said(item + 1, item)
    assert sum(piece.start < 8 * size for piece in pieces) == 2
    assert sum(piece.end - piece.start for piece in pieces) == (8 + far + 8) * size


def test_a_gap_within_a_slice_is_read_over_and_none_beyond_it() -> None:
    rows = np.array([0, 2, 4, 100, 102, *range(200, 211), 1])  # 1 lies in a gap, needed last
    order = fixed_records(rows, PAGE)
    walk = SeenCursor(order, MIB, merge_gap_bytes=PAGE, slice_bytes=5 * PAGE)
    assert walk.due(20 * PAGE - 1)[:2] == [
        OrderRange(0, 5 * PAGE, 0), OrderRange(100 * PAGE, 103 * PAGE, 3 * PAGE)
    ]  # fmt: skip
    assert walk.sent_bytes == walk.total_bytes
    apart = SeenCursor(order, MIB, merge_gap_bytes=PAGE, slice_bytes=5 * PAGE)
    assert sum(piece.end - piece.start for piece in apart.due(GIB)) == (5 + 3 + 11) * PAGE
    none = SeenCursor(order, MIB, merge_gap_bytes=0)
    assert len(none.due(GIB)) == 5  # 0 to 2 and 1 are neighbours
    sliced = SeenCursor(fixed_records(np.array([0, 50, 1, 51]), PAGE), MIB, slice_bytes=2 * PAGE)
    assert sliced.due(GIB) == [
        OrderRange(0, PAGE, 0), OrderRange(50 * PAGE, 51 * PAGE, PAGE),
        OrderRange(PAGE, 2 * PAGE, 2 * PAGE), OrderRange(51 * PAGE, 52 * PAGE, 3 * PAGE),
    ]  # fmt: skip


def test_pieces_end_with_the_file() -> None:
    order = Order(np.array([5000, 9000]), np.array([9001, 20_000]), np.array([0, 1]))
    assert SeenCursor(order, 9100).due(MIB) == [OrderRange(PAGE, 9100, 0)]
    assert SeenCursor(order, 0).due(MIB) == []


def test_a_long_item_is_handed_out_and_passed_piece_by_piece() -> None:
    order = Order(np.array([0, GIB]), np.array([GIB, GIB + PAGE]), np.array([0, 1]))
    walk = SeenCursor(order, 2 * GIB)
    out = walk.due(16 * MIB)
    assert sum(piece.end - piece.start for piece in out) == 16 * MIB
    assert walk.saw(10 * MIB, 10 * MIB + PAGE, 1) == 1
    assert walk.position == 0
    assert 2 * MIB < walk.position_bytes <= 11 * MIB
    for at in range(0, GIB, MIB):
        walk.saw(at, at + PAGE, 2)
    assert (walk.position, walk.position_bytes, walk.wrong) == (1, GIB, None)


# ---- where the reader is ------------------------------------------------------------------------


def test_position_is_behind_the_foremost_record_that_was_touched() -> None:
    size = 64 * KIB
    rows = shuffled(1000, 1)
    walk = SeenCursor(fixed_records(rows, size, 512), GIB)
    seen = []
    for item in (0, 2, 1, 3, 7, 5, 4, 6):
        at = 512 + int(rows[item]) * size
        seen.append((walk.saw(at + PAGE, at + 2 * PAGE, item), walk.position))
    assert seen == [(1, 1), (1, 3), (0, 3), (1, 4), (1, 8), (0, 8), (0, 8), (0, 8)]
    at = 512 + int(rows[2]) * size
    assert (walk.saw(at + PAGE, at + 2 * PAGE, 9), walk.position) == (0, 8)  # behind


def test_a_touch_may_be_of_several_records_and_a_record_have_several_touches() -> None:
    order = fixed_records(np.arange(1000), 100)  # 40 to a page
    walk = SeenCursor(order, MIB)
    assert walk.saw(0, PAGE, 1) == 41
    assert walk.position == 41
    assert walk.saw(PAGE, 2 * PAGE, 2) == 41  # and the 40th once more
    assert walk.saw(0, PAGE, 3) == 0
    large = SeenCursor(fixed_records(shuffled(50, 3), 64 * PAGE), GIB)
    at = int(shuffled(50, 3)[0]) * 64 * PAGE
    assert [large.saw(at + i * PAGE, at + i * PAGE + PAGE, i) for i in range(64)] == [1] + 63 * [0]


def test_bytes_of_no_record_are_neither_right_nor_wrong() -> None:
    walk = SeenCursor(fixed_records(np.arange(100), MIB, header=MIB), GIB)
    for i in range(1000):
        assert walk.saw(i % 256 * PAGE, (i % 256 + 1) * PAGE, i) == 0
        assert walk.saw(200 * MIB, 201 * MIB, i) == 0
    assert (walk.position, walk.wrong, walk.stray) == (0, None, True)


def test_an_item_that_occurs_again_matches_its_next_occurrence() -> None:
    a, b, c = 0, 50, 70
    walk = SeenCursor(fixed_records(np.array([a, b, a, a, c]), PAGE), MIB)
    positions = []
    for row in (a, b, a, a, c):
        walk.saw(row * PAGE, row * PAGE + PAGE, 1)
        positions.append(walk.position)
    assert positions == [1, 2, 3, 4, 5]


def test_later_pages_of_a_record_being_read_are_not_its_next_occurrence() -> None:
    size = 16 * PAGE
    rows = np.array([3, *range(10, 100), 3, *range(100, 200)])
    walk = SeenCursor(fixed_records(rows, size), GIB)
    for page in range(16):
        walk.saw(3 * size + page * PAGE, 3 * size + page * PAGE + PAGE, page)
        assert walk.position == 1
    for row in rows[1:91].tolist():
        walk.saw(row * size, row * size + PAGE, row)
    assert walk.saw(3 * size, 3 * size + PAGE, 200) == 1
    assert walk.position == 92


def test_epochs_in_one_order_are_walked_through_one_after_the_other() -> None:
    rows = np.concatenate([shuffled(300, epoch) for epoch in range(3)])
    walk = SeenCursor(fixed_records(rows, 16 * KIB), GIB)
    for item, row in enumerate(rows.tolist()):
        walk.saw(row * 16 * KIB, row * 16 * KIB + PAGE, item)
        assert item - 1 <= walk.position <= item + 1
    assert walk.wrong is None


@pytest.mark.parametrize("every", [3, 32])
def test_a_sensor_that_sees_few_records_leaves_no_more_than_half_a_lookahead(every: int) -> None:
    rows, size, ahead = shuffled(20_000, 5), 128 * KIB, 16 * MIB
    walk = SeenCursor(fixed_records(rows, size), 20_000 * size)
    for item, row in enumerate(rows.tolist()):
        walk.due(ahead)
        assert walk.sent_bytes > item * size
        if item % every == every // 2:
            walk.saw(row * size, row * size + PAGE, item)
            assert item * size - walk.position_bytes <= ahead // 2
            assert walk.position <= item + 1
    assert walk.wrong is None
    assert walk.position > 19_000


def test_one_stray_touch_moves_nothing_far() -> None:
    rows, size = shuffled(100_000, 6), 128 * KIB
    walk = SeenCursor(fixed_records(rows, size), 100_000 * size)
    for item in range(200):
        walk.saw(int(rows[item]) * size, int(rows[item]) * size + PAGE, item)
    walk.due(16 * MIB)
    at = int(rows[5000]) * size
    walk.saw(at, at + PAGE, 1)
    assert (walk.position, walk.wrong) == (200, None)


def test_announced_progress_is_exact_and_never_goes_back() -> None:
    walk = SeenCursor(fixed_records(shuffled(1000, 7), MIB), 1000 * MIB)
    walk.said(500, 1)
    assert (walk.position, walk.position_bytes) == (500, 500 * MIB)
    walk.said(400, 2)
    assert walk.position == 500
    at = int(shuffled(1000, 7)[500]) * MIB
    walk.saw(at, at + PAGE, 3)
    assert walk.position == 501
    walk.said(10**9, 4)
    assert (walk.position, walk.due(GIB)) == (1000, [])


def test_items_without_bytes_are_passed_with_those_before_them() -> None:
    starts = np.array([0, 5 * PAGE, 9 * PAGE])
    order = Order(starts, starts + np.array([PAGE, 0, PAGE]), np.array([1, 2, 5]), 8)
    walk = SeenCursor(order, GIB)
    assert (order.items, walk.position) == (8, 1)
    walk.saw(0, PAGE, 1)
    assert walk.position == 5
    walk.saw(9 * PAGE, 10 * PAGE, 1)
    assert (walk.position, walk.wrong) == (8, None)
    empty = SeenCursor(Order(starts[:0], starts[:0], starts[:0]), GIB)
    assert (empty.position, empty.due(GIB), empty.saw(0, PAGE, 1)) == (0, [], 0)
    assert empty.future(np.arange(3)).tolist() == [math.inf] * 3


def test_only_a_touch_within_the_record_touched_foremost_tells_nothing_new() -> None:
    rows, size = shuffled(100, 33), 256 * KIB
    walk = SeenCursor(fixed_records(rows, size), 100 * size)
    first, second = (int(row) * size for row in rows[:2])
    assert not walk.reads_on(first)
    walk.saw(first, first + PAGE, 1)
    assert walk.reads_on(first + PAGE) and walk.reads_on(first + size - PAGE)
    assert not walk.reads_on(first)  # it may be read again
    assert not walk.reads_on(second) and not walk.reads_on(second + PAGE)
    walk.saw(second, second + PAGE, 2)
    assert walk.reads_on(second + PAGE) and not walk.reads_on(first + PAGE)


# ---- what is mapped, not touched ----------------------------------------------------------------


def spans(rows: np.ndarray, items: Iterable[int], size: int) -> list[tuple[int, int]]:
    """Where these items lie."""
    return [(int(rows[item]) * size, int(rows[item]) * size + size) for item in items]


def test_the_position_follows_what_is_mapped_in_order() -> None:
    rows, size = shuffled(4000, 31), 64 * KIB
    walk = SeenCursor(fixed_records(rows, size), 4000 * size)
    walk.due(16 * MIB)
    sent = walk.sent_bytes // size
    assert walk.mapped(spans(rows, range(10), size), 1) == []
    assert walk.position == 10
    walk.mapped(spans(rows, range(20, 60), size), 2)  # a worker is late, or they are neighbours
    assert walk.position == 60
    # a few beyond what was handed out may be neighbours of others; so many are the reader's way
    walk.mapped(spans(rows, range(60, sent), size), 3)
    walk.mapped(spans(rows, range(sent, sent + 12), size), 3)
    assert sent <= walk.position <= sent + 4
    walk.mapped(spans(rows, range(sent + 12, 1000), size), 4)
    assert walk.position == 1000


def test_what_one_fault_maps_is_no_way() -> None:
    """Of records that lie together in the file and in the order; and where faults map so much
    beside what is read that most of the file is there."""
    # so few records that one fault's are enough to look
    for size, mapped, count in ((16 * KIB, 2 * MIB, 4_000), (2 * KIB, 64 * KIB, 1_000)):
        in_order = SeenCursor(fixed_records(np.arange(count), size), count * size)
        in_order.mapped([(0, size)], 1)
        at = count // 2 * size
        in_order.mapped([(at, at + mapped)], 2)
        assert in_order.position == 1
    rows = shuffled(100_000, 36)
    walk = SeenCursor(fixed_records(rows, 4 * KIB), 100_000 * 4 * KIB)
    blocks = np.unique(rows[:15_000] // 16)
    walk.mapped([(int(b) * 64 * KIB, (int(b) + 1) * 64 * KIB) for b in blocks], 1)
    assert walk.position <= 15_000


@pytest.mark.parametrize("beside", [0.0, 0.3])
def test_who_is_on_its_way_when_it_is_first_looked_at_is_found_there(beside: float) -> None:
    """A program that read before the service was up, beyond where an order is looked for; with
    other records mapped by its faults."""
    count, size = 3000, 64 * KIB
    rows = shuffled(count, 33)
    also = np.random.default_rng(34).permutation(count)[: int(beside * count)]
    walk = SeenCursor(fixed_records(rows, size), count * size)
    found = spans(rows, range(1000), size) + [(int(i) * size, (int(i) + 1) * size) for i in also]
    walk.looked(found, walk.mapped(found, 1))
    assert abs(walk.position - 1000) <= 16
    for item in range(1000, 2900, 50):  # and goes on, twenty times as much as is handed out
        found = spans(rows, range(item, item + 50), size)
        walk.looked(found, walk.mapped(found, item))
        assert abs(walk.position - item - 50) <= 16
    assert walk.wrong is None
    other = SeenCursor(fixed_records(rows, size), count * size)
    stranger = shuffled(count, 35)
    for item in range(0, 2000, 100):
        found = spans(stranger, range(item, item + 100), size)
        other.looked(found, other.mapped(found, item))
    assert other.wrong is not None and other.position <= 16


def test_neighbours_of_what_is_read_are_no_progress() -> None:
    """A fault maps 64 KiB: of records of 12 KiB others too, which come anywhere in the order."""
    count, size = 40_000, 12 * KIB
    rows = shuffled(count, 32)
    walk = SeenCursor(fixed_records(rows, size), count * size)
    for item in range(2000):
        walk.due(16 * MIB)
        start = int(rows[item]) * size // (64 * KIB) * 64 * KIB
        assert walk.mapped([(start, start + 64 * KIB)], item) == []
        assert walk.position <= item + 16
    assert walk.position > 1900
    lost = SeenCursor(fixed_records(rows, size), count * size)
    lost.due(16 * MIB)
    for item in range(20_000, 22_000):  # not where it is thought to be
        start = int(rows[item]) * size // (64 * KIB) * 64 * KIB
        lost.mapped([(start, start + 64 * KIB)], item)
    assert 21_900 < lost.position <= 22_016


@pytest.mark.parametrize("size", [33 * PAGE, 32 * PAGE + 1000])
def test_a_record_of_which_neighbours_have_mapped_a_part_is_seen_all_the_same(size: int) -> None:
    """Where all of the file is cached (a local disk's readahead), each record maps the beginning
    or the end of those beside it: half way through, hardly one is mapped by itself any more."""
    count, around = 1600, 64 * KIB
    rows, there = shuffled(count, 33), IntervalSet()
    walk = SeenCursor(fixed_records(rows, size), count * size)
    for first in range(0, count, 12):  # of a look, in the order of the file
        walk.due(32 * MIB)
        found = []
        for item in sorted(range(first, min(first + 12, count)), key=rows.__getitem__):
            start = int(rows[item]) * size // around * around
            end = -(-(int(rows[item]) + 1) * size // around) * around
            found += there.missing(start, end)
            there.add(start, end)
        strays = walk.mapped(found, first)
        walk.looked(found, strays)
        assert walk.wrong is None and abs(walk.position - first - 12) <= 24
    assert walk.position > count - 24


def test_of_a_record_that_comes_again_only_the_next_time_is_mapped() -> None:
    rows, size = np.array([0, 1, 2, 3, 0, 1, 2, 3] * 100), 64 * KIB
    walk = SeenCursor(fixed_records(rows, size), 4 * size)
    walk.due(64 * MIB)
    walk.mapped(spans(rows, range(4), size), 1)
    assert walk.position == 4


def test_what_is_mapped_of_no_item_that_is_due_may_be_another_epoch_s() -> None:
    first, second, size = np.arange(400), np.arange(400, 800), 64 * KIB
    walk = SeenCursor(fixed_records(first, size), GIB)
    walk.due(4 * MIB)
    there = [*spans(first, [0], size), *spans(second, range(9), size)]
    assert walk.mapped(there, 1) == spans(second, range(9), size)
    after = SeenCursor(fixed_records(second, size), GIB)
    assert after.mapped(spans(second, range(9), size), 1) == []
    assert after.position == 4  # nothing of it has been handed out


def test_a_page_that_two_records_share_is_of_the_late_one() -> None:
    """A touch of the page in which record 11 begins, item 0, is one of record 10's end, too: item
    1001, which lies within the lookahead, and nobody is there."""
    size = 20_000
    records = np.r_[11, 1000:2000, 10, 2000:9000]
    order = Order(records * size, (records + 1) * size, np.arange(len(records)))
    walk = SeenCursor(order, 9000 * size)
    walk.due(64 * MIB)

    def touch(item: int) -> None:
        page = int(records[item]) * size // PAGE * PAGE
        walk.saw(page, page + PAGE, 1)

    for item in range(64, 96):
        touch(item)
    before = walk.position
    touch(0)
    assert walk.position == before <= 96


# ---- rate, deadlines, lookahead, future ---------------------------------------------------------


def paced(bytes_per_second: int, size: int = MIB, count: int = 3000) -> SeenCursor:
    rows = shuffled(count, 16)
    walk = SeenCursor(fixed_records(rows, size), count * size)
    walk.due(16 * MIB)
    for item in range(200):
        at = int(rows[item]) * size
        walk.saw(at, at + PAGE, item * size * 10**9 // bytes_per_second)
    return walk


def test_the_rate_is_the_plan_bytes_gone_by_in_a_second() -> None:
    walk = paced(100 * MIB)
    assert walk.rate_bytes_per_second == pytest.approx(100 * MIB, rel=0.05)


def test_the_lookahead_is_little_s_law_within_bounds() -> None:
    slow, fast = paced(MIB), paced(200 * MIB)
    assert lookahead_bytes(slow, Storage(), GIB) == window.LOOKAHEAD_MIN_BYTES
    rate = fast.rate_bytes_per_second
    assert lookahead_bytes(fast, Storage(), GIB) == pytest.approx(rate * 0.4, rel=0.01)
    assert lookahead_bytes(fast, Storage(0, 0.2), GIB) == pytest.approx(rate * 0.8, rel=0.01)
    assert lookahead_bytes(fast, Storage(0, 10), GIB) == window.LOOKAHEAD_MAX_BYTES
    assert lookahead_bytes(fast, Storage(0, 10), 40 * MIB) == 40 * MIB
    assert lookahead_bytes(fast, Storage(0, 10), 0) == MIB
    assert lookahead_bytes(fast, Storage(), GIB, boost=2.0) == pytest.approx(rate * 0.8, rel=0.01)


def test_a_reader_that_may_have_read_on_has_as_much_more_ahead() -> None:
    walk = paced(100 * MIB)
    least = lookahead_bytes(walk, Storage(), GIB)
    for items in (1, 50):
        assert lookahead_bytes(walk, Storage(), GIB, ahead_items=items) == least + items * MIB
    assert lookahead_bytes(walk, Storage(), 60 * MIB, ahead_items=50) == 60 * MIB
    left = walk.total_bytes - walk.position_bytes
    assert lookahead_bytes(walk, Storage(), 8 * GIB, ahead_items=10**6) == least + left


def test_until_its_rate_is_known_a_reader_of_an_exact_order_may_be_as_fast_as_the_storage() -> None:
    order, storage = fixed_records(shuffled(300, 16), MIB), Storage(200e6, 0.001)
    exact, judged = (SeenCursor(order, 300 * MIB, judged=judged) for judged in (False, True))
    assert lookahead_bytes(exact, storage, GIB) == int(0.4 * 200e6)
    assert lookahead_bytes(exact, Storage(), GIB) == window.LOOKAHEAD_MIN_BYTES
    assert lookahead_bytes(judged, storage, GIB) == window.LOOKAHEAD_MIN_BYTES
    exact.said(1, 10**9)
    exact.said(2, 2 * 10**9)
    assert 0 < exact.rate_bytes_per_second < 2e6
    assert lookahead_bytes(exact, storage, GIB) == window.LOOKAHEAD_MIN_BYTES


def test_by_what_is_told_alone_an_order_is_followed_exactly() -> None:
    order = fixed_records(shuffled(300, 16), MIB)
    told, seen = OrderCursor(order, 300 * MIB), SeenCursor(order, 300 * MIB, judged=False)
    for items in (0, 8, 8, 5, 40, 300):
        for walk in (told, seen):
            walk.said(items, items * 10**7)
        assert told.position == seen.position == max(items, told.position)
        assert told.due(16 * MIB) == seen.due(16 * MIB)
    assert told.exact and told.wrong is None and told.position_bytes == told.total_bytes


def test_the_lookahead_of_small_records_counts_their_pages() -> None:
    rows = np.random.default_rng(17).integers(0, 10**8, 200_000)
    walk = SeenCursor(fixed_records(rows, 100), 10**10)
    assert 39 < walk.amplification < 42
    ahead = lookahead_bytes(walk, Storage(), GIB)
    assert ahead == int(window.LOOKAHEAD_MIN_BYTES / walk.amplification)
    pages = sum(piece.end - piece.start for piece in walk.due(ahead))
    assert 16 * MIB * 0.9 < pages < 16 * MIB * 1.5
    assert walk.amplification == pages / walk.sent_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_the_future_is_each_block_s_next_use(seed: int) -> None:
    rng = random.Random(seed)
    file_bytes = rng.randint(1, 20 * MIB)
    order = any_order(rng, file_bytes)
    block_bytes = rng.choice((PAGE, 64 * KIB, 2 * MIB))
    walk, model = SeenCursor(order, file_bytes), Model(order)
    blocks = np.array([rng.randrange(file_bytes // block_bytes + 3) for _ in range(50)])
    for said in sorted(rng.randrange(order.items + 1) for _ in range(4)):
        walk.said(said, 1)
        at = walk.position_bytes
        for block, found in zip(blocks.tolist(), walk.future(blocks, block_bytes), strict=True):
            uses = [
                max(low, low + block * block_bytes - start)
                for low, high, start, _ in model.parts
                if max(start, block * block_bytes)
                < min(start + high - low, (block + 1) * block_bytes)
            ]
            ahead = [use - at for use in uses if use >= at]
            if found == math.inf:
                assert not ahead
            elif not ahead or found == 0:  # what was read last is still in use
                assert found == 0 and any(use - at >= -MIB for use in uses)
            else:
                assert min(ahead) - MIB <= found <= min(ahead)


def test_the_future_is_inf_for_what_is_passed_and_not_for_what_comes_again() -> None:
    walk = SeenCursor(fixed_records(np.array([0, 1, 2, 0, 3]), 64 * KIB), MIB)
    assert walk.future(np.arange(-1, 6)).tolist() == [
        math.inf, 0, 65536, 131072, 262144, math.inf, math.inf,
    ]  # fmt: skip
    walk.said(2, 1)
    assert walk.future(np.arange(4)).tolist() == [65536, 0, 0, 131072]
    walk.said(3, 1)
    assert walk.future(np.arange(4)).tolist() == [0, math.inf, 0, 65536]


# ---- what an order must be ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "ends", "item", "items", "why"),
    [
        ([0, 1], [1], [0], -1, "as long as each other"),
        ([[0]], [[1]], [[0]], -1, "as long as each other"),
        ([0], [1], [3], 3, "of 3 items has an extent of item 3"),
        ([0, 0], [1, 1], [1, 0], -1, "ascend"),
        ([0], [1], [-1], -1, "ascend"),
        ([-1], [1], [0], -1, "begin at 0"),
        ([5], [4], [0], -1, "not end before"),
    ],
)
def test_what_is_no_order(starts: list, ends: list, item: list, items: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Order(np.array(starts), np.array(ends), np.array(item), items)


def test_orders_too_long_to_count_and_files_too_large_for_32_bits() -> None:
    far = 1 << 58
    starts = np.full(20, far)
    order = Order(starts, starts + far, np.arange(20))
    with pytest.raises(ValueError, match="can be counted"):
        SeenCursor(order, 1 << 60)
    some = Order(starts[:3] + np.array([0, MIB, 0]), starts[:3] + 2 * MIB, np.arange(3))
    walk = SeenCursor(some, 1 << 60)
    assert walk.due(GIB) == [OrderRange(far, far + 2 * MIB, 0)]
    assert walk.saw(far, far + PAGE, 1) == 1
    assert walk.future(np.array([far >> 16, (far >> 16) - 1])).tolist() == [0, math.inf]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_order_goes_to_another_process_as_a_file(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    file_bytes = rng.randint(1, 40 * MIB)
    order = any_order(rng, file_bytes) if seed else Order(*np.zeros((3, 0)), items=7)
    units = OrderExtents.of(order, file_bytes, PAGE)
    told = json.loads(json.dumps(extents_file.write(str(tmp_path / "a.units"), units)))
    again = extents_file.read(str(tmp_path), told)
    assert list(tmp_path.iterdir()) == []
    assert (again.items, again.places.page_bytes) == (order.items, PAGE)
    assert again.places.nested == units.places.nested
    theirs = extents_file.arrays_of(again)
    for name, array in extents_file.arrays_of(units).items():
        assert theirs[name].dtype == array.dtype
        assert theirs[name].tolist() == array.tolist()
    one, other = SeenCursor(order, file_bytes), SeenCursor(again, file_bytes)
    for said in range(0, order.items + 9, 9):
        assert one.due(4 * MIB) == other.due(4 * MIB)
        for walk in (one, other):
            walk.saw(file_bytes // 2, file_bytes, said)
            walk.said(said, said)
        assert (one.position_bytes, one.wrong) == (other.position_bytes, other.wrong)
    assert one.position == order.items


def test_an_order_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    units = OrderExtents.of(fixed_records(shuffled(100, 1), PAGE), MIB, PAGE)
    told = extents_file.write(str(tmp_path / "a.units"), units)
    os.truncate(tmp_path / "a.units", 100)
    with pytest.raises(ValueError, match=r"a\.units ends at 100, within"):
        extents_file.read(str(tmp_path), told)
    with pytest.raises(OSError, match="No such file"):
        extents_file.read(str(tmp_path), told)


@pytest.mark.parametrize("seed", range(6))
def test_the_units_of_many_ranges_are_those_of_each(seed: int) -> None:
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 4 << 20, 300)
    ends = starts + rng.integers(1, 200_000, 300)
    units = OrderExtents.of(Order(starts, ends, np.arange(300)), 5 << 20, PAGE)
    low = rng.integers(0, 5 << 20, 40)
    high = low + rng.integers(0, 300_000, 40)
    owner, found = units.places.within_each(low, high)
    for number, (start, end) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        assert found[owner == number].tolist() == units.places.within(start, end).tolist()
    assert (np.diff(owner) >= 0).all()


def test_the_module_is_imported_without_numpy() -> None:
    code = "import sys, uffdprefetch.predict.order.cursor; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
