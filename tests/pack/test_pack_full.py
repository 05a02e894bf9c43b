# SPDX-License-Identifier: Apache-2.0
"""A file system that is full, a quota, a limit: one line, and a database that goes on."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from disks import disk
from packed_trees import command, write_tree

from uffdprefetch.data.layout import PackDescription
from uffdprefetch.pack import writer
from uffdprefetch.pack.stored import Stored
from uffdprefetch.pack.verifying import verify

MIB = 1 << 20
#: Transactions of 4 MiB.
SMALL = "from uffdprefetch.pack import writer\nwriter.TRANSACTION_BYTES = 4 << 20\n"


def tree_of(root: Path, mib: int) -> int:
    chance = random.Random(1)
    write_tree(root, {b"d/%04d" % i: chance.randbytes(MIB // 4) for i in range(4 * mib)})
    return 4 * mib


def check_goes_on(path: Path, tree: Path, count: int, told: str, cure: str = "make room") -> None:
    """It was ended after some transactions, and takes the rest."""
    assert told.count("\n") == 1 and "Traceback" not in told, told
    assert f"{cure}, then --resume" in told
    with Stored(str(path)) as stored:
        assert 0 < len(stored.entries) < count
        assert not stored.description.complete
    done = command("pack", tree, "-o", path, "--resume")
    assert done.returncode == 0, done.stderr
    assert verify(str(path), (), print) == (count, 0, 0)


@pytest.mark.slow
@pytest.mark.root
def test_a_full_file_system_is_a_line_and_it_goes_on_once_there_is_room(tmp_path: Path) -> None:
    count = tree_of(tmp_path / "tree", 30)
    with disk("ext4", tmp_path) as root:
        with open(root / "filling", "wb") as filling:
            os.posix_fallocate(filling.fileno(), 0, 35 * MIB)
        done = command("pack", tmp_path / "tree", "-o", root / "o.lmdb", code=SMALL)
        assert done.returncode == 1
        assert "No space left on device" in done.stderr
        os.unlink(root / "filling")
        check_goes_on(root / "o.lmdb", tmp_path / "tree", count, done.stderr)


@pytest.mark.slow
def test_a_limit_of_a_files_size_is_such_a_line_too(tmp_path: Path) -> None:
    count = tree_of(tmp_path / "tree", 20)
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({10 * MIB},) * 2)\n"
    done = command("pack", tmp_path / "tree", "-o", tmp_path / "o.lmdb", code=SMALL + limit)
    assert done.returncode == 1
    assert os.strerror(errno.EFBIG) in done.stderr
    check_goes_on(
        tmp_path / "o.lmdb", tmp_path / "tree", count, done.stderr, "raise the limit (ulimit -f)"
    )


def test_of_what_is_larger_than_a_file_may_be_nothing_is_left(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree", {b"small": bytes(100), b"large": bytes(MIB), b"empty": b""})
    done = command("pack", tmp_path / "tree", "-o", tmp_path / "o.lmdb")
    assert done.returncode == 0, done.stderr
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({MIB // 2},) * 2)\n"
    done = command("unpack", tmp_path / "o.lmdb", "-o", tmp_path / "out", code=limit)
    assert done.returncode == 1
    assert "large: it cannot be written: RLIMIT_FSIZE is 512 KiB (ulimit -f)" in done.stderr
    assert sorted(os.listdir(tmp_path / "out")) == ["empty", "small"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_what_does_not_fit_is_told_by_what_the_file_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """LMDB says of a write that is cut short that there was an error of the disk."""
    one = writer.PackWriter(str(tmp_path / "o.lmdb"), PackDescription(("x",)))

    def full(fd: int, at: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writer.os, "posix_fallocate", full)
    error = one._cannot(one._lmdb.Error("mdb_txn_commit: Input/output error"), 0)
    monkeypatch.undo()
    assert error.exit_code == 1
    assert os.strerror(number) in error.message and "--resume" in error.message
    error = one._cannot(one._lmdb.Error("mdb_txn_commit: Input/output error"), 0)
    assert error.message.endswith("o.lmdb: Input/output error"), "there is room: it was the disk"
    one.close()
