# SPDX-License-Identifier: Apache-2.0
"""bench/index.py: its files are what they claim to be, and it measures them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest
from conftest import HANG_SECONDS
from paths import BENCH

from uffdprefetch.formats.detect import open_index


def test_the_lmdb_of_holes_is_one_for_the_library_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import index_files

    index_files.lmdb(tmp_path / "data.mdb", 40_000, 12288)
    with lmdb.open(str(tmp_path), readonly=True, lock=False) as env, env.begin() as txn:
        assert (txn.stat()["entries"], txn.stat()["depth"]) == (40_000, 3)
        assert txn.get(b"00031234") == bytes(12288)
        assert sum(1 for _ in txn.cursor().iternext(values=False)) == 40_000
    assert len(open_index(tmp_path)) == 40_000


def test_it_prints_a_row_for_each_format(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    words = [sys.executable, str(BENCH / "index.py"), "--records", "2000", "--rounds", "1"]
    words += ["--directory", str(tmp_path), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {row["format"] for row in results} == {"raw", "npy", "lmdb", "tfrecord", "arrow"}
    assert all(row["records"] == 2000 and row["cached_seconds"] > 0 for row in results)
    assert done.stdout.count("\n") == 2 + len(results)
