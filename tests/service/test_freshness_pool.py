# SPDX-License-Identifier: Apache-2.0
"""The pool's copies of a file that changes: sampled, and punched out when they are not the file's.

A pool without any process, filled as for prefetching (pool_files.c, pool_room.c)."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import HANG_SECONDS, require, wait_until
from harness import MIB, write_records

from uffdprefetch.demo.bed import SlowBed, why_no_bed
from uffdprefetch.native import compare as uffd_compare
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.pool.sampled_pages import SAMPLED_BYTES, sampled_pages
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.state.pool_file import PoolFile

SIZE_BYTES = 16 * MIB
PAGE = uffd.PAGE_BYTES
ABSENT, FILLING = 0, 2


class Filled:
    """A file in a pool."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.pool = uffd_pool.Pool(4 * SIZE_BYTES, BLOCK_BYTES, 4, self.event_fd)
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        number, memfd = self.pool.add_file(self.fd, SIZE_BYTES)
        self.file = PoolFile(self.pool, number, memfd, BLOCK_BYTES)
        self.state = np.asarray(self.file.books.state)

    def submit(self) -> None:
        assert self.pool.submit(1, self.file.number, 0, SIZE_BYTES)

    def fill(self) -> None:
        self.submit()
        wait_until(self.pool.reap, "the file to be read")
        assert (self.state == uffd_pool.PRESENT).all()

    def holds(self) -> bytes:
        return os.pread(self.file.memfd, SIZE_BYTES, 0)

    def drop(self) -> None:
        self.pool.drop_file(self.file.number)

    def empty(self) -> bool:
        return bool((self.state == ABSENT).all()) and self.pool.used_bytes() == 0

    def compare(self, pages: list[int]) -> uffd_compare.Result:
        """One round of samples."""
        checker = uffd_compare.Checker(1, self.event_fd)
        watch = uffd_compare.Watch(self.fd, -1, SIZE_BYTES)
        try:
            assert checker.submit(
                1, watch, uffd_compare.POOL, pages, reads_max=1 << 30,
                limit_ns=10**11, pool=self.pool, pool_file=self.file.number,
            )  # fmt: skip
            while not (found := checker.reap()):
                assert select.select([self.event_fd], [], [], HANG_SECONDS)[0]
                os.read(self.event_fd, 8)
            return found[0]
        finally:
            watch.close()
            assert checker.close()

    def close(self) -> None:
        self.pool.close()
        os.close(self.file.memfd)
        os.close(self.fd)
        os.close(self.event_fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_records(tmp_path / "pooled.bin", SIZE_BYTES)
    return tmp_path / "pooled.bin"


@pytest.fixture
def filled() -> Iterator[Callable[[Path], Filled]]:
    made: list[Filled] = []

    def make(path: Path) -> Filled:
        made.append(Filled(path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_is_dropped_goes_and_comes_again_as_the_file_is(
    filled: Callable[[Path], Filled], path: Path
) -> None:
    one = filled(path)
    for _ in range(3):
        one.fill()
        assert one.holds() == path.read_bytes()
        path.write_bytes(os.urandom(SIZE_BYTES))
        assert one.holds() != path.read_bytes()
        one.drop()
        wait_until(one.empty, "all of it to go")


def test_what_is_being_read_when_it_is_dropped_goes_when_it_has_come(
    filled: Callable[[Path], Filled], path: Path
) -> None:
    """Its bytes may be those of before."""
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(path.parent, bandwidth=0, latency_us=300_000) as bed:
        one = filled(bed.path(path.name))
        one.submit()
        wait_until(lambda: (one.state == FILLING).any(), "reads under way")
        before = np.flatnonzero(one.state == FILLING)
        one.drop()
        wait_until(one.pool.reap, "the reads' end")
        wait_until(lambda: (one.state[before] == ABSENT).all(), "what they brought to go")
        one.fill()
        assert one.holds() == path.read_bytes()
        with open(path, "rb") as elsewhere:
            os.dup2(elsewhere.fileno(), one.fd)  # nothing of ours keeps the bed busy
        assert one.pool.forget_file(one.file.number)


def test_samples_tell_a_page_that_is_not_the_files(
    filled: Callable[[Path], Filled], path: Path
) -> None:
    one = filled(path)
    one.fill()
    pages = list(range(0, SIZE_BYTES // PAGE, 5))
    result = one.compare(pages)
    assert (result.compared, result.differing, result.rewritten) == (len(pages), 0, 0)
    with open(path, "r+b") as file:
        file.seek(pages[17] * PAGE + 9)
        file.write(b"!")
    result = one.compare(pages)
    assert (result.compared, result.differing, result.rewritten) == (len(pages), 1, 0)
    assert result.first_differing == pages[17]


def test_what_is_not_in_the_pool_is_no_difference(
    filled: Callable[[Path], Filled], path: Path
) -> None:
    one = filled(path)
    one.fill()
    one.drop()
    wait_until(one.empty, "all of it to go")
    assert one.compare(list(range(100))).compared == 0


def test_a_sample_is_one_page_of_each_4_mib_that_are_there_another_one_each_time(
    filled: Callable[[Path], Filled], path: Path
) -> None:
    one = filled(path)
    assert sampled_pages(one.file, SIZE_BYTES, 100) == []
    one.fill()
    cells = SIZE_BYTES // SAMPLED_BYTES
    seen = set()
    for _ in range(50):
        pages = sampled_pages(one.file, SIZE_BYTES, 100)
        assert pages == sorted(pages)
        assert [p * PAGE // SAMPLED_BYTES for p in pages] == list(range(cells))
        seen.update(pages)
    assert len(seen) > 40 * cells
    assert len(sampled_pages(one.file, SIZE_BYTES, 2)) == 2
