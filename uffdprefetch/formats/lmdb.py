# SPDX-License-Identifier: Apache-2.0
"""The index of an LMDB data file: which bytes hold which record, from its branch and leaf pages.

The pages of large values are never read: leaves point to them. The file must not change meanwhile
(docs/safety.md): a writer may reuse pages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.formats import lmdb_pages as pages
from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.keys import Keys
from uffdprefetch.formats.lmdb_pages import Meta, looks_like_lmdb
from uffdprefetch.formats.lmdb_tree import (
    BRANCH,
    DUPLICATE,
    FREE_OR_UNKNOWN,
    LEAF,
    META,
    ON_OVERFLOW,
    OVERFLOW,
    PAGE_TYPE_NAMES,
    Database,
    RecordPieces,
    TreeTraversal,
)
from uffdprefetch.formats.places import Listed, RecordPlaces, one_part
from uffdprefetch.formats.reader import Array, FileReader, FormatError, RangeReader

__all__ = [
    "BRANCH",
    "DUPLICATE",
    "FREE_OR_UNKNOWN",
    "LEAF",
    "META",
    "ON_OVERFLOW",
    "OVERFLOW",
    "PAGE_TYPE_NAMES",
    "Database",
    "FormatError",
    "Index",
    "looks_like_lmdb",
    "open_index",
    "read_index",
]


@dataclass(frozen=True, eq=False)
class Index:
    """The records, one array element each: the main database's in key order, then the named
    databases' in the order of their names. 31 bytes a record, and the keys.

    offset, length: bytes of the value in the file. flags: ON_OVERFLOW, DUPLICATE. leaf_page: number
    of the leaf page with the record's node. key_offset, key_length: of its key in ``keys``, where
    duplicates share one.
    """

    meta: Meta
    file_bytes: int
    databases: tuple[Database, ...]
    offset: Array
    length: Array
    flags: Array
    leaf_page: Array
    key_offset: Array
    key_length: Array
    keys: bytes = field(repr=False)
    _types: Array = field(repr=False)

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def page_bytes(self) -> int:
        return self.meta.page_bytes

    def key(self, record: int) -> bytes:
        """The record's key."""
        at = int(self.key_offset[record])
        return self.keys[at : at + int(self.key_length[record])]

    @cached_property
    def places(self) -> RecordPlaces:
        """The same values, for records_at() and records_in()."""
        return RecordPlaces(one_part(len(self)), [Listed(self.offset, self.length)])

    def records_at(self, offsets: Array) -> Array:
        """For each byte offset the record whose value holds it, -1 where none does."""
        return self.places.records_at(offsets)

    def records_in(self, starts: Array, ends: Array) -> Array:
        """The records, ascending, with at least one byte of their value in one of the ranges
        [starts[i], ends[i]) of the file, in any order."""
        return self.places.records_in(starts, ends)

    def page_types(self) -> Array:
        """The type of each page of the file, uint8: META, BRANCH, LEAF (named databases, large
        sets of duplicates and the free list included), OVERFLOW, FREE_OR_UNKNOWN."""
        types: Array = np.zeros(-(-self.file_bytes // self.page_bytes), np.uint8)
        types[: len(self._types)] = self._types
        return types


# ---- opening ------------------------------------------------------------------------------------


def open_index(path: str | os.PathLike[str]) -> Index:
    """Index an LMDB data file, or the data.mdb of a directory.

    Raises FormatError when it is not a whole LMDB file, UffdPrefetchError when it cannot be read.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        name = os.path.join(name, "data.mdb")
    with FileReader(name) as reader:
        try:
            return read_index(reader)
        except FormatError as error:
            raise error.of(name) from None
        except OSError as error:
            raise UffdPrefetchError(f"cannot read {name}: {error.strerror}", 2) from None


def read_index(reader: RangeReader) -> Index:
    """Index what ``reader`` reads: the two meta pages' beginnings and the branch and leaf pages.

    Raises FormatError; the reader's errors propagate.
    """
    meta = newest_meta(reader)
    traversal = TreeTraversal(reader, meta)
    try:
        free_at, main_at = meta.trees_at
        traversal.free_list(meta.free, free_at)
        found = RecordPieces()
        databases: list[Database] = []
        for named in traversal.database(b"", meta.main, main_at, found, databases):
            traversal.database(*named, found, databases)
    finally:
        traversal.close()
    return Index(
        meta, reader.size_bytes, tuple(databases), **found.columns(), _types=traversal.types
    )


def newest_meta(reader: RangeReader) -> Meta:
    """The valid meta page of the later transaction. Raises FormatError when there is none."""
    metas, wrong = [], None
    try:
        metas.append(pages.parse_meta(reader.read(0, pages.META_BYTES), 0))
        sizes: tuple[int, ...] = (metas[0].page_bytes,)
    except FormatError as error:
        wrong, sizes = error, pages.PAGE_SIZES  # the other one may be whole
    for size in sizes:
        try:
            meta = pages.parse_meta(reader.read(size, pages.META_BYTES), size)
        except FormatError as error:
            wrong = wrong or error
            continue
        if meta.page_bytes == size:
            metas.append(meta)
            break
    if not metas:
        raise wrong or FormatError("no LMDB meta page", 0, "neither of the two is whole")
    meta = max(metas, key=lambda meta: meta.txnid)
    if reader.size_bytes < 2 * meta.page_bytes:
        raise FormatError("file cut short", reader.size_bytes, "it ends before its second page")
    return meta


# ---- as one of the formats ----------------------------------------------------------------------

#: MDB_REVERSEKEY, MDB_INTEGERKEY: keys that do not ascend as bytes compare.
_OTHER_ORDER = 0x02 | 0x08


def _outside(index: Index) -> dict[str, int]:
    """All bytes of no value, by page type."""
    types = index.page_types()
    # bincount() would take 8 bytes a page
    counts = [int(np.count_nonzero(types == kind)) for kind in range(len(PAGE_TYPE_NAMES))]
    held = {
        OVERFLOW: int(index.length[index.flags & ON_OVERFLOW != 0].sum(dtype=np.int64)),
        LEAF: int(index.length[index.flags & ON_OVERFLOW == 0].sum(dtype=np.int64)),
    }
    outside = {
        f"{name} pages": counts[kind] * index.page_bytes - held.get(kind, 0)
        for kind, name in enumerate(PAGE_TYPE_NAMES)
    }
    # the last page may be a part of one
    outside["free-or-unknown pages"] += index.file_bytes - len(types) * index.page_bytes
    return outside


def as_record_index(index: Index) -> RecordIndex:
    """The same index behind the interface of all formats; it shares the arrays."""
    ranges = tuple(
        (db.first, db.first + db.records, not db.tree.flags & _OTHER_ORDER)
        for db in index.databases
    )
    keys = Keys(index.key_offset, index.key_length, np.frombuffer(index.keys, np.uint8), ranges)
    databases = [
        {
            "name": db.name.decode("utf-8", "backslashreplace"),
            "first_record": db.first,
            "records": db.records,
        }
        for db in index.databases
    ]
    return RecordIndex(
        "lmdb",
        index.file_bytes,
        index.places,
        keys,
        outside_bytes=_outside(index),
        facts={
            "page_bytes": index.page_bytes,
            "data_format": index.meta.version,
            "transaction": index.meta.txnid,
            "databases": databases,
        },
        columns={"flags": index.flags, "leaf_page": index.leaf_page},
    )


class Lmdb:
    """See detect.Format."""

    def sniff(self, head: bytes, size_bytes: int, name: str) -> bool:
        return looks_like_lmdb(head)

    def read(self, reader: RangeReader, options: FormatOptions) -> RecordIndex:
        return as_record_index(read_index(reader))
