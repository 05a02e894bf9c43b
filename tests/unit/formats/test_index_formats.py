# SPDX-License-Identifier: Apache-2.0
"""Raw, .npy and TFRecord files, LMDB behind the interface, and how a format is detected.

The libraries (numpy, py-lmdb) and a writer of the test's own say what must be where.
"""

from __future__ import annotations

import gzip
import io
import random
import struct
import sys
import threading
from pathlib import Path

import lmdb
import numpy as np
import pytest
from record_files import (
    EDGES,
    Memory,
    bytes_of,
    crc32c,
    header,
    masked_crc,
    some_records,
    sparse,
    tfrecord,
)
from safetensors.numpy import save

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.formats import crc32c as ours
from uffdprefetch.formats import tfrecord as fmt
from uffdprefetch.formats.detect import FORMATS, detect, load, open_index, read_index
from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.lmdb import open_index as open_lmdb
from uffdprefetch.formats.reader import FormatError

GIB = 1 << 30


def index_of(data: bytes, wanted: str | None = None, **options: object) -> RecordIndex:
    return read_index(Memory(data), "f", wanted, FormatOptions(**options))  # type: ignore[arg-type]


def refused(data: bytes, wanted: str | None, saw: str, **options: object) -> FormatError:
    with pytest.raises(FormatError, match=saw) as caught:
        index_of(data, wanted, **options)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith("f: ")
    assert 0 <= caught.value.offset <= len(data)
    return caught.value


# ---- raw ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 2038, 4096, 10_000])
@pytest.mark.parametrize("before", [0, 1, 4096])
def test_raw_records_are_cut_where_they_are_said_to_be(size: int, before: int) -> None:
    data = random.Random(size).randbytes(before + 3 * size + size // 2)
    index = index_of(data, record_bytes=size, header_bytes=before)
    assert bytes_of(index, data) == [data[before + i * size :][:size] for i in range(3)]
    assert index.format == "raw" and index.exact and index.keys is None
    assert index.facts["partial_record_bytes"] == size // 2
    assert index.outside_bytes == {"header": before, "part of a last record": size // 2}


def test_raw_records_behind_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    sparse(path, 9 * GIB, {6 * GIB: b"record"})
    index = open_index(path, options=FormatOptions(record_bytes=4096))
    record = 6 * GIB // 4096
    assert index.extents(record)[0].tolist() == [6 * GIB]
    assert index.records_at([6 * GIB + 4095, 9 * GIB]).tolist() == [record, -1]
    assert len(index) == 9 * GIB // 4096 and index.index_bytes() < 100


def test_raw_records_need_a_size_that_can_be() -> None:
    with pytest.raises(UffdPrefetchError, match="give --record-size"):
        index_of(b"abc", "raw")
    with pytest.raises(UffdPrefetchError, match="at least 1"):
        index_of(b"abc", record_bytes=0)
    with pytest.raises(UffdPrefetchError, match="not for npy"):
        index_of(b"abc", "npy", record_bytes=1)
    refused(b"abc", None, "file cut short at byte 3: a header of 4", record_bytes=1, header_bytes=4)
    assert len(index_of(b"", record_bytes=8)) == 0


# ---- npy ----------------------------------------------------------------------------------------


def saved(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=True)
    return file.getvalue()


ARRAYS = [
    np.arange(60, dtype=np.float32).reshape(5, 3, 4),
    np.arange(7, dtype=np.uint8),
    np.arange(7, dtype=">i4"),
    np.zeros((0, 5), np.int64),
    np.zeros((4, 0), np.int64),
    np.array(3.5),
    np.array([b"abc", b"d"], "S2037"),
    np.array([("x", 1.5), ("y", 2.5)], [("name", "U3"), ("value", "<f8")]),
    np.arange(24, dtype=np.int16).reshape(4, 6)[:, ::2],
    np.arange(9, dtype=np.int16).reshape(1, 9).copy("F"),
]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype.name}{a.shape}")
def test_npy_records_are_the_elements_of_the_first_axis(
    array: np.ndarray, version: tuple[int, int]
) -> None:
    data = saved(array, version) + b"behind"
    index = index_of(data)
    whole = np.atleast_1d(array)
    assert bytes_of(index, data) == [whole[i : i + 1].tobytes() for i in range(len(whole))]
    assert index.outside_bytes["after the array"] == len(b"behind")
    assert index.facts["version"] == version[0]


def test_npy_field_names_of_any_alphabet() -> None:
    array = np.array([(1, 2, 3), (4, 5, 6)], [("ä", "<i4"), ("ö", "u1"), ("大小", "u1")])
    data = saved(array, (3, 0))
    assert bytes_of(index_of(data), data) == [one.tobytes() for one in array]


def test_npy_records_behind_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "big.npy"
    array = np.lib.format.open_memmap(path, "w+", np.float32, (3 << 20, 512))
    array[2_500_000] = 7
    array.flush()
    index = open_index(path)
    start, end = (edge.item() for edge in index.extents(2_500_000))
    assert start > 4 * GIB
    with path.open("rb") as file:
        file.seek(start)
        assert file.read(end - start) == np.full(512, 7, np.float32).tobytes()


def test_npy_arrays_whose_records_have_no_place_are_refused() -> None:
    fortran = np.arange(12).reshape(3, 4).copy("F")
    refused(saved(fortran), None, r"Fortran order.*\(3, 4\).*ascontiguousarray")
    refused(saved(np.array([{}, []], object)), None, "Python objects.*pickle")


def with_header(text: bytes, version: int = 1, length: int | None = None) -> bytes:
    how = "<H" if version == 1 else "<I"
    count = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(how, count) + text


@pytest.mark.parametrize(
    ("data", "saw"),
    [
        (b"\x93NUMPY", "file cut short at byte 6"),
        (with_header(b"{}", 9), "unknown .npy version at byte 6: 9.0"),
        (with_header(b"{}", 2, 0xFFFFFFFF), "impossible length of a header at byte 8: 4294967295"),
        (with_header(b"{}   ", 1, 900), "file cut short at byte 15"),
        (with_header(b"{}" * 10), "impossible header at byte 8"),
        (with_header(b"(" * 9000), "impossible header"),
        (with_header(b"-" * 9000 + b"1"), "impossible header"),
        (with_header(b"\xff\xfe"), "impossible header"),
        (with_header(b"\xff\xfe", 3), "impossible header"),
        (with_header(b"{'descr':'<f8','fortran_order':False,'shape':(-4,)}\n"), "shape"),
        (with_header(b"{'descr':'|V0','fortran_order':False,'shape':(%d,)}\n" % 2**63), "shape"),
        (with_header(b"{'descr':'<f8','fortran_order':False,'shape':(2,)}\n"), "file cut short"),
        (
            with_header(b"{'descr':'<f8','fortran_order':False,'shape':(%d,2)}\n" % 2**62),
            "file cut short",
        ),
    ],
)
def test_npy_headers_that_lie_are_refused(data: bytes, saw: str) -> None:
    refused(data, "npy", saw)


# ---- TFRecord -----------------------------------------------------------------------------------


def test_the_crc_is_that_of_the_books() -> None:
    """RFC 3720, B.4; a length and its CRC as TensorFlow writes them: those of an empty record."""
    vectors = {
        b"123456789": 0xE3069283,
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
    }
    source = random.Random(1)
    for size in (0, 1, 3, 4, 63, 64, 65, 128, 129, 5000):
        data = source.randbytes(size)
        vectors[data] = crc32c(data)
    pieces = list(vectors)
    lengths = np.array([len(piece) for piece in pieces])
    data = np.frombuffer(b"".join(pieces), np.uint8)
    registers = ours.registers(data, np.cumsum(lengths) - lengths, lengths)
    assert ours.finished(registers, lengths).tolist() == list(vectors.values())
    rows = np.frombuffer(source.randbytes(80), np.uint8).reshape(10, 8)
    assert ours.of_words(rows).tolist() == [crc32c(row.tobytes()) for row in rows]
    windows = ours.of_windows(rows.ravel(), 8)
    assert windows.tolist() == [crc32c(rows.tobytes()[i : i + 8]) for i in range(73)]
    assert header(0).hex() == "000000000000000029039807"
    assert masked_crc(b"").hex() == "d8ea82a2"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [1, 300, 9000, 60_000])
def test_tfrecord_records_are_those_that_were_written(seed: int, most: int) -> None:
    records = some_records(seed, 80, most)
    data = tfrecord(records)
    index = index_of(data, verify=True)
    assert bytes_of(index, data) == records
    assert index.places.covered_bytes() + sum(index.outside_bytes.values()) == len(data)


@pytest.mark.parametrize("size", EDGES)
def test_tfrecord_of_one_record(size: int) -> None:
    data = tfrecord([b"x" * size])
    assert bytes_of(index_of(data), data) == [b"x" * size]


@pytest.mark.parametrize("segment", [64, 1000, 5000, 40_000])
def test_tfrecord_read_from_several_places_gives_the_same(segment: int) -> None:
    for seed in range(8):
        data = tfrecord(some_records(seed, 60, random.Random(seed).choice([50, 3000, 60_000])))
        one = fmt.follow(Memory(data), 0, len(data))
        several = fmt.scan(Memory(data), segment)
        assert several.starts.tolist() == one.starts.tolist()
        assert several.lengths.tolist() == one.lengths.tolist()


def test_tfrecord_within_a_record_misleads_nobody() -> None:
    """Data that look like records, at every place where a thread may begin to look."""
    inner = tfrecord([b"inner" * 20] * 3000)
    records = [inner[:50_000], b"", inner[7:90_000], b"x" * 30_000, inner[:120_000]]
    data = tfrecord(records)
    for segment in (1000, 30_000, 100_000):
        chain = fmt.scan(Memory(data), segment)
        pieces = zip(chain.starts.tolist(), chain.lengths.tolist(), strict=True)
        assert [data[at : at + n] for at, n in pieces] == records


def test_a_wrong_chain_that_goes_on_for_long_misleads_nobody() -> None:
    """A record's data lead on into those of a later one, past records that are right."""
    inner = tfrecord([b"i" * 84] * 400)
    short = [b"right"] * 7
    # from behind the leading header: this record's CRC, the right ones, the next one's header
    until_inner = 4 + len(tfrecord(short)) + 12
    leading = header(until_inner - 4)  # "data", and 4 bytes of what would be their CRC
    data = tfrecord([b"a" * 20_000 + leading, *short, inner, b"end"])
    assert data[12 + 20_000 + 12 + until_inner :].startswith(inner)
    one = fmt.follow(Memory(data), 0, len(data))
    for segments in range(2, 9):
        chain = fmt.scan(Memory(data), len(data) // segments)
        assert chain.starts.tolist() == one.starts.tolist(), segments


def test_large_tfrecords_are_not_read_but_for_their_headers(tmp_path: Path) -> None:
    """Nine records over 12 GiB: only the pages with headers are asked for."""
    pieces, at, starts = {}, 0, []
    for size in (5 * GIB, 0, 3 * GIB + 1, 12_000, 12_000, 4 * GIB, 1, 2, 20_000):
        pieces[at] = header(size)
        starts.append(at + 12)
        at += size + 16
    path = tmp_path / "big.tfrecord"
    sparse(path, at, pieces)

    class Counting(Memory):
        def __init__(self) -> None:
            super().__init__(b"")
            self.size_bytes = at
            self.file = path.open("rb")
            self.lock = threading.Lock()

        def read(self, offset: int, length: int) -> bytes:
            with self.lock:
                self.reads.append((offset, length))
                self.file.seek(offset)
                return self.file.read(length)

    reader = Counting()
    assert fmt.follow(reader, 0, at).starts.tolist() == starts
    assert sum(length for _, length in reader.reads) < 4 << 20
    index = open_index(path)
    assert index.extents(np.arange(9))[0].tolist() == starts
    sizes = np.diff(np.stack(index.extents(np.arange(9))), axis=0)[0].tolist()
    assert sizes[:4] == [5 * GIB, 0, 3 * GIB + 1, 12_000]
    assert index.records_at([starts[5] + 4 * GIB - 1]).tolist() == [5]


def test_tfrecord_damage_is_told_with_its_place() -> None:
    records = some_records(1, 30, 3000)
    data = bytearray(tfrecord(records))
    starts, ends = index_of(bytes(data)).extents(np.arange(30))
    bad = bytes(data[: starts[7] - 12] + b"\xff" + data[starts[7] - 11 :])
    assert refused(bad, None, "wrong CRC of a length").offset == starts[7] - 12
    long = bytes(data[: starts[9] - 12] + header(1 << 63) + data[starts[9] :])
    assert refused(long, None, f"file cut short.*{1 << 63} bytes").offset == len(data)
    refused(bytes(data[: ends[9] + 10]), None, "file cut short.*it ends in a header")
    assert refused(b"text, no records " * 9, "tfrecord", "no TFRecord").offset == 0
    some = next(i for i in range(30) if ends[i] > starts[i])
    flipped = bytearray(data)
    flipped[starts[some]] ^= 1
    assert len(index_of(bytes(flipped))) == 30, "data are not read unless that is asked for"
    wrong = refused(bytes(flipped), None, f"wrong CRC of data.*record {some} has", verify=True)
    assert wrong.offset == ends[some]


def test_the_crc_of_a_record_longer_than_one_read_is_checked() -> None:
    data = bytearray(tfrecord([b"a", bytes(random.Random(2).randbytes(1000)) * 9000, b"b"]))
    assert len(index_of(bytes(data), verify=True)) == 3
    data[8_000_000] ^= 0x10
    refused(bytes(data), None, "wrong CRC of data.*record 1 has", verify=True)


def test_an_empty_tfrecord_file_has_no_records() -> None:
    assert len(index_of(b"", "tfrecord", verify=True)) == 0


# ---- LMDB ---------------------------------------------------------------------------------------


def test_lmdb_by_the_interface_is_what_the_library_reads(tmp_path: Path) -> None:
    source = random.Random(4)
    env = lmdb.open(str(tmp_path / "db"), map_size=1 << 28, max_dbs=4, sync=False)
    tables = {b"": {}, b"odd": {}, b"numbers": {}}
    handles = {
        b"": None,
        b"odd": env.open_db(b"odd"),
        b"numbers": env.open_db(b"numbers", integerkey=True),
    }
    with env.begin(write=True) as txn:
        for number in range(900):
            size = source.choice([*EDGES, source.randrange(9000)])
            name = source.choice(list(tables))
            key = struct.pack("<Q", number * 7) if name == b"numbers" else b"key %d" % number
            tables[name][key] = source.randbytes(size)
            txn.put(key, tables[name][key], db=handles[name])
    env.close()
    data = (tmp_path / "db" / "data.mdb").read_bytes()
    index = open_index(tmp_path / "db")
    held = bytes_of(index, data)
    assert {one["name"]: one["records"] for one in index.facts["databases"]} == {
        name.decode(): len(table) for name, table in tables.items()
    }
    for table in tables.values():
        for key, value in table.items():
            (record,) = index.find(key).tolist()
            assert (index.key(record), held[record]) == (key, value)
    assert index.find(b"no such key").tolist() == []
    ascending = {index.facts["databases"][i]["name"]: r[2] for i, r in enumerate(index.keys.ranges)}
    assert ascending == {"": True, "odd": True, "numbers": False}
    assert (index.facts["data_format"], index.facts["page_bytes"]) == (1, 4096)
    assert index.places.covered_bytes() + sum(index.outside_bytes.values()) == len(data)
    assert (index.format, index.exact, set(index.columns)) == ("lmdb", True, {"flags", "leaf_page"})


def test_lmdb_behind_the_interface_takes_no_more_memory(tmp_path: Path) -> None:
    env = lmdb.open(str(tmp_path), map_size=1 << 26, sync=False)
    with env.begin(write=True) as txn:
        for number in range(2000):
            txn.put(b"%08d" % number, bytes(100))
    env.close()
    index, direct = open_index(tmp_path), open_lmdb(tmp_path)
    assert index.index_bytes() == 2000 * (31 + 8) + 2 * 8
    assert np.shares_memory(direct.places.arrays()["0.start"], direct.offset)


# ---- safetensors --------------------------------------------------------------------------------


def test_safetensors_records_are_its_tensors_by_place_and_by_name() -> None:
    tensors = {
        "model.embed.weight": np.arange(640, dtype=np.float16).reshape(10, 64),
        "größe": np.arange(7, dtype=np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "b": np.arange(3, dtype=np.int64),
    }
    data = save(tensors, {"format": "pt"})
    index = index_of(data)
    assert index.format == "safetensors" and index.exact and len(index) == 4
    for name, tensor in tensors.items():
        (record,) = index.find(name.encode()).tolist()
        start, end = (edge.item() for edge in index.extents(record))
        assert data[start:end] == tensor.tobytes() and index.key(record) == name.encode()
    starts, _ = index.extents(np.arange(4))
    assert (np.diff(starts) >= 0).all()
    assert index.find(b"no such").tolist() == []
    assert index.facts["dtypes"] == "F16, F32, I64"
    assert index.outside_bytes["header"] == len(data) - sum(t.nbytes for t in tensors.values())


def test_only_the_header_of_safetensors_is_read() -> None:
    data = save({str(number): np.zeros(1 << 16) for number in range(20)})
    reader = Memory(data)
    read_index(reader, "f")
    assert sum(length for _, length in reader.reads) < 20_000


@pytest.mark.parametrize(
    ("header", "saw"),
    [
        (b'{"a": [', "safetensors header at byte 8: no JSON"),
        (b'{"a": {"data_offsets": [0, 9]}}', "safetensors header at byte 8: 'a': "),
        (b'{"a": {"data_offsets": [2, 1]}}', "safetensors header at byte 8: 'a': "),
        (b'{"a": 1}', "safetensors header at byte 8: 'a': None"),
        (
            b'{"a": {"data_offsets": [0, 4]}, "b": {"data_offsets": [3, 8]}}',
            "tensors overlap at byte 73: 'a' and 'b'",
        ),
    ],
)
def test_safetensors_that_cannot_be_are_refused(header: bytes, saw: str) -> None:
    data = struct.pack("<Q", len(header)) + header + bytes(8)
    refused(data, None, saw)


def test_a_header_of_safetensors_is_as_long_as_its_library_takes() -> None:
    reader = Memory(struct.pack("<Q", 100_000_001) + b'{"')
    reader.size_bytes = 1 << 40
    with pytest.raises(FormatError, match="impossible length of a header at byte 0"):
        read_index(reader, "f", "safetensors")
    assert sum(length for _, length in reader.reads) < 5000


# ---- which format -------------------------------------------------------------------------------


def test_each_format_is_detected_and_no_other_takes_it(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), map_size=1 << 20) as env, env.begin(write=True) as txn:
        txn.put(b"a", b"b")
    files = {
        "lmdb": (tmp_path / "data.mdb").read_bytes(),
        "npy": saved(np.arange(3)),
        "tfrecord": tfrecord([b"abc"]),
        "arrow": b"ARROW1\0\0" + bytes(20),
        "safetensors": save({"a": np.arange(3)}),
    }
    for name, data in files.items():
        assert detect(data[:4096], len(data), "f") == name
        assert [one for one in FORMATS if load(one).sniff(data[:4096], len(data), "f")] == [name]


@pytest.mark.parametrize(
    ("data", "saw"),
    [
        (b"", "it is empty"),
        (b"abc", "it begins with 61 62 63"),
        (bytes(5000), "it begins with 00 00"),
        (b"\xff\xff\xff\xff\x10\0\0\0" + bytes(60), "it begins with ff ff ff ff"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff" + b"\xff" * 60, "it begins with ff ff ff ff"),
        (gzip.compress(tfrecord([b"abc"]), mtime=0), "gzip has compressed it as a whole"),
    ],
)
def test_a_file_of_no_known_format_is_told_in_one_line(data: bytes, saw: str) -> None:
    with pytest.raises(UffdPrefetchError, match=saw) as caught:
        index_of(data)
    assert caught.value.exit_code == 2
    assert "--format" in caught.value.message and "\n" not in caught.value.message


def test_random_bytes_are_of_no_format() -> None:
    source = random.Random(9)
    for _ in range(300):
        data = source.randbytes(source.randrange(200))
        with pytest.raises(UffdPrefetchError, match="no known format"):
            index_of(data)


def test_a_format_that_is_not_there_and_a_directory_are_told(tmp_path: Path) -> None:
    with pytest.raises(UffdPrefetchError, match=r"^--format tar: one of lmdb"):
        index_of(b"abc", "tar")
    with pytest.raises(UffdPrefetchError, match=r"directory without data\.mdb"):
        open_index(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(100))
    raw = load("raw")
    original = type(raw).read

    def read(self: object, reader: object, options: object) -> RecordIndex:
        with path.open("ab") as file:
            file.write(b"more")
        return original(self, reader, options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(raw), "read", read)
    with pytest.raises(UffdPrefetchError, match="changed while it was indexed"):
        open_index(path, options=FormatOptions(record_bytes=10))


def test_a_new_format_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lines:
        def sniff(self, head: bytes, size_bytes: int, name: str) -> bool:
            return name.endswith(".lines")

        def read(self, reader: Memory, options: FormatOptions) -> RecordIndex:
            from uffdprefetch.formats.raw import uniform

            return RecordIndex("lines", reader.size_bytes, uniform(2, 3, 0))

    monkeypatch.setitem(FORMATS, "lines", ("lines_format", "Lines"))
    monkeypatch.setitem(sys.modules, "lines_format", type(sys)("lines_format"))
    sys.modules["lines_format"].Lines = Lines  # type: ignore[attr-defined]
    data = b"abcdef"
    index = read_index(Memory(data), "x.lines")
    assert (index.format, bytes_of(index, data)) == ("lines", [b"abc", b"def"])


@pytest.mark.parametrize("seconds", [0.0, 0.002])
@pytest.mark.parametrize("size", [100, 12_000, 100_000])
def test_tfrecords_of_middling_size_are_read_whole_where_a_read_takes_long(
    size: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(fmt.time, "perf_counter", lambda: clock[0])

    class Slow(Memory):
        def read(self, offset: int, length: int) -> bytes:
            clock[0] += seconds
            return super().read(offset, length)

    data = tfrecord([bytes(size)] * 100)
    reader = Slow(data)
    chain = fmt.follow(reader, 0, len(data))
    assert chain.lengths.tolist() == [size] * 100
    headers = sum(length == 12 for _, length in reader.reads)
    assert headers == {100: 1, 12_000: 16 if seconds else 100, 100_000: 100}[size]
