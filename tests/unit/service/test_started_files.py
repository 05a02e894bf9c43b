# SPDX-License-Identifier: Apache-2.0
"""What becomes of what a job has opened and mapped: the entries of its start profile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from conftest import require

from uffdprefetch.demo.bed import SlowBed, why_no_bed
from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.service import program_pages
from uffdprefetch.service.started_files import WHOLE_MOST_BYTES, StartedFiles

FILE, DIRECTORY, STAT = EntryKind.FILE, EntryKind.DIRECTORY, EntryKind.STAT
BLOCK = 64 << 10


@pytest.fixture
def files() -> StartedFiles:
    return StartedFiles(time.time_ns() + 10**9)


def made(path: Path, size: int = 100) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)
    return str(path)


def found(files: StartedFiles, root: Path) -> list[tuple[EntryKind, str]]:
    entries = files.entries(lambda _: False)
    return [(one.kind, os.path.relpath(one.path, root)) for one in entries]


def test_a_file_is_wanted_and_its_directory_listed_in_the_order_of_first_sight(
    files: StartedFiles, tmp_path: Path
) -> None:
    for name in ("b/2", "a/1", "b/1", "b/2"):
        files.opened(made(tmp_path / name))
    assert found(files, tmp_path) == [
        (DIRECTORY, "b"), (FILE, "b/2"), (DIRECTORY, "a"), (FILE, "a/1"), (FILE, "b/1"),
    ]  # fmt: skip
    assert files.wanted_bytes == 300


def test_what_is_known_of_a_file_that_was_read_is_not_asked_for_again(
    files: StartedFiles, tmp_path: Path
) -> None:
    """FUSE forgets the time of access with each read."""
    require(why_no_bed() is None, why_no_bed() or "")
    (tmp_path / "mount").mkdir()
    made(tmp_path / "source" / "one", 5000)
    with SlowBed(tmp_path / "source", tmp_path / "mount") as bed:
        one = bed.path("one")
        one.read_bytes()
        bed.reset()
        files.opened(str(one))
        assert (FILE, "mount/one") in found(files, tmp_path)
        assert bed.counters()["getattrs"] == 0


def test_of_python_s_caches_the_source_is_asked_for_and_its_directory_listed(
    files: StartedFiles, tmp_path: Path
) -> None:
    files.opened(made(tmp_path / "m" / "__pycache__" / "x.cpython-311.pyc"))
    assert found(files, tmp_path) == [
        (DIRECTORY, "m"), (STAT, "m/x.py"), (FILE, "m/__pycache__/x.cpython-311.pyc"),
    ]  # fmt: skip


def test_names_that_were_missing_large_empty_or_of_the_same_file_are_asked_for_alone(
    files: StartedFiles, tmp_path: Path
) -> None:
    one = made(tmp_path / "one")
    os.symlink(one, tmp_path / "other")
    files.opened(str(tmp_path / "gone" / "deep"), is_missing=True)
    for path in (
        one, str(tmp_path / "other"), made(tmp_path / "large", WHOLE_MOST_BYTES + 1),
        made(tmp_path / "empty", 0),
    ):  # fmt: skip
        files.opened(path)
    assert found(files, tmp_path) == [
        (STAT, "gone/deep"), (DIRECTORY, "."), (FILE, "one"), (STAT, "other"), (STAT, "large"),
        (STAT, "empty"),
    ]  # fmt: skip


def test_what_is_no_file_on_storage_is_of_no_use(files: StartedFiles, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/null", "/proc/self/maps", "/sys/kernel", "/dev/shm"):
        files.opened(str(path))
    files.opened("/proc/none", is_missing=True)
    files.opened(f"{tmp_path}/nul\0", is_missing=False)
    assert found(files, tmp_path) == []


def test_what_the_start_has_written_is_none_of_it(tmp_path: Path) -> None:
    files = StartedFiles(time.time_ns() - 10**9)
    files.opened(made(tmp_path / "new"))
    files.mapped(made(tmp_path / "mapped"), [(0, BLOCK)])
    assert found(files, tmp_path) == []


def test_of_what_is_mapped_the_blocks_are_wanted_that_were_touched(
    files: StartedFiles, tmp_path: Path
) -> None:
    path = made(tmp_path / "library", 10 * BLOCK + 1)
    files.mapped(path, [(4096, 4096), (3 * BLOCK - 4096, 8192), (10 * BLOCK, 4096)])
    files.mapped(path, [(5 * BLOCK, 4096)])
    [entry] = files.entries(lambda _: False)
    assert entry.blocks == ((0, 1), (2, 2), (5, 1), (10, 1))
    assert files.wanted_bytes == entry.wanted_bytes == 4 * BLOCK + BLOCK // BLOCK


def test_a_file_that_is_opened_and_then_mapped_is_wanted_by_its_blocks(
    files: StartedFiles, tmp_path: Path
) -> None:
    path = made(tmp_path / "library", 10 * BLOCK)
    files.opened(path)
    files.mapped(path, [])  # a page table that cannot be read
    assert files.entries(lambda _: False)[-1].blocks == ()
    files.mapped(path, [(BLOCK, 4096)])
    assert files.entries(lambda _: False)[-1].blocks == ((1, 1),)
    assert files.wanted_bytes == BLOCK


def test_what_is_mapped_and_not_touched_is_asked_for_by_its_name(
    files: StartedFiles, tmp_path: Path
) -> None:
    files.mapped(made(tmp_path / "library"), [])
    assert found(files, tmp_path) == [(STAT, "library")]


def test_files_that_are_prefetched_for_otherwise_are_left_out(
    files: StartedFiles, tmp_path: Path
) -> None:
    paths = [made(tmp_path / name) for name in "ab"]
    for path in paths:
        files.opened(path)
    status = os.stat(paths[0])
    entries = files.entries(lambda number: number == (status.st_dev, status.st_ino))
    assert [one.path for one in entries if one.kind is FILE] == paths[1:]


def test_this_process_has_touched_pages_of_its_own_interpreter() -> None:
    seen = program_pages.look(os.getpid())
    assert seen is not None
    maps, touched = seen
    program = os.path.realpath("/proc/self/exe")
    assert program in maps and touched[program]
    size = os.stat(program).st_size
    assert all(offset >= 0 and offset < size for offset, _ in touched[program])
    assert not program_pages.is_elsewhere(os.getpid())


def test_what_is_written_by_a_mapping_is_not_read_by_it() -> None:
    text = (
        "1000-3000 r-xp 00002000 08:01 5  /usr/bin/a b\n"
        "3000-4000 rw-s 00000000 08:01 6  /data/out\n"
        "4000-5000 r--s 00000000 08:01 7  /data/in\n"
        "5000-6000 r--p 00000000 00:01 8  /memfd:x (deleted)\n"
        "6000-7000 r--p 00000000 08:01 9  /usr/lib/old (deleted)\n"
        "7000-8000 rw-p 00000000 00:00 0  [heap]\n"
        "8000-9000 rw-p 00000000 00:00 0\n"
    )
    assert list(program_pages.mapped_to_read(text)) == [
        ("/usr/bin/a b", 0x2000, 0x1000, 0x2000), ("/data/in", 0, 0x4000, 0x1000),
    ]  # fmt: skip
