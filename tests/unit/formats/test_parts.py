# SPDX-License-Identifier: Apache-2.0
"""formats/parts.py: where the tensors of a file of weights lie, and what hostile files can do."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from typing import Any

import pytest

from uffdprefetch.formats import parts
from uffdprefetch.formats.parts import DIRECTORY_MAX_BYTES, HEADER_MAX_BYTES, parts_of
from uffdprefetch.formats.reader import FormatError


class Bytes:
    """A RangeReader over bytes, which may say that it is longer; counts what is read."""

    def __init__(self, data: bytes, size_bytes: int | None = None) -> None:
        self.data, self.read_bytes = data, 0
        self.size_bytes = len(data) if size_bytes is None else size_bytes

    def read(self, offset: int, length: int) -> bytes:
        found = self.data[offset : offset + length]
        self.read_bytes += len(found)
        return found


def safetensors(header: Any, data_bytes: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def tensor(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


def archive(count: int, length: int = 1000) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        for number in range(count):
            made.writestr(f"model/data/{number}", bytes(length))
    return file.getvalue()


def test_tensors_in_the_order_of_the_file() -> None:
    header = {"__metadata__": {"format": "pt"}, "b": tensor(10, 30), "a": tensor(0, 10)}
    header["empty"] = tensor(30, 30)
    made = safetensors(header, 30)
    data = len(made) - 30
    assert parts_of(Bytes(made)) == [(data, data + 10), (data + 10, data + 30)]


def test_storages_from_their_local_headers_on() -> None:
    made = archive(3)
    found = parts_of(Bytes(made))
    assert found is not None
    assert [made[start : start + 4] for start, _ in found] == [parts.ZIP_MAGIC] * 3
    assert [end for _, end in found[:-1]] == [start for start, _ in found[1:]]
    assert found[0][0] == 0 and made[found[-1][1] :][:4] == b"PK\x01\x02", "the directory"


def test_of_an_archive_only_the_directory_is_read() -> None:
    reader = Bytes(archive(8, 1 << 20))
    assert len(parts_of(reader) or ()) == 8
    assert reader.read_bytes < 1 << 18


@pytest.mark.parametrize("length", [HEADER_MAX_BYTES + 1, 100 << 20, (1 << 64) - 1])
def test_a_header_that_is_too_long_is_not_read(length: int) -> None:
    reader = Bytes(struct.pack("<Q", length) + b"{" + bytes(4096), size_bytes=1 << 40)
    assert parts_of(reader) is None
    assert reader.read_bytes <= 16


def test_a_header_that_is_longer_than_its_file_is_none() -> None:
    assert parts_of(Bytes(struct.pack("<Q", 1000) + b"{" + bytes(900))) is None


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"{" + b"\xff" * 20,
        b'{"a":' + b"[" * 100_000,
        b'{"a": 1}' + b"x",
        {"a": 1},
        {"a": {}},
        {"a": {"data_offsets": 5}},
        {"a": {"data_offsets": [0]}},
        {"a": {"data_offsets": [0, "5"]}},
        {"a": {"data_offsets": [0.0, 5.0]}},
        {"a": {"data_offsets": [-8, 5]}},
        {"a": {"data_offsets": [5, 4]}},
        {"a": tensor(0, 101)},
        {"a": tensor(1 << 80, 1 << 81)},
        {"a": tensor(0, 10), "b": tensor(90, 1000)},
    ],
    ids=repr,
)
def test_a_header_that_cannot_be(header: Any) -> None:
    with pytest.raises(FormatError):
        parts_of(Bytes(safetensors(header, 100)))


def test_an_archive_that_is_cut() -> None:
    made = archive(4)
    for length in (4, 100, len(made) // 2, len(made) - 1):
        with pytest.raises(FormatError):
            parts_of(Bytes(made[:length]))


def test_a_directory_that_is_too_long_is_not_read() -> None:
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 9, 9, DIRECTORY_MAX_BYTES, 30, 0)
    made = b"PK\x03\x04" + bytes(DIRECTORY_MAX_BYTES + 26) + end
    reader = Bytes(made)
    assert parts_of(reader) is None
    assert reader.read_bytes < 1 << 18


def test_a_local_header_beyond_the_directory() -> None:
    made = bytearray(archive(4))
    at = made.rindex(b"PK\x01\x02")
    made[at + 42 : at + 46] = struct.pack("<L", len(made))
    with pytest.raises(FormatError):
        parts_of(Bytes(bytes(made)))


@pytest.mark.parametrize("head", [b"", b"{", b"\x08" + bytes(7), bytes(64), b"GGUF" + bytes(60)])
def test_other_files_are_none(head: bytes) -> None:
    assert parts_of(Bytes(head)) is None


@pytest.mark.parametrize("kind", ["safetensors", "archive"])
def test_damage_is_a_format_error_or_lies_within_the_file(kind: str) -> None:
    draw = random.Random(5)
    names = {f"layer.{n}": tensor(100 * n, 100 * n + 100) for n in range(20)}
    made = safetensors(names, 2000) if kind == "safetensors" else archive(20, 100)
    failed = 0
    for _ in range(3000):
        damaged = bytearray(made)
        for _ in range(draw.choice((1, 2, 8))):
            damaged[draw.randrange(len(made))] = draw.randrange(256)
        try:
            found = parts_of(Bytes(bytes(damaged))) or []
        except FormatError:
            failed += 1
            continue
        assert all(0 <= start < end <= len(made) for start, end in found)
        assert found == sorted(found)
    assert failed > 100
