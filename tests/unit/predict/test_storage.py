# SPDX-License-Identifier: Apache-2.0
"""What a miss and a stream cost."""

from __future__ import annotations

import pytest

from uffdprefetch.predict.storage import MISS_BYTES, Link, Storage

MS = 1e-3


def test_a_miss_waits_for_its_latency_and_its_bytes_and_a_stream_for_these_alone() -> None:
    storage = Storage(100e6, 2 * MS)
    assert storage.stream_seconds(1e6) == pytest.approx(10 * MS)
    assert storage.request_seconds(1e6) == pytest.approx(12 * MS)
    assert Link(100e6, 2 * MS, miss_bytes=100_000).miss_seconds == pytest.approx(3 * MS)


def test_in_order_half_of_the_latency_of_each_miss_is_waited_for() -> None:
    link = Link(100e6, 2 * MS)
    assert link.in_order_seconds(MISS_BYTES) == pytest.approx(MS)
    assert link.in_order_seconds(10 * MISS_BYTES) == pytest.approx(10 * MS)


def test_what_is_under_way_lasts_for_the_latency_and_what_is_asked_for() -> None:
    storage = Storage(100e6, 2 * MS)
    assert (storage.busy_bytes(), storage.busy_bytes(8 * MS)) == (200_000, 1_000_000)
    assert Link(100e6, 2 * MS, miss_bytes=4096).reach_bytes == 204_096


@pytest.mark.parametrize(("waiting", "counts"), [(0.0, 1.0), (1.0, 1.0), (4.0, 0.25)])
def test_waits_side_by_side_count_once(waiting: float, counts: float) -> None:
    assert Link(100e6, MS, waiting).beside_others(1.0, 0) == counts


@pytest.mark.parametrize(("beside", "counts"), [(0.0, 0.25), (2.9, 0.25), (3.0, 0.0), (4.0, 0.0)])
def test_a_wait_in_which_the_link_is_busy_for_others_counts_for_nothing(
    beside: float, counts: float
) -> None:
    link = Link(100e6, MS, waiting=4, beside=beside)
    assert link.beside_others(3 * MS, 100_000) == pytest.approx(counts * 3 * MS)


def test_who_has_gone_on_by_itself_tells_how_much_of_its_time_it_waits() -> None:
    link = Link(3e9, 1e-4)
    assert link.as_seen(0.0, 0.0) is link
    as_fast = link.as_seen(3e9, 0.0)
    assert as_fast.in_order_seconds(MISS_BYTES) == 0.0
    assert as_fast.miss_seconds == link.miss_seconds, "who comes from elsewhere waits as before"
    assert link.as_seen(2e9, 0.0).in_order_seconds(3e9) == pytest.approx(1.5 - 1)
    slow = link.as_seen(100e6, 0.0)
    assert slow.in_order_seconds(1e9) == link.in_order_seconds(1e9), "it computes, too"


def test_it_tells_no_less_than_what_the_storage_brings() -> None:
    seen = Link(100e6, 1e-3).as_seen(2e9, 2.5e9)
    assert seen.bandwidth_bytes_per_second == 2e9
    assert seen.in_order_seconds(2e9) == pytest.approx(1 - 2 / 2.5), "the best there is"
