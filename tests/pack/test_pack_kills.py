# SPDX-License-Identifier: Apache-2.0
"""Whenever `pack` is killed, --resume goes on from the last transaction, to the same database."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import wait_until
from packed_trees import MAIN, command, make_tree, packed, read_tree

from uffdprefetch.pack.stored import Stored, has_begun
from uffdprefetch.pack.unpacking import unpack
from uffdprefetch.pack.verifying import verify

pytestmark = pytest.mark.slow

#: Transactions of some files, and a map that must grow.
SMALL = """
from uffdprefetch.pack import writer
writer.TRANSACTION_BYTES, writer.GIB = 30 << 10, 256 << 10
"""
#: Kills itself at the NUMBER-th call of a function of what writes, before or after it.
AT = """
import os, signal, sys
import lmdb
from uffdprefetch.pack import writer
def killing(owner, function, number, after):
    real, calls = getattr(owner, function), [0]
    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        made = real(*args, **kwargs)
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return made
    setattr(owner, function, call)
"""
MOMENTS = {
    "before the directory is made": "killing(os, 'makedirs', 1, False)",
    "before the database is made": "killing(lmdb, 'open', 1, False)",
    "before its first transaction": "killing(lmdb, 'open', 1, True)",
    "after its first transaction": "killing(writer.PackWriter, '_change', 1, True)",
    "in a transaction": "killing(writer.PackWriter, '_put_meta', 5, True)",
    "between transactions": "killing(writer.PackWriter, '_change', 4, True)",
    "before the last one": "killing(writer.PackWriter, 'complete', 1, False)",
    "after the last one": "killing(writer.PackWriter, 'complete', 1, True)",
}


def held(path: Path) -> dict[bytes, bytes]:
    """The files that a database has after a kill: each as it was packed."""
    if not has_begun(str(path)):
        return {}
    with Stored(str(path)) as stored:
        return {entry.path: stored.value(entry) for entry in stored.in_order()}


def check_whole(path: Path, tree: Path, files: dict[bytes, bytes], undisturbed: Path) -> None:
    def nothing(text: str) -> None:
        raise AssertionError(text)

    assert verify(str(path), (), nothing) == (len(files), 0, 0)
    assert unpack(str(path), f"{path}.back", nothing) == (len(files), 0, 0)
    assert read_tree(Path(f"{path}.back")) == files
    orders = []
    for each in (path, undisturbed):
        with Stored(str(each)) as stored:
            orders.append([entry.path for entry in stored.in_order()])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("shuffled", [False, True])
def test_it_goes_on_after_a_kill_at_each_step(tmp_path: Path, shuffled: bool) -> None:
    files = make_tree(tmp_path / "tree", files=20)
    packed(tmp_path / "tree", tmp_path / "undisturbed", seed=9 if shuffled else None)
    words = ("--shuffle", "9") if shuffled else ()
    for moment, code in MOMENTS.items():
        path = tmp_path / moment.replace(" ", "-")
        done = command("pack", tmp_path / "tree", "-o", path, *words, code=f"{SMALL}{AT}{code}\n")
        assert done.returncode == -signal.SIGKILL, (moment, done.stderr)
        before = held(path)
        assert before.items() <= files.items()
        assert bool(before) == (list(MOMENTS).index(moment) >= 5), moment
        done = command("pack", tmp_path / "tree", "-o", path, "--resume", *words)
        assert done.returncode == 0, (moment, done.stderr)
        assert f" {len(files) - len(before):,} packed in" in done.stdout, moment
        check_whole(path, tmp_path / "tree", files, tmp_path / "undisturbed")


@pytest.mark.parametrize("kills", [5, 50])
def test_it_goes_on_after_kills_wherever_it_is(tmp_path: Path, kills: int) -> None:
    """Killed when the file has grown to a size that was drawn."""
    chance = random.Random(kills)
    files = make_tree(tmp_path / "tree", files=60 + 16 * kills)
    packed(tmp_path / "tree", tmp_path / "undisturbed")
    whole = os.path.getsize(tmp_path / "undisturbed" / "data.mdb")
    path = tmp_path / "o.lmdb"
    data, had, killed = path / "data.mdb", 0, 0
    words = [sys.executable, "-c", SMALL + MAIN, "pack", str(tmp_path / "tree"), "-o", str(path)]

    def size() -> int:
        return data.stat().st_size if data.exists() else 0

    for _ in range(kills):
        wanted = size() + chance.randrange(2 * whole // kills)
        process = subprocess.Popen(
            [*words, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        wait_until(
            lambda: size() >= wanted or process.poll() is not None,  # noqa: B023
            f"{wanted} bytes of the database",
        )
        process.kill()
        told = process.communicate()[1]
        assert process.returncode in (0, -signal.SIGKILL), told
        killed += process.returncode == -signal.SIGKILL
        now = held(path)
        assert now.items() <= files.items()
        assert len(now) >= had, "what a transaction has written stays"
        had = len(now)
    assert killed > kills // 4
    done = subprocess.run([*words, "--resume"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    check_whole(path, tmp_path / "tree", files, tmp_path / "undisturbed")
