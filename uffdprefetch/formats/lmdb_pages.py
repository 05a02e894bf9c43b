# SPDX-License-Identifier: Apache-2.0
"""LMDB's pages, as liblmdb writes them (mdb.c: MDB_meta, MDB_page, MDB_node, MDB_db). No I/O.

Data format 1 is LMDB 0.9's, 3 is LMDB 1.0's: there the page header has the transaction too, the
offsets in a page count from the header's end, and a value is aligned to 2 bytes. Little-endian and
64 bit only.

Pages are parsed in batches. Positions are indices into a batch's bytes; each one read from the file
is checked before it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from uffdprefetch.base.ranges import spread
from uffdprefetch.formats.reader import Array, FormatError

MAGIC = 0xBEEFC0DE
BRANCH, LEAF, OVERFLOW, META, LEAF2, SUBPAGE = 0x01, 0x02, 0x04, 0x08, 0x20, 0x40
#: Bits of a page's flags with its kind; P_DIRTY and P_LOOSE are also found in sub-pages.
_KIND = BRANCH | LEAF | OVERFLOW | META | LEAF2 | SUBPAGE
#: Bits of a leaf node's flags: on overflow pages, a database, duplicates (sub-page or database).
BIG, SUBDATA, DUPDATA = 0x01, 0x02, 0x04
#: P_INVALID: the root of an empty database.
NO_PAGE = (1 << 64) - 1
#: CURSOR_STACK: liblmdb's greatest depth.
DEPTH_MAX = 32
NODE_BYTES = 8
#: liblmdb's are 512 bytes to 32 KiB (64 KiB in format 3).
PAGE_SIZES = tuple(1 << bits for bits in range(8, 17))

#: MDB_db
DATABASE = np.dtype(
    [
        ("pad", "<u4"),  # LEAF2's key size; in the free list's: the page size
        ("flags", "<u2"),
        ("depth", "<u2"),
        ("branch_pages", "<u8"),
        ("leaf_pages", "<u8"),
        ("overflow_pages", "<u8"),
        ("entries", "<u8"),
        ("root", "<u8"),
    ]
)
DATABASE_BYTES = 48
assert DATABASE.itemsize == DATABASE_BYTES


class PageLayout(NamedTuple):
    """Of a page; the header ends with pad, flags, lower, upper."""

    header_bytes: int
    base: int  # origin of the offsets in a page
    big_bytes: int  # size of a reference to an overflow run; its first 8 are the page number
    aligned: int  # alignment of a value after the node's header


LAYOUTS = {1: PageLayout(16, 0, 8, 1), 3: PageLayout(24, 24, 24, 2)}


class Tree(NamedTuple):
    """A database as its MDB_db describes it: counts in pages, ``root`` a page number or NO_PAGE."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


@dataclass(frozen=True)
class Meta:
    """A meta page. ``offset``: where it begins in the file."""

    offset: int
    version: int
    page_bytes: int
    map_size_bytes: int
    last_page: int
    txnid: int
    flags: int
    free: Tree
    main: Tree

    @property
    def layout(self) -> PageLayout:
        return LAYOUTS[self.version]

    @property
    def trees_at(self) -> tuple[int, int]:
        """Where ``free`` and ``main`` stand in the file."""
        at = self.offset + self.layout.header_bytes + 24
        return at, at + DATABASE_BYTES


# ---- meta pages ---------------------------------------------------------------------------------

_META = struct.Struct("<IIQQ" + 2 * "IHHQQQQQ" + "QQ")
#: Bytes of a page that parse_meta() needs.
META_BYTES = 24 + _META.size


def _layout_of(data: bytes) -> tuple[int, PageLayout] | None:
    """Version and layout of the meta page that ``data`` begins with, None if it is none."""
    for version, layout in LAYOUTS.items():
        at = layout.header_bytes
        if len(data) < at + 8 or struct.unpack_from("<II", data, at) != (MAGIC, version):
            continue
        if struct.unpack_from("<H", data, at - 6)[0] & _KIND == META:
            return version, layout
    return None


def looks_like_lmdb(first_bytes: bytes) -> bool:
    """Whether a file that begins with these bytes (32 are enough) is an LMDB data file."""
    return _layout_of(first_bytes) is not None


def parse_meta(data: bytes, offset: int) -> Meta:
    """The meta page that begins at byte ``offset`` with ``data``; raises FormatError."""
    found = _layout_of(data)
    if found is None:
        raise FormatError("no LMDB meta page", offset, _what_else(data))
    version, layout = found
    if len(data) < layout.header_bytes + _META.size:
        raise FormatError("file cut short", offset + len(data), "it ends in a meta page")
    fields = _META.unpack_from(data, layout.header_bytes)
    free, main = Tree(*fields[4:12]), Tree(*fields[12:20])
    if free.pad not in PAGE_SIZES:
        at = offset + layout.header_bytes + 24
        detail = f"{free.pad}, wanted a power of two from 256 to 65536"
        raise FormatError("no page size", at, detail)
    return Meta(
        offset, version, free.pad, fields[3], fields[20], fields[21], free.flags, free, main
    )


def _what_else(data: bytes) -> str:
    if not data:
        return "the file ends here"
    for at in (16, 24):
        if data[at : at + 4] == struct.pack(">I", MAGIC):
            return "the file of a big-endian machine"
        if data[at : at + 4] == struct.pack("<I", MAGIC) and len(data) >= at + 8:
            version = struct.unpack_from("<I", data, at + 4)[0]
            known = ", ".join(map(str, LAYOUTS))
            return f"data format {version}; formats {known} can be read, of 64-bit machines"
    return f"{data[16:24].hex(' ') or data[:16].hex(' ')} where 'de c0 ef be' is expected"


# ---- batches of pages ---------------------------------------------------------------------------


class PageBatch:
    """Whole pages side by side: ``numbers[i]`` lies at i * page_bytes of ``data``."""

    def __init__(self, numbers: Array, page_bytes: int, layout: PageLayout) -> None:
        # 8 bytes more, so that a word may be read at any byte of the last page
        self._all: Array = np.zeros(len(numbers) * page_bytes + 8, np.uint8)
        self.data = self._all[: len(numbers) * page_bytes]
        self.rows = self.data.reshape(len(numbers), page_bytes)
        self.numbers = numbers
        self.page_bytes = page_bytes
        self.layout = layout
        self.starts: Array = np.arange(len(numbers), dtype=np.int64) * page_bytes
        self._shorts = np.ndarray((len(self.data),), "<u2", self._all, 0, (1,))
        self._words = np.ndarray((len(self.data),), "<u8", self._all, 0, (1,))

    def short(self, at: Array) -> Array:
        """The 16-bit numbers at these positions."""
        return self._shorts[at].astype(np.int64)

    def word(self, at: Array) -> Array:
        """The 64-bit numbers at these positions (uint64)."""
        return self._words[at]

    def pieces(self, at: Array, length: Array) -> Array:
        """The bytes of the ranges [at, +length), concatenated."""
        owner, inner = spread(length)
        return self.data[at[owner] + inner]

    def offset(self, at: Array) -> Array:
        """Positions as byte offsets of the file."""
        row, within = np.divmod(at, self.page_bytes)
        return self.numbers[row] * self.page_bytes + within

    def value_offset(self, at: Array) -> Array:
        """offset() of values: an empty one may begin at its page's end."""
        return self.offset(at - 1) + 1

    def check(self, good: Array, at: Array, what: str, detail: Array | str) -> None:
        """Raise FormatError for the first that is not ``good``; all arrays have one shape."""
        if good.all():
            return
        i = int(np.argmin(good))
        seen = detail if isinstance(detail, str) else str(int(detail[i]))
        raise FormatError(what, int(self.offset(at[i : i + 1])[0]), seen)

    def check_kind(self, *kinds: int) -> Array:
        """Each page's kind (bits of its flags), which must be one of ``kinds``; raises FormatError
        for another one, and for a wrong page number in the header."""
        number = self.word(self.starts)
        right = number == self.numbers.astype(np.uint64)
        self.check(right, self.starts, "wrong page number", number)
        at: Array = self.starts + self.layout.header_bytes - 6
        kind = self.short(at) & _KIND
        names = {BRANCH: "branch", LEAF: "leaf", LEAF | LEAF2: "leaf of fixed-size values"}
        wanted = " or ".join(names[kind] for kind in kinds)
        self.check(np.isin(kind, kinds), at, f"no {wanted} page (page flags)", kind)
        return kind


@dataclass(frozen=True)
class Nodes:
    """Nodes in key order: each of page ``page`` (an index), its header at ``at``."""

    page: Array
    at: Array
    low: Array  # the first 32 bits: a leaf's value size
    flags: Array  # a branch: bits 32-47 of the child's number
    key_size: Array
    value_at: Array

    @property
    def key_at(self) -> Array:
        return self.at + NODE_BYTES


def nodes(batch: PageBatch, at: Array, length: Array, *, branch: bool = False) -> Nodes:
    """The nodes of the pages (or sub-pages) [at, +length), which lie within the batch.

    Every node of the result lies within its page, key and value too, and no two share a byte.
    Raises FormatError.
    """
    layout = batch.layout
    lower_at: Array = at + layout.header_bytes - 4
    upper_at: Array = lower_at + 2
    batch.check(length >= layout.header_bytes, at, "sub-page smaller than its header", length)
    lower, upper = batch.short(lower_at), batch.short(upper_at)
    first = layout.header_bytes - layout.base
    fits = (lower >= first) & (lower <= upper) & (lower % 2 == 0)
    batch.check(fits, lower_at, "impossible number of nodes (lower bound)", lower)
    fits = upper + layout.base <= length
    batch.check(fits, upper_at, "nodes beyond the page (upper bound)", upper)
    page, inner = spread((lower - first) >> 1)
    pointer_at = at[page] + layout.header_bytes + 2 * inner
    pointer = batch.short(pointer_at)
    end = (at + length)[page]
    node_at = at[page] + layout.base + pointer
    fits = (pointer >= upper[page]) & (node_at + NODE_BYTES <= end)
    batch.check(fits, pointer_at, "node outside of its page", pointer)
    header = batch.word(node_at)
    low, flags, key_size = (
        part.astype(np.int64) for part in (header & 0xFFFFFFFF, header >> 32 & 0xFFFF, header >> 48)
    )
    key_room = -(-key_size // layout.aligned) * layout.aligned
    found = Nodes(page, node_at, low, flags, key_size, node_at + NODE_BYTES + key_room)
    held = np.where(flags & BIG != 0, layout.big_bytes, low)
    node_end: Array = found.key_at + key_size if branch else found.value_at + held
    batch.check(node_end <= end, node_at, "node longer than its page: bytes", node_end - node_at)
    order = np.argsort(node_at)
    apart = node_end[order][:-1] <= node_at[order][1:]
    batch.check(apart, node_at[order][1:], "node within another one, page", found.page[order][1:])
    return found


def children(batch: PageBatch) -> tuple[Array, Array, Array]:
    """The children of branch pages, in order; each one's parent (an index), and the file offset of
    the pointer."""
    found = nodes(batch, batch.starts, np.full_like(batch.starts, batch.page_bytes), branch=True)
    some = np.bincount(found.page, minlength=len(batch.numbers)) > 0
    batch.check(some, batch.starts, "branch page without nodes", batch.numbers)
    return found.low | found.flags << 32, found.page, batch.offset(found.at)


def values(batch: PageBatch, at: Array, length: Array) -> tuple[Array, Array, Array]:
    """(page index, position, size) of each value of duplicates' leaf pages (or sub-pages), where
    they are stored as keys, in order. Raises FormatError."""
    layout = batch.layout
    batch.check(length >= layout.header_bytes, at, "sub-page smaller than its header", length)
    fixed = batch.short(at + layout.header_bytes - 6) & LEAF2 != 0
    plain = np.flatnonzero(~fixed)
    found = nodes(batch, at[plain], length[plain])
    strange = found.flags & (BIG | SUBDATA | DUPDATA)
    batch.check(strange == 0, found.at, "duplicate with node flags", strange)
    pages, places, sizes = plain[found.page], found.key_at, found.key_size
    if fixed.any():
        packed = np.flatnonzero(fixed)
        start, room = at[packed], length[packed] - layout.header_bytes
        size = batch.short(start + layout.header_bytes - 8)
        lower = batch.short(start + layout.header_bytes - 4)
        count = (lower + layout.base - layout.header_bytes) >> 1
        fits = (size > 0) & (count >= 0) & (count * size <= room)
        batch.check(fits, start, "fixed-size values beyond their page: size", size)
        page, inner = spread(count)
        pages = np.concatenate([pages, packed[page]])
        places = np.concatenate([places, (start + layout.header_bytes)[page] + inner * size[page]])
        sizes = np.concatenate([sizes, size[page]])
        order = np.argsort(pages, kind="stable")
        pages, places, sizes = pages[order], places[order], sizes[order]
    return pages, places, sizes
