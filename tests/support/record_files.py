# SPDX-License-Identifier: Apache-2.0
"""Record files for the tests of the index, and what must be where in them."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from uffdprefetch.formats.index import RecordIndex

#: Around a value that leaves its LMDB leaf, around a page, and none.
EDGES = (0, 1, 2037, 2038, 2039, 4079, 4080, 4095, 4096, 4097, 8192)


class Memory:
    """A RangeReader of bytes that remembers what was read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return self.data[offset : offset + length]


def bytes_of(index: RecordIndex, data: bytes) -> list[bytes]:
    """Each record's bytes by the index, its extents one after the other."""
    records = np.arange(len(index))
    starts, ends = index.extents(records)
    assert (starts >= 0).all() and (starts <= ends).all() and (ends <= len(data)).all()
    pieces = [data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    found, at = [], 0
    for count in index.extent_counts(records).tolist():
        found.append(b"".join(pieces[at : at + count]))
        at += count
    assert at == len(pieces)
    return found


# ---- TFRecord -----------------------------------------------------------------------------------


def _byte_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _byte_table()


def crc32c(data: bytes) -> int:
    """By the book, a byte at a time."""
    register = 0xFFFFFFFF
    for byte in data:
        register = _TABLE[(register ^ byte) & 0xFF] ^ register >> 8
    return register ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def header(length: int) -> bytes:
    """What stands before a TFRecord's data."""
    word = struct.pack("<Q", length)
    return word + masked_crc(word)


def tfrecord(records: Iterable[bytes]) -> bytes:
    return b"".join(header(len(one)) + one + masked_crc(one) for one in records)


def some_records(seed: int, count: int, most: int = 20_000) -> list[bytes]:
    """Of all sizes up to ``most``, the edges among them."""
    source = random.Random(seed)
    edges = [edge for edge in EDGES if edge <= most]
    sizes = [source.choice([*edges, source.randrange(most)]) for _ in range(count)]
    return [source.randbytes(size) for size in sizes]


def sparse(path: Path, size_bytes: int, pieces: dict[int, bytes]) -> None:
    """A file of holes with these bytes at these offsets."""
    with path.open("wb") as file:
        file.truncate(size_bytes)
        for at, data in pieces.items():
            file.seek(at)
            file.write(data)


#: More than readahead brings beyond what was read.
HOLE_BYTES = 64 << 20


def grow(path: Path) -> None:
    """Give a file of records (LMDB, .npy, .arrow) a hole that nobody reads, once. Of a file that is
    in memory whole nobody asks for an order, and readahead may well bring all of a small one."""
    content = path.read_bytes()
    at = len(content)
    if at >= HOLE_BYTES:
        return
    if content.startswith(b"ARROW1"):  # whose footer is found from its end; a stream has an end
        at -= int.from_bytes(content[-10:-6], "little") + 10
    with path.open("r+b") as file:
        file.truncate(at + HOLE_BYTES)
        file.seek(at + HOLE_BYTES)
        file.write(content[at:])
