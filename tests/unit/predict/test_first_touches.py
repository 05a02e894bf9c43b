# SPDX-License-Identifier: Apache-2.0
"""predict/first_touches.py: which blocks, in which order, of whom."""

from __future__ import annotations

import random

import pytest
from conftest import warnings_fail

from uffdprefetch.predict.first_touches import FirstTouches, RankOf, RankTouches

pytestmark = warnings_fail

BLOCK = 64 << 10
ALONE = RankOf(0, 0)


def spans(touches: RankTouches) -> list[tuple[int, int]]:
    """In blocks."""
    numbers = [-(-at // BLOCK) for at in touches.spans]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def came(size: int, *blocks: int, length: int = 1) -> RankTouches:
    file = FirstTouches(size * BLOCK)
    for block in blocks:
        file.came(ALONE, block * BLOCK, (block + length) * BLOCK)
    return file.of(ALONE)


def test_blocks_are_kept_in_the_order_of_their_first_touch() -> None:
    found = came(100, 7, 3, 7, 50, 3, 51, 52)
    assert spans(found) == [(7, 8), (3, 4), (50, 53)] and found.blocks == 5


def test_a_touch_of_a_part_is_one_of_its_block_and_the_last_ends_with_the_file() -> None:
    file = FirstTouches(10 * BLOCK + 5)
    file.came(ALONE, 2 * BLOCK + 1, 2 * BLOCK + 2)
    file.came(ALONE, 10 * BLOCK, 10 * BLOCK + 4096)
    assert list(file.of(ALONE).spans) == [2 * BLOCK, 3 * BLOCK, 10 * BLOCK, 10 * BLOCK + 5]


def test_of_a_range_that_was_touched_in_parts_the_rest_is_new() -> None:
    file = FirstTouches(100 * BLOCK)
    for start, end in ((10, 11), (14, 16), (8, 20)):
        file.came(ALONE, start * BLOCK, end * BLOCK)
    assert spans(file.of(ALONE)) == [(10, 11), (14, 16), (8, 10), (11, 14), (16, 20)]


def test_each_rank_has_its_own_order() -> None:
    file, ranks = FirstTouches(64 * BLOCK), [RankOf(n, 20) for n in range(20)]
    orders = {rank: random.Random(rank.rank).sample(range(64), 64) for rank in ranks}
    for at in range(64):
        for rank in ranks:
            block = orders[rank][at]
            file.came(rank, block * BLOCK, (block + 1) * BLOCK)
    for rank in ranks:
        walked = [block for start, end in spans(file.of(rank)) for block in range(start, end)]
        assert walked == orders[rank]


@pytest.mark.parametrize(
    ("blocks", "part"),
    [
        (range(100), 1.0),
        (range(99, -1, -1), 1.0),
        ([half + at for at in range(50) for half in (0, 50)], 0.98),
        (range(0, 100, 2), 0.02),
    ],
    ids=["onward", "back", "two walks", "slices"],
)
def test_who_goes_in_order_goes_on_beside_where_he_was(blocks: list[int], part: float) -> None:
    found = came(100, *blocks)
    assert found.in_order_blocks / found.blocks == pytest.approx(part, abs=0.03)


@pytest.mark.parametrize("length", [1, 16])
def test_a_shuffled_file_is_not_gone_through_in_order(length: int) -> None:
    order = random.Random(5).sample(range(0, 4096, length), 4096 // length)
    found = came(4096, *order, length=length)
    assert found.blocks == 4096 and 0.5 < found.in_order_blocks / 4096 < 0.75


def test_there_are_no_more_runs_than_blocks() -> None:
    found = came(500, *random.Random(1).choices(range(500), k=5000))
    assert len(found.spans) // 2 <= 500, "256 MiB a TiB"
