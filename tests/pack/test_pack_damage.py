# SPDX-License-Identifier: Apache-2.0
"""Of a database with damaged bytes each is found, by a line, or nothing is read from it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from packed_trees import command, make_tree, packed

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.pack.verifying import verify

#: Reads each file by liblmdb, as a program does; says which differs.
READ = """
import sys
from uffdprefetch.data import Packed
data = Packed(sys.argv[1])
for name, _ in data.samples:
    with open(sys.argv[2] + "/" + name, "rb") as file:
        assert data.read(name) == file.read(), name
print(len(data))
"""


def read_by_liblmdb(path: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", READ, str(path), str(tree)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def flipped(file: Path, at: int, bit: int) -> None:
    fd = os.open(file, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ 1 << bit]), at)
    finally:
        os.close(fd)


@pytest.mark.parametrize("flips", [300, 10_000])
def test_each_damaged_byte_is_found_or_read_from_by_nobody(tmp_path: Path, flips: int) -> None:
    chance = random.Random(flips)
    files = make_tree(tmp_path / "tree", classes=5, files=30)
    path, data = tmp_path / "o.lmdb", tmp_path / "o.lmdb" / "data.mdb"
    packed(tmp_path / "tree", path)
    pages = data.stat().st_size // 4096
    seen = {"named": 0, "not read": 0, "no database": 0}
    unread = []
    for _ in range(flips):
        at, bit = chance.randrange(pages) * 4096 + chance.randrange(4096), chance.randrange(8)
        flipped(data, at, bit)
        told: list[str] = []
        try:
            same, other, _ = verify(str(path), (), told.append)
            seen["named" if other else "not read"] += 1
            assert len(told) >= min(other, 1)
            if not other:
                assert same == len(files)
                unread.append((at, bit))
        except UffdPrefetchError as error:
            assert error.exit_code == 2 and "\n" not in error.message, error.message
            seen["no database"] += 1
        flipped(data, at, bit)
    assert min(seen.values()) > flips // 200, seen
    for at, bit in chance.sample(unread, min(len(unread), flips // 60)):
        flipped(data, at, bit)
        done = read_by_liblmdb(path, tmp_path / "tree")
        assert done.returncode == 0, (at, bit, done.stderr)
        flipped(data, at, bit)


def test_a_key_that_leads_to_another_leaf_is_found(tmp_path: Path) -> None:
    """No record depends on it, and no file is found without it."""
    make_tree(tmp_path / "tree", classes=5, files=60)
    path, data = tmp_path / "o.lmdb", tmp_path / "o.lmdb" / "data.mdb"
    packed(tmp_path / "tree", path)
    whole = data.read_bytes()
    told = [
        at
        for page in range(2, len(whole) // 4096)
        if whole[page * 4096 + 10] & 0x01  # P_BRANCH
        for at in range(page * 4096 + 16, page * 4096 + 4096)
        if whole[at : at + 5] == b"class"
    ]
    assert told, "no branch page has a path"
    found = 0
    for at in told:
        flipped(data, at + 5, 1)
        try:
            verify(str(path), (), lambda text: None)
        except UffdPrefetchError as error:
            found += error.exit_code == 2 and "is not found" in error.message
        flipped(data, at + 5, 1)
    assert found > 10, "the others lead to the same leaf still, or are of an older transaction"


@pytest.mark.parametrize("words", [("pack", "--verify", "-o"), ("pack", "--list", "-o"),
                                   ("unpack", "-o", "{out}"), ("pack", "{tree}", "--resume", "-o")],
                         ids=["verify", "list", "unpack", "resume"])  # fmt: skip
@pytest.mark.parametrize("damage", ["cut", "garbage", "text", "other"])
def test_what_is_no_packed_database_is_one_line_and_status_2(
    tmp_path: Path, words: tuple[str, ...], damage: str
) -> None:
    make_tree(tmp_path / "tree")
    path, data = tmp_path / "o.lmdb", tmp_path / "o.lmdb" / "data.mdb"
    packed(tmp_path / "tree", path)
    if damage == "cut":
        os.truncate(data, data.stat().st_size // 2)
    elif damage == "garbage":
        data.write_bytes(random.Random(1).randbytes(100_000))
    elif damage == "text":
        data.write_bytes(b"text\n")
    else:
        import lmdb

        data.unlink()
        with lmdb.open(str(path), lock=False) as env, env.begin(write=True) as transaction:
            transaction.put(b"some", b"thing")
    given = [word.format(out=tmp_path / "out", tree=tmp_path / "tree") for word in words]
    done = command(*given, path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.startswith("uffdprefetch: ") and done.stderr.count("\n") == 1, done.stderr
    assert "o.lmdb" in done.stderr


@pytest.mark.parametrize("missing", [1, 4096, 100_000])
def test_who_opens_a_database_whose_end_is_missing_is_told(tmp_path: Path, missing: int) -> None:
    """A copy that was cut short. A page that is not there would end the process."""
    make_tree(tmp_path / "tree", classes=5, files=30)
    path, data = tmp_path / "o.lmdb", tmp_path / "o.lmdb" / "data.mdb"
    packed(tmp_path / "tree", path)
    assert read_by_liblmdb(path, tmp_path / "tree").returncode == 0
    size = data.stat().st_size
    os.truncate(data, size - missing)
    done = read_by_liblmdb(path, tmp_path / "tree")
    assert done.returncode == 1, done.stderr
    said = f"cut off: {size - missing} of {size} bytes are there: copy or pack it again"
    assert said in done.stderr.splitlines()[-1]


def test_a_damaged_value_is_named_and_the_others_unpacked(tmp_path: Path) -> None:
    files = make_tree(tmp_path / "tree")
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    data = tmp_path / "o.lmdb" / "data.mdb"
    path, value = max(files.items(), key=lambda item: len(item[1]))
    flipped(data, data.read_bytes().index(value) + 1000, 3)
    done = command("unpack", tmp_path / "o.lmdb", "-o", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr == (
        f"uffdprefetch: not written: {path.decode()}: damaged in the database:"
        " its bytes are not those that were packed\n"
    )
    assert f"{len(files) - 1} files written, 1 not" in done.stdout
    assert not (tmp_path / "out" / path.decode()).exists()
    verified = command("pack", "-o", tmp_path / "o.lmdb", "--verify")
    assert verified.returncode == 2 and f"{len(files) - 1} files as" in verified.stdout


@pytest.mark.parametrize("words", [("pack", "--verify", "-o"), ("pack", "--list", "-o"),
                                   ("unpack", "-o", "{out}")],
                         ids=["verify", "list", "unpack"])  # fmt: skip
@pytest.mark.parametrize("kind", ["a file", "nothing", "an empty directory"])
def test_what_cannot_be_a_packed_database_is_status_2(
    tmp_path: Path, words: tuple[str, ...], kind: str
) -> None:
    path = tmp_path / "o.lmdb"
    if kind == "a file":
        path.write_bytes(b"x" * 5000)
    elif kind == "an empty directory":
        path.mkdir()
    done = command(*(word.format(out=tmp_path / "out") for word in words), path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.startswith(f"uffdprefetch: cannot read {path}: ")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
