# SPDX-License-Identifier: Apache-2.0
"""Which call fills the page cache, and when a choice is given up."""

from __future__ import annotations

import pytest

from uffdprefetch.base.cache_call import MIB, Doubt, choose, corrected
from uffdprefetch.base.file_systems import LUSTRE, PREAD, PROBE, READAHEAD

EXT4, GPFS = 0xEF53, 0x47504653


@pytest.mark.parametrize("ahead", [None, 0, 4 * MIB])
@pytest.mark.parametrize("told", [True, False])
def test_on_lustre_whole_requests_are_read_whatever_else_is_known(
    ahead: int | None, told: bool
) -> None:
    choice = choose(LUSTRE, ahead, told)
    assert (choice.call, choice.chunk_bytes) == (PREAD, 4 * MIB)
    assert choice.reason.startswith("pread, FADV_RANDOM of 4096 KiB, known of Lustre")
    assert ("not told to us" in choice.reason) != told


def test_where_the_kernels_readahead_works_its_size_says_how_much_a_call_brings() -> None:
    assert choose(EXT4, 128 << 10, True)[:2] == (READAHEAD, 256 << 10)
    assert choose(EXT4, 8 * MIB, True)[:2] == (READAHEAD, 4 * MIB)
    assert choose(EXT4, 0, True)[:2] == (PREAD, 4 * MIB)
    assert choose(EXT4, None, True).call == PROBE  # it has no number: one call tells


def test_an_unknown_file_system_is_tried_if_somebody_tells_what_came() -> None:
    for f_type in (GPFS, 0x12345678):
        assert choose(f_type, 128 << 10, True).call == PROBE
        assert choose(f_type, 128 << 10, False)[:2] == (READAHEAD, 256 << 10)
        assert choose(f_type, 0, False).call == PREAD
        assert "not told to us" in choose(f_type, 0, False).reason


# ---- checked while running ----------------------------------------------------------------------


def test_a_call_that_brings_nothing_is_doubted_after_some_extents_and_not_before() -> None:
    doubt = Doubt()
    verdicts = [doubt.note(4 * MIB, 0) for _ in range(8)]
    assert verdicts[:7] == [None] * 7
    assert verdicts[7] == (32 * MIB, 0)
    assert doubt.note(4 * MIB, 0) is None, "it begins anew"


def test_a_call_of_which_half_is_dropped_now_and_then_is_kept() -> None:
    doubt = Doubt()
    assert not any(doubt.note(4 * MIB, 4 * MIB * (i % 2)) for i in range(200))


def test_what_came_long_ago_does_not_excuse_what_does_not_come_now() -> None:
    doubt = Doubt()
    assert not any(doubt.note(4 * MIB, 4 * MIB) for _ in range(1000))
    assert any(doubt.note(4 * MIB, 0) for _ in range(9))


def test_readahead_is_given_up_for_pread_and_pread_for_nothing() -> None:
    choice = corrected(READAHEAD, 32 * MIB, 1 * MIB)
    assert choice is not None and choice.call == PREAD
    assert "readahead(2) brought 1 of 32 MiB" in choice.reason
    assert corrected(PREAD, 32 * MIB, 0) is None
