# SPDX-License-Identifier: Apache-2.0
"""Has Hugging Face's iterable datasets announce what they will read, transparently to the job.

An iterable is a tree of that library's: its leaves read lists of shards, other nodes cut their
tables anew, take them in turn, or shuffle their rows in a buffer. What shuffles shards, and gives
each node and each worker of a loader its own, has changed the tree before the first row is read. So
in the process that iterates, when the first row is asked for, the order in which rows will be read
follows from it, and is announced: that of the outermost node which is known here; what is done to
rows further out (map(), filter(), formats) reads no others. No attribute of the job's objects is
set, none of its code is called, and no error of ours reaches the job.
"""

from __future__ import annotations

import functools
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import arrow_tables, channel
from .epochs import LoaderReader
from .samplers import CAP_ITEMS, Unknown, runs
from .tables import IdentityTable

MODULE = "datasets.iterable_dataset"
_HUGGING_FACE = "datasets.arrow_dataset"
LEAF, TURNS = "ArrowExamplesIterable", "CyclingMultiSourcesExamplesIterable"
CUT, BUFFER = "RebatchedArrowExamplesIterable", "BufferShuffledExamplesIterable"
COLUMNS, INTERLEAVED = "SelectColumnsIterable", "InterleavedShardsExamplesIterable"
#: Nodes that announce, if they are the outermost.
ANNOUNCING = (LEAF, TURNS, BUFFER, COLUMNS)
#: Stopping strategy of interleaved datasets that go on until each has ended.
_ALL_ONCE = "all_exhausted_without_replacement"
_DEPTH = 16
#: Rows between two reports of progress, which take 10 us each.
REPORT_ROWS = 16
Guarded = Callable[..., None]

_covered = IdentityTable()  # nodes, by the pass of one further out


def install(module: Any, guarded: Guarded) -> bool:
    """Wrap the iterations of ``module``, MODULE; ``guarded`` calls and lets no error out. Returns
    whether they are wrapped: not where this version is made otherwise."""
    if not hasattr(vars(module).get(LEAF), "_iter_arrow"):
        return False
    for name in ANNOUNCING:
        kind = vars(module).get(name)
        for method, by_tables in (("__iter__", False), ("_iter_arrow", True)):
            original = vars(kind).get(method) if isinstance(kind, type) else None
            if getattr(original, "__code__", None) is not None:
                setattr(kind, method, _around(original, by_tables, guarded))
    return True


def _around(original: Any, by_tables: bool, guarded: Guarded) -> Any:
    @functools.wraps(original)
    def iterate(self: Any) -> Iterator[Any]:
        followed = _Pass(by_tables)
        guarded(followed.begin, self)
        items = original(self)
        try:
            for item in items:
                guarded(followed.came, item)
                yield item
            guarded(followed.came_to_the_end)
        finally:
            items.close()
            guarded(followed.end)

    return iterate


class _Pass:
    """One iteration over a node, by tables or by single rows."""

    def __init__(self, by_tables: bool) -> None:
        self.over = False
        self._by_tables = by_tables
        self._announcement: channel.ProgressSlot | None = None
        self._reader: LoaderReader | None = None
        self._taken: list[int] | None = None
        self._items = self._rows = self._said = 0

    def begin(self, node: Any) -> None:
        """The first row is about to be read. Raises Unknown, and OSError without a service."""
        outer = _covered.get(node)
        if outer is not None and not outer.over:
            return
        for each in _below(node):
            _covered.set(each, self)
        order = order_of(node, self._by_tables)
        part, arrays = describe(order)
        self._taken = order.taken
        self._reader = LoaderReader()
        self._announcement = channel.announce(self._reader.name, len(order.rows), [part], arrays)

    def came(self, item: Any) -> None:
        """Another row, or table of rows, has come: what came before it has been read."""
        if self._announcement is None:
            return
        read = self._rows if self._taken is None else self._taken[self._items]
        if read >= self._said + REPORT_ROWS:
            self._said = read
            self._announcement.said(read)
        self._items += 1
        self._rows += len(item[1]) if self._by_tables else 1

    def came_to_the_end(self) -> None:
        """All has been read."""
        if self._announcement is not None:
            self._announcement.said(self._announcement.items)

    def end(self) -> None:
        """The iteration has ended, or was left."""
        self.over = True
        if self._announcement is not None:
            self._announcement.end()


# ---- the order ----------------------------------------------------------------------------------


class RowOrder(NamedTuple):
    """``rows``: of ``shards``, one after the other, in the order in which they are read (int64).
    ``columns``: names of those that are read; None: all. ``buffer``: rows that may have been read
    and not come; ``taken``: how many have been read when each table comes from there. None: those
    that came before it."""

    rows: Any
    shards: list[Any]
    columns: list[str] | None
    buffer: int
    taken: list[int] | None


def order_of(node: Any, by_tables: bool) -> RowOrder:
    """The order in which a node reads that is about to be iterated over. Raises Unknown."""
    found, buffer = _Walk(by_tables), 0
    while _is(node, COLUMNS):
        found.columns = found.columns or list(vars(node)["column_names"])
        node = vars(node)["ex_iterable"]
    if _is(node, BUFFER):
        buffer, node = vars(node)["buffer_size"], vars(node)["ex_iterable"]
    if type(buffer) is not int:
        raise Unknown("a shuffle buffer of no size")
    rows, pieces = found.walk(node, 0)
    taken = takes(pieces, buffer) if buffer > 0 and by_tables else None
    return RowOrder(rows, found.shards, found.columns, buffer, taken)


class _Walk:
    """Through a tree. Of each node the rows that it gives, and which of the pieces (tables, or
    single rows) in which it gives them each is in: int64, the latter ascending."""

    def __init__(self, by_tables: bool) -> None:
        self._by_tables = by_tables
        self._numpy: Any = sys.modules["numpy"]  # that library needs it
        self._count = 0
        self.shards: list[Any] = []
        self.columns: list[str] | None = None

    def walk(self, node: Any, depth: int) -> tuple[Any, Any]:
        """Raises Unknown."""
        numpy, state = self._numpy, vars(node)
        if depth > _DEPTH:
            raise Unknown("iterables within iterables without end")
        if _is(node, LEAF):
            return self._leaf(state)
        if _is(node, COLUMNS):
            self.columns = self.columns or list(state["column_names"])
            return self.walk(state["ex_iterable"], depth + 1)
        if _is(node, CUT):
            rows, pieces = self.walk(state["ex_iterable"], depth + 1)
            size = state["batch_size"]
            if self._by_tables and type(size) is int and size > 0:
                pieces = numpy.arange(len(rows)) // size
            elif self._by_tables:
                pieces = numpy.zeros(len(rows), numpy.int64)
            return rows, pieces
        if _is(node, INTERLEAVED) and state["_interleaved"] is not None:
            return self.walk(state["_interleaved"], depth + 1)
        if _is(node, TURNS) and state["stopping_strategy"] == _ALL_ONCE:
            if (state["_state_dict"] or {}).get("ex_iterable_idx"):
                raise Unknown("an iterable that goes on where it was stopped")
            return in_turn([self.walk(each, depth + 1) for each in state["ex_iterables"]])
        raise Unknown(f"a {type(node).__name__} is not known, or not so")

    def _leaf(self, state: Any) -> tuple[Any, Any]:
        numpy, shards = self._numpy, state["kwargs"].get("shards")
        if not _reads_shards(state["generate_tables_fn"]) or type(shards) is not list:
            raise Unknown("an iterable that was made of no mapped dataset")
        begun = state["_state_dict"] or {}
        if begun.get("shard_idx") or begun.get("shard_example_idx"):
            raise Unknown("an iterable that goes on where it was stopped")
        rows, pieces, before = [], [], 0
        for shard in shards:
            if not runs(shard, _HUGGING_FACE, "Dataset", "iter"):
                raise Unknown("a shard that is a dataset of its own kind")
            table, chosen = vars(shard)["_data"], vars(shard)["_indices"]
            own = numpy.arange(table.num_rows, dtype=numpy.int64)
            if chosen is not None:
                own = chosen.column(0).to_numpy().astype(numpy.int64)
            rows.append(own + self._count)
            size = int(state["kwargs"]["batch_size"]) if self._by_tables else 1
            pieces.append(numpy.arange(len(own)) // size + before)
            before += -(-len(own) // size)
            self._count += table.num_rows
            if self._count > CAP_ITEMS:
                raise Unknown(f"an order of more than {CAP_ITEMS} items")
            self.shards.append(shard)
        none = numpy.zeros(0, numpy.int64)
        return numpy.concatenate([none, *rows]), numpy.concatenate([none, *pieces])


def in_turn(sources: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """(rows, their pieces) of sources that give a piece each in turn, until all have ended."""
    numpy: Any = sys.modules["numpy"]
    none = numpy.zeros(0, numpy.int64)
    rows = numpy.concatenate([none, *(rows for rows, _ in sources)])
    pieces = numpy.concatenate([none, *(pieces for _, pieces in sources)])
    source = numpy.repeat(numpy.arange(len(sources)), [len(rows) for rows, _ in sources])
    by_turn = numpy.argsort(pieces, kind="stable")
    pieces, source = pieces[by_turn], source[by_turn]
    begins = (numpy.diff(pieces) != 0) | (numpy.diff(source) != 0)
    first = numpy.zeros(min(1, len(rows)), numpy.int64)
    return rows[by_turn], numpy.concatenate([first, begins]).cumsum()


def takes(pieces: Any, buffer: int) -> list[int]:
    """Rows taken by a shuffle buffer of ``buffer`` rows by each of its turns, from these pieces. It
    takes pieces as they are, unread, until it is full, then reads them all in their order
    (pyarrow puts a table in one piece before it takes rows of it), and keeps a half, in memory."""
    numpy: Any = sys.modules["numpy"]
    ends = numpy.flatnonzero(numpy.diff(pieces, append=-1)) + 1  # of pieces
    found, kept, first = [], 0, 0
    while first < len(pieces):
        full = int(numpy.searchsorted(ends, buffer - kept + first))
        found.append(int(ends[min(full, len(ends) - 1)]))
        kept, first = buffer // 2, found[-1]
    return [*found, first]  # what is kept at the end comes once more


# ---- what is read of the job's objects ----------------------------------------------------------


def _is(node: object, name: str) -> bool:
    kind = vars(sys.modules[MODULE]).get(name)
    return kind is not None and type(node) is kind


def _reads_shards(generate: Any) -> bool:
    home: Any = sys.modules.get(_HUGGING_FACE)
    made = vars(getattr(home, "Dataset", object)).get("_generate_tables_from_shards")
    return generate is not None and generate is getattr(made, "__func__", made)


def _below(node: Any, depth: int = 0) -> Iterator[Any]:
    """All nodes of a tree below this one."""
    state = getattr(node, "__dict__", {})
    inner = [
        state.get("ex_iterable"),
        state.get("_interleaved"),
        *(state.get("ex_iterables") or ()),
    ]
    for each in inner:
        if each is not None and depth < _DEPTH:
            yield each
            yield from _below(each, depth + 1)


def describe(order: RowOrder) -> tuple[dict[str, Any], dict[str, Any]]:
    """(part of an announcement, its arrays). Raises Unknown where the shards do not tell where they
    lie."""
    files: set[str] = set()
    numbers, count = array("q"), 0
    for shard in order.shards:
        table = vars(shard)["_data"]
        found = arrow_tables.buffers(table, order.columns)
        if found is None:
            raise Unknown("a table that does not tell where its rows lie")
        files.update(found.files)
        for at in range(0, len(found.numbers), 4):
            address, first, rows, offset = found.numbers[at : at + 4]
            numbers.extend((address, first + count, rows, offset))
        count += table.num_rows
    if not files:
        raise Unknown("an iterable over what is in memory")
    paths = sorted(files)
    name = zlib.crc32("\0".join(paths).encode("utf-8", "surrogatepass"))
    part = {
        "what": "samples", "array": "rows", "samples": count, "token": f"iterable-{name:08x}",
        "file": None, "lists": [], "files": "files", "buffers": "buffers", "ahead": order.buffer,
    }  # fmt: skip
    arrays = {
        "rows": order.rows, "buffers": numbers, "files": channel.packed(map(os.fsencode, paths)),
    }  # fmt: skip
    return part, arrays
