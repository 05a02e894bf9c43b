# SPDX-License-Identifier: Apache-2.0
"""A DataLoader over a packed data set under `wrap`: its order is followed to the records, by what
finds the keys of any data set, though the descriptions of the files lie between the files."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from conftest import wait_until
from harness import Start, auto, snapshot
from packed_trees import packed, write_tree
from record_files import grow

pytest.importorskip("torch")
pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.torch

N = 400
#: One name in UTF-8 and in Latin-1.
NAMES = b"class0/a/caf\xc3\xa9.bin", b"class0/a/caf\xe9.bin"
#: Pauses after some batches of each epoch, so that the test can look.
SCRIPT = """
import hashlib, json, sys, zlib
import torch
from torch.utils.data import DataLoader
from uffdprefetch.data import Packed

def main():
    data = Packed(sys.argv[1], loader=zlib.crc32)
    torch.manual_seed(5)
    workers, start = int(sys.argv[2]), sys.argv[3]
    loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=workers,
                        multiprocessing_context=start if workers else None)
    sha = hashlib.sha256()
    for epoch in range(2):
        for number, (crc, label) in enumerate(loader):
            sha.update(crc.numpy().tobytes() + label.numpy().tobytes())
            if number == 11:
                print(json.dumps({"read": epoch}), flush=True)
                sys.stdin.readline()
    print(json.dumps({"digest": sha.hexdigest()}), flush=True)

if __name__ == "__main__":
    main()
"""


def make(tmp_path: Path) -> Path:
    """As keys a-b/ comes before a/, as directories after it: no sample has its record's number."""
    chance = random.Random(3)
    files = {
        b"class%d/%s%04d.bin" % (i % 7, (b"a/", b"a-b/")[i % 2], i): chance.randbytes(
            chance.randrange(40_000, 160_000)
        )
        for i in range(N)
    }
    files |= {name: chance.randbytes(50_000) for name in NAMES}
    write_tree(tmp_path / "tree", files)
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    return tmp_path / "o.lmdb"


@pytest.mark.slow
@auto
@pytest.mark.parametrize(("workers", "start"), [(0, "fork"), (2, "fork"), (2, "spawn")])
def test_its_order_is_followed(job: Start, tmp_path: Path, workers: int, start: str) -> None:
    path = make(tmp_path)
    grow(path / "data.mdb")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(path), str(workers), start]
    run = job(words, wrap=False)
    for epoch in range(2):
        assert run.line() == {"read": epoch}
        run.tell()
    expected = run.line()
    assert run.finish().status == 0
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    run = job(words)
    how = "keys from .samples[0]"
    for epoch in range(2):
        assert run.line() == {"read": epoch}
        wait_until(
            lambda: sum(how in plan.get("how", "") and plan["sent_bytes"] > 4 << 20
                        for plan in snapshot(run.env).plans) > epoch,  # noqa: B023
            lambda: f"the mapping: {snapshot(run.env).plans}",
        )  # fmt: skip
        run.tell()
    assert run.line() == expected
    done = run.finish().good()
    followed = [plan for plan in done.summary["plans"] if how in plan["how"]]
    assert [(plan["dropped"], plan["items"]) for plan in followed] == [(None, N + len(NAMES))] * 2
