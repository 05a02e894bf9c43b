# SPDX-License-Identifier: Apache-2.0
"""Traverses the trees of an LMDB file: marks every page that it visits, takes every record.

Trees are read level by level, many pages at once, those of large sets of duplicates together. A
page may be visited once, so that a damaged or hostile file ends in a FormatError and not in a loop,
and memory is bounded by what is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from uffdprefetch.base.ranges import spread
from uffdprefetch.formats import lmdb_pages as pages
from uffdprefetch.formats.lmdb_pages import Meta, PageBatch, Tree
from uffdprefetch.formats.reader import Array, FormatError, PageReader, RangeReader

#: Codes of Index.page_types(). A page of no tree is free, or was never written.
FREE_OR_UNKNOWN, META, BRANCH, LEAF, OVERFLOW = range(5)
PAGE_TYPE_NAMES = ("free-or-unknown", "meta", "branch", "leaf", "overflow")
#: Bits of Index.flags: the value lies on overflow pages; it is one of a key's duplicates.
ON_OVERFLOW, DUPLICATE = 1, 2

#: Bytes of pages parsed at once; their arrays are several times as large.
BATCH_BYTES = 8 << 20
#: Most named databases: real files have tens, as liblmdb checks each open one in each transaction.
NAMED_DATABASES_MAX = 1 << 14


@dataclass(frozen=True)
class Database:
    """A database and its records, [first, first + records).

    ``name`` is b"" for the main one. ``tree``: LMDB's counts, as in env.stat(): entries of the main
    one include the named ones; pages include those of duplicates.
    """

    name: bytes
    tree: Tree
    first: int
    records: int


#: Name, MDB_db and its file offset.
_Named = tuple[bytes, Tree, int]


@dataclass
class _SubTrees:
    """Trees of duplicates, with the nodes that they belong to."""

    owner: list[Array] = field(default_factory=list)  # node number in its database
    at: list[Array] = field(default_factory=list)  # file offset
    tree: list[Array] = field(default_factory=list)  # pages.DATABASE
    key_offset: list[Array] = field(default_factory=list)
    key_length: list[Array] = field(default_factory=list)


#: Columns of the records while they are collected, and their types in the Index.
_COLUMNS = {
    "owner": np.int64,  # node number in its database; not in the Index
    "offset": np.int64,
    "length": np.uint32,
    "flags": np.uint8,
    "leaf_page": np.int64,
    "key_offset": np.int64,
    "key_length": np.uint16,
}


class RecordPieces:
    """Records collected in pieces."""

    def __init__(self) -> None:
        self.count = 0
        self._pieces: list[dict[str, Array]] = []
        self._keys: list[bytes] = []
        self._key_bytes = 0

    def add_keys(self, batch: PageBatch, found: pages.Nodes) -> tuple[Array, Array]:
        """Take the nodes' keys; returns offset and length of each among all keys."""
        data = batch.pieces(found.key_at, found.key_size).tobytes()
        ends = self._key_bytes + np.cumsum(found.key_size)
        self._keys.append(data)
        self._key_bytes += len(data)
        return ends - found.key_size, found.key_size

    def add(self, **columns: Array) -> None:
        """Take records, each column of _COLUMNS given."""
        piece: dict[str, Array] = {}
        for name, kind in _COLUMNS.items():
            piece[name] = columns[name].astype(kind)
        self.count += len(piece["owner"])
        self._pieces.append(piece)

    def since(self) -> int:
        """A mark for sort()."""
        return len(self._pieces)

    def sort(self, mark: int) -> None:
        """Sort the pieces taken since the mark by owner."""
        if len(self._pieces) - mark < 1:
            return
        part = self._joined(self._pieces[mark:])
        if (np.diff(part["owner"]) < 0).any():
            order = np.argsort(part["owner"], kind="stable")
            part = {name: column[order] for name, column in part.items()}
        self._pieces[mark:] = [part]

    @staticmethod
    def _joined(pieces: list[dict[str, Array]]) -> dict[str, Array]:
        return {
            name: np.concatenate([np.zeros(0, kind), *(piece[name] for piece in pieces)])
            for name, kind in _COLUMNS.items()
        }

    def columns(self) -> dict[str, Any]:
        """The Index's arrays, and the keys."""
        columns: dict[str, Any] = self._joined(self._pieces)
        del columns["owner"]
        return {**columns, "keys": b"".join(self._keys)}


class TreeTraversal:
    """One traversal of a file's trees. ``types`` marks the pages visited; none may be twice."""

    def __init__(self, reader: RangeReader, meta: Meta) -> None:
        self._meta = meta
        self._page_bytes = meta.page_bytes
        self._reader = PageReader(reader, meta.page_bytes)
        # Pages after last_page belong to no transaction (with MDB_WRITEMAP the file has map_size).
        # A file may end before last_page: pages allocated and freed in one transaction are not
        # written.
        known = min(reader.size_bytes // meta.page_bytes, meta.last_page + 1)
        try:
            self.types: Array = np.zeros(max(known, 2), np.uint8)
        except MemoryError:
            raise FormatError("file too large", 0, f"{known} pages") from None
        self.types[:2] = META

    def close(self) -> None:
        self._reader.close()

    # ---- pages

    def _mark_visited(
        self, numbers: Array, refs: Array, kind: int, counts: Array | None = None
    ) -> None:
        """Mark runs of pages (of one page without ``counts``) as visited; ``refs``: file offsets of
        the references to them.

        Raises FormatError when one is not in the file, or was visited before.
        """
        known = len(self.types)
        what = PAGE_TYPE_NAMES[kind]
        counts = np.ones_like(numbers) if counts is None else counts
        # written so that number + count cannot overflow
        bad = (numbers < 2) | (numbers >= known) | (counts > known - np.minimum(numbers, known))
        if bad.any():
            i = int(np.argmax(bad))
            detail = f"page {int(numbers[i])}"
            detail += f" and the {int(counts[i]) - 1} after it" if counts[i] > 1 else ""
            raise FormatError(f"{what} page not in the file", int(refs[i]), f"{detail} of {known}")
        most = (1 << 20) // 4
        ends = np.cumsum(counts)
        at = 0
        while at < len(numbers):
            done = int(ends[at - 1]) if at else 0
            upto = max(int(np.searchsorted(ends, done + most, "right")), at + 1)
            owner, inner = spread(counts[at:upto])
            visited = numbers[at:upto][owner] + inner
            ascending = np.sort(visited)
            twice = self.types[visited] != 0
            if twice.any() or (np.diff(ascending) == 0).any():
                if not twice.any():
                    again = ascending[1:][np.diff(ascending) == 0][0]
                    twice = visited == again
                i = int(np.argmax(twice))
                raise FormatError(
                    f"{what} page met twice", int(refs[at + owner[i]]), f"page {int(visited[i])}"
                )
            self.types[visited] = kind
            at = upto

    def _batches(self, numbers: Array, *kinds: int) -> Iterator[tuple[PageBatch, slice, Array]]:
        """Read pages in this order, in batches: (batch, which of ``numbers``, kinds)."""
        most = max(BATCH_BYTES // self._page_bytes, 1)
        for at in range(0, len(numbers), most):
            which = slice(at, min(at + most, len(numbers)))
            batch = PageBatch(numbers[which], self._page_bytes, self._meta.layout)
            self._reader.read(batch.numbers, batch.rows)
            yield batch, which, batch.check_kind(*kinds)

    def _leaves(
        self, roots: Array, refs: Array, depth: int, *kinds: int
    ) -> Iterator[tuple[PageBatch, Array]]:
        """The leaf pages of trees of one depth, in key order: (batch, each page's tree)."""
        tree: Array = np.arange(len(roots), dtype=np.int64)
        numbers = roots
        for _ in range(depth - 1):
            self._mark_visited(numbers, refs, BRANCH)
            found = [
                (child, tree[which][parent], ref)
                for batch, which, _ in self._batches(numbers, pages.BRANCH)
                for child, parent, ref in [pages.children(batch)]
            ]
            numbers, tree, refs = (np.concatenate(part) for part in zip(*found, strict=True))
        self._mark_visited(numbers, refs, LEAF)
        for batch, which, _ in self._batches(numbers, *kinds):
            yield batch, tree[which]

    def _check_tree(self, tree: Tree, at: int) -> bool:
        """Whether it is not empty; raises FormatError for an impossible one."""
        known = len(self.types)
        if tree.root == pages.NO_PAGE:
            return False
        if not 1 <= tree.depth <= pages.DEPTH_MAX:
            raise FormatError("impossible depth of a tree", at, str(tree.depth))
        if tree.branch_pages + tree.leaf_pages + tree.overflow_pages > known:
            counts = f"{tree.branch_pages}, {tree.leaf_pages}, {tree.overflow_pages} of {known}"
            raise FormatError("more pages in a tree than in the file", at, counts)
        if tree.root >= known:
            raise FormatError("root page not in the file", at, f"page {tree.root} of {known}")
        return True

    # ---- databases

    def free_list(self, tree: Tree, at: int) -> None:
        """Mark the pages of the free list, whose MDB_db is at byte ``at``."""
        if not self._check_tree(tree, at):
            return
        root = np.array([tree.root])
        for batch, _ in self._leaves(root, np.array([at]), tree.depth, pages.LEAF):
            found = pages.nodes(batch, batch.starts, np.full_like(batch.starts, self._page_bytes))
            self._overflow(batch, found, found.flags & pages.BIG != 0)

    def database(
        self, name: bytes, tree: Tree, at: int, records: RecordPieces, databases: list[Database]
    ) -> list[_Named]:
        """Take the records of a database, whose MDB_db is at byte ``at``; returns the named
        databases in it (of the main one)."""
        first, mark = records.count, records.since()
        named: list[_Named] = []
        if self._check_tree(tree, at):
            below, node_count = _SubTrees(), 0
            root = np.array([tree.root])
            for batch, _ in self._leaves(root, np.array([at]), tree.depth, pages.LEAF):
                whole = np.full_like(batch.starts, self._page_bytes)
                found = pages.nodes(batch, batch.starts, whole)
                owner: Array = node_count + np.arange(len(found.at), dtype=np.int64)
                node_count += len(found.at)
                self._records_of(batch, found, owner, records, below)
                named += self._named(batch, found, inside=name)
                if len(named) > NAMED_DATABASES_MAX:
                    raise FormatError("too many named databases", at, str(len(named)))
            self._sub_trees(below, records)
            records.sort(mark)
        databases.append(Database(name, tree, first, records.count - first))
        return named

    def _overflow(self, batch: PageBatch, found: pages.Nodes, big: Array) -> Array:
        """Mark the overflow runs of the nodes that are ``big``; returns their first pages."""
        first = batch.word(found.value_at[big])
        offset, size = batch.offset(found.value_at[big]), found.low[big]
        inside = first < len(self.types)  # then it fits int64
        batch.check(inside, found.value_at[big], "overflow page not in the file", first)
        first = first.astype(np.int64)
        count: Array = (self._meta.layout.header_bytes - 1 + size) // self._page_bytes + 1
        self._mark_visited(first, offset, OVERFLOW, count)
        return first

    def _records_of(
        self,
        batch: PageBatch,
        found: pages.Nodes,
        owner: Array,
        records: RecordPieces,
        below: _SubTrees,
    ) -> None:
        """Take the records of a batch of ordinary leaves, duplicates last; note sub-trees."""
        kind = found.flags & (pages.BIG | pages.SUBDATA | pages.DUPDATA)
        known = (0, pages.BIG, pages.SUBDATA, pages.DUPDATA, pages.SUBDATA | pages.DUPDATA)
        batch.check(np.isin(kind, known), found.at, "impossible node flags", kind)
        key_offset, key_length = records.add_keys(batch, found)
        leaf = batch.numbers[found.page]
        offset, big = batch.value_offset(found.value_at), kind == pages.BIG
        first = self._overflow(batch, found, big)
        offset[big] = first * self._page_bytes + self._meta.layout.header_bytes

        plain = np.flatnonzero((kind == 0) | big)
        sub = np.flatnonzero(kind == pages.DUPDATA)
        inner, at, size = pages.values(batch, found.value_at[sub], found.low[sub])
        node = np.concatenate([plain, sub[inner]])  # of each record
        flags = np.where(big[plain], ON_OVERFLOW, 0)
        records.add(
            owner=owner[node],
            offset=np.concatenate([offset[plain], batch.value_offset(at)]),
            length=np.concatenate([found.low[plain], size]),
            flags=np.concatenate([flags, np.full(len(inner), DUPLICATE)]),
            leaf_page=leaf[node],
            key_offset=key_offset[node],
            key_length=key_length[node],
        )

        deep = np.flatnonzero(kind == pages.SUBDATA | pages.DUPDATA)
        if len(deep):
            below.owner.append(owner[deep])
            below.at.append(batch.offset(found.value_at[deep]))
            below.tree.append(self._trees(batch, found, deep))
            below.key_offset.append(key_offset[deep])
            below.key_length.append(key_length[deep])

    @staticmethod
    def _trees(batch: PageBatch, found: pages.Nodes, which: Array) -> Array:
        """The MDB_db that each of these nodes holds, as pages.DATABASE."""
        size = found.low[which]
        whole = size == pages.DATABASE_BYTES
        batch.check(whole, found.at[which], "no database of 48 bytes: bytes", size)
        return batch.pieces(found.value_at[which], size).view(pages.DATABASE)

    def _named(self, batch: PageBatch, found: pages.Nodes, inside: bytes) -> list[_Named]:
        """The named databases among the nodes of the main database."""
        kind = found.flags & (pages.SUBDATA | pages.DUPDATA)
        which = np.flatnonzero(kind == pages.SUBDATA)
        if not len(which):
            return []
        if inside:
            where = int(batch.offset(found.at[which[:1]])[0])
            raise FormatError("a database within a named one", where, repr(inside))
        names = batch.pieces(found.key_at[which], found.key_size[which]).tobytes()
        ends = np.cumsum(found.key_size[which]).tolist()
        trees = self._trees(batch, found, which).tolist()
        at = batch.offset(found.value_at[which]).tolist()
        starts = [0, *ends[:-1]]
        return [
            # format 3 keeps the final zero of the name
            (names[a:b].removesuffix(b"\0"), Tree(*tree), at)
            for a, b, tree, at in zip(starts, ends, trees, at, strict=True)
        ]

    def _sub_trees(self, below: _SubTrees, records: RecordPieces) -> None:
        """Take the records of trees of duplicates, all of a depth at once."""
        if not below.owner:
            return
        owner, at = np.concatenate(below.owner), np.concatenate(below.at)
        trees = np.concatenate(below.tree)
        key_offset, key_length = np.concatenate(below.key_offset), np.concatenate(below.key_length)
        depths = trees["depth"].astype(np.int64)
        some = trees["root"] != pages.NO_PAGE
        for bad, what, detail in (
            (some & ((depths < 1) | (depths > pages.DEPTH_MAX)), "impossible depth", depths),
            (some & (trees["root"] >= len(self.types)), "root page not in the file", trees["root"]),
        ):
            if bad.any():
                i = int(np.argmax(bad))
                raise FormatError(
                    f"{what} of a tree of duplicates", int(at[i]), str(int(detail[i]))
                )
        for depth in np.unique(depths[some]).tolist():
            which = np.flatnonzero(some & (depths == depth))
            roots = trees["root"][which].astype(np.int64)
            for batch, tree in self._leaves(
                roots, at[which], depth, pages.LEAF, pages.LEAF | pages.LEAF2
            ):
                whole = np.full_like(batch.starts, self._page_bytes)
                page, place, size = pages.values(batch, batch.starts, whole)
                node = which[tree[page]]
                records.add(
                    owner=owner[node],
                    offset=batch.value_offset(place),
                    length=size,
                    flags=np.full(len(node), DUPLICATE),
                    leaf_page=batch.numbers[page],
                    key_offset=key_offset[node],
                    key_length=key_length[node],
                )
