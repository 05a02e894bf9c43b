# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints lie: on whole pages of the file, on its grid, never on its header, bounded."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from uffdprefetch.plan import checkpoints
from uffdprefetch.plan.checkpoints import Span

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4096
WHOLE = Span(0, GIB, PAGE)


def test_the_header_carries_no_checkpoint() -> None:
    """LMDB's meta pages are read by every transaction: a checkpoint there would always fire."""
    assert WHOLE.page(0) is None
    assert WHOLE.page(checkpoints.HEADER_BYTES - 1) is None
    assert WHOLE.page(checkpoints.HEADER_BYTES) == checkpoints.HEADER_BYTES // PAGE


@pytest.mark.parametrize("tail", [1, 100, PAGE - 1])
def test_the_last_partial_page_carries_none(tail: int) -> None:
    """Its memfd page could not be written whole, and past the end must stay SIGBUS."""
    span = Span(0, 4 * MIB + tail, PAGE)
    assert span.page(4 * MIB) is None
    assert span.page(4 * MIB - PAGE) == 4 * MIB // PAGE - 1
    assert Span(0, 4 * MIB + PAGE, PAGE).page(4 * MIB) == 4 * MIB // PAGE


def test_nothing_lies_outside_the_mapped_part() -> None:
    span = Span(8 * MIB, 16 * MIB, PAGE)
    assert span.page(8 * MIB - 1) is None
    assert span.page(16 * MIB) is None
    assert span.pages(range(0, 32 * MIB, 4 * MIB)) == {8 * MIB // PAGE, 12 * MIB // PAGE}


@pytest.mark.parametrize("chosen", [None, 8 * MIB, 3 * MIB])
@pytest.mark.parametrize("size", [16 * MIB, 100 * MIB + 17, 64 * GIB, 240 * GIB, 1 << 45])
@pytest.mark.parametrize("most", [0, 1, 10, 10_000])
def test_the_sparse_set_is_bounded_for_any_file(size: int, most: int, chosen: int | None) -> None:
    pages = checkpoints.sparse(Span(0, size, PAGE), most, chosen)
    assert len(pages) <= max(1, min(most, checkpoints.SPARSE_MAX))
    grid = chosen or checkpoints.DISTANCE_MIN_BYTES
    assert all(page * PAGE % grid == 0 for page in pages)


def test_the_sparse_set_covers_the_whole_file_evenly() -> None:
    pages = sorted(checkpoints.sparse(Span(0, 64 * GIB, PAGE), 1000, None))
    gaps = {b - a for a, b in pairwise(pages)}
    assert len(gaps) == 1
    gap_bytes = gaps.pop() * PAGE
    assert pages[0] * PAGE <= gap_bytes
    assert 64 * GIB - pages[-1] * PAGE <= gap_bytes


def test_the_sparse_set_of_a_mapping_in_the_middle_is_on_the_files_grid() -> None:
    """One page of the memfd serves every region of the file, wherever it begins."""
    middle = checkpoints.sparse(Span(10 * MIB, 60 * MIB, PAGE), 1000, None)
    assert middle
    assert middle <= checkpoints.sparse(Span(0, 60 * MIB, PAGE), 1000, None)


def test_the_dense_set_slides_on_the_grid_in_front_of_the_reader() -> None:
    distance = 4 * MIB
    chance = random.Random(5)
    for _ in range(200):
        position = chance.randrange(MIB, GIB)
        pages = checkpoints.dense(WHOLE, position, 40 * MIB, distance)
        offsets = sorted(page * PAGE for page in pages)
        assert all(at % distance == 0 and at >= position for at in offsets)
        assert len(offsets) <= checkpoints.AHEAD_MAX
        if position < GIB - 64 * MIB:
            assert offsets[0] - position < distance
            assert len(offsets) >= checkpoints.AHEAD_MIN


@pytest.mark.parametrize("lookahead", [0, MIB, 64 * MIB, 100 * GIB])
def test_the_dense_set_is_bounded_for_any_window(lookahead: int) -> None:
    pages = checkpoints.dense(WHOLE, 100 * MIB, lookahead, 4 * MIB)
    assert checkpoints.AHEAD_MIN <= len(pages) <= checkpoints.AHEAD_MAX


def test_a_backward_reader_has_its_checkpoints_in_front_of_it() -> None:
    pages = checkpoints.dense(WHOLE, 100 * MIB, 16 * MIB, 4 * MIB, direction=-1)
    offsets = sorted((page * PAGE for page in pages), reverse=True)
    assert offsets[0] == 96 * MIB
    assert all(at % (4 * MIB) == 0 for at in offsets)
    assert checkpoints.AHEAD_MIN <= len(offsets) <= checkpoints.AHEAD_MAX


def test_a_start_is_watched_more_closely() -> None:
    """Paper 1's conclusion: make the non-cached distance small."""
    pages = checkpoints.near(WHOLE, 100 * MIB)
    offsets = sorted(page * PAGE for page in pages)
    assert 100 * MIB < offsets[0] <= 101 * MIB
    assert offsets[-1] < 100 * MIB + checkpoints.DISTANCE_MIN_BYTES
    assert checkpoints.near(Span(0, 100 * MIB, PAGE), 100 * MIB) == set()


def test_the_distance_is_the_users_or_measured() -> None:
    assert checkpoints.distance_bytes(1e9, 256 * MIB, 123 * MIB) == 123 * MIB
    assert checkpoints.distance_bytes(0.0, 16 * MIB, None) == checkpoints.DISTANCE_MIN_BYTES
    for rate in (1e6, 1e8, 1e9, 1e10, 1e11):
        for lookahead in (16 * MIB, 64 * MIB, 256 * MIB, GIB):
            distance = checkpoints.distance_bytes(rate, lookahead, None)
            assert distance >= checkpoints.DISTANCE_MIN_BYTES  # a warm scan must stay cheap
            assert distance % checkpoints.DISTANCE_MIN_BYTES == 0  # on the sparse set's grid
            if distance > checkpoints.DISTANCE_MIN_BYTES:  # a window holds some of them
                assert distance * checkpoints.AHEAD_MIN <= lookahead
    assert checkpoints.distance_bytes(5e9, GIB, None) > checkpoints.DISTANCE_MIN_BYTES
