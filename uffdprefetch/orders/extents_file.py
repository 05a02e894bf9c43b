# SPDX-License-Identifier: Apache-2.0
"""An order, cut into units and sorted, as a file that another process maps.

Sorting ten million extents takes seconds, which the service does not have: its helper does it. The
file holds the arrays only; where each lies is in ``write()``'s answer.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from uffdprefetch.predict.order.extents import OrderExtents

_ALIGNED = 64


def write(path: str, units: OrderExtents) -> dict[str, Any]:
    """Write a new file; what read() must be told of it, as JSON has it. Raises OSError."""
    arrays: list[list[Any]] = []
    with open(path, "xb") as file:
        for name, array in units.arrays().items():
            at = -(-file.tell() // _ALIGNED) * _ALIGNED
            file.seek(at)
            file.write(array.data.cast("B"))
            arrays.append([name, array.dtype.name, len(array), at])
    return {
        "name": os.path.basename(path), "arrays": arrays, "items": units.items,
        "page_bytes": units.page_bytes, "nested": units.nested,
    }  # fmt: skip


def read(directory: str, layout: dict[str, Any]) -> OrderExtents:
    """The units that lie there, mapped; the file's name goes. Raises OSError, ValueError."""
    path = os.path.join(directory, layout["name"])
    try:
        whole = np.asarray(np.memmap(path, np.uint8, "r"))
    finally:
        os.unlink(path)  # its pages live as long as the mapping
    arrays = {}
    for name, kind, count, at in layout["arrays"]:
        end = at + count * np.dtype(kind).itemsize
        if count and end > len(whole):
            raise ValueError(f"{layout['name']} ends at {len(whole)}, within {name}")
        arrays[name] = whole[at:end].view(kind)
    return OrderExtents(arrays, layout["items"], layout["page_bytes"], layout["nested"])
