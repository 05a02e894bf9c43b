# SPDX-License-Identifier: Apache-2.0
"""readers/advice.py: what a job says by madvise(2) helps where it does as it says, and costs little
where it does not."""

from __future__ import annotations

import mmap
import random
from types import SimpleNamespace
from typing import Any

import pytest
from guess_bed import BLOCK, MIB, MS, SIZE, Bed
from small_pool import pool_of

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.protocol.wire import Stated
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.service.pool_bridge import unneeded
from uffdprefetch.state.files import FileState
from uffdprefetch.state.reader import UNNEEDED_MAX, Region

pytest_plugins = ("guess_bed",)

PAGE = 4096
FREE = 8 * MIB  # of what is said no more is read before some of it is used


def say(bed: Bed, region: Region, what: Stated, start: int = 0, end: int = SIZE) -> None:
    bed.advice.said(region, what, start, end)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


# -- SEQUENTIAL, RANDOM: what a reader does outweighs them


@pytest.mark.parametrize("says", [Stated.NORMAL, Stated.SEQUENTIAL, Stated.RANDOM])
def test_who_goes_in_order_is_read_ahead_of_whatever_it_has_said(
    bed: Bed, file: FileState, says: Stated
) -> None:
    """LMDB says RANDOM with readahead=False."""
    region = bed.region(file)
    say(bed, region, says)
    bed.walk(region, 0, 128 * MIB)
    assert next(iter(bed.read()))[0] < 4 * MIB and bed.read().total_bytes() > 120 * MIB


def records(bed: Bed, region: Region, length: int, count: int = 60) -> None:
    """Records from all over the file, each read in order."""
    source = random.Random(5)
    for _ in range(count):
        start = source.randrange(240) * MIB
        bed.walk(region, start, start + length, BLOCK)


@pytest.mark.parametrize("says", [Stated.SEQUENTIAL, Stated.NORMAL])
@pytest.mark.parametrize("length", [BLOCK, 384 << 10])
def test_who_says_sequential_and_jumps_about_has_no_more_read_for_it(
    monkeypatch: pytest.MonkeyPatch, file: FileState, other: FileState, says: Stated, length: int
) -> None:
    sent = []
    for one, what in ((file, Stated.NORMAL), (other, says)):
        bed = Bed(monkeypatch)
        region = bed.region(one)
        say(bed, region, what)
        records(bed, region, length)
        sent.append(bed.sent_bytes)
    assert sent[0] == sent[1] < SIZE // 4


def test_of_who_says_random_a_miss_brings_no_more_than_a_block(bed: Bed, file: FileState) -> None:
    """So what is read ahead of a walk saves more of them."""
    region = bed.region(file)
    assert bed.ahead._link(region.reader).miss_bytes == file.call.ahead_bytes
    say(bed, region, Stated.RANDOM)
    assert bed.ahead._link(region.reader).miss_bytes == BLOCK < file.call.ahead_bytes


def test_ahead_of_who_says_random_less_may_be_lost(bed: Bed, file: FileState) -> None:
    """Plain reads one page a miss."""
    region = bed.region(file)
    link = bed.ahead._link(region.reader)
    rooms = [bed.ahead._room_of(region.reader, link)]
    say(bed, region, Stated.RANDOM)
    rooms.append(bed.ahead._room_of(region.reader, link))
    assert 0 < 2 * rooms[1] <= rooms[0] == bed.ahead.room_bytes()


def test_what_a_whole_file_may_cost_follows_the_pages_of_who_says_random(
    bed: Bed, file: FileState
) -> None:
    region = bed.region(file)
    of = bed.ahead._of(file)
    brought = []
    for what in (Stated.NORMAL, Stated.RANDOM):
        say(bed, region, what)
        of.visited.visits.places = 1
        bed.ahead._whole.judge(of.visited, region.reader, bed.ahead._link(region.reader), 0)
        brought.append(of.visited.miss_bytes)
    assert brought == [file.call.ahead_bytes, mmap.PAGESIZE]


def test_normal_takes_it_back(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    say(bed, region, Stated.RANDOM)
    say(bed, region, Stated.NORMAL)
    assert region.reads is Stated.NORMAL and not region.reader.says_random


def test_advice_comes_with_a_mapping(bed: Bed, file: FileState) -> None:
    """Of a forked child, and of one that was advised before the service knew it."""
    region = bed.region(file)
    for advice, reads in (
        (mmap.MADV_SEQUENTIAL, Stated.SEQUENTIAL), (mmap.MADV_RANDOM, Stated.RANDOM),
        (mmap.MADV_NORMAL, Stated.NORMAL), (77, Stated.NORMAL),
    ):  # fmt: skip
        bed.advice.attached(region, advice)
        assert region.reads is reads


# -- NEEDED


def test_of_what_is_said_a_little_is_read_and_then_as_much_again_as_is_used(
    bed: Bed, file: FileState
) -> None:
    """pyarrow says it of all columns of a table, whoever reads two of them."""
    region = bed.region(file)
    say(bed, region, Stated.NEEDED)
    bed.rest(600)
    (before,) = list(bed.read())
    assert before[0] == 0 and MIB <= before[1] <= FREE
    for at in random.Random(1).sample(range(0, 12 * MIB, BLOCK), 12 * MIB // BLOCK):
        bed.touch(region, at)
    bed.rest(100)
    found = bed.arbiter.describe_file(file.path)["stated"]
    assert found is not None and 10 * MIB < found["read_bytes"] < 40 * MIB


def test_what_is_used_of_other_guesses_is_no_use_of_what_was_said(
    bed: Bed, file: FileState
) -> None:
    """A walk through one column has its own window: the other columns are nobody's."""
    region = bed.region(file)
    say(bed, region, Stated.NEEDED)
    bed.rest(600)
    bed.walk(region, 128 * MIB, 224 * MIB)
    bed.rest(100)
    found = bed.arbiter.describe_file(file.path)["stated"]
    assert found is not None and found["read_bytes"] <= FREE
    assert bed.ahead.account.used > 64 * MIB


def test_what_was_populated_is_streamed_whatever_is_said_of_how_it_is_read(
    bed: Bed, file: FileState
) -> None:
    """llama.cpp, with --numa."""
    region = bed.region(file)
    bed.advice.populated(region)
    say(bed, region, Stated.RANDOM)
    bed.rest(600)
    assert list(bed.read()) == [(0, SIZE)]


@pytest.mark.parametrize("policy", ["fixed", "plan", "none"])
def test_what_was_populated_is_not_where_the_user_has_chosen_what_is_read(
    file: FileState, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    bed = Bed(monkeypatch, policy=policy)
    bed.advice.populated(bed.region(file))
    bed.rest(50)
    assert bed.sent == []


# -- UNNEEDED


def test_what_its_job_has_no_use_for_is_not_read_ahead_of_it(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    bed.walk(region, 0, 16 * MIB)
    say(bed, region, Stated.UNNEEDED, 64 * MIB, 66 * MIB)
    bed.walk(region, 16 * MIB, 64 * MIB)
    assert not bed.read().overlaps(64 * MIB, 66 * MIB)
    assert list(bed.read())[-1][1] > 66 * MIB, "what lies behind that is"


def walked_with_the_rest_queued(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> Region:
    """20 MiB in order; what lies ahead of the last four waits to be read."""
    region = bed.region(file)
    bed.walk(region, 0, 16 * MIB)
    with monkeypatch.context() as held:
        held.setattr(bed.scheduler, "pump", lambda now: 0)
        bed.walk(region, 16 * MIB, 20 * MIB)
    return region


def test_what_waits_to_be_read_of_it_is_taken_back(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = walked_with_the_rest_queued(bed, file, monkeypatch)
    assert bed.scheduler.queued_bytes >= MIB
    say(bed, region, Stated.UNNEEDED)
    assert bed.scheduler.queued_bytes == 0


def test_what_was_taken_back_is_read_when_it_is_needed_all_the_same(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = walked_with_the_rest_queued(bed, file, monkeypatch)
    say(bed, region, Stated.UNNEEDED)
    bed.rest(10)
    say(bed, region, Stated.NEEDED, SIZE - MIB, SIZE)
    region.reader.unneeded.clear()
    bed.walk(region, 20 * MIB, 24 * MIB)
    assert not bed.read().missing(24 * MIB, 27 * MIB), "nothing is left out"


def test_what_waits_elsewhere_stays(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = bed.region(file)
    bed.walk(region, 0, 16 * MIB)
    monkeypatch.setattr(bed.scheduler, "pump", lambda now: 0)
    bed.walk(region, 16 * MIB, 20 * MIB)
    before = bed.scheduler.queued_bytes
    say(bed, region, Stated.UNNEEDED, 0, 16 * MIB)
    assert bed.scheduler.queued_bytes == before >= MIB


def test_who_reads_there_all_the_same_is_read_ahead_of_again(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    bed.walk(region, 0, 16 * MIB)
    say(bed, region, Stated.UNNEEDED)
    bed.rest(10)
    before = bed.sent_bytes
    seen = Observation(16 * MIB, 16 * MIB + PAGE, bed.now - 20 * MS)
    bed.arbiter.observe(Batch(region, bed.now, [seen]))
    bed.turn()
    assert bed.sent_bytes == before, "that was before, and is told late"
    bed.walk(region, 16 * MIB, 128 * MIB)
    assert list(bed.read())[-1][1] >= 128 * MIB and bed.sent_bytes - before > 90 * MIB


def test_a_reader_that_drops_what_lies_behind_it_goes_on_as_ever(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    for at in range(0, 128 * MIB, MIB):
        bed.walk(region, at, at + MIB)
        say(bed, region, Stated.UNNEEDED, at, at + MIB)
    assert bed.read().total_bytes() >= 120 * MIB
    assert bed.sent_bytes <= bed.read().total_bytes() + MIB, "once"
    assert list(region.reader.unneeded.ranges) == [(0, 128 * MIB)]


def test_needed_and_a_new_mapping_take_it_back(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    say(bed, region, Stated.UNNEEDED)
    say(bed, region, Stated.NEEDED, 0, 64 * MIB)
    assert list(region.reader.unneeded.ranges) == [(64 * MIB, SIZE)]
    bed.region(file)
    assert not region.reader.unneeded.ranges


def test_ranges_from_all_over_are_forgotten(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    for turn in range(UNNEEDED_MAX + 1):
        say(bed, region, Stated.UNNEEDED, turn * 2 * MIB, turn * 2 * MIB + MIB)
        assert len(region.reader.unneeded.ranges) == (turn + 1) % (UNNEEDED_MAX + 1)


@pytest.mark.parametrize("needed_too", [False, True])
def test_what_was_to_be_streamed_comes_no_more(bed: Bed, file: FileState, needed_too: bool) -> None:
    """Unless another process maps the file, too."""
    bed.stated._bound = lambda stream: (1 << 40, 8 * MIB)
    region = bed.region(file)
    if needed_too:
        bed.region(file, 1, 8)
    say(bed, region, Stated.NEEDED)
    for _ in range(8):
        bed.turn()
    say(bed, region, Stated.UNNEEDED, 100 * MIB, 200 * MIB)
    bed.rest(600)
    assert list(bed.read()) == ([(0, SIZE)] if needed_too else [(0, 100 * MIB), (200 * MIB, SIZE)])
    assert bed.sent_bytes == bed.read().total_bytes(), "once"
    say(bed, region, Stated.NEEDED, 100 * MIB, 200 * MIB)
    bed.rest(600)
    assert list(bed.read()) == [(0, SIZE)]


def test_other_policies_are_the_users_word(
    monkeypatch: pytest.MonkeyPatch, file: FileState
) -> None:
    bed = Bed(monkeypatch, policy="fixed")
    region = bed.region(file)
    for what in Stated:
        say(bed, region, what)
    assert region.reads is Stated.NORMAL and not region.reader.unneeded.ranges


def test_a_number_that_is_none_says_nothing(bed: Bed, file: FileState) -> None:
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
    assert pool.victims.block_bytes == 64 << 10
    pool.victims.plan([])
    usual, count = [first for _, first, _ in told], len(told)
    ranges = IntervalSet()
    ranges.add(20 * (64 << 10) + 1, 24 * (64 << 10))
    pool.victims.plan([], (), [(3, ranges), (7, ranges)])
    found = [first for _, first, _ in told]
    assert sorted(found[:3]) == [21, 22, 23]
    assert found[3:] == usual[: count - 3]
