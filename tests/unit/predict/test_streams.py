# SPDX-License-Identifier: Apache-2.0
"""Touches become streams: what the readers of the field do, as (offset, length, time) triples."""

from __future__ import annotations

import random

import pytest

from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.streams import (
    CANDIDATE_REACH_BYTES,
    FORGET_NS,
    PIECE_BYTES,
    PIECES,
    REACH_BYTES,
    SETTLED_BYTES,
    STREAMS_MAX,
    Stream,
    StreamTable,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCK = 64 * KIB
MS = 1_000_000


class Reader:
    """Feeds one reader's touches to its table as the engine does, 1 ms apart."""

    def __init__(self) -> None:
        self.table = StreamTable(rank=3, reader=42)
        self.now_ns = 1000 * MS

    def touch(self, start: int, length: int = BLOCK) -> Stream:
        self.now_ns += MS
        stream, _ = self.table.touch(start, start + length, self.now_ns)
        return stream

    def walk(self, start: int, end: int, step: int = BLOCK, length: int = BLOCK) -> Stream:
        """Touch ``length`` bytes at every ``step``, telling what the page tables show."""
        stream = None
        for at in range(start, end, step):
            self.now_ns += MS
            before, at_end = at, at + length
            stream, forward = self.table.touch(before, at_end, self.now_ns)
            if forward and stream.direction > 0:
                stream.passed.saw(forward, [(at, min(length, forward))])
        assert stream is not None
        return stream

    def positions(self) -> list[int]:
        return sorted(s.position_bytes for s in self.table.active())


def test_a_consecutive_reader_is_one_stream() -> None:
    reader = Reader()
    stream = reader.walk(0, 40 * MIB)
    assert reader.table.active() == [stream]
    assert (stream.rank, stream.reader) == (3, 42)
    assert (stream.start_bytes, stream.position_bytes) == (0, 40 * MIB)
    assert stream.pattern == "consecutive"
    assert stream.passed.density == pytest.approx(1.0)
    assert stream.settled


def test_one_touch_is_no_stream_yet_a_second_one_is() -> None:
    reader = Reader()
    first = reader.touch(100 * MIB)
    assert not first.active and first.pattern == "new"
    assert reader.touch(100 * MIB + BLOCK) is first
    assert first.active and not first.settled


def test_a_stream_that_is_seen_late_counts_at_once() -> None:
    """A page-table look brings a long run in one touch: no need to wait for the next."""
    assert Reader().touch(0, 4 * MIB).active


def test_a_constant_step_is_strided() -> None:
    reader = Reader()
    stream = reader.walk(0, 64 * MIB, step=MIB)
    # the engine tells of all runs between two checkpoints at once
    stream.passed.saw(8 * MIB, [(at, BLOCK) for at in range(0, 8 * MIB, MIB)])
    assert stream.pattern == "strided"
    assert stream.passed.stride_bytes is not None and abs(stream.passed.stride_bytes - MIB) <= BLOCK


def test_a_skipping_reader_of_unequal_records_is_sequential() -> None:
    """[Haderbache]'s skipping on records of 12-192 KiB: no constant step, still one walk."""
    chance = random.Random(1)
    reader = Reader()
    at, runs = 0, []
    while at < 64 * MIB:
        length = chance.randrange(12, 192) * KIB
        stream = reader.touch(at, length)
        runs.append((at, length))
        at += length + sum(chance.randrange(12, 192) * KIB for _ in range(15))
    stream.passed.saw(64 * MIB, runs)
    assert reader.table.active() == [stream]
    assert stream.position_bytes == runs[-1][0] + runs[-1][1]
    assert stream.pattern == "sequential"
    assert stream.passed.density is not None and stream.passed.density < 0.2


def test_a_backward_reader_is_seen_as_such() -> None:
    reader = Reader()
    for at in range(40 * MIB, 8 * MIB, -MIB):
        stream = reader.touch(at)
    assert reader.table.active() == [stream]
    assert stream.direction == -1
    assert stream.position_bytes == 9 * MIB
    assert stream.pattern.endswith("backward")


def test_a_backward_reader_of_blocks_that_are_read_forward() -> None:
    """What slicing an array from its end does; each block may be seen in parts."""
    reader = Reader()
    for at in range(40 * MIB, 0, -MIB):
        for part in range(0, MIB, 256 * KIB):
            stream = reader.touch(at + part, 256 * KIB)
    assert reader.table.active() == [stream]
    assert stream.direction == -1
    assert stream.position_bytes == MIB


def test_a_forward_stream_that_looked_backward_at_first_turns() -> None:
    reader = Reader()
    for at in (20 * BLOCK, 19 * BLOCK, 18 * BLOCK, *(i * BLOCK for i in range(21, 100))):
        stream = reader.touch(at)
    assert reader.table.active() == [stream]
    assert (stream.direction, stream.position_bytes) == (1, 100 * BLOCK)


def test_a_stream_up_to_a_place_that_was_touched_once_passes_it() -> None:
    """An LMDB's root page lies among the records: a checkpoint nearer to it is still the walk's."""
    reader = Reader()
    root = reader.touch(22 * MIB, 4 * KIB)
    walk = reader.walk(0, 17 * MIB)
    assert reader.touch(20 * MIB, 4 * KIB) is walk
    assert reader.touch(24 * MIB, 4 * KIB) is walk
    assert reader.table.active() == [walk]
    assert not root.active


def test_the_second_epoch_is_a_stream_of_its_own_and_the_first_one_ends() -> None:
    reader = Reader()
    old = reader.walk(0, 200 * MIB, step=MIB)
    new = reader.walk(0, 20 * MIB, step=MIB)
    assert new is not old
    assert new.active and new.position_bytes == 19 * MIB + BLOCK
    reader.now_ns += FORGET_NS
    reader.touch(20 * MIB)
    reader.table.expire(reader.now_ns)
    assert reader.table.active() == [new]
    assert old in reader.table.absorbed  # so that what it had queued is dropped


@pytest.mark.parametrize("root", [22 * MIB, 900 * MIB])
@pytest.mark.parametrize("first_record", [192 * KIB, 300 * MIB])
def test_a_header_and_a_tree_lead_to_the_records(root: int, first_record: int) -> None:
    """LMDB: the meta pages, the root page far away, then the records from where the rank begins."""
    reader = Reader()
    reader.touch(0, 8 * KIB)
    reader.touch(root, 4 * KIB)
    reader.touch(0, 8 * KIB)
    reader.touch(root, 4 * KIB)
    for at in range(first_record, first_record + 4 * MIB, BLOCK):
        reader.touch(at)
    walks = [s for s in reader.table.active() if s.settled]
    assert [s.position_bytes for s in walks] == [first_record + 4 * MIB]
    # nothing sends a window from the header or the root across the file
    assert all(abs(s.position_bytes - root) > BLOCK or not s.settled for s in reader.table.active())


def test_out_of_order_touches_of_one_stream_stay_in_it() -> None:
    """Kernel readahead, several threads and tree pages shuffle a walk a little."""
    reader = Reader()
    chance = random.Random(4)
    blocks = list(range(0, 32 * MIB, BLOCK))
    for i in range(0, len(blocks), 8):
        chunk = blocks[i : i + 8]
        chance.shuffle(chunk)
        for at in chunk:
            stream = reader.touch(at)
    assert reader.table.active() == [stream]
    assert stream.position_bytes == 32 * MIB


def test_four_readers_of_one_process_are_four_streams() -> None:
    reader = Reader()
    starts = [i * 4 * REACH_BYTES for i in range(4)]
    for step in range(16):
        for start in starts:
            reader.touch(start + step * MIB, MIB)
    assert reader.positions() == [start + 16 * MIB for start in starts]


def test_a_stream_that_runs_into_another_takes_it_over() -> None:
    reader = Reader()
    ahead = reader.walk(64 * MIB, 68 * MIB)
    behind = reader.walk(0, 72 * MIB, step=MIB, length=MIB)
    assert behind is not ahead
    assert reader.table.active() == [behind]
    assert ahead in reader.table.absorbed
    assert behind.position_bytes == 72 * MIB


def test_a_stream_that_was_left_for_one_nearby_ends_when_silent() -> None:
    """The head of a file, read once, is no second reader for ever."""
    reader = Reader()
    head = reader.touch(0, 512 * KIB)
    walk = reader.walk(20 * MIB, 24 * MIB)
    assert reader.table.active() == [head, walk]
    reader.now_ns += LATELY_NS
    walk = reader.walk(24 * MIB, 25 * MIB)
    reader.table.expire(reader.now_ns)
    assert reader.table.active() == [walk]
    assert head in reader.table.absorbed


def test_the_number_of_streams_is_bounded_and_the_silent_go_first() -> None:
    reader = Reader()
    kept = reader.walk(0, 8 * MIB)
    for i in range(1, 4 * STREAMS_MAX):
        reader.touch(i * GIB)
    assert len(reader.table.streams) <= STREAMS_MAX
    assert kept in reader.table.streams  # a walk outlives candidates
    assert reader.table.absorbed


def test_a_candidate_reaches_less_far_than_a_stream() -> None:
    far = CANDIDATE_REACH_BYTES + MIB
    reader = Reader()
    assert reader.touch(0) is not reader.touch(far)
    reader = Reader()
    walk = reader.walk(0, 2 * SETTLED_BYTES)
    assert reader.touch(walk.position_bytes + far) is walk


def test_the_rate_is_the_readers() -> None:
    reader = Reader()
    stream = reader.walk(0, 256 * MIB, step=256 * KIB, length=256 * KIB)  # one each millisecond
    assert stream.rate_bytes_per_second == pytest.approx(256 * KIB * 1000, rel=0.05)


def test_how_long_a_reader_stood_where_it_began_is_not_its_pace() -> None:
    """A loader of weights reads a file's head, then makes tensors, then goes."""
    table = StreamTable(0, 1)
    table.touch(0, 64 * KIB, 0)
    for step in range(1, 40):
        now = 2000 * MS + step * MS
        stream, _ = table.touch(step * MIB, step * MIB + 64 * KIB, now)
    assert stream.rate_bytes_per_second == pytest.approx(MIB * 1000, rel=0.1)


def test_the_rate_follows_a_reader_that_slows_down() -> None:
    reader = Reader()
    reader.walk(0, 256 * MIB, step=256 * KIB, length=256 * KIB)
    for i in range(100):
        reader.now_ns += 99 * MS
        stream = reader.touch(256 * MIB + i * 256 * KIB, 256 * KIB)
    assert stream.rate_bytes_per_second == pytest.approx(256 * KIB * 10, rel=0.1)


def test_between_touches_a_reader_is_expected_where_its_rate_takes_it() -> None:
    reader = Reader()
    stream = reader.walk(0, 8 * MIB)
    rate, at = stream.rate_bytes_per_second, stream.position_bytes
    assert stream.expected_bytes(reader.now_ns, 4 * MIB) == at
    later = stream.expected_bytes(reader.now_ns + 10 * MS, 4 * MIB)
    assert later == at + int(rate / 100) > at
    assert stream.expected_bytes(reader.now_ns + 10_000 * MS, 4 * MIB) == at + 4 * MIB
    assert stream.expected_bytes(reader.now_ns - MS, 4 * MIB) == at
    stream.direction = -1
    assert stream.expected_bytes(reader.now_ns + 10 * MS, 4 * MIB) == at - int(rate / 100)


@pytest.mark.parametrize(("wide", "skips"), [(BLOCK, True), (BLOCK * 7, False)])
def test_a_stream_skips_when_it_leaves_something_out_in_each_of_its_last_pieces(
    wide: int, skips: bool
) -> None:
    walk = Stream(1, 0, 1, 0, 0, 0, 0, active=True)

    def goes_on(size: int, found: int) -> None:
        for at in range(0, size, 8 * BLOCK):
            walk.passed.saw(8 * BLOCK, [(at, found)])

    goes_on((PIECES - 1) * PIECE_BYTES, wide)
    assert not walk.skips
    goes_on(PIECE_BYTES, wide)
    assert walk.skips is skips
    goes_on(PIECE_BYTES, 8 * BLOCK)
    assert not walk.skips


def test_one_wide_gap_is_no_skipping() -> None:
    walk = Stream(1, 0, 1, 0, 0, 0, 0, active=True)
    walk.passed.saw(REACH_BYTES, [(0, BLOCK)])
    for at in range(REACH_BYTES, 2 * REACH_BYTES, BLOCK):
        walk.passed.saw(BLOCK, [(at, BLOCK)])
        assert not walk.skips
