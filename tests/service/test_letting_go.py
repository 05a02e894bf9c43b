# SPDX-License-Identifier: Apache-2.0
"""The service holds no file that nobody maps: its space is free when it is deleted, its file system
can be unmounted; and when it is mapped again all is as if it had been held."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_until
from disks import disk
from harness import MIB, Job, Records, Start, both_engines, file_digest, python

from uffdprefetch.native.pool import Pool
from uffdprefetch.native.uffd import WarmResult

pytest_plugins = ("harness_fixtures",)

READER = """
while True:
    word, _, path = hear().partition(" ")
    if word == "end":
        break
    if word == "map":
        m = Mapping(path).managed()
        say(digest=m.digest())
    elif word == "unmap":
        m.unmap()
        say(ok=True)
    elif word == "unlink":
        os.unlink(path)
        say(ok=True)
"""


def opened(pid: int, path: Path) -> list[str]:
    """The descriptors and mappings of a file that a process has, the file deleted or not."""
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    maps = Path(f"/proc/{pid}/maps").read_text()
    names += [line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line]
    return [name for name in names if name.removesuffix(" (deleted)") == str(path)]


def told(work: Job, word: str, path: Path) -> dict[str, object]:
    work.tell(f"{word} {path}")
    return work.line()


def held(work: Job, path: Path) -> list[str]:
    return opened(work.service(), path)


@both_engines
def test_a_deleted_file_is_let_go_when_nobody_maps_it(job: Start, own_records: Records) -> None:
    path = own_records.path
    work = job(python(READER))
    assert told(work, "map", path)["digest"] == own_records.digest
    assert held(work, path)  # it was served
    told(work, "unlink", path)
    told(work, "unmap", path)
    wait_until(lambda: not held(work, path), "the service to close the deleted file")
    work.tell("end")
    summary = work.finish().good().summary
    assert summary is not None
    assert str(path) in [f["path"] for f in summary["files"]]  # its numbers are kept


@both_engines
def test_a_file_that_nobody_maps_is_closed_and_opened_again(
    job: Start, own_records: Records
) -> None:
    path = own_records.path
    work = job(python(READER))
    for _ in range(3):
        assert told(work, "map", path)["digest"] == own_records.digest
        assert held(work, path)
        told(work, "unmap", path)
        wait_until(lambda: not held(work, path), "the service to close the file")
    work.tell("end")
    summary = work.finish().good().summary
    assert summary is not None
    (file,) = [f for f in summary["files"] if f["path"] == str(path)]
    assert file["changed"] is None


def test_the_pool_keeps_the_pages_of_a_file_that_nobody_maps(
    job: Start, own_records: Records
) -> None:
    work = job(python(READER), UFFDPREFETCH_ENGINE="pool", UFFDPREFETCH_BUDGET="64MiB")
    for _ in range(2):
        assert told(work, "map", own_records.path)["digest"] == own_records.digest
        told(work, "unmap", own_records.path)
        wait_until(lambda: not held(work, own_records.path), "the service to close the file")
    work.tell("end")
    summary = work.finish().good().summary
    assert summary is not None
    (file,) = [f for f in summary["files"] if f["path"] == str(own_records.path)]
    assert file["pool_read_bytes"] == file["pool_unique_bytes"] <= own_records.size_bytes + MIB


@both_engines
def test_what_was_written_while_nobody_mapped_it_is_seen(job: Start, own_records: Records) -> None:
    """Also where size and mtime are as they were: who writes cannot set ctime back."""
    path = own_records.path
    work = job(python(READER))
    assert told(work, "map", path)["digest"] == own_records.digest
    told(work, "unmap", path)
    wait_until(lambda: not held(work, path), "the service to close the file")
    before = path.stat()
    with open(path, "r+b") as file:
        for at in range(0, own_records.size_bytes, 4096):
            file.seek(at)
            file.write(b"other bytes")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    new = file_digest(path)
    assert new != own_records.digest
    assert told(work, "map", path)["digest"] == new
    work.tell("end")
    work.finish().good()


def test_the_pool_closes_a_parked_file_and_reads_on_when_it_is_mapped_again(
    own_records: Records,
) -> None:
    def done(number: int, offset: int) -> WarmResult:
        assert pool.submit(offset + 1, number, offset, MIB)
        results: list[WarmResult] = []
        wait_until(lambda: results.extend(pool.reap()) or results, "the pool to read")
        return results[0]

    pool = Pool(64 * MIB, 64 << 10, 2, os.eventfd(0))
    fd = os.open(own_records.path, os.O_RDONLY)
    try:
        number, memfd = pool.add_file(fd, own_records.size_bytes)
        assert done(number, 0).error == 0
        ours = [str(own_records.path)]  # fd
        assert opened(os.getpid(), own_records.path) != ours
        pool.hush_file(number)
        assert pool.park_file(number)
        wait_until(lambda: opened(os.getpid(), own_records.path) == ours, "the file to be closed")
        pool.unpark_file(number, fd)
        assert done(number, 4 * MIB).error == 0
        with open(own_records.path, "rb") as file:
            for at in (0, 4 * MIB):
                file.seek(at)
                assert os.pread(memfd, MIB, at) == file.read(MIB)
        assert pool.counts().read_bytes == 2 * MIB  # what was there was kept
        os.close(memfd)
    finally:
        os.close(fd)
        pool.close()


def test_an_agent_holds_a_file_only_while_it_is_mapped(job: Start, own_records: Records) -> None:
    path = own_records.path
    more = "    elif word == 'agents': say(agents=agents(), pid=os.getpid())\n"
    work = job(python(READER + more))
    told(work, "map", path)
    who = told(work, "agents", path)

    def by_agents() -> list[str]:
        found = []
        for tid in who["agents"]:  # type: ignore[attr-defined]
            found += opened(tid, path)  # its own table of descriptors
        return found

    assert who["agents"] and by_agents()
    told(work, "unmap", path)
    wait_until(lambda: not by_agents(), "the agent to close the file")
    work.tell("end")
    work.finish().good()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 64 MiB of its own."""
    with disk("ext4", tmp_path) as root:
        yield root


@both_engines
def test_a_job_that_stages_and_deletes_shards_does_not_run_out_of_space(
    job: Start, small_disk: Path
) -> None:
    """One shard at a time fits twice, not five times."""
    code = """
        block = os.urandom(1 << 20)
        for i in range(8):
            path = f"{sys.argv[1]}/shard{i}"
            def space():
                st = os.statvfs(sys.argv[1])
                return st.f_bavail * st.f_frsize >= 20 << 20
            # plain, the space is there at once; what we hold is to come back
            until(space, "room for another shard")
            with open(path, "wb") as file:
                for _ in range(18):
                    file.write(block)
            m = Mapping(path).managed()
            assert bytes(m.view[:1 << 20]) == block
            m.digest()
            m.unmap()
            os.unlink(path)
        say(shards=8)
    """
    done = job(python(code, small_disk)).finish().good()
    assert done.lines == [{"shards": 8}]


@pytest.mark.parametrize("ending", ["", "; m.unmap()"], ids=["mapped", "unmapped"])
def test_a_job_can_unmount_the_disk_when_its_reader_has_ended(
    job: Start, small_disk: Path, ending: str
) -> None:
    """When a read of the service's that was under way has ended, also where the reader has unmapped
    it just before its end."""
    path = small_disk / "records.bin"
    path.write_bytes(os.urandom(24 * MIB))
    reader = python(f"m = Mapping(sys.argv[1]).managed(); m.digest(){ending}", path)
    script = '"$@" && until umount "$0" 2>/dev/null; do sleep 0.01; done'
    done = job(["sh", "-c", script, str(small_disk), *reader]).finish()
    assert done.status == 0, done.stderr
    assert not os.path.ismount(small_disk)
    assert done.summary is not None and done.summary["files"], "it was not served"
