# SPDX-License-Identifier: Apache-2.0
"""RecordIndex, common to all formats: record number -> bytes, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from uffdprefetch.formats.keys import Keys
from uffdprefetch.formats.places import Pair, RecordPlaces
from uffdprefetch.formats.reader import Array


@dataclass(frozen=True)
class FormatOptions:
    """Options of formats. ``record_bytes``, ``header_bytes``: of raw records. ``verify``: check the
    data too where possible, which reads all of it."""

    record_bytes: int | None = None
    header_bytes: int = 0
    verify: bool = False


@dataclass(frozen=True, eq=False)
class RecordIndex:
    """Which bytes of a file hold which record. Records are numbered from 0 in the format's order.

    granularity: "record" when the extents are exact, "batch" when some are those of all records
    packed together. outside_bytes: bytes of no record, by kind, as far as the format knows. facts:
    further properties, as JSON. columns: arrays of the format's own, one element a record (LMDB:
    ``flags`` and ``leaf_page``).
    """

    format: str
    file_bytes: int
    places: RecordPlaces
    keys: Keys | None = None
    granularity: str = "record"
    outside_bytes: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def exact(self) -> bool:
        return self.granularity == "record"

    def only(self, columns: Sequence[int]) -> RecordIndex:
        """The same records, of which these columns of ``places`` alone are read."""
        some = [self.places.columns[number] for number in columns]
        return replace(self, places=RecordPlaces(self.places.parts, some))

    def extents(self, records: Any) -> Pair:
        """(starts, ends) in the file, int64, of these records (a number or an array of numbers).

        A record may have several extents (extent_counts()), adjacent in the arrays, and empty ones.
        Raises IndexError.
        """
        return self.places.extents(records)

    def extent_counts(self, records: Any) -> Array:
        """The number of extents of each of these records."""
        return self.places.extent_counts(records)

    def records_at(self, offsets: Any) -> Array:
        """A record that contains each byte offset, -1 where none does."""
        return self.places.records_at(offsets)

    def records_in(self, starts: Any, ends: Any) -> Array:
        """The records, ascending, with at least one byte in one of the ranges [starts[i], ends[i])
        of the file, in any order."""
        return self.places.records_in(starts, ends)

    def key(self, record: int) -> bytes | None:
        """The record's key; None in a format without keys."""
        return None if self.keys is None else self.keys.key(record)

    def find(self, key: bytes) -> Array:
        """The records with this key, ascending; none in a format without keys."""
        return np.zeros(0, np.int64) if self.keys is None else self.keys.find(key)

    def arrays(self) -> dict[str, Array]:
        """All arrays, by name."""
        found = {f"places.{name}": array for name, array in self.places.arrays().items()}
        found |= {f"columns.{name}": array for name, array in self.columns.items()}
        if self.keys is not None:
            found |= {f"keys.{name}": getattr(self.keys, name) for name in _KEY_ARRAYS}
        return found

    def index_bytes(self) -> int:
        """Its memory."""
        return sum(array.nbytes for array in self.arrays().values())


_KEY_ARRAYS = ("offset", "length", "data")


def describe(index: RecordIndex) -> dict[str, Any]:
    """Everything but the arrays, as JSON."""
    return {
        "format": index.format,
        "file_bytes": index.file_bytes,
        "shape": index.places.shape(),
        "key_ranges": None if index.keys is None else [list(part) for part in index.keys.ranges],
        "granularity": index.granularity,
        "outside_bytes": dict(index.outside_bytes),
        "facts": dict(index.facts),
    }


def rebuild(described: Mapping[str, Any], arrays: Mapping[str, Array]) -> RecordIndex:
    """Make an index from describe() and RecordIndex.arrays(). Raises KeyError, TypeError,
    ValueError."""
    by_kind: dict[str, dict[str, Array]] = {"places": {}, "columns": {}, "keys": {}}
    for name, array in arrays.items():
        kind, _, rest = name.partition(".")
        by_kind[kind][rest] = array
    ranges = described["key_ranges"]
    keys = None
    if ranges is not None:
        offset, length, data = (by_kind["keys"][name] for name in _KEY_ARRAYS)
        parts = tuple((int(first), int(end), bool(sorted_)) for first, end, sorted_ in ranges)
        keys = Keys(offset, length, data, parts)
    return RecordIndex(
        str(described["format"]),
        int(described["file_bytes"]),
        RecordPlaces.from_arrays(described["shape"], by_kind["places"]),
        keys,
        str(described["granularity"]),
        dict(described["outside_bytes"]),
        dict(described["facts"]),
        by_kind["columns"],
    )
