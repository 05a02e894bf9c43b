# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch index`: what it prints, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from conftest import HANG_SECONDS, uffdprefetch
from record_files import header, tfrecord

from uffdprefetch.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main(["index", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out, err


def document(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    status, out, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    assert found["schema"] == "uffdprefetch.index/1"
    return found


@pytest.fixture
def database(tmp_path: Path) -> Path:
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 26, max_dbs=2) as env:
        named = env.open_db(b"na\x1bmed")
        with env.begin(write=True) as txn:
            for number in range(30):
                txn.put(b"key%02d" % number, bytes(100 * number))
            txn.put(b"\xff\x00", b"binary", db=named)
            txn.put(b"key07", b"again", db=named)
    return tmp_path / "db"


def test_an_lmdb_is_described(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, database)
    data = database / "data.mdb"
    assert (found["format"], found["file"], found["records"]) == ("lmdb", str(data), 32)
    assert found["file_bytes"] == data.stat().st_size
    assert found["record_bytes"] == sum(100 * n for n in range(30)) + len(b"binary") + len(b"again")
    assert found["record_size_bytes"] == {"smallest": 0, "median": 1300, "largest": 2900}
    assert found["record_bytes"] + sum(found["outside_bytes"].values()) == found["file_bytes"]
    assert (found["keys"], found["exact"], found["granularity"]) == (True, True, "record")
    assert [one["records"] for one in found["facts"]["databases"]] == [30, 2]
    assert found["index_bytes_per_record"] == round(found["index_bytes"] / 32, 3)
    status, out, err = run(capsys, database)
    assert (status, err) == (0, "")
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert lines["format"].strip() == "lmdb"
    assert "32 in " in lines["records"]
    assert r"(main): 30, na\x1bmed: 2" in lines["databases"]
    assert "leaf pages" in lines and "made in" in lines["index"]
    assert "\x1b" not in out


def test_a_record_is_found_by_number_and_by_key(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, database, "--key", "key29")
    (one,) = found["records"]
    ((start, end),) = one["extents"]
    data = (database / "data.mdb").read_bytes()
    assert (one["record"], one["key"], end - start) == (29, "key29", 2900)
    assert data[start:end] == bytes(2900)
    assert document(capsys, database, "--record", 29)["records"] == [one]
    both = document(capsys, database, "--key", "key07")
    assert (both["found"], [len(r["extents"]) for r in both["records"]]) == (2, [1, 1])
    binary = document(capsys, database, "--key", "hex:ff00")["records"][0]
    assert binary["key_hex"] == "ff00"
    assert data[slice(*binary["extents"][0])] == b"binary"
    _, out, _ = run(capsys, database, "--key", "key29")
    assert out == f"record 29: bytes {start} to {end} (2900 B)  key29\n"


def test_raw_records_and_their_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(4096 + 10 * 1024 + 7))
    for words in (("--record-size", "1k,4KiB"), ("--record-size", "1024", "--header-size", "4k")):
        found = document(capsys, path, *words)
        assert (found["format"], found["records"]) == ("raw", 10)
        assert found["outside_bytes"] == {"header": 4096, "part of a last record": 7}
    _, out, _ = run(capsys, path, "--record-size", "1k,4k")
    assert "part of a last record  7 B of no record" in out
    found = document(capsys, path, "--record-size", "1k", "--record", 9)
    assert found["records"][0]["extents"] == [[9216, 10240]]


def test_npy_and_tfrecord_without_being_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 7), np.float32))
    (tmp_path / "b").write_bytes(tfrecord([b"a", b"bcd", b""]))
    found = document(capsys, tmp_path / "a.npy")
    assert (found["format"], found["facts"]["shape"], found["record_bytes"]) == ("npy", [5, 7], 140)
    found = document(capsys, tmp_path / "b", "--verify")
    assert found["record_size_bytes"] == {"smallest": 0, "median": 1, "largest": 3}
    assert found["facts"] == {"verified": True}
    assert (
        document(capsys, tmp_path / "b", "--format", "raw", "--record-size", "2")["records"] == 26
    )


def test_rows_of_arrow_have_several_extents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pa = pytest.importorskip("pyarrow")
    batch = pa.RecordBatch.from_arrays([pa.array(["some", "text"]), pa.array([1, 2])], ["a", "b"])
    for codec in (None, "zstd"):
        path = tmp_path / "a.arrow"
        with pa.ipc.new_stream(
            str(path), batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
        ) as out:
            out.write_batch(batch)
        found = document(capsys, path, "--record", 1)
        assert len(found["records"][0]["extents"]) == (3 if codec is None else 1)
        assert found["exact"] is (codec is None)
        all_of_it = document(capsys, path)
        outside = sum(all_of_it["outside_bytes"].values())
        assert all_of_it["record_bytes"] + outside == all_of_it["file_bytes"]
        _, text, _ = run(capsys, path)
        assert ("not exact" in text) == (codec is not None)


@pytest.mark.parametrize(
    ("words", "saw"),
    [
        (("no-such-file",), "cannot read no-such-file: No such file"),
        (("text",), "text: no known format: it begins with 74 65 78 74"),
        (("empty",), "empty: no known format: it is empty"),
        ((".",), ". is a directory without data.mdb"),
        (("text", "--format", "lmdb"), "text: no LMDB meta page at byte 0"),
        (("text", "--format", "jpeg"), "--format jpeg: one of lmdb, npy"),
        (("text", "--record-size", "0"), "--record-size: at least 1 byte"),
        (("text", "--record-size", "x"), "not a size: 'x'"),
        (("text", "--header-size", "1"), "--header-size is of raw records"),
        (("text", "--record-size", "1,2", "--header-size", "1"), "given twice"),
        (("text", "--record-size", "1", "--record", "4"), "text: no record 4: it has 4, from 0"),
        (("text", "--record-size", "1", "--record", "-1"), "no record -1"),
        (("text", "--record-size", "1", "--key", "a"), "text: no keys in raw files"),
        (("db", "--key", "absent"), "no record has the key b'absent'"),
        (("db", "--key", "hex:zz"), "--key hex:zz: not hexadecimal"),
        (("cut.tfrecord",), "cut.tfrecord: file cut short at byte 14: the record at byte 0 has 10"),
        (("text", "--", "job"), "nothing goes after --"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], saw: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"text")
    Path("empty").touch()
    Path("cut.tfrecord").write_bytes(header(10) + b"ab")
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith("uffdprefetch: ") and err.count("\n") == 1
    assert saw in err


def test_on_a_terminal_there_is_a_table(tmp_path: Path, env: dict[str, str]) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 7), np.float32))
    reader, writer = os.openpty()
    words = uffdprefetch("index", str(tmp_path / "a.npy"))
    env["COLUMNS"] = "100"
    done = subprocess.run(words, stdout=writer, env=env, timeout=HANG_SECONDS, check=True)
    os.close(writer)
    text = b""
    try:
        while piece := os.read(reader, 4096):
            text += piece
    except OSError:  # the other end is closed
        pass
    os.close(reader)
    assert done.returncode == 0
    assert "┃" in text.decode() or "│" in text.decode()
    assert "5 in 140 B" in text.decode()


def test_the_help_names_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["index", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "lmdb, npy, arrow, tfrecord, safetensors, raw" in text and "SIZE[,HEADER]" in text
    main(["--help"])
    assert "index" in capsys.readouterr().out
