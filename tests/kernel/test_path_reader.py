# SPDX-License-Identifier: Apache-2.0
"""Files that are read by name into the page cache (csrc/service/paths.c, pathread.c)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import HANG_SECONDS, process_state, require, wait_until
from nobody import Nobody

from uffdprefetch.base import file_systems
from uffdprefetch.base.file_systems import FileSystem
from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes, warm_fully, why_no_bed
from uffdprefetch.native import paths, uffd
from uffdprefetch.native.crews import DEVICES_MOST
from uffdprefetch.native.paths import (
    Keeping,
    PathDone,
    PathReader,
    PathRequest,
    PathState,
)
from uffdprefetch.predict.storage import Account, Link
from uffdprefetch.service.small_reads import ReadBounds, SmallReads
from uffdprefetch.warm.token_bucket import TokenBucket

KIB, MIB = 1 << 10, 1 << 20
#: csrc/service/paths.c, QUEUE: requests of one device that are not reaped.
QUEUE = 1024


class Reader:
    """A PathReader, one request at a time or several."""

    def __init__(self, threads: int = paths.THREADS) -> None:
        self.reader = PathReader(threads)
        self.numbers = iter(range(1, 1 << 30))
        self.submit, self.close = self.reader.submit, self.reader.close

    def results(self, count: int) -> list[PathDone]:
        found: list[PathDone] = []
        while len(found) < count:
            ready, _, _ = select.select([self.reader], [], [], HANG_SECONDS)
            assert ready, f"only {found}"
            found += self.reader.reap()
        assert len(found) == count
        return sorted(found)

    def read(self, name: str | bytes | Path, **how: object) -> PathDone:
        """One file."""
        number, name = next(self.numbers), os.fspath(name)
        assert self.submit(PathRequest(number, name, **how))  # type: ignore[arg-type]
        (done,) = self.results(1)
        assert done.id == number
        return done


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


@pytest.fixture
def bed_of(tmp_path: Path) -> Iterator[Callable[..., SlowBed]]:
    """Beds of a directory with files ``small`` (100,000 bytes), ``large`` (5 MiB), ``f0`` ... of
    10,000."""
    require(why_no_bed() is None, why_no_bed() or "")
    source = tmp_path / "source"
    source.mkdir()
    (source / "small").write_bytes(os.urandom(100_000))
    (source / "large").write_bytes(os.urandom(5 * MIB))
    for number in range(40):
        (source / f"f{number}").write_bytes(os.urandom(10_000))
    beds: list[SlowBed] = []

    def mount(**options: object) -> SlowBed:
        beds.append(SlowBed(source, **options))  # type: ignore[arg-type]
        beds[-1].mount()
        return beds[-1]

    yield mount
    for bed in beds:
        with contextlib.suppress(ProcessLookupError):
            os.kill(bed.pid, signal.SIGCONT)
        bed.unmount()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def held_open(path: Path) -> int:
    """How many descriptors of this process are of that file."""
    found = 0
    for fd in descriptors():
        try:
            found += os.readlink(f"/proc/self/fd/{fd}") == str(path)
        except OSError:
            continue  # of the listing itself
    return found


# ---- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [uffd.WARM_READAHEAD, uffd.WARM_PREAD])
@pytest.mark.parametrize("name", ["small", "large"])
def test_a_whole_file_is_in_the_page_cache_after_that_and_was_not_before(
    bed_of: Callable[..., SlowBed], reader: Reader, name: str, method: int
) -> None:
    bed = bed_of()
    path = bed.path(name)
    done = reader.read(path, method=method)
    size = path.stat().st_size
    assert (done.state, done.error, done.bytes) == (PathState.DONE, 0, size)
    assert done.waited and done.waited_bytes <= size
    assert 0 < done.begin_ns < done.opened_ns < done.end_ns
    assert not done.held and not held_open(path)
    assert resident_bytes(path) >= size
    assert bed.counters()["bytes"] == size
    again = reader.read(path, method=method)
    assert (again.bytes, again.waited_bytes) == (size, 0)
    assert bed.counters()["bytes"] == size


def test_what_was_there_up_to_some_place_is_told(
    bed_of: Callable[..., SlowBed], reader: Reader
) -> None:
    path = bed_of().path("large")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 2 * MIB, 0)
    os.close(fd)
    done = reader.read(path)
    assert (done.bytes, done.waited_bytes) == (5 * MIB, 3 * MIB)


@pytest.mark.parametrize("method", [uffd.WARM_READAHEAD, uffd.WARM_PREAD])
def test_ranges_are_read_and_nothing_beside_them(
    bed_of: Callable[..., SlowBed], reader: Reader, method: int
) -> None:
    bed = bed_of()
    ranges = [(MIB, 300 * KIB), (4 * KIB, 4 * KIB), (5 * MIB - 100, 1 << 40), (7 * MIB, 5)]
    done = reader.read(bed.path("large"), ranges=ranges, method=method)
    assert (done.state, done.bytes) == (PathState.DONE, 304 * KIB + 100)
    assert resident_bytes(bed.path("large")) == 304 * KIB + 4 * KIB
    assert bed.counters()["bytes"] == 308 * KIB
    again = reader.read(bed.path("large"), ranges=ranges, method=method)
    assert (again.bytes, again.waited) == (304 * KIB + 100, False)


@pytest.mark.parametrize("method", [uffd.WARM_READAHEAD, uffd.WARM_PREAD])
def test_no_more_is_read_than_is_allowed(
    bed_of: Callable[..., SlowBed], reader: Reader, method: int
) -> None:
    bed = bed_of()
    done = reader.read(bed.path("large"), most_bytes=1200 * KIB, method=method)
    assert (done.state, done.bytes) == (PathState.DONE, 1200 * KIB)
    assert done.file is not None and done.file.size_bytes == 5 * MIB
    assert resident_bytes(bed.path("large")) == 1200 * KIB
    ranges = [(2 * MIB, 64 * KIB), (3 * MIB, 64 * KIB)]
    done = reader.read(bed.path("large"), most_bytes=96 * KIB, ranges=ranges, method=method)
    assert done.bytes == 96 * KIB
    assert reader.read(bed.path("small"), most_bytes=MIB).bytes == 100_000


def test_the_job_s_fstat_asks_the_server_for_nothing_after_that(
    bed_of: Callable[..., SlowBed], reader: Reader
) -> None:
    """Our reads have the kernel forget the time of access."""
    bed = bed_of()
    assert reader.read(bed.path("small")).waited
    bed.reset()
    with open(bed.path("small"), "rb") as file:
        os.fstat(file.fileno())
        assert len(file.read()) == 100_000
    counts = bed.counters()
    assert (counts["getattrs"], counts["requests"], counts["opens"]) == (0, 0, 1)


def test_a_read_that_waits_for_attributes_only_counts_as_one_that_has_not(
    bed_of: Callable[..., SlowBed], reader: Reader
) -> None:
    """``cached_waits`` says how often a read does."""
    bed = bed_of(writers_behind=True)
    warm_fully(bed.path("large"))
    assert reader.read(bed.path("large")).waited
    assert not reader.read(bed.path("large"), cached_waits=1).waited
    assert reader.read(bed.path("small"), cached_waits=1).waited


def test_times_of_access_stay(tmp_path: Path, reader: Reader) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    drop_cache(path)
    os.utime(path, ns=(1, 2))  # older than its change: relatime would write it
    done = reader.read(path)
    status = path.stat()
    assert (done.bytes, status.st_atime_ns) == (5000, 1)
    assert done.file == (status.st_dev, status.st_ino, 5000, 2)


# ---- how it is named ----------------------------------------------------------------------------


def test_a_name_beside_a_directory_is_read_there_wherever_that_has_gone(
    tmp_path: Path, reader: Reader
) -> None:
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "sub" / "f\udcff").write_bytes(b"12345")
    fd = os.open(tmp_path / "a", os.O_PATH | os.O_CLOEXEC)
    (tmp_path / "a").rename(tmp_path / "b")
    assert reader.read("sub/f\udcff", dir_fd=fd).bytes == 5
    assert reader.read(b"sub/f\xff", dir_fd=fd).bytes == 5
    reader.reader.close_directory(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_directory_is_closed_after_the_last_request_beside_it(
    bed_of: Callable[..., SlowBed], tmp_path: Path
) -> None:
    bed = bed_of()
    reader = Reader(threads=1)
    fd = os.open(bed.mountpoint, os.O_PATH | os.O_CLOEXEC)
    for number in range(20):
        assert reader.submit(PathRequest(number, f"f{number}", dir_fd=fd))
    reader.reader.close_directory(fd)
    os.fstat(fd)
    assert {done.state for done in reader.results(20)} == {PathState.DONE}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert reader.close()


def test_a_descriptor_of_another_process_names_its_file_though_it_has_no_name(
    tmp_path: Path, reader: Reader
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 9000)
    with open(path, "rb") as file:
        process = subprocess.Popen(["sleep", "1000"], stdin=file, start_new_session=True)
    try:
        status = path.stat()
        path.unlink()
        name = f"/proc/{process.pid}/fd/0"
        done = reader.read(name, expected=(status.st_dev, status.st_ino))
        assert (done.state, done.bytes) == (PathState.DONE, 9000)
    finally:
        process.kill()
        process.wait()
    gone = reader.read(f"/proc/{process.pid}/fd/0")
    assert (gone.state, gone.error, gone.file) == (PathState.FAILED, errno.ENOENT, None)


def test_links_are_followed_unless_it_is_said_otherwise(tmp_path: Path, reader: Reader) -> None:
    (tmp_path / "blob").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to("blob")
    (tmp_path / "loop").symlink_to("loop")
    assert reader.read(tmp_path / "link").bytes == 100
    assert reader.read(tmp_path / "link", follow=False).state is PathState.NOT_REGULAR
    assert reader.read(tmp_path / "blob", follow=False).bytes == 100
    assert reader.read(tmp_path / "loop").error == errno.ELOOP


def test_a_name_with_a_zero_byte_is_refused(reader: Reader) -> None:
    with pytest.raises(ValueError, match="zero byte"):
        reader.submit(PathRequest(1, b"/etc/passwd\0x"))
    with pytest.raises(OverflowError):
        reader.submit(PathRequest(1, "/etc/passwd", most_bytes=-1))
    assert reader.read("x" * 5000).error == errno.ENAMETOOLONG
    assert reader.read("").error == errno.ENOENT


# ---- what is not read ---------------------------------------------------------------------------


def test_nothing_is_taken_from_a_fifo(tmp_path: Path, reader: Reader) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert reader.read(fifo).state is PathState.NOT_REGULAR
    with pytest.raises(OSError, match="No such device or address"):
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)  # ENXIO: nobody reads
    both = os.open(fifo, os.O_RDWR)
    os.write(both, b"kept")
    assert reader.read(fifo).state is PathState.NOT_REGULAR
    assert os.read(both, 10) == b"kept"
    os.close(both)


def test_what_is_no_file_with_bytes_is_left_alone(tmp_path: Path, reader: Reader) -> None:
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "empty").touch()
    refused = {
        tmp_path: PathState.NOT_REGULAR,
        tmp_path / "device": PathState.NOT_REGULAR,
        Path("/dev/tty"): PathState.NOT_REGULAR,
        tmp_path / "empty": PathState.EMPTY,
        Path("/proc/self/maps"): PathState.EMPTY,
        Path("/sys/kernel/mm/transparent_hugepage/enabled"): PathState.NOT_REGULAR,
    }
    for path, state in refused.items():
        if path.exists():
            done = reader.read(path)
            assert (done.state, done.bytes, done.opened_ns) == (state, 0, 0), path
    gone = reader.read(tmp_path / "gone")
    assert (gone.state, gone.error) == (PathState.FAILED, errno.ENOENT)
    assert reader.read(tmp_path / "empty" / "below").error == errno.ENOTDIR


def test_another_file_than_was_expected_is_left_alone(tmp_path: Path, reader: Reader) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first")
    status = path.stat()
    expected = status.st_dev, status.st_ino
    assert reader.read(path, expected=expected).state is PathState.DONE
    first = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # or its number is another's soon
    (tmp_path / "new").write_bytes(b"second")
    (tmp_path / "new").rename(path)
    done = reader.read(path, expected=expected)
    assert (done.state, done.bytes) == (PathState.ANOTHER, 0)
    assert done.file is not None and done.file.inode == path.stat().st_ino
    assert reader.read(path, expected=(status.st_dev + 1, path.stat().st_ino)).state is (
        PathState.ANOTHER
    )
    path.unlink()
    os.mkfifo(path)
    assert reader.read(path, expected=expected).state is PathState.ANOTHER
    assert reader.read(path, expected=(status.st_dev, 0)).state is PathState.NOT_REGULAR
    os.close(first)


def test_a_lease_of_a_writer_is_not_waited_for(tmp_path: Path, reader: Reader) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    told = threading.Event()
    signal.signal(signal.SIGIO, lambda *_: told.set())
    try:
        with open(path, "rb+") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            done = reader.read(path)
            assert (done.state, done.error) == (PathState.FAILED, errno.EAGAIN)
            wait_until(told.is_set, "the holder to be told: why such a file is not to be named")
    finally:
        signal.signal(signal.SIGIO, signal.SIG_DFL)


@pytest.mark.root
def test_who_may_not_read_a_file_is_told_so() -> None:
    code = """
import select, sys
from uffdprefetch.native.paths import PathReader, PathRequest
reader = PathReader(2)
for name in sys.argv[1:]:
    assert reader.submit(PathRequest(1, name))
    select.select([reader], [], [], 60)
    (done,) = reader.reap()
    print(done.state.name, done.error, done.bytes)
assert reader.close()
"""
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-nobody-") as directory:
        nobody = Nobody(Path(directory))
        files = [nobody.directory / "secret", nobody.directory / "public"]
        for path, mode in zip(files, (0o600, 0o644), strict=True):
            path.write_bytes(b"x" * 100)
            path.chmod(mode)
        words = [*nobody.prefix, nobody.python, "-c", code, *files]
        done = subprocess.run(
            words, env=nobody.environment({}), capture_output=True, text=True, check=True
        )
    assert done.stdout.splitlines() == [f"FAILED {errno.EACCES} 0", "DONE 0 100"]


# ---- queues -------------------------------------------------------------------------------------


def stopped(bed: SlowBed) -> None:
    """Its server answers nothing from now on."""
    os.kill(bed.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(bed.pid) == "T", "the stop")


def test_a_full_queue_is_said_and_what_nobody_began_can_be_withdrawn(
    bed_of: Callable[..., SlowBed], tmp_path: Path
) -> None:
    bed = bed_of()
    device = bed.mountpoint.stat().st_dev
    reader = Reader(threads=2)
    stopped(bed)
    name = str(bed.path("small"))
    for number in range(QUEUE):
        request = PathRequest(number, name, group=number % 3, expected=(device, 0))
        assert reader.submit(request)
    assert not reader.submit(PathRequest(9999, name, expected=(device, 0)))
    (tmp_path / "here").write_bytes(b"x" * 10)
    assert reader.read(tmp_path / "here").bytes == 10, "who reads elsewhere is not held up"
    begun = {n for n in range(QUEUE) if not reader.reader.withdraw_one(n)}
    assert len(begun) <= 2
    withdrawn = reader.results(QUEUE - len(begun))
    assert {done.state for done in withdrawn} == {PathState.WITHDRAWN}
    assert {done.id for done in withdrawn} == set(range(QUEUE)) - begun
    for number in range(QUEUE, QUEUE + 30):
        request = PathRequest(number, name, group=number % 3, expected=(device, 0))
        assert reader.submit(request)
    count = reader.reader.withdraw(1)
    assert 8 <= count <= 10
    assert {done.id % 3 for done in reader.results(count)} == {1}
    assert not reader.reader.reap()
    os.kill(bed.pid, signal.SIGCONT)
    assert {done.state for done in reader.results(len(begun) + 30 - count)} == {PathState.DONE}
    assert reader.close()


def test_more_devices_than_are_read_from_at_one_time_take_turns(
    tmp_path: Path, reader: Reader
) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    for device in range(1, DEVICES_MOST + 1):
        assert reader.submit(PathRequest(device, str(tmp_path / "file"), expected=(device, 0)))
    late = PathRequest(99, str(tmp_path / "file"), expected=(99, 0))
    assert not reader.submit(late)
    assert {done.bytes for done in reader.results(DEVICES_MOST)} == {10}
    assert reader.submit(late)
    assert [done.id for done in reader.results(1)] == [99]


def test_a_reader_is_closed_though_storage_does_not_answer(
    bed_of: Callable[..., SlowBed],
) -> None:
    bed = bed_of()
    before = descriptors()
    reader = Reader()
    for number in range(100):
        assert reader.submit(PathRequest(number, str(bed.path(f"f{number % 40}"))))
    reader.results(100)
    assert reader.close() and reader.close()
    assert descriptors() == before
    assert not reader.submit(PathRequest(1, str(bed.path("small"))))
    reader = Reader()
    bed.set(latency_us=10**9)
    assert reader.submit(PathRequest(1, str(bed.path("large"))))

    def waiting() -> list[str]:
        return [tid for tid in os.listdir("/proc/self/task") if process_state(int(tid)) == "D"]

    wait_until(waiting, "a thread that waits for a page")
    assert not reader.close()
    assert waiting()
    os.kill(bed.pid, signal.SIGKILL)
    wait_until(lambda: not waiting(), "the end of its wait")


def test_a_process_ends_though_a_read_hangs(bed_of: Callable[..., SlowBed]) -> None:
    bed = bed_of()
    code = """
import sys, time
from uffdprefetch.native.paths import PathReader, PathRequest
reader = PathReader()
for number in range(200):
    reader.submit(PathRequest(number, sys.argv[1], hold=True))
print("submitted", flush=True)
sys.stdin.read()
print(reader.close(), flush=True)
"""
    words = [sys.executable, "-c", code, str(bed.path("large"))]
    stopped(bed)
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "submitted\n"
    out, _ = process.communicate(timeout=HANG_SECONDS)
    assert (out, process.returncode) == ("False\n", 0)


# ---- held files ---------------------------------------------------------------------------------


def test_a_held_file_is_open_until_it_is_released(tmp_path: Path, reader: Reader) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    done = reader.read(path, hold=True)
    assert done.held and held_open(path) == 1
    reader.reader.release(done.id + 1)
    assert held_open(path) == 1
    reader.reader.release(done.id)
    wait_until(lambda: not held_open(path), "the release")


def test_a_release_may_come_into_effect_later_and_may_be_of_a_group(
    tmp_path: Path, reader: Reader
) -> None:
    files = [tmp_path / f"f{number}" for number in range(4)]
    for path in files:
        path.write_bytes(b"x" * 100)
    held = [reader.read(path, hold=True, group=i % 2) for i, path in enumerate(files)]
    reader.reader.release(held[0].id, 10**12)
    reader.reader.release_group(1)
    wait_until(lambda: not held_open(files[1]) and not held_open(files[3]), "the group's release")
    assert held_open(files[0]) == held_open(files[2]) == 1
    reader.reader.release(held[0].id, 1)
    wait_until(lambda: not held_open(files[0]), "the later release")
    assert held_open(files[2]) == 1
    wait_until(lambda: not held_open(files[2]), "no release makes it longer than the while")


def test_a_file_that_is_held_may_be_run_leased_written_and_removed(
    tmp_path: Path, reader: Reader
) -> None:
    """It is open to be read: all that is refused meanwhile is a write lease, which nobody gets who
    is not alone."""
    path = tmp_path / "program"
    path.write_bytes(Path("/bin/true").read_bytes())
    path.chmod(0o755)
    held = reader.read(path, hold=True)
    subprocess.run([path], check=True)
    with open(path, "rb") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        with pytest.raises(BlockingIOError):
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    with open(path, "r+b") as file:
        file.truncate(5)
    path.unlink()
    assert held_open(Path(f"{path} (deleted)")) == 1
    reader.reader.release(held.id)
    wait_until(lambda: not held_open(Path(f"{path} (deleted)")), "the release")


def test_a_held_file_is_closed_after_a_while_by_itself(tmp_path: Path, reader: Reader) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert reader.read(path, hold=True).held
    assert held_open(path) == 1
    wait_until(lambda: not held_open(path), "the end of the while")


def test_what_is_released_before_it_is_read_is_not_held(
    bed_of: Callable[..., SlowBed],
) -> None:
    bed = bed_of()
    reader = Reader(threads=1)
    stopped(bed)
    for number in range(3):
        assert reader.submit(PathRequest(number, str(bed.path("small")), hold=True))
    for number in range(2):
        reader.reader.release(number)
    os.kill(bed.pid, signal.SIGCONT)
    assert [(done.id, done.held) for done in reader.results(3)] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    assert reader.close()
    assert not held_open(bed.path("small"))


def test_no_more_are_held_than_there_are_descriptors_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the one goes that was held longest."""
    allowed = 10 * paths.HELD_SHARE
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    for number in range(25):
        (tmp_path / f"f{number}").write_bytes(b"x" * 10)
    before = descriptors()
    reader = Reader(threads=2)
    for number in range(25):
        assert reader.read(tmp_path / f"f{number}", hold=True, expected=(number % 3, 0)).held
    held = [number for number in range(25) if held_open(tmp_path / f"f{number}")]
    assert held == list(range(15, 25))
    assert reader.close()
    assert descriptors() == before


def test_small_files_are_held_for_their_job_where_the_file_system_is_one_on_which_that_helps(
    tmp_path: Path, reader: Reader
) -> None:
    def want(name: str, on: FileSystem) -> Path:
        (tmp_path / name).write_bytes(b"x" * 100)
        assert reads.read(by, 5, name, on=on)
        return tmp_path / name

    bounds = ReadBounds(TokenBucket(None, 0), lambda: 1 << 40)
    link = Link(300e6, 1e-3)
    reads = SmallReads(reader.reader, MIB, Account(), lambda: link, bounds)
    by: Any = SimpleNamespace(path_of=lambda name: f"{tmp_path}/{name}", came=lambda *_: None)
    before = descriptors()
    other = want("other", FileSystem("other"))
    files = [want(f"f{i}", FileSystem("held", opens_held=True)) for i in range(12)]
    wait_until(lambda: not reads.reap() and all(map(held_open, files)), "the files")
    assert not held_open(other)
    reads.opened(5, "f3")
    wait_until(lambda: not held_open(files[3]), "the end of a job's read")
    assert sum(map(held_open, files)) == 11
    reads.leave(5)
    wait_until(lambda: descriptors() == before, "the end of all that was held")


# ---- what the page cache keeps ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "cold", "warm"),
    [
        ({}, Keeping.PAGES, Keeping.PAGES),
        ({"lookup_us": 300}, Keeping.PAGES, Keeping.PAGES),
        ({"keep_cache": False}, Keeping.WHILE_OPEN, Keeping.WHILE_OPEN),
        ({"direct_io": True}, Keeping.NOTHING, Keeping.NOTHING),
        ({"writers_behind": True}, Keeping.PAGES, Keeping.UNKNOWN),
        ({"writers_behind": True, "keep_cache": False}, Keeping.WHILE_OPEN, Keeping.WHILE_OPEN),
        ({"writers_behind": True, "direct_io": True}, Keeping.NOTHING, Keeping.NOTHING),
        ({"entry_seconds": 0.0, "lookup_us": 300}, Keeping.PAGES, Keeping.UNKNOWN),
    ],
    ids=str,
)
def test_a_probe_tells_what_a_mount_keeps(
    bed_of: Callable[..., SlowBed],
    reader: Reader,
    options: dict[str, object],
    cold: Keeping,
    warm: Keeping,
) -> None:
    bed = bed_of(**options)
    for expected in (cold, warm):
        done = reader.read(bed.path("small"), probe=True)
        assert done.probe is not None
        assert done.probe.keeping is expected, done.probe
        assert done.probe.cold.ns > 0 and done.bytes > 0


def test_a_probe_of_a_local_file_says_that_its_pages_are_kept(
    tmp_path: Path, reader: Reader
) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    done = reader.read(tmp_path / "file", probe=True)
    assert done.probe is not None and done.probe.keeping is Keeping.PAGES
    assert done.probe.file_system == file_systems.at(str(tmp_path))
    assert reader.read(tmp_path, probe=True).probe is None
    assert reader.read(tmp_path / "file").probe is None
