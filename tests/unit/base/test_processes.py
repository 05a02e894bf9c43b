# SPDX-License-Identifier: Apache-2.0
"""What /proc says of a process, also where its name is made to mislead."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import wait_until

from uffdprefetch.base import procfs
from uffdprefetch.state import processes
from uffdprefetch.state.processes import Watched

STAT = (
    "4242 ({comm}) S 1 4242 4242 0 -1 4194560 {minor} 11 {major} 13 14 15 16 17 20 0 1 0 100 "
    "8192 55 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 3 0 0 0 0 0\n"
)


@pytest.mark.parametrize(
    "comm", ["python", "", "a b", "x) S 1 (y", ") (", "))((", "tab\there", "new\nline", ")"]
)
def test_major_faults_whatever_the_command_is_called(comm: str) -> None:
    assert processes.parse_major_faults(STAT.format(comm=comm, minor=99, major=12)) == 12


def test_the_kernels_own_text_with_such_a_name(tmp_path: Path) -> None:
    """Not our idea of /proc/PID/stat but the kernel's: a program that is called `) (`."""
    program = tmp_path / ") ("
    shutil.copy(shutil.which("cat") or "/bin/cat", program)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        stat = Path(f"/proc/{child.pid}/stat")
        wait_until(lambda: ") (" in stat.read_text(), "the name")
        counted = processes.read(child.pid)
        assert counted is not None
        # cat has been paged in by us just now: its own count is small, and no other field's value
        assert 0 <= counted.major_faults == int(stat.read_text().rsplit(") ", 1)[1].split()[9])
        assert child.stdin is not None
        child.stdin.close()


def test_io_counts() -> None:
    text = "rchar: 3000\nwchar: 1\nsyscr: 2\nsyscw: 3\nread_bytes: 8192\nwrite_bytes: 0\n"
    assert processes.parse_io(text) == (3000, 8192)


def test_a_process_that_is_not_there() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert processes.read(child.pid) is None


def test_only_what_comes_after_the_hello_counts(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 20))
    path.read_bytes()
    watched = Watched(os.getpid())
    watched.sample()
    before = watched.now.read_call_bytes
    assert before is not None
    path.read_bytes()
    watched.sample()
    assert watched.now.read_call_bytes is not None
    assert watched.now.read_call_bytes - before >= 1 << 20


def test_a_read_through_a_mapping_is_no_read_call(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 20))
    watched = Watched(os.getpid())
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert view[:] == bytes(1 << 20)
    watched.sample()
    assert watched.now.read_call_bytes is not None
    assert watched.now.read_call_bytes < 1 << 20


def test_a_number_that_is_another_process_s_by_now_is_not_read() -> None:
    watched = Watched(os.getpid())
    watched.sample()
    kept, watched.ended = watched.now, True
    os.pread(os.open(__file__, os.O_RDONLY), 100, 0)
    watched.sample()
    assert watched.now is kept


def test_a_process_that_ended_keeps_its_last_figures() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        watched = Watched(child.pid)
        assert child.stdin is not None
        child.stdin.write(bytes(100_000))
        child.stdin.flush()

        def counted() -> bool:
            watched.sample()
            return (watched.now.read_call_bytes or 0) >= 100_000

        wait_until(counted, "cat to read what it was sent")
        kept = watched.now
        child.stdin.close()
    watched.sample()
    assert watched.now == kept


def test_a_process_that_ends_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its two files in /proc: what was known of it must not become unknown."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        watched = Watched(child.pid)
        watched.sample()
        kept, parse = watched.now, processes.parse_major_faults
        assert kept.read_call_bytes is not None

        def parse_and_end(stat: str) -> int:
            child.kill()
            child.wait()
            return parse(stat)

        monkeypatch.setattr(processes, "parse_major_faults", parse_and_end)
        watched.sample()
        assert watched.now is kept


STATUS = """Name:\tx
Uid:\t0\t0\t0\t0
Gid:\t5\t5\t5\t5
CapEff:\t000001ffffffffff
NoNewPrivs:\t0
Seccomp:\t0
Seccomp_filters:\t0
"""


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ("Name:\tx", "Name:\ty", False),
        ("Seccomp:\t0", "Seccomp:\t2", True),
        ("NoNewPrivs:\t0", "NoNewPrivs:\t1", True),
        ("Uid:\t0\t0", "Uid:\t0\t7", True),
        ("Gid:\t5", "Gid:\t6", True),
        ("1ffffffffff", "1fffffffffe", True),
        ("000001ff", "000003ff", False),
    ],
)
def test_rights_that_are_lost_are_told_from_what_else_changes(
    old: str, new: str, lost: bool
) -> None:
    before = processes.parse_rights(STATUS)
    assert before.lost(processes.parse_rights(STATUS.replace(old, new))) is lost


def test_files_in_use_are_those_open_to_read_or_mapped_and_no_programs(tmp_path: Path) -> None:
    names = ("open", "both", "written", "mapped", "writable", "deleted")
    paths = {name: tmp_path / name for name in names}
    for path in paths.values():
        path.write_bytes(bytes(8192))
    with contextlib.ExitStack() as stack:
        stack.enter_context(open(paths["open"], "rb"))
        stack.enter_context(open(paths["both"], "r+b"))
        stack.enter_context(open(paths["written"], "ab"))
        stack.enter_context(open(paths["deleted"], "rb"))
        paths["deleted"].unlink()
        for name, access in (("mapped", mmap.ACCESS_READ), ("writable", mmap.ACCESS_WRITE)):
            with open(paths[name], "r+b") as file:
                stack.enter_context(mmap.mmap(file.fileno(), 0, access=access))
        found = procfs.files_in_use(os.getpid())
    mine = {Path(path).name for path in found if path.startswith(str(tmp_path))}
    assert mine == {"open", "both", "mapped", "writable"}
    assert os.path.realpath(sys.executable) not in found
    assert not any(path.endswith("libc.so.6") for path in found)
    assert procfs.files_in_use(2**22) == set()
