# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a record batch's buffers belong to which row. A type is known by its buffers.

arrow.apache.org/docs/format/Columnar.html, "Physical Memory Layout". The rows of a buffer have
fixed strides (Strided) unless a list's or string's offsets say otherwise (Listed). A slot is one
such column of pieces; every batch has the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from uffdprefetch.formats.arrow_messages import RecordBatch
from uffdprefetch.formats.reader import Array, FormatError

#: Rows times columns of a file: bounds the index's memory (12 bytes each).
PIECES_MAX = 1 << 28
#: Elements of a column, and bits of a row: then all sums fit into 64 bits.
ELEMENTS_MAX = 1 << 48


@dataclass(frozen=True)
class TypeLayout:
    """A type. kind: "null"; "fixed", ``bits`` an element; "binary", with offsets of ``bits``;
    "list", with offsets of ``bits``; "fixed_list" of ``each`` elements; "struct"."""

    kind: str
    bits: int = 0
    each: int = 0
    children: tuple[TypeLayout, ...] = ()


class Slot(NamedTuple):
    """``bits``: of a Strided, -1 for a Listed. ``extra_bytes``: of the Strided."""

    bits: int
    extra_bytes: int


_LISTED = Slot(-1, 0)


def slots(node: TypeLayout, each: int | None = 1) -> list[Slot]:
    """The slots of a column with ``each`` elements a row; None: a variable number, of a list."""
    if node.kind == "null":
        return []

    def slot(bits: int, extra_bytes: int = 0) -> Slot:
        return _LISTED if each is None else Slot(each * bits, extra_bytes)

    found = [slot(1)]
    if node.kind == "fixed":
        return [*found, slot(node.bits)]
    if node.kind == "binary":
        return [*found, slot(node.bits, node.bits // 8), _LISTED]
    if node.kind == "list":
        return [*found, slot(node.bits, node.bits // 8), *slots(node.children[0], None)]
    below = each
    if node.kind == "fixed_list":
        below = None if each is None else each * node.each
    return found + [one for child in node.children for one in slots(child, below)]


def units(node: TypeLayout) -> list[int]:
    """A column's slots in groups: how many belong to each thing that has a place for every row, the
    column or, of a struct, its validity and each field."""
    if node.kind != "struct":
        return [len(slots(node))]
    return [1] + [count for child in node.children for count in units(child)]


class Range(NamedTuple):
    """The elements [low, high) of each row, ascending; or ``each`` elements a row."""

    rows: int
    each: int
    low: Array | None = None
    high: Array | None = None

    @property
    def end(self) -> int:
        """Number of elements that the column must have."""
        if self.high is None:
            return self.rows * self.each
        return int(self.high[-1]) if self.rows else 0


#: A batch's value of a slot: a Strided's base (-1: none), or a Listed's starts and lengths.
Filled = int | tuple[Array, Array]


class BatchTraversal:
    """Traversal of one batch's nodes and buffers along the types, in the order of the format.

    ``read(offset, length)`` gives bytes of the file.
    """

    def __init__(self, batch: RecordBatch, read: Callable[[int, int], bytes]) -> None:
        self._batch = batch
        self._read = read
        self._nodes: Iterator[int] = iter(batch.nodes["first"].tolist())
        self._buffers = iter(batch.buffers.tolist())

    def fill(self, columns: tuple[TypeLayout, ...]) -> list[Filled]:
        """The values of these columns' slots. Raises FormatError."""
        found: list[Filled] = []
        for column in columns:
            found += self._column(column, Range(self._batch.rows, 1))
        return found

    def _wrong(self, what: str) -> FormatError:
        return FormatError("impossible Arrow record batch", self._batch.message.at, what)

    def _buffer(self) -> tuple[int, int]:
        """Offset of the next buffer in the file, and its bytes."""
        try:
            offset, length = next(self._buffers)
        except StopIteration:
            raise self._wrong("fewer buffers than its schema has") from None
        return self._batch.message.body_at + offset, length

    def _column(self, node: TypeLayout, rows: Range) -> list[Filled]:
        length = next(self._nodes, -1)
        if length < rows.end:
            raise self._wrong(f"a column of {length} elements, {rows.end} are needed")
        if node.kind == "null":
            return []
        found = [self._pieces(1, rows, may_miss=True)]
        if node.kind == "fixed":
            return [*found, self._pieces(node.bits, rows)]
        if node.kind in ("binary", "list"):
            at, buffer_bytes = self._buffer()
            below = self._below(node.bits // 8, rows, at, buffer_bytes)
            found.append(self._offset_pieces(node.bits // 8, rows, at))
            if node.kind == "binary":
                return [*found, self._pieces(8, below)]
            return found + self._column(node.children[0], below)
        if node.kind == "fixed_list":
            if rows.end * node.each > ELEMENTS_MAX:
                raise self._wrong(f"{rows.end} lists of {node.each} elements")
            rows = _times(rows, node.each)
        return found + [one for child in node.children for one in self._column(child, rows)]

    def _pieces(self, bits: int, rows: Range, may_miss: bool = False) -> Filled:
        """The next buffer's pieces, of elements of ``bits`` each."""
        at, buffer_bytes = self._buffer()
        missing = may_miss and not buffer_bytes
        if not missing and -(-rows.end * bits // 8) > buffer_bytes:
            raise self._wrong(f"a buffer of {buffer_bytes} bytes for {rows.end} of {bits} bits")
        if rows.low is None or rows.high is None:
            return -1 if missing else at
        if missing:
            return np.zeros(rows.rows, np.int64), np.zeros(rows.rows, np.int64)
        start: Array = at + rows.low * bits // 8
        end: Array = at - (-rows.high * bits // 8)
        some = rows.high > rows.low
        return np.where(some, start, at), np.where(some, end - start, 0)

    def _offset_pieces(self, width: int, rows: Range, at: int) -> Filled:
        """Pieces of a buffer of offsets: a row has one more offset than elements."""
        if rows.low is None or rows.high is None:
            return at if rows.end else -1
        length: Array = (rows.high - rows.low + 1) * width
        some = rows.high > rows.low
        return np.where(some, at + rows.low * width, at), np.where(some, length, 0)

    def _below(self, width: int, rows: Range, at: int, buffer_bytes: int) -> Range:
        """The range of child elements (or data bytes) of each row, by reading the offsets."""
        low: Array = np.arange(rows.rows, dtype=np.int64) * rows.each
        high: Array = low + rows.each
        if rows.low is not None and rows.high is not None:
            low, high = rows.low, rows.high
        if not rows.rows or int(low[0]) >= rows.end:
            nothing: Array = np.zeros(rows.rows, np.int64)
            return Range(rows.rows, 0, nothing, nothing)
        first = int(low[0])
        count = rows.end - first + 1
        if (rows.end + 1) * width > buffer_bytes:
            raise self._wrong(f"{buffer_bytes} bytes of offsets for {rows.end} elements")
        if count > PIECES_MAX:
            raise self._wrong(f"{count} elements in a list are too many")
        data = self._read(at + first * width, count * width)
        offsets = np.frombuffer(data, f"<i{width}").astype(np.int64)
        if int(offsets[0]) < 0 or (offsets[1:] < offsets[:-1]).any():
            raise self._wrong("offsets that do not ascend")
        return Range(rows.rows, 0, offsets[low - first], offsets[high - first])


def _times(rows: Range, each: int) -> Range:
    if rows.low is None or rows.high is None:
        return Range(rows.rows, rows.each * each)
    return Range(rows.rows, 0, rows.low * each, rows.high * each)
