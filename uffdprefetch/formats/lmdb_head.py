# SPDX-License-Identifier: Apache-2.0
"""Locates some records of an LMDB file before its index is there: from its branch pages, one for a
hundred leaves or more, and the leaves of just these records.

A branch page lists leaves but not their numbers of records. These follow from keys that are numbers
and count the records ("00004711_cat.jpg": a separator is the first key of its leaf), or from leaves
that are equally full, as in a file filled in key order. Each leaf that is read is checked against
that; where neither holds there is no result. (Keys that skip numbers and repeat as many go
unnoticed where no such leaf is read: it is speculation.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from uffdprefetch.formats import lmdb_pages as pages
from uffdprefetch.formats.lmdb import newest_meta
from uffdprefetch.formats.lmdb_pages import Meta, Nodes, PageBatch, PageLayout, Tree
from uffdprefetch.formats.reader import Array, FormatError, PageReader, RangeReader

#: Branch pages read at most: 16 MiB, for about 50 M records.
BRANCH_PAGES_MAX = 4096
#: Leaves sampled for their number of records.
SAMPLE = 12
#: Keys without a number allowed at the end ("__len__").
OTHER_KEYS_MAX = 4
_DUPSORT, _REVERSEKEY = 0x04, 0x02
#: "00004711_cat.jpg", "image-000004711": the first digits after a common prefix.
_DIGITS = re.compile(rb"[^0-9]{0,64}([0-9]{1,18})")
_UNPADDED = re.compile(rb"0|[1-9][0-9]{0,17}")

#: A key's number, None when it has none.
Numbering = Callable[[bytes], "int | None"]


def _decimal(key: bytes) -> int | None:
    found = _DIGITS.match(key)
    return int(found.group(1)) if found else None


def _big_endian(key: bytes) -> int | None:
    return int.from_bytes(key, "big") if len(key) in (4, 8) else None


def _little_endian(key: bytes) -> int | None:
    return int.from_bytes(key, "little") if len(key) in (4, 8) else None


def unpadded(least: int, count: int) -> Numbering:
    """The rank of keys str(i), least <= i < least + count (least is 0 or 1), sorted as text: 0, 1,
    10, 100, 1000, 1001, ..."""
    end = least + count

    def numbering(key: bytes) -> int | None:
        if not _UNPADDED.fullmatch(key) or not least <= int(key) < end:
            return None
        value, length, before = int(key), len(key), 0
        for digits in range(1, len(str(end - 1)) + 1):
            low = max(10 ** (digits - 1) if digits > 1 else 0, least)
            # shorter ones up to the key's prefix, longer ones below the key
            shift = 10 ** abs(digits - length)
            high = value // shift + 1 if digits < length else value * shift
            before += max(0, min(high, end) - low)
        return before

    return numbering


@dataclass(frozen=True, eq=False)
class Leaves:
    """The leaf pages of a file's only database with records.

    numbers: int64, their page numbers in key order. firsts: int64, the first record of each, and
    the number of all records at the end. ``how`` that is known, for people.
    """

    meta: Meta
    numbers: Array
    firsts: Array
    how: str

    @property
    def records(self) -> int:
        return int(self.firsts[-1])


# ---- pure ---------------------------------------------------------------------------------------


def keys_of(batch: PageBatch, found: Nodes) -> list[bytes]:
    """The key of each node."""
    data = batch.pieces(found.key_at, found.key_size).tobytes()
    ends = np.cumsum(found.key_size).tolist()
    sizes = found.key_size.tolist()
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def leaf_nodes(batch: PageBatch) -> Nodes:
    """The nodes of leaf pages; raises FormatError."""
    batch.check_kind(pages.LEAF)
    return pages.nodes(batch, batch.starts, np.full_like(batch.starts, batch.page_bytes))


def extents_of(
    batch: PageBatch, found: Nodes, layout: PageLayout, known_pages: int
) -> tuple[Array, Array]:
    """(starts, ends) of the nodes' values in the file; -1 for duplicates and databases.

    Raises FormatError for a value outside of the file's ``known_pages``.
    """
    size = found.low
    plain = found.flags & (pages.SUBDATA | pages.DUPDATA) == 0
    big = plain & (found.flags & pages.BIG != 0)
    starts = np.where(plain, batch.value_offset(found.value_at), -1)
    at = found.value_at[big]
    first = batch.word(at)
    count = (layout.header_bytes - 1 + size[big]) // batch.page_bytes + 1
    inside = (first >= 2) & (first < known_pages)
    batch.check(inside, at, "overflow page not in the file", first)
    first = first.astype(np.int64)
    batch.check(count <= known_pages - first, at, "overflow pages beyond the file", count)
    starts[big] = first * batch.page_bytes + layout.header_bytes
    return starts, np.where(plain, starts + size, -1)


def numberings(records: int) -> Iterator[Numbering]:
    """Possible numberings by keys of ``records`` records."""
    yield from (_decimal, _big_endian, _little_endian)
    yield from (unpadded(least, records) for least in (0, 1))


def firsts_by_keys(
    separators: list[bytes], keys: list[bytes], leaves: Array, records: int
) -> Array | None:
    """The first record of each leaf where keys count the records: ``separators`` of all leaves but
    the first; ``keys``: those of some leaves, including the first and the last, ``leaves[i]`` the
    leaf of the i-th. None where they do not count.

    A few keys without a number may follow the records ("__len__").
    """
    some, counts = np.unique(leaves, return_counts=True)
    for others in range(min(OTHER_KEYS_MAX, int(counts[-1]) - 1) + 1):
        counted = records - others
        for numbering in numberings(counted):
            low, high = numbering(keys[0]), numbering(keys[-1 - others])
            if low is None or high is None or high - low != counted - 1:
                continue
            numbers = [numbering(key) for key in separators]
            if None in numbers:
                continue
            firsts: Array = np.array([low, *numbers, low + records], object) - low
            if (firsts[1:] > firsts[:-1]).all() and (
                firsts[some + 1] - firsts[some] == counts
            ).all():
                return firsts.astype(np.int64)
    return None


def firsts_by_fill(counts: Array, leaves: int, records: int) -> Array | None:
    """The same where leaves are equally full; ``counts``: records of some leaves but the last."""
    if not len(counts) or (counts != counts[0]).any():
        return None
    full = int(counts[0])
    if not (leaves - 1) * full < records <= leaves * full:
        return None
    return np.append(np.arange(leaves, dtype=np.int64) * full, records)


# ---- reading ------------------------------------------------------------------------------------


class HeadReader:
    """Reads single pages of an LMDB file, by a few threads. All methods raise FormatError and
    OSError; the file must not change meanwhile."""

    def __init__(self, reader: RangeReader) -> None:
        self._meta = newest_meta(reader)
        self._layout = self._meta.layout
        self._known = min(reader.size_bytes // self._meta.page_bytes, self._meta.last_page + 1)
        self._pages = PageReader(reader, self._meta.page_bytes)

    def close(self) -> None:
        self._pages.close()

    def _batch(self, numbers: Array) -> PageBatch:
        bad = (numbers < 2) | (numbers >= self._known)
        if bad.any():
            detail = f"page {int(numbers[bad][0])} of {self._known}"
            raise FormatError("tree page not in the file", 0, detail)
        batch = PageBatch(numbers, self._meta.page_bytes, self._layout)
        self._pages.read(batch.numbers, batch.rows)
        return batch

    def leaves(self) -> Leaves | None:
        """The leaves; None where it is unknown which records are in which, beyond BRANCH_PAGES_MAX,
        and for files with duplicates or several databases."""
        tree = self._tree()
        if tree is None:
            return None
        numbers, separators = self._branches(tree)
        if len(numbers) != tree.leaf_pages or tree.entries < len(numbers):
            raise FormatError("wrong number of leaves", 0, f"{len(numbers)} of {tree.leaf_pages}")
        sample = np.unique(np.linspace(0, len(numbers) - 1, SAMPLE).astype(np.int64))
        batch = self._batch(numbers[sample])
        found = leaf_nodes(batch)
        if (found.flags & (pages.SUBDATA | pages.DUPDATA)).any():
            return None
        counts = np.bincount(found.page, minlength=len(sample))
        keys = keys_of(batch, found)
        counted = firsts_by_keys(separators, keys, sample[found.page], tree.entries)
        if counted is not None:
            return Leaves(self._meta, numbers, counted, "keys count")
        filled = firsts_by_fill(counts[:-1], len(numbers), tree.entries)
        if len(numbers) == 1:
            filled = np.array([0, tree.entries], np.int64)
        if filled is None:
            return None
        return Leaves(self._meta, numbers, filled, "leaves alike")

    def _tree(self) -> Tree | None:
        """The only database with records, None if there are others or it is not supported."""
        tree = self._meta.main
        if tree.depth == 1 and tree.root != pages.NO_PAGE:
            batch = self._batch(np.array([tree.root], np.int64))
            found = leaf_nodes(batch)
            named = found.flags & (pages.SUBDATA | pages.DUPDATA) == pages.SUBDATA
            if len(named) == 1 and named[0] and int(found.low[0]) == pages.DATABASE_BYTES:
                data = batch.pieces(found.value_at, found.low)
                tree = Tree(*data.view(pages.DATABASE)[0].tolist())
        usable = not tree.flags & (_DUPSORT | _REVERSEKEY)
        usable &= tree.root != pages.NO_PAGE and 1 <= tree.depth <= pages.DEPTH_MAX
        usable &= tree.branch_pages <= BRANCH_PAGES_MAX and tree.leaf_pages < self._known
        return tree if usable else None

    def _branches(self, tree: Tree) -> tuple[Array, list[bytes]]:
        """The leaves' page numbers, and the first key of each but the first."""
        numbers: Array = np.array([tree.root], np.int64)
        keys = [b""]
        unread = tree.branch_pages
        for _ in range(tree.depth - 1):
            unread -= len(numbers)
            if unread < 0:
                raise FormatError("more branch pages than counted", 0, str(tree.branch_pages))
            batch = self._batch(numbers)
            batch.check_kind(pages.BRANCH)
            whole = np.full_like(batch.starts, batch.page_bytes)
            found = pages.nodes(batch, batch.starts, whole, branch=True)
            counts = np.bincount(found.page, minlength=len(numbers))
            batch.check(counts > 0, batch.starts, "branch page without nodes", numbers)
            # a branch page's first key is stored empty: it is that of its parent's entry
            own = keys_of(batch, found)
            for page, node in enumerate((np.cumsum(counts) - counts).tolist()):
                own[node] = keys[page]
            numbers, keys = found.low | found.flags << 32, own
        return numbers, keys[1:]

    def extents(self, leaves: Leaves, which: Array) -> tuple[Array, Array, Array]:
        """(record numbers, starts, ends) of the records in these leaves (ascending indices).

        Raises FormatError when one has another number of records than by ``leaves``, which is then
        invalid as a whole.
        """
        batch = self._batch(leaves.numbers[which])
        found = leaf_nodes(batch)
        starts, ends = extents_of(batch, found, self._layout, self._known)
        counts = np.bincount(found.page, minlength=len(which))
        expected = leaves.firsts[which + 1] - leaves.firsts[which]
        batch.check(counts == expected, batch.starts, "other number of records in a leaf", counts)
        inner: Array = np.arange(len(found.page)) - (np.cumsum(counts) - counts)[found.page]
        right = starts >= 0
        return (leaves.firsts[which][found.page] + inner)[right], starts[right], ends[right]
