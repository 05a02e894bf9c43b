# SPDX-License-Identifier: Apache-2.0
"""Nothing grows: mappings, descriptors and memory over many attaches, slides and huge files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import require, wait_until
from harness import (
    MIB,
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
def agent_fds():
    time.sleep(0.01)  # it has woken us, and closes what it needed for that
    return len(os.listdir(f"/proc/self/task/{agents()[0]}/fd"))
def counts():
    maps = open("/proc/self/maps").read().count("\\n")
    return dict(
        maps=maps, fds=len(os.listdir("/proc/self/fd")),
        agent_fds=min(agent_fds() for _ in range(10)),
    )
m = Mapping(sys.argv[1]).managed()
m.unmap()
for number in range(rounds):
    m = Mapping(sys.argv[1])
    if number % 50 == 0:
        m.managed()
    m.unmap()
    if number in (rounds // 3, rounds - 1):
        kept = Mapping(sys.argv[1]).managed()
        said = counts()
        kept.unmap()
        say(number=number, pid=os.getpid(), **said)
        hear()
"""


def counts_of(work: Job) -> dict[str, int]:
    """What the job says of itself, and what /proc says of both processes."""
    line = work.line()
    said = {name: int(line[name]) for name in ("maps", "fds", "agent_fds")}
    said["service_fds"] = settle(lambda: fd_count(work.service()), "the service's descriptors")
    said["job_rss"] = rss_bytes(int(line["pid"]))
    said["service_rss"] = rss_bytes(work.service())
    work.tell()
    return said


def test_attaching_and_detaching_many_times_leaves_nothing_behind(
    job: Start, records: Records
) -> None:
    work = job(python(MANY_ATTACHES, records.path, ROUNDS))
    early, late = counts_of(work), counts_of(work)
    work.finish().good()
    for name in ("fds", "agent_fds", "service_fds"):
        assert late[name] <= early[name], (early, late)
    # the checkpoints that are laid at the moment of counting differ by some
    assert late["maps"] - early["maps"] <= 16, (early, late)
    for name in ("job_rss", "service_rss"):
        assert late[name] - early[name] < 2 * MIB, (early, late)


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
    work = job(python(code, path), options=("--policy", "none"))
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
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "the service to end")
    group.rmdir()


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
    """
    done = job(python(code, path), before=enter).finish().good()
    assert done.lines[-1]["digest"] == file_digest(path)
    assert done.summary is not None
    assert any("cgroup memory limit" in line for line in done.summary["degradations"])
    windows = [b["window_bytes"] for b in done.summary["timeline"]["bins"]]
    assert max(windows, default=0) <= 64 * MIB
