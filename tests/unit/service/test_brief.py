# SPDX-License-Identifier: Apache-2.0
"""Kinds of files that are mapped for moments."""

from __future__ import annotations

import pytest

from uffdprefetch.protocol.wire import Brief
from uffdprefetch.service.brief import BRIEF_NS, IN_VAIN, KINDS_MAX, TELLING, BriefKinds


def told(
    kinds: BriefKinds, *lived_ns: int, where: str = "/data/crops", in_vain: bool = False
) -> None:
    for number, lived in enumerate(lived_ns):
        kinds.note(f"{where}/{number}.bin", lived, in_vain)


def test_a_file_like_those_that_went_in_moments_is_likely_to() -> None:
    kinds = BriefKinds()
    told(kinds, *[BRIEF_NS // 4] * (TELLING - 1))
    assert kinds.of("/data/crops/next.bin") is Brief.NO
    told(kinds, BRIEF_NS // 4)
    assert kinds.of("/data/crops/next.bin") is Brief.KNOWN
    assert kinds.of("/data/weights/next.bin") is Brief.NO
    assert kinds.of("/data/crops/next.idx") is Brief.NO


def test_one_like_many_that_were_followed_in_vain_need_not_be_told_of() -> None:
    kinds = BriefKinds()
    told(kinds, *[BRIEF_NS // 4] * (IN_VAIN - 1), in_vain=True)
    assert kinds.of("/data/crops/next.bin") is Brief.KNOWN
    told(kinds, BRIEF_NS // 4, in_vain=True)
    assert kinds.of("/data/crops/next.bin") is Brief.UNTOLD


def test_one_that_was_not_followed_in_vain_tells_that_they_are_to_be_told_of() -> None:
    kinds = BriefKinds()
    told(kinds, *[0] * 2 * IN_VAIN, in_vain=True)
    told(kinds, 0, in_vain=False)
    assert kinds.of("/data/crops/next.bin") is Brief.KNOWN


@pytest.mark.parametrize("in_vain", [False, True])
def test_some_that_stay_tell_otherwise(in_vain: bool) -> None:
    kinds = BriefKinds()
    told(kinds, *[0] * 2 * IN_VAIN, *[BRIEF_NS] * 3, in_vain=in_vain)
    assert kinds.of("/data/crops/next.bin") is Brief.NO


def test_one_that_stays_has_the_next_ones_told_of_and_is_soon_forgotten() -> None:
    kinds = BriefKinds()
    told(kinds, *[0] * 2 * IN_VAIN, BRIEF_NS, in_vain=True)
    assert kinds.of("/data/crops/next.bin") is Brief.KNOWN
    told(kinds, *[0] * (IN_VAIN // 2), in_vain=True)
    assert kinds.of("/data/crops/next.bin") is Brief.UNTOLD
    told(kinds, BRIEF_NS, in_vain=False)
    told(kinds, *[0] * (IN_VAIN - 1), in_vain=True)
    assert kinds.of("/data/crops/next.bin") is Brief.KNOWN, "something was gained"


def test_no_more_kinds_are_remembered_than_are_of_use() -> None:
    kinds = BriefKinds()
    for number in range(2 * KINDS_MAX):
        told(kinds, *[0] * TELLING, where=f"/data/{number}")
    assert kinds.of("/data/0/next.bin") is Brief.NO
    assert kinds.of(f"/data/{2 * KINDS_MAX - 1}/next.bin") is Brief.KNOWN
    assert len(kinds._lately) == KINDS_MAX
