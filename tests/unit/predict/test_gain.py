# SPDX-License-Identifier: Apache-2.0
"""predict/gain.py: what the kernel would have waited for, less what was waited for."""

from __future__ import annotations

import random

import pytest

from uffdprefetch.predict.gain import ERROR_SHARE, FileReads, Watched, saved

LATENCY, BANDWIDTH, PIECE = 1e-3, 300e6, 128 << 10
TOOK = LATENCY + PIECE / BANDWIDTH


def kernel_waits(requests: int, computed: float, jumps: bool, at_once: int) -> float:
    """What a reader waits, request by request: who jumps asks and waits; who goes in order has the
    next one asked for when it comes to the last one's first page. ``at_once``: pieces that it reads
    before it computes for all of them."""
    now = waits = 0.0
    ready = TOOK  # of the piece that it comes to next
    for number in range(requests):
        arrived = now
        wait = TOOK if jumps else max(0.0, ready - now)
        waits += wait
        now += wait + (computed * at_once if number % at_once == at_once - 1 else 0.0)
        ready = arrived + TOOK
    return waits


@pytest.mark.parametrize("computed", [0.0, 2e-4, 1e-3, 5e-3])
@pytest.mark.parametrize("at_once", [1, 2, 8, 40])
@pytest.mark.parametrize("jumps", [False, True])
def test_what_readahead_would_have_waited_lies_within_it(
    computed: float, at_once: int, jumps: bool
) -> None:
    requests = 1000
    wall = requests * computed + 0.5  # of which half a second was waited in spite of us
    reads = FileReads(requests, PIECE, requests if jumps else 0)
    found = saved([reads], 0, Watched(wall, wall, 0.5), LATENCY, BANDWIDTH)
    on_link = requests * PIECE / BANDWIDTH - requests * computed
    without = max(kernel_waits(requests, computed, jumps, at_once), on_link)
    assert abs(found.seconds - (without - 0.5)) <= found.error_seconds * 1.02 + 0.01
    if jumps or not computed:
        assert found.seconds == pytest.approx(without - 0.5, rel=0.02, abs=0.01)
        assert found.error_seconds == pytest.approx(without * ERROR_SHARE, rel=0.02, abs=0.01)


def test_who_waits_as_long_as_without_us_has_gained_nothing() -> None:
    reads = [FileReads(100, PIECE, 100)]
    waited = 100 * TOOK
    found = saved(reads, 0, Watched(waited, waited, waited), LATENCY, BANDWIDTH)
    assert found.seconds == pytest.approx(0)
    assert saved([], 0, Watched(9.0, 9.0, 1.0), LATENCY, BANDWIDTH).seconds <= 0


def test_readers_that_wait_side_by_side_gain_their_part_each() -> None:
    reads = [FileReads(4000, PIECE, 4000)]
    alone = saved(reads, 0, Watched(9.0, 9.0, 0.0), LATENCY, 1e12)
    four = saved(reads, 0, Watched(9.0, 36.0, 0.0), LATENCY, 1e12)
    assert alone.seconds == pytest.approx(4 * four.seconds)


def test_it_is_never_more_than_one_request_after_the_other() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        files = [
            FileReads(chance.uniform(0, 1e4), 1 << chance.randrange(12, 23), chance.uniform(0, 1e4))
            for _ in range(chance.randrange(4))
        ]
        wall = chance.uniform(1e-3, 100)
        threads = wall * chance.uniform(1, 9)
        watched = Watched(wall, threads, threads * chance.random())
        latency, bandwidth = chance.uniform(1e-4, 0.1), chance.uniform(1e6, 1e10)
        misses = chance.randrange(100)
        most = sum(one.requests * (latency + one.request_bytes / bandwidth) for one in files)
        found = saved(files, misses, watched, latency, bandwidth)
        assert found.seconds <= most + misses * latency
        assert found.error_seconds >= 0
