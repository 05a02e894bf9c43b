# SPDX-License-Identifier: Apache-2.0
"""The service killed at any moment while a disk holds what has left its memory: the job reads the
right bytes, and the disk is as it was, blocks and names."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import require, wait_until
from disks import disk
from harness import Records, Start, python

from uffdprefetch.base import spill_place
from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.root
KILLS = int(os.environ.get("UFFDPREFETCH_TEST_SPILL_KILLS", "200"))
#: Room for others, and for what is spilled.
DISK_MIB = 2048
POOL = ("--engine", "pool", "--budget", "4MiB", "--huge-pages", "off", "--min-size", "1MiB")
#: Reads on until it is told, and once more; the moment of the kill is drawn from its first epochs.
READS = """
import select
m = Mapping(sys.argv[1])
say(pooled=m.pooled())
digests = []
while not select.select([sys.stdin], [], [], 0)[0]:
    digests.append(m.digest())
digests.append(m.digest())
say(digests=sorted(set(digests)))
"""
MOMENT_SECONDS = 0.6
#: Two ranks do.
RANKS = """
import os, select
pid = os.fork()
m = Mapping(sys.argv[1])
while not pid:
    m.digest()
digests = [m.digest()]
say(pooled=m.pooled(), rank=pid)
while not select.select([sys.stdin], [], [], 0)[0]:
    digests.append(m.digest())
digests.append(m.digest())
say(digests=sorted(set(digests)), killed=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture
def far(own_records: Records) -> Iterator[Path]:
    """A file on another device than the disk tier."""
    require(why_no_bed() is None, str(why_no_bed()))
    with SlowBed(own_records.path.parent, bandwidth=0, latency_us=0) as bed:
        yield bed.path(own_records.path.name)


def free_blocks(root: Path) -> int:
    return os.statvfs(root).f_bfree


def test_a_service_that_dies_at_any_moment_leaves_the_disk_as_it_was(
    job: Start, own_records: Records, far: Path, tmp_path: Path
) -> None:
    draw, longest, spilled = random.Random(7), 0.0, 0
    with disk("ext4", tmp_path, DISK_MIB) as root:
        why = spill_place.why_not(str(root))
        require(why is None, str(why))
        empty = free_blocks(root)
        for number in range(KILLS):
            run = {"UFFDPREFETCH_RUN": f"kill{number}"}
            spill = ("--spill", f"{root}:64MiB")
            started = job(python(READS, far), options=(*POOL, *spill), **run)
            assert started.line() == {"pooled": True}
            pid = started.service()
            time.sleep(draw.random() * MOMENT_SECONDS)
            spilled += free_blocks(root) < empty
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            wait_until(lambda: free_blocks(root) >= empty, "the disk has its blocks again")
            longest = max(longest, time.monotonic() - killed)
            assert os.listdir(root) == ["lost+found"]
            started.tell()
            assert started.line() == {"digests": [own_records.digest]}
            started.finish()
    print(
        f"{KILLS} kills, {spilled} with something on the disk: free after {longest:.2f} s at most"
    )
    assert spilled > KILLS // 2, "else it shows nothing"


def test_a_rank_that_is_killed_when_the_disk_is_full_takes_nothing_with_it(
    job: Start, own_records: Records, far: Path, tmp_path: Path
) -> None:
    with disk("ext4", tmp_path, DISK_MIB) as root:
        empty = free_blocks(root)
        started = job(python(RANKS, far), options=(*POOL, "--spill", f"{root}:64MiB"))
        said = started.line()
        assert said["pooled"]
        wait_until(lambda: free_blocks(root) < empty, "something was written")
        with (root / "others").open("wb") as others:
            free = os.statvfs(root)
            os.posix_fallocate(others.fileno(), 0, free.f_bavail * free.f_frsize)
            os.kill(said["rank"], signal.SIGKILL)
            started.tell()
            assert started.line() == {"digests": [own_records.digest], "killed": -signal.SIGKILL}
            done = started.finish().good()
        assert done.summary["pool"]["spill"]["written_bytes"] > 0
        (root / "others").unlink()
        wait_until(lambda: free_blocks(root) >= empty, "the disk has its blocks again")
        assert os.listdir(root) == ["lost+found"]
