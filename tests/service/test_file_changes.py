# SPDX-License-Identifier: Apache-2.0
"""The file is written, cut, replaced or removed during the run: reads show what a plain mapping
would show, once the mapping has been given back; and the summary says so, once."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from conftest import HANG_SECONDS, require
from harness import (
    MIB,
    Finished,
    Job,
    Records,
    Start,
    both_engines,
    file_digest,
    python,
    write_records,
)
from inside import CHECKPOINTS

from uffdprefetch.service import turn

pytest_plugins = ("harness_fixtures",)

READER = """
m = Mapping(sys.argv[1]).managed()
say(pid=os.getpid())
while True:
    word = hear()
    if word == "end":
        break
    if word == "forget":
        m.forget()
    if word == "plain":
        m.plain()
    if word == "touch the end":
        # in a child: it may die of it
        if os.fork() == 0:
            os._exit(0 if m.view[m.length - 1] is not None else 1)
        status = os.waitstatus_to_exitcode(os.wait()[1])
        say(status=status)
        continue
    length = min(m.length, os.stat(sys.argv[1]).st_size)
    say(digest=hashlib.sha256(m.view[:length]).hexdigest(), checkpoints=m.checkpoints())
"""


def ask(work: Job, word: str) -> dict[str, Any]:
    work.tell(word)
    return work.line()


def checkpoints(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(CHECKPOINTS)


def changes(done: Finished, path: Path) -> list[str]:
    """What the summary says of a change of the file."""
    assert done.status == 0 and done.summary is not None
    (file,) = [f for f in done.summary["files"] if f["path"] == str(path)]
    told = [d for d in done.summary["degradations"] if str(path) in d]
    assert len(told) == (0 if file["changed"] is None else 1), done.summary["degradations"]
    return told


def digest_of_first(path: Path, length: int) -> str:
    """SHA-256 of what a mapping of ``length`` bytes can show of the file as it is now."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(length)).hexdigest()


def leased(work: Job) -> None:
    """Skip where the service could not have a lease on the file."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    held = [f for f in locks if f[1] == "LEASE" and f[4] == str(work.service())]
    require(held, "no read lease on this file system")


def overwrite(path: Path) -> None:
    """Every page, in place: whoever opens the file sees other bytes."""
    with open(path, "r+b") as file:
        file.write(os.urandom(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, 5 * MIB + 100)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(bytes(MIB))


@both_engines
@pytest.mark.parametrize("change", [overwrite, cut, grow])
def test_a_local_writer_waits_until_the_mapping_is_given_back(
    job: Start, own_records: Records, change: Callable[[Path], None]
) -> None:
    path = own_records.path
    work = job(python(READER, path))
    pid = work.line()["pid"]
    assert ask(work, "look")["digest"] == own_records.digest
    leased(work)
    seen: list[int] = []

    def write() -> None:
        fd = os.open(path, os.O_RDWR)  # this waits for the lease
        seen.append(checkpoints(pid))
        os.close(fd)
        change(path)

    assert checkpoints(pid) > 0
    writer = Thread(target=write)
    writer.start()
    writer.join(HANG_SECONDS)
    assert seen == [0]  # no checkpoint was left when the writer was let in
    shown = digest_of_first(path, own_records.size_bytes)
    assert ask(work, "forget") == {"digest": shown, "checkpoints": 0}
    assert (shown == own_records.digest) == (change is grow)
    work.tell("end")
    (told,) = changes(work.finish(), path)
    assert "opened for writing during the run; given back" in told


@both_engines
def test_what_is_cut_off_is_sigbus_as_it_would_be_without_us(
    job: Start, own_records: Records
) -> None:
    work = job(python(READER, own_records.path))
    work.line()
    assert ask(work, "touch the end") == {"status": 0}
    cut(own_records.path)
    assert ask(work, "plain")["checkpoints"] == 0
    assert ask(work, "touch the end") == {"status": -signal.SIGBUS}
    assert ask(work, "look")["digest"] == file_digest(own_records.path)
    work.tell("end")
    assert work.finish().status == 0


@both_engines
def test_a_job_may_write_the_file_that_it_has_mapped(job: Start, own_records: Records) -> None:
    """Its open(2) waits for its own agent, which is another thread."""
    code = """
    m = Mapping(sys.argv[1]).managed()
    fd = os.open(sys.argv[1], os.O_RDWR)
    left = m.checkpoints()
    os.pwrite(fd, b"new" * 1000, 1 << 20)
    say(left=left, shown=bytes(m.view[1 << 20 : (1 << 20) + 6]).decode(), digest=m.digest())
    """
    work = job(python(code, own_records.path))
    line = work.line()
    assert line["left"] == 0 and line["shown"] == "newnew"
    assert line["digest"] == file_digest(own_records.path)
    work.finish().good()


@both_engines
@pytest.mark.parametrize("change", [overwrite, cut, grow])
def test_without_a_lease_the_mapping_is_given_back_at_the_next_look(
    job: Start, own_records: Records, change: Callable[[Path], None]
) -> None:
    """Root without CAP_LEASE on a file that is another's: size and mtime are looked at."""
    require(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    path = own_records.path
    os.chown(path, 1, 1)
    work = job(python(READER, path), before=("setpriv", "--bounding-set", "-lease"))
    work.line()
    change(path)
    shown = digest_of_first(path, own_records.size_bytes)
    assert ask(work, "plain") == {"digest": shown, "checkpoints": 0}
    work.tell("end")
    done = work.finish()
    (told,) = changes(done, path)
    assert ("modified" in told or "size" in told) and "given back" in told
    assert done.summary is not None
    (file,) = [f for f in done.summary["files"] if f["path"] == str(path)]
    assert "no lease" in file["change_guard"]


@both_engines
def test_without_a_lease_a_rank_that_may_write_ends_the_checkpoints_of_the_others(
    job: Start, own_records: Records
) -> None:
    """Nothing would tell of its first write: it says itself that it opened the file O_RDWR."""
    writer = """
    import mmap
    fd = os.open(sys.argv[1], os.O_RDWR)
    length = os.fstat(fd).st_size
    view = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ)
    say(first=view[0])
    hear()
    os.pwrite(fd, os.urandom(4 << 20), 1 << 20)
    say(shown=hashlib.sha256(view).hexdigest())
    """
    require(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    path = own_records.path
    os.chown(path, 1, 1)
    unleased = ("setpriv", "--bounding-set", "-lease")
    work = job(python(READER, path), before=unleased)
    pid = work.line()["pid"]
    assert checkpoints(pid) > 0
    other = job(python(writer, path), before=unleased)
    other.line()
    assert ask(work, "plain") == {"digest": own_records.digest, "checkpoints": 0}
    other.tell("write")
    shown = other.line()["shown"]
    assert shown == file_digest(path) != own_records.digest
    assert ask(work, "forget") == {"digest": shown, "checkpoints": 0}
    other.finish()
    work.tell("end")
    done = work.finish()
    assert done.status == 0 and done.summary is not None
    assert [d for d in done.summary["degradations"] if "O_RDWR" in d]


def test_it_is_looked_at_once_a_second() -> None:
    assert turn.HOUSEKEEPING_NS <= 1_000_000_000


@both_engines
def test_a_file_replaced_by_rename_is_another_file(
    job: Start, own_records: Records, tmp_path: Path
) -> None:
    path = own_records.path
    work = job(python(READER, path))
    work.line()
    new = write_records(tmp_path / "new.bin", 6 * MIB, seed=9)
    os.rename(tmp_path / "new.bin", path)
    other = job(python(READER, path))
    other.line()
    assert ask(other, "forget")["digest"] == new
    work.tell("forget")
    line = work.line()  # of the first 6 MiB: the reader asks for the size of what has the name now
    assert line["checkpoints"] > 0
    assert line["digest"] != new
    for one in (work, other):
        one.tell("end")
    assert other.finish().status == 0
    done = work.finish()
    assert done.status == 0
    summary = done.summary
    assert summary is not None
    assert all(file["changed"] is None for file in summary["files"])


@both_engines
def test_a_file_that_is_removed_is_still_the_same_file(job: Start, own_records: Records) -> None:
    code = """
    m = Mapping(sys.argv[1]).managed()
    os.unlink(sys.argv[1])
    more = faults_again(m)
    say(digest=m.digest(), more=more, checkpoints=m.checkpoints())
    """
    work = job(python(code, own_records.path))
    line = work.line()
    assert line["digest"] == own_records.digest
    assert line["more"] > 0 and line["checkpoints"] > 0
    work.finish().good()


@both_engines
def test_nothing_is_laid_over_a_file_that_somebody_has_open_for_writing(
    job: Start, own_records: Records
) -> None:
    code = """
    m = Mapping(sys.argv[1])
    say(digest=m.digest())
    while hear() != "end":
        m.forget()
        say(digest=m.digest(), checkpoints=m.checkpoints())
    """
    path = own_records.path
    with open(path, "r+b") as writer:
        work = job(python(code, path))
        assert work.line()["digest"] == own_records.digest
        for n in range(5):
            writer.seek(n * 2 * MIB)
            writer.write(os.urandom(MIB))
            writer.flush()
            work.tell("look")
            assert work.line() == {"digest": file_digest(path), "checkpoints": 0}
    work.tell("end")
    done = work.finish()
    assert done.status == 0 and done.summary is not None
    assert done.summary["rung"] in (2, None)
    assert [d for d in done.summary["degradations"] if "writer" in d or "writing" in d]


@both_engines
def test_ranks_that_map_a_file_again_after_a_change_see_the_new_one(
    job: Start, own_records: Records
) -> None:
    """The checkpoint pages of the old bytes are never used for the new ones."""
    code = """
    while True:
        m = Mapping(sys.argv[1]).managed()
        m.forget()
        say(digest=m.digest())
        if hear() == "end":
            break
        m.unmap()
    """
    path = own_records.path
    work = job(python(code, path))
    for n in range(3):
        assert work.line()["digest"] == file_digest(path)
        with open(path, "r+b") as file:
            file.seek(n * MIB)
            file.write(os.urandom(4 * MIB))
        work.tell("again" if n < 2 else "end")
    assert work.finish().status == 0
