# SPDX-License-Identifier: Apache-2.0
"""`compare`: which files a job's are, and that they are put out of the page cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

import pytest
from conftest import require

from uffdprefetch.base import file_systems
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.options import add_options, as_words, options_end
from uffdprefetch.compare import cold, progress
from uffdprefetch.compare.cold import SMALL_BYTES, Files, is_data
from uffdprefetch.compare.figures import Why
from uffdprefetch.native.residency import resident_bytes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be dropped is given up at once."""
    monkeypatch.setattr(cold, "PATIENCE_SECONDS", 0.1)


def cached(path: Path, size_bytes: int = MIB) -> Path:
    """A file on a disk, of which all is in the page cache and written back."""
    path.write_bytes(os.urandom(size_bytes))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    require(not file_systems.at(str(path)).in_memory, "TMPDIR is memory")
    assert path.read_bytes() and resident_bytes(path) == size_bytes
    return path


@pytest.mark.parametrize(
    "path, expected",
    [
        ("/home/u/data.mdb", True), ("/lustre/library/a.bin", True), ("/library/a.bin", True),
        ("/opt/x/model.pth", True), ("/usr/share/dict/words", True),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", False), ("/lib64/ld-linux-x86-64.so.2", False),
        ("/usr/lib/locale/locale-archive", False), ("/etc/ld.so.cache", False),
        ("/usr/bin/python3", False), ("/home/u/venv/lib/python3.11/site-packages/a.pth", False),
        ("/home/u/x/_core.cpython-311.so", False), ("/home/u/libfoo.so.1.2", False),
        ("/home/u/train.py", False), ("/proc/self/maps", False),
    ],
)  # fmt: skip
def test_programs_and_libraries_are_left_as_they_are(path: str, expected: bool) -> None:
    assert is_data(path) is expected


def test_what_was_seen_becomes_cold(tmp_path: Path) -> None:
    path = cached(tmp_path / "a.bin")
    files = Files()
    assert files.saw([str(path), str(tmp_path), "/dev/null"]) == MIB
    assert files.drop() == []
    assert resident_bytes(path) == 0 and files.paths == [str(path)]


def test_what_is_named_becomes_cold_with_all_below_it(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    paths = [cached(tmp_path / "deep" / "er" / "a.bin"), cached(tmp_path / "b.bin")]
    files = Files([str(tmp_path / "deep"), str(tmp_path / "b.bin")])
    assert files.drop() == [] and [resident_bytes(path) for path in paths] == [0, 0]


def test_small_files_beside_one_that_was_seen_become_cold(tmp_path: Path) -> None:
    """A thousand of them are read between two looks."""
    paths = [cached(tmp_path / f"{number}.npy") for number in range(3)]
    other = cached(tmp_path / "0.txt")
    files = Files()
    files.saw([str(paths[1])])
    files.drop()
    assert [resident_bytes(path) for path in paths] == [0, 0, 0]
    assert resident_bytes(other) == MIB


def test_the_neighbours_of_a_large_file_stay(tmp_path: Path) -> None:
    """`wrap` itself tells of each large one."""
    large, neighbour = tmp_path / "a.bin", cached(tmp_path / "b.bin")
    with open(large, "wb") as file:
        file.truncate(SMALL_BYTES)
    files = Files()
    files.saw([str(large)])
    files.drop()
    assert files.paths == [str(large)] and resident_bytes(neighbour) == MIB


def test_a_file_that_is_mapped_is_named_with_who_maps_it(tmp_path: Path) -> None:
    path = cached(tmp_path / "a.bin")
    files = Files([str(path)])
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        sum(mapped[::4096])
        (one,) = files.drop()
    assert (one.path, one.left_bytes, one.why) == (str(path), MIB, Why.HELD)
    assert one.holders == (os.getpid(),)
    assert files.drop() == []


def test_memory_is_named_as_what_it_is() -> None:
    require(os.access("/dev/shm", os.W_OK), "there is no /dev/shm")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(MIB))
        file.flush()
        (one,) = Files([file.name]).drop()
    assert (one.path, one.left_bytes, one.why) == (file.name, MIB, Why.IN_MEMORY)


def test_a_file_of_another_mount_namespace_is_named(tmp_path: Path) -> None:
    files = Files()
    assert files.saw([], elsewhere=["/inside/data.bin", "/usr/lib/libc.so.6"]) == 0
    assert [(one.path, one.why) for one in files.drop()] == [("/inside/data.bin", Why.ELSEWHERE)]


def test_what_has_gone_meanwhile_is_no_error(tmp_path: Path) -> None:
    path = cached(tmp_path / "a.bin")
    files = Files([str(path)])
    path.unlink()
    assert files.drop() == [] and files.cached().total_bytes == 0


def test_only_what_was_there_before_a_run_was_seen_late(tmp_path: Path) -> None:
    before = cached(tmp_path / "before.bin")
    files, begin = Files(), time.time() + 0.05
    while time.time() < begin + 0.05:
        time.sleep(0.01)
    made = cached(tmp_path / "made.tmp")
    assert files.saw([str(before), str(made)], begin=begin) == MIB
    assert files.saw([str(before), str(made)], begin=begin) == 0


def test_of_files_that_nobody_tells_of_the_share_that_is_cached_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another user's file: by reads that wait, or do not."""
    warm, cool = tmp_path / "warm.bin", tmp_path / "cool.bin"
    for path in (warm, cool):
        with open(path, "wb") as file:
            file.truncate(4 * MIB)
    monkeypatch.setattr(
        cold, "_read_without_a_wait",
        lambda path, places: len(list(places)) if path == str(warm) else 0,
    )  # fmt: skip
    monkeypatch.setattr(cold, "counts_reads", lambda path: False)
    monkeypatch.setattr(cold.residency, "resident_bytes", lambda path: None)
    found = Files([str(warm), str(cool)]).cached()
    assert found.is_estimated
    assert abs(found.total_bytes - 4 * MIB) < 4 * MIB / 4  # five times its standard error
    assert Files([str(warm)]).cached().total_bytes == 4 * MIB
    assert Files([str(warm)]).cached(estimates=False).total_bytes == 0


# ---- its command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, end",
    [
        (["--rounds", "3", "ls", "-l"], 2), (["--rounds=3", "ls"], 1),
        (["--json", "--drop", "d", "--whole", "*.bin", "./job", "--rounds"], 5),
        (["--ownlock", "--budget", "1GiB", "ls"], 3), (["--rounds"], 1),
    ],
)  # fmt: skip
def test_its_command_begins_where_options_end(words: list[str], end: int) -> None:
    from uffdprefetch.cli.compare import Command

    assert Command().options_end(words) == end


def test_the_options_of_wrap_are_handed_on_as_they_were_given() -> None:
    import argparse

    from uffdprefetch.cli.compare import LEFT_OUT

    parser = argparse.ArgumentParser()
    add_options(parser, LEFT_OUT)
    words = ["--budget=1GiB", "--whole=a:b", "--whole=*.bin", "--ownlock", "--config=f.toml"]
    args = parser.parse_args(words)
    handed = as_words(vars(args))
    assert sorted(handed) == sorted(words)
    assert options_end(handed) == len(handed)
    with pytest.raises(SystemExit):
        parser.parse_args(["--live"])


def test_a_wrong_option_of_wrap_is_said_before_anything_runs(tmp_path: Path) -> None:
    from uffdprefetch.cli import _dispatch

    with pytest.raises(UffdPrefetchError, match="budget") as raised:
        _dispatch(["compare", "--budget", "1", "--", "/bin/true"])
    assert raised.value.exit_code == 2


def test_how_many_files_are_done_is_told_in_each_step(tmp_path: Path) -> None:
    """With 6,000 files of half a millisecond each nothing was said for minutes."""
    for number in range(5):
        (tmp_path / str(number)).write_bytes(b"x")
    told: list[int] = []
    files = Files(counted=told.append)
    for step in (lambda: files.add_named([str(tmp_path)]), files.drop, files.cached):
        told.clear()
        step()
        assert told[:5] == [1, 2, 3, 4, 5]


def test_without_a_terminal_a_long_step_has_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shows = progress.Progress(total=2)
    shows.begins("the files of --drop are looked for")
    for files in range(1, 91):
        now += 0.25
        shows.counted(files)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        f"uffdprefetch: the files of --drop are looked for, {files:,} so far" for files in (41, 82)
    ]
    shows.begins("round 1 of 1, plain")
    shows.ended("round 1 of 1, plain", 0.5, [])
    shows.begins("round 1 of 1, plain: its files in memory are counted")
    now += 9
    shows.counted(9)
    assert capfd.readouterr().err == "uffdprefetch: round 1 of 1, plain: 0.50 s\n"
