# SPDX-License-Identifier: Apache-2.0
"""orders/stretches.py: samples in the sequence of a data set's files, against one that goes through
it item by item; and orders through several files, walked through by predict/order/cursor.py."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from conftest import warnings_fail
from walked_orders import MIB, PAGE, fixed_records, shuffled

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.orders import stretches as module
from uffdprefetch.orders.stretches import Stretches, in_the_whole
from uffdprefetch.predict.order.extents import OrderExtents
from uffdprefetch.predict.order.order import Order
from uffdprefetch.predict.order.seen import SeenCursor

pytestmark = warnings_fail

FILE_BYTES = 64 * MIB


def made(files: int, rows: list[tuple[int, int, int, int]], samples: int) -> Stretches:
    return Stretches.parse(
        [f"/{i}" for i in range(files)], np.array(rows, np.int64).reshape(-1), samples
    )


@pytest.mark.parametrize("seed", range(8))
def test_each_sample_is_the_record_of_the_stretches_that_it_is_in(seed: int) -> None:
    rng = random.Random(seed)
    count, files = rng.randint(1, 300), rng.randint(1, 5)
    rows = []
    for _ in range(rng.randint(0, 12)):  # some share samples, some samples are in none
        first = rng.randint(0, count)
        rows.append(
            (rng.randrange(files), first, rng.randint(0, count - first), rng.randrange(1000))
        )
    samples = np.array([rng.randrange(count) for _ in range(rng.randint(0, 500))], np.int64)
    found = made(files, rows, count).records(samples)
    assert len(found) == files
    for number, (records, which) in enumerate(found):
        expected = [
            (place, record + sample - first)
            for place, sample in enumerate(samples.tolist())
            for file, first, length, record in rows
            if file == number and first <= sample < first + length
        ]
        assert sorted(zip(which.tolist(), records.tolist(), strict=True)) == sorted(expected)
        assert (which[1:] >= which[:-1]).all()


@pytest.mark.parametrize(
    "row", [(2, 0, 1, 0), (-1, 0, 1, 0), (0, -1, 1, 0), (0, 0, 11, 0), (0, 11, 0, 0), (0, 5, 6, 0),
            (0, 0, 1, -1), (0, 0, 1, 1 << 62), (0, 1, (1 << 63) - 1, 0)],
)  # fmt: skip
def test_what_is_in_no_file_or_beyond_the_data_set_is_refused(row: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a stretch that is none of (2 files|10 samples)"):
        Stretches.parse(["a", "b"], np.array(row, np.int64), 10)
    with pytest.raises(ValueError, match="a stretch has four numbers: 3"):
        Stretches.parse(["a", "b"], np.array(row[:3], np.int64), 10)


def test_the_records_of_one_order_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECORDS_MAX", 20)
    both = made(1, [(0, 0, 10, 0), (0, 0, 10, 0)], 10)
    assert len(both.records(np.arange(10))[0][0]) == 20
    with pytest.raises(ValueError, match="more than 20 records"):
        both.records(np.array([*range(10), 0]))


# ---- one order, several files -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_coordinate_is_what_comes_before_in_all_files(seed: int) -> None:
    rng = random.Random(seed)
    items = rng.randint(1, 60)
    reads = [  # (item, file, start, end), in the order in which they are read
        (item, file, start := rng.randrange(1000), start + rng.randrange(200))
        for item in range(items)
        for file in sorted(rng.choices(range(3), k=rng.choice((0, 1, 1, 2, 3))))
    ]
    orders = []
    for number in range(3):
        mine = [read for read in reads if read[1] == number]
        item, _, starts, ends = np.array(mine, np.int64).reshape(-1, 4).T
        orders.append(Order(starts, ends, item, items))
    total = sum(end - start for _, _, start, end in reads)
    for number, order in enumerate(in_the_whole(orders)):
        at, expected = 0, []
        for _, file, start, end in reads:
            if file == number:
                expected.append(at)
            at += end - start
        assert (order.items, order.whole_bytes) == (items, total)
        assert order.before is not None and order.before.tolist() == expected


def test_an_order_of_one_file_is_as_it_was() -> None:
    order = fixed_records(shuffled(10, 1), PAGE)
    assert in_the_whole([order]) == [order]


def two_files(count: int, size: int, seed: int) -> list[SeenCursor]:
    """Walks through a shuffled order of records of which each file has half."""
    half = count // 2
    found = made(2, [(0, 0, half, 0), (1, half, half, 0)], count).records(shuffled(count, seed))
    orders = []
    for records, which in found:
        one = fixed_records(records, size)
        orders.append(Order(one.starts, one.ends, which, count))
    return [SeenCursor(order, FILE_BYTES, merge_gap_bytes=0) for order in in_the_whole(orders)]


def test_what_lies_ahead_is_handed_out_of_each_file_up_to_the_same_place_in_the_whole() -> None:
    count, size = 512, 64 << 10
    walks = two_files(count, size, 3)
    handed = [IntervalSet(), IntervalSet()]
    ahead = 2 * MIB
    for items in (0, 7, 100, 333):
        for walk, there in zip(walks, handed, strict=True):
            walk.said(items, items)
            assert walk.position_bytes == items * size
            for piece in walk.due(ahead):
                there.add(piece.start, piece.end)
            units = walk._units
            for unit, item in enumerate(units.item.tolist()):
                missing = there.missing(int(units.starts[unit]), int(units.ends[unit]))
                if items <= item < items + ahead // size:
                    assert not missing
                elif item > items + ahead // size * 3 // 2:  # a slice more, of the whole order
                    assert missing


def test_touches_in_one_file_tell_how_far_the_whole_order_is() -> None:
    count, size = 256, 64 << 10
    walk = two_files(count, size, 5)[1]
    units = walk._units
    for unit in range(40):
        start = int(units.starts[unit])
        walk.saw(start, start + PAGE, unit)
        assert walk.position_bytes == (int(units.item[unit]) + 1) * size
    assert walk.items_here == (40, count // 2) and walk.here_bytes == count // 2 * size
    walk.said(count, 100)
    assert walk.position_bytes == walk.total_bytes == count * size
    assert walk.items_here == (count // 2, count // 2)


def test_what_is_said_between_two_items_of_a_file_counts() -> None:
    order = Order(np.array([0, 100]), np.array([100, 200]), np.array([2, 6]), 8,
                  np.array([200, 600]), 800)  # fmt: skip
    walk = SeenCursor(order, FILE_BYTES)
    places = []
    for items in range(9):
        walk.said(items, items)
        places.append(walk.position_bytes)
    assert places == [100 * items for items in range(9)]
    walk.said(3, 100)
    assert walk.position_bytes == 800, "it never goes back"


def test_long_extents_of_one_of_several_files_are_cut_where_they_are_in_the_whole() -> None:
    order = Order(np.array([1000]), np.array([3 * MIB + 1000]), np.array([1]), 3,
                  np.array([5 * MIB]), 9 * MIB)  # fmt: skip
    units = OrderExtents.of(order, FILE_BYTES, PAGE)
    assert len(units) == 4 and units.here_bytes == 3 * MIB
    for (start, at), (after, then) in pairwise(
        zip(units.starts.tolist(), units.coordinate.tolist(), strict=False)
    ):
        assert after - start == then - at
    assert (int(units.coordinate[0]), int(units.coordinate[-1])) == (5 * MIB, 9 * MIB)


def test_an_order_that_has_no_room_in_the_whole_is_none() -> None:
    starts, ends, item = np.array([0, 0]), np.array([100, 100]), np.array([0, 1])
    for before, whole in (([0, 99], 300), ([0, 100], 199), ([-1, 100], 300)):
        with pytest.raises(ValueError, match="room in the whole"):
            Order(starts, ends, item, 2, np.array(before), whole)
