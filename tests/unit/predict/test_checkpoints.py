# SPDX-License-Identifier: Apache-2.0
"""predict/checkpoints.py: where the checkpoints of a mapping lie."""

from __future__ import annotations

import itertools

import pytest

from uffdprefetch.base.config import ENGINES, FIXED_DISTANCE_BYTES, POLICIES, Config
from uffdprefetch.predict import checkpoints
from uffdprefetch.predict.checkpoints import Span
from uffdprefetch.protocol import wire

PAGE = 4096
MIB = 1 << 20
GIB = 1 << 30
WHOLE = Span(0, GIB, PAGE)


def offsets(span: Span, spacing_bytes: int) -> list[int]:
    return [page * PAGE for page in checkpoints.fixed_set(span, spacing_bytes)]


def test_the_header_the_first_and_the_last_page_carry_none() -> None:
    assert WHOLE.page(0) is None
    assert WHOLE.page(checkpoints.HEADER_BYTES - 1) is None
    assert WHOLE.page(checkpoints.HEADER_BYTES) == checkpoints.HEADER_BYTES // PAGE
    assert WHOLE.page(GIB - PAGE) is None
    assert WHOLE.page(GIB - 2 * PAGE) == GIB // PAGE - 2
    middle = Span(10 * MIB, 60 * MIB, PAGE)
    assert middle.page(10 * MIB) is None
    assert middle.page(10 * MIB + PAGE) == 10 * MIB // PAGE + 1
    assert middle.page(60 * MIB) is None


def test_a_page_that_the_file_ends_within_carries_none() -> None:
    odd = Span(0, GIB - 100, PAGE)
    assert odd.page(GIB - PAGE) is None


@pytest.mark.parametrize("size", [MIB, 39 * MIB, 41 * MIB, 256 * MIB, GIB, 64 * GIB, 1 << 50])
@pytest.mark.parametrize("spacing_bytes", [MIB, 8 * MIB, 40 * MIB])
def test_the_set_is_bounded(size: int, spacing_bytes: int) -> None:
    pages = checkpoints.fixed_set(Span(0, size, PAGE), spacing_bytes)
    assert pages == sorted(set(pages))
    assert len(pages) <= checkpoints.CHECKPOINTS_MAX <= wire.PAGES_MAX
    assert len(pages) <= size / spacing_bytes


def test_a_short_mapping_has_none() -> None:
    assert offsets(Span(0, 40 * MIB - 1, PAGE), 40 * MIB) == []
    assert len(offsets(Span(0, 40 * MIB, PAGE), 40 * MIB)) == 1
    assert len(offsets(Span(0, 40 * MIB, PAGE), 4 * MIB)) == 10


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_policy_lays_checkpoints(engine: str, policy: str) -> None:
    config = Config(engine=engine, policy=policy)
    is_fixed = policy == "fixed" and engine != "off"
    assert config.lays_checkpoints == is_fixed
    assert config.spacing_bytes == (FIXED_DISTANCE_BYTES if is_fixed else 0)
    assert config.keeps_copies == (is_fixed or engine == "pool")
    chosen = Config.of(engine=engine, policy=policy, distance_bytes=MIB)
    assert chosen.spacing_bytes == (MIB if is_fixed else 0)


def test_the_first_lies_behind_the_header_and_the_others_are_spread_evenly() -> None:
    first, *others = offsets(Span(0, 64 * GIB, PAGE), 8 * MIB)
    assert first == checkpoints.HEADER_BYTES
    assert len(others) == checkpoints.CHECKPOINTS_MAX - 1
    steps = {b - a for a, b in itertools.pairwise(others)}
    assert steps == {4 * GIB}
    assert others[-1] >= 60 * GIB


def test_mappings_of_one_file_share_their_grid() -> None:
    """One page of the checkpoint memfd serves them all."""
    whole = set(offsets(Span(0, 60 * MIB, PAGE), 4 * MIB))
    middle = set(offsets(Span(8 * MIB, 60 * MIB, PAGE), 4 * MIB))
    assert middle - whole == {8 * MIB + checkpoints.HEADER_BYTES}


def test_progress_is_followed_in_steps_of_the_window_and_the_rate() -> None:
    assert checkpoints.distance_bytes(1e9, 256 * MIB, 123 * MIB) == 123 * MIB
    assert checkpoints.distance_bytes(0.0, 16 * MIB, None) == checkpoints.DISTANCE_MIN_BYTES
    for rate in (1e6, 1e8, 1e9, 1e10):
        for lookahead in (16 * MIB, 64 * MIB, 256 * MIB):
            distance = checkpoints.distance_bytes(rate, lookahead, None)
            assert distance >= checkpoints.DISTANCE_MIN_BYTES
            if distance > checkpoints.DISTANCE_MIN_BYTES:  # a window holds some of them
                assert 3 * distance <= lookahead
    assert checkpoints.distance_bytes(5e9, GIB, None) > checkpoints.DISTANCE_MIN_BYTES
