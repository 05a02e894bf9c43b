# SPDX-License-Identifier: Apache-2.0
"""When a prefetcher stops, and when it begins again (predict/usage.py)."""

from __future__ import annotations

import pytest

from uffdprefetch.predict.usage import JUDGED_BYTES, Known, Usage
from uffdprefetch.predict.window import Storage

KIB, MIB = 1 << 10, 1 << 20
#: The slow bed, and before anything of it was measured.
BED, UNKNOWN = Storage(300e6, 0.001), Storage(300e6, 0.0)


def known(touched: int, untouched: int, runs: int = 1) -> Known:
    return Known(touched * MIB, untouched * MIB, runs)


def test_who_reads_for_nothing_stops_once_enough_is_known() -> None:
    usage = Usage()
    for _ in range(7):
        assert not usage.note(known(1, 7), BED) and not usage.stopped, "too little is known"
    assert usage.note(known(1, 7), BED) and usage.stopped
    assert not usage.note(known(1, 7), BED) and usage.stopped, "it is told once"


@pytest.mark.parametrize(
    ("more", "storage", "stops"),
    [
        (known(32, 32, 1), BED, False),  # half
        (known(31, 33, 1), BED, False),  # a run is a miss for each 128 KiB, too
        (known(16, 48, 1), BED, True),
        (known(6, 58, 102), BED, True),  # a page of each 640 KiB
        (known(22, 42, 200), BED, False),  # records of a rank that skips: misses would cost more
        (known(22, 42, 100), UNKNOWN, False),
        (known(6, 58, 102), UNKNOWN, True),
        (known(6, 58, 102), Storage(300e6, 0.01), False),  # far away, where a miss costs all
    ],
)
def test_what_stops_is_what_costs_more_than_it_saves(
    more: Known, storage: Storage, stops: bool
) -> None:
    assert Usage().note(more, storage) == stops


def test_only_the_last_bytes_count() -> None:
    usage = Usage()
    for _ in range(100):
        usage.note(known(8, 0), BED)
    assert usage.known.bytes == JUDGED_BYTES
    for _ in range(5):
        assert not usage.note(known(0, 8), BED)
    assert usage.note(known(0, 8), BED), "however good it was before"


def test_it_begins_again_when_half_of_what_is_passed_is_touched() -> None:
    usage = Usage()
    usage.note(known(0, 64), BED)
    for _ in range(3):
        usage.note(known(8, 0), BED)
        assert usage.stopped
    usage.note(known(64, 0), BED)
    assert not usage.stopped
    assert usage.note(known(0, 64), BED), "and may stop once more"


def test_short_notes_are_put_together() -> None:
    usage = Usage()
    for _ in range(100 * 16):
        usage.note(Known(64 * KIB, 0, 1), BED)
    assert len(usage._notes) < 70
    assert JUDGED_BYTES <= usage.known.bytes < JUDGED_BYTES + 2 * MIB
