# SPDX-License-Identifier: Apache-2.0
"""--engine pool at its bounds: a budget of one chunk, a small memory cgroup, no room for files,
many processes, many mappings."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cgroups import entering, kills, memory_group
from conftest import QUICK_VARIABLE, require, wait_until
from harness import (
    MIB,
    Records,
    Start,
    file_digest,
    memfd_bytes,
    python,
    snapshot,
    write_records,
)

from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.root

POOL = ("--engine", "pool", "--budget", "6MiB")
#: Lets the pool be as small as one chunk.
SMALL = {"UFFDPREFETCH_TEST_POOL_LEAST": "64KiB"}


class Peak(threading.Thread):
    """The largest value of a function while the block runs."""

    def __init__(self, sample: Callable[[], int]) -> None:
        super().__init__()
        self._sample, self._end = sample, threading.Event()
        self.value = self.samples = 0

    def run(self) -> None:
        while not self._end.is_set():
            with contextlib.suppress(OSError):
                self.value = max(self.value, self._sample())
            self.samples += 1

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()


@pytest.mark.parametrize(("quick_ns", "served_by"), [("1000000000", "page_tables"), ("-1", "pool")])
def test_what_lies_on_a_quick_disk_is_left_to_the_page_cache(
    job: Start, records: Records, quick_ns: str, served_by: str
) -> None:
    """One that answers within a second is quick here, or none is."""
    if not os.major(os.stat(records.path).st_dev):
        pytest.skip("the temporary directory is on no disk of this machine")
    words = python("say(digest=Mapping(sys.argv[1]).digest())", records.path)
    done = job(words, POOL, **{QUICK_VARIABLE: quick_ns}).finish().good()
    assert done.lines == [{"digest": records.digest}]
    assert done.summary is not None
    (file,) = done.summary["files"]
    assert file["served_by"] == served_by
    notes = "\n".join(done.summary["degradations"])
    assert ("served by the page cache" in notes) == (served_by == "page_tables")


@pytest.mark.parametrize(("budget", "has_numpy"), [("1GiB", False), ("6MiB", True)])
def test_numpy_is_loaded_when_room_is_short_and_before_the_job_comes_where_it_always_is(
    job: Start, records: Records, budget: str, has_numpy: bool
) -> None:
    code = "m = Mapping(sys.argv[1])\nsay(digest=m.digest())\nhear()\n"
    work = job(python(code, records.path), ("--engine", "pool", "--budget", budget))
    assert work.line() == {"digest": records.digest}
    maps = Path(f"/proc/{work.service()}/maps").read_text()
    assert ("/numpy/" in maps) == has_numpy
    work.tell()
    work.finish().good()


@pytest.mark.parametrize("chunks", [1, 2])
def test_reads_that_need_two_chunks_end_where_only_one_or_two_fit(
    job: Start, small: Path, compiled: Callable[..., str], chunks: int
) -> None:
    options = ("--engine", "pool", "--budget", f"{64 * chunks}KiB")
    work = job([compiled("straddle"), str(small), "4", "40"], options=options, **SMALL)
    assert work.line() == {"wrong": 0}
    done = work.finish()
    assert done.status == 0 and done.summary is not None
    pool = done.summary["pool"]
    assert pool["resident_peak_bytes"] <= chunks * 65536
    stuck = [d for d in done.summary["degradations"] if "--budget is too small" in d]
    assert pool["mappings_given_back"] == bool(stuck)


@pytest.mark.parametrize("latency_us", [0, 12_000])
def test_where_one_chunk_fits_the_mapping_is_given_back(
    job: Start, small: Path, compiled: Callable[..., str], latency_us: int
) -> None:
    """How long a read takes does not hide that it is read again and again."""
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(small.parent, latency_us=latency_us) as bed:
        # until it is known: beside a busy machine the service is silent for 40 ms now and then, and
        # the job's agent stands in for it, by which a read ends too
        words = [compiled("straddle"), str(bed.path(small.name)), "4", "0"]
        work = job(words, options=("--engine", "pool", "--budget", "64KiB"), **SMALL)
        work.service()
        wait_until(
            lambda: any("--budget is too small" in d for d in snapshot(work.env).degradations),
            "the mapping to be given back",
        )
        done = work.finish()
    assert done.status == 0 and done.lines == [{"wrong": 0}]


def test_a_file_whose_storage_does_not_answer_leaves_threads_to_the_others(
    job: Start, small: Path, records: Records
) -> None:
    """More threads of the job wait for it than the pool has."""
    require(why_no_bed() is None, why_no_bed() or "")
    code = """
    far, near = Mapping(sys.argv[1], length=4 << 20), Mapping(sys.argv[2])
    say(pooled=far.pooled() and near.pooled())
    came = []
    libc.strnlen.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    def touch(at):
        came.append(libc.strnlen(far.address + at, 1))  # without the interpreter's lock
    threads = [threading.Thread(target=touch, args=(n * far.length // 40,), daemon=True)
               for n in range(40)]
    for thread in threads:
        thread.start()
    def waits(thread):  # for a page: it sleeps, and in no system call (proc_pid_syscall(5))
        with open(f"/proc/self/task/{thread.native_id}/syscall") as file:
            return file.read().startswith("-1 ")
    until(lambda: all(map(waits, threads)), "all of them to wait")
    say(digest=near.digest(), came=len(came))
    os._exit(0)
    """
    with SlowBed(small.parent, latency_us=60_000_000) as bed:
        words = python(code, bed.path(small.name), records.path)
        work = job(words, options=("--engine", "pool", "--budget", "64MiB"), **SMALL)
        assert work.line() == {"pooled": True}
        assert work.line() == {"digest": records.digest, "came": 0}
    assert work.finish().status == 0


SCAN = """
import select
m = Mapping(sys.argv[1])
say(ready=m.pooled())
hear()
digests, told = set(), []
while not told:
    m.forget()
    digests.add(m.digest())
    told, _, _ = select.select([0], [], [], 0)
hear()
say(digests=sorted(digests))
"""


def test_the_memory_of_the_pool_is_never_more_than_the_budget(job: Start, records: Records) -> None:
    ranks = [job(python(SCAN, records.path), options=POOL) for _ in range(3)]
    for rank in ranks:
        assert rank.line() == {"ready": True}
    service = ranks[0].service()
    with Peak(lambda: memfd_bytes(service)) as peak:
        for rank in ranks:
            rank.tell()
        wait_until(lambda: peak.samples > 100 and peak.value > 3 * MIB, "the pool to fill")
        for rank in ranks:
            rank.tell("end")
        for rank in ranks:
            assert rank.line() == {"digests": [records.digest]}
    summary = [rank.finish().good() for rank in ranks][-1].summary
    assert summary is not None
    pool = summary["pool"]
    # Beside a busy machine the service may be silent so long that the ranks read for themselves.
    assert peak.value <= 6 * MIB + pool["stand_in_bytes"]
    assert pool["resident_peak_bytes"] <= 6 * MIB


# ---- a small memory cgroup ----------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of 128 MiB."""
    with memory_group(128 * MIB) as group:
        yield group


@pytest.mark.parametrize("own", [0, 44], ids=["alone", "beside a job of 44 MiB"])
def test_in_a_small_memory_cgroup_the_pool_stays_below_its_limit(
    job: Start, group: Path, tmp_path: Path, own: int
) -> None:
    path = tmp_path / "large.bin"
    write_records(path, 130 * MIB, seed=9)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    code = """
    own = os.urandom(int(sys.argv[2]) << 20)
    m = Mapping(sys.argv[1])
    say(digest=m.digest(), pooled=m.pooled())
    """
    options = ("--engine", "pool", "--budget", "512MiB")
    done = job(python(code, path, own), options=options, before=entering(group)).finish().good()
    assert done.lines == [{"digest": file_digest(path), "pooled": True}]
    assert kills(group) == 0
    assert done.summary is not None
    pool = done.summary["pool"]
    assert pool["resident_peak_bytes"] < (128 - own) * MIB
    assert pool["limited_by"] == "cgroup memory limit"
    assert any("cgroup memory limit" in line for line in done.summary["degradations"])


def test_where_no_file_may_be_so_large_the_mapping_is_served_without_the_pool(
    job: Start, records: Records
) -> None:
    """RLIMIT_FSIZE binds a memfd, too, and its signal would kill the service."""
    code = "m = Mapping(sys.argv[1])\nsay(digest=m.digest(), pooled=m.pooled())"
    limit = ("prlimit", "--fsize=8388608")
    done = job(python(code, records.path), options=POOL, before=limit).finish().good()
    assert done.lines == [{"digest": records.digest, "pooled": False}]
    assert done.summary is not None
    assert [line for line in done.summary["degradations"] if "not served by the pool" in line]


# ---- many ---------------------------------------------------------------------------------------


def test_sixty_four_processes_at_once_read_each_byte_once(
    job: Start, patient: None, records: Records
) -> None:
    code = """
    pids = []
    for n in range(64):
        pid = os.fork()
        if pid == 0:
            m = Mapping(sys.argv[1])
            os._exit((m.digest() != sys.argv[2]) + 2 * (not m.pooled()))
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    say(codes=sorted(set(codes)))
    """
    options = ("--engine", "pool", "--budget", "64MiB")
    done = job(python(code, records.path, records.digest), options=options).finish().good()
    assert done.lines == [{"codes": [0]}], str(done.summary)
    assert done.summary is not None
    assert done.summary["pool"]["read_bytes"] == records.size_bytes


def test_two_hundred_mappings_of_one_file_in_one_process(job: Start, records: Records) -> None:
    code = """
    data = open(sys.argv[1], "rb").read()
    maps = [Mapping(sys.argv[1], length=1 << 20, offset=n * 65536) for n in range(200)]
    def bad():
        return [n for n, m in enumerate(maps) if m.view != data[n * 65536 :][: m.length]]
    wrong = bad()
    if os.fork() == 0:
        os._exit(bool(bad()))
    say(wrong=wrong, child=os.wait()[1])
    for m in maps[::2]:
        m.unmap()
    say(left=sum(m.checkpoints() > 0 for m in maps[1::2]))
    """
    done = job(python(code, records.path), options=POOL).finish().good()
    assert done.lines == [{"wrong": [], "child": 0}, {"left": 100}]


def test_a_process_of_few_descriptors_maps_and_reads_on(job: Start, records: Records) -> None:
    code = """
    import resource
    data = open(sys.argv[1], "rb").read()
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
    maps = [Mapping(sys.argv[1], length=2 << 20, offset=n << 20) for n in range(20)]
    wrong = [n for n, m in enumerate(maps) if m.view != data[n << 20 :][: m.length]]
    pid = os.fork()
    if pid == 0:
        os._exit(any(m.view != data[n << 20 :][: m.length] for n, m in enumerate(maps)))
    say(wrong=wrong, child=os.waitpid(pid, 0)[1])
    """
    for limit in (5, 9, 20):
        done = job(python(code, records.path, limit), options=POOL).finish().good()
        assert (limit, done.lines) == (limit, [{"wrong": [], "child": 0}])
