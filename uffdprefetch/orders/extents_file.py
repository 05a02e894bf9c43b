# SPDX-License-Identifier: Apache-2.0
"""OrderExtents as a file that another process maps.

The indexer sorts (ten million extents take seconds), the service maps. The file holds the arrays
only; where each lies is in ``write()``'s answer.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.predict.order.by_place import ByPlace
from uffdprefetch.predict.order.extents import OrderExtents

_ALIGNED = 64


def write(path: str, units: OrderExtents) -> dict[str, Any]:
    """Write a new file and return its layout for read(), JSON-serialisable. Raises OSError."""
    arrays: list[list[Any]] = []
    with open(path, "xb") as file:
        for name, array in arrays_of(units).items():
            at = -(-file.tell() // _ALIGNED) * _ALIGNED
            file.seek(at)
            file.write(array.data.cast("B"))
            arrays.append([name, array.dtype.name, len(array), at])
    return {
        "name": os.path.basename(path), "arrays": arrays, "items": units.items,
        "page_bytes": units.places.page_bytes, "nested": units.places.nested,
        "here_bytes": units.here_bytes,
    }  # fmt: skip


def read(directory: str, layout: dict[str, Any]) -> OrderExtents:
    """Map the units and unlink the file. Raises OSError, ValueError."""
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
    places = ByPlace(
        *(arrays[name] for name in ("starts", "ends", "by_place", "first_page", "end_page")),
        page_bytes=layout["page_bytes"], nested=layout["nested"],
    )  # fmt: skip
    return OrderExtents(
        arrays["item"], arrays["coordinate"], places, layout["items"], layout.get("here_bytes")
    )


def arrays_of(units: OrderExtents) -> dict[str, Array]:
    """What it is made of."""
    places = units.places
    return {
        "starts": units.starts, "ends": units.ends, "item": units.item,
        "coordinate": units.coordinate, "by_place": places.by_place,
        "first_page": places.first_page, "end_page": places.end_page,
    }  # fmt: skip
