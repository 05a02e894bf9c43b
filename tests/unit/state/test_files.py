# SPDX-License-Identifier: Apache-2.0
"""What the books of a file tell of its blocks."""

from __future__ import annotations

import random

from tests.support.file_states import file_of
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.state.files import FileState

BLOCKS = 64


def book(ahead: list[int], used: list[int]) -> FileState:
    """Of a file of which these blocks were read ahead, and then these used."""
    file = file_of(BLOCKS * BLOCK_BYTES)
    for block in ahead:
        file.blocks.mark_prefetched(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
    mine = IntervalSet()
    for block in used:
        span = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        file.blocks.tell_used(*span, mine=mine)
        file.blocks.mark_used(*span)
        mine.add(*span)
    return file


def test_what_one_request_brings_counts_once() -> None:
    file = book(ahead=[0, 3, 5, 7, 40], used=[0, 3, 5, 40, 42, 60])
    assert (file.blocks.used.runs, file.blocks.used.demand_runs) == (4, 2)
    assert file.blocks.requests_used(BLOCK_BYTES) == (4, 2)
    assert file.blocks.requests_used(8 * BLOCK_BYTES) == (1, 2)  # 42 was missed beside 40
    assert file.blocks.requests_used(BLOCKS * BLOCK_BYTES) == (0, 1)
    assert file.blocks.requests_used(4096) == (4, 2)


def test_no_more_pieces_than_runs_are_looked_for() -> None:
    everything = list(range(BLOCKS))
    file = book(ahead=everything, used=everything)
    assert file.blocks.used.runs == 1
    assert file.blocks.requests_used(BLOCK_BYTES) == (1, 0)


def test_they_are_what_a_count_piece_by_piece_finds() -> None:
    chance = random.Random(5)
    for _ in range(200):
        ahead, used = (chance.sample(range(BLOCKS), chance.randrange(20)) for _ in range(2))
        file, each = book(ahead, used), chance.choice([1, 2, 7, 16])
        pieces = [set(range(at, at + each)) & set(used) for at in range(0, BLOCKS, each)]
        own = sum(not piece <= set(ahead) for piece in pieces)
        found = file.blocks.requests_used(each * BLOCK_BYTES)
        most = file.blocks.used.runs, file.blocks.used.demand_runs
        wanted = sum(map(bool, pieces)) - own, own
        assert [min(*pair) for pair in zip(found, most, strict=True)] == [
            min(*pair) for pair in zip(wanted, most, strict=True)
        ]
