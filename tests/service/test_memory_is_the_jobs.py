# SPDX-License-Identifier: Apache-2.0
"""Memory is the job's: what is ours gives way to it, and goes before it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cgroups import entering, kills, memory_group
from conftest import process_gone, wait_until
from harness import MIB, Records, Start, memfd_bytes, python, write_records

from uffdprefetch.base.oom import SCORE_LATER, SCORE_MOST

pytest_plugins = ("harness_fixtures",)

LIMIT_BYTES = 200 * MIB
POOL = ("--engine", "pool", "--budget", "150MiB")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """A file of a large part of the group."""
    path = tmp_path_factory.mktemp("large") / "large.bin"
    return Records(path, write_records(path, 80 * MIB, seed=21), 80 * MIB)


@pytest.fixture
def cold(large: Records) -> Records:
    """The same, and not in the page cache."""
    fd = os.open(large.path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return large


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup."""
    with memory_group(LIMIT_BYTES) as group:
        yield group


def children(pid: int) -> list[int]:
    """The children of a process, of any of its threads, the oldest first."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def canaries(service: int) -> list[int]:
    """The processes that the kernel's OOM killer is to take first."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children(service)}
    return [pid for pid, name in names.items() if name == "uffd-canary"]


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


# ---- who goes first ------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, 300])
@pytest.mark.parametrize("options", [(), POOL], ids=["cache", "pool"])
def test_ours_go_before_the_job_which_keeps_its_own_score(
    job: Start, records: Records, given: int, options: tuple[str, ...]
) -> None:
    """Nor has the launcher another one: by its status the job's is known."""
    code = """
    m = Mapping(sys.argv[1])
    say(score=int(open("/proc/self/oom_score_adj").read()), pid=os.getpid())
    hear()
    """
    before = ("sh", "-c", f'echo {given} > /proc/self/oom_score_adj && exec "$@"', "sh")
    work = job(python(code, records.path), options=options, before=before)
    line = work.line()
    assert line["score"] == given == score(work.process.pid)
    service = work.service()
    # where there are canaries they go before the service, and both before the job
    assert given < score(service) <= SCORE_MOST
    assert all(score(canary) == SCORE_MOST for canary in canaries(service))
    (bystander,) = set(children(work.process.pid)) - {service, line["pid"]}
    assert score(bystander) == SCORE_LATER
    work.tell()
    assert work.finish().status == 0


READER = """
m = Mapping(sys.argv[1])
say(digest=m.digest(), pooled=m.pooled())
hear()
say(digest=m.digest())
"""


def test_a_killed_canary_frees_the_pools_memory_and_the_pool_goes_on(
    job: Start, cold: Records
) -> None:
    """It stands for the kernel's OOM killer, which takes it first."""
    work = job(python(READER, cold.path), options=("--engine", "pool", "--budget", "256MiB"))
    assert work.line() == {"digest": cold.digest, "pooled": True}
    service = work.service()
    wait_until(lambda: memfd_bytes(service) > 48 * MIB, "the pool to be full")
    first = canaries(service)
    assert len(first) > 1
    os.kill(first[0], signal.SIGKILL)
    wait_until(lambda: memfd_bytes(service) < 8 * MIB, "the pool's memory to be free")
    wait_until(lambda: process_gone(first[0]), "the canary's end")
    assert canaries(service) == first[1:]
    work.tell()
    assert work.line() == {"digest": cold.digest}
    assert work.finish().good().summary is not None


def test_where_a_canary_dies_and_the_pool_has_nothing_the_service_goes_before_the_job(
    job: Start, records: Records
) -> None:
    code = """
    m = Mapping(sys.argv[1])
    say(first=m.view[0])
    hear()
    say(digest=m.digest())
    """
    work = job(python(code, records.path), options=POOL)
    work.line()
    service = work.service()
    alive = canaries(service)
    os.kill(alive[0], signal.SIGKILL)
    wait_until(lambda: process_gone(service), "the service's end")
    wait_until(lambda: all(map(process_gone, alive)), "the end of all canaries")
    work.tell()
    assert work.line() == {"digest": records.digest}
    done = work.finish()
    assert done.status == 0
    assert "the service ended during the run, to leave its memory to the job" in done.stderr


# ---- in a small group ----------------------------------------------------------------------------

#: Reads its file, takes memory of its own, so much at once, and reads again.
TAKES = """
m = Mapping(sys.argv[1])
before = m.digest()
own = []
for _ in range(0, int(sys.argv[2]), int(sys.argv[3])):
    own.append(b"x" * (int(sys.argv[3]) << 20))
say(before=before, after=m.digest())
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("engine", "take_mib", "at_once_mib"),
    [("pool", 140, 4), ("pool", 140, 140), ("pool", 165, 5), ("cache", 165, 5)],
    ids=["pool, grows", "pool, bursts", "pool, leaves 20 MiB", "cache, leaves 20 MiB"],
)
def test_the_job_has_the_memory_that_it_would_have_without_us(
    job: Start, group: Path, cold: Records, engine: str, take_mib: int, at_once_mib: int
) -> None:
    """The job's interpreter has some 10 MiB of its own."""
    work = job(
        python(TAKES, cold.path, take_mib, at_once_mib),
        options=("--engine", engine, "--budget", "150MiB"),
        before=entering(group),
    )
    done = work.finish()
    assert (done.status, done.lines) == (0, [{"before": cold.digest, "after": cold.digest}]), (
        done.stderr
    )


@pytest.mark.root
def test_a_pool_gives_way_to_a_job_that_grows_before_the_kernel_kills(
    job: Start, group: Path, cold: Records
) -> None:
    """Canaries are for bursts only: the kernel's count of kills is what a job manager looks at."""
    code = """
    m = Mapping(sys.argv[1])
    before, own = m.digest(), []
    for _ in range(28):
        own.append(b"x" * (5 << 20))
        time.sleep(0.05)
    say(before=before, after=m.digest())
    """
    work = job(
        python(code, cold.path),
        options=("--engine", "pool", "--budget", "150MiB"),
        before=entering(group),
    )
    done = work.finish().good()
    assert done.lines == [{"before": cold.digest, "after": cold.digest}]
    assert kills(group) == 0


@pytest.mark.root
def test_where_there_is_no_room_for_a_service_none_is_started(job: Start, records: Records) -> None:
    code = "m = Mapping(sys.argv[1])\nsay(digest=m.digest(), pooled=m.checkpoints() > 0)"
    with memory_group(40 * MIB) as group:
        work = job(python(code, records.path), before=entering(group))
        done = work.finish().good()
    assert done.lines == [{"digest": records.digest, "pooled": False}]
    (line,) = done.stderr.splitlines()
    assert line.startswith("uffdprefetch: running the job without prefetching: no service: ")
    assert "are left in the memory cgroup, it needs" in line


# ---- a dead service's memory ---------------------------------------------------------------------


@pytest.mark.root
def test_what_a_dead_service_leaves_in_a_process_that_bypasses_libc_is_freed_and_stays_small(
    job: Start, cold: Records
) -> None:
    """Its own thread answers for the pool then, and where that is slow the guardian, too: each has
    16 MiB of it at the most."""
    code = """
    m = Mapping(sys.argv[1])
    def held():
        folder = "/proc/self/map_files"
        (name,) = [n for n in os.listdir(folder) if int(n.split("-")[0], 16) == m.address]
        return os.stat(f"{folder}/{name}").st_blocks * 512
    # as UCX and others do: the first bytes of our function are theirs
    preload = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
    function = ctypes.cast(preload.munmap, ctypes.c_void_p)
    page = function.value & -PAGE
    checked(libc.mprotect(page, PAGE, 7), "mprotect")
    nop = {"x86_64": bytes((0x0f, 0x1f, 0x40, 0)), "aarch64": bytes((0x1f, 0x20, 3, 0xd5))}
    ctypes.memmove(function.value, nop[os.uname().machine], 4)
    say(digest=m.digest(), pooled=m.pooled(), held=held())
    hear()
    until(lambda: held() <= 16 << 20, "its memory to be free")
    say(digest=m.digest(), pooled=m.pooled(), held=held())
    """
    work = job(python(code, cold.path), options=("--engine", "pool", "--budget", "256MiB"))
    line = work.line()
    assert (line["digest"], line["pooled"]) == (cold.digest, True)
    assert line["held"] > 48 * MIB
    work.kill_service()
    work.tell()
    line = work.line()
    assert (line["digest"], line["pooled"]) == (cold.digest, True)
    assert line["held"] <= 32 * MIB
    assert work.finish().status == 0
