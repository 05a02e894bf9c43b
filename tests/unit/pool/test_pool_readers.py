# SPDX-License-Identifier: Apache-2.0
"""state/reader.py, PoolTouches: of all walks of a reader, those that are its readers' walks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.predict.randomness import Access, RandomnessDetector
from uffdprefetch.predict.streams import FORGET_NS, STREAMS_MAX, Stream, StreamTable
from uffdprefetch.readers.reader_streams import goes_on
from uffdprefetch.state.reader import PoolTouches

MIB = 1 << 20


class Mapping:
    """A mapping whose threads touch 64 KiB here and there."""

    def __init__(self) -> None:
        self.reader: Any = SimpleNamespace(table=StreamTable(0, 1), pool=PoolTouches())
        self.now = CLOCK.now_ns()

    def touch(self, tid: int, at: int, later_ns: int = 1_000_000) -> Stream:
        self.now += later_ns
        stream, _ = self.reader.table.touch(at, at + 65536, self.now)
        self.reader.pool.follow(tid, stream)
        return stream

    def walk(self, tid: int, at: int, touches: int) -> Stream:
        for i in range(touches):
            stream = self.touch(tid, at + i * MIB)
        return stream

    def readers(self) -> list[Stream]:
        return self.reader.pool.followed(self.reader.table.active(), self.now)


def test_a_look_at_a_page_elsewhere_is_no_reader() -> None:
    """A tree's pages, each near the one before it: an active stream of their own."""
    mapping = Mapping()
    for step in range(40):
        walk = mapping.touch(7, step * MIB)
        if step % 4 == 3:
            tree = mapping.touch(7, 600 * MIB + step * 65536)
    assert tree.active and walk.active and tree is not walk
    assert mapping.readers() == [walk]


def test_a_stream_that_begins_elsewhere_takes_the_place_of_the_one_before() -> None:
    mapping = Mapping()
    old = mapping.walk(7, 400 * MIB, 20)
    mapping.touch(7, 0)
    assert mapping.readers() == [old], "it may have been a look"
    new = mapping.walk(7, MIB, 3)
    assert mapping.readers() == [new]
    assert old in mapping.reader.table.active(), "else the test shows nothing"


def test_each_thread_has_its_own_stream() -> None:
    mapping = Mapping()
    walks = [mapping.walk(tid, tid * 100 * MIB, 4) for tid in (1, 2, 3)]
    assert sorted(mapping.readers(), key=lambda s: s.id) == sorted(walks, key=lambda s: s.id)


def test_who_has_not_read_for_long_is_no_reader() -> None:
    mapping = Mapping()
    mapping.now -= FORGET_NS + 10_000_000_000
    mapping.walk(1, 0, 4)
    mapping.now = CLOCK.now_ns()
    walk = mapping.walk(2, 300 * MIB, 4)
    assert mapping.readers() == [walk]


def test_threads_without_end_are_not_remembered_without_end() -> None:
    mapping = Mapping()
    for tid in range(3 * STREAMS_MAX):
        walk = mapping.touch(tid, tid * 65536)
    assert len(mapping.reader.pool.walkers) == STREAMS_MAX
    assert walk in mapping.readers()


def test_a_touch_goes_on_with_a_stream_where_it_is_next_to_what_was_read() -> None:
    """In a small file any place is within the reach of a walk."""
    mapping = Mapping()
    walk = mapping.walk(7, 4 * MIB, 20)
    jumps = mapping.reader.jumps = RandomnessDetector(24 * MIB)
    mapping.reader.access = Access.UNKNOWN
    for at in (160, 161, 162, 64, 65):
        jumps.saw(at << 17, (at << 17) + 65536, mapping.now + at)
        assert goes_on(mapping.reader, walk) == (at != 64)
    assert not goes_on(mapping.reader, mapping.touch(7, 900 * MIB)), "not far yet"
    mapping.reader.access = Access.JUMPS
    assert not goes_on(mapping.reader, walk), "what looks like a walk of such a reader"
