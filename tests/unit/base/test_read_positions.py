# SPDX-License-Identifier: Apache-2.0
"""What a process has read by read(2), told by the positions of its descriptors."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from uffdprefetch.base import procfs
from uffdprefetch.service import program_pages


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


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\r", "\x1c", "\x85", "\u2028"])
def test_a_mapped_file_s_name_may_have_what_looks_like_an_end_of_line(
    end: str, tmp_path: Path
) -> None:
    """The service died of it."""
    path = tmp_path / f"a{end}b - c d e " / "data"
    path.parent.mkdir()
    path.write_bytes(bytes(8192))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[0] == 0
        maps = procfs.maps_text(os.getpid())
    assert maps is not None
    assert str(path) in [mapping.path for mapping in procfs.file_readers(maps, 8192)]
    assert procfs.unserved_files(maps, 1 << 40) == []
    assert str(path) in [path for path, *_ in program_pages.mapped_to_read(maps)]
