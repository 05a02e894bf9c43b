# SPDX-License-Identifier: Apache-2.0
"""A PathOrder as files that another process maps: the paths once for a data set, the order of each
epoch beside them. Where the arrays lie is in the layouts, which are JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.orders.file_order import PathColumn, PathOrder, PathTable
from uffdprefetch.orders.key_lists import KeyList

_ALIGNED = 64


def write_table(path: str, table: PathTable, kept: bool) -> dict[str, Any]:
    """Write the paths to a new file; the layout for read(), which removes it unless it is ``kept``
    for other orders. Raises OSError."""
    arrays: dict[str, Array] = {}
    for i, column in enumerate(table.columns):
        arrays[f"ends{i}"] = np.ascontiguousarray(column.elements.ends)
        arrays[f"data{i}"] = np.ascontiguousarray(column.elements.data)
    layout = {**_write(path, arrays), "kept": kept}
    layout["columns"] = [
        {"name": each.elements.name, "before": each.before.hex(), "after": each.after.hex()}
        for each in table.columns
    ]
    return layout


def write(path: str, order: PathOrder, table: Mapping[str, Any]) -> dict[str, Any]:
    """Write an order, whose paths are in a file of the layout ``table``, to a new file; the layout
    for read(). Raises OSError."""
    small = np.int32 if len(order.table) <= np.iinfo(np.int32).max else np.int64
    arrays = {"numbers": order.numbers.astype(small), "item": order.item.astype(np.int32)}
    return {
        **_write(path, arrays), "items": order.items, "table": dict(table),
        "aliases": [list(each) for each in order.aliases],
    }  # fmt: skip


def read(directory: str, layout: Mapping[str, Any]) -> PathOrder:
    """Map an order, and remove its files. Raises OSError, ValueError."""
    table = layout["table"]
    arrays = _mapped(directory, layout, False)
    stored = _mapped(directory, table, table["kept"])
    none: Array = np.zeros(0, np.int64)
    columns = [
        PathColumn(
            KeyList(each["name"], "bytes", none, stored[f"ends{i}"], stored[f"data{i}"]),
            bytes.fromhex(each["before"]), bytes.fromhex(each["after"]),
        )
        for i, each in enumerate(table["columns"])
    ]  # fmt: skip
    aliases = [(seen, own) for seen, own in layout["aliases"]]
    return PathOrder(
        PathTable(columns), arrays["numbers"], arrays["item"], layout["items"], aliases
    )


def _write(path: str, arrays: Mapping[str, Array]) -> dict[str, Any]:
    places: list[list[Any]] = []
    with open(path, "xb") as file:
        for name, array in arrays.items():
            at = -(-file.tell() // _ALIGNED) * _ALIGNED
            file.seek(at)
            file.write(array.data.cast("B") if len(array) else b"")
            places.append([name, array.dtype.name, len(array), at])
    return {"name": os.path.basename(path), "arrays": places}


def _mapped(directory: str, layout: Mapping[str, Any], kept: bool) -> dict[str, Array]:
    path = os.path.join(directory, layout["name"])
    try:
        return _read(path, layout)
    finally:
        if not kept:
            os.unlink(path)  # its pages live as long as the mapping


def _read(path: str, layout: Mapping[str, Any]) -> dict[str, Array]:
    sized = os.path.getsize(path)
    whole: Array = np.asarray(np.memmap(path, np.uint8, "r")) if sized else np.zeros(0, np.uint8)
    arrays: dict[str, Array] = {}
    for name, kind, count, at in layout["arrays"]:
        end = at + count * np.dtype(kind).itemsize
        if count and end > len(whole):
            raise ValueError(f"{layout['name']} ends at {len(whole)}, within {name}")
        arrays[name] = whole[at:end].view(kind)
    return arrays
