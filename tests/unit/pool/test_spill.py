# SPDX-License-Identifier: Apache-2.0
"""The pool's disk tier (csrc/service/pool/spill.h): what has left memory comes back from there, and
nothing else does, whatever the disk brings."""

from __future__ import annotations

import errno
import os
import random
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import HANG_SECONDS, wait_until
from disks import disk, run_with_such_a_disk

from uffdprefetch.native import pool as uffd_pool

KIB, MIB = 1 << 10, 1 << 20
CHUNK, SLOT = 64 * KIB, MIB
BUDGET = 4 * MIB
#: Two of the pool, and a last chunk that is not whole.
SIZE = 2 * BUDGET - 1234
#: So many errors never end a tier.
ANY_NUMBER = 1 << 30


class Bed:
    """A pool with a disk tier and one file, of which nobody maps anything."""

    def __init__(
        self, directory: Path, spill_fd: int, size: int, errors_most: int, try_bytes: int = 0
    ) -> None:
        self.path, self.spill_fd = directory / "data", os.dup(spill_fd)
        self.data = random.Random(4).randbytes(SIZE)
        self.path.write_bytes(self.data)
        self.fd = os.open(self.path, os.O_RDONLY)
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.pool = uffd_pool.Pool(BUDGET, CHUNK, 4, self.event_fd)
        self.pool.spill(spill_fd, size, errors_most, try_bytes)
        self.number, self.memfd = self.pool.add_file(self.fd, SIZE)

    def bring(self, start: int, end: int) -> None:
        """Have these bytes in memory, in the place of others; they are the file's."""
        first, last = start // CHUNK, -(-end // CHUNK)
        others = [(self.number, 0, first), (self.number, last, 1 << 20)]
        self.pool.set_victims(others)
        assert self.pool.submit(7, self.number, start, end - start)
        results: list[object] = []
        give_up = time.monotonic() + HANG_SECONDS
        while not results:
            assert time.monotonic() < give_up, "the pool says nothing"
            if self.pool.victims_left() <= 0:  # what was being copied was passed over
                self.pool.set_victims(others)
            if select.select([self.event_fd], [], [], 0.01)[0]:
                os.read(self.event_fd, 8)
            results += self.pool.reap()
        end = min(end, SIZE)
        found = os.pread(self.memfd, end - start, start)
        assert found == self.data[start:end]

    def leave(self, start: int, end: int) -> None:
        """Have these leave next, and written before that as far as they can be."""
        first, last = start // CHUNK, -(-end // CHUNK)
        self.pool.set_victims([(self.number, first, last - first)])

    def copied(self) -> list[int]:
        """Chunks with a copy."""
        spilled = self.pool.books(self.number).spilled
        assert spilled is not None
        found: list[int] = np.flatnonzero(spilled.mask()).tolist()
        return found

    def await_copies(self, chunks: range) -> None:
        wait_until(lambda: set(chunks) <= set(self.copied()), "it was written")

    def spill_all(self) -> None:
        """The whole file, half of which is in memory then."""
        for start in (0, BUDGET):
            self.bring(start, start + BUDGET)
            self.leave(start, start + BUDGET)
            self.await_copies(range((start + BUDGET) // CHUNK))

    def read_bytes(self) -> int:
        """From the file's own storage."""
        return self.pool.counts().read_bytes

    def close(self) -> None:
        if not self.pool.pointer:
            return
        self.pool.close()
        for fd in (self.fd, self.memfd, self.event_fd, self.spill_fd):
            os.close(fd)


Make = Callable[..., Bed]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """make(size, errors_most): a bed."""
    beds: list[Bed] = []

    def bed(size: int = 16 * MIB, errors_most: int = ANY_NUMBER, where: Path = tmp_path) -> Bed:
        fd = os.open(where, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        beds.append(Bed(tmp_path, fd, size, errors_most))
        return beds[-1]

    yield bed
    for one in beds:
        one.close()


def test_what_has_left_memory_is_not_read_from_storage_again(make: Make) -> None:
    bed = make()
    bed.spill_all()
    for start in (0, BUDGET, 0):
        bed.bring(start, start + BUDGET)
        bed.leave(start, start + BUDGET)
    spilled = bed.pool.spill_counts()
    assert bed.read_bytes() == SIZE
    assert spilled.written_bytes == 2 * BUDGET, "a copy stays when its chunk comes back"
    assert spilled.read_bytes >= 2 * BUDGET
    assert spilled.dropped_bytes == spilled.ended == spilled.full == 0
    counts = bed.pool.file_counts(bed.number)
    assert counts.disk_bytes == 2 * BUDGET and counts.disk_read_bytes >= 2 * BUDGET - 1234


def test_nothing_is_written_of_files_that_fit(tmp_path: Path, make: Make) -> None:
    bed = make()
    small = tmp_path / "small"
    small.write_bytes(bed.data[:BUDGET])
    fd = os.open(small, os.O_RDONLY)
    assert bed.pool.forget_file(bed.number)
    bed.number, memfd = bed.pool.add_file(fd, BUDGET)
    os.close(bed.memfd)
    bed.memfd = memfd
    os.close(fd)
    bed.bring(0, BUDGET)
    for _ in range(100):
        bed.leave(0, BUDGET)
    assert bed.pool.spill_counts().written_bytes == 0 and not bed.copied()


def test_one_chunk_of_a_slot_comes_back_without_the_others(make: Make) -> None:
    bed = make()
    bed.spill_all()
    bed.bring(3 * CHUNK, 4 * CHUNK)
    bed.bring(15 * CHUNK, 18 * CHUNK)
    bed.bring(SIZE - 1, SIZE)
    assert bed.read_bytes() == SIZE


def flip(fd: int, draw: random.Random) -> int:
    """A bit of each slot; how many."""
    end = os.fstat(fd).st_size
    buffered = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    for slot in range(0, end, SLOT):
        at = slot + draw.randrange(SLOT)
        was = os.pread(buffered, 1, at)[0]
        os.pwrite(buffered, bytes([was ^ 1 << draw.randrange(8)]), at)
    os.fsync(buffered)
    os.close(buffered)
    return end // SLOT


@pytest.mark.parametrize("bits", [64, 10_000])
def test_each_flipped_bit_is_found_and_the_file_is_read_instead(make: Make, bits: int) -> None:
    bed = make(size=8 * MIB)
    bed.spill_all()
    draw, flipped = random.Random(1), 0
    for _ in range(bits // 8):
        flipped += flip(bed.spill_fd, draw)
        for start in (0, BUDGET):
            bed.bring(start, start + BUDGET)
        bed.spill_all()
    counts = bed.pool.spill_counts()
    assert flipped == bits and (counts.error[0], counts.errors[0]) == (errno.EBADMSG, flipped)


def test_three_errors_in_a_minute_end_it(make: Make) -> None:
    bed = make(errors_most=3)
    bed.spill_all()
    os.ftruncate(bed.spill_fd, 0)
    bed.bring(0, BUDGET)
    wait_until(lambda: bed.pool.spill_counts().ended != 0, "it is so")
    bed.bring(BUDGET, 2 * BUDGET)
    assert not bed.copied() and bed.pool.spill_counts().used_bytes == 0


def test_a_dropped_file_has_no_copies_and_its_slots_are_free(make: Make) -> None:
    bed = make(size=8 * MIB)
    bed.spill_all()
    assert bed.pool.spill_counts().used_bytes == 8 * MIB
    bed.data = bed.data[::-1]
    bed.path.write_bytes(bed.data)
    bed.pool.drop_file(bed.number)
    assert not bed.copied() and bed.pool.spill_counts().used_bytes == 0
    wait_until(lambda: not any(bed.pool.books(bed.number).state), "it is so")
    bed.bring(0, BUDGET)
    bed.bring(BUDGET, 2 * BUDGET)
    bed.spill_all()


def test_slots_that_are_given_free_are_the_last_and_others_get_them(make: Make) -> None:
    bed = make(size=8 * MIB)
    bed.spill_all()
    assert bed.pool.free_spilled(bed.number, 3 * MIB - 5) == 3 * MIB
    assert bed.pool.spill_counts().used_bytes == 5 * MIB
    assert bed.copied() == list(range(5 * MIB // CHUNK))
    bed.spill_all()
    assert bed.pool.free_spilled(bed.number, 64 * MIB) == 8 * MIB and not bed.copied()


def test_of_a_list_those_with_a_copy_leave_first(make: Make) -> None:
    bed = make(size=2 * MIB)
    bed.bring(0, BUDGET)
    bed.leave(0, 2 * MIB)
    bed.await_copies(range(32))
    bed.pool.set_victims([(bed.number, 32, 16), (bed.number, 48, 16), (bed.number, 0, 32)])
    assert bed.pool.submit(7, bed.number, BUDGET, 2 * MIB)
    wait_until(bed.pool.reap, "it was read")
    state = np.asarray(bed.pool.books(bed.number).state)
    assert not state[:32].any() and (state[32:96] == uffd_pool.PRESENT).all()
    assert bed.pool.victims_left() == 2 and bed.pool.spill_counts().refused_bytes == 0


def test_a_full_tier_admits_nothing_more(make: Make) -> None:
    bed = make(size=5 * MIB)
    bed.bring(0, BUDGET)
    bed.leave(0, BUDGET)
    wait_until(lambda: len(bed.copied()) == BUDGET // CHUNK, "it is so")
    bed.bring(BUDGET, 2 * BUDGET)
    bed.leave(BUDGET, 2 * BUDGET)
    wait_until(lambda: len(bed.copied()) == 5 * MIB // CHUNK, "it is so")
    bed.bring(0, BUDGET)
    counts = bed.pool.spill_counts()
    assert (counts.written_bytes, counts.refused_bytes) == (5 * MIB, 3 * MIB)
    assert bed.read_bytes() == SIZE


def test_what_lies_beyond_a_smaller_size_goes_and_the_disk_has_its_blocks(make: Make) -> None:
    bed = make()
    bed.spill_all()
    assert os.fstat(bed.spill_fd).st_blocks * 512 >= 8 * MIB
    bed.pool.fit_spill(2 * MIB)
    assert bed.pool.spill_counts().used_bytes == 2 * MIB
    wait_until(lambda: os.fstat(bed.spill_fd).st_blocks * 512 <= 2 * MIB, "it is so")
    bed.bring(0, BUDGET)
    bed.bring(BUDGET, 2 * BUDGET)
    assert len(bed.copied()) == 2 * MIB // CHUNK
    bed.pool.fit_spill(16 * MIB)
    bed.spill_all()


def test_past_the_limit_of_a_files_size_nothing_is_written_and_what_is_there_is_used(
    make: Make,
) -> None:
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    bed = make()
    bed.bring(0, BUDGET)  # a memfd has that limit, too
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, was[1]))
    try:
        bed.leave(0, BUDGET)
        wait_until(lambda: bed.pool.spill_counts().full != 0, "it is so")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
    bed.bring(BUDGET, 2 * BUDGET)
    bed.leave(BUDGET, 2 * BUDGET)
    bed.bring(0, BUDGET)
    counts = bed.pool.spill_counts()
    assert counts.ended == 0 and counts.written_bytes == counts.read_bytes <= 3 * MIB


def test_samples_of_changed_files_are_drawn_from_the_disk_as_well(make: Make) -> None:
    bed = make()
    bed.spill_all()
    assert bed.pool.books(bed.number).state[0] != uffd_pool.PRESENT
    out = uffd_pool._ffi.new("char[4096]")
    copied = uffd_pool._lib.up_pool_copy(bed.pool.pointer, bed.number, 4096, 4096, out)
    assert copied and bytes(uffd_pool._ffi.buffer(out)) == bed.data[4096:8192]
    beyond = uffd_pool._lib.up_pool_copy(bed.pool.pointer, bed.number, 1 << 40, 4096, out)
    assert not beyond


@pytest.mark.root
def test_a_full_disk_is_written_no_more_and_what_is_there_is_used(
    make: Make, tmp_path: Path
) -> None:
    with disk("ext4", tmp_path) as root:
        filler = os.open(root / "others", os.O_CREAT | os.O_WRONLY)
        free = os.statvfs(root)
        os.posix_fallocate(filler, 0, free.f_bfree * free.f_frsize - 3 * MIB)
        os.close(filler)
        bed = make(size=16 * MIB, where=root)
        bed.bring(0, BUDGET)
        bed.leave(0, BUDGET)
        wait_until(lambda: bed.pool.spill_counts().full == errno.ENOSPC, "it is full")
        bed.bring(BUDGET, 2 * BUDGET)
        bed.bring(0, BUDGET)
        counts = bed.pool.spill_counts()
        assert 0 < counts.read_bytes == counts.written_bytes and not counts.ended
        bed.close()


@pytest.mark.root
def test_a_disk_that_cannot_be_read_is_not_asked_again(make: Make, tmp_path: Path) -> None:
    """Its own backing file is cut off: reads fail, and what is written is not there."""
    with disk("ext4", tmp_path) as root:
        bed = make(errors_most=3, where=root)
        bed.spill_all()
        os.truncate(tmp_path / "disk.img", 1 << 16)
        bed.bring(0, BUDGET)
        bed.bring(BUDGET, 2 * BUDGET)
        bed.bring(0, BUDGET)
        assert bed.pool.spill_counts().ended in (errno.EIO, errno.EBADMSG)
        assert not bed.copied()
        bed.close()


STOPPED = """
import os, sys
from pathlib import Path
import test_spill
from conftest import wait_until
where, stopped = Path(sys.argv[1]), Path(os.environ["STOPPED"])
fd = os.open(where, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
bed = test_spill.Bed(where, fd, 16 << 20, test_spill.ANY_NUMBER)
half = test_spill.BUDGET
bed.spill_all()
stopped.touch()
bed.bring(0, half)  # compares every byte
late, read = bed.pool.spill_counts().late_reads, bed.pool.spill_counts().read_bytes
assert late >= 1 and read == 0, (late, read)
bed.bring(half, 2 * half)
assert bed.pool.spill_counts().late_reads == late, "it is left alone"
stopped.unlink()
def comes_again():
    bed.bring(0, half)
    bed.bring(half, 2 * half)
    return bed.pool.spill_counts().read_bytes
wait_until(comes_again, "the disk is read again")
stopped.touch()
bed.bring(0, half)
bed.close()
print("ended")
"""


def test_a_disk_that_does_not_answer_holds_nobody_up_nor_the_end(tmp_path: Path) -> None:
    said = run_with_such_a_disk(STOPPED, tmp_path, STOPPED=str(tmp_path / "stopped"))
    assert said == "ended\n"


TRIED = """
import errno, os, sys
from pathlib import Path
import test_spill
from conftest import wait_until
where, half = Path(sys.argv[1]), test_spill.BUDGET
fd = os.open(where, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
bed = test_spill.Bed(where, fd, 64 << 20, test_spill.ANY_NUMBER, 12 << 20)
os.fsync(bed.fd)
os.posix_fadvise(bed.fd, 0, 0, os.POSIX_FADV_DONTNEED)
bed.pool.fit_spill(0)
for start in (0, half) * 4:  # so that the rate of storage is known
    bed.bring(start, start + half)
bed.pool.fit_spill(64 << 20)
bed.leave(half, 2 * half)
def is_judged():
    bed.pool.fit_spill(64 << 20)
    counts = bed.pool.spill_counts()
    return counts.ended or os.fstat(fd).st_blocks * 512 >= 16 << 20 and counts.used_bytes <= half
wait_until(is_judged, "it was tried")
before = bed.pool.spill_counts().read_bytes
bed.bring(0, half)
bed.bring(half, 2 * half)
counts = bed.pool.spill_counts()
if counts.ended:
    wait_until(lambda: not os.fstat(bed.spill_fd).st_blocks, "the disk has its blocks again")
ended, slower = errno.errorcode.get(counts.ended), counts.disk_rate < counts.storage_rate
print(ended, counts.read_bytes > before, slower)
bed.close()
"""


@pytest.mark.parametrize("slow", ["disk", "storage"])
def test_a_disk_that_is_slower_than_storage_is_used_no_more_once_it_was_tried(
    slow: str, tmp_path: Path
) -> None:
    flags = os.O_DIRECT | (os.O_RDWR if slow == "disk" else os.O_RDONLY)
    said = run_with_such_a_disk(TRIED, tmp_path, SLOW=str(flags))
    assert said == ("ETIME False True\n" if slow == "disk" else "None True False\n")
