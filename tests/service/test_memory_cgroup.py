# SPDX-License-Identifier: Apache-2.0
"""A job in a memory cgroup that is smaller than its file: who pays for what is read ahead.

The service is in its launcher's group, so pages that it reads are charged where the job's own reads
would be. What it has ahead must stay so small that the kernel does not take it away again unread,
however much of the group the job itself has.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cgroups import entering, kills, memory_group
from conftest import require
from harness import MIB, Finished, Records, Start, file_digest, python, write_records

from uffdprefetch.demo.bed import SlowBed, why_no_bed
from uffdprefetch.native.memory_limits import CGROUP_SHARE
from uffdprefetch.report.summary import short_lines

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.root

LIMIT_BYTES = 256 * MIB


#: Reads by a CPU that takes its time: without a bound as much would be ahead as the group has.
BEFORE = """
own = os.urandom(int(sys.argv[2]) << 20)
m = Mapping(sys.argv[1])
say(digest=m.digest())
"""
#: Takes its memory between two reads: what is ahead of it then may go, and no more.
MEANWHILE = """
m = Mapping(sys.argv[1])
sha = hashlib.sha256(m.view[: 64 << 20])
own = b"x" * (int(sys.argv[2]) << 20)
for at in range(64 << 20, m.length, 1 << 20):
    sha.update(m.view[at : at + (1 << 20)])
say(digest=sha.hexdigest())
"""
AHEAD_BYTES = CGROUP_SHARE * LIMIT_BYTES


@pytest.mark.parametrize(
    ("own", "code", "twice_bytes"),
    [
        (16, BEFORE, 0),
        (150, BEFORE, 0),
        (200, BEFORE, 0),
        (150, MEANWHILE, AHEAD_BYTES),
        (200, MEANWHILE, AHEAD_BYTES),
    ],
    ids=["16 before", "150 before", "200 before", "150 meanwhile", "200 meanwhile"],
)
def test_what_is_read_ahead_is_not_dropped_again_beside_the_jobs_own_memory(
    job: Start, tmp_path: Path, own: int, code: str, twice_bytes: float
) -> None:
    reason = why_no_bed()
    require(reason is None, f"no slow bed: {reason}")
    (tmp_path / "source").mkdir()
    data = tmp_path / "source" / "large.bin"
    write_records(data, 3 * LIMIT_BYTES // 2, seed=11)
    with (
        SlowBed(tmp_path / "source", bandwidth=300_000_000) as bed,
        memory_group(LIMIT_BYTES) as at,
    ):
        file = bed.path("large.bin")
        work = job(python(code, file, own), before=entering(at))
        done = work.finish().good()
        read = bed.counters()["bytes"]
        assert kills(at) == 0
    assert done.lines == [{"digest": file_digest(data)}]
    assert done.summary is not None
    assert done.summary["totals"]["prefetched_bytes"] > data.stat().st_size // 2
    assert read < (1.05 if twice_bytes else 1.1) * data.stat().st_size + twice_bytes


#: Takes memory until the kernel has killed the process that it is told.
GROWS = """
m = Mapping(sys.argv[1])
say(digest=m.digest(), pid=os.getpid())
victim, own = hear(), []
def lives():
    # it gives back its memory first, and then its descriptors, which may take a while
    try:
        with open(f"/proc/{victim}/status") as file:
            return "VmRSS" in file.read()
    except OSError:
        return False
while lives():
    own.append(b"x" * (1 << 20))
    time.sleep(0.001)
say(again=m.digest())
"""


def _service_of(wrap: int) -> int:
    """It has another name than in the test's own group."""
    children = Path(f"/proc/{wrap}/task/{wrap}/children").read_text().split()
    (pid,) = [c for c in children if b"\0serve\0" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return int(pid)


def _killed(job: Start, records: Records, victim: str) -> tuple[Finished, int]:
    """A job that takes memory until it or its service is killed; how many were."""
    with memory_group(LIMIT_BYTES) as at:
        work = job(python(GROWS, records.path), before=entering(at))
        said = work.line()
        assert said["digest"] == records.digest
        pid = _service_of(work.process.pid) if victim == "service" else said["pid"]
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        if victim == "service":  # which would end before that, for the job needs the memory
            os.kill(pid, signal.SIGSTOP)
        work.tell(str(pid))
        return work.finish(), kills(at)


@pytest.mark.parametrize("victim", ["job", "service"])
def test_whom_the_kernel_killed_for_want_of_memory_is_told(
    job: Start, records: Records, victim: str
) -> None:
    for _ in range(4):
        done, killed = _killed(job, records, victim)
        if killed == 1:
            break
        # pages of the dead that are being freed still count: the kernel has killed the job, too
    assert killed == 1
    assert done.summary is not None
    oom = done.summary["oom"]
    assert (oom["kills"], oom["job"], oom["service"]) == (1, victim == "job", victim == "service")
    assert done.summary["service"]["died"]
    if victim == "job":
        assert done.status == -signal.SIGKILL
        words = "was killed for want of memory (OOM): give it more memory (Slurm: --mem)"
        assert short_lines(done.summary)[0].endswith(words)
        # nor is that an error of ours: the service has made room for it
        assert done.stderr.splitlines()[0].endswith(words) and "see " not in done.stderr
        assert "the service ended during the run, to leave its memory to the job" in done.stderr
    else:
        assert done.status == 0 and done.lines == [{"again": records.digest}]
        assert "(killed for want of memory, OOM); the job went on without it" in done.stderr
