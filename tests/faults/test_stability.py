# SPDX-License-Identifier: Apache-2.0
"""Nothing grows: mappings, descriptors and memory over many attaches, slides and huge files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import require, wait_until
from harness import (
    MIB,
    OWN_DESCRIPTORS,
    Job,
    Records,
    Start,
    fd_count,
    file_digest,
    python,
    rss_bytes,
    settle,
    write_records,
)

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.slow

#: CI runs a small number; the full one is UFFDPREFETCH_TEST_ROUNDS=10000.
ROUNDS = int(os.environ.get("UFFDPREFETCH_TEST_ROUNDS", "600"))

MANY_ATTACHES = """
rounds = int(sys.argv[2])
def maps():
    return open("/proc/self/maps").read().count("\\n")
m = Mapping(sys.argv[1]).managed()
m.unmap()
for number in range(rounds):
    m = Mapping(sys.argv[1])
    if number % 50 == 0:
        m.managed()
    m.unmap()
    if number in (rounds // 3, rounds - 1):
        kept = Mapping(sys.argv[1]).managed()
        say(number=number, pid=os.getpid(), agent=agents()[0], maps=maps())
        hear()
        kept.unmap()
"""


def descriptors(work: Job, said: dict[str, Any]) -> dict[str, int]:
    """Of the job, of its agent, which has a table of its own, and of the service."""
    tables = {"job": said["pid"], "agent": said["agent"], "service": work.service()}
    return {name: fd_count(pid) for name, pid in tables.items()}


def memory(work: Job, said: dict[str, Any]) -> dict[str, int]:
    return {"job": rss_bytes(said["pid"]), "service": rss_bytes(work.service())}


def test_attaching_and_detaching_many_times_leaves_nothing_behind(
    job: Start, records: Records
) -> None:
    work = job(python(MANY_ATTACHES, records.path, ROUNDS))
    early = work.line()
    for name in ("job", "agent", "service"):
        settle(lambda name=name: descriptors(work, early)[name], f"the {name}'s descriptors")
    most, rss = descriptors(work, early), memory(work, early)
    most["service"] += OWN_DESCRIPTORS
    work.tell()
    late = work.line()

    # what is about to be closed may be open at one moment
    def few() -> bool:
        return all(now <= most[name] for name, now in descriptors(work, late).items())

    wait_until(few, lambda: f"no more descriptors than {most}: {descriptors(work, late)}")
    for name, now in memory(work, late).items():
        assert now - rss[name] < 2 * MIB, (rss, memory(work, late))
    # the checkpoints that are laid at the moment of counting differ by some
    assert late["maps"] - early["maps"] <= 16, (early, late)
    work.tell()
    work.finish().good()


def test_a_huge_sparse_file_stays_within_a_quarter_of_the_mappings(
    job: Start, tmp_path: Path
) -> None:
    path = tmp_path / "sparse"
    size = 240 << 30
    with open(path, "wb") as file:
        file.truncate(size)
    code = """
    m = Mapping(sys.argv[1]).managed()
    most = 0
    def walk(start):
        for at in range(start, start + (24 << 20), 65536):
            m.view[at]
    threads = [threading.Thread(target=walk, args=(m.length // 64 * i,)) for i in range(64)]
    for thread in threads:
        thread.start()
        most = max(most, open("/proc/self/maps").read().count("\\n"))
    while any(thread.is_alive() for thread in threads):
        most = max(most, open("/proc/self/maps").read().count("\\n"))
    say(most=most)
    """
    work = job(python(code, path))
    line = work.line()
    work.finish().good()
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert 0 < line["most"] <= limit // 4
    assert path.stat().st_blocks == 0, "holes were read, not filled"


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory cgroup of 256 MiB (v1 or v2)."""
    require(os.geteuid() == 0, "only root can make a memory cgroup")
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    base, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = base / f"uffdprefetch-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(256 * MIB))
    except OSError as error:
        require(False, f"no memory cgroup can be made here: {error}")
    yield group

    def removed() -> bool:
        with contextlib.suppress(OSError):  # EBUSY: the service is there, or is just ending
            group.rmdir()
        return not group.exists()

    wait_until(removed, "the service to end")


def test_in_a_small_memory_cgroup_windows_shrink_and_the_bytes_are_right(
    job: Start, memory_group: Path, tmp_path: Path
) -> None:
    path = tmp_path / "large.bin"
    write_records(path, 384 * MIB, seed=9)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    enter = ("sh", "-c", f'echo $$ > {memory_group}/cgroup.procs && exec "$@"', "sh")
    code = """
    m = Mapping(sys.argv[1])
    say(digest=m.digest())
    time.sleep(2.5)  # memory is asked once a second, and while a file is mapped it is too little
    """
    done = job(python(code, path), before=enter).finish().good()
    assert done.lines[-1]["digest"] == file_digest(path)
    assert done.summary is not None
    (note,) = [one for one in done.summary["degradations"] if "--budget" in one]
    assert note == (
        "less is read ahead than --budget allows: the memory limit of the job's control group "
        "leaves no more"
    )
    windows = [b["window_bytes"] for b in done.summary["timeline"]["bins"]]
    assert max(windows, default=0) <= 64 * MIB
