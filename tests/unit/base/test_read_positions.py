# SPDX-License-Identifier: Apache-2.0
"""What a process has read by read(2), told by the positions of its descriptors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from uffdprefetch.base import procfs


def test_files_that_are_read_are_told_and_directories_are_not(tmp_path: Path) -> None:
    """A directory's position is no count of bytes: on ext4 it is a hash, of up to 63 bits."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(3 << 20))
    with open(path, "rb", buffering=0) as file, os.scandir(tmp_path) as entries:
        next(entries)
        file.read(2 << 20)
        directory = os.open(tmp_path, os.O_RDONLY)  # as tar does
        try:
            os.lseek(directory, 1 << 31, os.SEEK_SET)
        except OSError:
            pytest.skip("this file system's directories have no such positions")
        try:
            assert procfs.read_files(os.getpid(), 1 << 20) == [(str(path), 2 << 20)]
        finally:
            os.close(directory)


def test_a_mapping_that_a_page_of_ours_has_parted_counts_whole() -> None:
    """It was 47.9 MiB of a file of 96 MiB."""
    deleted = "r--s 00000000 00:2a 7  /data/a (deleted)"
    maps = (
        f"7f0000000000-7f0003000000 {deleted}\n"
        "7f0003000000-7f0003001000 r--s 00000000 00:05 9  /memfd:ours (deleted)\n"
        f"7f0003001000-7f0006000000 {deleted}\n"
        "7f0007000000-7f0009000000 rw-s 00000000 00:2a 8  /data/b\n"
        "7f000a000000-7f000b000000 r--s 00000000 00:2a 8  /data/c\n"
    )
    found = procfs.unserved_files(maps, 64 << 20)
    assert found == [("/data/a", (96 << 20) - 4096, True)], "no part of it is as large"
    found = procfs.unserved_files(maps, 16 << 20)
    assert found == [("/data/a", (96 << 20) - 4096, True), ("/data/b", 32 << 20, False)]
