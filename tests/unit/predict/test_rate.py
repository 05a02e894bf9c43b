# SPDX-License-Identifier: Apache-2.0
"""predict/streams.py: how fast readers go by themselves."""

from __future__ import annotations

import pytest

from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.streams import OwnPace, PlainRate

MS = 1_000_000
#: 2 MiB in 2 ms.
FAST = 32


def looks(
    pace: OwnPace, count: int, blocks: int = FAST, asked: int = 0, delayed: int = 0, since: int = 0
) -> float:
    """Looks 2 ms apart, after ``since`` others, between which it waits for a core for so long; what
    the last one told."""
    told = 0.0
    for number in range(since, since + count):
        now, waited = (number + 1) * 2 * MS, number * delayed
        told = pace.saw(blocks, asked, now - 2 * MS, now, lambda waited=waited: waited)  # type: ignore[misc]
    return told


def test_the_pace_of_a_slow_reader_is_not_asked_for() -> None:
    pace = OwnPace()
    assert not looks(pace, 50, blocks=8) and not pace.waits and not pace.is_told


def test_who_is_fast_waits_until_its_pace_is_told() -> None:
    pace = OwnPace()
    looks(pace, 10)
    assert pace.waits
    assert looks(pace, 1, since=10) == pytest.approx(FAST * 65536 / 2e-3)
    assert pace.is_told and not pace.waits


def test_who_has_gone_far_before_it_is_seen_may_be_fast() -> None:
    pace = OwnPace()
    pace.saw(256, 0, None, 5 * MS, lambda: 0)
    assert pace.waits
    pace = OwnPace()
    pace.saw(8, 0, None, 5 * MS, lambda: 0)
    assert not pace.waits


def test_what_was_read_ahead_is_no_pace_of_its_own() -> None:
    pace = OwnPace()
    assert not looks(pace, 50, asked=FAST) and not pace.waits, "it is as fast as we are"
    looks(pace, 5, asked=FAST // 4, since=50)
    assert pace.waits, "some is, to measure the link"
    assert not looks(pace, 50, asked=FAST, since=55) and pace.waits
    assert looks(pace, 10, asked=FAST // 4, since=105) > 0


def test_waits_for_a_core_are_none_for_storage() -> None:
    pace = OwnPace()
    assert not looks(pace, 20, delayed=MS)
    assert looks(pace, 1, delayed=MS, since=20) == pytest.approx(FAST * 65536 / 1e-3)


def test_what_was_unmapped_ends_a_stretch() -> None:
    pace = OwnPace()
    looks(pace, 10)
    pace.pause()
    assert not pace.saw(FAST, 0, 0, 10**9, lambda: 0)


def test_the_best_of_late_counts() -> None:
    rate = PlainRate()
    rate.note(3e9, LATELY_NS)
    rate.note(1e9, LATELY_NS + MS)
    assert 2.9e9 < rate.bytes_per_second < 3e9
    rate.note(1e9, 4 * LATELY_NS)
    assert rate.bytes_per_second == 1e9
