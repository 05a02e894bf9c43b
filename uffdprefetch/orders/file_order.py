# SPDX-License-Identifier: Apache-2.0
"""A known order of whole files, by their paths, and how far a reader has come in it. Pure.

The paths of a million files are kept packed, as they were announced: an element of a list, with
what comes before and after it. Those alone that lie around the reader are made into strings.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.orders.key_lists import KeyList

#: Files around a reader whose names are known when one is opened: so many beyond those that workers
#: may have opened ahead, of which half may be used up before more are made (2 us each), and behind,
#: for files that are opened twice.
AROUND_FILES = 1024
#: Files that a reader without workers may have left out, or opens by other threads, before it is
#: taken to have passed the earliest of them.
REACH_FILES = 64
#: Files in a row that are none of those around a reader, after which the latest of them are looked
#: for in the whole order: it is read from somewhere else on. After twice as many it is tried again.
LOST_FILES, LOOKED_FOR = 16, 3
#: Latest files of which half must be of the order, near where its reader is: as many as of records
#: (predict/order/validator.py).
JUDGED_FILES = 32
#: Longest path that Linux takes (PATH_MAX).
PATH_MAX_BYTES = 4096


@dataclass(frozen=True, eq=False)
class PathColumn:
    """Paths ``before`` + element + ``after``; of an element that begins with "/" ``before`` is left
    out, as os.path.join() does. ``elements``: of kind "bytes" or "text"."""

    elements: KeyList
    before: bytes = b""
    after: bytes = b""

    def __len__(self) -> int:
        return len(self.elements)

    def paths(self, numbers: Array) -> list[str]:
        """The paths of these elements. Raises IndexError."""
        return [self._path(element) for element in self.elements.take(numbers)]

    def find(self, path: bytes) -> Array:
        """The numbers of the elements that have this path."""
        if not path.endswith(self.after):
            return np.zeros(0, np.int64)
        path = path[: len(path) - len(self.after)]
        found = [self.elements.find(path)] if path.startswith(b"/") else []
        if path.startswith(self.before) and path[len(self.before) :][:1] != b"/":
            found.append(self.elements.find(path[len(self.before) :]))
        return np.unique(np.concatenate([np.zeros(0, np.int64), *found]))

    def _path(self, element: bytes) -> str:
        before = b"" if element.startswith(b"/") else self.before
        return os.fsdecode(before + element + self.after)


def check_paths(elements: KeyList) -> None:
    """Raises ValueError for a list whose elements cannot be paths."""
    if elements.kind == "ints":
        raise ValueError(f"{elements.name}: numbers are no paths")
    if (elements.data == 0).any():
        raise ValueError(f"{elements.name}: a NUL byte in a path")
    lengths = np.diff(elements.ends, prepend=0)
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) < PATH_MAX_BYTES:
        raise ValueError(f"{elements.name}: an empty path, or one of {PATH_MAX_BYTES} bytes")


@dataclass(frozen=True, eq=False)
class PathTable:
    """Columns whose paths are numbered on from one to the next."""

    columns: Sequence[PathColumn]

    @cached_property
    def firsts(self) -> Array:
        """The number of each column's first path, and of all."""
        return np.cumsum([0, *map(len, self.columns)])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def paths(self, numbers: Array) -> list[str]:
        """The paths of these numbers. Raises IndexError."""
        if len(self.columns) == 1:
            return self.columns[0].paths(numbers)
        which = np.searchsorted(self.firsts, numbers, "right") - 1
        found = [""] * len(numbers)
        for i, column in enumerate(self.columns):
            its = np.flatnonzero(which == i)
            for at, path in zip(
                its.tolist(), column.paths(numbers[its] - self.firsts[i]), strict=True
            ):
                found[at] = path
        return found

    def find(self, path: str) -> Array:
        """The numbers that have this path. Takes some milliseconds for each million."""
        encoded = os.fsencode(path)
        parts = zip(self.columns, self.firsts.tolist(), strict=False)
        return np.concatenate([column.find(encoded) + first for column, first in parts])


@dataclass(frozen=True, eq=False)
class PathOrder:
    """One reader's order of files in one epoch.

    numbers: of paths in the table, in reading order. item: int64, ascending from 0, which item each
    file is of: an item may have several files (an image and its mask) or none. items: how many
    there are. aliases: (beginning of a path as it is seen in /proc, the same as it is in the
    table) where symbolic links lead to the files. Raises ValueError where that does not hold.
    """

    table: PathTable
    numbers: Array
    item: Array
    items: int
    aliases: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        numbers, item = self.numbers, self.item
        if numbers.shape != item.shape or numbers.ndim != 1:
            raise ValueError("an order's files and items must be as long as each other")
        if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= len(self.table)):
            raise ValueError("an order has a file that has no path")
        if len(item) and (item[0] < 0 or item[-1] >= self.items or (item[1:] < item[:-1]).any()):
            raise ValueError(f"an order's items must ascend from 0 to {self.items - 1}")

    def __len__(self) -> int:
        return len(self.numbers)

    def paths(self, first: int, end: int) -> list[str]:
        """The files at the positions [first, end)."""
        return self.table.paths(self.numbers[max(first, 0) : max(end, 0)])

    def find(self, path: str) -> list[int]:
        """All positions of a path. Takes some milliseconds for each million files."""
        return np.flatnonzero(np.isin(self.numbers, self.table.find(path))).tolist()

    def position(self, items: int) -> int:
        """The position of the first file that is of none of the first ``items`` items."""
        return int(np.searchsorted(self.item, items, "left"))


def of_items(
    columns: Sequence[PathColumn], elements: Sequence[Array], item: Array, items: int,
    table: PathTable | None = None,
) -> PathOrder:  # fmt: skip
    """The order in which each element of ``item`` is read as one file of each column, whose numbers
    are ``elements``: an array as long as ``item`` for each column. ``table``: of the columns, where
    there is one already."""
    table = table or PathTable(columns)
    numbers = np.stack(
        [each + first for each, first in zip(elements, table.firsts[:-1], strict=True)], axis=1
    )
    return PathOrder(table, numbers.reshape(-1), np.repeat(item, len(columns)), items)


@dataclass
class _Around:
    """The paths at positions [first, end) of an order, and where each is."""

    first: int = 0
    end: int = 0
    paths: deque[str] = field(default_factory=deque)
    positions: dict[str, list[int]] = field(default_factory=dict)

    def move(self, order: PathOrder, first: int, end: int) -> None:
        """Forget those before ``first``, and add those up to ``end``."""
        if first > self.end:
            self.paths.clear()
            self.positions.clear()
            self.first = self.end = first
        while self.first < first:
            path = self.paths.popleft()
            places = self.positions[path]
            places.remove(self.first)
            if not places:
                del self.positions[path]
            self.first += 1
        for path in order.paths(self.end, end):
            self.paths.append(path)
            self.positions.setdefault(path, []).append(self.end)
            self.end += 1


class FileOrder:
    """One reader, with its workers, on its way through a PathOrder.

    Positions count files of the order. ``how``: how it is known, for people. ``ahead_items``: so
    many items workers may have read beyond those that said() tells.
    """

    def __init__(self, order: PathOrder, how: str, ahead_items: int = 0) -> None:
        self.order, self.how = order, how
        self._ahead_items = ahead_items
        self.position = 0  # all files before it have been opened, or were passed
        self._opened: set[int] = set()  # from the position on
        self._newest = -1
        self._around = _Around()
        self._strays: deque[str] = deque(maxlen=LOOKED_FOR)
        self._right: deque[bool] = deque(maxlen=JUDGED_FILES)
        self._strayed, self._lost_at = 0, LOST_FILES

    def __len__(self) -> int:
        """Files of the order; one that is read twice counts twice."""
        return len(self.order)

    @property
    def is_begun(self) -> bool:
        """Whether one of its files was seen to be opened, or said to be read."""
        return bool(self.position or self._opened)

    @property
    def done(self) -> bool:
        """Whether all has been opened."""
        return self.position >= len(self.order)

    @property
    def wrong(self) -> str | None:
        """Why the order is not that of its reader, in a line. It presumes that opened() is told of
        files in the order's directories only."""
        known = self._right
        if len(known) < JUDGED_FILES or 2 * sum(known) >= JUDGED_FILES:
            return None
        return f"of the last {JUDGED_FILES} files that were opened {sum(known)} were to come"

    @property
    def items_read(self) -> int:
        """Items of which all files are before the position."""
        return self.order.items if self.done else int(self.order.item[self.position])

    def ahead(self, position: int, count: int) -> list[str]:
        """The paths of the next ``count`` files from ``position`` on, without those that were seen
        to be opened already: so there may be fewer."""
        end = min(position + count, len(self.order))
        if not self._opened:
            return self.order.paths(position, end)
        kept: list[int] = [at for at in range(position, end) if at not in self._opened]
        return self.order.table.paths(self.order.numbers[kept])

    def opened(self, path: str) -> int | None:
        """A file was opened: its position, the earliest at which it was not opened yet; None when
        it is none of the order around the reader. ``path``: absolute.

        After LOST_FILES of these in a row the reader is looked for further on in the order."""
        reach = self._reach()
        if self._around.end - self.position < reach + AROUND_FILES // 2:
            self._around.move(
                self.order,
                max(self._around.first, self.position - AROUND_FILES),
                min(len(self.order), self.position + reach + AROUND_FILES),
            )
        most = self.position + 2 * reach
        places = [at for at in self._places(path) if at < most]
        self._right.append(bool(places))
        if not places:
            self._stray(path)
            return None
        self._strayed, self._lost_at = 0, LOST_FILES
        at = next((p for p in places if p >= self.position and p not in self._opened), places[-1])
        if at >= self.position:
            self._opened.add(at)
            self._newest = max(self._newest, at)
            self._go(max(self.position, self._newest - reach))
        return at

    def said(self, items: int) -> None:
        """All files of the first ``items`` items have been read."""
        self._go(max(self.position, self.order.position(items)))

    def _reach(self) -> int:
        """Files by which the newest that was opened may be beyond one that is yet to be."""
        if not self._ahead_items or self.done:
            return REACH_FILES
        item = int(self.order.item[self.position])
        return self.order.position(item + self._ahead_items + 1) - self.position + REACH_FILES

    def _places(self, path: str) -> list[int]:
        places = self._around.positions.get(path)
        for seen, own in self.order.aliases if places is None else ():
            if path.startswith(seen):
                places = self._around.positions.get(own + path[len(seen) :])
                if places is not None:
                    break
        return places or []

    def _stray(self, path: str) -> None:
        """A file that is none of those around the reader."""
        self._strays.append(path)
        self._strayed += 1
        if self._strayed < self._lost_at or self.done:
            return
        self._strayed, self._lost_at = 0, 2 * self._lost_at
        found = [self.order.find(self._own(name) or name) for name in self._strays]
        later = [min((at for at in places if at > self.position), default=-1) for places in found]
        if min(later) >= 0 and max(later) - min(later) < self._reach() + LOST_FILES:
            self._right.clear()
            self._go(min(later))

    def _own(self, path: str) -> str | None:
        """A path as the table has it, where an alias leads to it."""
        for seen, own in self.order.aliases:
            if path.startswith(seen):
                return own + path[len(seen) :]
        return None

    def _go(self, position: int) -> None:
        """To this position, and past those that have been opened from there on."""
        self._opened.difference_update(range(self.position, position))
        while position in self._opened:
            self._opened.remove(position)
            position += 1
        self.position = position
