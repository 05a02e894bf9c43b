# SPDX-License-Identifier: Apache-2.0
"""The whole run in bounded space, however long it is: Darshan's rule.

A fixed number of bins, and their width doubles when the run outgrows them; so do the offsets of a
file that grows. Raw events may end at --max-events; this does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.trace.file.events import FAULT_AFTER_AROUND, Kind

TIME_BINS = 512
OFFSET_BINS = 256
FIRST_WIDTH_NS = 10_000_000
FIRST_WIDTH_BYTES = 1 << 16
#: Most (process, file) pairs counted apart; later ones are counted under process 0.
SERIES_MAX = 256
#: Most of those pairs with an access map (1.5 MiB of memory each).
MAPS_MAX = 64
#: Sums per bin: bytes for the last six, ns for the waits, else events.
QUANTITIES = (
    "faults", "majors", "wait_ns", "touches",
    "fill_bytes", "evict_bytes", "read_bytes", "warm_bytes", "block_bytes", "punch_bytes",
)  # fmt: skip
#: Layers of an access map and the kinds that they count.
LAYERS = {
    "demand": (Kind.FAULT, Kind.AROUND, Kind.READ, Kind.TOUCH, Kind.SEEN),
    "miss": (Kind.MAJOR,),
    "ahead": (Kind.FILL, Kind.WARM),
}
_BY_LENGTH = {
    Kind.FILL: "fill_bytes",
    Kind.EVICT: "evict_bytes",
    Kind.READ: "read_bytes",
    Kind.WARM: "warm_bytes",
    Kind.BLOCK: "block_bytes",
    Kind.PUNCH: "punch_bytes",
}
_LAYER_OF = {kind: i for i, kinds in enumerate(LAYERS.values()) for kind in kinds}


class _Map:
    """Layers x time bins x offset bins of one (process, file)."""

    def __init__(self) -> None:
        self.width_bytes = FIRST_WIDTH_BYTES
        self.cells: np.ndarray[Any, Any] = np.zeros((len(LAYERS), TIME_BINS, OFFSET_BINS), "<u4")

    def add(self, layer: np.ndarray[Any, Any], bins: np.ndarray[Any, Any],
            offsets: np.ndarray[Any, Any]) -> None:  # fmt: skip
        while int(offsets.max()) >= self.width_bytes * OFFSET_BINS:
            self.width_bytes *= 2
            self.cells = _halve(self.cells, 2)
        where = (offsets // np.uint64(self.width_bytes)).astype(np.intp)
        np.add.at(self.cells, (layer, bins, where), 1)


def _halve(values: np.ndarray[Any, Any], axis: int) -> np.ndarray[Any, Any]:
    """Neighbours along an axis added; the second half of it is free again."""
    values = np.moveaxis(values, axis, 0)
    out = np.zeros_like(values)
    out[: len(values) // 2] = values[0::2] + values[1::2]
    return np.moveaxis(out, 0, axis).copy()


class Overview:
    """Sums per (process, file) and time bin, and access maps."""

    def __init__(self, start_ns: int) -> None:
        """``start_ns``: the time of bin 0; what is earlier is counted there."""
        self.start_ns = start_ns
        self.width_ns = FIRST_WIDTH_NS
        self.doublings = 0
        self._index: dict[tuple[int, int], int] = {}
        self._sums: np.ndarray[Any, Any] = np.zeros((SERIES_MAX, len(QUANTITIES), TIME_BINS), "<u8")
        self._maps: dict[int, _Map] = {}

    def add(self, events: np.ndarray[Any, Any]) -> None:
        """Count events, in any order."""
        if not len(events):
            return
        latest = int(events["time_ns"].max())
        while latest - self.start_ns >= self.width_ns * TIME_BINS:
            self._double()
        since = np.maximum(events["time_ns"], np.uint64(self.start_ns)) - np.uint64(self.start_ns)
        bins = (since // np.uint64(self.width_ns)).astype(np.intp)
        pairs = events["pid"].astype("<u8") << np.uint64(16) | events["file"]
        for pair in np.unique(pairs):
            mine = pairs == pair
            self._count(int(pair) >> 16, int(pair) & 0xFFFF, events[mine], bins[mine])

    def _series(self, pid: int, file: int) -> int:
        key = (pid, file)
        if key not in self._index and len(self._index) >= SERIES_MAX - 1:
            key = (0, 0)  # one is kept for all others
        return self._index.setdefault(key, len(self._index))

    def _count(
        self, pid: int, file: int, events: np.ndarray[Any, Any], bins: np.ndarray[Any, Any]
    ) -> None:
        series = self._series(pid, file)
        sums, kinds = self._sums[series], events["kind"]

        def count(name: str, which: np.ndarray[Any, Any], weights: Any = 1) -> None:
            np.add.at(sums[QUANTITIES.index(name)], bins[which], weights)

        again = (kinds == Kind.FAULT) & (events["aux"] & FAULT_AFTER_AROUND != 0)
        count("faults", ((kinds == Kind.FAULT) | (kinds == Kind.AROUND)) & ~again)
        count("majors", kinds == Kind.MAJOR)
        slept = kinds == Kind.WAIT
        count("wait_ns", slept, events["value"][slept])
        count("touches", kinds == Kind.TOUCH)
        sampled = kinds == Kind.MAJORS
        count("majors", sampled, events["value"][sampled])
        for kind, name in _BY_LENGTH.items():
            of_kind = kinds == kind
            count(name, of_kind, events["length"][of_kind])
        if file:
            self._draw(series, events, bins)

    def _draw(self, series: int, events: np.ndarray[Any, Any], bins: np.ndarray[Any, Any]) -> None:
        access_map = self._maps.get(series)
        if access_map is None:
            if len(self._maps) >= MAPS_MAX:
                return
            access_map = self._maps[series] = _Map()
        layer: np.ndarray[Any, Any] = np.full(len(events), -1, np.intp)
        for kind, number in _LAYER_OF.items():
            layer[events["kind"] == kind] = number
        drawn = layer >= 0
        if drawn.any():
            access_map.add(layer[drawn], bins[drawn], events["offset"][drawn])

    def _double(self) -> None:
        self.width_ns *= 2
        self.doublings += 1
        self._sums = _halve(self._sums, 2)
        for access_map in self._maps.values():
            access_map.cells = _halve(access_map.cells, 1)

    def body(self) -> dict[str, Any]:
        """The block that goes into the file (docs/trace-format.md)."""
        series, maps = [], []
        for (pid, file), i in self._index.items():
            sums = self._sums[i]
            kept = {
                name: [[int(b), int(sums[q, b])] for b in np.nonzero(sums[q])[0]]
                for q, name in enumerate(QUANTITIES)
            }
            series.append({"pid": pid, "file": file, **{k: v for k, v in kept.items() if v}})
            access_map = self._maps.get(i)
            if access_map is None:
                continue
            for layer, name in enumerate(LAYERS):
                where = np.argwhere(access_map.cells[layer])
                counts = access_map.cells[layer][tuple(where.T)]
                cells = np.column_stack([where, counts]).astype("<u4")
                maps.append(
                    {"pid": pid, "file": file, "layer": name,
                     "width_bytes": access_map.width_bytes, "cells": cells.tobytes()}
                )  # fmt: skip
        return {
            "start_ns": self.start_ns,
            "width_ns": self.width_ns,
            "time_bins": TIME_BINS,
            "offset_bins": OFFSET_BINS,
            "series": series,
            "maps": maps,
        }
