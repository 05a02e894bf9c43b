# SPDX-License-Identifier: Apache-2.0
"""pool/node_pool.py where other nodes have their part of what it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_pool import part_of, pool_of

from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.pool.other_nodes import NoOthers

MIB, PAGE = 1 << 20, 4096


class Alike(NoOthers):
    """Other nodes read the same of the one file."""

    def reads_alike(self, number: int) -> bool:
        return number == 3


@pytest.mark.parametrize("evict", ["lru", "cyclic"])
def test_what_is_kept_for_other_nodes_is_no_victim_and_no_part_of_a_window(evict: str) -> None:
    pool, told = pool_of(4 * MIB, evict)
    part = pool.files.by_number[3].pooled
    assert part is not None
    pool.victims.plan([])
    usual = {first for _, first, _ in told}
    np.asarray(part.books.kept)[sorted(usual)] = 1
    pool.victims.plan([])
    instead = {first for _, first, _ in told}
    assert instead and not instead & usual
    pool.files.by_number[3].size_bytes = 8 * MIB
    alone = pool.size.window_bytes(1)
    pool.size.keep_bytes, pool.pool.kept_bytes = 3 * MIB, lambda: 3 * MIB  # type: ignore[method-assign]
    assert pool.size.window_bytes(1) < alone
    assert pool.size.window_bytes(1) < MIB // 2, "what only this node reads stays there"
    pool.files.others = Alike()
    assert pool.size.window_bytes(1) < MIB // 2, "nor what an order that is known comes to again"
    assert pool.size.window_bytes(1, stream=True) == MIB // 2, "half of what is never kept"


@pytest.mark.parametrize("evict", ["lru", "cyclic"])
def test_of_what_several_nodes_walk_through_the_oldest_goes_first(evict: str) -> None:
    """One whose reader stands at the 40th of 64 blocks; its window and what lies behind it stay."""
    pool, told = pool_of(4 * MIB, evict)
    part = pool.files.by_number[3].pooled
    assert part is not None
    np.asarray(part.books.touched_ms)[60:] = 0  # of a window that its reader has left
    np.asarray(part.books.touched_ms)[10:14] = 100
    part.books.kept[20] = 1
    spared = {*range(39 - 16, 40), *range(40, 44)}  # NEAR_BYTES, and 256 KiB ahead
    walk: Any = SimpleNamespace(position_bytes=40 * (64 << 10), direction=1)
    span = SimpleNamespace(start_bytes=0, end_bytes=4 * MIB)
    reader: Any = SimpleNamespace(file=pool.files.by_number[3], span=span)
    pool.files.others = Alike()
    pool.victims._count = lambda: 64  # type: ignore[method-assign]
    pool.victims.plan([(reader, walk, 4 * (64 << 10))])
    found = [first for _, first, _ in told]
    assert set(found) == set(range(64)) - spared - {20}
    assert found[:4] == [60, 61, 62, 63] and found[-4:] == [10, 11, 12, 13]
    pool.files.others = NoOthers()
    pool.victims.plan([(reader, walk, 4 * (64 << 10))])
    assert [first for _, first, _ in told] != found


CELL = 64 * (64 << 10)


def test_over_what_is_still_mapped_a_stream_goes_by_one_page_of_each_cell() -> None:
    """Of an earlier epoch: nothing else of it faults (warm/placement.py, _rearm_pool)."""
    pool, _ = pool_of(64 * MIB, "cyclic")
    state = np.full(4 * 64, uffd_pool.PRESENT, np.uint8)
    touched = np.ones(4 * 64, np.uint32)
    part = part_of(pool.pool, 3, 64 << 10, state, touched)
    start = 2 * CELL - PAGE  # from the first page of the first cell on
    stream: Any = SimpleNamespace(direction=1)

    def over(direction: int = 1, forward: int = 2 * CELL - PAGE) -> bool:
        stream.direction = direction
        low, high = part.come_over(stream, start, start + PAGE, forward)
        return high - low > PAGE

    assert over() and over(-1)
    assert not over(forward=3 * CELL), "two far touches say nothing of what lies between"
    assert not over(forward=0)
    touched[63] = 0  # read since, and nobody has come to it: it would have faulted
    assert not over() and over(-1)
    touched[63], state[20] = 1, 0
    assert not over()
