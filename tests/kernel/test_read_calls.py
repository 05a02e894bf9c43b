# SPDX-License-Identifier: Apache-2.0
"""Who is seen reading by system calls (sense/read_calls.py, csrc/service/reads.c): real processes
on the slow bed, where what they read takes time, and in the page cache, where it takes none."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, require, wait_until
from nobody import Nobody

from uffdprefetch.demo.bed import SlowBed, drop_cache, warm_fully, why_no_bed
from uffdprefetch.native.reads import ReadSensor, open_file
from uffdprefetch.sense.read_calls import LeftAlone, ReadCalls, ReadSeen

KIB, MIB = 1 << 10, 1 << 20
SIZE = 24 * MIB
#: Slow enough that each reader is looked at some dozens of times.
BANDWIDTH = 60_000_000


@pytest.fixture(scope="module")
def bed() -> Iterator[SlowBed]:
    reason = why_no_bed()
    require(reason is None, reason or "")
    with tempfile.TemporaryDirectory() as name:
        for file in ("a", "b"):
            (Path(name) / file).write_bytes(os.urandom(SIZE))
        with SlowBed(name, bandwidth=BANDWIDTH) as mounted:
            yield mounted


@pytest.fixture
def cold(bed: SlowBed) -> Path:
    """A file of which nothing is in memory."""
    for name in ("a", "b"):
        drop_cache(bed.path(name))
    return bed.path("a")


@pytest.fixture
def written() -> set[tuple[int, int]]:
    """Files that the job writes."""
    return set()


@pytest.fixture
def calls(written: set[tuple[int, int]]) -> Iterator[ReadCalls]:
    made = ReadCalls(written.__contains__)
    try:
        yield made
    finally:
        made.close()


def python(text: str, *words: object) -> list[str]:
    """A program that begins when it is told to, by a line."""
    text = "import os, sys; sys.stdin.readline()\n" + textwrap.dedent(text)
    return [sys.executable, "-c", text, *map(str, words)]


def shell(*words: object) -> list[str]:
    """The same with another one."""
    return ["sh", "-c", 'read line; exec "$@"', "sh", *map(str, words)]


class Running:
    """A process that is looked at from its beginning."""

    def __init__(self, calls: ReadCalls, words: list[str]) -> None:
        self.calls, self.seen = calls, list[ReadSeen]()
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.pid = self.process.pid
        calls.add(self.pid)
        wait_until(lambda: calls.sensor(self.pid)[0] is not ReadSensor.UNSEEN, "a look")
        self.say("begin")

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def until(self, condition: Callable[[], object], what: str) -> None:
        def look() -> object:
            select.select([self.calls], [], [], 0.02)
            self.seen += [one for one in self.calls.reap() if one.pid == self.pid]
            return condition()

        wait_until(look, what)

    def to_its_end(self) -> list[ReadSeen]:
        """What was seen of the two files of the bed."""
        self.until(lambda: self.process.poll() is not None, "its end")
        assert self.process.returncode == 0
        return [one for one in self.seen if one.path.endswith(("/a", "/b"))]


def run(calls: ReadCalls, words: list[str]) -> list[ReadSeen]:
    running = Running(calls, words)
    seen = running.to_its_end()
    calls.remove(running.pid)
    return seen


PREAD = """
fd = os.open(sys.argv[1], os.O_RDONLY)
for at in range(0, os.fstat(fd).st_size, 64 << 10):
    os.pread(fd, 64 << 10, at)
"""
PREADV = PREAD.replace("pread(fd, 64 << 10", "preadv(fd, [bytearray(64 << 10)]")
READV = """
fd, memory = os.open(sys.argv[1], os.O_RDONLY), bytearray(64 << 10)
while os.readv(fd, [memory]):
    pass
"""
SENDFILE = """
fd, to = os.open(sys.argv[1], os.O_RDONLY), os.open("/dev/null", os.O_WRONLY)
while os.sendfile(to, fd, None, 64 << 10):
    pass
"""
BUFFERED = """
with open(sys.argv[1], "rb") as file:
    while file.read(10000):
        pass
"""
#: Programs, or what Python does.
READ_BY = {
    "dd": ["dd", "of=/dev/null", "bs=64k", "status=none", "if={}"],
    "dd of 1 MiB": ["dd", "of=/dev/null", "bs=1M", "status=none", "if={}"],
    "cp": ["cp", "{}", "/dev/null"],
    "pread": PREAD,
    "preadv": PREADV,
    "readv": READV,
    "sendfile": SENDFILE,
    "Python's buffered read": BUFFERED,
}


@pytest.mark.parametrize("how", READ_BY)
def test_a_sequential_reader_is_proven_and_followed(how: str, cold: Path, calls: ReadCalls) -> None:
    does = READ_BY[how]
    if isinstance(does, str):
        seen = run(calls, python(does, cold))
    else:
        seen = run(calls, shell(*(word.format(cold) for word in does)))
    status = os.stat(cold)
    proven = [one for one in seen if one.proven]
    assert len(proven) > 5 and len(proven) >= len(seen) - 3
    assert {one.key for one in seen} == {(status.st_dev, status.st_ino)}
    assert {one.path for one in seen} == {str(cold)}
    at = 0
    for one in seen:
        assert at <= one.end <= one.asked_end <= one.size_bytes == SIZE
        assert one.start in (at, one.end), "what it reads is told once"
        at = one.end
    assert at > SIZE // 2


def test_one_large_read_says_what_it_asks_for(cold: Path, calls: ReadCalls) -> None:
    seen = run(calls, python("open(sys.argv[1], 'rb').read()", cold))
    assert {(one.start, one.end, one.proven) for one in seen} == {(0, 0, False)}
    assert {one.asked_end for one in seen} == {SIZE}
    assert len(seen) == 1, "the same call is told once"


def test_four_threads_are_four_streams(cold: Path, calls: ReadCalls) -> None:
    text = """
        import threading
        fd = os.open(sys.argv[1], os.O_RDONLY)
        part = os.fstat(fd).st_size // 4
        def read(begin):
            for at in range(begin, begin + part, 64 << 10):
                os.pread(fd, 64 << 10, at)
        threads = [threading.Thread(target=read, args=(n * part,)) for n in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    """
    seen = run(calls, python(text, cold))
    threads = {one.tid for one in seen if one.proven}
    assert len(threads) == 4
    quarters = [{one.start * 4 // SIZE for one in seen if one.tid == tid} for tid in threads]
    assert sorted(quarters, key=min) == [{0}, {1}, {2}, {3}]


def test_a_random_reader_is_seen_and_never_proven(cold: Path, calls: ReadCalls) -> None:
    text = """
        import random
        fd = os.open(sys.argv[1], os.O_RDONLY)
        pieces = os.fstat(fd).st_size >> 12
        for at in random.Random(1).sample(range(pieces), 300):
            os.pread(fd, 4096, at << 12)
    """
    seen = run(calls, python(text, cold))
    assert len(seen) > 20
    assert not [one for one in seen if one.proven]
    assert all(one.start == one.end and one.asked_end - one.end <= 4096 for one in seen)


def test_of_a_file_in_memory_next_to_nothing_is_seen(cold: Path, calls: ReadCalls) -> None:
    warm_fully(cold)
    twenty_times = "for _ in range(20):" + textwrap.indent(PREAD, "    ")
    seen = run(calls, python(twenty_times, cold))
    assert len(seen) < 5


def test_who_reads_a_pipe_in_between_is_proven_by_three(cold: Path, calls: ReadCalls) -> None:
    text = """
        fd, (there, here) = os.open(sys.argv[1], os.O_RDONLY), os.pipe()
        while os.read(fd, 64 << 10):
            os.write(here, b"x" * 100)
            os.read(there, 100)
    """
    seen = run(calls, python(text, cold))
    assert sum(one.proven for one in seen) > 5
    assert not any(one.proven for one in seen[:2])


def test_a_pipe_is_no_file(cold: Path, calls: ReadCalls) -> None:
    words = shell("sh", "-c", f"cat {cold} | cat > /dev/null; cat /dev/zero | head -c 9")
    assert run(calls, words) == []
    assert calls.left_alone == {}


def test_a_descriptor_with_another_file_is_another_stream(cold: Path, calls: ReadCalls) -> None:
    other = cold.with_name("b")
    twice = f"for _ in (1, 2):{textwrap.indent(PREAD, '    ')}    os.close(fd); sys.argv.pop(1)"
    seen = run(calls, python(twice, cold, other))
    assert len({one.fd for one in seen}) == 1
    assert {one.path for one in seen} == {str(cold), str(other)}
    assert {one.key[1] for one in seen} == {os.stat(cold).st_ino, os.stat(other).st_ino}
    first = next(one for one in seen if one.path == str(other))
    assert not first.proven


OPENED = {
    "O_DIRECT": (os.O_RDONLY | os.O_DIRECT, LeftAlone.DIRECT),
    "for writing": (os.O_RDWR, LeftAlone.WRITTEN),
}


@pytest.mark.parametrize("how", OPENED)
def test_who_does_not_want_the_page_cache_or_writes_is_left_alone(
    how: str, bed: SlowBed, calls: ReadCalls, tmp_path: Path
) -> None:
    flags, why = OPENED[how]
    text = f"""
        import mmap
        fd, memory = os.open(sys.argv[1], {flags}), mmap.mmap(-1, 65536)
        for _ in range(200):
            os.lseek(fd, 0, 0); os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            while os.readv(fd, [memory]): pass
            if os.path.exists(sys.argv[2]): break
    """
    path = bed.path("a") if flags & os.O_DIRECT else tmp_path / "on a disk"
    if not flags & os.O_DIRECT:
        require(not _on_memory(tmp_path), "TMPDIR is in memory: nobody waits there")
        path.write_bytes(os.urandom(SIZE))
        os.sync()
    seen = Running(calls, python(text, path, tmp_path / "enough"))
    seen.until(lambda: calls.left_alone, "it to be seen")
    (tmp_path / "enough").touch()
    assert seen.to_its_end() == []
    assert calls.left_alone == {str(path): why}


#: How a bed differs, and what is then said of a file that is read there.
BEDS = {
    "direct_io": ({"direct_io": True}, LeftAlone.UNCACHED),
    "attributes are not cached": ({"writers_behind": True}, None),
    "each open drops the pages": ({"keep_cache": False}, None),
}


@pytest.mark.parametrize("how", BEDS)
def test_where_no_page_is_waited_for_nothing_can_be_read_ahead(
    how: str, bed: SlowBed, calls: ReadCalls
) -> None:
    """Of one large call all the rest was read, to be thrown away."""
    options, why = BEDS[how]
    text = "fd = os.open(sys.argv[1], os.O_RDONLY)\nwhile os.read(fd, 8 << 20): pass"
    with SlowBed(bed.source, bandwidth=BANDWIDTH, **options) as other:  # type: ignore[arg-type]
        path = other.path("a")
        drop_cache(path)
        seen = run(calls, python(text, path))
        assert calls.left_alone == ({str(path): why} if why else {})
    assert bool(seen) == (why is None)


def _on_memory(path: Path) -> bool:
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True)
    return kind.stdout.strip() in ("tmpfs", "ramfs")


def test_a_file_that_the_job_writes_elsewhere_is_left_alone(
    cold: Path, calls: ReadCalls, written: set[tuple[int, int]]
) -> None:
    status = os.stat(cold)
    written.add((status.st_dev, status.st_ino))
    assert run(calls, python(PREAD, cold)) == []
    assert calls.left_alone == {str(cold): LeftAlone.WRITTEN}


def test_what_to_open_is_the_file(cold: Path, calls: ReadCalls) -> None:
    running = Running(calls, python(PREAD + "sys.stdin.readline()", cold))
    running.until(lambda: any(one.path == str(cold) for one in running.seen), "it to be seen")
    one = next(one for one in running.seen if one.path == str(cold))
    fd = os.open(one.link, os.O_PATH)
    status = os.fstat(fd)
    os.close(fd)
    assert (status.st_dev, status.st_ino) == one.key
    running.say("end")
    running.to_its_end()


# ---- processes and threads ----------------------------------------------------------------------


def test_a_process_that_ends_is_told_and_nothing_is_kept(cold: Path, calls: ReadCalls) -> None:
    before = len(os.listdir("/proc/self/fd"))
    running = Running(calls, python(PREAD, cold))
    running.until(lambda: running.seen, "it to be seen")
    running.process.kill()
    running.process.wait()
    wait_until(lambda: calls.sensor(running.pid)[0] is ReadSensor.ENDED, "its end to be seen")
    wait_until(lambda: calls.counts().descriptors == 0, "descriptors to be closed")
    calls.remove(running.pid)
    with pytest.raises(ProcessLookupError):
        calls.sensor(running.pid)
    with pytest.raises(ProcessLookupError):
        calls.add(running.pid)
    calls.reap()
    running.process.stdin.close()  # type: ignore[union-attr]
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_is_looked_at_after_it_has_run_another_program(cold: Path, calls: ReadCalls) -> None:
    words = python("os.execvp('cat', ['cat', sys.argv[1]])", cold)
    assert sum(one.proven for one in run(calls, words)) > 5


THREADS = """
    import threading
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(128)]
    [thread.start() for thread in threads]
    reader = threading.Thread(target=lambda: exec(sys.argv[2]))
    reader.start(); reader.join()
    end.set()
"""


@pytest.mark.parametrize("kept", [4, 1000])
def test_of_128_threads_the_one_that_reads_is_followed(kept: int, bed: SlowBed, cold: Path) -> None:
    calls = ReadCalls(lambda key: False, kept=kept)
    bed.set(bandwidth=BANDWIDTH // 4)  # with four descriptors a look takes its time
    try:
        running = Running(calls, python(THREADS, cold, PREAD))
        running.until(
            lambda: calls.counts().threads > 128 or running.process.poll() is not None,
            "all its threads to be seen",
        )
        most = 0

        def watch() -> bool:
            nonlocal most
            most = max(most, calls.counts().descriptors)
            return running.process.poll() is not None

        running.until(watch, "its end")
        proven = [one for one in running.to_its_end() if one.proven]
        assert len(proven) > 5 and len({one.tid for one in proven}) == 1
        assert proven[0].tid != running.pid
        assert most <= kept
    finally:
        bed.set(bandwidth=BANDWIDTH)
        calls.close()


def test_who_waits_for_storage_waits_and_who_computes_does_not(
    cold: Path, calls: ReadCalls
) -> None:
    reader = Running(calls, python(PREAD + "sys.stdin.readline()", cold))
    computing = Running(
        calls, python("import select\nwhile not select.select([0], [], [], 0)[0]: pass")
    )
    reader.until(lambda: calls.gate(reader.pid).share > 0.2, "it to wait")
    computing.until(lambda: calls.gate(computing.pid).looks > 8, "looks")
    assert calls.gate(computing.pid).share < 0.05
    for one in (reader, computing):
        one.say("end")
        one.to_its_end()


@pytest.mark.parametrize(
    ("code", "period_ns"),
    [
        ("fd = os.open(sys.argv[1], os.O_RDONLY)\nwhile os.read(fd, 65536): pass", 5_000_000),
        ("os.read(0, 1)", 50_000_000),
    ],
    ids=["who reads", "who does not"],
)
def test_how_often_a_process_is_looked_at(
    code: str, period_ns: int, cold: Path, calls: ReadCalls
) -> None:
    """Unless a look takes so long that it would be more than its part of a core."""
    running = Running(calls, python(code, cold))
    periods = set[int]()

    def is_so_often() -> bool:
        periods.add(calls.counts().period_ns)
        return period_ns in periods

    running.until(is_so_often, "a look after such a pause")
    running.process.kill()
    running.process.wait()


def test_no_more_processes_than_there_is_room_for() -> None:
    calls = ReadCalls(lambda key: False, kept=8)
    sleeping = [subprocess.Popen(["sleep", "100"]) for _ in range(3)]
    try:
        for process in sleeping[:2]:
            calls.add(process.pid)
        with pytest.raises(OSError, match="No space"):
            calls.add(sleeping[2].pid)
        calls.remove(sleeping[0].pid)
        wait_until(lambda: _added(calls, sleeping[2].pid), "room")
    finally:
        for process in sleeping:
            process.kill()
            process.wait()
        calls.close()


def _added(calls: ReadCalls, pid: int) -> bool:
    try:
        calls.add(pid)
    except OSError:
        return False
    return True


# ---- what may not be seen -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def nobody() -> Iterator[Nobody]:
    with tempfile.TemporaryDirectory() as directory:
        yield Nobody(Path(directory))


#: As another user: a child with this prctl(2) before it reads, looked at; prints by what and why.
LOOKED_AT = """
import ctypes, json, os, subprocess, sys, time
from uffdprefetch.native.reads import ReadSensor, open_file
from uffdprefetch.sense.read_calls import ReadCalls
child = '''import ctypes, sys
ctypes.CDLL(None).prctl(4, int(sys.argv[1]), 0, 0, 0)
print(flush=True)
sys.stdin.readline()'''
process = subprocess.Popen([sys.executable, '-c', child, sys.argv[1]],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE)
process.stdout.readline()
calls = ReadCalls(lambda key: False)
calls.add(process.pid)
while calls.sensor(process.pid)[0] is ReadSensor.UNSEEN:
    time.sleep(0.01)
sensor, why = calls.sensor(process.pid)
print(json.dumps([sensor.name, why]))
process.communicate(b'end')
calls.close()
"""


@pytest.mark.root
@pytest.mark.parametrize("dumpable", [0, 1])
def test_a_process_that_hides_is_left_with_the_reason(dumpable: int, nobody: Nobody) -> None:
    words = [*nobody.prefix, nobody.python, "-c", LOOKED_AT, str(dumpable)]
    done = subprocess.run(
        words, env=nobody.environment(dict(os.environ)), cwd=nobody.work,
        capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sensor, why = json.loads(done.stdout)
    if dumpable:
        assert (sensor, why) in [("SYSCALL", ""), ("FDINFO", why)]  # where Yama forbids it
    else:
        assert sensor == "REFUSED" and ("dumpable" in why or "yama" in why)


#: A file of the kernel's that nobody may read, root included (fs/kernfs/file.c,
#: KERNFS_ROOT_EXTRA_OPEN_PERM_CHECK): it takes the place of `syscall`, as Yama would have it.
UNREADABLE = "/sys/bus/cpu/uevent"
BY_POSITIONS = """
import ctypes, json, os, select, subprocess, sys
from uffdprefetch.sense.read_calls import ReadCalls
libc = ctypes.CDLL(None, use_errno=True)
process = subprocess.Popen(['sh', '-c', 'read line; exec "$@"', 'sh', *sys.argv[2:]],
                           stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
call = f'/proc/{process.pid}/task/{process.pid}/syscall'
if libc.mount(sys.argv[1].encode(), call.encode(), None, 4096, None):
    sys.exit(os.strerror(ctypes.get_errno()))
calls, seen = ReadCalls(lambda key: False), []
calls.add(process.pid)
while calls.sensor(process.pid)[0].name == 'UNSEEN':
    select.select([calls], [], [], 0.01)
sensor, why = calls.sensor(process.pid)
process.stdin.write(b'begin\\n')
process.stdin.close()
while process.poll() is None:
    select.select([calls], [], [], 0.02)
    seen += [one._asdict() for one in calls.reap()]
print(json.dumps([sensor.name, why, seen, libc.umount2(call.encode(), 2)]))
calls.close()
"""


def by_positions(words: list[str]) -> list[dict[str, object]]:
    """What is seen where system calls are not shown."""
    require(
        os.geteuid() == 0 and shutil.which("unshare"), "only root can mount over a file of /proc"
    )
    require(os.path.exists(UNREADABLE), f"no {UNREADABLE}")
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", BY_POSITIONS, UNREADABLE, *words],
        capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sensor, why, seen, _ = json.loads(done.stdout)
    assert sensor == "FDINFO" and why
    return list(seen)


@pytest.mark.root
def test_where_calls_are_not_shown_positions_are(cold: Path) -> None:
    seen = by_positions(["dd", f"if={cold}", "of=/dev/null", "bs=64k", "status=none"])
    seen = [one for one in seen if one["path"] == str(cold)]
    assert sum(bool(one["proven"]) for one in seen) > 5
    assert {one["tid"] for one in seen} == {0}
    assert not any(one["waiting"] for one in seen)
    ends = [one["end"] for one in seen]
    assert ends == sorted(ends) and SIZE // 2 < ends[-1] <= SIZE


@pytest.mark.root
def test_by_positions_a_file_is_seen_behind_many_pipes(cold: Path) -> None:
    """More than are followed, and they were there when descriptors were listed first."""
    text = """import os, sys, time
pipes = [os.pipe() for _ in range(100)]
os.write(pipes[0][1], b"x")
os.read(pipes[0][0], 1)
time.sleep(0.3)
fd = os.open(sys.argv[1], os.O_RDONLY)
while os.read(fd, 65536):
    pass
"""
    seen = by_positions([sys.executable, "-c", text, str(cold)])
    assert sum(bool(one["proven"]) for one in seen if one["path"] == str(cold)) > 5


@pytest.mark.root
def test_by_positions_a_pread_is_not_seen(cold: Path) -> None:
    seen = by_positions([sys.executable, "-c", "import os, sys" + PREAD, str(cold)])
    assert not [one for one in seen if one["path"] == str(cold)]


def test_descriptors_are_told_as_the_kernel_tells_their_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    with path.open("rb") as file:
        status, found = os.fstat(file.fileno()), open_file(os.getpid(), file.fileno())
    assert found == (status.st_dev, status.st_ino, 5000, status.st_mode)
    with pytest.raises(FileNotFoundError):
        open_file(os.getpid(), 1 << 20)
