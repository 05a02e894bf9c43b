# SPDX-License-Identifier: Apache-2.0
"""Columns of paths in tables of Hugging Face's library: of texts, and of images and audio that are
kept as files. Nothing is decoded; of a column that may be of paths a few cells are read, then it is
read whole."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any

from .candidates import CandidateList, kind_of, probe_indices

#: Cells checked before a whole column is read: in a table that maps a file each is a fault.
_PROBES = 4
#: Columns that are looked at.
_FIELDS = 32
#: Bytes of a text, on average, in a column that is not read: no paths are so long.
_LONG_BYTES = 512


def path_columns(name: str, dataset: Any) -> Iterator[CandidateList]:
    """Columns of paths, also of images and audio that are kept as files, by the table's rows."""
    table = vars(vars(dataset)["_data"])["table"]
    for label, column in list(zip(table.column_names, table.columns))[:_FIELDS]:  # noqa: B905
        found = _path_chunks(column.chunks)
        if found is None or not table.num_rows:
            continue
        suffix, chunks = found
        probes = [_cell(chunks, i) for i in probe_indices(table.num_rows, _PROBES)]
        if kind_of(probes) == "text" and all("/" in path or "." in path for path in probes):
            yield CandidateList(
                f"{name}[{label}]{suffix}", "text", table.num_rows,
                zlib.crc32(repr((id(table), label, probes)).encode("utf-8", "surrogatepass")),
                partial(_cells, chunks),
            )  # fmt: skip


def _path_chunks(chunks: list[Any]) -> tuple[str, list[Any]] | None:
    """(field, chunks of text) of a column that may be of paths: of texts, or of structs of a path
    and no bytes, which Image and Audio are."""
    if not chunks:
        return None
    kind = str(chunks[0].type)
    suffix = ""
    if kind.startswith("struct<") and "path: string" in kind and "bytes: binary" in kind:
        places = {chunks[0].type.field(i).name: i for i in range(chunks[0].type.num_fields)}
        if any(chunk.field(places["bytes"]).null_count < len(chunk) for chunk in chunks):
            return None
        suffix, chunks = "[path]", [chunk.field(places["path"]) for chunk in chunks]
        kind = str(chunks[0].type)
    rows = sum(map(len, chunks))
    if kind not in ("string", "large_string") or not rows:
        return None
    return None if sum(each.nbytes for each in chunks) > _LONG_BYTES * rows else (suffix, chunks)


def _cell(chunks: list[Any], number: int) -> Any:
    for chunk in chunks:
        if number < len(chunk):
            return chunk[number].as_py()
        number -= len(chunk)
    return None


def _cells(chunks: list[Any]) -> list[Any]:
    return [path for chunk in chunks for path in chunk.to_pylist()]


def chosen_rows(name: str, dataset: Any) -> Iterator[CandidateList]:
    """The rows of a dataset that was shuffled or selected, by its samples."""
    chosen = vars(dataset).get("_indices")
    if chosen is not None and chosen.num_rows:
        rows = chosen.column(0)
        probes = [rows[i].as_py() for i in probe_indices(chosen.num_rows, _PROBES)]
        yield CandidateList(
            f"{name}._indices", "ints", chosen.num_rows,
            zlib.crc32(repr((id(chosen), probes)).encode()),
            lambda: array("q", rows.to_numpy().astype("<i8").tobytes()),
        )  # fmt: skip
