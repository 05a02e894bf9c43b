# SPDX-License-Identifier: Apache-2.0
"""What `uffdprefetch index` shows: a document, and how it reads. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError
from uffdprefetch.base.units import format_duration, format_size
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.report.columns import TextReport, TextTable

SCHEMA = "uffdprefetch.index/1"
#: Most records shown with --key: a key may have millions of duplicates.
RECORDS_SHOWN_MAX = 1000


def _sizes(index: RecordIndex) -> dict[str, int] | None:
    """Smallest, median (the lower one of two) and largest record in bytes; None without records."""
    sizes, counts = index.places.sizes()
    some = counts > 0
    sizes, counts = sizes[some], counts[some]
    if not len(sizes):
        return None
    order = np.argsort(sizes, kind="stable")
    upto = np.cumsum(counts[order])
    middle = int(np.searchsorted(upto, (int(upto[-1]) + 1) // 2))
    return {
        "smallest": int(sizes.min()),
        "median": int(sizes[order[middle]]),
        "largest": int(sizes.max()),
    }


def document(index: RecordIndex, name: str, seconds: float) -> dict[str, Any]:
    """The index as JSON. ``seconds``: what making it took."""
    covered = min(index.places.covered_bytes(), index.file_bytes)
    outside = {what: size for what, size in index.outside_bytes.items() if size}
    gaps = index.file_bytes - covered - sum(outside.values())
    if gaps > 0:
        outside["gaps"] = gaps
    records, index_bytes = len(index), index.index_bytes()
    return {
        "schema": SCHEMA,
        "file": name,
        "format": index.format,
        "file_bytes": index.file_bytes,
        "records": records,
        "record_bytes": covered,
        "record_size_bytes": _sizes(index),
        "exact": index.exact,
        "granularity": index.granularity,
        "outside_bytes": outside,
        "keys": index.keys is not None,
        "facts": dict(index.facts),
        "seconds": round(seconds, 6),
        "index_bytes": index_bytes,
        "index_bytes_per_record": round(index_bytes / records, 3) if records else None,
    }


def _rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The document's facts, as (name, text)."""
    sizes = document["record_size_bytes"]
    per_record = document["index_bytes_per_record"]
    rows = [
        ("file", f"{document['file']} ({_size(document['file_bytes'])})"),
        ("format", document["format"]),
        ("records", f"{document['records']:,} in {_size(document['record_bytes'])}"),
    ]
    if sizes is not None:
        words = (f"{_size(sizes[what])} {what}" for what in ("smallest", "median", "largest"))
        rows.append(("a record", ", ".join(words)))
    if not document["exact"]:
        rows.append(("extents", f"of the {document['granularity']} that holds a record, not exact"))
    rows += [
        (what, f"{_size(size)} of no record") for what, size in document["outside_bytes"].items()
    ]
    rows.append(("keys", "yes" if document["keys"] else "none: records have numbers"))
    rows += [_fact(name, value) for name, value in document["facts"].items()]
    made = f"{_size(document['index_bytes'])}, made in {format_duration(document['seconds'])}"
    each = "" if per_record is None else f", {per_record:.3g} B a record"
    return [*rows, ("index", made + each)]


def _fact(name: str, value: Any) -> tuple[str, str]:
    if name == "databases":
        words = [f"{one['name'] or '(main)'}: {one['records']:,}" for one in value]
        return name, ", ".join(words)
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_bytes"):
        return name.removesuffix("_bytes").replace("_", " "), _size(value)
    text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    return name.replace("_", " "), text


def _size(size_bytes: int) -> str:
    return f"{size_bytes:,} B" if size_bytes < 10_000 else format_size(size_bytes)


def text(document: dict[str, Any]) -> TextReport:
    """One fact a line."""
    rows = [(name, _printable(told)) for name, told in _rows(document)]
    return TextReport([TextTable(rows, left=2)])


def _printable(text: str) -> str:
    """Names of databases and of files may hold anything."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


# ---- some records -------------------------------------------------------------------------------


def chosen(index: RecordIndex, name: str, record: int | None, key: bytes | None) -> list[int]:
    """The records that are meant. Raises UffdPrefetchError (exit 2) when there is none."""
    if record is not None:
        if not 0 <= record < len(index):
            raise UffdPrefetchError(
                f"{name}: no record {record}: it has {len(index)}, from 0 on", EXIT_USAGE
            )
        return [record]
    assert key is not None
    if index.keys is None:
        raise UffdPrefetchError(
            f"{name}: no keys in {index.format} files: give --record", EXIT_USAGE
        )
    found: list[int] = index.find(key).tolist()
    if not found:
        raise UffdPrefetchError(f"{name}: no record has the key {key!r}", EXIT_USAGE)
    return found


def records_document(index: RecordIndex, name: str, records: list[int]) -> dict[str, Any]:
    """Where these records lie, as JSON; of many the first RECORDS_SHOWN_MAX."""
    shown = []
    for record in records[:RECORDS_SHOWN_MAX]:
        starts, ends = index.extents(record)
        key = index.key(record)
        shown.append(
            {
                "record": record,
                "key": None if key is None else key.decode("utf-8", "backslashreplace"),
                "key_hex": None if key is None else key.hex(),
                "extents": [
                    list(pair) for pair in zip(starts.tolist(), ends.tolist(), strict=True)
                ],
            }
        )
    return {
        "schema": SCHEMA,
        "file": name,
        "format": index.format,
        "exact": index.exact,
        "granularity": index.granularity,
        "found": len(records),
        "records": shown,
    }


def records_text(document: dict[str, Any]) -> TextReport:
    """An extent a line: record, first byte, bytes."""
    lines = []
    for one in document["records"]:
        key = "" if one["key"] is None else f"  {_printable(one['key'])}"
        for start, end in one["extents"]:
            lines.append(f"record {one['record']}: bytes {start} to {end} ({end - start} B){key}")
    if not document["exact"]:
        lines.append(f"not exact: of the {document['granularity']} that holds the record")
    if document["found"] > len(document["records"]):
        lines.append(f"and {document['found'] - len(document['records'])} more")
    return TextReport(notes=lines)
