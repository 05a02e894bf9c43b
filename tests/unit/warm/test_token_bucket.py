# SPDX-License-Identifier: Apache-2.0
"""The rate limit: a token bucket under a clock of ours."""

from __future__ import annotations

import random

import pytest

from uffdprefetch.warm.token_bucket import TokenBucket

MIB, GIB = 1 << 20, 1 << 30
SECOND = 1_000_000_000


def send_all(bucket: TokenBucket, extents: list[int], now_ns: int = 0) -> list[tuple[int, int]]:
    """Send extents as early as the bucket lets us: (time, bytes) of each."""
    sent = []
    for length in extents:
        wait = bucket.wait_ns(now_ns)
        assert wait >= 0
        if wait:
            now_ns += wait
            assert bucket.wait_ns(now_ns) == 0, "the wait it told was too short"
        bucket.take(length)
        sent.append((now_ns, length))
    return sent


def test_without_a_rate_nothing_waits() -> None:
    bucket = TokenBucket(None, 4 * MIB)
    assert [at for at, _ in send_all(bucket, [64 * MIB] * 100)] == [0] * 100


@pytest.mark.parametrize("rate", [MIB, 100 * MIB, 10 * GIB])
@pytest.mark.parametrize("extent", [64 << 10, 2 * MIB, 4 * MIB])
def test_the_rate_holds_over_any_stretch(rate: int, extent: int) -> None:
    burst = 4 * MIB
    sent = send_all(TokenBucket(rate, burst), [extent] * 300)
    for first in range(0, 300, 37):
        bytes_ = 0
        for at, length in sent[first:]:
            bytes_ += length
            seconds = (at - sent[first][0]) / SECOND
            # a full bucket at first, and one extent of debt at last
            assert bytes_ <= rate * seconds + burst + extent + rate / SECOND


def test_the_rate_is_reached() -> None:
    sent = send_all(TokenBucket(100 * MIB, 4 * MIB), [2 * MIB] * 500)
    seconds = sent[-1][0] / SECOND
    assert sum(length for _, length in sent) == pytest.approx(100 * MIB * seconds, rel=0.02)


def test_a_pause_saves_up_no_more_than_a_burst() -> None:
    bucket = TokenBucket(MIB, 4 * MIB)
    send_all(bucket, [4 * MIB])
    hour = 3600 * SECOND
    at_once = [length for at, length in send_all(bucket, [MIB] * 20, hour) if at == hour]
    assert sum(at_once) <= 5 * MIB


def test_what_turned_out_to_be_resident_is_given_back() -> None:
    bucket = TokenBucket(MIB, 4 * MIB)
    assert bucket.wait_ns(0) == 0
    bucket.take(8 * MIB)
    assert bucket.wait_ns(0) > 0
    bucket.take(-8 * MIB)
    assert bucket.wait_ns(0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_odd_sizes_and_idle_times(seed: int) -> None:
    chance = random.Random(seed)
    rate, burst = 50 * MIB, 4 * MIB
    bucket = TokenBucket(rate, burst)
    now_ns = total = 0
    for _ in range(500):
        now_ns += chance.choice((0, 0, 1, chance.randrange(100_000_000)))
        if bucket.wait_ns(now_ns) == 0:
            length = chance.randrange(1, 4 * MIB)
            bucket.take(length)
            total += length
        assert total <= rate * now_ns / SECOND + burst + 4 * MIB
