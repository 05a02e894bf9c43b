# SPDX-License-Identifier: Apache-2.0
"""Where a file is read on: touches near a front bring it on, a reader elsewhere lets it die."""

from __future__ import annotations

import random

import pytest

from uffdprefetch.predict.bounds import DECIDE_NS, ENTRIES_MAX, LATELY_COUNT
from uffdprefetch.predict.fronts import (
    ASKED,
    BLOCK_BYTES,
    FRONTS_MAX,
    LOOKS_ELSEWHERE,
    LOST,
    MISS_BLOCKS,
    TOUCHED,
    USED,
    FileFronts,
    Front,
    Rests,
    State,
)
from uffdprefetch.predict.storage import Account, Link
from uffdprefetch.predict.survival import Law
from uffdprefetch.predict.visits import FREE_SHARE

LINK = Link(300e6, 1e-3)
REACH = LINK.reach_bytes // BLOCK_BYTES
BLOCKS = 10_000


class File:
    """A file of BLOCKS blocks and whoever touches it."""

    def __init__(self) -> None:
        self.account, self.ended = Account(), list[Front]()
        self.fronts = FileFronts(BLOCKS, Law(), self.account, self.ended.append)
        self.now = 0

    def touch(self, start: int, length: int = 1, pid: int = 1) -> Front:
        self.now += 1
        front, _ = self.fronts.touch(pid, start, start + length, self.now, LINK)
        return front

    def look(self, *places: int, pid: int = 1) -> list[Front]:
        """One look finds these blocks."""
        return self.fronts.looked(pid, {self.touch(at, pid=pid) for at in places})


def test_touches_in_order_are_one_front() -> None:
    file = File()
    first = file.touch(100)
    for at in range(101, 150):
        assert file.touch(at) is first
    assert (first.start, first.position, first.length) == (100, 150, 50)
    assert first.direction == 1 and first.gaps == 0 and first.density == pytest.approx(1)


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_that_is_behind_is_no_stream_of_its_own(backward: bool) -> None:
    """However far that is: it goes on where it was."""
    file = File()

    def touch(at: int, pid: int, length: int = 1) -> Front:
        return file.touch(BLOCKS - at - length if backward else at, length, pid)

    first = touch(0, 1)
    touch(1, 1)
    touch(2, 2)  # side by side; then it is late
    for at in range(3, 1000):
        assert touch(at, 1) is first
    for at in range(3, 900, 3):
        assert touch(at, 2, 2) is first
    assert first.length == 1000


@pytest.mark.parametrize("behind", [1, 10, 40])
def test_gaps_wait_for_the_last_rank(behind: int) -> None:
    """Four ranks take turns at records of two blocks, eight in a batch, the last ones late."""
    file = File()
    front = file.touch(0, 64)
    for rank in range(4):
        file.touch(64 + 2 * rank, 2, rank)
    for turn in range(120):
        for rank in range(4):
            batch = turn - (behind if rank > 1 else 0)
            for record in range(8 * batch, 8 * batch + 8) if batch >= 0 else ():
                assert file.touch(72 + (4 * record + rank) * 2, 2, rank) is front
    assert front.density == pytest.approx(1)
    assert 0.4 < front.gaps < 0.7, "each record of two blocks a miss of its rank"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("pids", "runs"), [((1,), 0), ((1, 2, 3, 4), 1 / 3)])
def test_of_ranks_that_take_turns_each_record_is_a_miss(
    pids: tuple[int, ...], runs: float, backward: bool
) -> None:
    """Records of three blocks and a bit, so that neighbours share one. Who reads all of them alone
    has none; nor have ranks that read the same."""
    alike, turns = File(), File()
    for file, size in ((turns, 4), (alike, 3)):
        for record in range(400):
            for pid in [pids[record % len(pids)]] if file is turns else pids:
                at = 3 * record
                front = file.touch(BLOCKS - at - size if backward else at, size, pid)
    assert (front.density, front.gaps) == (pytest.approx(1), 0)
    assert alike.account.allowed == pytest.approx(FREE_SHARE * 1197 * BLOCK_BYTES, abs=1200)
    (front,) = turns.fronts.fronts
    assert front.density == pytest.approx(1)
    assert front.gaps == pytest.approx(runs, abs=0.02)


def test_gaps_that_wait_for_a_rank_that_stands_are_bounded() -> None:
    """It maps the file to the end of the job, and has read of it what it needs."""
    file = File()
    file.touch(0, pid=2)
    front = file.touch(0)
    for at in range(2, BLOCKS, 2):
        assert file.touch(at) is front
    assert len(front.texture.gaps) == ENTRIES_MAX
    assert front.density == pytest.approx(1 / 2, abs=0.01)


def test_who_goes_on_forward_turns_no_single_touch_ahead_round() -> None:
    """A page of an index lies behind the records that it names, and is touched before them."""
    file = File()
    page = file.touch(208)
    front = [file.touch(at, 2) for at in range(100, 202, 2)][-1]
    assert file.touch(204, 3) is front and page.direction == 1


def test_who_has_gone_is_waited_for_no_more() -> None:
    """Gaps behind the first rank wait for no place of a process that has unmapped the file."""
    file = File()
    front = file.touch(0, 64)
    file.touch(64, pid=2)
    for at in range(66, 66 + 4 * LATELY_COUNT, 2):
        file.touch(at)
    assert front.texture.passed == 0
    file.fronts.closed(2, others=True)
    for at in range(front.position + 1, front.position + 4 * LATELY_COUNT, 2):
        file.touch(at)
    assert front.texture.passed > 0 and front.density == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("idle", [0, DECIDE_NS, DECIDE_NS + 1])
def test_who_waits_for_what_is_under_way_does_not_rest(idle: int) -> None:
    rests = Rests(0)
    for number in range(1, 6):
        rests.goes_on(number * 100, number * 10 * DECIDE_NS, idle)
    assert rests.burst == (100 if idle > DECIDE_NS else 0)


def test_who_comes_back_behind_a_stream_that_stands_begins_a_stream() -> None:
    file = File()
    first = [file.touch(at) for at in range(1000)][-1]
    again = file.touch(5)
    assert again is not first
    file.now += 10_000  # nobody goes on meanwhile
    assert file.touch(300) not in (first, again)


def test_of_two_streams_the_one_that_is_near_goes_on() -> None:
    file = File()
    ahead = [file.touch(at) for at in range(1000)][-1]
    behind = [file.touch(at, pid=2) for at in range(300, 350)][-1]
    assert behind is not ahead
    assert file.touch(350, pid=2) is behind


def test_a_stream_is_as_dense_as_it_was_of_late() -> None:
    """One that goes on in steps, after all in order."""
    file = File()
    front = file.touch(0, 500)
    for at in range(505, 505 + 12 * LATELY_COUNT, 6):
        assert file.touch(at) is front
    assert front.density == pytest.approx(1 / 6, rel=0.1)
    assert front.gaps == pytest.approx(1 / 6, rel=0.1)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_gaps_that_are_filled_as_a_rule_were_part_of_the_stream(
    backward: bool, again: bool
) -> None:
    """A large copy touches both ends of what it takes first; and again, when it is read again."""
    file, piece = File(), 8
    if again:
        file.touch(0, 1000)
    front = file.touch(0, 2 * piece)
    for start in range(2 * piece, 20 * piece, piece):
        assert file.touch(start) is front and file.touch(start + piece - 1) is front
        middle = range(start + 1, start + piece - 1)
        for at in reversed(middle) if backward else middle:
            assert file.touch(at) is front
    assert (front.density, front.gaps) == (pytest.approx(1), pytest.approx(0, abs=0.01))


@pytest.mark.parametrize("filled", [0, 4, 5, 7])
def test_gaps_of_which_a_part_is_filled_now_and_then_are_gaps(filled: int) -> None:
    """Of ten blocks the last is touched first, and then some more."""
    file = File()
    front = file.touch(0, 20)
    for at in range(20, 20 + 10 * LATELY_COUNT, 10):
        file.touch(at + 9)
        if filled:
            file.touch(at, filled)
    filled = filled if 4 * filled > 3 * 9 else 0
    assert front.density == pytest.approx((1 + filled) / 10, abs=0.05)
    assert front.gaps == pytest.approx((1 - filled / 9) / 10, abs=0.02)


@pytest.mark.parametrize("backward", [False, True])
def test_what_a_stream_is_told_of_once_more_as_it_goes_on_counts_once(backward: bool) -> None:
    """Touches that one look finds are merged: what fills a gap lies in one run with what is new."""
    file, record = File(), 8

    def touch(start: int, end: int) -> Front:
        start, end = (BLOCKS - end, BLOCKS - start) if backward else (start, end)
        return file.touch(start, end - start)

    touch(0, record)
    for start in range(record, 40 * LATELY_COUNT, 2 * record):
        touch(start + 6, start + record)
        touch(start, start + record + 2)  # the gap, and on into the next record
        touch(start + 1, start + record)
        front = touch(start + record + 6, start + 2 * record)
    texture = front.texture
    assert texture.filled / texture.passed == pytest.approx(6 / 10, abs=0.05), texture
    assert [file.fronts.untouched(*gap) for gap in texture.gaps][-4:] == [0, 4, 0, 4]


def test_a_gap_that_costs_less_than_a_miss_is_passed_over_a_longer_one_is_not() -> None:
    file = File()
    front = file.touch(100, 20)
    assert file.touch(120 + REACH) is front and front.texture.runs == 1
    young = File()
    one = young.touch(100)
    assert young.touch(101 + REACH + 50) is not one


def test_a_front_of_one_block_follows_no_far_gap() -> None:
    file = File()
    front = file.touch(100)
    assert file.touch(101 + REACH) is not front


def test_touches_before_the_first_turn_it_round() -> None:
    file = File()
    front = file.touch(100)
    for at in (99, 98, 97):
        assert file.touch(at) is front
    assert front.direction == -1 and front.position == 97 and front.start == 101


def test_processes_that_share_a_stream_share_its_front() -> None:
    file = File()
    front = file.touch(100, pid=1)
    assert all(file.touch(101 + i, pid=1 + i % 4) is front for i in range(40))


def test_a_reader_seen_elsewhere_time_and_again_has_left() -> None:
    file = File()
    front = file.touch(100, 10)
    found = [file.look(5000 + 100 * i) for i in range(LOOKS_ELSEWHERE)]
    assert front in found[-1] and front not in found[0]
    assert front.state is State.DEAD and front in file.ended


def test_looks_at_another_process_say_nothing() -> None:
    file = File()
    front = file.touch(100, 10, pid=1)
    for i in range(3 * LOOKS_ELSEWHERE):
        file.look(5000 + 100 * i, pid=2)
    assert front.state is State.ALIVE


def test_one_that_comes_back_is_waited_for_twice_as_long() -> None:
    file = File()
    front = file.touch(100, 10)
    for i in range(LOOKS_ELSEWHERE):
        file.look(5000 + 100 * i)
    assert file.touch(110) is front and front.state is State.ALIVE
    for i in range(2 * LOOKS_ELSEWHERE - 1):
        file.look(7000 + 100 * i)
    assert front.state is State.ALIVE
    file.look(9900)
    assert front.state is State.DEAD


def test_what_lies_ahead_of_one_that_has_left_is_lost_but_what_the_kernel_had_read() -> None:
    file = File()
    front = file.touch(100)
    file.fronts.ask(101, 111)
    front.wanted = 111
    assert file.account.open == 10 * BLOCK_BYTES
    for i in range(LOOKS_ELSEWHERE):
        file.look(5000 + 100 * i)
    first = 101 + MISS_BLOCKS // 2
    assert file.account.lost == (111 - first) * BLOCK_BYTES and file.account.open == 0
    assert not any(file.fronts.flags[101:first])
    assert all(flag & LOST for flag in file.fronts.flags[first:111])
    file.touch(101, 10)
    assert file.account.lost == 0 and file.account.used == (111 - first) * BLOCK_BYTES


def test_behind_touches_in_a_row_the_kernel_has_read_once_more() -> None:
    file = File()
    front = file.touch(100, MISS_BLOCKS + 1)
    end = front.position
    file.fronts.ask(end, end + 10)
    front.wanted = end + 10
    file.fronts.end(front)
    assert file.account.lost == (10 - MISS_BLOCKS - MISS_BLOCKS // 2) * BLOCK_BYTES


@pytest.mark.parametrize("run, around", [(1, 1), (2, 1), (3, 3), (4, 3)])
def test_how_much_plain_reads_of_a_stream_goes_by_how_long_its_runs_are(
    run: int, around: int
) -> None:
    """Half of a miss before a run, as much behind it, and where that was come over the next."""
    file = File()
    front = file.touch(0, 40)
    for at in range(50, 50 + 20 * LATELY_COUNT, 10):
        assert file.touch(at, run) is front
    assert front.density == pytest.approx(run / 10, rel=0.1)
    assert front.plain == pytest.approx((run + around) / 10, rel=0.1)


def test_at_the_end_of_the_file_none_dies() -> None:
    file = File()
    front = file.touch(BLOCKS - 20, 20)
    file.fronts.end(front)
    assert front.state is State.ENDED


def test_one_that_meets_what_was_read_has_ended_and_not_died() -> None:
    file = File()
    file.touch(200)
    front = file.touch(100, 10)
    for at in range(110, 200, 2):
        file.touch(at, 2)
    assert front.position == 200
    file.fronts.end(front)
    assert front.state is State.ENDED


def test_only_what_nobody_has_asked_for_or_touched_counts() -> None:
    file = File()
    file.touch(100)
    assert file.fronts.ask(99, 103) == 3
    assert file.fronts.ask(99, 103) == 0
    file.fronts.take_back(99, 103)
    assert file.account.asked == 0
    assert not any(flag & ASKED for flag in file.fronts.flags[99:103])
    assert file.fronts.flags[100] & TOUCHED


def test_a_gap_costs_no_more_than_what_the_kernel_would_not_have_read() -> None:
    file = File()
    front = file.touch(100, 20)
    file.fronts.ask(120, 120 + REACH)
    front.wanted = 120 + REACH
    file.touch(120 + REACH - 1)
    gap = REACH - 1
    assert 0 < file.account.lost < gap * BLOCK_BYTES


def test_no_more_fronts_are_kept_than_can_be_looked_at() -> None:
    file = File()
    for i in range(3 * FRONTS_MAX):
        file.touch(100 * i)
    assert len(file.fronts.fronts) == FRONTS_MAX
    assert {front.start for front in file.fronts.fronts} >= {100 * (3 * FRONTS_MAX - 1)}


def test_a_hundred_processes_that_walk_apart_keep_their_fronts() -> None:
    file, ranks = File(), 3 * FRONTS_MAX
    apart = BLOCKS // ranks
    for turn in range(4):
        for pid in range(ranks):
            file.touch(apart * pid + turn, pid=pid)
    assert sorted((front.start, front.length) for front in file.fronts.fronts) == [
        (apart * pid, 4) for pid in range(ranks)
    ]


def test_fronts_of_processes_that_have_gone_are_not_kept() -> None:
    """A loader whose workers come and go, under a parent that maps the file all the time."""
    file = File()
    for pid in range(20 * FRONTS_MAX):
        file.fronts.end(file.touch(20 * pid, pid=pid))
    assert len(file.fronts.fronts) <= 2 * FRONTS_MAX


def test_what_was_lost_and_is_read_once_more_is_open_again() -> None:
    file = File()
    file.fronts.ask(100, 110)
    file.fronts.lose(0, BLOCKS)
    assert file.account.lost == file.account.asked == 10 * BLOCK_BYTES
    assert file.fronts.ask(100, 110) == 0
    assert file.account.open == 10 * BLOCK_BYTES
    file.fronts.lose(0, BLOCKS)
    assert file.account.lost == file.account.asked == 20 * BLOCK_BYTES


def test_when_all_have_unmapped_it_nothing_is_open() -> None:
    file = File()
    file.touch(100, pid=1)
    file.touch(500, pid=2)
    file.fronts.ask(101, 120)
    assert [front.pid for front in file.fronts.closed(1, others=True)] == [1]
    assert file.account.open > 0
    file.fronts.closed(2, others=False)
    assert file.account.open == 0 and not file.fronts.fronts


def test_counts_are_those_of_the_blocks_however_they_came() -> None:
    """They are asked for at each turn, and a file of 1 TiB has 16 million blocks."""
    file, chance = File(), random.Random(4)
    for _ in range(3000):
        start = chance.randrange(BLOCKS - 40)
        end = start + chance.randrange(1, 40)
        what = chance.choice(("touch", "ask", "take_back", "lose"))
        if what == "touch":
            file.touch(start, end - start)
        else:
            getattr(file.fronts, what)(start, end)
    flags = file.fronts.flags
    assert file.fronts.unknown == flags.count(0) < BLOCKS
    assert file.fronts.used_bytes == sum(bool(flag & USED) for flag in flags) * BLOCK_BYTES > 0


def test_who_stops_before_what_was_read_ahead_of_it_has_died_though_the_next_was_touched() -> None:
    file = File()
    file.touch(40)
    file.touch(0, 20)
    front = file.touch(20, 20)
    file.fronts.end(front)
    assert front.state is State.ENDED, "it has met another"
    other = File()
    other.touch(40)
    other.touch(0, 20)
    front = other.touch(20, 20)
    other.fronts.ask(41, 60)
    front.wanted = 60
    other.fronts.end(front)
    assert front.state is State.DEAD


def test_what_has_left_memory_is_asked_for_and_lost_as_if_it_had_never_been() -> None:
    file = File()
    front = file.touch(0, 10)
    file.fronts.ask(10, 20)
    file.touch(10, 10)
    account = file.account
    asked, unknown = account.asked, file.fronts.unknown
    assert file.fronts.touched_runs(5, 40, 8) == [(5, 20)]
    file.fronts.renew(5, 20)
    assert file.fronts.unknown == unknown + 15
    assert file.fronts.ask(5, 20) == 15 and account.asked == asked + 15 * BLOCK_BYTES
    file.fronts.lose(5, 20)
    assert account.lost == 15 * BLOCK_BYTES and front.state is State.ALIVE


def test_a_stream_that_turns_takes_back_what_was_guessed_in_the_other_direction() -> None:
    file = File()
    front = file.touch(100, 3)
    file.fronts.ask(103, 120)
    front.wanted = 120
    assert file.touch(98, 3) is front, "the first block of before is told of once more"
    assert front.direction == -1 and file.ended == [front]
    assert file.account.lost == 17 * BLOCK_BYTES
