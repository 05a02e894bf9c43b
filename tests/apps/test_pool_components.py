# SPDX-License-Identifier: Apache-2.0
"""Real programs with --engine pool, a quarter of what they read in the pool: the same output."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from components import ARRAY, TABLES, TESTING, Run, Runner
from components import python as interpreter
from conftest import require
from test_component_lmdb import READ, check_same
from test_component_python import LOADER, _plain
from test_component_sqlite import MMAP, QUERY

pytest_plugins = ["components"]

POOL = ("--engine", "pool", "--budget", "24MiB")


def check_pooled(run: Run, path: Path) -> None:
    """The pool served the file, and blocks of it left to make room."""
    assert run.file(path)["served_by"] == "pool", run.summary["degradations"]
    pool = run.summary["pool"]
    assert pool["evicted_bytes"] > 0 and pool["resident_peak_bytes"] <= 24 << 20
    assert pool["waiters"] == 0


def test_py_lmdb_with_a_map_larger_than_its_file(runner: Runner, store: Path) -> None:
    """Ten times the file, opened twice and read twice each time."""
    path = store / TESTING
    words = interpreter(READ, "readonly=1,lock=1,readahead=0", path)
    run = check_same(runner, words, cold=[path], options=POOL)
    assert [line.split()[0] for line in run.stdout.splitlines()] == [b"0", b"1"]
    check_pooled(run, path)


def test_sqlite_reads_through_its_mapping(runner: Runner, store: Path) -> None:
    program = shutil.which("sqlite3")
    require(program, "sqlite3 is missing: install it")
    words = [str(program), "-readonly", str(store / TABLES), MMAP + QUERY + QUERY]
    run = check_same(runner, words, cold=[store / TABLES], options=POOL)
    assert run.stdout
    check_pooled(run, store / TABLES)


def test_sqlite_that_may_write_is_only_watched(runner: Runner, store: Path, tmp_path: Path) -> None:
    program = shutil.which("sqlite3")
    require(program, "sqlite3 is missing: install it")
    copy = Path(shutil.copy(store / TABLES, tmp_path / "copy.sqlite"))
    words = [str(program), str(copy), MMAP + QUERY]
    # --strict: the service is up first. What the pool does not serve waits for none.
    run = check_same(runner, words, cold=[copy], options=(*POOL, "--strict"))
    assert run.file(copy)["served_by"] == "page_tables"
    assert run.summary["pool"]["read_bytes"] == 0


def test_batches_of_a_dataloader_with_two_forked_workers(runner: Runner, store: Path) -> None:
    """They read the mapping that their parent made."""
    require(importlib.util.find_spec("torch"), "torch is missing: pip install torch")
    words = [sys.executable, str(LOADER), "array", str(store / ARRAY)]
    run = runner.wrapped(*words, "2", "fork", cold=[store / ARRAY], options=POOL)
    assert run.status == 0, run.stderr
    if "array" not in _plain:
        _plain["array"] = runner.plain(*words, "0", "fork")
    assert run.stdout == _plain["array"]
    check_pooled(run, store / ARRAY)


def test_an_array_is_written_out_from_its_mapping(runner: Runner, store: Path) -> None:
    """By tofile(), sendfile's cousin in user space, and by O_DIRECT from the mapping."""
    code = """
import hashlib, mmap, os, sys, numpy as np
array = np.load(sys.argv[1], mmap_mode="r")
array.tofile("copy.bin")
fd = os.open("direct.bin", os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_TRUNC)
with open(sys.argv[1], "rb") as file:
    view = memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ))
for at in range(0, len(view) & -4096, 1 << 21):
    piece = view[at : min(at + (1 << 21), len(view) & -4096)]
    assert os.write(fd, piece) == len(piece)
for name in ("copy.bin", "direct.bin"):
    print(name, hashlib.file_digest(open(name, "rb"), "sha256").hexdigest())
os.unlink("copy.bin"), os.unlink("direct.bin")
"""
    words = interpreter(code, store / ARRAY)
    run = check_same(runner, words, cold=[store / ARRAY], options=POOL)
    assert [line.split()[0] for line in run.stdout.splitlines()] == [b"copy.bin", b"direct.bin"]
    check_pooled(run, store / ARRAY)


def test_mappings_lie_where_huge_pages_can_be_mapped(runner: Runner, store: Path) -> None:
    """Congruent with their offsets in the file, so that a page of 2 MiB is one entry; one that says
    where it wants to be lies there."""
    code = """
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
fd, length = os.open(sys.argv[1], os.O_RDONLY), 16 << 20
for offset in (0, 3 * 4096, (1 << 20) + 4096, 2 << 20):
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    print((address - offset) % (2 << 20), ctypes.string_at(address, 8).hex())
wish = (address - (1 << 30)) & -(2 << 20) | 0x5000
print(libc.mmap(wish, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0) == wish)
"""
    run = runner.wrapped(*interpreter(code, store / ARRAY), cold=[store / ARRAY], options=POOL)
    assert run.status == 0, run.stderr
    *places, at_its_wish = run.stdout.decode().splitlines()
    assert [line.split()[0] for line in places] == ["0"] * 4 and at_its_wish == "True"
    content = (store / ARRAY).read_bytes()
    for line, offset in zip(places, (0, 3 * 4096, (1 << 20) + 4096, 2 << 20), strict=True):
        assert bytes.fromhex(line.split()[1]) == content[offset : offset + 8]
