# SPDX-License-Identifier: Apache-2.0
"""Arrow IPC files and streams: pyarrow writes them, and reads a row from that row's bytes alone."""

from __future__ import annotations

import builtins
import datetime
import decimal
import io
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_files import EDGES, Memory, bytes_of

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.formats import arrow_layout, arrow_messages
from uffdprefetch.formats.detect import open_index, read_index
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.reader import FormatError

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.ipc")


def index_of(data: bytes) -> RecordIndex:
    return read_index(Memory(data), "f")


def written(batches: list[Any], kind: str = "stream", **options: object) -> bytes:
    sink = io.BytesIO()
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with make(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def read_rows(data: bytes, kind: str) -> list[Any]:
    opened = pa.ipc.open_stream(data) if kind == "stream" else pa.ipc.open_file(data)
    if kind == "stream":
        return list(opened)
    return [opened.get_batch(i) for i in range(opened.num_record_batches)]


def bodies(data: bytes, kind: str) -> list[tuple[int, int]]:
    """Where the bodies of the record batches are, by pyarrow's own reader."""
    whole = pa.py_buffer(data)
    begin = 0 if kind == "stream" else 8
    found = []
    for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(whole.slice(begin))):
        if message.type == "record batch" and message.body is not None and message.body.size:
            at = message.body.address - whole.address
            found.append((at, at + message.body.size))
    return found


def alone(data: bytes, kind: str, index: RecordIndex, record: int) -> bytes:
    """The file with zeros in all bodies but for this record's bytes."""
    kept = bytearray(data)
    for start, end in bodies(data, kind):
        kept[start:end] = bytes(end - start)
    for start, end in np.stack(index.extents(record), 1).tolist():
        kept[start:end] = data[start:end]
    return bytes(kept)


# ---- tables -------------------------------------------------------------------------------------

_SIZES = [*EDGES, 5, 17, 300]


def value_of(kind: Any, source: random.Random) -> Any:
    """A random value of a type, None among them."""
    if source.random() < 0.15:
        return None
    types = pa.types
    if types.is_boolean(kind):
        return source.random() < 0.5
    if types.is_integer(kind):
        return source.randrange(100)
    if types.is_floating(kind):
        return float(source.randrange(1000)) / 8
    if types.is_binary(kind) or types.is_large_binary(kind):
        return source.randbytes(source.choice(_SIZES))
    if types.is_string(kind) or types.is_large_string(kind):
        return "é" * source.choice(_SIZES[:4])
    if types.is_fixed_size_binary(kind):
        return source.randbytes(kind.byte_width)
    if types.is_date(kind):
        return datetime.date(2020, 1, 1 + source.randrange(28))
    if types.is_decimal(kind):
        return decimal.Decimal(source.randrange(10**6)) / 100
    if types.is_dictionary(kind):
        return source.choice(["red", "green", "blue"])
    if types.is_null(kind):
        return None
    if types.is_map(kind):
        return [(f"k{i}", value_of(kind.item_type, source)) for i in range(source.randrange(4))]
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return {field.name: value_of(field.type, source) for field in fields}
    count = kind.list_size if types.is_fixed_size_list(kind) else source.randrange(5)
    return [value_of(kind.value_type, source) for _ in range(count)]


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TYPES = {
    "text": pa.string(),
    "image": IMAGE,
    "label": pa.int64(),
    "flag": pa.bool_(),
    "half": pa.float16(),
    "blob": pa.large_binary(),
    "name": pa.large_string(),
    "id": pa.binary(16),
    "day": pa.date32(),
    "money": pa.decimal128(12, 2),
    "colour": pa.dictionary(pa.int8(), pa.string()),
    "nothing": pa.null(),
    "tokens": pa.list_(pa.int32()),
    "flags": pa.list_(pa.bool_()),
    "words": pa.large_list(pa.string()),
    "deep": pa.list_(pa.list_(pa.struct([("a", pa.float32()), ("b", pa.list_(pa.binary()))]))),
    "box": pa.list_(pa.float32(), 4),
    "bits": pa.list_(pa.bool_(), 3),
    "boxes": pa.list_(pa.list_(pa.int16(), 2)),
    "pairs": pa.list_(pa.string(), 2),
    "map": pa.map_(pa.string(), pa.int32()),
    "when": pa.timestamp("us"),
}


def some_batches(source: random.Random, names: list[str], rows: list[int]) -> list[Any]:
    schema = pa.schema([(name, TYPES[name]) for name in names])
    found = []
    for count in rows:
        columns = [
            pa.array([value_of(TYPES[name], source) for _ in range(count)], TYPES[name])
            if name != "when"
            else pa.array([source.randrange(10**9) for _ in range(count)], TYPES[name])
            for name in names
        ]
        found.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return found


def check_rows(data: bytes, kind: str, source: random.Random, most: int = 12) -> RecordIndex:
    """pyarrow reads each of some rows from the file that holds nothing but that row."""
    index = index_of(data)
    batches = read_rows(data, kind)
    assert len(index) == sum(batch.num_rows for batch in batches)
    places = [(b, row) for b, batch in enumerate(batches) for row in range(batch.num_rows)]
    for record in source.sample(range(len(places)), min(most, len(places))):
        b, row = places[record]
        only = read_rows(alone(data, kind, index, record), kind)[b].slice(row, 1)
        assert only.to_pylist() == batches[b].slice(row, 1).to_pylist(), record
    return index


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_row_is_read_from_its_bytes_alone(name: str, kind: str) -> None:
    source = random.Random(name)
    # a file has one dictionary for all of its batches
    batches = some_batches(source, [name], [30] if name == "colour" else [9, 0, 20, 1])
    index = check_rows(written(batches, kind), kind, source)
    assert index.exact and index.format == "arrow"


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("seed", range(10))
def test_a_row_of_many_columns_is_read_from_its_bytes_alone(seed: int, kind: str) -> None:
    source = random.Random(seed)
    names = source.sample(sorted(TYPES), source.randrange(2, 9))
    batches = some_batches(source, names, [source.randrange(30) for _ in range(4)])
    if kind == "file" and "colour" in names:
        kind = "stream"  # a file has one dictionary for all of its batches
    check_rows(written(batches, kind), kind, source)


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_slices_are_written_and_found_as_rows_of_their_own(kind: str) -> None:
    source = random.Random(5)
    (whole,) = some_batches(source, ["text", "flag", "tokens", "image"], [100])
    check_rows(
        written([whole.slice(3, 17), whole.slice(50), whole.slice(0, 0)], kind), kind, source
    )


def test_an_image_is_its_bytes_and_what_points_at_them() -> None:
    values = [random.Random(i).randbytes(size) for i, size in enumerate(EDGES)]
    array = pa.array([{"bytes": value, "path": "p"} for value in values], IMAGE)
    data = written([pa.RecordBatch.from_arrays([array], ["image"])])
    index = index_of(data)
    for value, held in zip(values, bytes_of(index, data), strict=True):
        # two pairs of offsets of 4 bytes each, the value, "p"
        assert len(held) == 8 + 8 + len(value) + 1
        assert value in held
    for record, value in enumerate(values):
        if value:
            at = data.index(value)
            assert index.records_at([at, at + len(value) - 1]).tolist() == [record, record]
    assert index.index_bytes() < 30 * len(values) + 200


def test_neighbours_share_the_byte_of_a_bitmap() -> None:
    data = written([pa.RecordBatch.from_arrays([pa.array([True] * 20)], ["flag"])])
    index = index_of(data)
    start = int(index.extents(0)[0][0])
    assert index.records_in([start], [start + 1]).tolist() == list(range(8))
    assert index.records_in([start + 2], [start + 3]).tolist() == [16, 17, 18, 19]
    assert index.places.covered_bytes() == 3


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_row_of_a_compressed_batch_is_the_batch(kind: str, codec: str) -> None:
    source = random.Random(1)
    data = written(some_batches(source, ["text", "label"], [40, 25]), kind, compression=codec)
    index = index_of(data)
    assert len(index) == 65
    assert (index.exact, index.granularity) == (False, "batch")
    assert index.facts["compression"] == codec
    places = bodies(data, kind)
    assert np.stack(index.extents([0, 39, 40, 64]), 1).tolist() == [
        list(places[0]), list(places[0]), list(places[1]), list(places[1])
    ]  # fmt: skip
    assert index.records_in([places[1][0]], [places[1][0] + 1]).tolist() == list(range(40, 65))


def test_types_whose_rows_are_in_no_order_are_found_by_batch() -> None:
    union = pa.UnionArray.from_sparse(
        pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(["a", "b", "c"])]
    )
    view = pa.array(["x" * 50, "y", None], pa.string_view())
    for array in (union, view):
        batch = pa.RecordBatch.from_arrays([array, pa.array([1, 2, 3])], ["odd", "label"])
        data = written([batch])
        index = check_rows(data, "stream", random.Random(1))
        assert (index.exact, len(index)) == (False, 3)
        assert np.stack(index.extents(1), 1).tolist() == [list(bodies(data, "stream")[0])]


def test_only_metadata_and_offsets_are_read() -> None:
    values = [random.Random(i).randbytes(200_000) for i in range(20)]
    batch = pa.RecordBatch.from_arrays([pa.array(values), pa.array(range(20))], ["data", "n"])
    for kind in ("stream", "file"):
        data = written([batch] * 5, kind)
        reader = Memory(data)
        assert len(read_index(reader, "f")) == 100
        assert sum(length for _, length in reader.reads) < 60_000 < len(data) // 300


def test_a_hundred_thousand_rows_take_tens_of_bytes_each(tmp_path: Path) -> None:
    text = [f"row {i}" for i in range(1000)]
    batch = pa.RecordBatch.from_arrays([pa.array(text), pa.array(range(1000))], ["text", "label"])
    path = tmp_path / "data.arrow"
    path.write_bytes(written([batch] * 100))
    index = open_index(path)
    assert len(index) == 100_000
    assert index.index_bytes() < 13 * len(index)
    assert index.facts["container"] == "stream"
    assert index.facts["columns"] == ["text", "label"]
    assert index.facts["batches"] == 100


def test_rows_without_columns_and_files_without_rows() -> None:
    empty = pa.schema([("a", pa.int32())])
    for kind in ("stream", "file"):
        sink = io.BytesIO()
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(sink, empty):
            pass
        assert len(index_of(sink.getvalue())) == 0
    nothing = pa.RecordBatch.from_arrays([pa.nulls(7)], ["nothing"])
    index = index_of(written([nothing]))
    assert len(index) == 7 and index.extents([0, 6])[0].tolist() == []


def test_without_pyarrow_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(some_batches(random.Random(1), ["label"], [3]))
    original = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError("No module named 'pyarrow'")
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UffdPrefetchError, match="-m pip install pyarrow") as caught:
        index_of(data)
    assert caught.value.exit_code == 2 and "\n" not in caught.value.message


# ---- what lies ----------------------------------------------------------------------------------


def lie(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) >= 1 and len(old) == len(new)
    at = data.rindex(old)
    return data[:at] + new + data[at + len(old) :]


def test_metadata_that_lie_are_refused() -> None:
    rows = 77_777
    data = written([pa.RecordBatch.from_arrays([pa.array([b"ab"] * rows)], ["a"])])
    length = struct.pack("<q", rows)
    for count, saw in (
        (rows + 1, "column of 77777 elements, 77778 are needed"),
        (1 << 62, "too many rows"),
        (-1, "buffers are not in its body"),
    ):
        with pytest.raises(FormatError, match=saw):
            at = data.index(length)  # the batch's, then its only column's
            index_of(data[:at] + struct.pack("<q", count) + data[at + 8 :])
    body = bodies(data, "stream")[0]
    offsets = struct.pack("<ii", 2, 4)
    with pytest.raises(FormatError, match="offsets that do not ascend"):
        at = data.index(offsets, body[0])
        index_of(data[:at] + struct.pack("<ii", 9, 4) + data[at + 8 :])
    last = data.rindex(struct.pack("<i", 2 * rows))
    with pytest.raises(FormatError, match="a buffer of"):
        index_of(data[:last] + struct.pack("<i", 1 << 30) + data[last + 4 :])


def test_rows_that_take_no_bytes_are_bounded() -> None:
    data = written([pa.RecordBatch.from_arrays([pa.nulls(99_999)], ["a"])])
    many = data.replace(struct.pack("<q", 99_999), struct.pack("<q", 1 << 50))
    with pytest.raises(FormatError, match="too many rows"):
        index_of(many)


def test_a_footer_whose_batches_overlap_is_refused() -> None:
    batches = some_batches(random.Random(1), ["label"], [10, 10])
    data = written(batches, "file")
    first, second = (int(one["offset"]) for one in arrow_messages.file_blocks(Memory(data)))
    with pytest.raises(FormatError, match="overlap or are not in the file"):
        index_of(lie(data, struct.pack("<q", second), struct.pack("<q", first)))
    with pytest.raises(FormatError, match="overlap or are not in the file"):
        index_of(lie(data, struct.pack("<q", second), struct.pack("<q", 1 << 62)))
    with pytest.raises(FormatError, match="no ARROW1 at its end"):
        index_of(data[:-1])


def test_big_endian_numbers_are_refused() -> None:
    sink = io.BytesIO()
    schema = pa.schema([("a", pa.int32())])
    with pa.ipc.new_stream(sink, schema):
        pass
    data = bytearray(sink.getvalue())
    message = arrow_messages.read_schema_message(Memory(bytes(data)), 0)
    # the field is left out when it is 0: point its entry of the vtable at a word that is 1
    header = message.header
    at = 8 + header._fields + 4
    word = bytes(data).index(b"\1\0", 8 + header._at)
    data[at : at + 2] = struct.pack("<H", word - 8 - header._at)
    with pytest.raises(FormatError, match="big-endian"):
        index_of(bytes(data))


def test_lists_that_claim_more_than_memory_holds_are_refused() -> None:
    """In a file of holes they could: the inner list's offsets would be read."""
    inner = arrow_layout.TypeLayout("list", 32, children=(arrow_layout.TypeLayout("null"),))
    outer = arrow_layout.TypeLayout("list", 64, children=(inner,))
    huge = 1 << 40
    message = arrow_messages.ArrowMessage(0, b"", 3, None, 0, 8 * huge)  # type: ignore[arg-type]
    nodes = np.array([(1, 0), (huge, 0), (0, 0)], arrow_messages.PAIR)
    buffers = [(0, 0), (0, 16), (0, 0), (16, 4 * huge + 4), (0, 0)]
    batch = arrow_messages.RecordBatch(
        message, 1, nodes, np.array(buffers, arrow_messages.PAIR), None
    )
    reads = []

    def read(offset: int, length: int) -> bytes:
        reads.append((offset, length))
        return struct.pack("<qq", 0, huge)

    with pytest.raises(FormatError, match="elements in a list are too many"):
        arrow_layout.BatchTraversal(batch, read).fill((outer,))
    assert reads == [(0, 16)]


def test_types_that_cannot_be_are_refused() -> None:
    """Lists of -1 elements, and lists of lists whose row has more bits than there are numbers."""
    box = pa.RecordBatch.from_arrays([pa.array([[1, 2]] * 3, pa.list_(pa.int32(), 2))], ["a"])
    data = written([box])
    at = data.rindex(struct.pack("<i", 2), 0, bodies(data, "stream")[0][0] - 200)
    refused = 0
    for place in range(0, at + 1):
        if data[place : place + 4] == struct.pack("<i", 2):
            try:
                index_of(data[:place] + struct.pack("<i", -1) + data[place + 4 :])
            except FormatError as error:
                refused += "lists of -1 elements" in error.message
    assert refused == 1
    kind = pa.int64()
    for _ in range(3):
        kind = pa.list_(kind, 1 << 20)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, pa.schema([("a", kind)])):
        pass
    with pytest.raises(FormatError, match=r"more than 2\^48 bits"):
        index_of(sink.getvalue())
