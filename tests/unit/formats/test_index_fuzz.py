# SPDX-License-Identifier: Apache-2.0
"""Files that are cut, damaged or made to harm: a FormatError with a place in the file, or an index
whose extents lie in the file; in bounded time and memory. Fixed seeds; UFFDPREFETCH_FUZZ_ROUNDS
makes it longer.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pytest
from record_files import Memory, header, some_records, tfrecord

from uffdprefetch.formats import tfrecord as tfrecord_format
from uffdprefetch.formats.detect import detect, open_index, read_index
from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.reader import FormatError

ROUNDS = int(os.environ.get("UFFDPREFETCH_FUZZ_ROUNDS", "300"))
MIB = 1 << 20
#: What an index of a file of some KiB may take at most, whatever stands in it.
MEMORY_MAX_BYTES = 64 * MIB
#: Numbers that are one too many, negative, or huge.
_WORDS = [0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, 1 << 62, 1 << 63]


def numpy_file(version: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    array = np.array([(i, i * 1.5, b"x") for i in range(40)], "i4,f8,S5")
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def arrow_file(kind: str, codec: str | None = None) -> bytes:
    pa = pytest.importorskip("pyarrow")
    sink = io.BytesIO()
    rows = range(50)
    columns = {
        "text": pa.array([f"text {i}" * (i % 5) if i % 7 else None for i in rows]),
        "tokens": pa.array([[i] * (i % 4) for i in rows], pa.list_(pa.int32())),
        "image": pa.array([{"bytes": b"b" * i, "path": "p"} for i in rows]),
        "flag": pa.array([bool(i % 3) for i in rows]),
        "box": pa.array([[1.0, 2.0]] * 50, pa.list_(pa.float32(), 2)),
        "kind": pa.array(["red", "blue"] * 25).dictionary_encode(),
    }
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with make(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as out:
        for _ in range(3):
            out.write_batch(batch)
    return sink.getvalue()


def safetensors_file() -> bytes:
    tensors, end = {}, 0
    for number in range(40):
        begin, end = end, end + number * 100
        tensors[f"layers.{number}.weight"] = {
            "dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def lmdb_file(path: Path) -> bytes:
    env = lmdb.open(str(path), map_size=1 << 24, max_dbs=2, sync=False)
    named = env.open_db(b"named", dupsort=True)
    with env.begin(write=True) as txn:
        for number in range(120):
            txn.put(b"%04d" % number, bytes(number * 30))
            txn.put(b"key", b"%04d" % number, db=named)
    env.close()
    return (path / "data.mdb").read_bytes()


FILES: dict[str, Callable[[Path], bytes]] = {
    "npy 1.0": lambda _: numpy_file((1, 0)),
    "npy 3.0": lambda _: numpy_file((3, 0)),
    "tfrecord": lambda _: tfrecord(some_records(1, 40, 400)),
    "lmdb": lmdb_file,
    "safetensors": lambda _: safetensors_file(),
    "arrow stream": lambda _: arrow_file("stream"),
    "arrow file": lambda _: arrow_file("file"),
    "arrow compressed": lambda _: arrow_file("file", "zstd"),
}


@pytest.fixture(params=sorted(FILES))
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, bytes]:
    data = FILES[request.param](tmp_path)
    return request.param.split()[0], data


def attempt(data: bytes, wanted: str) -> RecordIndex | None:
    """Index a file that may be anything: None where it was refused as it should be."""
    reader = Memory(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            index = read_index(reader, "f", wanted)
    except FormatError as error:
        assert "\n" not in error.message and error.message.startswith("f: ")
        assert 0 <= error.offset <= len(data), error.message
        return None
    finally:
        # each page once, guesses of where records begin, heads of messages
        assert sum(min(n, max(len(data) - at, 0)) for at, n in reader.reads) < 40 * len(data) + MIB
    assert len(index) < 1 << 62
    sample = np.linspace(0, max(len(index) - 1, 0), min(len(index), 300)).astype(np.int64)
    starts, ends = index.extents(sample)
    assert (starts >= 0).all() and (starts <= ends).all() and (ends <= len(data)).all()
    found = index.records_in([0], [min(len(data), 5000)])
    assert (np.diff(found) > 0).all()
    at = index.records_at(np.arange(0, len(data), 97))
    assert ((at >= -1) & (at < len(index))).all()
    index.places.sizes()
    index.find(b"key")
    return index


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX_BYTES
    finally:
        tracemalloc.stop()


def damaged(data: bytes, source: random.Random) -> bytes:
    """Bits turned, words replaced, parts repeated, left out or moved."""
    bad = bytearray(data)
    for _ in range(source.choice([1, 1, 2, 6])):
        at = source.randrange(len(bad))
        how = source.random()
        if how < 0.4:
            bad[at] ^= 1 << source.randrange(8)
        elif how < 0.8:
            at -= at % source.choice([1, 4, 8])
            word = source.choice([*_WORDS, source.getrandbits(64)])
            new = struct.pack("<Q", word)[: source.choice([2, 4, 8])][: len(bad) - at]
            bad[at : at + len(new)] = new
        elif how < 0.9:
            size = source.randrange(1, 64)
            to = source.randrange(len(bad))
            bad[to : to + size] = bad[at : at + size]
        else:
            del bad[at : at + source.choice([1, 8, 300])]
        if not bad:
            bad = bytearray(b"\0")
    return bytes(bad)


@pytest.mark.slow
def test_no_damage_does_more_than_a_format_error(whole: tuple[str, bytes]) -> None:
    wanted, data = whole
    assert attempt(data, wanted) is not None
    source, refused = random.Random(len(data)), 0
    for _ in range(ROUNDS):
        with little_memory() if source.random() < 0.05 else warnings.catch_warnings():
            refused += attempt(damaged(data, source), wanted) is None
    assert refused > ROUNDS // 20


def test_a_file_that_is_cut_anywhere_is_refused_or_has_fewer_records(
    whole: tuple[str, bytes],
) -> None:
    """At every byte of its first and last 3000, at each 37th between."""
    wanted, data = whole
    records = len(read_index(Memory(data), "f", wanted))
    ends = {*range(3000), *range(0, len(data), 37), *range(len(data) - 3000, len(data))}
    refused = 0
    for end in sorted(end for end in ends if 0 <= end < len(data)):
        index = attempt(data[:end], wanted)
        refused += index is None
        assert index is None or len(index) <= records
    assert refused > 0


@pytest.mark.slow
def test_every_byte_turned_in_the_head_of_a_file(whole: tuple[str, bytes]) -> None:
    wanted, data = whole
    for at in range(min(len(data), 700)):
        attempt(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :], wanted)


def test_bytes_of_no_kind_are_refused_by_all(tmp_path: Path) -> None:
    source = random.Random(3)
    for wanted in ("npy", "tfrecord", "lmdb", "arrow", "safetensors"):
        if wanted == "arrow":
            pytest.importorskip("pyarrow")
        magic = {"npy": b"\x93NUMPY\1\0", "arrow": b"ARROW1\0\0"}
        magic["safetensors"] = b"\x20\0\0\0\0\0\0\0{"
        for _ in range(60):
            junk = source.randbytes(source.randrange(1, 400))
            assert attempt(magic.get(wanted, b"") + junk, wanted) is None


def test_a_chain_that_goes_astray_is_read_at_most_twice() -> None:
    """Every guess of where a record begins is wrong: one record that holds others, many times."""
    inner = tfrecord([b"x" * 50] * 4000)
    data = tfrecord([inner, inner[5:], inner[9:]])
    reader = Memory(data)
    chain = tfrecord_format.scan(reader, 20_000)
    assert len(chain.starts) == 3
    assert sum(length for _, length in reader.reads) < 40 * len(data)


def test_a_file_of_holes_costs_nothing(tmp_path: Path) -> None:
    """A terabyte that claims to be something, in a file of no blocks."""
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "holes"
    npy = numpy_file((1, 0))[:128]
    heads = {
        "npy": npy,
        "tfrecord": header(1 << 62),
        "lmdb": lmdb_file(tmp_path / "db")[:8192],
        "arrow": b"ARROW1\0\0" + b"\xff\xff\xff\xff\0\0\0\x7f",
        "safetensors": (1 << 39).to_bytes(8, "little") + b'{"',
    }
    assert pa is not None
    for wanted, head in heads.items():
        with path.open("wb") as file:
            file.write(head)
            file.truncate(1 << 40)
        with little_memory() if wanted != "lmdb" else warnings.catch_warnings():
            try:
                index = open_index(path, wanted)
            except FormatError as error:
                assert error.offset <= 1 << 40
            else:
                assert len(index) <= 40
    with little_memory():
        assert len(open_index(path, options=FormatOptions(record_bytes=1))) == 1 << 40


def test_what_detects_a_format_never_fails() -> None:
    from uffdprefetch.base.errors import UffdPrefetchError

    source = random.Random(8)
    heads = [b"\xff\xff\xff\xff", b"\x93NUMPY", b"ARROW1\0\0", header(7), b""]
    for _ in range(2000):
        head = source.choice(heads) + source.randbytes(source.randrange(90))
        try:
            assert detect(head, source.choice([len(head), 0, 1 << 50]), "f")
        except UffdPrefetchError as error:
            assert "no known format" in error.message
