# SPDX-License-Identifier: Apache-2.0
"""Kinds of files that are mapped for moments."""

from __future__ import annotations

from uffdprefetch.service.brief import BRIEF_NS, KINDS_MAX, TELLING, BriefKinds


def told(kinds: BriefKinds, *lived_ns: int, where: str = "/data/crops") -> None:
    for number, lived in enumerate(lived_ns):
        kinds.note(f"{where}/{number}.bin", lived)


def test_a_file_like_those_that_went_in_moments_is_likely_to() -> None:
    kinds = BriefKinds()
    told(kinds, *[BRIEF_NS // 4] * (TELLING - 1))
    assert not kinds.has("/data/crops/next.bin")
    told(kinds, BRIEF_NS // 4)
    assert kinds.has("/data/crops/next.bin")
    assert not kinds.has("/data/weights/next.bin") and not kinds.has("/data/crops/next.idx")


def test_one_that_stays_tells_otherwise() -> None:
    kinds = BriefKinds()
    told(kinds, *[0] * 100, BRIEF_NS)
    assert not kinds.has("/data/crops/next.bin")


def test_no_more_kinds_are_remembered_than_are_of_use() -> None:
    kinds = BriefKinds()
    for number in range(2 * KINDS_MAX):
        told(kinds, *[0] * TELLING, where=f"/data/{number}")
    assert not kinds.has("/data/0/next.bin") and kinds.has(f"/data/{2 * KINDS_MAX - 1}/next.bin")
    assert len(kinds._in_a_row) == KINDS_MAX
