# SPDX-License-Identifier: Apache-2.0
"""Which disks answer as quickly as the pool would: asked once, past the page cache, and seldom."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import QUICK_VARIABLE

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.state import quick_disks

US = 1000
#: A partition of a disk; what has no block device has the major number 0.
SIZE = (1 << 20) + 100  # of no whole page
DISK, NETWORK = os.makedev(254, 1), os.makedev(0, 54)


class Disk:
    """A file of a MiB on one; each read takes so long, in us."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SIZE))
        self.fd = os.open(path, os.O_RDONLY)
        self.takes, self.read, self.now = [0], list[int](), 0

    def preadv(self, fd: int, buffers: list[Any], offset: int) -> int:
        assert os.fstat(fd).st_ino == os.fstat(self.fd).st_ino
        self.now += self.takes[min(len(self.read), len(self.takes) - 1)] * US
        self.read.append(offset)
        return len(buffers[0])

    def is_quick(self, device: int = DISK, size: int = SIZE) -> bool:
        status: Any = SimpleNamespace(st_dev=device, st_size=size)
        return quick_disks.is_on_one(self.fd, status)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(tmp_path / "file")
    monkeypatch.delenv(QUICK_VARIABLE)
    monkeypatch.setattr(quick_disks, "_found", {})
    monkeypatch.setattr(os, "preadv", made.preadv)
    monkeypatch.setattr(CLOCK, "now_ns", lambda: made.now)
    yield made
    os.close(made.fd)


@pytest.mark.parametrize(
    ("takes", "reads", "quick"),
    [
        ([80], 1, True),
        ([700, 90], 2, True),  # where the file lies is looked up first
        ([8000, 90], 2, True),  # the job's own reads came first
        ([500] * 7 + [290], 8, True),
        ([500] * 7 + [310], 8, False),  # a block device behind a network
        ([8000], 2, False),  # it seeks
        ([3100, 500, 3100, 90], 3, False),
    ],
)
def test_a_disk_is_quick_that_reads_a_page_in_no_time(
    disk: Disk, takes: list[int], reads: int, quick: bool
) -> None:
    disk.takes = takes
    assert disk.is_quick() is quick
    assert disk.read == [each << 10 for each in (0, 512, 256, 768, 128, 384, 640, 896)][:reads]


def test_each_device_is_asked_once_and_a_network_never(disk: Disk) -> None:
    assert not disk.is_quick(NETWORK) and not disk.is_quick(size=0) and disk.read == []
    assert disk.is_quick() and disk.is_quick() and len(disk.read) == 1
    disk.takes = [9000]
    assert disk.is_quick() and not disk.is_quick(os.makedev(8, 0)) and len(disk.read) == 3


def test_a_disk_that_was_slow_is_asked_by_two_more_files_and_one_that_seeks_by_none(
    disk: Disk,
) -> None:
    disk.takes = [500] * 16 + [90]
    assert [disk.is_quick() for _ in range(4)] == [False, False, True, True]
    assert len(disk.read) == 17
    disk.takes, disk.read = [500], []
    assert not any(disk.is_quick(os.makedev(8, 0)) for _ in range(5)) and len(disk.read) == 24
    disk.takes, disk.read = [9000], []
    assert not any(disk.is_quick(os.makedev(8, 1)) for _ in range(5)) and len(disk.read) == 2


def test_what_is_a_hole_comes_from_no_disk(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(40 << 20)
        file.write(bytes(4096))
    whole, disk.fd = disk.fd, os.open(path, os.O_RDONLY)
    if os.lseek(disk.fd, 0, os.SEEK_DATA) == 0:
        pytest.skip("this file system does not tell its holes")
    assert disk.is_quick(size=64 << 20) and disk.read == [40 << 20]
    path.write_bytes(b"")
    os.truncate(path, 64 << 20)
    assert not disk.is_quick(os.makedev(8, 0), 64 << 20) and len(disk.read) == 1
    os.close(whole)


def fails(*_: object) -> int:
    raise OSError(22, "Invalid argument")


def none_left(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def test_where_descriptors_are_short_the_next_file_is_asked(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as short:
        short.setattr(os, "open", none_left)
        assert not any(disk.is_quick() for _ in range(9))
    assert disk.is_quick()


@pytest.mark.parametrize("name", ["open", "preadv"])
def test_who_cannot_be_asked_is_not_quick(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real: Callable[..., int] = os.open

    def opened(path: str, flags: int) -> int:
        assert flags & os.O_NONBLOCK, "a write lease of another's is not waited for"
        return fails() if flags & os.O_DIRECT else real(path, flags)

    monkeypatch.setattr(os, name, opened if name == "open" else fails)
    before = len(os.listdir("/proc/self/fd"))
    assert not disk.is_quick()
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before
