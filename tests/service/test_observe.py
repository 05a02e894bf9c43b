# SPDX-License-Identifier: Apache-2.0
"""service/observe: which lines of /proc/PID/maps are mappings worth watching, and whose."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import require, wait_until
from harness import Job, Start, snapshot, write_records

from uffdprefetch.base.procfs import CHECKPOINT_NAME, Mapping, file_readers
from uffdprefetch.report.summary import short_lines
from uffdprefetch.service import observe
from uffdprefetch.service.found import FoundMappings
from uffdprefetch.service.observe import Observer
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.unserved import Coarse

pytest_plugins = ("harness_fixtures",)

MIB = 1 << 20


def line(start: int, length: int, rights: str, offset: int, inode: int, path: str) -> str:
    return f"{start:x}-{start + length:x} {rights} {offset:08x} 08:01 {inode} {path}"


def test_large_mappings_that_only_read_files_are_watched_and_others_are_not() -> None:
    maps = "\n".join([
        line(1 << 40, 32 * MIB, "r--s", 0, 7, "/data/records"),
        line(2 << 40, 32 * MIB, "r--p", 4096, 8, "/data/with a blank"),
        line(3 << 40, 32 * MIB, "rw-p", 0, 9, "/data/weights"),
        line(8 << 40, 32 * MIB, "rw-s", 0, 12, "/data/written"),
        line(4 << 40, 8 * MIB, "r--p", 0, 10, "/data/small"),
        line(5 << 40, 32 * MIB, "r--p", 0, 0, "[heap]"),
        line(6 << 40, 32 * MIB, "r--p", 0, 11, "/data/gone (deleted)"),
        f"{7 << 40:x}-{(7 << 40) + 32 * MIB:x} r--p 00000000 00:00 0",
    ])  # fmt: skip
    assert file_readers(maps, 16 * MIB) == [
        Mapping(1 << 40, (1 << 40) + 32 * MIB, 0, 7, True, "/data/records"),
        Mapping(2 << 40, (2 << 40) + 32 * MIB, 4096, 8, False, "/data/with a blank"),
        Mapping(3 << 40, (3 << 40) + 32 * MIB, 0, 9, False, "/data/weights", copies=True),
    ]


def test_the_constants_of_a_program_or_a_library_are_none_of_the_jobs_data() -> None:
    """The dynamic linker maps them past every interposer; in a large library they are many MiB."""
    library = "/usr/lib/libtorch_cpu.so"
    for executable in ("r-xp", "rwxp"):
        parts = [
            line(1 << 40, 64 * MIB, "r--p", 0, 7, library),
            line((1 << 40) + 64 * MIB, 64 * MIB, executable, 64 * MIB, 7, library),
            line((1 << 40) + 128 * MIB, 64 * MIB, "r--p", 128 * MIB, 7, library),
            line(2 << 40, 64 * MIB, "r--p", 0, 8, "/data/records"),
        ]
        for maps in ("\n".join(parts), "\n".join(parts[::-1])):
            assert [m.path for m in file_readers(maps, MIB)] == ["/data/records"]


def test_what_checkpoints_cut_into_pieces_is_one_mapping() -> None:
    start, page = 1 << 40, 4096
    maps = "\n".join([
        line(start, 16 * page, "r--s", 0, 7, "/data/records"),
        line(start + 16 * page, page, "r--p", 0, 99, CHECKPOINT_NAME + " (deleted)"),
        line(start + 17 * page, 32 * MIB, "r--s", 17 * page, 7, "/data/records"),
    ])  # fmt: skip
    (found,) = file_readers(maps, 16 * MIB)
    assert (found.start, found.end) == (start, start + 17 * page + 32 * MIB)
    assert found.path == "/data/records"


def met_after(
    looks: int, everybody: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """The processes that an Observer takes for its own after so many looks at this one."""
    table: Any = SimpleNamespace(has_changed=lambda *_: False)
    opener: Any = SimpleNamespace(open=lambda *_, **__: None)
    clients: dict[int, Client] = {}
    mappings: Any = None
    met: list[int] = []
    ledger = Ledger()
    monkeypatch.setattr(ledger.processes, "hello", lambda client: met.append(client.pid))
    found = FoundMappings(clients, mappings, mappings, table, opener, ledger)
    watcher = Observer(clients, found, ledger, MIB, everybody)
    path.write_bytes(bytes(2 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        for _ in range(looks):
            now_ns = watcher.due_ns + observe.LOOK_ALL_NS
            while watcher.due_ns <= now_ns:  # process by process
                watcher.look([os.getpid()], now_ns)
    for client in clients.values():
        client.close()
    return met


def test_of_a_round_one_process_is_looked_at_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(observe, "descendants", lambda _: [11, 12, 13])
    monkeypatch.setattr(observe, "maps_text", lambda pid: read.append(pid))
    nothing: Any = None
    found = FoundMappings({}, nothing, nothing, nothing, nothing, Ledger())
    watcher = Observer({}, found, Ledger(), MIB, everybody=True)
    for turn in range(3):
        watcher.look([11], 10**12)
        assert len(read) == turn + 1
        assert (watcher.due_ns > 10**12) == (turn == 2)
    assert sorted(read) == [11, 12, 13]


def test_a_forked_child_whose_agent_has_not_said_hello_yet_is_not_a_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    assert met_after(1, False, path, monkeypatch) == []
    assert met_after(2, False, path, monkeypatch) == [os.getpid()]
    assert met_after(1, True, path, monkeypatch) == [os.getpid()]


#: Maps a file, and ends when it is told.
STATIC = """
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
int main(int argc, char **argv)
{
    int fd = open(argv[1], O_RDONLY);
    volatile const char *m = mmap(0, 4 << 20, PROT_READ, MAP_PRIVATE, fd, 0);
    return (const char *)m == MAP_FAILED || m[0] < -128 || getchar() == EOF;
}
"""


#: Maps a file beyond its end, lets it grow, and ends when it is told.
GROWS = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t,
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
assert libc.mmap(None, 4 << 20, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0) != 2**64 - 1
os.truncate(sys.argv[1], 4 << 20)
sys.stdin.readline()
"""


def ended_once_found(run: Job, path: Path) -> dict[str, Any]:
    """The summary of a job that ends when the service has found its mapping."""

    def served() -> bool:
        return any(file.path == str(path) and file.served_by for file in snapshot(run.env).files)

    run.service()
    wait_until(served, "the service to find it")
    run.tell()
    summary = run.finish().good().summary
    assert summary is not None
    return summary


def test_a_mapping_of_a_file_that_grows_is_told_as_what_it_is(job: Start, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4096))
    run = job([sys.executable, "-c", GROWS, str(path)])
    summary = ended_once_found(run, path)
    assert summary["coarse"] == {str(path): Coarse.PAST_LIBC.words}


def test_why_a_static_program_is_found_late_is_told(job: Start, tmp_path: Path) -> None:
    require(shutil.which("gcc"), "gcc is not installed")
    program, path = tmp_path / "static", tmp_path / "data"
    built = subprocess.run(
        ["gcc", "-static", "-x", "c", "-o", program, "-"], input=STATIC, text=True, check=False,
        capture_output=True,
    )  # fmt: skip
    require(built.returncode == 0, f"no static libc: {built.stderr}")
    write_records(path, 4 * MIB)
    run = job([str(program), str(path)])
    summary = ended_once_found(run, path)
    assert summary["coarse"] == {str(path): Coarse.STATIC.words}
    told = short_lines(summary)[1:]
    assert told == [
        f"seen less closely than it could be: {Coarse.STATIC.words}",
        f"try: {Coarse.STATIC.remedy}",
    ]
