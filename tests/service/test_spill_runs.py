# SPDX-License-Identifier: Apache-2.0
"""`--spill`: a run whose pool has a disk below it reads the right bytes, tells what the disk did,
and leaves nothing on it, however it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import require, wait_until
from harness import Records, Start, python

from uffdprefetch.base import spill_place
from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytest_plugins = ("harness_fixtures",)
MIB = 1 << 20
POOL = ("--engine", "pool", "--budget", "6MiB", "--huge-pages", "off")

EPOCHS = """
m = Mapping(sys.argv[1])
for epoch in range(int(sys.argv[2])):
    digest = m.digest()
    time.sleep(0.3)  # what is to leave is written
say(pooled=m.pooled(), digest=digest)
"""

WAITS = """
m = Mapping(sys.argv[1])
digest = m.digest()
say(digest=digest)
input()
say(digest=m.digest())
"""


@pytest.fixture
def far(records: Records, tmp_path: Path) -> Iterator[Records]:
    """The records on another device than ``place``."""
    require(why_no_bed() is None, str(why_no_bed()))
    with SlowBed(records.path.parent, bandwidth=0, latency_us=0) as bed:
        yield replace(records, path=bed.path(records.path.name))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory on a disk of this node."""
    found = tmp_path / "disk"
    found.mkdir()
    why = spill_place.why_not(str(found))
    require(why is None, f"{found}: {why}")
    return found


def test_what_left_memory_comes_from_the_disk_and_is_told(
    job: Start, far: Records, place: Path
) -> None:
    done = (
        job(python(EPOCHS, far.path, 4), options=(*POOL, "--spill", f"{place}:64MiB"))
        .finish()
        .good()
    )
    assert done.lines == [{"pooled": True, "digest": far.digest}]
    pool = done.summary["pool"]
    spill = pool["spill"]
    assert spill["directory"] == str(place) and spill["size_bytes"] == 64 * MIB
    assert spill["written_bytes"] > 0 and spill["read_bytes"] > 0
    assert spill["ended"] is None and spill["errors"] == {}
    (file,) = done.summary["files"]
    assert file["pool_disk_bytes"] > 0 and file["pool_disk_read_bytes"] > 0
    assert pool["read_bytes"] < 4 * file["size_bytes"], "not all of it each time"
    assert os.listdir(place) == []


def test_of_a_file_on_the_same_disk_no_copy_is_made_and_a_line_says_so(
    job: Start, records: Records, place: Path
) -> None:
    done = (
        job(python(EPOCHS, records.path, 2), options=(*POOL, "--spill", f"{place}:64MiB"))
        .finish()
        .good()
    )
    assert done.lines == [{"pooled": True, "digest": records.digest}]
    assert done.summary["pool"]["spill"]["written_bytes"] == 0
    (told,) = [one for one in done.summary["degradations"] if "--spill" in one]
    assert "same disk" in told and str(records.path) in told


def test_a_place_that_is_no_disk_of_this_node_is_told_and_the_run_goes_on(
    job: Start, records: Records
) -> None:
    done = (
        job(python(EPOCHS, records.path, 1), options=(*POOL, "--spill", "/dev/shm")).finish().good()
    )
    assert done.lines == [{"pooled": True, "digest": records.digest}]
    assert done.summary["pool"]["spill"] is None
    (told,) = [one for one in done.summary["degradations"] if "--spill" in one]
    assert "/dev/shm" in told and "tmpfs" in told


def test_where_no_file_may_be_so_large_the_tier_is_smaller_and_a_line_says_so(
    job: Start, far: Records, place: Path
) -> None:
    limit = -(-far.size_bytes // MIB) * MIB  # a memfd has it, too
    done = (
        job(
            python(EPOCHS, far.path, 3), options=(*POOL, "--spill", f"{place}:1GiB"),
            before=("prlimit", f"--fsize={limit}"),
        )
        .finish()
        .good()
    )  # fmt: skip
    assert done.lines == [{"pooled": True, "digest": far.digest}]
    spill = done.summary["pool"]["spill"]
    assert spill["size_bytes"] == limit and spill["read_bytes"] > 0
    assert spill["errors"] == {} and spill["ended"] is None
    (told,) = [one for one in done.summary["degradations"] if "--spill" in one]
    assert "ulimit -f" in told


def held_there(pid: int | str, place: Path) -> list[int]:
    """Bytes of the files below ``place`` that a process has open."""
    found = []
    with contextlib.suppress(OSError):  # it has just ended, or is another user's
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(str(place)):
                    found.append(os.stat(f"/proc/{pid}/fd/{fd}").st_blocks * 512)
    return found


def test_a_killed_service_leaves_no_byte_on_the_disk(job: Start, far: Records, place: Path) -> None:
    started = job(python(WAITS, far.path), options=(*POOL, "--spill", f"{place}:64MiB"))
    assert started.line()["digest"] == far.digest
    pid = started.service()
    wait_until(lambda: any(held_there(pid, place)), "something was written")
    started.kill_service()
    others = filter(str.isdigit, os.listdir("/proc"))
    assert not [other for other in others if held_there(other, place)], "nobody has inherited it"
    assert os.listdir(place) == []
    started.tell("")
    assert started.line()["digest"] == far.digest
