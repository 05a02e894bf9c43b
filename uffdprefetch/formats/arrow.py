# SPDX-License-Identifier: Apache-2.0
"""Arrow IPC files and streams (Hugging Face datasets, Feather 2): a record is a row.

The schema is parsed by pyarrow; the rows' bytes follow from the batches' metadata and the offsets
of strings and lists, and nothing else is read. A row has an extent in each buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError, pip_install
from uffdprefetch.formats import arrow_messages as messages
from uffdprefetch.formats.arrow_layout import (
    ELEMENTS_MAX,
    PIECES_MAX,
    BatchTraversal,
    Filled,
    Slot,
    TypeLayout,
    slots,
    units,
)
from uffdprefetch.formats.arrow_messages import ArrowMessage, FlatTable, RecordBatch
from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.places import (
    Column,
    Listed,
    Parts,
    RecordPlaces,
    Strided,
    small_lengths,
)
from uffdprefetch.formats.reader import THREADS, Array, FormatError, RangeReader

#: pyarrow's own limit of nesting (ipc::kMaxNestingDepth).
_DEPTH_MAX = 64


# ---- types --------------------------------------------------------------------------------------


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise UffdPrefetchError(
            f"an Arrow file, and no pyarrow ({error}): {pip_install('pyarrow')}",
            EXIT_USAGE,
        ) from None
    return pyarrow


def layout_of(kind: Any, depth: int = 0) -> TypeLayout | None:
    """The buffers of a pyarrow.DataType; None: a type whose layout is not supported.

    Raises ValueError beyond _DEPTH_MAX.
    """
    if depth > _DEPTH_MAX:
        raise ValueError("types within types without end")
    types = _pyarrow().types
    while hasattr(kind, "storage_type"):  # an extension
        kind = kind.storage_type
    if types.is_null(kind):
        return TypeLayout("null")
    if types.is_dictionary(kind):
        return TypeLayout("fixed", kind.index_type.bit_width)
    if types.is_binary(kind) or types.is_string(kind):
        return TypeLayout("binary", 32)
    if types.is_large_binary(kind) or types.is_large_string(kind):
        return TypeLayout("binary", 64)
    if types.is_struct(kind):
        below = [layout_of(kind.field(i).type, depth + 1) for i in range(kind.num_fields)]
        children = tuple(node for node in below if node is not None)
        return TypeLayout("struct", children=children) if len(children) == len(below) else None
    if types.is_map(kind):
        pair = [layout_of(part, depth + 2) for part in (kind.key_type, kind.item_type)]
        children = tuple(node for node in pair if node is not None)
        entries = TypeLayout("struct", children=children)
        return TypeLayout("list", 32, children=(entries,)) if len(children) == 2 else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        child = layout_of(kind.value_type, depth + 1)
        if child is None:
            return None
        if types.is_fixed_size_list(kind):
            if kind.list_size < 0:
                raise ValueError(f"lists of {kind.list_size} elements")
            return TypeLayout("fixed_list", each=kind.list_size, children=(child,))
        return TypeLayout("list", 64 if types.is_large_list(kind) else 32, children=(child,))
    fixed = types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind)
    if fixed or types.is_interval(kind):
        if kind.bit_width < 0:
            raise ValueError(f"values of {kind.bit_width} bits")
        return TypeLayout("fixed", kind.bit_width)
    return None  # unions, run-end encoded, views


def _schema(message: ArrowMessage) -> tuple[list[str], tuple[TypeLayout, ...] | None]:
    """The columns' names and types; None: of some column the rows are in no order that is known.

    Raises FormatError.
    """
    pyarrow = _pyarrow()
    packed = struct.pack("<Ii", 0xFFFFFFFF, len(message.metadata)) + message.metadata
    try:
        schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(packed))
        found = [layout_of(field.type) for field in schema]
        names = list(schema.names)
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        detail = " ".join(str(error).split())[:80]
        raise FormatError("impossible Arrow schema", message.at, detail) from None
    columns = tuple(node for node in found if node is not None)
    return names, columns if len(columns) == len(found) else None


# ---- batches ------------------------------------------------------------------------------------


def _of_file(reader: RangeReader, pool: ThreadPoolExecutor) -> list[RecordBatch]:
    def read(block: Any) -> RecordBatch:
        at = int(block["offset"])
        end = at + int(block["metadata_bytes"]) + int(block["body_bytes"])
        message = messages.read_message(reader, at, end)
        if message is None or message.kind != messages.RECORD_BATCH:
            raise FormatError("no Arrow record batch", at, "the footer says that one is here")
        return messages.parse_batch(message)

    return list(pool.map(read, messages.file_blocks(reader)))


def _of_stream(reader: RangeReader, at: int) -> list[RecordBatch]:
    found = []
    for message in messages.stream_messages(reader, at):
        if message.kind == messages.RECORD_BATCH:
            found.append(messages.parse_batch(message))
        elif message.kind != messages.DICTIONARY_BATCH:
            raise FormatError("no Arrow batch", message.at, f"a message of kind {message.kind}")
    return found


def _fill(
    reader: RangeReader, batches: Sequence[RecordBatch], columns: tuple[TypeLayout, ...],
    pool: ThreadPoolExecutor,
) -> list[list[Filled] | None]:  # fmt: skip
    """Each batch's values of the slots; None: it is compressed."""

    def fill_batch(batch: RecordBatch) -> list[Filled] | None:
        if batch.codec is not None:
            return None
        return BatchTraversal(batch, lambda at, n: messages.read_whole(reader, at, n)).fill(columns)

    return list(pool.map(fill_batch, batches))


def _places(
    batches: Sequence[RecordBatch], filled: Sequence[list[Filled] | None], shape: Sequence[Slot],
    groups: Sequence[int],
) -> tuple[RecordPlaces, list[int]]:  # fmt: skip
    """All batches' pieces, and which of ``groups``, numbers of the slots, those of a column are of.
    The whole body of a batch without values is every row's, and of a group of its own."""
    rows: Array = np.array([batch.rows for batch in batches], np.int64)
    parts = Parts(np.concatenate([[0], np.cumsum(rows)]).astype(np.int64))
    columns: list[Column] = []
    group_of: list[int] = []
    for number, slot in enumerate(shape):
        mine = [None if batch is None else batch[number] for batch in filled]
        if slot.bits >= 0:
            base: Array = np.array([-1 if one is None else one for one in mine], np.int64)
            if (base >= 0).any():
                extra: Array = np.full(len(base), slot.extra_bytes, np.int64)
                columns.append(Strided(slot.bits, base, extra))
                group_of.append(groups[number])
        else:
            column = _listed(mine, rows)
            if column.length.any():
                columns.append(column)
                group_of.append(groups[number])
    whole = np.array([one is None for one in filled], bool)
    if whole.any():
        body = np.array(
            [(one.message.body_at, one.message.body_bytes) for one in batches], np.int64
        )
        columns.append(Strided(0, np.where(whole, body[:, 0], -1), body[:, 1]))
        group_of.append(-1)
    return RecordPlaces(parts, columns), group_of


def _listed(filled: Sequence[Any], rows: Array) -> Listed:
    nothing: list[Array] = [np.zeros(0, np.int64)]
    pairs = [
        (np.zeros(count, np.int64),) * 2 if one is None else one
        for one, count in zip(filled, rows.tolist(), strict=True)
    ]
    starts = np.concatenate(nothing + [start for start, _ in pairs])
    lengths = np.concatenate(nothing + [length for _, length in pairs])
    return Listed(starts, small_lengths(lengths))


def _check_size(batches: Sequence[RecordBatch], shape: Sequence[Slot]) -> None:
    """Raises FormatError when the index would be too large: columns may have no bytes a row."""
    each = 1 + sum(slot.bits < 0 for slot in shape)
    rows = 0
    for batch in batches:
        rows += batch.rows
        if rows * each > PIECES_MAX:
            detail = f"{rows} rows of {each} columns of varying length, can be {PIECES_MAX}"
            raise FormatError("too many rows", batch.message.at, detail)


class Arrow:
    """See detect.Format."""

    def sniff(self, head: bytes, size_bytes: int, name: str) -> bool:
        if head.startswith(messages.FILE_MAGIC + b"\0\0"):
            return True
        if not head.startswith(b"\xff\xff\xff\xff") or len(head) < 8:
            return False
        (length,) = struct.unpack_from("<i", head, 4)
        try:
            message = FlatTable(head[8 : 8 + max(length, 0)], 8)
            return message.number(1, "<B") == messages.SCHEMA and length <= size_bytes - 8
        except FormatError:
            return False

    def read(self, reader: RangeReader, options: FormatOptions) -> RecordIndex:
        is_file = reader.read(0, 8) == messages.FILE_MAGIC + b"\0\0"
        first = messages.read_schema_message(reader, messages.FILE_BEGINS if is_file else 0)
        names, columns = _schema(first)
        shape = [slot for node in columns or () for slot in slots(node)]
        counts = [count for node in columns or () for count in units(node)]
        groups = np.repeat(np.arange(len(counts)), counts).tolist()
        if any(slot.bits > ELEMENTS_MAX for slot in shape):
            raise FormatError("impossible Arrow schema", first.at, "rows of more than 2^48 bits")
        with ThreadPoolExecutor(THREADS, "uffdprefetch-index") as pool:
            batches = _of_file(reader, pool) if is_file else _of_stream(reader, first.end)
            _check_size(batches, shape)
            filled: list[list[Filled] | None] = [None] * len(batches)
            if columns is not None:
                filled = _fill(reader, batches, columns, pool)
        codecs = {batch.codec for batch in batches} - {None}
        bodies = sum(batch.message.body_bytes for batch in batches)
        places, group_of = _places(batches, filled, shape, groups)
        return RecordIndex(
            "arrow",
            reader.size_bytes,
            places,
            granularity="batch" if any(one is None for one in filled) else "record",
            outside_bytes={"schema, metadata, dictionaries": reader.size_bytes - bodies},
            facts={
                "container": "file" if is_file else "stream",
                "batches": len(batches),
                "columns": names,
                "groups": group_of,
                "compression": " ".join(sorted(map(str, codecs))) or None,
            },
        )
