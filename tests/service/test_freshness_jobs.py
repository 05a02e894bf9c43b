# SPDX-License-Identifier: Apache-2.0
"""Jobs whose file is written by somebody whom no lease holds, or who have a child that nobody saw
fork: what they read becomes what read(2) gives, and stays so.

How long that takes is noted with each test (``lag_seconds``) and judged nowhere.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import process_gone, process_state, require, wait_until
from harness import MIB, Job, Records, Start, both_engines, file_digest, python, snapshot

from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytest_plugins = ("harness_fixtures",)

#: It says what it reads once that is what read(2) gives; until then it looks again and again.
READER = """
from inside import CHECKPOINTS
path = sys.argv[1]
m = Mapping(path).managed()
m.digest()
say(pid=os.getpid(), checkpoints=m.checkpoints())
while hear() != "end":
    began = time.monotonic()
    def same():
        with open(path, "rb") as file:
            return file.read() == m.view
    until(same, "the bytes that read(2) gives")
    say(digest=m.digest(), lag=time.monotonic() - began, checkpoints=m.checkpoints())
"""

#: The same by a child that raw clone(2) makes: no handler runs, no agent is there, nothing is told.
UNSEEN = """
CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
path = sys.argv[1]
m = Mapping(path).managed()
m.digest()
wake = os.pipe()
if libc.syscall(CLONE, 17, 0, 0, 0, 0):
    os.read(wake[0], 1)
    os._exit(0)
fd = os.open(path, os.O_RDONLY)
def pages():
    with open("/proc/self/maps") as file:
        for line in file:
            if CHECKPOINTS in line:
                start, _, end = line.split()[0].partition("-")
                yield from range(int(start, 16) - m.address, int(end, 16) - m.address, PAGE)
def old():
    return [at for at in pages() if os.pread(fd, PAGE, at) != m.view[at : at + PAGE]]
say(pid=os.getpid(), checkpoints=m.checkpoints())
while (word := hear()) != "end":
    if word == "orphan":
        os.write(wake[1], b"x")
        continue
    began = time.monotonic()
    until(lambda: not old(), "the bytes that read(2) gives")
    say(checkpoints=m.checkpoints(), lag=time.monotonic() - began)
os._exit(0)
"""


def overwrite(path: Path, *, times_back: bool = False) -> None:
    """Other bytes everywhere; ``times_back``: as rsync, tar and cp -p leave it."""
    with open(path, "r+b") as file:
        before = os.fstat(file.fileno())
        file.write(os.urandom(before.st_size))
        file.flush()
        if times_back:
            os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))


Note = Callable[[str, object], None]


def ask(work: Job, record: Note) -> dict[str, Any]:
    work.tell("look")
    line = work.line()
    record("lag_seconds", round(line["lag"], 3))
    return line


def test_a_child_that_nobody_saw_fork_reads_what_a_writer_has_written(
    job: Start, own_records: Records, record_property: Note
) -> None:
    """Also when all whom the service knew have gone: it stays as long as the child."""
    work = job(python(UNSEEN, own_records.path))
    child = work.line()
    assert child["checkpoints"] > 0
    service = work.service()
    for orphaned in (False, True):
        if orphaned:
            work.tell("orphan")
            wait_until(lambda: work.process.poll() is not None, "the end of the parent")
        for _ in range(2):
            overwrite(own_records.path)
            line = ask(work, record_property)
            assert line["checkpoints"] == child["checkpoints"]  # it cannot be told
    assert process_state(service)
    work.tell("end")
    wait_until(lambda: process_gone(service), "the service's end after the child's")


@both_engines
def test_without_a_lease_a_writer_that_puts_the_times_back_is_found_by_the_bytes(
    job: Start, own_records: Records, record_property: Note
) -> None:
    """Root without CAP_LEASE on a file that is another's."""
    require(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    os.chown(own_records.path, 1, 1)
    work = job(python(READER, own_records.path), before=("setpriv", "--bounding-set", "-lease"))
    assert work.line()["checkpoints"] > 0
    overwrite(own_records.path, times_back=True)
    assert ask(work, record_property)["digest"] == file_digest(own_records.path)
    work.tell("end")
    done = work.finish()
    assert done.summary is not None
    (file,) = done.summary["files"]
    assert file["changed"] == "its bytes have changed"
    assert "no lease" in file["change_guard"]
    assert done.summary["totals"]["freshness"]["differing_pages"] > 0


@both_engines
@pytest.mark.parametrize("how", ["chmod", "link"])
def test_what_moves_ctime_alone_ends_nothing(job: Start, own_records: Records, how: str) -> None:
    path = own_records.path
    work = job(python(READER, path))
    before = work.line()["checkpoints"]
    assert before > 0
    path.chmod(0o600) if how == "chmod" else os.link(path, path.with_suffix(".again"))

    def compared() -> bool:
        return any(file.compared_pages for file in snapshot(work.env).files)

    wait_until(compared, "its bytes to be compared")
    work.tell("look")
    assert work.line()["digest"] == own_records.digest
    work.tell("look")
    assert work.line()["checkpoints"] > 0
    work.tell("end")
    done = work.finish().good()
    assert done.summary is not None
    (file,) = done.summary["files"]
    assert file["changed"] is None


@both_engines
def test_a_process_that_was_stopped_while_somebody_wrote_reads_the_new_bytes(
    job: Start, own_records: Records, record_property: Note
) -> None:
    """It could not give its mapping back in time, and the writer was let in all the same."""
    work = job(python(READER, own_records.path))
    pid = work.line()["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: process_state(pid) == "T", "the job to stop")
    overwrite(own_records.path)
    os.kill(pid, signal.SIGCONT)
    assert ask(work, record_property)["digest"] == file_digest(own_records.path)
    work.tell("end")
    assert work.finish().status == 0


@pytest.fixture
def shared_bed(own_records: Records) -> Iterator[SlowBed]:
    """The directory of ``own_records``, which another machine may write."""
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(own_records.path.parent, bandwidth=0, latency_us=0, writers_behind=True) as bed:
        yield bed


@both_engines
@pytest.mark.parametrize("frozen", [True, False], ids=["no time moves", "times move"])
def test_what_another_machine_writes_is_read(
    job: Start, own_records: Records, shared_bed: SlowBed, record_property: Note, frozen: bool
) -> None:
    path = shared_bed.path(own_records.path.name)
    work = job(python(READER, path))
    assert work.line()["checkpoints"] > 0
    shared_bed.freeze_times(frozen)
    shared_bed.write_behind(path.name, 0, os.urandom(own_records.size_bytes))
    assert ask(work, record_property)["digest"] == file_digest(own_records.path)
    work.tell("end")
    done = work.finish()
    assert done.summary is not None
    # with other times it is another file to who follows the job's read(2) of it
    told = {file["changed"] for file in done.summary["files"]} - {None}
    assert told == {"its bytes have changed" if frozen else "modified"}


def test_one_checkpoint_page_written_by_another_machine_is_read(
    job: Start, own_records: Records, shared_bed: SlowBed, record_property: Note
) -> None:
    """Every MiB, where checkpoints lie: one of them is enough to find it out."""
    path = shared_bed.path(own_records.path.name)
    work = job(python(READER, path))
    assert work.line()["checkpoints"] > 0
    shared_bed.freeze_times(True)
    for at in range(0, own_records.size_bytes, MIB):
        shared_bed.write_behind(path.name, at, b"another machine")
    assert ask(work, record_property)["digest"] == file_digest(own_records.path)
    work.tell("end")
    assert work.finish().status == 0


#: Of a path where another file lies by now: half is read before and half after, by the mapping, by
#: one that a child inherits and by one that is made of the descriptor anew.
REPLACED = """
import mmap
path, other = sys.argv[1:]
fd = os.open(path, os.O_RDONLY)
m = Mapping(fd).managed()
half = m.length // 2
def old(mapping):
    return mapping.view[half:] == before[half:]
before = b"".join(os.pread(fd, half, at) for at in (0, half))
_ = m.view[:half] == before[:half]
os.posix_fadvise(fd, half, half, os.POSIX_FADV_DONTNEED)
say(pid=os.getpid())
hear()
past_us = libc.syscall  # which the interposers do not see
past_us.restype = ctypes.c_long
SYS_mmap = {"x86_64": 9, "aarch64": 222}[os.uname().machine]
sentinel = os.open(other, os.O_RDONLY)
length = os.fstat(sentinel).st_size
call = [ctypes.c_long(n) for n in (0, length, PROT_READ, MAP_SHARED, sentinel, 0)]
checked(past_us(SYS_mmap, *call), "mmap")
say(mapped=True)
hear()
found = {"mapping": old(m), "again": old(Mapping(fd))}
child = os.fork()
if not child:
    os._exit(0 if old(m) else 9)
found["child"] = os.waitpid(child, 0)[1] == 0
say(found=found)
"""


@both_engines
def test_a_file_that_was_replaced_is_read_to_its_end_as_it_was_mapped(
    job: Start, own_records: Records, shared_bed: SlowBed
) -> None:
    """On a file system whose pages go by path: what is opened after the rename is the new file, and
    its pages are the mapping's. The mapping past libc shows that the service has looked at what
    nobody tells it of."""
    path, other = shared_bed.path(own_records.path.name), own_records.path.parent / "other"
    other.write_bytes(os.urandom(own_records.size_bytes))
    sentinel = own_records.path.parent / "sentinel"
    sentinel.write_bytes(os.urandom(2 * MIB))
    work = job(python(REPLACED, path, shared_bed.path(sentinel.name)))
    work.line()
    os.replace(other, own_records.path)

    def changed() -> bool:
        return any(f.changed and not f.mappings for f in snapshot(work.env).files)

    wait_until(changed, "the mapping to be given back")
    work.tell("map")
    work.line()

    def seen() -> bool:
        return any(f.path.endswith(sentinel.name) for f in snapshot(work.env).files)

    wait_until(seen, "the service to look at mappings that nobody told of")
    work.tell("read")
    assert work.line()["found"] == {"mapping": True, "again": True, "child": True}
    done = work.finish()
    assert done.status == 0 and done.summary is not None
    assert not any("libc's functions" in note for note in done.summary["degradations"])
