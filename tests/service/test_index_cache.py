# SPDX-License-Identifier: Apache-2.0
"""formats/cache: one process of a node makes an index, all map it, and none believes a bad file."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import require, wait_until
from record_files import some_records, tfrecord

from uffdprefetch import __version__
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.formats import cache, stored
from uffdprefetch.formats.detect import open_index
from uffdprefetch.formats.index import FormatOptions, RecordIndex, describe
from uffdprefetch.formats.reader import FormatError

LONG_AGO_NS = 1_500_000_000_000_000_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make(tmp_path / "a.tfrecord", 1)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"UFFDPREFETCH_RUNDIR": str(tmp_path / "hub")}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were indexed, not taken from the cache."""
    names: list[str] = []
    original = cache.read_steady

    def read(reader: object, name: str, *rest: object) -> RecordIndex:
        names.append(os.path.basename(name))
        return original(reader, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "read_steady", read)
    return names


def make(path: Path, seed: int, count: int = 50) -> Path:
    path.write_bytes(tfrecord(some_records(seed, count, 3000)))
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return path


def kept(environ: dict[str, str], ending: str = ".idx") -> list[Path]:
    return sorted((Path(environ["UFFDPREFETCH_RUNDIR"]) / "index").glob(f"*{ending}"))


def same(one: RecordIndex, other: RecordIndex) -> bool:
    mine, its = one.arrays(), other.arrays()
    equal = all(np.array_equal(mine[name], its[name]) for name in mine)
    return equal and mine.keys() == its.keys() and describe(one) == describe(other)


# ---- what is shared -----------------------------------------------------------------------------


def test_the_second_one_maps_what_the_first_one_made(
    file: Path, environ: dict[str, str], made: list[str]
) -> None:
    first = cache.open_cached(file, environ=environ)
    second = cache.open_cached(file, environ=environ)
    assert made == ["a.tfrecord"]
    assert same(first, open_index(file)) and same(second, first)
    for index in (first, second):
        base = index.places.arrays()["0.start"]
        assert not base.flags.writeable
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(getattr(base, "obj", base), mmap.mmap)
    (kept_file,) = kept(environ)
    assert stat.S_IMODE(kept_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept_file.parent.stat().st_mode) == 0o700


def test_an_lmdb_with_its_keys_and_columns(
    tmp_path: Path, environ: dict[str, str], made: list[str]
) -> None:
    import lmdb

    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for number in range(300):
            txn.put(b"%05d" % number, bytes(number * 10))
    os.utime(tmp_path / "db" / "data.mdb", ns=(LONG_AGO_NS, LONG_AGO_NS))
    indices = [cache.open_cached(tmp_path / "db", environ=environ) for _ in range(2)]
    assert made == ["data.mdb"]
    assert same(indices[1], open_index(tmp_path / "db"))
    assert indices[1].find(b"00123").tolist() == [123]
    assert indices[1].columns["leaf_page"].tolist() == indices[0].columns["leaf_page"].tolist()


@pytest.mark.parametrize(
    "change", ["mtime", "size", "another file", "options", "format", "version"]
)
def test_what_was_made_of_something_else_is_not_used(
    file: Path, environ: dict[str, str], made: list[str], change: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cache.open_cached(file, environ=environ)
    wanted, options = None, FormatOptions()
    if change == "mtime":
        os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS + 1))
    elif change == "size":
        with file.open("ab") as more:
            more.write(tfrecord([b"one more"]))
        os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))
    elif change == "another file":
        os.rename(make(file.with_name("b"), 1), file)
    elif change == "options":
        options = FormatOptions(record_bytes=10)
    elif change == "format":
        wanted = "tfrecord"
    else:
        monkeypatch.setattr(cache, "__version__", __version__ + "+1")
    again = cache.open_cached(file, wanted, options, environ=environ)
    assert len(made) == 2
    assert same(again, open_index(file, wanted, options))


def test_the_index_of_a_file_that_was_written_just_now_is_not_kept(
    file: Path, environ: dict[str, str], made: list[str]
) -> None:
    """It may be written again within the clock's tick, with the same mtime."""
    os.utime(file)
    cache.open_cached(file, environ=environ)
    assert kept(environ) == []
    assert made == ["a.tfrecord"]


def test_to_verify_is_to_read(file: Path, environ: dict[str, str]) -> None:
    cache.open_cached(file, environ=environ)
    data = bytearray(file.read_bytes())
    starts, ends = open_index(file).extents(np.arange(50))
    data[int(starts[int(np.argmax(ends - starts))])] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))
    with pytest.raises(FormatError, match="wrong CRC of data"):
        cache.open_cached(file, options=FormatOptions(verify=True), environ=environ)


def test_what_is_wrong_with_the_file_is_told(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "text").write_bytes(b"no records")
    os.utime(tmp_path / "text", ns=(LONG_AGO_NS, LONG_AGO_NS))
    for _ in range(2):
        with pytest.raises(UffdPrefetchError, match="no known format"):
            cache.open_cached(tmp_path / "text", environ=environ)
    assert kept(environ) == []


# ---- what is not believed -----------------------------------------------------------------------


def damage(path: Path, kind: str) -> None:
    """Make a stored index bad in one of these ways."""
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        os.truncate(path, len(data) - 1)
    elif kind == "longer":
        os.truncate(path, len(data) + 1)
    elif kind == "empty":
        os.truncate(path, 0)
    elif kind == "readable for others":
        path.chmod(0o644)
    elif kind == "of another user":
        os.chown(path, 65534, -1)
    elif kind == "a link":
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real"))
    elif kind == "a pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    elif kind == "a directory":
        path.unlink()
        path.mkdir()
    else:
        assert kind == "another program's"
        path.write_bytes(b"x" * len(data))


@pytest.mark.parametrize(
    "kind",
    [
        "truncated", "longer", "empty", "readable for others", "of another user", "a link",
        "a pipe", "a directory", "another program's",
    ],
)  # fmt: skip
def test_a_bad_file_is_made_anew(
    file: Path, environ: dict[str, str], made: list[str], kind: str
) -> None:
    require(kind != "of another user" or os.geteuid() == 0, "chown needs root")
    cache.open_cached(file, environ=environ)
    (path,) = kept(environ)
    damage(path, kind)
    assert same(cache.open_cached(file, environ=environ), open_index(file))
    assert made == ["a.tfrecord"] * 2
    cache.open_cached(file, environ=environ)
    assert len(made) == (3 if kind == "a directory" else 2), "and used again"


def test_no_changed_byte_of_the_header_is_believed(file: Path, environ: dict[str, str]) -> None:
    cache.open_cached(file, environ=environ)
    (path,) = kept(environ)
    key = cache._key(_stamp(file), None, FormatOptions())
    good = path.read_bytes()
    assert stored.read(str(path), key) is not None
    header_bytes = int.from_bytes(good[8:16], sys.byteorder)
    for at in range(48 + header_bytes):
        with path.open("r+b") as out:
            out.seek(at)
            out.write(bytes([good[at] ^ 0x11]))
            out.seek(at)
            out.flush()
            assert stored.read(str(path), key) is None, at
            out.write(good[at : at + 1])
    assert stored.read(str(path), key) is not None


def _stamp(file: Path) -> tuple[int, int, int, int]:
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def test_another_files_index_under_this_name_is_not_believed(
    file: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    cache.open_cached(file, environ=environ)
    (first,) = kept(environ)
    other = make(tmp_path / "b.tfrecord", 2)
    cache.open_cached(other, environ=environ)
    (second,) = (path for path in kept(environ) if path != first)
    os.replace(second, first)
    assert same(cache.open_cached(file, environ=environ), open_index(file))


def test_a_header_that_lies_about_its_arrays_is_not_believed(tmp_path: Path, file: Path) -> None:
    """With a right checksum: what another version of this program may have written."""
    import hashlib
    import json

    index = open_index(file)
    path = tmp_path / "x.idx"

    def put(**changes: object) -> RecordIndex | None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        stored.write(fd, {"a": 1}, index)
        os.close(fd)
        data = path.read_bytes()
        length = int.from_bytes(data[8:16], sys.byteorder)
        begins = -(-(48 + length) // 64) * 64
        header = json.loads(data[48 : 48 + length])
        header.update(changes)
        text = json.dumps(header).encode()
        new_begins = -(-(48 + len(text)) // 64) * 64
        prelude = data[:8] + len(text).to_bytes(8, sys.byteorder) + hashlib.sha256(text).digest()
        path.write_bytes((prelude + text).ljust(new_begins, b"\0") + data[begins:])
        return stored.read(str(path), {"a": 1})

    good = put()
    assert good is not None
    arrays = [[n, a.dtype.name, len(a), 0] for n, a in good.arrays().items()]
    for wrong in (
        {"arrays": []},
        {"arrays": [[name, kind, count - 1, at] for name, kind, count, at in arrays]},
        {"arrays": [[name, kind, 1 << 60, at] for name, kind, count, at in arrays]},
        {"arrays": [[name, kind, count, -(1 << 20)] for name, kind, count, at in arrays]},
        {"arrays": [[name, "object", count, at] for name, kind, count, at in arrays]},
        {"arrays": {"a": 1}},
        {"bytes": -1},
        {"bytes": "many"},
        {"index": None},
        {"index": {**describe(index), "shape": [-1, -1]}},
        {"index": {**describe(index), "key_ranges": [[0, 1]]}},
        {"key": {"a": 2}},
    ):
        assert put(**wrong) is None, wrong


def test_a_directory_that_must_not_be_trusted_costs_only_the_cache(
    file: Path, environ: dict[str, str], tmp_path: Path, made: list[str]
) -> None:
    for bad in ("open", "link"):
        run = tmp_path / bad
        run.mkdir(0o700)
        if bad == "open":
            (run / "index").mkdir()
            (run / "index").chmod(0o777)
        else:
            (run / "index").symlink_to(tmp_path)
        index = cache.open_cached(file, environ={"UFFDPREFETCH_RUNDIR": str(run)})
        assert same(index, open_index(file))
    run.chmod(0o777)
    cache.open_cached(file, environ={"UFFDPREFETCH_RUNDIR": str(run)})
    assert len(made) == 3
    assert not list(tmp_path.rglob("*.idx"))


# ---- room ---------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_when_there_is_no_room(
    tmp_path: Path, environ: dict[str, str], made: list[str]
) -> None:
    files = [make(tmp_path / f"{name}.tfrecord", seed, 500) for seed, name in enumerate("abc")]
    for age, file in enumerate(files[:2]):
        before = kept(environ)
        cache.open_cached(file, environ=environ)
        (path,) = (path for path in kept(environ) if path not in before)
        os.utime(path, ns=(LONG_AGO_NS + age, LONG_AGO_NS + age))
    cache.open_cached(files[0], environ=environ)  # used: the other one is the older now
    budget_bytes = 5 * kept(environ)[0].stat().st_size // 2
    cache.open_cached(files[2], environ=environ, budget_bytes=budget_bytes)
    assert len(kept(environ)) == 2
    made.clear()
    for file in (files[0], files[2], files[1]):
        cache.open_cached(file, environ=environ)
    assert made == ["b.tfrecord"]


def test_an_index_larger_than_the_budget_is_not_kept(
    file: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    other = make(tmp_path / "b.tfrecord", 2)
    cache.open_cached(other, environ=environ)
    before = kept(environ)
    index = cache.open_cached(file, environ=environ, budget_bytes=100)
    assert same(index, open_index(file))
    assert kept(environ) == before and len(before) == 1


def test_without_space_there_is_an_index_and_no_rest_of_one(
    file: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if at > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(fd, data[:100], at)

    monkeypatch.setattr(os, "pwrite", full)
    assert same(cache.open_cached(file, environ=environ), open_index(file))
    assert (kept(environ), kept(environ, ".part")) == ([], [])


def test_short_writes_are_continued(
    file: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: original(fd, data[:7], at))
    cache.open_cached(file, environ=environ)
    monkeypatch.undo()
    (path,) = kept(environ)
    found = stored.read(str(path), cache._key(_stamp(file), None, FormatOptions()))
    assert found is not None and same(found, open_index(file))


# ---- several processes --------------------------------------------------------------------------

#: Says "in" when it begins to make an index, goes on when the gate is there; then what it got.
_PROCESS = """
import os, sys, time, hashlib
import numpy as np
from uffdprefetch.formats import cache
path, log, gate = sys.argv[1:4]
original = cache.read_steady
def say(text):
    with open(log, "a") as out: out.write(text + "\\n")
def read(*rest):
    say("making")
    while not os.path.exists(gate): time.sleep(0.005)
    return original(*rest)
cache.read_steady = read
say("here")
index = cache.open_cached(path)
starts, ends = index.extents(np.arange(len(index)))
say("got " + hashlib.sha256(starts.tobytes() + ends.tobytes()).hexdigest())
"""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(
    tmp_path: Path, file: Path, environ: dict[str, str], children: Start
) -> Callable[[], subprocess.Popen[bytes]]:
    words = [sys.executable, "-c", _PROCESS, str(file), str(tmp_path / "log")]
    words.append(str(tmp_path / "gate"))
    (tmp_path / "log").touch()
    return lambda: children(words, env={**os.environ, **environ})


def said(tmp_path: Path, word: str) -> list[str]:
    return [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith(word)]


def test_of_processes_that_ask_at_once_one_makes_it(
    tmp_path: Path, start: Start, environ: dict[str, str]
) -> None:
    processes = [start() for _ in range(5)]
    wait_until(lambda: len(said(tmp_path, "here")) == 5, "all processes")
    wait_until(lambda: said(tmp_path, "making"), "one that makes it")
    (tmp_path / "gate").touch()
    assert [process.wait() for process in processes] == [0] * 5
    assert len(said(tmp_path, "making")) == 1
    assert len(said(tmp_path, "got")) == 5 and len(set(said(tmp_path, "got"))) == 1
    assert len(kept(environ)) == 1 and kept(environ, ".part") == []


def test_when_the_one_that_makes_it_is_killed_another_does(tmp_path: Path, start: Start) -> None:
    first = start()
    wait_until(lambda: said(tmp_path, "making"), "one that makes it")
    second = start()
    wait_until(lambda: len(said(tmp_path, "here")) == 2, "the one that waits")
    first.send_signal(signal.SIGKILL)
    wait_until(lambda: len(said(tmp_path, "making")) == 2, "the other one to begin")
    (tmp_path / "gate").touch()
    assert second.wait() == 0
    assert len(said(tmp_path, "got")) == 1


def test_who_would_wait_too_long_makes_one_of_its_own(
    file: Path, environ: dict[str, str], made: list[str]
) -> None:
    cache.open_cached(file, environ=environ)
    (path,) = kept(environ)
    path.unlink()
    directory = str(path.parent)
    fd = cache._lock_file(directory, str(path))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        index = cache.open_cached(file, environ=environ, wait_seconds=0)
        assert same(index, open_index(file))
        assert kept(environ) == [], "what it made while another one held the lock is its own"
    finally:
        os.close(fd)
    cache.open_cached(file, environ=environ, wait_seconds=0)
    assert kept(environ) == [path]


def test_what_a_killed_one_left_is_removed(
    file: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    cache.open_cached(file, environ=environ)
    directory = kept(environ)[0].parent
    abandoned, held = directory / f"{'0' * 32}.part", directory / f"{'0' * 7}1{'0' * 24}.part"
    abandoned.write_bytes(b"half")
    held.write_bytes(b"half")
    fd = cache._lock_file(str(directory), str(held))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        for seed in range(2, 30):
            other = make(tmp_path / "b.tfrecord", seed)
            cache.open_cached(other, environ=environ, wait_seconds=0)
            if not abandoned.exists():
                break
        assert not abandoned.exists()
        assert held.exists(), "somebody is writing it"
    finally:
        os.close(fd)
