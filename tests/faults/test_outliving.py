# SPDX-License-Identifier: Apache-2.0
"""A process that shares the memory of one that has mapped a file, and goes on when that has ended
(clone(2) with CLONE_VM, without CLONE_THREAD): the mapping is the address space's, our threads are
the process's."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import process_gone, require, wait_until
from harness import MIB, Job, Start, programs

from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.slow

SIZE_BYTES = 12 * MIB
CACHE = ("--policy", "fixed")
POOL = ("--engine", "pool", "--budget", "6MiB")
WAYS = ("libc", "instruction", "clone3", "vfork", "maps_afterwards")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose words say where they are, as tests/programs/outlive.c expects."""
    path = tmp_path_factory.mktemp("words") / "words.bin"
    (np.arange(0, SIZE_BYTES, 8, dtype=np.uint64) ^ np.uint64(0x5151)).tofile(path)
    return path


@pytest.fixture(scope="module")
def outlive(tmp_path_factory: pytest.TempPathFactory) -> str:
    return programs(tmp_path_factory.mktemp("outlive"), "outlive")


def guardians(service: int) -> list[int]:
    """The processes that hold the pool's userfaultfds beside the service."""
    tasks = Path(f"/proc/{service}/task").glob("*/children")  # of a thread each
    children = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [pid for pid in children if _name(pid) == "uffdprefetch/g"]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def goes_on(_: Job) -> None:
    """Nothing happens to the service."""


def stops(work: Job) -> None:
    work.kill_service(signal.SIGSTOP)


def stops_and_is_killed(work: Job) -> None:
    work.kill_service(signal.SIGSTOP)
    work.kill_service()


def is_killed(work: Job) -> None:
    work.kill_service()


def held_by(pid: int) -> list[str]:
    """What the descriptors of a process name, as far as a guardian is told of it."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed just now
            found.append(os.readlink(fd))
    return sorted(name for name in found if "userfaultfd" in name or name.startswith("/"))


def loses_its_guardian_and_is_killed(work: Job) -> None:
    (guardian,) = guardians(work.service())
    held = held_by(guardian)
    os.kill(guardian, signal.SIGKILL)

    def another_has_all() -> bool:
        found = [pid for pid in guardians(work.service()) if pid != guardian]
        return bool(found) and held_by(found[0]) == held

    wait_until(another_has_all, "another guardian that holds the same")
    work.kill_service()


FATES = (goes_on, stops, is_killed, stops_and_is_killed, loses_its_guardian_and_is_killed)


@pytest.mark.parametrize("fate", FATES)
def test_who_outlives_the_mapper_reads_the_file_from_the_pool(
    job: Start, words: Path, outlive: str, fate: Callable[[Job], None]
) -> None:
    work = job([outlive, str(words)], options=POOL)
    said = work.line()
    # not what was told to libc before: that is the file's
    assert said["pooled"] == len(WAYS) - 1, said
    service = work.service()
    held = guardians(service)
    fate(work)
    work.tell()
    assert work.line() == dict.fromkeys(WAYS, 0)
    if fate is stops:
        os.kill(service, signal.SIGCONT)
    work.finish()
    wait_until(lambda: all(map(process_gone, held)), "the end of the guardian")


def test_a_child_that_libc_is_asked_for_needs_nobody(job: Start, words: Path, outlive: str) -> None:
    work = job([outlive, str(words)], options=POOL)
    work.line()
    (guardian,) = guardians(work.service())
    work.kill_service(signal.SIGSTOP)
    os.kill(guardian, signal.SIGKILL)
    work.kill_service()
    work.tell()
    read = work.line()
    assert (read["libc"], read["maps_afterwards"]) == (0, 0)
    work.finish()


@pytest.mark.parametrize("fate", (goes_on, is_killed))
def test_who_outlives_the_mapper_dies_as_without_us_where_the_file_cannot_be_read(
    job: Start, words: Path, outlive: str, fate: Callable[[Job], None]
) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    bed = SlowBed(words.parent)
    bed.mount()
    try:
        work = job([outlive, str(bed.path(words.name))], options=POOL)
        assert work.line()["pooled"]
        fate(work)
        os.kill(bed.pid, signal.SIGKILL)
        wait_until(lambda: process_gone(bed.pid), "the server's end")
        work.tell()
        assert work.line() == dict.fromkeys(WAYS, -signal.SIGBUS)
        work.finish()
    finally:
        bed.unmount()


@pytest.mark.parametrize("fate", (goes_on, is_killed))
def test_who_outlives_the_mapper_reads_the_file_from_checkpoints(
    job: Start, words: Path, outlive: str, fate: Callable[[Job], None]
) -> None:
    work = job([outlive, str(words)], options=CACHE)
    work.line()
    fate(work)
    work.tell()
    assert work.line() == dict.fromkeys(WAYS, 0)
    work.finish()
