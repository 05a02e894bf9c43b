# SPDX-License-Identifier: Apache-2.0
"""What a packed database has of a tree or of tars, and what is left out of it, named."""

from __future__ import annotations

import hashlib
import io
import os
import random
import tarfile
import threading
import tracemalloc
from pathlib import Path

import lmdb
import pytest
from packed_trees import make_tree, packed, packed_telling, read_tree, write_tree

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.data import layout
from uffdprefetch.pack import packing, reading, writer
from uffdprefetch.pack.found import LeftOut
from uffdprefetch.pack.stored import Stored
from uffdprefetch.pack.tars import members
from uffdprefetch.pack.unpacking import unpack
from uffdprefetch.pack.verifying import verify
from uffdprefetch.pack.walk import walk


def plainly(path: Path) -> dict[bytes, bytes]:
    """All records of the main database, as py-lmdb alone reads them."""
    with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as transaction:
        return {key: value for key, value in transaction.cursor() if key != layout.META}


def stored_order(path: Path) -> list[bytes]:
    with Stored(str(path)) as stored:
        return [entry.path for entry in stored.in_order()]


def nothing(text: str) -> None:
    raise AssertionError(text)


def test_a_file_is_a_record_and_its_path_the_key(tmp_path: Path) -> None:
    files = make_tree(tmp_path / "tree")
    result = packed(tmp_path / "tree", tmp_path / "o.lmdb")
    assert plainly(tmp_path / "o.lmdb") == files
    assert (result.description.count, result.written) == (len(files), len(files))
    with Stored(str(tmp_path / "o.lmdb")) as stored:
        for entry in stored.in_order():
            status = os.stat(os.path.join(os.fsencode(tmp_path / "tree"), entry.path))
            digest = hashlib.sha256(files[entry.path]).digest()
            assert (entry.size_bytes, entry.mtime_ns, entry.sha256) == (
                status.st_size, status.st_mtime_ns, digest,
            )  # fmt: skip
    assert verify(str(tmp_path / "o.lmdb"), (), nothing) == (len(files), 0, 0)
    assert unpack(str(tmp_path / "o.lmdb"), str(tmp_path / "back"), nothing) == (len(files), 0, 0)
    assert read_tree(tmp_path / "back") == files
    some = next(iter(files)).decode()
    times = [os.stat(tmp_path / root / some).st_mtime_ns for root in ("tree", "back")]
    assert times[0] == times[1]


def test_files_lie_in_the_order_of_their_paths(tmp_path: Path) -> None:
    """That of keys: a directory's own slash counts, so `a-b` is before `a/b`."""
    files = make_tree(tmp_path / "tree", files=40)
    left_out = LeftOut(nothing)
    found = [each.path for each in walk(os.fsencode(tmp_path / "tree"), 0, left_out)]
    assert found == sorted(files)
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    assert stored_order(tmp_path / "o.lmdb") == sorted(files)


def test_a_seed_is_an_order_of_its_own(tmp_path: Path) -> None:
    files = make_tree(tmp_path / "tree")
    orders = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        packed(tmp_path / "tree", tmp_path / name, seed=seed)
        orders.append(stored_order(tmp_path / name))
        assert plainly(tmp_path / name) == files
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(files) != orders[0]


def test_names_are_bytes_and_one_of_the_database_is_nothing_special(tmp_path: Path) -> None:
    files = {
        b"\xff\xfe/\x80": b"no UTF-8",
        "käse/ü".encode(): b"UTF-8",
        b"meta": b"a file called as our database nearly is",
        b"#source": b"and one as its description",
        b"line\nfeed": b"",
        b"d/" * 127 + b"e" * 257: b"511 bytes",
    }
    assert max(map(len, files)) == 511
    files[b"d/" * 127 + b"e" * 200] = b"less"
    long = b"d/" * 128 + b"e" * 255
    write_tree(tmp_path / "tree", {k: v for k, v in files.items() if len(k) < 511})
    # a component has 255 bytes at the most
    del files[b"d/" * 127 + b"e" * 257]
    files[b"d/" * 128 + b"e" * 255] = b"511 bytes"
    files[b"d/" * 129 + b"e" * 254] = b"too long by one"
    write_tree(tmp_path / "tree", files)
    del files[b"d/" * 129 + b"e" * 254]
    result, told = packed_telling((tmp_path / "tree",), tmp_path / "o.lmdb")
    assert plainly(tmp_path / "o.lmdb") == files and long in files
    assert len(told) == 1 and "512 bytes, more than 511" in told[0]
    assert packing.status(result) == 1
    assert unpack(str(tmp_path / "o.lmdb"), str(tmp_path / "back"), nothing)[0] == len(files)
    assert read_tree(tmp_path / "back") == files


def test_links_and_special_files_are_counted(tmp_path: Path) -> None:
    files = make_tree(tmp_path / "tree")
    os.symlink("class0", tmp_path / "tree" / "link")
    os.symlink("nowhere", tmp_path / "tree" / "other")
    os.mkfifo(tmp_path / "tree" / "pipe")
    result = packed(tmp_path / "tree", tmp_path / "o.lmdb")
    assert plainly(tmp_path / "o.lmdb") == files
    assert result.left_out.summary() == "2 links, 1 special file"
    assert packing.status(result) == 0


def test_each_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_tree(tmp_path / "tree")
    opened: list[bytes] = []
    real = os.open

    def count(path: object, *rest: object, **more: object) -> int:
        if isinstance(path, bytes):
            opened.append(os.path.relpath(path, os.fsencode(tmp_path / "tree")))
        return real(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(reading.os, "open", count)
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    assert sorted(opened) == sorted(files)


# ---- files that change, or cannot be read --------------------------------------------------------


class Changing:
    """In the place of os.pread(): after a read of ``name`` it is written, ``times`` times."""

    def __init__(self, file: Path, times: int) -> None:
        self.file, self.times = file, times
        self.inode = os.stat(file).st_ino
        self.lock = threading.Lock()

    def __call__(self, fd: int, size: int, at: int) -> bytes:
        data = os.pread(fd, size, at)
        with self.lock:
            if at == 0 and os.fstat(fd).st_ino == self.inode and self.times:
                self.times -= 1
                self.file.write_bytes(b"other bytes" + bytes(self.times))
        return data


class OtherOs:
    """The module os, but for pread."""

    def __init__(self, pread: object) -> None:
        self.pread = pread

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


@pytest.mark.parametrize("times", [1, 2])
def test_a_file_that_changes_is_read_again_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    files = make_tree(tmp_path / "tree")
    path = sorted(files)[5]
    file = tmp_path / "tree" / path.decode()
    changing = Changing(file, times)
    monkeypatch.setattr(reading, "os", OtherOs(changing))
    result, told = packed_telling((tmp_path / "tree",), tmp_path / "o.lmdb")
    monkeypatch.undo()
    assert changing.times == 0
    if times == 1:
        assert not told and packing.status(result) == 0
        assert plainly(tmp_path / "o.lmdb") == {**files, path: file.read_bytes()}
        return
    assert len(told) == 1 and path.decode() in told[0] and "it changed while it was read" in told[0]
    assert packing.status(result) == 1
    del files[path]
    assert plainly(tmp_path / "o.lmdb") == files
    # and once it rests it is packed
    result, told = packed_telling((tmp_path / "tree",), tmp_path / "o.lmdb", resume=True)
    assert (result.written, told, packing.status(result)) == (1, [], 0)


def test_what_cannot_be_read_is_named_and_the_rest_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_tree(tmp_path / "tree")
    path = sorted(files)[3]
    real = reading.read_whole

    def gone(file: bytes, admit: object) -> object:
        if file.endswith(path):
            raise FileNotFoundError(2, "No such file or directory")
        return real(file, admit)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "read_whole", gone)
    result, told = packed_telling((tmp_path / "tree",), tmp_path / "o.lmdb")
    assert told == [f"left out: {path.decode()}: it cannot be read: No such file or directory"]
    assert packing.status(result) == 1 and result.written == len(files) - 1


# ---- resuming ------------------------------------------------------------------------------------


def test_what_is_new_or_changed_is_taken_by_resume_and_nothing_else_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_tree(tmp_path / "tree")
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    order = stored_order(tmp_path / "o.lmdb")
    changed = sorted(files)[4]
    more = {changed: b"changed", b"class1/new": b"new"}
    write_tree(tmp_path / "tree", more)
    read: list[bytes] = []
    real = reading.read_whole
    monkeypatch.setattr(reading, "read_whole", lambda f, a: (read.append(f), real(f, a))[1])
    assert packed(tmp_path / "tree", tmp_path / "o.lmdb", resume=True).written == 2
    assert len(read) == 2
    assert plainly(tmp_path / "o.lmdb") == {**files, **more}
    assert stored_order(tmp_path / "o.lmdb") == [*order, b"class1/new"]
    os.unlink(tmp_path / "tree" / changed.decode())
    result = packed(tmp_path / "tree", tmp_path / "o.lmdb", resume=True)
    assert result.gone == 1 and packing.status(result) == 1
    told: list[str] = []
    assert verify(str(tmp_path / "o.lmdb"), (), told.append) == (len(files), 1, 0)
    assert told == [f"{changed.decode()}: the source does not have it any more"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "it is there: --resume goes on with it, or remove it"),
        ({"resume": True, "seed": 5}, "--shuffle 5: "),
        ({"resume": True, "level": 3}, "--compress 3: "),
    ],
)
def test_another_database_is_not_made_of_one(
    tmp_path: Path, options: dict[str, object], why: str
) -> None:
    files = make_tree(tmp_path / "tree")
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    with pytest.raises(UffdPrefetchError, match=why) as raised:
        packed(tmp_path / "tree", tmp_path / "o.lmdb", **options)
    assert raised.value.exit_code == 2
    assert plainly(tmp_path / "o.lmdb") == files


def test_of_another_source_it_does_not_go_on(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    make_tree(tmp_path / "other", seed=2)
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    with pytest.raises(UffdPrefetchError, match=r"was packed with .*tree: --resume wants"):
        packed(tmp_path / "other", tmp_path / "o.lmdb", resume=True)


def test_there_is_one_writer(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    first = writer.PackWriter(str(tmp_path / "o.lmdb"), layout.PackDescription(("x",)))
    try:
        with pytest.raises(UffdPrefetchError, match="another `pack` is writing it"):
            writer.PackWriter(str(tmp_path / "o.lmdb"))
    finally:
        first.close()


def test_the_map_grows_with_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "GIB", 64 << 10)
    monkeypatch.setattr(writer, "TRANSACTION_BYTES", 100 << 10)
    files = make_tree(tmp_path / "tree", files=100)
    files[b"large"] = random.Random(1).randbytes(3 << 20)
    write_tree(tmp_path / "tree", files)
    packed(tmp_path / "tree", tmp_path / "o.lmdb")
    assert plainly(tmp_path / "o.lmdb") == files


# ---- tars ----------------------------------------------------------------------------------------


def tar_of(path: Path, files: dict[bytes, bytes], mode: str, extra: object = None) -> None:
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(os.fsdecode(b"./" + name))
            member.size, member.mtime = len(data), 1_700_000_000
            tar.addfile(member, io.BytesIO(data))
        if extra is not None:
            extra(tar)  # type: ignore[operator]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_tars_are_read_as_streams_compressed_or_not(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_tree(tmp_path / "tree")
    some = dict(sorted(files.items())[:20])
    rest = {path: data for path, data in files.items() if path not in some}

    def extra(tar: tarfile.TarFile) -> None:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "class0"
        tar.addfile(link)

    tar_of(tmp_path / "1.tar", some, mode, extra)
    tar_of(tmp_path / "2.tar", rest, mode)
    both = tmp_path / "1.tar", tmp_path / "2.tar"
    result = packed(both, tmp_path / "o.lmdb")
    assert plainly(tmp_path / "o.lmdb") == files
    assert result.left_out.summary() == "1 link"
    assert verify(str(tmp_path / "o.lmdb"), (), nothing) == (len(files), 0, 0)
    assert packed(both, tmp_path / "o.lmdb", resume=True).written == 0
    with pytest.raises(UffdPrefetchError, match="--shuffle: a tar is read from"):
        packed(both, tmp_path / "s.lmdb", seed=1)


def test_no_more_of_a_tar_is_decompressed_than_is_about_to_be_packed(tmp_path: Path) -> None:
    """It would be copied for each file, and may be a thousand times what was read."""
    tar_of(tmp_path / "1.tgz", {b"%03d" % number: bytes(1 << 20) for number in range(256)}, "w:gz")
    tracemalloc.start()
    try:
        found = members(os.fsencode(tmp_path / "1.tgz"), 0, LeftOut(nothing))
        assert sum(len(one.data or b"") for one in found) == 256 << 20
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_the_last_of_a_path_in_a_tar_counts_and_of_two_sources_the_first(tmp_path: Path) -> None:
    tar_of(tmp_path / "1.tar", {b"a": b"old", b"b": b"1"}, "w")
    tar_of(tmp_path / "1.tar", {b"a": b"new"}, "a")
    tar_of(tmp_path / "2.tar", {b"b": b"2", b"c": b"3"}, "w")
    both = tmp_path / "1.tar", tmp_path / "2.tar"
    result, told = packed_telling(both, tmp_path / "o.lmdb")
    assert plainly(tmp_path / "o.lmdb") == {b"a": b"new", b"b": b"1", b"c": b"3"}
    assert told == [
        f"left out: b: {tmp_path / '1.tar'} has a file of this path, too, which is packed"
    ]
    assert packing.status(result) == 1
    _, again = packed_telling(both, tmp_path / "o.lmdb", resume=True)
    assert again == told
    assert plainly(tmp_path / "o.lmdb") == {b"a": b"new", b"b": b"1", b"c": b"3"}


def test_no_path_leads_out_of_a_tar(tmp_path: Path) -> None:
    tar_of(tmp_path / "1.tar", {b"../x": b"1", b"a/../../y": b"2", b"good": b"3"}, "w")
    with tarfile.open(tmp_path / "1.tar", "a") as tar:
        member = tarfile.TarInfo("/absolute")
        tar.addfile(member)
    _, told = packed_telling((tmp_path / "1.tar",), tmp_path / "o.lmdb")
    assert plainly(tmp_path / "o.lmdb") == {b"good": b"3", b"absolute": b""}
    assert len(told) == 2 and all("leads out of the tar" in line for line in told)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_that_is_cut_short_is_a_line_and_goes_on_once_it_is_whole(
    tmp_path: Path, mode: str
) -> None:
    files = {b"%03d" % i: random.Random(i).randbytes(5000) for i in range(50)}
    tar_of(tmp_path / "1.tar", files, mode)
    whole = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(whole[: len(whole) // 2 + 1000])
    with pytest.raises(UffdPrefetchError, match="cut short") as raised:
        packed(tmp_path / "1.tar", tmp_path / "o.lmdb")
    assert raised.value.exit_code == 1
    assert 10 < len(plainly(tmp_path / "o.lmdb")) < 40, "what came before it is there"
    (tmp_path / "1.tar").write_bytes(whole)
    assert packed(tmp_path / "1.tar", tmp_path / "o.lmdb", resume=True).written < 40
    assert plainly(tmp_path / "o.lmdb") == files


def test_what_is_no_source_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no tar" * 200)
    for source, why in (("file", "neither a directory nor a tar"), ("none", "there is no such")):
        with pytest.raises(UffdPrefetchError, match=why) as raised:
            packed(tmp_path / source, tmp_path / "o.lmdb")
        assert raised.value.exit_code == 2
    assert not (tmp_path / "o.lmdb").exists()


# ---- unpacking -----------------------------------------------------------------------------------


def test_nothing_is_written_out_of_the_directory_or_over_something(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"x").digest()
    hostile = writer.PackWriter(str(tmp_path / "o.lmdb"), layout.PackDescription(("x",)))
    for number, path in enumerate((b"../out", b"/abs", b"a//b", b"good")):
        hostile.put(number, layout.Entry(path, 1, 0, 0, digest), b"x")
    hostile.complete(layout.PackDescription(("x",), complete=True))
    hostile.close()
    told: list[str] = []
    assert unpack(str(tmp_path / "o.lmdb"), str(tmp_path / "in" / "to"), told.append) == (1, 3, 0)
    assert read_tree(tmp_path / "in") == {b"to/good": b"x"}
    with pytest.raises(UffdPrefetchError, match="there is something in it") as raised:
        unpack(str(tmp_path / "o.lmdb"), str(tmp_path / "in"), told.append)
    assert raised.value.exit_code == 2
