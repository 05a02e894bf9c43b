# SPDX-License-Identifier: Apache-2.0
"""Parses the messages of Arrow's IPC format: offsets of record batches' buffers. Reads no body.

arrow.apache.org/docs/format/Columnar.html; Message.fbs, Schema.fbs, File.fbs. Messages are
FlatBuffers; pyarrow reads them only with their bodies, so the few fields with offsets are parsed
here. Everything read from the file is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from uffdprefetch.formats.reader import Array, FormatError, RangeReader

FILE_MAGIC = b"ARROW1"
#: The first message of a file, behind the magic and its padding.
FILE_BEGINS = 8
_CONTINUATION = b"\xff\xff\xff\xff"
_PREFIX_BYTES = 8
#: MessageHeader of Message.fbs
SCHEMA, DICTIONARY_BATCH, RECORD_BATCH = 1, 2, 3
#: Bound on metadata, which are some bytes a column and batch.
METADATA_MAX_BYTES = 64 << 20
#: Bytes of the first read: most messages' metadata fit.
_AT_ONCE_BYTES = 4096

BLOCK: np.dtype[Any] = np.dtype(
    [("offset", "<i8"), ("metadata_bytes", "<i4"), ("pad", "<i4"), ("body_bytes", "<i8")]
)
PAIR: np.dtype[Any] = np.dtype([("first", "<i8"), ("second", "<i8")])


class FlatTable:
    """A FlatBuffers table in ``data``, which begins at byte ``where`` of the file."""

    def __init__(self, data: bytes, where: int, at: int | None = None) -> None:
        self._data = data
        self._where = where
        self._at = self._number("<I", 0) if at is None else at
        self._fields = self._at - self._number("<i", self._at)
        self._fields_end = self._fields + self._number("<H", self._fields)

    def wrong(self, what: str, at: int = 0) -> FormatError:
        return FormatError("impossible Arrow metadata", self._where + at, what)

    def _number(self, how: str, at: int) -> int:
        if not 0 <= at <= len(self._data) - struct.calcsize(how):
            raise self.wrong("it points out of itself", min(max(at, 0), len(self._data)))
        return int(struct.unpack_from(how, self._data, at)[0])

    def _place(self, field: int) -> int | None:
        at = self._fields + 4 + 2 * field
        if at + 2 > self._fields_end:
            return None
        offset = self._number("<H", at)
        return self._at + offset if offset else None

    def number(self, field: int, how: str) -> int:
        """A scalar; 0 when absent."""
        at = self._place(field)
        return 0 if at is None else self._number(how, at)

    def table(self, field: int) -> FlatTable | None:
        at = self._place(field)
        return (
            None if at is None else FlatTable(self._data, self._where, at + self._number("<I", at))
        )

    def vector(self, field: int, kind: np.dtype[Any]) -> Array:
        """A vector of structs; empty when absent."""
        at = self._place(field)
        if at is None:
            return np.zeros(0, kind)
        at += self._number("<I", at)
        count = self._number("<I", at)
        if count * kind.itemsize > len(self._data) - at - 4:
            raise self.wrong(f"a vector of {count}", at)
        return np.frombuffer(self._data, kind, count, at + 4)


@dataclass(frozen=True)
class ArrowMessage:
    """A message that begins at byte ``at``: FlatBuffers ``metadata``, then its body."""

    at: int
    metadata: bytes
    kind: int
    header: FlatTable
    body_at: int
    body_bytes: int

    @property
    def end(self) -> int:
        return self.body_at + self.body_bytes


def read_message(reader: RangeReader, at: int, end: int) -> ArrowMessage | None:
    """The message at byte ``at``, which must end before ``end``; None: end of the stream."""
    data = reader.read(at, min(_AT_ONCE_BYTES, end - at))
    if not data or data[:_PREFIX_BYTES] == _CONTINUATION + bytes(4):
        return None
    if len(data) < _PREFIX_BYTES:
        raise FormatError("file cut short", at + len(data), "it ends in an Arrow message")
    (length,) = struct.unpack_from("<i", data, 4)
    if data[:4] != _CONTINUATION:
        raise FormatError("no Arrow message", at, f"{data[:8].hex(' ')}")
    if not 0 < length <= METADATA_MAX_BYTES:
        raise FormatError("impossible length of Arrow metadata", at + 4, f"{length} bytes")
    begins = at + _PREFIX_BYTES
    if length > end - begins:
        raise FormatError("file cut short", end, f"Arrow metadata of {length} bytes from {begins}")
    metadata = data[_PREFIX_BYTES : _PREFIX_BYTES + length]
    if len(metadata) < length:
        metadata += read_whole(reader, begins + len(metadata), length - len(metadata))
    message = FlatTable(metadata, begins)
    header = message.table(2)
    if header is None:
        raise message.wrong("a message without a header")
    body_bytes = message.number(3, "<q")
    if not 0 <= body_bytes <= end - begins - length:
        raise FormatError("file cut short", end, f"an Arrow body of {body_bytes} bytes")
    kind = message.number(1, "<B")
    return ArrowMessage(at, metadata, kind, header, begins + length, body_bytes)


def read_whole(reader: RangeReader, offset: int, length: int) -> bytes:
    data = reader.read(offset, length)
    if len(data) < length:
        raise FormatError("file cut short", offset + len(data), "it ends here")
    return data


def read_schema_message(reader: RangeReader, at: int) -> ArrowMessage:
    """The schema with which a stream begins. Raises FormatError."""
    message = read_message(reader, at, reader.size_bytes)
    if message is None or message.kind != SCHEMA:
        raise FormatError("no Arrow schema", at, "another message, or none")
    if message.header.number(0, "<h"):
        raise FormatError("Arrow file of a big-endian machine", at, "its numbers are reversed")
    return message


def stream_messages(reader: RangeReader, at: int) -> Iterator[ArrowMessage]:
    """All messages from byte ``at`` to the end of the stream."""
    while message := read_message(reader, at, reader.size_bytes):
        yield message
        at = message.end


def file_blocks(reader: RangeReader) -> Array:
    """The record batches' locations in a file's footer (BLOCK), in their order.

    Raises FormatError, also when two of them overlap.
    """
    tail_bytes = 4 + len(FILE_MAGIC)
    size_bytes = reader.size_bytes
    tail = reader.read(max(size_bytes - tail_bytes, 0), tail_bytes)
    if len(tail) < tail_bytes or tail[4:] != FILE_MAGIC:
        raise FormatError("file cut short", size_bytes, "no ARROW1 at its end")
    (length,) = struct.unpack_from("<i", tail)
    begins = size_bytes - tail_bytes - length
    if not 0 < length <= METADATA_MAX_BYTES or begins < FILE_BEGINS:
        raise FormatError("impossible Arrow footer", size_bytes - tail_bytes, f"{length} bytes")
    footer = FlatTable(read_whole(reader, begins, length), begins)
    blocks = footer.vector(3, BLOCK)
    starts = blocks["offset"]
    lengths: Array = blocks["metadata_bytes"].astype(np.int64)
    inside = (starts >= FILE_BEGINS) & (starts < begins) & (lengths > 0) & (lengths < begins)
    # each is bounded before they are added
    inside &= (blocks["body_bytes"] >= 0) & (blocks["body_bytes"] < begins)
    ends: Array = np.where(inside, starts, 0) + lengths + np.where(inside, blocks["body_bytes"], 0)
    inside &= ends <= begins
    order = np.argsort(starts, kind="stable")
    apart = bool((ends[order][:-1] <= starts[order][1:]).all())
    if not inside.all() or not apart:
        raise footer.wrong("record batches that overlap or are not in the file")
    return blocks


@dataclass(frozen=True)
class RecordBatch:
    """A record batch: rows, (length, nulls) of each field, (offset in the body, bytes) of each
    buffer; PAIR. ``codec`` is None or the compression's name."""

    message: ArrowMessage
    rows: int
    nodes: Array
    buffers: Array
    codec: str | None


_CODECS = {0: "lz4", 1: "zstd"}


def parse_batch(message: ArrowMessage) -> RecordBatch:
    """The record batch of a message. Raises FormatError: a buffer that is not in its body."""
    header = message.header
    rows = header.number(0, "<q")
    nodes, buffers = header.vector(1, PAIR), header.vector(2, PAIR)
    compression = header.table(3)
    codec = None
    if compression is not None:
        codec = _CODECS.get(compression.number(0, "<b"), "unknown")
    offset, length = buffers["first"], buffers["second"]
    inside = (offset >= 0) & (length >= 0) & (length <= message.body_bytes)
    inside &= np.where(inside, offset, 0) <= message.body_bytes - np.where(inside, length, 0)
    if rows < 0 or (nodes["first"] < 0).any() or not inside.all():
        raise header.wrong("a record batch whose buffers are not in its body")
    return RecordBatch(message, rows, nodes, buffers, codec)
