# SPDX-License-Identifier: Apache-2.0
"""Nobody of ours answers: the job's own calls come to their end, and its memory stays its own."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from components import Runner
from conftest import HANG_SECONDS, PATIENCE_VARIABLE, require, wait_until
from harness import (
    CHECKPOINTS,
    MIB,
    Records,
    Start,
    both_engines,
    file_digest,
    hammered,
    programs,
    python,
    write_records,
)

from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytest_plugins = ("harness_fixtures",)

SMALL = ("--min-size", "1MiB")


@both_engines
def test_while_our_thread_stands_still_the_job_maps_unmaps_and_forks(
    env: dict[str, str], own_records: Records, tmp_path: Path, engine: str
) -> None:
    """A tracer holds the thread wherever it is, while the job puts memory of its own where the file
    was, and lets it go: what it was about to do must not hit that memory."""
    ptrace_scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = int(ptrace_scope.read_text()) if ptrace_scope.exists() else 0
    require(scope < 3 and (scope < 2 or os.geteuid() == 0), "nobody may trace here")
    del env[PATIENCE_VARIABLE]  # as users have it: 50 ms
    words = [programs(tmp_path, "held_agent"), own_records.path, "40"]
    runner = Runner(env, tmp_path)
    assert runner.plain(*words) == b"ok, nobody to hold\n"
    laid = CHECKPOINTS if engine == "cache" else ()
    run = runner.wrapped(*words, options=(*SMALL, *laid))
    assert (run.status, run.stdout) == (0, b"ok, held\n"), run.stderr


def test_a_late_act_does_not_hit_the_job_s_memory(
    own_records: Records, tmp_path: Path, hammer: Any
) -> None:
    """As above, under a service that commands without end: held in the midst of acts."""
    stop = hammer(1, file=own_records.path)
    env = hammered(tmp_path)
    words = [programs(tmp_path, "held_agent"), str(own_records.path), "40"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=2 * HANG_SECONDS)
    assert (done.returncode, done.stdout) == (0, "ok, held\n"), done.stderr
    counts = stop()
    assert counts["attached"] > 20 and counts["laid"] > 100, counts


def test_a_job_that_went_on_without_our_late_thread_is_not_taken_for_one_that_bypasses(
    own_records: Records, tmp_path: Path, hammer: Any
) -> None:
    """Held about as long as a thread of the job waits: which of the two goes on first is open."""
    stop = hammer(2, "20000", "0", file=own_records.path)
    env = hammered(tmp_path)
    del env[PATIENCE_VARIABLE]
    words = [programs(tmp_path, "held_agent"), str(own_records.path), "80", "49500", "53500"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=2 * HANG_SECONDS)
    assert (done.returncode, done.stdout) == (0, "ok, held\n"), done.stderr
    counts = stop()
    assert counts["attached"] > 40 and counts["bypassed"] == [], counts


#: Far more than a second of patience a mapping: paid once by a job, or 40 times.
PATIENCE = {PATIENCE_VARIABLE: "800"}

SHARDS = """
    say(ready=os.getpid())
    hear()
    maps = [Mapping(sys.argv[1]) for _ in range(40)]
    say(same=len({bytes(m.view[:PAGE]) for m in maps}))
    for m in maps:
        m.unmap()
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    say(done=1)
"""


def test_a_silent_service_is_waited_for_once(
    env: dict[str, str], own_records: Records, job: Start
) -> None:
    """With --engine pool each mapping asks the service how it is served. Stopped before the first:
    later the agent would take it for dead by its silence."""
    shards = job(
        python(SHARDS, own_records.path), ("--engine", "pool", "--budget", "6MiB"), **PATIENCE
    )
    shards.line()
    with shards.stopped_service():
        shards.tell()
        assert shards.line() == {"same": 1}
        assert shards.line() == {"done": 1}
    assert 40 * int(PATIENCE[PATIENCE_VARIABLE]) * 0.005 > HANG_SECONDS
    shards.finish().good()


#: 500 mappings, of one file or of as many, as fast as they come, some of them by several threads.
MANY = """
    paths = sys.argv[2:] or [sys.argv[1]] * 500
    def served():
        with open("/proc/self/maps") as file:
            return sum(CHECKPOINTS in line for line in file)
    first = Mapping(sys.argv[1]).managed()
    each, maps, began = served(), [], time.monotonic()
    def map_them(first, count):
        maps.extend([Mapping(path) for path in paths[first : first + count]])
    map_them(0, 300)
    threads = [threading.Thread(target=map_them, args=(at, 25)) for at in range(300, 500, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    fds = [int(open(f"/proc/self/task/{tid}/status").read().split("FDSize:")[1].split()[0])
           for tid in agents()]
    say(waited=served() // each - 1, seconds=seconds, first=first.digest(), fds=fds,
        same=len({m.digest() for m in maps[::250]}))
    for m in maps:
        m.unmap()
    say(left=served() // each, again=Mapping(sys.argv[1]).managed().digest())
    hear()
"""
#: At once and in a second (csrc/job/reply.c); and the service's table of descriptors.
WAITS_AT_ONCE, WAITS_A_SECOND, DESCRIPTORS = 200, 50, 4096


@both_engines
def test_who_maps_hundreds_of_files_waits_for_some_hundred_answers(
    env: dict[str, str], own_records: Records, job: Start, engine: str
) -> None:
    """The others are followed by page tables. Nor does anybody wait for the kernel to make room for
    descriptors. (Of one file of the pool as many may be waited for as there is time for.)"""
    del env[PATIENCE_VARIABLE]
    options, paths = ("--policy", "fixed"), list[Path]()
    if engine == "pool":
        options = ("--engine", "pool", "--budget", "32MiB")
        paths = [own_records.path.with_name(f"{number}.bin") for number in range(500)]
        for path in paths:
            with open(path, "wb") as file:
                file.truncate(2 * MIB)
    many = job(python(MANY, own_records.path, *paths), options)
    told = many.line()
    assert told["waited"] <= 1 + WAITS_AT_ONCE + WAITS_A_SECOND * told["seconds"], told
    assert (told["first"], told["same"]) == (own_records.digest, 1)
    assert all(room >= 1024 for room in told["fds"]) and told["fds"], told
    assert many.line() == {"left": 1, "again": own_records.digest}
    status = Path(f"/proc/{many.service()}/status").read_text()
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(status.split("FDSize:")[1].split()[0]) >= min(DESCRIPTORS, allowed)
    many.tell()
    many.finish().good()


@pytest.mark.parametrize("known", [True, False], ids=["a known file", "a new file"])
def test_a_service_that_answers_again_serves_again(
    env: dict[str, str], own_records: Records, job: Start, known: bool
) -> None:
    """The mapping that did not wait stays the file's, and denies the next nothing."""
    code = """
        first = sys.argv[2] == "True" and Mapping(sys.argv[1])
        say(ready=os.getpid())
        hear()
        second = Mapping(sys.argv[1])
        say(mapped=second.address)
        hear()
        def served():
            m = Mapping(sys.argv[1])
            pooled = m.pooled()
            m.unmap()
            return pooled
        until(served, "the pool")
        say(second=second.pooled(), digest=second.digest())
    """
    impatient = {PATIENCE_VARIABLE: "10"}
    words = python(code, own_records.path, known)
    one = job(words, ("--engine", "pool", "--budget", "6MiB"), **impatient)
    one.line()
    with one.stopped_service():
        one.tell()
        one.line()
    one.tell()
    assert one.line() == {"second": False, "digest": own_records.digest}
    one.finish().good()


@pytest.mark.parametrize("other", [True, False], ids=["another file is", "the same file is"])
def test_a_mapping_that_did_not_wait_for_the_pool_is_followed_by_page_tables(
    env: dict[str, str], job: Start, tmp_path: Path, other: bool
) -> None:
    """What lies ahead of its reader is read into the page cache, also where another mapping of the
    file is served by the pool: never into memory that its reader does not map."""
    require(why_no_bed() is None, why_no_bed() or "")
    directory = tmp_path / "far"
    directory.mkdir()
    write_records(directory / "records.bin", 24 * MIB)
    write_records(directory / "first.bin", 4 * MIB)
    code = """
        first = Mapping(sys.argv[1])
        until(lambda: first.pooled() or first.again(), "the pool")
        say(first=first.view[0])
        hear()
        m = Mapping(sys.argv[2])
        say(mapped=m.length)
        hear()
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        def there(at):  # most of it: the kernel may take pages away again
            pages = (ctypes.c_ubyte * (MIB // PAGE))()
            checked(libc.mincore(m.address + at, MIB, pages), "mincore")
            return sum(page & 1 for page in pages) > len(pages) // 2
        MIB, at_most = 1 << 20, 0.5
        for at in range(0, m.length, MIB):
            bytes(m.view[at : at + MIB])
            end = time.monotonic() + at_most  # it computes until what is next has come, or so long
            while at + MIB < m.length and not there(at + MIB) and time.monotonic() < end:
                time.sleep(0.002)
            time.sleep(0.01)
        say(pooled=m.pooled())
    """
    with SlowBed(directory) as bed:
        second = bed.path("records.bin")
        one = job(
            python(code, bed.path("first.bin") if other else second, second),
            ("--engine", "pool", "--budget", "64MiB"), **{PATIENCE_VARIABLE: "10"},
        )  # fmt: skip
        one.line()
        with one.stopped_service():
            one.tell()
            one.line()
        one.tell()
        assert one.line() == {"pooled": False}
        summary = one.finish().good().summary
        read_bytes = bed.counters()["bytes"]
    assert summary is not None
    [file] = [f for f in summary["files"] if f["path"].endswith("records.bin")]
    assert file["served_by"] == ("page_tables" if other else "pool")  # the best of its mappings
    assert file["pool_read_bytes"] <= 2 * MIB  # with what tells the link
    assert file["prefetched_bytes"] > 12 * MIB
    assert read_bytes < 26 * MIB


@pytest.mark.parametrize("flags", ["os.O_RDWR", "os.O_WRONLY", "os.O_RDWR | os.O_TRUNC"])
def test_a_job_that_opens_its_file_for_writing_without_waiting_gets_it(
    env: dict[str, str], own_records: Records, job: Start, flags: str
) -> None:
    """The service's read lease stands in the way, and is given back first."""
    code = f"""
        m = Mapping(sys.argv[1])
        say(ready=os.getpid())
        hear()
        fd = os.open(sys.argv[1], {flags} | os.O_NONBLOCK)
        say(opened=os.fstat(fd).st_size)
    """
    one = job(python(code, own_records.path))
    one.line()
    leased(own_records.path)
    one.tell()
    opened = one.line()["opened"]
    assert opened == (0 if "TRUNC" in flags else own_records.size_bytes)
    one.finish().good()


def test_a_service_that_stands_still_keeps_such_an_open_waiting_no_longer_than_its_agents_allow(
    env: dict[str, str], own_records: Records, job: Start
) -> None:
    """It was EAGAIN: after 50 ms, and later after 1.25 s. Of another program of the job, too, which
    has not mapped the file."""
    code = """
        say(ready=os.getpid())
        hear()
        try:
            os.close(os.open(sys.argv[1], os.O_RDWR | os.O_NONBLOCK))
            say(errno=0)
        except OSError as error:
            say(errno=error.errno)
    """
    maps = "m = Mapping(sys.argv[1])\nsay(mapped=1)\nhear()\n"
    reader, writer = (job(python(one, own_records.path)) for one in (maps, code))
    reader.line(), writer.line()
    leased(own_records.path)
    with reader.stopped_service():
        writer.tell()
        assert writer.line() == {"errno": 0}
    reader.tell()
    for one in (reader, writer):
        one.finish().good()


@both_engines
def test_who_opens_a_file_for_writing_is_let_in_by_agents_of_a_service_that_stands_still(
    own_records: Records, job: Start
) -> None:
    """The kernel takes its lease away after lease-break-time (45 s). The readers have the file's
    own pages by then, and read what is written."""
    code = """
        m = Mapping(sys.argv[1]).managed()
        say(ready=os.getpid())
        for _ in range(2):
            hear()
            say(digest=m.digest(), ours=m.checkpoints())
    """
    readers = [job(python(code, own_records.path)) for _ in range(2)]
    for one in readers:
        one.line()
    with readers[0].stopped_service():
        with open(own_records.path, "r+b") as file:
            file.write(os.urandom(own_records.size_bytes))
        written = {"digest": file_digest(own_records.path), "ours": 0}
        for one in readers:
            one.tell()
            assert one.line() == written
    for one in readers:
        one.tell()
        assert one.line() == written
        one.finish().good()


def test_a_lock_of_what_was_mapped_is_free_once_that_is_unmapped_and_closed(
    own_records: Records, job: Start
) -> None:
    """flock(2) is the description's. The service, which is told of the mapping, stands still with
    what it was sent."""
    code = """
        import fcntl
        first = Mapping(sys.argv[1]).managed()
        fd = os.open(sys.argv[1], os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        say(ready=os.getpid())
        hear()
        m = Mapping(fd, os.fstat(fd).st_size)
        m.unmap()
        os.close(fd)
        fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        say(locked=1)
        hear()
    """
    one = job(python(code, own_records.path), **{PATIENCE_VARIABLE: "10"})
    one.line()
    with one.stopped_service():
        one.tell()
        assert one.line() == {"locked": 1}
    one.tell()
    one.finish().good()


@both_engines
def test_a_job_has_the_write_lease_of_what_it_alone_has_mapped(
    own_records: Records, job: Start
) -> None:
    """The kernel gives it where nobody else has the file open, and the service had."""
    code = """
        import fcntl
        fd = os.open(sys.argv[1], os.O_RDONLY)
        m = Mapping(fd, os.fstat(fd).st_size).managed()
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        say(digest=m.digest(), ours=m.checkpoints())
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        Mapping(fd, m.length).managed()
    """
    one = job(python(code, own_records.path))
    assert one.line() == {"digest": own_records.digest, "ours": 0}
    one.finish().good()


def leased(path: Path, state: str = "LEASE") -> None:
    """Wait until somebody has a lease on the file, by the kernel's own list."""
    inode = path.stat().st_ino

    def look() -> bool:
        lines = Path("/proc/locks").read_text().splitlines()
        return any("LEASE" in line and state in line and f":{inode} " in line for line in lines)

    wait_until(look, "the service's lease")


@pytest.fixture
def far(tmp_path: Path) -> Iterator[SlowBed]:
    """A file system that can be stopped, and asks its daemon for attributes each time."""
    require(why_no_bed() is None, why_no_bed() or "")
    source = tmp_path / "far"
    source.mkdir()
    write_records(source / "far.bin", 8 * MIB)
    with SlowBed(source, writers_behind=True) as bed:
        yield bed
        with contextlib.suppress(ProcessLookupError):
            os.kill(bed.pid, signal.SIGCONT)


@both_engines
def test_storage_that_does_not_answer_holds_neither_the_job_s_calls_nor_other_files(
    env: dict[str, str], own_records: Records, job: Start, far: SlowBed
) -> None:
    code = """
        fd = os.open(sys.argv[1], os.O_RDONLY)
        size = os.fstat(fd).st_size
        first = Mapping(sys.argv[1])
        say(first=len(bytes(first.view[: 1 << 20])))
        hear()
        more = [Mapping(fd, size) for _ in range(4)]
        say(mapped=len(more))
        def served():
            m = Mapping(sys.argv[2])
            ours = m.checkpoints()
            m.unmap()
            return ours
        until(served, "another file to be served")
        say(served=1)
        for m in [first, *more]:
            m.unmap()
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        say(done=1)
        hear()
    """
    one = job(python(code, far.path("far.bin"), own_records.path))
    assert one.line()["first"] == MIB
    os.kill(far.pid, signal.SIGSTOP)
    try:
        one.tell()
        assert one.line() == {"mapped": 4}
        assert one.line() == {"served": 1}
        assert one.line() == {"done": 1}
    finally:
        os.kill(far.pid, signal.SIGCONT)
    one.tell()
    one.finish().good()


@pytest.mark.parametrize(
    "options", [("--exclude", "*"), ("--whole", "*")], ids=["excluded", "streamed"]
)
def test_who_maps_a_file_again_over_which_nothing_is_laid_does_not_wait(
    own_records: Records, job: Start, options: tuple[str, str]
) -> None:
    """The first answer holds for all mappings of the file: a stopped service is not asked."""
    with open(own_records.path, "rb") as file:  # what is in memory needs no stream
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    code = """
        until(lambda: not Mapping(sys.argv[1]).checkpoints(), "no checkpoints")
        say(ready=os.getpid())
        hear()
        maps = [Mapping(sys.argv[1]) for _ in range(40)]
        say(same=len({bytes(m.view[:PAGE]) for m in maps}))
    """
    for_ever = {PATIENCE_VARIABLE: "1000000"}
    one = job(python(code, own_records.path), options, **for_ever)
    one.line()
    with one.stopped_service():
        one.tell()
        assert one.line() == {"same": 1}
    one.finish().good()


def test_a_reader_that_jumps_about_has_no_checkpoints_until_it_reads_in_order(
    job: Start, tmp_path: Path
) -> None:
    """A file that is mapped anew for each batch, as nanoGPT does."""
    write_records(tmp_path / "tokens.bin", 64 * MIB)
    code = """
        def laid():
            m = Mapping(sys.argv[1])
            found = m.checkpoints()
            m.unmap()
            return found
        def jumps():
            m = Mapping(sys.argv[1])
            for _ in range(64):
                m.view[__import__("random").randrange(m.length)]
            time.sleep(0.01)
            m.unmap()
            return not laid()
        def goes_on():
            m = Mapping(sys.argv[1])
            for at in range(0, m.length, PAGE):
                m.view[at]
                if at % (1 << 20) == 0:
                    time.sleep(0.01)
            m.unmap()
            return laid()
        until(laid, "checkpoints where nobody has read")
        until(jumps, "no checkpoints where a reader jumps about")
        until(goes_on, "checkpoints where it reads in order")
    """
    job(python(code, tmp_path / "tokens.bin")).finish().good()
