# SPDX-License-Identifier: Apache-2.0
"""What reading ahead is worth, and the account that bounds what it may lose."""

from __future__ import annotations

import pytest

from uffdprefetch.predict.storage import (
    FREE_BYTES,
    FREE_SECONDS,
    OPEN_SHARE,
    RANDOM_FREE_BYTES,
    SHY,
    UNDER_WAY_BYTES,
    Account,
    Link,
    Storage,
    least_gain,
    least_probability,
    stream_gain,
)

BLOCK = 64 << 10
LINK = Link(300e6, 1e-3)


def test_a_gain_of_nothing_is_worth_no_probability() -> None:
    assert least_probability(0.0, LINK) == 1.0
    assert least_probability(SHY, LINK) == 1.0
    assert least_probability(10 * SHY, LINK) == pytest.approx(0.1)


def test_what_saves_less_than_reading_ahead_takes_is_never_worth_it() -> None:
    """Of a core: the faster the link, the larger a part of its time that is."""
    assert least_gain(Link(3e9)) == pytest.approx(10 * least_gain(Link(300e6)))
    near = Link(3e9)
    assert least_probability(1.1 * least_gain(near), near, kernel=1.0) < 1.0
    assert least_probability(least_gain(near), near, kernel=1.0) == 1.0


def test_what_plain_reads_as_well_costs_nothing() -> None:
    assert least_probability(0.5, LINK, kernel=1.0) < least_probability(0.5, LINK)


def test_the_longer_the_latency_the_more_is_gained() -> None:
    gains = [stream_gain(1.0, 0.1, False, Link(300e6, ms * 1e-3)) for ms in (0.1, 1, 5)]
    assert gains == sorted(gains)
    assert stream_gain(1.0, 0.1, True, LINK) > stream_gain(1.0, 0.1, False, LINK)


def test_a_miss_that_brings_a_page_alone_makes_every_block_worth_more() -> None:
    alone = Link(300e6, 1e-3, miss_bytes=4096)
    assert stream_gain(1.0, 0.1, False, alone) > 10 * stream_gain(1.0, 0.1, False, LINK)


def test_readers_that_wait_side_by_side_gain_less() -> None:
    four = Link(300e6, 1e-3, waiting=4)
    assert stream_gain(1.0, 0.1, False, four) < stream_gain(1.0, 0.1, False, LINK)


def test_nothing_is_gained_over_a_link_that_others_keep_busy() -> None:
    """Four that each wait for a request of their own: at 300 MB/s and 1 ms they keep it busy."""
    four = Link(300e6, 1e-3, waiting=4, beside=3)
    assert stream_gain(1.0, 0.1, False, four) == 0.0
    assert least_probability(0.0, four, kernel=1.0) == 1.0
    assert stream_gain(1.0, 0.1, False, Link(1e9, 1e-3, waiting=4, beside=3)) > 0.0


def test_what_is_used_over_a_busy_link_has_saved_nothing() -> None:
    account, four = Account(), Link(300e6, 1e-3, waiting=4, beside=3)
    account.note_use(1 << 20, 0, True, four)
    assert account.saved_seconds == 0.0 and account.used == 1 << 20
    account.note_use(1 << 20, 0, True, LINK)
    assert account.saved_seconds > 0.0


def test_of_runs_the_latency_is_saved_and_what_their_misses_bring_is_waited_for_once() -> None:
    """Ends of records of 512 KiB, one of four whole: plain reads half of it, all takes as long."""
    quick = Link(300e9, 1e-3)
    gains = [stream_gain(2 / 8, 1 / 8, False, link) for link in (LINK, quick)]
    assert gains[0] == pytest.approx(LINK.latency_seconds / 8 / LINK.stream_seconds(BLOCK))
    assert gains[1] == pytest.approx(1000 * gains[0]), "no transfer is saved"
    ends = stream_gain(0.44, 0.094, False, LINK)
    assert least_probability(ends, LINK, kernel=0.56) >= 1
    skips = stream_gain(0.4, 0.154, False, LINK)
    assert least_probability(skips, LINK, kernel=0.7) < 0.95


def test_a_run_may_lose_what_is_free_and_a_part_of_what_it_has_saved() -> None:
    account = Account()
    slow = Storage(50e6, 1e-3)  # else it is FREE_BYTES that bounds it
    free = FREE_SECONDS * slow.bandwidth_bytes_per_second
    assert account.room_bytes(slow) == int(free / OPEN_SHARE)
    account.asked = account.lost = int(free)
    assert account.room_bytes(slow) == 0
    account.saved_seconds = 0.01
    assert account.room_bytes(slow) == int(
        0.01 / SHY * slow.bandwidth_bytes_per_second / OPEN_SHARE
    )


@pytest.mark.parametrize("free", [FREE_BYTES, RANDOM_FREE_BYTES])
def test_no_more_is_lost_than_was_used_and_a_little_however_fast_the_link_is(free: int) -> None:
    account = Account(saved_seconds=1.0)
    assert account.room_bytes(Storage(20e9), free_bytes=free) == free / OPEN_SHARE
    account.asked = account.lost = free
    assert account.room_bytes(Storage(20e9), free_bytes=free) == 0
    account.asked, account.used = free + BLOCK, BLOCK
    assert account.room_bytes(Storage(20e9), free_bytes=free) == BLOCK / OPEN_SHARE


def test_what_is_free_is_what_a_job_that_gains_nothing_is_allowed() -> None:
    allowed = 4 << 20  # bench/harm_table.py
    assert allowed == FREE_BYTES
    assert allowed / 2 <= RANDOM_FREE_BYTES / OPEN_SHARE <= allowed
    assert FREE_BYTES / OPEN_SHARE >= 8e9 * 1e-3  # keeps a link of 8 GB/s and 1 ms busy


def test_what_is_under_way_of_a_stream_is_bounded_and_keeps_a_fast_disk_busy() -> None:
    assert 3e9 * 5e-3 <= UNDER_WAY_BYTES <= 2 * 3e9 * 5e-3


def test_what_is_open_is_thought_half_lost() -> None:
    account = Account(asked=BLOCK)
    assert account.room_bytes(LINK) == Account().room_bytes(LINK) - BLOCK
    account.note_use(BLOCK, 0, False, LINK)
    assert account.open == 0 and account.saved_seconds > 0


def test_a_miss_that_did_not_happen_saves_its_latency_and_its_bytes() -> None:
    went_on, began = Account(), Account()
    went_on.note_use(BLOCK, 0, False, LINK)
    began.note_use(BLOCK, 0, True, LINK)
    more = began.saved_seconds - went_on.saved_seconds
    assert more == pytest.approx(
        LINK.latency_seconds / 2 + LINK.miss_bytes / LINK.bandwidth_bytes_per_second
    )


def test_what_is_used_after_all_was_not_lost() -> None:
    account = Account(asked=2 * BLOCK, lost=BLOCK)
    account.note_use(BLOCK, BLOCK, False, LINK)
    assert account.lost == 0 and account.used == BLOCK and account.open == BLOCK


def test_what_files_that_are_read_whole_have_had_is_free_for_no_other() -> None:
    account = Account(over=FREE_BYTES - BLOCK)
    assert account.spare_bytes(0, FREE_BYTES, 0.25) == BLOCK
    assert account.room_bytes(Storage(20e9)) == BLOCK / OPEN_SHARE
    account.over = 2 * FREE_BYTES
    assert account.spare_bytes(0, FREE_BYTES, 0.25) == account.room_bytes(Storage(20e9)) == 0


def test_what_nobody_needs_yet_is_bounded_by_what_was_used() -> None:
    account, free = Account(), 64 * BLOCK

    def spare(own: int = 0) -> int:
        return account.spare_bytes(own, free, 0.25)

    assert spare() == free
    account.asked = account.used = 4 * BLOCK
    assert spare() == free + BLOCK
    account.asked += 3 * BLOCK
    assert spare(3 * BLOCK) == free + BLOCK, "its own is a part of that"
    assert spare(2 * BLOCK) == free, "but not what others have"
    account.lost = 2 * free
    assert spare() == 0
