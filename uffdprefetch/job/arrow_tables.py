# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a Hugging Face dataset lie: its table says which Arrow files it is made of.

Only instance dictionaries of that library's own table classes are read, and lengths asked for. What
the indices of a shuffled or selected dataset say is read, as the job does with each sample.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

_TABLE = "datasets.table"
#: Operations on a mapped table after which its rows are still the file's, if not all columns.
_SAME_ROWS = frozenset(
    ("rename_columns", "remove_column", "drop", "select", "replace_schema_metadata", "flatten",
     "add_column", "append_column", "set_column")
)  # fmt: skip
#: After these they are in memory.
_COPIES = frozenset(("filter", "combine_chunks"))


class Stretches:
    """``files``: paths. ``numbers``: (file, first row, rows, first record) of each stretch of rows
    that are successive records of a file (orders/stretches.py)."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.numbers = array("q")
        self._file_of: dict[str, int] = {}

    def add(self, path: str, first: int, count: int, record: int) -> None:
        """One more stretch."""
        if not count:
            return
        if path not in self._file_of:
            self._file_of[path] = len(self.files)
            self.files.append(path)
        self.numbers.extend((self._file_of[path], first, count, record))


def stretches(table: Any) -> Stretches | None:
    """Of a table's rows, without those in memory; None where the table does not tell, also because
    it is built otherwise than those of version 5."""
    try:
        return _stretches(table)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _stretches(table: Any) -> Stretches | None:
    found = Stretches()
    rows = [[table]]
    if _is(table, "ConcatenationTable"):
        rows = vars(table)["blocks"]
    first = 0
    for blocks in rows:  # side by side, that is of other columns
        for block in blocks:
            if _is(block, "InMemoryTable"):
                continue
            if not _is(block, "MemoryMappedTable"):
                return None
            record: int | None = 0
            for name, arguments, named in vars(block)["replays"]:
                if name == "slice" and not named and record is not None:
                    record += arguments[0]
                elif name in _COPIES:
                    record = None
                elif name not in _SAME_ROWS:
                    return None
            if record is not None:
                found.add(vars(block)["path"], first, vars(block)["table"].num_rows, record)
        first += vars(blocks[0])["table"].num_rows if blocks else 0
    return found


def _is(table: object, name: str) -> bool:
    kind = getattr(sys.modules.get(_TABLE), name, None)
    return kind is not None and type(table) is kind


def rows_of(indices: Any, numbers: array[int]) -> array[int]:
    """The rows of these samples of a dataset with such a table of indices. Raises IndexError."""
    numpy: Any = sys.modules["numpy"]  # that library needs it
    rows = indices.column(0).to_numpy()
    found = array("q")
    found.frombytes(rows[numpy.frombuffer(numbers, numpy.int64)].astype(numpy.int64).tobytes())
    return found
