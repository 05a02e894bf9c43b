# SPDX-License-Identifier: Apache-2.0
"""predict/order/guard.py: an order of which what is prefetched is not read."""

from __future__ import annotations

import pytest

from uffdprefetch.predict.order.guard import MIB, READ_BYTES, SAMPLE_BYTES, SAMPLES, OrderGuard


def test_who_reads_and_does_not_come_on_follows_another_order() -> None:
    """As much as is prefetched for it may be read before it moves, by many workers: no more."""
    guard = OrderGuard(now_ns=5)
    guard.on_issued(0, 10 * MIB, 0)
    guard.scanned(100 * MIB, 4)
    assert guard.stands_still is None, "read since before it was there"
    for _ in range(3):
        guard.scanned(20 * MIB, 5)
        assert guard.stands_still is None, "a fast reader goes on by much between two looks"
    guard.scanned(6 * MIB, 6)
    assert "66 MiB were read" in str(guard.stands_still)
    guard.on_position(MIB, 7)
    guard.scanned(100 * MIB, 6)
    assert guard.stands_still is None, "it has moved since the scan before"
    guard.on_position(100 * MIB, 8)
    assert guard.stands_still is None, "who is beyond what was prefetched"


def test_what_an_unmapped_page_table_told_is_not_judged() -> None:
    guard = OrderGuard()
    walked(guard, SAMPLES)
    guard.unmapped()
    assert not guard.has_samples and guard.judge(9, lambda *_: False) is None


def walked(guard: OrderGuard, count: int, read_bytes: int = SAMPLE_BYTES) -> None:
    """So many pieces were handed out and are behind the reader, at time 1."""
    for need in range(0, count * SAMPLE_BYTES, SAMPLE_BYTES):
        guard.on_issued(need, need + 4096, need)
        guard.on_touched(read_bytes)
    guard.on_position(count * SAMPLE_BYTES, 1)


def test_what_nobody_touches_while_its_readers_read_elsewhere_is_wrong() -> None:
    guard = OrderGuard()
    walked(guard, SAMPLES)
    assert guard.has_samples
    why = guard.judge(1, lambda start, end: start % (8 * SAMPLE_BYTES) == 0)
    assert why == "32 of 256 ranges that were prefetched for it were touched, and 64 MiB were read"
    assert not guard.has_samples and guard.judge(2, lambda *_: False) is None, "once"


@pytest.mark.parametrize("one_in", [1, 2, 3])
def test_an_order_that_is_read_in_part_is_not(one_in: int) -> None:
    guard = OrderGuard()
    walked(guard, 2 * SAMPLES)
    assert guard.judge(1, lambda start, end: start % (one_in * SAMPLE_BYTES) == 0) is None


def test_nor_is_one_that_nobody_reads_or_whose_pages_are_gone_at_once() -> None:
    guard = OrderGuard()
    walked(guard, 2 * SAMPLES, read_bytes=READ_BYTES // SAMPLES // 3)
    assert guard.judge(1, lambda *_: False) is None


def test_what_no_scan_can_have_seen_yet_is_not_judged() -> None:
    guard = OrderGuard()
    walked(guard, SAMPLES)
    assert guard.judge(0, lambda *_: False) is None and guard.has_samples
    assert guard.judge(1, lambda *_: False) is not None


def test_what_lies_ahead_is_not_judged() -> None:
    guard = OrderGuard()
    for need in range(0, 128 * MIB, SAMPLE_BYTES):
        guard.on_issued(need, need + 4096, need)
    guard.on_touched(READ_BYTES)
    guard.on_position(SAMPLES * SAMPLE_BYTES - 1, 1)
    asked: list[int] = []
    assert guard.judge(9, lambda start, end: bool(asked.append(start))) is not None
    assert len(asked) == SAMPLES and max(asked) < SAMPLES * SAMPLE_BYTES


def test_of_many_pieces_some_are_watched() -> None:
    guard = OrderGuard()
    for need in range(0, 64 * MIB, 4096):
        guard.on_issued(need, need + 4096, need)
    guard.on_position(64 * MIB, 1)
    asked: list[int] = []
    guard.judge(1, lambda start, end: bool(asked.append(start)))
    assert len(asked) == SAMPLES


def test_of_a_long_piece_each_part_is_watched() -> None:
    guard = OrderGuard()
    guard.on_issued(MIB, 65 * MIB, 0)
    guard.on_position(64 * MIB, 1)
    asked: list[tuple[int, int]] = []
    guard.judge(1, lambda start, end: bool(asked.append((start, end))))
    assert asked == [(MIB + n * SAMPLE_BYTES, MIB + (n + 1) * SAMPLE_BYTES) for n in range(256)]
