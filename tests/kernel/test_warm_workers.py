# SPDX-License-Identifier: Apache-2.0
"""The workers that fill the page cache (csrc/service/warm.c), on the slow bed: what they read."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from components import ARRAY
from conftest import HANG_SECONDS, process_state, wait_until
from harness import rss_bytes, write_records
from inside import MADV_RANDOM, Mapping, checked, libc
from paths import ROOT

from uffdprefetch.demo.bed import SlowBed, drop_cache
from uffdprefetch.native import uffd
from uffdprefetch.native.crews import DEVICES_MOST
from uffdprefetch.native.uffd import WarmResult

pytest_plugins = ["components", "harness_fixtures"]

KIB, MIB = 1 << 10, 1 << 20


class Workers:
    """A pool of one thread on a cold file, one job at a time."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        drop_cache(path)
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC)
        before = set(os.listdir("/proc/self/task"))
        self._workers = uffd.Workers(threads, self._event_fd)
        threads_made = set(os.listdir("/proc/self/task")) - before
        # one that has not come to wait yet would begin with the first extent that it finds
        wait_until(
            lambda: all(process_state(int(tid)) == "S" for tid in threads_made), "them to wait"
        )
        self._held: list[Mapping] = []
        self._ahead = 0  # results that were reaped before the event that tells of them was read

    def warm(self, start: int, end: int, method: int, chunk: int = 0, **more: object) -> WarmResult:
        assert self._workers.submit(
            7, self.fd, start, end - start, method=method, chunk_bytes=chunk,
            **more,  # type: ignore[arg-type]
        )  # fmt: skip
        (result,) = self.results(1)
        assert result.id == 7
        return result

    def warm_all(
        self, starts: list[int], length: int, method: int, chunk: int = 256 * KIB
    ) -> list[WarmResult]:
        """Extents of a length that are queued before the worker begins; in that order."""
        for number, start in enumerate(starts):
            assert self._workers.submit(
                number, self.fd, start, length, method=method, chunk_bytes=chunk
            )
        return self.results(len(starts))

    def submit(self, number: int, fd: int, start: int, length: int, device: int) -> bool:
        """An extent of any file, for results()."""
        how = {"method": uffd.WARM_READAHEAD, "chunk_bytes": 256 * KIB}
        return self._workers.submit(number, fd, start, length, device=device, **how)

    def results(self, count: int) -> list[WarmResult]:
        """So many, of what is queued."""
        self._workers.start()
        results: list[WarmResult] = []
        while len(results) < count:
            ready, _, _ = select.select([self._event_fd], [], [], HANG_SECONDS)
            assert ready, "the worker says nothing"
            told = int.from_bytes(os.read(self._event_fd, 8), "little")
            reaped = self._workers.reap()
            self._ahead += len(reaped) - told
            assert self._ahead >= 0
            results += reaped
        return sorted(results)

    def cpu_seconds(self) -> float:
        return self._workers.cpu_seconds()

    def resident(self, start: int, end: int) -> int:
        told, _ = uffd.resident_bytes(self.fd, start, end - start)
        assert told is not None
        return told

    def make_resident(self, start: int, end: int) -> None:
        """As a job's reads would have: exactly this, without readahead. It is locked, or the kernel
        may take a page away again at any time."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, end - start, start)
        os.close(fd)
        held = Mapping(str(self.path), end - start, start)
        self._held.append(held)
        held.advise(MADV_RANDOM)
        where = ctypes.c_void_p(held.address), ctypes.c_size_t(held.length)
        checked(libc.mlock(*where), "mlock")
        assert self.resident(start, end) == end - start

    def close(self) -> None:
        self._workers.close()
        for held in self._held:
            held.unmap()
        os.close(self.fd)
        os.close(self._event_fd)


@pytest.fixture
def workers(bed: SlowBed) -> Iterator[Workers]:
    made = Workers(bed.path(ARRAY))
    yield made
    made.close()


#: Where the extents of a test begin. One of them must be there as a whole: of the others the kernel
#: may have taken a page away again.
STARTS = (8 * MIB, 24 * MIB, 40 * MIB)
#: So many pages of an extent may be.
AGAIN_MOST = 4


@pytest.mark.parametrize("method", [uffd.WARM_PROBE, uffd.WARM_READAHEAD, uffd.WARM_PREAD])
def test_an_extent_is_there_when_it_is_reported(workers: Workers, method: int) -> None:
    there = []
    for start in STARTS:
        result = workers.warm(start, start + 2 * MIB, method, 256 * KIB)
        there.append(workers.resident(start, start + 2 * MIB))
        assert (result.error, result.bytes, result.resident_bytes) == (0, 2 * MIB, 0)
        assert result.submit_ns <= result.start_ns <= result.done_ns
    assert max(there) == 2 * MIB


@pytest.mark.parametrize("method", [uffd.WARM_READAHEAD, uffd.WARM_PREAD])
@pytest.mark.parametrize("head", [0, 512 * KIB])
def test_reads_that_had_to_wait_tell_what_was_not_there(
    workers: Workers, method: int, head: int
) -> None:
    """Whosever the file is: nobody has to be asked for it."""
    for start in STARTS:
        if head:
            workers.make_resident(start, start + head)
        result = workers.warm(start, start + 2 * MIB, method, 256 * KIB)
        assert (result.error, result.waited_bytes) == (0, 2 * MIB - head)


@pytest.mark.parametrize(("window", "pieces"), [(0, 16), (512 * KIB, 4), (128 * KIB, 1), (1, 1)])
def test_no_more_than_its_window_is_under_way(
    workers: Workers, bed: SlowBed, window: int, pieces: int
) -> None:
    bed.reset()
    result = workers.warm(
        8 * MIB, 10 * MIB, uffd.WARM_READAHEAD, 128 * KIB, window_bytes=window
    )  # fmt: skip
    assert (result.error, result.bytes) == (0, 2 * MIB)
    told = bed.counters()
    # by the link, that all was there: a page that is taken away again is then read alone
    again = told["requests"] - 16
    assert 0 <= again <= AGAIN_MOST
    assert (told["bytes"], told["in_flight"]) == (2 * MIB + again * uffd.PAGE_BYTES, 0)
    if window:
        assert told["most_in_flight"] <= pieces
    else:
        assert told["most_in_flight"] > 4, "else a window shows nothing"


@pytest.mark.parametrize("head", [0, 64 * KIB, 512 * KIB])
def test_readahead_is_found_to_work_though_the_head_is_resident(
    workers: Workers, head: int
) -> None:
    """A reader that is just there has read the head already: one call may bring no more."""
    there = []
    for start in STARTS:
        if head:
            workers.make_resident(start, start + head)
        result = workers.warm(start, start + 2 * MIB, uffd.WARM_PROBE)
        assert result.method == uffd.WARM_READAHEAD
        assert result.resident_bytes == head
        there.append(workers.resident(start, start + 2 * MIB))
    assert max(there) == 2 * MIB


def test_of_too_few_cold_pages_nothing_is_decided_and_all_comes(workers: Workers) -> None:
    there = []
    for start in STARTS:
        workers.make_resident(start, start + 2 * MIB - 128 * KIB)
        result = workers.warm(start, start + 2 * MIB, uffd.WARM_PROBE)
        assert result.method == uffd.WARM_PROBE
        there.append(workers.resident(start, start + 2 * MIB))
    assert max(there) == 2 * MIB


def together(results: list[WarmResult]) -> list[int]:
    """How many extents were begun before the first of them was there, group by group."""
    counts, left = [], results
    while left:
        begun = [one for one in left if one.start_ns < left[0].done_ns]
        counts.append(len(begun))
        left = left[len(begun) :]
    return counts


@pytest.mark.parametrize(
    ("length", "method", "groups"),
    [
        (64 * KIB, uffd.WARM_READAHEAD, [8, 8, 4]),
        (4 * KIB, uffd.WARM_READAHEAD, [16, 4]),
        (512 * KIB, uffd.WARM_READAHEAD, [1] * 20),
        (64 * KIB, uffd.WARM_PREAD, [1] * 20),
    ],
)
def test_short_extents_are_begun_together_up_to_512_kib_where_reads_are_only_started(
    workers: Workers, length: int, method: int, groups: list[int]
) -> None:
    starts = [(7 * n % 20) * 2 * MIB for n in range(20)]
    results = workers.warm_all(starts, length, method)
    assert [(one.error, one.bytes + one.resident_bytes) for one in results] == [(0, length)] * 20
    assert together(results) == groups


def test_of_short_extents_no_more_than_32_are_under_way(bed: SlowBed) -> None:
    workers = Workers(bed.path(ARRAY), threads=8)
    try:
        bed.set(latency_us=50_000)  # all could be begun before the first of them is there
        results = workers.warm_all(
            [n * 512 * KIB for n in range(100)], 4 * KIB, uffd.WARM_READAHEAD
        )
    finally:
        bed.set(latency_us=1000)
        workers.close()
    under_way = [
        sum(one.start_ns <= at.start_ns < one.done_ns for one in results) for at in results
    ]
    assert 16 < max(under_way) <= 32


@pytest.fixture
def deaf(tmp_path: Path) -> Iterator[SlowBed]:
    """A bed with a file whose server has stopped answering."""
    source = tmp_path / "deaf"
    source.mkdir()
    write_records(source / "deaf.bin", 64 * MIB)
    with SlowBed(source) as mounted:
        yield mounted
        os.kill(mounted.pid, signal.SIGCONT)


@pytest.mark.parametrize("length", [4 * KIB, 2 * MIB], ids=["short", "long"])
def test_a_device_that_does_not_answer_takes_no_thread_from_another(
    bed: SlowBed, deaf: SlowBed, length: int
) -> None:
    """Nor its turn, though it has more to read than it has threads, and than its server queues."""
    workers = Workers(bed.path(ARRAY), threads=2)
    fd = os.open(deaf.path("deaf.bin"), os.O_RDONLY | os.O_CLOEXEC)
    device = os.fstat(fd).st_dev
    try:
        os.kill(deaf.pid, signal.SIGSTOP)
        wait_until(lambda: process_state(deaf.pid) == "T", "the stop")
        for number in range(100):
            assert workers.submit(1000 + number, fd, number * length % (62 * MIB), length, device)
        starts = [n * 2 * MIB for n in range(20)]
        results = workers.warm_all(starts, length, uffd.WARM_READAHEAD)
        assert [(one.id, one.error) for one in results] == [(n, 0) for n in range(20)]
        assert workers.cpu_seconds() > 0
        os.kill(deaf.pid, signal.SIGCONT)
        assert [one.id for one in workers.results(100)] == [1000 + n for n in range(100)]
        assert workers.submit(7, fd, 0, length, device), "and then is served as any other"
        (last,) = workers.results(1)
        assert (last.error, last.bytes + last.resident_bytes) == (0, length)
    finally:
        os.kill(deaf.pid, signal.SIGCONT)
        os.close(fd)
        workers.close()


def test_more_devices_than_are_read_from_at_one_time_take_turns(workers: Workers) -> None:
    for number in range(DEVICES_MOST):
        assert workers.submit(number, workers.fd, number * MIB, MIB, device=number)
    late = 99
    assert not workers.submit(late, workers.fd, 0, MIB, device=late)
    assert len(workers.results(DEVICES_MOST)) == DEVICES_MOST
    assert workers.submit(late, workers.fd, 0, MIB, device=late)
    assert [one.id for one in workers.results(1)] == [late]


@pytest.fixture
def probe(compiled: Callable[..., str], bed: SlowBed) -> Callable[..., dict[str, int]]:
    """tests/programs/probe.c on a cold extent of 4 MiB."""
    csrc = ROOT / "csrc"
    sources = [str(csrc / "service" / name) for name in ("warm.c", "residency.c")]
    program = compiled("probe", f"-I{csrc}", *sources)

    def once(how: str, method: int) -> dict[str, int]:
        path = bed.path(ARRAY)
        drop_cache(path)
        words = [program, str(path), str(8 * MIB), str(4 * MIB), str(method), how]
        return dict(json.loads(subprocess.run(words, check=True, capture_output=True).stdout))

    def run(how: str, method: int = uffd.WARM_PROBE) -> dict[str, int]:
        """Some times where not all is there then: the kernel may have taken a page away again."""
        for _ in STARTS:
            found = once(how, method)
            if found["resident"] == 4 * MIB:
                break
        return found

    return run


def test_a_readahead_that_does_nothing_is_found_out(probe: Callable[..., dict[str, int]]) -> None:
    assert probe("works")["method"] == uffd.WARM_READAHEAD
    assert probe("nothing")["method"] == uffd.WARM_PREAD


def test_pages_that_somebody_else_reads_meanwhile_are_not_taken_for_the_calls_doing(
    probe: Callable[..., dict[str, int]],
) -> None:
    found = probe("rival")
    assert found["method"] != uffd.WARM_READAHEAD
    assert found["resident"] == 4 * MIB


@pytest.mark.parametrize("method", [uffd.WARM_READAHEAD, uffd.WARM_PREAD])
def test_what_was_asked_for_and_what_came_of_it_is_told_and_all_is_there(
    probe: Callable[..., dict[str, int]], method: int
) -> None:
    """Also where the call does nothing: the pages that are missing are read."""
    works, nothing = probe("works", method), probe("nothing", method)
    assert works["asked"] == nothing["asked"] == 4 * MIB
    assert works["came"] == 4 * MIB
    assert nothing["came"] == (0 if method == uffd.WARM_READAHEAD else 4 * MIB)
    assert works["resident"] == nothing["resident"] == 4 * MIB


def test_what_is_resident_is_not_read_again(workers: Workers, bed: SlowBed) -> None:
    workers.make_resident(0, 2 * MIB)
    bed.reset()
    for method in (uffd.WARM_PROBE, uffd.WARM_READAHEAD, uffd.WARM_PREAD):
        result = workers.warm(0, 2 * MIB, method, 256 * KIB)
        assert (result.error, result.bytes, result.resident_bytes) == (0, 0, 2 * MIB)
    assert bed.counters()["bytes"] == 0


@pytest.mark.parametrize("chunk", [0, 64 * KIB, MIB])
def test_an_extent_beyond_the_end_of_the_file_does_no_harm(workers: Workers, chunk: int) -> None:
    size = os.fstat(workers.fd).st_size
    start = size - 128 * KIB - size % 4096
    result = workers.warm(start, size + 4 * MIB, uffd.WARM_READAHEAD, chunk)
    assert result.error == 0


def test_checkpoint_pages_hold_the_files_bytes(workers: Workers) -> None:
    page = uffd.PAGE_BYTES
    rw, ro = uffd.checkpoint_memfd(os.fstat(workers.fd).st_size)
    pages = [4 * MIB // page, 4 * MIB // page + 7, 5 * MIB // page]
    result = workers.warm(
        4 * MIB, 6 * MIB, uffd.WARM_READAHEAD, 256 * KIB, checkpoint_fd=rw, pages=pages
    )
    assert result.copied == 0b111
    for number in pages:
        assert os.pread(ro, page, number * page) == os.pread(workers.fd, page, number * page)
    assert os.pread(ro, page, 3 * MIB) == bytes(page)  # and no other page was written
    with pytest.raises(OSError):
        os.pwrite(ro, b"x", 0)
    os.close(rw)
    os.close(ro)


def test_what_is_read_to_be_cached_takes_no_memory_of_ours(bed: SlowBed) -> None:
    """A buffer as large as a request for each worker would be 64 MiB of the job's."""
    count = 8
    made = Workers(bed.path(ARRAY), threads=count)
    before = rss_bytes("self")
    starts = [number * 4 * MIB for number in range(count)]
    for result in made.warm_all(starts, 4 * MIB, uffd.WARM_PREAD, chunk=4 * MIB):
        assert result.error == 0
    grown = rss_bytes("self") - before
    assert made.resident(0, count * 4 * MIB) >= count * 4 * MIB - AGAIN_MOST * 4096
    made.close()
    assert grown < 4 * MIB
