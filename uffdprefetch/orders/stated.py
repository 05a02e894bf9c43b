# SPDX-License-Identifier: Apache-2.0
"""Orders as a plan file states them (records, keys, ranges), resolved by a file's record index to
predict/order/cursor.Order: the bytes of each item.

An order knows its place in the plan file, for its error messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.npy import Npy
from uffdprefetch.formats.reader import FileReader, FormatError
from uffdprefetch.orders.key_table import KeyTable
from uffdprefetch.predict.order.order import Order

#: Items, and extents, of one order: bounds it to about 3 GB of memory.
ITEMS_MAX = 1 << 26
_READ_BYTES = 4 << 20


class NumberSource(Protocol):
    """The numbers of an order."""

    def __len__(self) -> int: ...

    def array(self) -> Array:
        """All of them, int64, of shape (n,) or (n, 2). Raises UffdPrefetchError (exit 2)."""
        ...


@dataclass(frozen=True, eq=False)
class InlineNumbers:
    """Numbers in the plan file itself."""

    numbers: Array

    def __len__(self) -> int:
        return len(self.numbers)

    def array(self) -> Array:
        return self.numbers


@dataclass(frozen=True)
class RangeNumbers:
    """A range: start, stop, step."""

    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def array(self) -> Array:
        r = self.numbers
        return np.arange(r.start, r.stop, r.step, dtype=np.int64)


class NpyNumbers:
    """Numbers in a .npy file, whose header is checked at once; read on demand."""

    def __init__(self, where: str, path: str, columns: int) -> None:
        """``columns``: 1 for shape (n,), 2 for (n, 2). Raises UffdPrefetchError (exit 2)."""
        self._where, self._path, self._columns = where, path, columns
        try:
            with FileReader(path) as reader:
                index = Npy().read(reader, FormatOptions())
        except FormatError as error:
            raise usage_error(f"{where}: {path}: {error.message}") from None
        except UffdPrefetchError as error:  # it has the path in it
            raise usage_error(f"{where}: {error.message}") from None
        except OSError as error:
            raise usage_error(f"{where}: {path}: {error.strerror}") from None
        shape, dtype = index.facts["shape"], index.facts["dtype"]
        wanted = ["n"] if columns == 1 else ["n", 2]
        if len(shape) != columns or shape[1:] != wanted[1:]:
            text = str(tuple(wanted)).replace("'", "")
            raise usage_error(f"{where}: {path}: an array of shape {tuple(shape)}, not {text}")
        if np.dtype(dtype).kind not in "iu":
            raise usage_error(f"{where}: {path}: an array of {dtype}, not of int64")
        self._type = np.dtype(dtype)
        self._count = int(shape[0])
        self._begins = int(index.outside_bytes["header"])

    def __len__(self) -> int:
        return self._count

    def array(self) -> Array:
        size = self._count * self._columns
        raw: Array = np.empty(size, self._type)
        into = memoryview(raw.view(np.uint8).data) if size else memoryview(b"")
        with FileReader(self._path) as reader:
            for at in range(0, len(into), _READ_BYTES):
                want = min(_READ_BYTES, len(into) - at)
                data = reader.read(self._begins + at, want)
                if len(data) < want:
                    raise usage_error(f"{self._where}: {self._path}: it has become shorter")
                into[at : at + want] = data
        if self._type.kind == "u" and size and int(raw.max()) > np.iinfo(np.int64).max:
            raise usage_error(f"{self._where}: {self._path}: a number beyond 2^63-1")
        numbers: Array = raw.astype(np.int64, copy=False)
        return numbers if self._columns == 1 else numbers.reshape(-1, 2)


class OrderSpec(Protocol):
    """One order, as it was given: by records, ranges or keys."""

    @property
    def where(self) -> str: ...

    @property
    def items(self) -> int: ...

    def resolve(self, index: RecordIndex | None, file_bytes: int) -> Order:
        """The bytes of its items. ``index``: of the file; not needed (None) for byte ranges.
        Raises UffdPrefetchError (exit 2) when it does not fit the file."""
        ...


@dataclass(frozen=True, eq=False)
class RecordOrder:
    """Record numbers."""

    where: str
    source: NumberSource

    @property
    def items(self) -> int:
        return len(self.source)

    def resolve(self, index: RecordIndex | None, file_bytes: int) -> Order:
        assert index is not None
        numbers = self.source.array()
        outside = np.flatnonzero((numbers < 0) | (numbers >= len(index)))
        if len(outside):
            at = int(outside[0])
            raise usage_error(
                f"{self.where}[{at}]: record {numbers[at]}: the file has {len(index)}, from 0 on"
            )
        return of_records(self.where, numbers, index)


@dataclass(frozen=True, eq=False)
class RangeOrder:
    """Byte ranges [start, end) of the file."""

    where: str
    source: NumberSource

    @property
    def items(self) -> int:
        return len(self.source)

    def resolve(self, index: RecordIndex | None, file_bytes: int) -> Order:
        pairs = self.source.array()
        check_ranges(self.where, pairs)
        outside = np.flatnonzero(pairs[:, 1] > file_bytes)
        if len(outside):
            at = int(outside[0])
            raise usage_error(
                f"{self.where}[{at}]: a range up to byte {pairs[at, 1]}: the file has {file_bytes}"
            )
        return Order(pairs[:, 0], pairs[:, 1], np.arange(len(pairs)))


@dataclass(frozen=True, eq=False)
class KeyOrder:
    """Keys; one with several records is one item of them all."""

    where: str
    keys: Sequence[bytes]

    @property
    def items(self) -> int:
        return len(self.keys)

    def resolve(self, index: RecordIndex | None, file_bytes: int) -> Order:
        assert index is not None
        if index.keys is None:
            raise usage_error(f"{self.where}: keys: a file of format {index.format} has none")
        table = KeyTable(index)
        records, owner = table.find(self.keys)
        missing = np.flatnonzero(np.bincount(owner, minlength=len(self.keys)) == 0)
        if len(missing):  # or more records than KeyTable.find() returns
            found = [index.find(self.keys[i]) for i in missing.tolist()]
            none = [i for i, each in zip(missing.tolist(), found, strict=True) if not len(each)]
            if none:
                raise usage_error(
                    f"{self.where}[{none[0]}]: no record has the key {shown(self.keys[none[0]])}"
                )
            records = np.concatenate([records, *found])
            owner = np.concatenate([owner, np.repeat(missing, [len(each) for each in found])])
            order = np.argsort(owner, kind="stable")
            records, owner = records[order], owner[order]
        made = of_records(self.where, records, index)
        return Order(made.starts, made.ends, owner[made.item], len(self.keys))


def shown(key: bytes) -> str:
    """A key in a message, 60 characters at most."""
    text = repr(key)[1:] if key.isascii() else f"hex {key.hex()}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_ranges(where: str, pairs: Array) -> None:
    """Raises UffdPrefetchError for a range that ends before it begins, or begins before 0."""
    wrong = np.flatnonzero((pairs[:, 0] < 0) | (pairs[:, 1] < pairs[:, 0]))
    if len(wrong):
        at = int(wrong[0])
        raise usage_error(f"{where}[{at}]: [{pairs[at, 0]}, {pairs[at, 1]}] is no range of bytes")


def of_records(where: str, numbers: Array, index: RecordIndex) -> Order:
    """These records of an index, an item each. Of successive records that are packed together
    (granularity "batch") only the first has bytes: the others are read with it. Of an LMDB the leaf
    pages that lead to them are included, not the tree's few upper levels.

    Raises UffdPrefetchError (exit 2) when they have more extents than ITEMS_MAX.
    """
    count = len(numbers)
    if count * len(index.places.columns) > ITEMS_MAX:
        raise usage_error(f"{where}: {count:,} records in {len(index.places.columns)} pieces each:"
                          f" at most {ITEMS_MAX:,} in one order")  # fmt: skip
    starts, ends = index.extents(numbers)
    counts = index.extent_counts(numbers)
    item: Array = np.repeat(np.arange(count), counts)
    if not index.exact and len(item):
        new = _not_as_before(starts, ends, item, counts)
        starts, ends, item = starts[new], ends[new], item[new]
    leaf = index.columns.get("leaf_page")
    if leaf is not None and len(item):
        return _with_leaves(starts, ends, item, leaf[numbers], int(index.facts["page_bytes"]))
    return Order(starts, ends, item, count)


def _with_leaves(starts: Array, ends: Array, item: Array, leaf: Array, page_bytes: int) -> Order:
    """With each LMDB leaf page inserted before the first item that it leads to (``leaf``: of each
    item), since a look-up waits for it too."""
    first: Array = np.unique(leaf, return_index=True)[1]
    first.sort()
    at: Any = np.searchsorted(item, first)
    pages: Array = leaf[first].astype(np.int64) * page_bytes
    begins = starts[np.minimum(at, len(item) - 1)]
    apart = (at < len(item)) & (begins // page_bytes * page_bytes != pages)  # no small value
    first, at, pages = first[apart], at[apart], pages[apart]
    return Order(
        np.insert(starts, at, pages), np.insert(ends, at, pages + page_bytes),
        np.insert(item, at, first), len(leaf),
    )  # fmt: skip


def _not_as_before(starts: Array, ends: Array, item: Array, counts: Array) -> Array:
    """Which extents are of items whose extents differ from the previous item's."""
    as_many: Array = np.append(False, counts[1:] == counts[:-1])[item]
    before = np.maximum(np.arange(len(item)) - counts[item], 0)
    differs = ~as_many | (starts != starts[before]) | (ends != ends[before])
    new: Array = np.bincount(item[differs], minlength=len(counts)) > 0
    return new[item]
