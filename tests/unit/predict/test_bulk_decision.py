# SPDX-License-Identifier: Apache-2.0
"""Bulk warm: who jumps about (predict/randomness.py), and when streaming the whole file pays
(predict/bulk.py)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import pytest

from uffdprefetch.predict.bulk import (
    BEHIND_BYTES,
    COST_MOST,
    EXTENTS,
    LEAST_GAIN,
    LEFT_SHARE,
    MISS_BYTES,
    PIECE_BYTES,
    PROBE_LEAST_BYTES,
    PROBE_MOST_BYTES,
    PROBE_SHARE,
    READS_AT_ONCE,
    RENT_SHARE,
    BulkInputs,
    Choice,
    Pace,
    alone_seconds,
    judge,
    probe_bytes,
    yield_bytes,
)
from uffdprefetch.predict.randomness import (
    JUMPS_RANDOM,
    TOUCHES,
    RandomnessDetector,
    longest_monotone_length,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCK = 64 * KIB
MS = 1_000_000

#: nanoGPT on the slow bed: 256 MiB behind 300 MB/s and 1 ms, of which a quarter is there.
BED = BulkInputs(
    file_bytes=256 * MIB,
    missing_bytes=192 * MIB,
    room_bytes=4 * GIB,
    touches_per_second=500.0,
    watched_seconds=1.0,
    miss_seconds=0.0015,
    miss_bytes=128 * KIB,
    bandwidth_bytes_per_second=300e6,
)


def changed(**values: float) -> BulkInputs:
    return dataclasses.replace(BED, **values)  # type: ignore[arg-type]


# ---- does it pay --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sight", "expected"),
    [
        (BED, Choice.STREAM),
        (changed(watched_seconds=0.1), Choice.WAIT),  # too little lost yet
        (changed(touches_per_second=10.0), Choice.WAIT),  # a job that mostly computes
        (
            changed(touches_per_second=10.0, watched_seconds=60.0),
            Choice.STREAM,
        ),  # but goes on and on
        (changed(room_bytes=255 * MIB), Choice.NO_ROOM),
        (changed(room_bytes=256 * MIB), Choice.STREAM),
        (changed(room_bytes=-1), Choice.NO_ROOM),  # others have it all
        (changed(missing_bytes=4 * MIB), Choice.RESIDENT),
        (changed(missing_bytes=0), Choice.RESIDENT),
        (changed(missing_bytes=0, room_bytes=0), Choice.RESIDENT),  # it is there: no need of room
        (changed(miss_seconds=80e-6, miss_bytes=128 * KIB), Choice.NO_GAIN),  # a local NVMe
        (changed(miss_seconds=80e-6, miss_bytes=4 * KIB), Choice.WAIT),  # which reads single pages
        (changed(miss_seconds=0.0), Choice.MEASURE),
        (changed(bandwidth_bytes_per_second=0.0), Choice.MEASURE),
        (changed(bandwidth_bytes_per_second=0.0, watched_seconds=0.02), Choice.WAIT),  # not yet
        (
            changed(bandwidth_bytes_per_second=0.0, room_bytes=0),
            Choice.NO_ROOM,
        ),  # needs no measuring
    ],
)
def test_what_is_decided(sight: BulkInputs, expected: Choice) -> None:
    assert judge(sight).what == expected


def test_the_reason_has_the_figures() -> None:
    assert "1.5 ms" in judge(BED).why and "286 MiB/s" in judge(BED).why
    assert "256 MiB" in judge(changed(room_bytes=MIB)).why


def sights() -> Iterator[BulkInputs]:
    source = random.Random(7)
    for _ in range(3000):
        file_bytes = int(2 ** source.uniform(20, 40))
        yield BulkInputs(
            file_bytes=file_bytes,
            missing_bytes=int(file_bytes * source.random()),
            room_bytes=int(2 ** source.uniform(20, 42)),
            touches_per_second=10 ** source.uniform(0, 5),
            watched_seconds=10 ** source.uniform(-2, 4),
            miss_seconds=10 ** source.uniform(-5, -1),
            miss_bytes=source.choice([4 * KIB, 64 * KIB, 128 * KIB, MIB]),
            bandwidth_bytes_per_second=10 ** source.uniform(6, 10),
        )


@pytest.mark.parametrize(
    "name",
    [
        *("miss_seconds", "bandwidth_bytes_per_second", "touches_per_second"),
        *("watched_seconds", "room_bytes"),
    ],
)
def test_more_of_it_never_turns_yes_into_no(name: str) -> None:
    """More latency, more bandwidth, more misses, a longer run, more room."""
    yes = 0
    for sight in sights():
        if judge(sight).what == Choice.STREAM:
            more = dataclasses.replace(sight, **{name: 3 * getattr(sight, name)})
            assert judge(more).what == Choice.STREAM
            yes += 1
    assert yes > 100, "else the test shows nothing"


def test_never_more_is_streamed_than_there_is_room_for_nor_without_gain() -> None:
    for sight in sights():
        if judge(sight).what == Choice.STREAM:
            assert sight.file_bytes <= sight.room_bytes
            assert sight.lost_seconds >= RENT_SHARE * sight.stream_seconds
            assert sight.lost_at_most_seconds >= LEAST_GAIN * sight.stream_seconds


def test_a_run_that_ends_at_once_has_lost_a_bounded_part_by_it() -> None:
    """Ski rental: when the stream begins, misses have cost RENT_SHARE of it."""
    for sight in sights():
        if judge(sight).what == Choice.STREAM:
            share = sight.missing_bytes / sight.file_bytes
            misses = sight.touches_per_second * share * sight.watched_seconds
            lost = misses * sight.miss_seconds
            assert lost >= RENT_SHARE * sight.stream_seconds * (1 - 1e-9)


def test_another_share_can_be_tried() -> None:
    sight = changed(watched_seconds=0.5)
    assert judge(sight).what == Choice.STREAM
    assert judge(dataclasses.replace(sight, rent_share=0.8)).what == Choice.WAIT
    assert judge(dataclasses.replace(sight, rent_share=0.01)).what == Choice.STREAM


@pytest.mark.parametrize(
    ("used_share", "miss_bytes", "misses"),
    [
        (0.0, 128 << 10, 0),
        (1.0, 128 << 10, 240),  # each brings two blocks
        (0.1, 128 << 10, 45.6),  # of 48 blocks few lie in one piece
        (1.0, 4096, 480),
        (0.1, 4096, 48),
    ],
)
def test_what_misses_alone_would_have_cost_follows_from_the_blocks_that_were_used(
    used_share: float, miss_bytes: int, misses: float
) -> None:
    seconds = alone_seconds(30 << 20, used_share, 65536, miss_bytes, 0.001)
    assert seconds == pytest.approx(misses * 0.001)


def test_bandwidth_is_measured_before_the_stream_can_begin_and_not_much_before() -> None:
    """Measuring it reads some of the file: a reader of a few pages is not to pay for that."""
    for sight in sights():
        unknown = dataclasses.replace(sight, bandwidth_bytes_per_second=0.0)
        fast = READS_AT_ONCE * MISS_BYTES / sight.miss_seconds
        if judge(unknown).what == Choice.MEASURE:
            assert unknown.lost_seconds >= RENT_SHARE * sight.missing_bytes / fast * (1 - 1e-9)
        elif sight.bandwidth_bytes_per_second <= fast:
            assert judge(sight).what != Choice.STREAM


# ---- how fast -----------------------------------------------------------------------------------


def paced(touches: int, miss_seconds: float, size: int = 256 * MIB) -> tuple[Pace, float, int]:
    """Random touches of 128 KiB and a stream that takes what it may: the pace, what the same
    touches bring without it, and what both have read. Expected values, no draws."""
    pace, missing, streamed, plain = Pace(size), float(size), 0.0, 0.0
    for _ in range(touches):
        plain += MISS_BYTES * (1 - plain / size)
        missing -= MISS_BYTES * missing / size
        pace.note(round(missing), round(streamed))
        lost = pace.demanded_bytes / MISS_BYTES * miss_seconds
        may = pace.may_stream_bytes(round(missing), 300e6, lost)
        more = missing if may is None else min(missing, max(0.0, may - streamed))
        streamed, missing = streamed + more, missing - more
    return pace, plain, round(size - missing)


@pytest.mark.parametrize("touches", [20, 200, 655, 1500])
def test_with_its_stream_a_reader_has_no_more_than_twice_read_that_it_reads(touches: int) -> None:
    """Until misses have become so much fewer that it has gained."""
    pace, plain, read = paced(touches, 0.0015)
    if pace.demanded_bytes < LEFT_SHARE * pace.plain_bytes:
        assert touches > 800 and read == 256 * MIB
    else:
        assert pace.plain_bytes == pytest.approx(plain, rel=0.05)
        assert 1.8 * plain <= read <= 2 * plain


def test_misses_that_cost_much_more_than_their_bytes_are_not_kept_pace_with() -> None:
    """5 ms each, and 128 KiB are there in 0.4 ms: that would last too long."""
    _, plain, read = paced(200, 0.005)
    assert read == 256 * MIB > 10 * plain
    pace = Pace(256 * MIB)
    whole = 256 * MIB / 300e6
    for lost in (0.1, 0.2, 0.29, 0.31, 1.0):
        may = pace.may_stream_bytes(256 * MIB, 300e6, lost * whole)
        assert (may is None) == (1 + lost >= COST_MOST)


def test_what_had_come_before_is_no_demand_and_a_little_is_not_waited_for() -> None:
    pace = Pace(100 * MIB)
    pace.note(60 * MIB, 40 * MIB)
    assert (pace.demanded_bytes, pace.may_stream_bytes(60 * MIB, 300e6, 0.0)) == (0, 0)
    pace.note(50 * MIB, 40 * MIB)
    assert pace.demanded_bytes == 10 * MIB < pace.plain_bytes
    pace.note(55 * MIB, 40 * MIB)  # the kernel has dropped some
    assert pace.demanded_bytes == 10 * MIB
    assert pace.may_stream_bytes(MIB, 300e6, 0.0) is None


def test_a_stream_that_has_not_come_to_where_it_might_be_is_behind() -> None:
    pace = Pace(256 * MIB)
    pace.note(236 * MIB, 10 * MIB)
    assert not pace.is_behind(10 * MIB + BEHIND_BYTES)
    assert pace.is_behind(10 * MIB + BEHIND_BYTES + 1)


def test_when_misses_have_become_much_fewer_a_stream_waits_for_nobody() -> None:
    """Who ends then has been served well, whatever has been read."""
    for demanded in (0.5, LEFT_SHARE - 0.01, LEFT_SHARE + 0.01, 1.0):
        pace = Pace(256 * MIB, round(demanded * 64 * MIB), 64.0 * MIB)
        may = pace.may_stream_bytes(150 * MIB, 300e6, 0.1)
        assert (may is None) == (demanded < LEFT_SHARE)


@pytest.mark.parametrize(
    ("miss_seconds", "bandwidth", "expected"),
    [
        (0.00144, 300e6, 512 * KIB),
        (0.00544, 300e6, 2 * MIB),
        (0.00113, 1e9, 1536 * KIB),
        (0.00033, 1e9, 512 * KIB),
        (0.0001, 2e9, 512 * KIB),
        (0.2, 1e9, 16 * MIB),
    ],
)
def test_what_is_under_way_of_a_stream_keeps_the_storage_busy_and_is_little_more(
    miss_seconds: float, bandwidth: float, expected: int
) -> None:
    assert yield_bytes(miss_seconds, bandwidth) == expected
    assert yield_bytes(miss_seconds, bandwidth, keeps_pace=True) == 256 * KIB
    assert expected % (EXTENTS * PIECE_BYTES) == 0


def test_the_bandwidth_is_told_by_a_part_of_what_misses_have_brought() -> None:
    brought = [0.0, 16.0 * MIB, 100.0 * MIB]
    expected = [PROBE_LEAST_BYTES, round(PROBE_SHARE * 16 * MIB), PROBE_MOST_BYTES]
    assert [*map(probe_bytes, brought)] == expected


# ---- who jumps about ----------------------------------------------------------------------------


class Reader:
    """A reader's touches as the engine tells them: 1 ms apart, or several at one time."""

    def __init__(self, file_bytes: int) -> None:
        self.jumps = RandomnessDetector(file_bytes)
        self.now_ns = 0
        self.trusted: list[bool] = []
        self.random: list[bool] = []
        self.orderly: list[bool] = []

    def look(self, places: list[int], length: int = BLOCK) -> None:
        self.now_ns += MS
        for at in sorted(places):
            self.jumps.saw(at, at + length, self.now_ns)
            self.trusted.append(self.jumps.may_prefetch)
            self.random.append(self.jumps.random)
            self.orderly.append(self.jumps.is_sequential)

    def read(self, places: list[int], length: int = BLOCK) -> None:
        for at in places:
            self.look([at], length)


def shuffled(file_bytes: int, count: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(file_bytes // BLOCK) * BLOCK for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "at_once"),
    [
        (size, at_once)
        for size in (64 * MIB, 256 * MIB, 10 * GIB, 1 << 40)
        for at_once in (1, 2, 6, 12, 40, 64, 100, 1000)
        if at_once <= max(12, size // (8 * MIB))  # else they are next to each other
    ],
)
def test_random_crops_are_random(size: int, at_once: int) -> None:
    """Seen singly, or by a page-table look that brings several in the order of the file."""
    for seed in range(20):
        reader, places = Reader(size), shuffled(size, max(4 * TOUCHES, 3 * at_once), seed)
        for i in range(0, len(places), at_once):
            reader.look(places[i : i + at_once])
        assert reader.jumps.random
        known = max(2 * TOUCHES, 2 * at_once)
        assert all(reader.random[known:]), "and stay so"
        assert not any(reader.trusted[known:])


def test_random_crops_are_hardly_trusted_before_they_are_known() -> None:
    """The windows of such a time are read for nothing: in 95 of 100 runs there is none."""
    runs = []
    for seed in range(100):
        reader = Reader(256 * MIB)
        reader.read(shuffled(256 * MIB, TOUCHES, seed))
        runs.append(sum(reader.trusted))
    assert sorted(runs)[95] <= 3


@pytest.mark.parametrize("at_once", [1, 2, 3, 6, 12, 30])
def test_random_crops_are_at_no_time_taken_for_a_walk_for_sure(at_once: int) -> None:
    for seed in range(200):
        reader, places = Reader(256 * MIB), shuffled(256 * MIB, TOUCHES, seed)
        for i in range(0, len(places), at_once):
            reader.look(places[i : i + at_once])
        assert not any(reader.orderly)


def test_shuffled_records_of_several_touches_are_random() -> None:
    """192 KiB each: a jump and two touches that go on from there."""
    reader = Reader(1 * GIB)
    for at in shuffled(1 * GIB, TOUCHES):
        reader.read([at, at + BLOCK, at + 2 * BLOCK])
    assert reader.jumps.random


def in_order(size: int) -> list[int]:
    return list(range(0, size, BLOCK))


def backward(size: int) -> list[int]:
    return in_order(size)[::-1]


def skipping(size: int) -> list[int]:
    """64 ranks, records of 192 KiB: one in 12 MiB."""
    return list(range(0, size, 12 * MIB))


def skipping_backward(size: int) -> list[int]:
    return skipping(size)[::-1]


def eight_threads(size: int) -> list[int]:
    part = size // 8
    return [thread * part + step * BLOCK for step in range(100) for thread in range(8)]


def through_a_tree(size: int) -> list[int]:
    """LMDB: the root and branches first, then records with a leaf page now and then."""
    places = [0, size - MIB, size // 2]
    for i, at in enumerate(range(MIB, size // 4, BLOCK)):
        places += [at, at + 8 * MIB] if i % 20 == 0 else [at]
    return places


def epochs(size: int) -> list[int]:
    """Checkpoints 4 MiB apart are all that is seen, epoch after epoch."""
    return 6 * list(range(0, size, 4 * MIB))


@pytest.mark.parametrize(
    "walk",
    [in_order, backward, skipping, skipping_backward, eight_threads, through_a_tree, epochs],
)
@pytest.mark.parametrize("size", [64 * MIB, 768 * MIB, 4 * GIB])
def test_who_goes_in_order_is_not_random(walk: Callable[[int], list[int]], size: int) -> None:
    reader = Reader(size)
    reader.read(walk(size))
    assert not any(reader.random)


@pytest.mark.parametrize("at_once", [8, 20, 100])
@pytest.mark.parametrize("backward", [False, True])
def test_a_walk_that_skips_is_not_random_when_many_of_its_records_are_seen_at_once(
    at_once: int, backward: bool
) -> None:
    reader, places = Reader(16 * GIB), (skipping_backward if backward else skipping)(16 * GIB)
    for i in range(0, len(places), at_once):
        reader.look(places[i : i + at_once])
    assert not any(reader.random)
    assert all(reader.orderly[4 * max(at_once, 16) :])


def test_a_part_that_is_seen_late_makes_no_walk_a_random_one() -> None:
    """A checkpoint tells of where the walk is, the first look of all that lies behind."""
    reader, places = Reader(2 * GIB), list(range(0, 2 * GIB, 3 * MIB))
    reader.look(places[12:32])
    reader.look(places[:12])
    for i in range(32, 320, 12):
        reader.look([*places[i : i + 12], (i % 5) * 60 * MIB])  # and a page of the tree
    assert not any(reader.random)
    assert all(reader.orderly[100:])


def test_a_random_reader_that_begins_to_skip_is_seen_to() -> None:
    reader, places = Reader(16 * GIB), skipping(16 * GIB)
    reader.read(shuffled(16 * GIB, TOUCHES))
    assert reader.jumps.random
    for i in range(0, 10 * 12, 12):
        reader.look(places[i : i + 12])
    assert not reader.jumps.random and reader.jumps.is_sequential


@pytest.mark.parametrize("walk", [in_order, backward, skipping, eight_threads, through_a_tree])
def test_who_goes_in_order_is_trusted_soon_and_for_good(walk: Callable[[int], list[int]]) -> None:
    reader = Reader(4 * GIB)
    reader.read(walk(4 * GIB)[:300])
    assert all(reader.trusted[24:]) and all(reader.orderly[24:])


def test_the_second_touch_of_a_walk_is_trusted() -> None:
    reader = Reader(4 * GIB)
    reader.read([GIB, GIB + BLOCK])
    assert reader.trusted == [False, True]


def test_a_walk_that_is_seen_late_is_trusted_at_once() -> None:
    reader = Reader(4 * GIB)
    reader.read([GIB], length=4 * MIB)
    assert reader.trusted == [True]


def test_what_was_passed_over_and_read_is_no_jump() -> None:
    """Checkpoints of eight threads, 8 MiB apart: the page tables tell what lies between."""
    jumps = RandomnessDetector(4 * GIB)
    for step in range(20):
        for thread in range(8):
            at = thread * 512 * MIB + step * 8 * MIB
            jumps.saw(at, at + 4 * KIB, (step * 8 + thread) * MS, passed_over=step > 0)
    assert not jumps.random and jumps.may_prefetch


def test_a_random_reader_that_goes_in_order_is_known_again() -> None:
    reader = Reader(GIB)
    reader.read(shuffled(GIB, TOUCHES))
    assert reader.jumps.random
    reader.read(in_order(GIB)[:TOUCHES])
    assert not reader.jumps.random and reader.jumps.may_prefetch


def test_what_is_remembered_tells_how_many_jumps_since_when() -> None:
    reader = Reader(GIB)
    reader.read(shuffled(GIB, 3 * TOUCHES))
    count, since_ns = reader.jumps.jumped()
    assert JUMPS_RANDOM <= count <= TOUCHES
    assert since_ns == reader.now_ns - (TOUCHES - 1) * MS


def test_of_what_is_seen_at_once_a_part_is_remembered_and_all_is_counted() -> None:
    reader, places = Reader(1 << 40), shuffled(1 << 40, 4000)
    for i in range(0, len(places), 1000):
        reader.look(places[i : i + 1000])
    count, since_ns = reader.jumps.jumped()
    assert since_ns == MS and 3900 <= count <= 4000


def test_the_longest_run_takes_one_of_what_was_seen_together() -> None:
    assert longest_monotone_length([[1, 2, 3], [4]], 1) == 2
    assert longest_monotone_length([[5], [3], [4], [1]], -1) == 3
    assert longest_monotone_length([[5], [5]], 1) == 1
    assert longest_monotone_length([], 1) == 0


@pytest.mark.parametrize(
    ("size", "near"), [(64 * MIB, 256 * KIB), (128 * MIB, 512 * KIB), (4 * GIB, MIB)]
)
def test_next_to_a_touch_is_what_lies_within_a_part_of_the_file(size: int, near: int) -> None:
    for place, jumps in ((near, 0), (near + 1, 1), (-near - BLOCK, 0), (-near - BLOCK - 1, 1)):
        reader = Reader(size)
        start = size // 2
        reader.read([start])
        reader.read([start + BLOCK + place])
        assert reader.jumps.jumped()[0] == jumps, place


def test_what_was_passed_over_and_read_counts_as_in_order_wherever_it_lies() -> None:
    jumps = RandomnessDetector(10 * GIB)
    for number, place in enumerate(shuffled(10 * GIB, 40)):
        jumps.saw(place, place + BLOCK, number * MS, passed_over=True)
    assert jumps.jumped()[0] == 0 and not jumps.random


def test_it_is_judged_at_every_eighth_touch() -> None:
    reader = Reader(10 * GIB)
    reader.read(shuffled(10 * GIB, TOUCHES))
    reader.read(in_order(10 * GIB)[:TOUCHES])
    changes = [
        at + 1 for at in range(1, len(reader.random)) if reader.random[at] != reader.random[at - 1]
    ]
    assert changes and all(count % 8 == 0 for count in changes)
