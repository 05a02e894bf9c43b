# SPDX-License-Identifier: Apache-2.0
"""What the pool reads at once of a file whose storage answers whole requests (pool_fill.c)."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, require, wait_until
from harness import write_records

from uffdprefetch.demo.bed import SlowBed, drop_cache, why_no_bed
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd

KIB, MIB = 1 << 10, 1 << 20
SIZE_BYTES = 21 * MIB + 1234

Fills = Callable[[int, int], int]


def fill(pool: uffd_pool.Pool, event_fd: int, number: int, start: int, end: int) -> uffd.WarmResult:
    """Prefetch these bytes and wait until they are there."""
    assert pool.submit(7, number, start, end - start)
    results: list[uffd.WarmResult] = []
    while not results:
        ready, _, _ = select.select([event_fd], [], [], HANG_SECONDS)
        assert ready, "the pool says nothing"
        os.read(event_fd, 8)
        results = pool.reap()
    assert results[0].error == 0
    return results[0]


@pytest.fixture
def fills(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fills]:
    """fills(START, END): prefetch these bytes; in how many reads they came. One pool and file of
    ``request.param`` bytes a request."""
    path = tmp_path / "records.bin"
    write_records(path, SIZE_BYTES)
    fd, event_fd = os.open(path, os.O_RDONLY), os.eventfd(0, os.EFD_CLOEXEC)
    pool = uffd_pool.Pool(64 * MIB, 64 * KIB, 4, event_fd)
    number, memfd = pool.add_file(fd, SIZE_BYTES, request.param)

    def run(start: int, end: int) -> int:
        before = pool.counts().fills
        fill(pool, event_fd, number, start, end)
        end = min(end, SIZE_BYTES)
        assert os.pread(memfd, end - start, start) == os.pread(fd, end - start, start)
        return pool.counts().fills - before

    yield run
    pool.close()
    for one in (fd, memfd, event_fd):
        os.close(one)


@pytest.mark.parametrize("fills", [4 * MIB], indirect=True)
def test_each_read_is_what_one_request_brings_on_its_own_grid(fills: Fills) -> None:
    assert fills(0, 8 * MIB) == 2
    assert fills(9 * MIB, 11 * MIB) == 1, "no more than was asked for"
    assert fills(8 * MIB, 24 * MIB) == 5, "two around what is there, and three, to the file's end"
    assert fills(0, 24 * MIB) == 0


@pytest.mark.parametrize("fills", [0], indirect=True)
def test_elsewhere_reads_begin_small_and_grow(fills: Fills) -> None:
    assert fills(0, 8 * MIB) > 4


@pytest.mark.parametrize("fills", [64 * MIB], indirect=True)
def test_no_read_is_larger_than_what_a_thread_has_room_for(fills: Fills) -> None:
    assert fills(0, 16 * MIB) == 4


def test_a_file_joins_while_its_storage_does_not_answer_open(tmp_path: Path) -> None:
    """Who waits for it is a thread that reads: the service's main thread maps the other files."""
    require(why_no_bed() is None, why_no_bed() or "")
    source = tmp_path / "source"
    source.mkdir()
    write_records(source / "far.bin", 4 * MIB)
    event_fd = os.eventfd(0, os.EFD_CLOEXEC)
    with SlowBed(source) as bed:
        fd = os.open(bed.path("far.bin"), os.O_RDONLY)
        pool = uffd_pool.Pool(64 * MIB, 64 * KIB, 4, event_fd)
        joined: list[tuple[int, int]] = []
        joins = threading.Thread(
            target=lambda: joined.append(pool.add_file(fd, 4 * MIB, 0)), daemon=True
        )
        os.kill(bed.pid, signal.SIGSTOP)
        try:
            joins.start()
            joins.join(HANG_SECONDS)
            assert joined, "it waits for the storage"
        finally:
            os.kill(bed.pid, signal.SIGCONT)
        number, memfd = joined[0]
        fill(pool, event_fd, number, 0, 4 * MIB)
        assert os.pread(memfd, 4 * MIB, 0) == (source / "far.bin").read_bytes()
        pool.close()
        os.close(memfd)
        os.close(fd)
    os.close(event_fd)


def test_a_job_that_is_dropped_while_its_only_thread_reads_ends_once(tmp_path: Path) -> None:
    """What nobody maps any more is not read on: its job was finished by who read, and once more by
    who took it out of the queue."""
    require(why_no_bed() is None, why_no_bed() or "")
    source = tmp_path / "source"
    source.mkdir()
    write_records(source / "far.bin", 4 * MIB)
    event_fd = os.eventfd(0, os.EFD_CLOEXEC)
    with SlowBed(source, latency_us=20_000) as bed:
        fd = os.open(bed.path("far.bin"), os.O_RDONLY)
        pool = uffd_pool.Pool(64 * MIB, 64 * KIB, 2, event_fd)  # one prefetches
        number, memfd = pool.add_file(fd, 4 * MIB, 0)
        ids = []
        for job in range(8):
            asked = bed.counters()["requests"]
            assert pool.submit(job, number, job * MIB // 2, MIB // 2)
            wait_until(lambda asked=asked: bed.counters()["requests"] > asked, "a read to begin")
            pool.hush_file(number)
            while job not in ids:
                ready, _, _ = select.select([event_fd], [], [], HANG_SECONDS)
                assert ready, "the pool says nothing"
                os.read(event_fd, 8)
                ids += [result.id for result in pool.reap()]
        fill(pool, event_fd, number, 0, 4 * MIB)  # whoever has something to say has said it
        assert ids == list(range(8))
        pool.close()
        os.close(memfd)
        os.close(fd)
    os.close(event_fd)


def test_what_comes_out_of_the_page_cache_was_there_and_is_not_prefetched_once_more(
    tmp_path: Path,
) -> None:
    """A file may be read ahead into the page cache for one mapping and into the pool for another:
    what was prefetched of it is no more than the file."""
    path = tmp_path / "records.bin"
    write_records(path, SIZE_BYTES)
    fd, event_fd = os.open(path, os.O_RDONLY), os.eventfd(0, os.EFD_CLOEXEC)
    pool = uffd_pool.Pool(64 * MIB, 64 * KIB, 4, event_fd)
    number, memfd = pool.add_file(fd, SIZE_BYTES, 0)
    drop_cache(path)
    half = 10 * MIB
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no more than what is read
    assert len(os.pread(fd, half, 0)) == half
    found = []
    for start, end in ((0, half), (half + 4 * MIB, SIZE_BYTES)):
        result = fill(pool, event_fd, number, start, end)
        found.append((result.bytes, result.resident_bytes))
        assert os.pread(memfd, end - start, start) == os.pread(fd, end - start, start)
    rest = SIZE_BYTES - half - 4 * MIB
    assert found == [(0, half), (rest, 0)]
    pool.close()
    for one in (fd, memfd, event_fd):
        os.close(one)


def test_the_time_in_which_a_job_waits_for_room_is_none_in_which_storage_was_slow(
    tmp_path: Path,
) -> None:
    """What storage brings in a second is told by it: a full pool that waited for its reader was
    taken for slow storage, and the gain for ten times what it was."""
    path = tmp_path / "records.bin"
    write_records(path, 8 * MIB)
    fd, event_fd = os.open(path, os.O_RDONLY), os.eventfd(0, os.EFD_CLOEXEC)
    pool = uffd_pool.Pool(4 * MIB, 64 * KIB, 4, event_fd)
    number, memfd = pool.add_file(fd, 8 * MIB, 0)
    began = time.monotonic_ns()
    assert pool.submit(7, number, 0, 8 * MIB)
    wait_until(
        lambda: (
            pool.used_bytes() > 2 * MIB
            and pool.file_counts(number).resident_bytes == pool.used_bytes()
        ),
        "the next piece to have no room",
    )
    time.sleep(0.5)
    results: list[uffd.WarmResult] = []
    while not results:
        pool.set_victims([(number, 0, 128)])
        select.select([event_fd], [], [], 0.05)
        results = pool.reap()
    (result,) = results
    wall_ns = time.monotonic_ns() - began
    assert result.done_ns - result.start_ns >= 400_000_000
    assert result.took_ns <= wall_ns - 400_000_000
    pool.close()
    for one in (fd, memfd, event_fd):
        os.close(one)
