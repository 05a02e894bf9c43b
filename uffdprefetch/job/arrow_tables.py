# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a Hugging Face dataset lie: in the buffers of its Arrow table.

A table that maps its files has buffers inside these mappings, and whatever was made of it (columns
removed, renamed or cast, rows sliced, tables concatenated) either still has them or has its own in
memory. So the service is told the addresses of the buffers of the columns that a sample gives, and
finds the file's records (orders/buffers.py). Only instance dictionaries of that library's own
classes and pyarrow's tables are read; as the job does with each sample, the table of indices too.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from typing import Any

_TABLE = "datasets.table"


class TableBuffers:
    """``files``: paths of those that the table maps. ``numbers``: (address, first row, rows, row in
    the buffer) of each buffer of ``rows`` successive rows that has a place for every row."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.numbers = array("q")


def buffers(table: Any, columns: Any) -> TableBuffers | None:
    """Of these columns (names; None: all) of a table; None where it does not tell, also because it
    is built otherwise than those of version 5."""
    try:
        found = TableBuffers()
        found.files = sorted(set(_files(table)))
        rows = vars(table)["table"]
        for name, chunked in zip(rows.column_names, rows.columns):  # noqa: B905
            first = 0
            for chunk in chunked.chunks if columns is None or name in columns else ():
                for address, offset in _row_buffers(chunk):
                    found.numbers.extend((address, first, len(chunk), offset))
                first += len(chunk)
        return found
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _files(table: Any) -> Iterator[str]:
    if _is(table, "ConcatenationTable"):
        for row in vars(table)["blocks"]:
            for block in row:
                yield from _files(block)
    elif _is(table, "MemoryMappedTable"):
        yield vars(table)["path"]
    elif not _is(table, "InMemoryTable"):
        raise TypeError(type(table))


def _is(table: object, name: str) -> bool:
    kind = getattr(sys.modules.get(_TABLE), name, None)
    return kind is not None and type(table) is kind


def _row_buffers(chunk: Any) -> Iterator[tuple[int, int]]:
    """(address, row in it) of the buffers of an array that have a place for every row. Of a column
    and of each field of a struct one is enough: the file's index knows what belongs to it."""
    if not len(chunk):
        return
    chunk = getattr(chunk, "storage", chunk)  # of an extension
    validity, *rest = chunk.buffers()
    children = chunk.type.num_fields if type(chunk).__name__ == "StructArray" else 0
    first = [] if children else [each for each in rest if each is not None and each.size][:1]
    for buffer in (validity, *first):
        if buffer is not None and buffer.size:
            yield buffer.address, chunk.offset
    for number in range(children):
        yield from _row_buffers(chunk.field(number))


def rows_of(indices: Any, numbers: array[int]) -> array[int]:
    """The rows of these samples of a dataset with such a table of indices. Raises IndexError."""
    numpy: Any = sys.modules["numpy"]  # that library needs it
    rows = indices.column(0).to_numpy()
    found = array("q")
    found.frombytes(rows[numpy.frombuffer(numbers, numpy.int64)].astype(numpy.int64).tobytes())
    return found
