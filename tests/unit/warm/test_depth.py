# SPDX-License-Identifier: Apache-2.0
"""warm/depth.py against a model link: bandwidth B, latency L, Q bytes under way give
min(B, Q / (L + Q / B)) bytes/s."""

from __future__ import annotations

import itertools

import pytest

from uffdprefetch.warm.depth import MAX_BYTES, MAX_SECONDS, MIN_BYTES, MIN_SECONDS, Depth


def link(under_way: int, bandwidth: float, latency: float) -> float:
    return under_way / (latency + under_way / bandwidth)


def run(depth: Depth, bandwidth: float, latency: float, samples: int) -> list[int]:
    seen = []
    for _ in range(samples):
        depth.note(link(depth.bytes, bandwidth, latency))
        seen.append(depth.bytes)
    return seen


def test_a_long_link_gets_enough_under_way_to_be_filled() -> None:
    depth = Depth()
    run(depth, bandwidth=2e9, latency=0.010, samples=40)
    assert link(depth.bytes, 2e9, 0.010) > 0.7 * 2e9
    assert link(MIN_BYTES, 2e9, 0.010) < 0.2 * 2e9, "else the test shows nothing"


def test_a_short_link_keeps_little_under_way() -> None:
    depth = Depth()
    seen = run(depth, bandwidth=3e8, latency=0.001, samples=200)
    assert sorted(seen)[len(seen) // 2] <= 1.5 * MIN_BYTES


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e9, 1e12])
def test_a_demand_miss_never_waits_longer_than_the_bound(bandwidth: float) -> None:
    depth = Depth()
    for latency in (1e-6, 1e-3, 1.0) * 40:
        sample = link(depth.bytes, bandwidth, latency)
        depth.note(sample)
        assert MIN_BYTES <= depth.bytes <= MAX_BYTES
        assert depth.bytes <= max(MIN_BYTES, sample * MAX_SECONDS)


def test_a_fast_link_is_kept_busy_while_the_service_is_elsewhere() -> None:
    depth = Depth()
    for _ in range(100):
        sample = link(depth.bytes, 1e9, 0.0005)
        depth.note(sample)
        assert depth.bytes >= int(sample * MIN_SECONDS)


def test_a_link_that_becomes_slow_loses_its_depth_at_once() -> None:
    depth = Depth()
    run(depth, bandwidth=1e9, latency=0.020, samples=60)
    assert depth.bytes > 2 * MIN_BYTES
    run(depth, bandwidth=5e7, latency=0.001, samples=2)
    assert depth.bytes == MIN_BYTES


def test_a_link_that_becomes_long_is_noticed_by_a_later_try() -> None:
    depth = Depth()
    run(depth, bandwidth=2.5e8, latency=0.0005, samples=50)
    before = depth.bytes
    run(depth, bandwidth=2.5e8, latency=0.010, samples=100)
    assert depth.bytes > before


def test_noise_does_not_make_it_climb() -> None:
    depth = Depth()
    seen = []
    for factor in itertools.islice(itertools.cycle((1.0, 1.04, 0.97, 1.02)), 200):
        depth.note(3e8 * factor)
        seen.append(depth.bytes)
    assert max(seen) <= max(MIN_BYTES, 3e8 * 1.04 * MIN_SECONDS) * 1.5


def test_what_a_try_has_found_holds_for_a_second_of_samples() -> None:
    """A try has more stand before a demand miss, so they are few; a link that changes is met by the
    next one."""
    depth = Depth()
    seen = run(depth, bandwidth=3e8, latency=0.0, samples=400)
    tries = [at for at, (a, b) in enumerate(itertools.pairwise(seen)) if b > a]
    gaps = {b - a for a, b in itertools.pairwise(tries)}
    assert len(tries) > 10 and gaps == {21}  # of MAX_SECONDS each
