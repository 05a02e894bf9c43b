# SPDX-License-Identifier: Apache-2.0
"""readers/advice.py: what a job says by madvise(2) helps where it does as it says, and costs little
where it does not."""

from __future__ import annotations

import mmap
import random
from types import SimpleNamespace
from typing import Any

import pytest
from bulk_bed import MIB, MS, SIZE, Bed
from small_pool import pool_of

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.predict.window import TRUSTED_MIN_BYTES
from uffdprefetch.protocol.wire import Stated
from uffdprefetch.readers.advice import Advice
from uffdprefetch.readers.predictor import Observation
from uffdprefetch.readers.waste import Waste
from uffdprefetch.readers.windows import Windows
from uffdprefetch.service.pool_bridge import unneeded
from uffdprefetch.state.files import FileState
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import UNNEEDED_MAX
from uffdprefetch.state.region import Region

pytest_plugins = ("bulk_bed",)

PAGE = 4096


class Told(Bed):
    """A bed with windows, whose jobs say something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: str = "auto") -> None:
        super().__init__(monkeypatch, policy=policy)
        settings = Config(policy=policy)
        waste = Waste(self.ledger, self.scheduler.meter)
        self.arbiter.add(Windows(settings, self.walks, EventPublisher(), self.layout, waste))
        self.advice = Advice(policy, self.walks, self.stated, Clock(lambda: self.now))

    def say(self, region: Region, what: Stated, start: int = 0, end: int = SIZE) -> None:
        self.advice.said(region, what, start, end)

    def sees(self, region: Region, start: int, length: int = PAGE) -> None:
        """The reader has touched that, one look after the other."""
        self.now += 2 * MS
        client: Any = region.reader.client
        client.mapped.add(region.address_of(start), region.address_of(start + length))
        self.arbiter.observe(region, Observation(start, start + length, self.now, True, False))
        self.turn()

    @property
    def sent_bytes(self) -> int:
        return sum(length for _, length in self.sent)

    def read(self) -> IntervalSet:
        found = IntervalSet()
        for start, length in self.sent:
            found.add(start, start + length)
        return found


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def walk(bed: Told, region: Region, start: int, end: int, step: int = 128 << 10) -> None:
    for at in range(start, end, step):
        bed.sees(region, at, step)


# -- SEQUENTIAL


@pytest.mark.parametrize("says", [True, False])
def test_of_who_goes_in_order_the_first_touch_is_a_walk(
    bed: Told, file: FileState, says: bool
) -> None:
    region = bed.region(file)
    if says:
        bed.say(region, Stated.SEQUENTIAL)
    bed.sees(region, 8 * MIB)
    expected = [(8 * MIB + PAGE, 8 * MIB + PAGE + TRUSTED_MIN_BYTES)] if says else []
    assert list(bed.read()) == expected
    walk(bed, region, 8 * MIB + PAGE, 64 * MIB)
    assert bed.read().total_bytes() > 56 * MIB


def test_each_pass_of_who_goes_in_order_is_trusted(bed: Told, file: FileState) -> None:
    region = bed.region(file)
    bed.say(region, Stated.SEQUENTIAL)
    walk(bed, region, 0, 32 * MIB)
    before = bed.sent_bytes
    bed.sees(region, 160 * MIB)
    assert bed.sent_bytes - before == TRUSTED_MIN_BYTES


def test_a_job_that_says_sequential_and_jumps_about_costs_one_window(
    monkeypatch: pytest.MonkeyPatch, file: FileState, other: FileState
) -> None:
    sent = []
    for one, says in ((file, False), (other, True)):
        bed, source = Told(monkeypatch), random.Random(5)
        for _ in range(40):  # each batch is a mapping of its own, of which it says so again
            region = bed.region(one)
            if says:
                bed.say(region, Stated.SEQUENTIAL)
            bed.sees(region, source.randrange(250) * MIB)
            bed.unmap(region)
        sent.append(bed.sent_bytes)
    assert sent[0] < sent[1] <= sent[0] + TRUSTED_MIN_BYTES


def test_normal_takes_it_back(bed: Told, file: FileState) -> None:
    region = bed.region(file)
    bed.say(region, Stated.SEQUENTIAL)
    bed.say(region, Stated.NORMAL)
    bed.sees(region, 8 * MIB)
    assert bed.sent == []


def test_advice_comes_with_a_mapping(bed: Told, file: FileState) -> None:
    """Of a forked child, and of one that was advised before the service knew it."""
    region = bed.region(file)
    for advice, reads in (
        (mmap.MADV_SEQUENTIAL, Stated.SEQUENTIAL), (mmap.MADV_RANDOM, Stated.RANDOM),
        (mmap.MADV_NORMAL, Stated.NORMAL), (77, Stated.NORMAL),
    ):  # fmt: skip
        bed.advice.attached(region, advice)
        assert region.reads is reads


# -- RANDOM


def records(bed: Told, region: Region, count: int = 12) -> None:
    """Records of 400 KiB from all over the file, each seen in pieces."""
    source = random.Random(5)
    for _ in range(count):
        start = source.randrange(240) * MIB
        for at in range(start, start + (400 << 10), 100 << 10):
            bed.sees(region, at, 100 << 10)


@pytest.mark.parametrize("says", [True, False])
def test_of_who_jumps_about_long_records_are_no_walks(
    bed: Told, file: FileState, says: bool
) -> None:
    region = bed.region(file)
    if says:
        bed.say(region, Stated.RANDOM)
    records(bed, region)
    assert (bed.sent_bytes == 0) if says else (bed.sent_bytes > 8 * MIB)


def test_a_job_that_says_random_and_goes_in_order_has_windows_soon(
    bed: Told, file: FileState
) -> None:
    """As LMDB does with readahead=False."""
    region = bed.region(file)
    bed.say(region, Stated.RANDOM)
    walk(bed, region, 0, 128 * MIB)
    read = bed.read()
    assert next(iter(read))[0] < 4 * MIB and read.total_bytes() > 120 * MIB


def test_what_was_populated_is_streamed_whatever_is_said_of_how_it_is_read(
    bed: Told, file: FileState
) -> None:
    """llama.cpp, with --numa."""
    region = bed.region(file)
    bed.say(region, Stated.NEEDED)
    bed.say(region, Stated.RANDOM)
    bed.rest(600)
    assert list(bed.read()) == [(0, SIZE)]


# -- UNNEEDED


def ahead(bed: Told, region: Region) -> int:
    """A reader with a window ahead of it; where it is."""
    walk(bed, region, 0, 16 * MIB)
    return 16 * MIB


def test_a_window_does_not_fetch_what_its_job_has_no_use_for(bed: Told, file: FileState) -> None:
    region = bed.region(file)
    at = ahead(bed, region)
    bed.sent.clear()
    stream = region.reader.table.active()[0]
    assert stream.frontier_bytes > at + 4 * MIB
    bed.say(region, Stated.UNNEEDED, 64 * MIB, 96 * MIB)
    assert stream.frontier_bytes > at + 4 * MIB, "what does not lie there is asked for"
    walk(bed, region, at, 60 * MIB)
    assert not bed.read().overlaps(64 * MIB, 96 * MIB)
    assert bed.read().overlaps(96 * MIB, 200 * MIB) or stream.frontier_bytes <= 96 * MIB


def test_what_waits_to_be_read_of_it_is_taken_back(bed: Told, file: FileState) -> None:
    region = bed.region(file)
    at = ahead(bed, region)
    stream = region.reader.table.active()[0]
    stream.frontier_bytes = at
    bed.arbiter.due(region)
    region.reader.asked_ns = 0
    bed.arbiter.plan()  # and not sent
    assert bed.scheduler.queued_bytes > 4 * MIB
    bed.say(region, Stated.UNNEEDED)
    assert bed.scheduler.queued_bytes == 0


def test_who_reads_there_all_the_same_has_windows_again(bed: Told, file: FileState) -> None:
    region = bed.region(file)
    at = ahead(bed, region)
    bed.say(region, Stated.UNNEEDED)
    before = bed.sent_bytes
    bed.arbiter.observe(region, Observation(at, at + PAGE, bed.now - MS))  # of before, told late
    bed.turn()
    assert bed.sent_bytes == before
    walk(bed, region, at, 128 * MIB)
    assert list(bed.read())[-1][1] >= 128 * MIB and bed.sent_bytes - before > 90 * MIB


def test_a_reader_that_drops_what_lies_behind_it_goes_on_as_ever(
    bed: Told, file: FileState
) -> None:
    region = bed.region(file)
    for at in range(0, 128 * MIB, MIB):
        walk(bed, region, at, at + MIB)
        bed.say(region, Stated.UNNEEDED, at, at + MIB)
    assert bed.read().total_bytes() >= 120 * MIB
    assert bed.sent_bytes == bed.read().total_bytes(), "once"
    assert list(region.reader.unneeded.ranges) == [(0, 128 * MIB)]


def test_needed_and_a_new_mapping_take_it_back(bed: Told, file: FileState) -> None:
    region = bed.region(file)
    bed.say(region, Stated.UNNEEDED)
    bed.say(region, Stated.NEEDED, 0, 64 * MIB)
    assert list(region.reader.unneeded.ranges) == [(64 * MIB, SIZE)]
    bed.region(file)
    assert not region.reader.unneeded.ranges


def test_ranges_from_all_over_are_forgotten(bed: Told, file: FileState) -> None:
    region = bed.region(file)
    for turn in range(UNNEEDED_MAX + 1):
        bed.say(region, Stated.UNNEEDED, turn * 2 * MIB, turn * 2 * MIB + MIB)
        assert len(region.reader.unneeded.ranges) == (turn + 1) % (UNNEEDED_MAX + 1)


def test_what_was_to_be_streamed_comes_no_more(bed: Told, file: FileState) -> None:
    region = bed.region(file)
    bed.say(region, Stated.NEEDED)
    for _ in range(8):
        bed.turn()
    bed.say(region, Stated.UNNEEDED, 100 * MIB, 200 * MIB)
    bed.rest(600)
    assert list(bed.read()) == [(0, 100 * MIB), (200 * MIB, SIZE)]
    assert bed.sent_bytes == 156 * MIB, "once"
    bed.say(region, Stated.NEEDED, 100 * MIB, 200 * MIB)
    bed.rest(600)
    assert list(bed.read()) == [(0, SIZE)]


def test_what_another_process_needs_too_comes(bed: Told, file: FileState) -> None:
    region, _ = bed.region(file), bed.region(file, 1, 8)
    bed.say(region, Stated.NEEDED)
    bed.say(region, Stated.UNNEEDED)
    bed.rest(600)
    assert list(bed.read()) == [(0, SIZE)]


def test_other_policies_are_the_users_word(
    monkeypatch: pytest.MonkeyPatch, file: FileState
) -> None:
    bed = Told(monkeypatch, "fixed")
    region = bed.region(file)
    for what in Stated:
        bed.say(region, what)
    assert region.reads is Stated.NORMAL and not region.reader.unneeded.ranges


def test_a_number_that_is_none_says_nothing(bed: Told, file: FileState) -> None:
    region = bed.region(file)
    bed.advice.said(region, 77, 0, SIZE)
    assert region.reads is Stated.NORMAL and not region.reader.unneeded.ranges


# -- the pool


def test_what_no_reader_of_a_file_needs_leaves_the_pool_first() -> None:
    def reader(*ranges: tuple[int, int], pooled: bool = True, announced: bool = False) -> Any:
        found = IntervalSet()
        for start, end in ranges:
            found.add(start, end)
        return SimpleNamespace(
            file=SimpleNamespace(pooled=SimpleNamespace(number=3)), pooled=pooled,
            order=SimpleNamespace(announced=announced), unneeded=SimpleNamespace(ranges=found),
        )  # fmt: skip

    one, other = reader((0, 8 * MIB), (16 * MIB, 32 * MIB)), reader((4 * MIB, 20 * MIB))
    (found,) = unneeded([one])
    assert (found[0], list(found[1])) == (3, [(0, 8 * MIB), (16 * MIB, 32 * MIB)])
    (found,) = unneeded([one, other, reader(pooled=False)])
    assert list(found[1]) == [(4 * MIB, 8 * MIB), (16 * MIB, 20 * MIB)]
    assert list(one.unneeded.ranges) == [(0, 8 * MIB), (16 * MIB, 32 * MIB)], "its own"
    assert unneeded([one, reader()]) == []
    assert unneeded([one, reader((0, 32 * MIB), announced=True)]) == []


@pytest.mark.parametrize("evict", ["lru", "cyclic"])
def test_whole_blocks_of_what_nobody_needs_are_the_first_victims(evict: str) -> None:
    pool, told = pool_of(4 * MIB, evict)
    assert pool.block_bytes == 64 << 10
    pool.plan([])
    usual, count = [first for _, first, _ in told], len(told)
    ranges = IntervalSet()
    ranges.add(20 * (64 << 10) + 1, 24 * (64 << 10))
    pool.plan([], (), [(3, ranges), (7, ranges)])
    found = [first for _, first, _ in told]
    assert sorted(found[:3]) == [21, 22, 23]
    assert found[3:] == usual[: count - 3]
