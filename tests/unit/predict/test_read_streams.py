# SPDX-License-Identifier: Apache-2.0
"""predict/read_streams.py: who reads in order, and how far, by what is seen of waiting threads."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from uffdprefetch.base.units import GIB, KIB, MIB
from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.predict.read_streams import ReadSighting, ReadStreams, ReadStretch

ME = (7, 8)


@dataclass
class Reader:
    """A thread that reads, and is seen when a test says so."""

    streams: ReadStreams = field(default_factory=ReadStreams)
    thread: tuple[int, int] = ME
    rchar: int = 0
    at: int = 0  # of the file that it reads
    fd: int = 3
    file: str = "a"
    read: list[tuple[int, int]] = field(default_factory=list)  # stretches of the present file

    def reads(self, length: int) -> None:
        self.read.append((self.at, self.at + length))
        self.at += length
        self.rchar += length

    def reads_elsewhere(self, length: int) -> None:
        self.rchar += length

    def waits(self, asked: int = 64 * KIB) -> ReadStretch:
        seen = self._tell(self.at, asked)
        assert seen is not None
        return seen

    def goes_on(self) -> ReadStretch | None:
        return self._tell(None, 0)

    def _tell(self, offset: int | None, asked: int) -> ReadStretch | None:
        return self.streams.saw(
            ReadSighting(self.thread, self.fd, self.file, offset, asked, self.rchar, 0)
        )


def test_a_first_sighting_says_only_what_its_call_asks_for() -> None:
    reader = Reader(at=5 * MIB, rchar=9 * MIB)
    seen = reader.waits(asked=MIB)
    assert seen[1:] == (5 * MIB, 5 * MIB, 6 * MIB, False)
    reader.reads_elsewhere(MIB)
    assert reader.goes_on() is None


def test_who_has_read_just_what_the_offset_has_grown_by_is_proven() -> None:
    reader = Reader(at=5 * MIB, rchar=9 * MIB)
    first = reader.waits()
    reader.reads(3 * MIB)
    assert reader.waits() == (first.stream, 5 * MIB, 8 * MIB, 8 * MIB + 64 * KIB, True)


def test_between_two_sightings_its_position_is_what_it_has_read_further() -> None:
    reader = Reader()
    reader.waits()
    reader.reads(MIB)
    number = reader.waits().stream
    reader.reads(MIB)
    assert reader.goes_on() == (number, MIB, 2 * MIB, 2 * MIB, True)
    assert reader.goes_on() is None, "it is told once"
    reader.reads(2 * MIB)
    assert reader.goes_on() == (number, 2 * MIB, 4 * MIB, 4 * MIB, True)
    reader.reads(MIB)
    assert reader.waits(0) == (number, 4 * MIB, 5 * MIB, 5 * MIB, True)


def test_who_reads_something_else_in_between_needs_three_in_order() -> None:
    reader = Reader()
    proven = []
    for _ in range(4):
        proven.append(reader.waits().proven)
        reader.reads(MIB)
        reader.reads_elsewhere(KIB)
    assert proven == [False, False, True, True]
    assert reader.goes_on() is None, "of what it has read now it is not known where"


@pytest.mark.parametrize("jump", [-8 * MIB, 16 * MIB], ids=["back", "past what it can have read"])
def test_a_proof_that_is_broken_begins_anew(jump: int) -> None:
    reader = Reader(at=32 * MIB)
    reader.waits()
    reader.reads(MIB)
    number = reader.waits().stream
    reader.at += jump
    reader.reads(MIB)
    seen = reader.waits(asked=4)
    assert seen.stream != number
    assert seen[1:] == (reader.at, reader.at, reader.at + 4, False)
    assert reader.goes_on() is None
    reader.reads(MIB)
    assert reader.waits().proven


def test_gaps_are_not_proven() -> None:
    reader = Reader()
    for _ in range(20):
        seen = reader.waits()
        assert not seen.proven and seen.start == seen.end == reader.at
        reader.reads(64 * KIB)
        reader.at += 64 * KIB


def test_who_skips_less_than_a_page_reads_all_of_them() -> None:
    """torch.load: a header, then the tensor, which begins at a multiple of 64."""
    reader = Reader()
    for number in range(20):
        seen = reader.waits()
        assert seen.proven == (number > 0)
        reader.reads(4 * KIB)
        reader.reads(4 * MIB)
        reader.at += 48
    assert reader.goes_on() is not None


def test_the_same_call_seen_again_changes_nothing() -> None:
    reader = Reader()
    first = reader.waits()
    assert reader.waits() == first
    reader.reads(MIB)
    assert reader.waits().proven
    again = reader.waits()
    assert (again.start, again.end, again.proven) == (MIB, MIB, True)


def test_another_file_under_the_same_number_is_another_stream() -> None:
    reader = Reader()
    reader.waits()
    reader.reads(MIB)
    number = reader.waits().stream
    reader.file, reader.at = "b", 0
    reader.reads(MIB)
    assert reader.waits().stream != number


def test_threads_and_descriptors_are_told_apart() -> None:
    streams = ReadStreams()
    mine, other = Reader(streams, (7, 8)), Reader(streams, (7, 9), at=64 * MIB)
    numbers = set()
    for _ in range(3):
        for reader in (mine, other):
            numbers.add(reader.waits().stream)
            reader.reads(MIB)
    assert len(numbers) == 2
    assert mine.waits().proven and other.waits().proven


def test_of_two_files_in_turns_each_is_proven_by_three() -> None:
    """As a reader of pairs: rchar grows by both."""
    streams = ReadStreams()
    one, two = Reader(streams, fd=3, file="a"), Reader(streams, fd=4, file="b")
    for _ in range(3):
        for reader, beside in ((one, two), (two, one)):
            seen = reader.waits()
            reader.reads(MIB)
            beside.rchar = reader.rchar
    assert seen.proven and one.waits().proven


def test_who_has_left_is_forgotten() -> None:
    streams = ReadStreams()
    for pid in (7, 8):
        Reader(streams, (pid, pid)).waits()
    streams.left(7)
    assert len(streams) == 1
    reader = Reader(streams, (7, 7))
    reader.reads(MIB)
    assert not reader.waits().proven


def test_no_more_than_a_bound_is_remembered_and_the_oldest_goes() -> None:
    streams = ReadStreams()
    old = Reader(streams, (1, 1))
    for pid in range(1, ENTRIES_MAX + 100):
        Reader(streams, (pid, pid)).waits()
        if pid % 1000 == 0:
            old.waits()
    assert len(streams) == ENTRIES_MAX
    old.reads(MIB)
    assert old.waits().proven, "it was seen lately"


# ---- of readers by chance -----------------------------------------------------------------------


def inside(start: int, end: int, read: list[tuple[int, int]]) -> bool:
    """Whether all of [start, end) was read, in order or not."""
    for low, high in sorted(read):
        if low <= start < high:
            start = high
    return start >= end


@pytest.mark.parametrize("seed", range(30))
def test_a_sequential_reader_however_seen_is_proven_by_two_and_its_position_is_right(
    seed: int,
) -> None:
    chance = random.Random(seed)
    reader = Reader(at=chance.randrange(GIB), rchar=chance.randrange(GIB))
    begun, sightings = reader.at, 0
    for _ in range(300):
        for _ in range(chance.randrange(1, 40)):
            reader.reads(chance.randrange(1, MIB))
        if chance.random() < 0.5:
            seen: ReadStretch | None = reader.waits(asked := chance.randrange(MIB))
            assert seen is not None and seen.asked_end == reader.at + asked
            begun = begun if sightings else reader.at
            sightings += 1
            assert seen.proven == (sightings > 1)
        else:
            seen = reader.goes_on()
            assert (seen is not None) == (sightings > 1)
        if seen is not None:
            assert seen.end == reader.at
            assert seen.start == begun
            begun = seen.end


@pytest.mark.parametrize("seed", range(30))
def test_a_random_reader_is_never_proven(seed: int) -> None:
    chance = random.Random(seed)
    reader = Reader()
    for _ in range(400):
        for _ in range(chance.randrange(1, 6)):
            reader.at = chance.randrange(GIB // (64 * KIB)) * 64 * KIB
            reader.reads(64 * KIB)
        reader.at = chance.randrange(GIB // (64 * KIB)) * 64 * KIB
        assert not reader.waits().proven
        assert reader.goes_on() is None


@pytest.mark.parametrize("seed", range(60))
def test_what_is_told_as_read_was_read(seed: int) -> None:
    """Whatever a thread does between: it goes on, jumps, reads elsewhere, takes another file. What
    is told while it waits is of bytes that it has read, but where it has jumped to and fro between
    two sightings, of which these show nothing; of what is told in between the same holds while the
    thread reads nothing else."""
    chance = random.Random(seed)
    reader, alone = Reader(), True
    for _ in range(400):
        did = chance.choice(["on", "on", "on", "jump", "elsewhere", "file"])
        if did == "on":
            for _ in range(chance.randrange(1, 9)):
                reader.reads(chance.randrange(1, 256 * KIB))
        elif did == "jump":
            reader.at = chance.randrange(GIB)
            alone = False
        elif did == "elsewhere":
            reader.reads_elsewhere(chance.randrange(1, MIB))
            alone = False
        else:
            reader.file, reader.at, reader.read = reader.file + "'", 0, []
            alone = False
        if chance.random() < 0.7:
            seen: ReadStretch | None = reader.waits()
            assert seen is not None and seen.start <= seen.end == reader.at
            alone = True
        else:
            seen = reader.goes_on()
        if seen is not None and alone:
            assert inside(seen.start, seen.end, reader.read), (did, seen)
