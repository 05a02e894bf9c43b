# SPDX-License-Identifier: Apache-2.0
"""What requests cost, for who asks afterwards (warm/meter.py)."""

from __future__ import annotations

import pytest

from uffdprefetch.native import uffd
from uffdprefetch.predict.storage import MISS_BYTES, SLOW_BYTES_PER_SECOND
from uffdprefetch.warm.meter import LATENCY_LEAST, BusyStretches, Meter

MIB, BANDWIDTH, LATENCY = 1 << 20, 300e6, 1e-3


def read(length: int, seconds: float) -> uffd.WarmResult:
    return uffd.WarmResult(1, 0, 0, int(seconds * 1e9), 0, length, 0, 0, length, 0)


def met(*alone: tuple[int, float], pages: tuple[float, ...] = ()) -> Meter:
    meter = Meter(busy=BusyStretches(bandwidth=BANDWIDTH))
    for length, seconds in alone:
        result = read(length, seconds)
        meter.quickest.note(result, length)
        meter.note_alone(result)
    for seconds in pages:
        meter.note_pages(read(4096, seconds), 1)
    return meter


def test_of_a_few_reads_beside_which_others_waited_no_latency_is_told() -> None:
    """It was 22 ms of a link of 1 ms, by two of them."""
    assert Meter().cost().latency_seconds == 0.0
    assert met((2 * MIB, 0.05)).cost().latency_seconds == 0.0
    assert met((MIB, 0.05), pages=(0.02, 0.02)).cost().latency_seconds == 0.0
    assert met(*[(MIB, 0.005)] * 9).cost().latency_seconds == 0.0  # what is it of them?


def test_the_quickest_of_all_small_reads_tells_what_one_takes() -> None:
    """Be it read alone or not: of a reader that skips two were, and nothing was told."""
    quick, slow = (MIB // 8, LATENCY + MIB / 8 / BANDWIDTH), (MIB // 8, 0.05)
    large = (MIB, 0.06)
    cost = met(slow, quick, large, slow).cost()
    assert cost.latency_seconds == pytest.approx(LATENCY - LATENCY_LEAST)
    assert cost.bandwidth_bytes_per_second == pytest.approx(BANDWIDTH)
    page = LATENCY + 4096 / BANDWIDTH
    few = met(large, pages=(0.02, page, 0.2)).cost()
    assert few.latency_seconds == pytest.approx(LATENCY - LATENCY_LEAST)
    many = met(*[slow] * 99, quick).cost()
    assert many.latency_seconds == pytest.approx(LATENCY - LATENCY_LEAST)


def test_where_a_stretch_was_busy_that_tells_the_bandwidth() -> None:
    """Beside a small read that had stood behind others another made a link of 750 MB/s."""
    slow, other = (MIB // 16, 2.01e-3), (MIB // 4, LATENCY + MIB / 4 / BANDWIDTH)
    meter = met(slow, other, (MIB, 2.1e-3))
    assert meter.cost().bandwidth_bytes_per_second > 2 * BANDWIDTH
    meter.busy.peak = BANDWIDTH
    assert meter.cost().bandwidth_bytes_per_second == BANDWIDTH


@pytest.mark.parametrize("peak", [0.0, BANDWIDTH / 10])
@pytest.mark.parametrize(
    ("size", "least", "most"), [(MIB // 16, 0.8, 0.9), (MIB // 8, 1, 1), (MIB // 4, 0.6, 0.7)]
)
def test_where_no_stretch_was_busy_a_miss_takes_no_less_than_a_small_read(
    size: int, least: float, most: float, peak: float
) -> None:
    """Who waits for one request at a time leaves a link of 300 MB/s at 30, and of strides of single
    blocks no large read tells: nothing was told."""
    meter = met(*[(size, LATENCY + size / BANDWIDTH)] * 3)
    meter.busy = BusyStretches(peak=peak)
    told = meter.cost().request_seconds(MISS_BYTES) + LATENCY_LEAST
    miss = LATENCY + MISS_BYTES / BANDWIDTH
    assert least * miss <= told * 1.0001 and told * 0.9999 <= most * miss


def took(size: int) -> float:
    return LATENCY + size / BANDWIDTH


def test_where_all_small_reads_had_stood_behind_others_a_large_one_tells_the_latency() -> None:
    """A tenth too much was told of who goes in order, by a latency of 1.4 ms of a link of 1 ms."""
    small, large = (MIB // 16, 1.5 * took(MIB // 16)), (MIB, 1.02 * took(MIB))
    meter, few = met(*[small] * 7, *[large] * 8), met(*[small] * 7, *[large] * 7)
    for one in (meter, few):
        one.busy = BusyStretches(peak=BANDWIDTH)
    assert meter.cost().latency_seconds < 1.1 * LATENCY < few.cost().latency_seconds
    meter._of_all.peak = 1.01 * BANDWIDTH  # guesses have kept it busier
    assert meter.cost().bandwidth_bytes_per_second == 1.01 * BANDWIDTH


@pytest.mark.parametrize("slow", [(), ((MIB, 0.021),)])
def test_what_a_miss_takes_is_told_by_reads_of_its_size(
    slow: tuple[tuple[int, float], ...],
) -> None:
    """A large one that had stood behind others made a link of 49 MB/s, and nothing was told."""
    small = [(size, took(size)) for size in (MIB // 16, MIB // 8)] * 3
    meter = met(*small, *slow)
    meter.busy = BusyStretches()
    told = meter.cost().request_seconds(MISS_BYTES)
    assert told == pytest.approx(took(MISS_BYTES) - LATENCY_LEAST)


def test_what_was_there_in_part_tells_no_cost() -> None:
    """A request that another had begun was 0.05 ms of 192 KiB: the link had 7 GB/s then."""
    quick = (MIB // 8, LATENCY + MIB / 8 / BANDWIDTH)
    meter, begun = met(*[quick] * 3), read(MIB * 3 // 16, 5e-4)
    before = meter.cost()
    meter.quickest.note(begun._replace(resident_bytes=4096), MIB * 3 // 16)
    meter.quickest.note(begun, MIB // 8)  # of another user's file: so much had to be waited for
    assert meter.cost() == before
    meter.quickest.note(begun, MIB * 3 // 16)
    assert meter.cost() != before


def test_until_something_better_is_known_what_was_there_in_part_tells_a_link() -> None:
    """Where no pages of checkpoints are read, and the first request met the kernel's readahead,
    nothing told: the link was thought slow, and little was read ahead of who went on in order."""
    meter = met((MIB, LATENCY + MIB / BANDWIDTH))
    assert meter.link is None
    half = read(MIB // 8, LATENCY + MIB / 8 / BANDWIDTH)._replace(resident_bytes=MIB // 8)
    meter.note_alone(half)
    assert meter.link is not None
    assert meter.link.latency_seconds == pytest.approx(LATENCY, rel=0.3)
    meter.note_alone(half._replace(done_ns=10_000))
    meter.note_alone(read(MIB // 16, LATENCY + MIB / 16 / BANDWIDTH))
    assert meter.link.latency_seconds == pytest.approx(LATENCY, rel=0.3)


def test_where_nobody_knows_what_was_there_the_quickest_read_tells_nothing() -> None:
    """Of a file of another user's: one read that memory had answered made a link on which nothing
    pays, and whoever jumped about in a shared data set was left alone."""
    meter = met((MIB, LATENCY + MIB / BANDWIDTH))
    for seconds in (1.2 * LATENCY, LATENCY / 9, LATENCY, 1.1 * LATENCY):
        one = read(MIB // 16, seconds + MIB / 16 / BANDWIDTH)
        meter.note_alone(one._replace(sensor=-1))
    for _ in range(50):  # later ones meet the kernel's readahead
        meter.note_alone(read(MIB // 16, LATENCY / 9)._replace(sensor=-1))
    assert meter.link is not None
    assert meter.link.latency_seconds == pytest.approx(LATENCY, rel=0.2)


def test_what_others_have_read_tells_too() -> None:
    fills = [(MIB // 16, 0.9 * LATENCY + MIB / 16 / BANDWIDTH)] * 3
    assert met().cost(fills).latency_seconds == pytest.approx(0.9 * LATENCY - LATENCY_LEAST)
    both = met(pages=(LATENCY,) * 3).cost(fills)
    assert both.latency_seconds == pytest.approx(0.9 * LATENCY - LATENCY_LEAST)


def test_what_memory_has_answered_tells_none() -> None:
    memory = (4096, LATENCY_LEAST / 2)
    assert met(*(memory,) * 3).cost().latency_seconds == 0.0
    far = (0.02, 0.021, 0.022)
    cost = met(memory, pages=far).cost()
    assert cost.latency_seconds == pytest.approx(0.02 - 4096 / BANDWIDTH - LATENCY_LEAST)


def test_without_a_busy_stretch_a_large_read_beside_a_small_one_tells_the_bandwidth() -> None:
    meter = met((MIB, 2 * LATENCY + MIB / BANDWIDTH), (MIB, LATENCY + MIB / BANDWIDTH))
    meter.busy.bandwidth = 0.0
    meter.note_pages(read(4096, LATENCY), 1)
    assert meter.cost().bandwidth_bytes_per_second == pytest.approx(BANDWIDTH, rel=0.01)


def test_a_link_is_what_it_was_at_its_best() -> None:
    """Whatever was read beside: others' requests, on a node whose cores are busy."""
    assert met((MIB // 16, LATENCY)).link is None  # of little no bandwidth is told
    large, small = (MIB, LATENCY + MIB / BANDWIDTH), (MIB // 16, LATENCY + MIB / 16 / BANDWIDTH)
    for others in ([], [(MIB, 0.05), (MIB // 16, 0.03)] * 10):
        good = [large, small] * 3
        link = met(*others, *good, *others, pages=(0.02,)).link
        assert link is not None
        assert link.bandwidth_bytes_per_second == pytest.approx(BANDWIDTH, rel=0.1)
        assert link.latency_seconds == pytest.approx(LATENCY, rel=0.1)


def test_one_rate_in_many_that_no_other_comes_near_is_not_the_links() -> None:
    """A part of what it counts was under way for somebody else."""
    large, small = (MIB, LATENCY + MIB / BANDWIDTH), (MIB // 16, LATENCY + MIB / 16 / BANDWIDTH)
    link = met(*[large, small] * 16, (MIB, LATENCY + MIB / BANDWIDTH / 2)).link
    assert link is not None
    assert link.bandwidth_bytes_per_second == pytest.approx(BANDWIDTH, rel=0.1)


def test_a_small_read_that_took_longer_than_a_large_one_tells_no_latency() -> None:
    """Beside fourteen others on two cores it was 72 and 174 ms of a link of 5."""
    meter = met((MIB, LATENCY + MIB / BANDWIDTH), (MIB // 16, 0.174))
    assert meter.link is not None
    assert meter.link.latency_seconds <= LATENCY + MIB / BANDWIDTH


def test_one_slow_read_makes_no_slow_link() -> None:
    """It stood behind others; who believes it reads so little ahead that no other is told."""
    slow, small = (MIB, 0.0192), (MIB // 16, LATENCY + MIB / 16 / BANDWIDTH)
    link = met(slow, small).link
    assert link is not None and link.bandwidth_bytes_per_second >= SLOW_BYTES_PER_SECOND
    link = met(*[slow] * 3, small).link
    assert link is not None and link.bandwidth_bytes_per_second < SLOW_BYTES_PER_SECOND


def test_what_keeps_a_slow_link_busy_tells_it_where_no_request_is_left_alone() -> None:
    """Guesses that kept a link of 60 MB/s busy all the time left too few alone: it was thought to
    bring 100 MB/s with three times its latency, and they went on."""
    link_rate, small = 60e6, (MIB // 16, 3 * LATENCY + MIB / 16 / 60e6)
    meter = met(small, (MIB, 3 * LATENCY + MIB / link_rate))
    assert meter.link is not None
    assert meter.link.bandwidth_bytes_per_second >= SLOW_BYTES_PER_SECOND
    size, at_ns = 256 << 10, 0
    for _ in range(60):
        start_ns, at_ns = at_ns, at_ns + int(size / link_rate * 1e9)
        meter.note_any(uffd.WarmResult(1, 0, start_ns, at_ns, 0, size, 0, 0, size, 0), False)
    assert meter.link.bandwidth_bytes_per_second == pytest.approx(link_rate, rel=0.1)
    assert meter.link.latency_seconds == pytest.approx(3 * LATENCY, rel=0.1)


def test_a_slow_stretch_makes_a_link_no_slower_than_its_few_large_requests() -> None:
    """Guesses kept it busy by less than it brings; and its latency was nothing then: four ranks
    that take turns got nothing ahead any more."""
    large, small = (MIB, LATENCY + MIB / BANDWIDTH), (MIB // 16, LATENCY + MIB / 16 / BANDWIDTH)
    meter, size, at_ns = met(*[large, small] * 2), 256 << 10, 0
    for _ in range(60):
        start_ns, at_ns = at_ns, at_ns + int(size / (BANDWIDTH / 2) * 1e9)
        meter.note_any(uffd.WarmResult(1, 0, start_ns, at_ns, 0, size, 0, 0, size, 0), False)
    assert meter.link is not None
    assert meter.link.bandwidth_bytes_per_second == pytest.approx(BANDWIDTH, rel=0.1)
    assert meter.link.latency_seconds == pytest.approx(LATENCY, rel=0.1)


@pytest.mark.parametrize("quick", [(MIB, 0.1e-3), (MIB // 16, 0.1e-3)])
def test_one_latency_in_many_that_no_other_comes_near_is_not_the_links(
    quick: tuple[int, float],
) -> None:
    """What it brought was under way for somebody else, and had almost come."""
    large, small = (MIB, LATENCY + MIB / BANDWIDTH), (MIB // 16, LATENCY + MIB / 16 / BANDWIDTH)
    link = met(*[large, small] * 16, quick).link
    assert link is not None and link.latency_seconds == pytest.approx(LATENCY, rel=0.1)


def test_of_few_requests_none_takes_longer_than_a_large_one_but_for_its_bytes() -> None:
    """A large one alone told that the latency is no more than all that it took."""
    meter = met((MIB // 16, 0.02), (MIB, LATENCY + MIB / BANDWIDTH))
    assert not meter.is_sure and meter.link is not None
    quick = LATENCY + MIB / BANDWIDTH - MIB / meter.link.bandwidth_bytes_per_second
    assert meter.link.latency_seconds == pytest.approx(max(LATENCY_LEAST, quick))


def test_it_is_sure_once_enough_small_requests_tell_the_latency() -> None:
    small, large = (MIB // 16, LATENCY), (MIB, LATENCY + MIB / BANDWIDTH)
    assert not met(*[small] * 5).is_sure and met(*[small] * 6).is_sure
    assert met(*[small] * 5, pages=(LATENCY,)).is_sure
    assert met().lacks_large and not met(large).lacks_large and met(large, small).lacks_large
    assert not met(*[large] * 3, *[small] * 9).lacks_large


def test_until_a_block_was_read_a_page_tells_the_latency_of_a_link() -> None:
    link = met((MIB, LATENCY + MIB / BANDWIDTH), pages=(0.02, LATENCY)).link
    assert link is not None and link.latency_seconds == pytest.approx(LATENCY)


def test_what_was_there_in_part_tells_nothing_of_a_link() -> None:
    meter = met((MIB, LATENCY + MIB / BANDWIDTH), (MIB // 16, LATENCY + MIB / 16 / BANDWIDTH))
    before = meter.link
    there = uffd.WarmResult(1, 0, 0, 200_000, MIB // 32, MIB // 32, 0, 0, MIB // 16, 0)
    meter.note_alone(there)
    meter.note_alone(there._replace(resident_bytes=MIB // 2, bytes=MIB // 2))
    assert meter.link == before


def test_what_is_less_than_the_clocks_noise_is_not_told_to_people() -> None:
    meter = Meter(busy=BusyStretches(bandwidth=BANDWIDTH))
    assert meter.told_latency is None
    meter.note(read(MIB, MIB / BANDWIDTH), was_idle=True, alone=True)
    assert meter.storage.latency_seconds == LATENCY_LEAST and meter.told_latency is None
    other = Meter(busy=BusyStretches(bandwidth=BANDWIDTH))
    other.note(read(MIB, LATENCY + MIB / BANDWIDTH), was_idle=True, alone=True)
    assert other.told_latency == pytest.approx(LATENCY)


def test_a_pool_that_waits_for_room_is_no_slow_storage() -> None:
    """Jobs of 4 MiB, of which each waits a second for its reader."""
    meter, now, idle = Meter(), 10**9, 0
    took = int(4 * MIB / BANDWIDTH * 1e9)
    for _ in range(20):
        result = uffd.WarmResult(
            1, 0, now, now + 10**9 + took, 0, 4 * MIB, 0, 0, 4 * MIB, 0,
            idle_start_ns=idle, idle_done_ns=idle + 10**9,
        )  # fmt: skip
        meter.note(result, was_idle=False, alone=False)
        meter.note_alone(result)
        now, idle = now + 10**9 + took, idle + 10**9
    assert meter.busy.bandwidth == pytest.approx(BANDWIDTH, rel=1e-6)
    assert meter.cost().bandwidth_bytes_per_second == pytest.approx(BANDWIDTH, rel=1e-6)
