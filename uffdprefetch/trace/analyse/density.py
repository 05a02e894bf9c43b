# SPDX-License-Identifier: Apache-2.0
"""Marks in bins of time and offset: a bounded first look at any number of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.analyse.marks import MarkStream
from uffdprefetch.trace.analyse.ranks import NOBODY, SERVICE, Ranks

#: Columns (time) and rows (offset) of the finest grid: about one cell per two pixels of a screen.
COLUMNS, ROWS = 1024, 512
#: Cells that all streams of a trace may fill together; what has more gets a coarser grid.
CELLS_MAX = 2_000_000


@dataclass(frozen=True)
class Cells:
    """The cells that marks fill: `index` is column * rows + row, rising; `count` of marks."""

    file: int
    rank: int
    kind: str
    index: Array
    count: Array


@dataclass(frozen=True)
class Grid:
    """`columns` bins over [0, span_ns), `rows` bins over [0, size_bytes) of each stream's file."""

    columns: int
    rows: int
    span_ns: int
    size_bytes: dict[int, int]
    cells: list[Cells]

    @property
    def filled(self) -> int:
        """Cells with a mark in them, over all streams."""
        return sum(len(c.index) for c in self.cells)


def _bins(values: Array, span: int, bins: int) -> Array:
    # Integers would overflow for large files times many bins; a float's error is far below a bin.
    found = (values.astype(np.float64) * (bins / max(1, span))).astype(np.int64)
    return np.clip(found, 0, bins - 1)


@dataclass(frozen=True)
class Boxes:
    """Rectangles of time and offset, each of `weight` marks; of one file, rank and kind."""

    file: int
    rank: int
    kind: str
    start_ns: Array
    until_ns: Array
    low: Array
    high: Array  # the last byte, not the one after it
    weight: Array | None = None  # None: one mark each

    @classmethod
    def of(cls, stream: MarkStream) -> Boxes:
        """The marks' own rectangles. What was read ahead lasts; of an access the moment counts."""
        low = stream.offset - stream.before
        lasts = stream.duration_ns if stream.layer == "ahead" else 0
        high = low + np.maximum(stream.length, 1) - 1
        start = stream.start_ns
        return cls(stream.file, stream.rank, stream.kind, start, start + lasts, low, high)


def _cells(boxes: Boxes, span_ns: int, size_bytes: int) -> Cells:
    """Every cell that a rectangle meets."""
    c0, c1 = (_bins(v, span_ns, COLUMNS) for v in (boxes.start_ns, boxes.until_ns))
    r0, r1 = (_bins(v, size_bytes, ROWS) for v in (boxes.low, boxes.high))
    # Corners of differences: four additions per mark, however large its rectangle.
    height = ROWS + 1
    flat = (COLUMNS + 1) * height
    weight = boxes.weight
    corners = np.bincount(c0 * height + r0, weight, flat)
    corners += np.bincount((c1 + 1) * height + r1 + 1, weight, flat)
    corners -= np.bincount((c1 + 1) * height + r0, weight, flat)
    corners -= np.bincount(c0 * height + r1 + 1, weight, flat)
    counts = corners.reshape(COLUMNS + 1, height).cumsum(axis=0).cumsum(axis=1)
    counts = np.rint(counts[:COLUMNS, :ROWS].reshape(-1)).astype(np.int64)
    index = np.flatnonzero(counts)
    return Cells(boxes.file, boxes.rank, boxes.kind, index, counts[index])


def _halved(cells: Cells, rows: int) -> Cells:
    """Four cells in one."""
    column: Array = cells.index // rows
    row: Array = cells.index % rows
    index, inverse = np.unique((column // 2) * (rows // 2) + row // 2, return_inverse=True)
    count = np.bincount(inverse, weights=cells.count, minlength=len(index))
    return Cells(cells.file, cells.rank, cells.kind, index, count.astype(np.int64))


def grid(boxes: Iterable[Boxes], span_ns: int, size_bytes: dict[int, int]) -> Grid:
    """All marks on one grid of at most COLUMNS x ROWS and CELLS_MAX filled cells.

    ``size_bytes`` by file.
    """
    found = [_cells(some, span_ns, size_bytes[some.file]) for some in boxes if len(some.low)]
    columns, rows = COLUMNS, ROWS
    while sum(len(c.index) for c in found) > CELLS_MAX and rows > 16:
        found = [_halved(cells, rows) for cells in found]
        columns, rows = columns // 2, rows // 2
    return Grid(columns, rows, span_ns, size_bytes, found)


def from_overview(
    overview: dict[str, Any], ranks: Ranks, start_ns: int, from_ns: int
) -> list[Boxes]:
    """What a trace's overview (trace/record/overview.py) holds of the time after its single events.

    ``from_ns``: where those end, since the trace's start. Raises nothing: an overview that cannot
    be read gives no boxes.
    """
    try:
        width_ns = int(overview["width_ns"])
        first_ns = int(overview["start_ns"]) - start_ns
        maps = [
            (m, np.frombuffer(m["cells"], "<u4").reshape(-1, 3).astype(np.int64))
            for m in overview["maps"]
        ]
    except (KeyError, ValueError, TypeError):
        return []
    found = []
    for entry, cells in maps:
        starts = first_ns + cells[:, 0] * width_ns
        cells, starts = cells[starts + width_ns > from_ns], starts[starts + width_ns > from_ns]
        rank = int(ranks.of(np.array([entry["pid"]]))[0])
        kind = _overview_kind(entry["layer"], rank)
        if not len(cells) or kind is None:
            continue
        low = cells[:, 1] * entry["width_bytes"]
        found.append(
            Boxes(
                int(entry["file"]),
                NOBODY if rank == SERVICE else rank,
                kind,
                np.maximum(starts, from_ns),
                starts + width_ns - 1,
                low,
                low + entry["width_bytes"] - 1,
                cells[:, 2],
            )
        )
    return found


def _overview_kind(layer: str, rank: int) -> str | None:
    if layer == "ahead":
        return {SERVICE: "warm", NOBODY: "other"}.get(rank, "kernel")
    if rank == SERVICE:
        return None
    return {"demand": "fault", "miss": "major"}.get(layer)
