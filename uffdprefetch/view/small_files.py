# SPDX-License-Identifier: Apache-2.0
"""The table of small files that are read ahead: in which directories, in which order, and how many
of them were opened after that. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from uffdprefetch.base.units import format_size
from uffdprefetch.protocol.snapshot import FileTree, FollowedFiles, SmallFilesAhead
from uffdprefetch.view import glyphs as draw
from uffdprefetch.view import words
from uffdprefetch.view.glyphs import Glyphs

NAME_MIN = 14
#: The orders of a directory's names (predict/name_orders.py), for people.
ORDERS = {
    "readdir": "as listed",
    "reversed": "last listed first",
    "sorted": "by name",
    "inode": "by inode",
}

Row = FileTree | FollowedFiles


@dataclass(frozen=True)
class SmallColumn:
    """One column; ``order``: who stays when there is little room, lowest first."""

    title: str
    width: int
    order: int
    text: Callable[[Row], str]
    right: bool = True


def _order(row: Row) -> str:
    if isinstance(row, FollowedFiles):
        return "known"
    return ORDERS.get(row.order, row.order) if row.order else "not found yet"


SMALL_COLUMNS = (
    SmallColumn("order", 17, 1, _order, right=False),
    SmallColumn(
        "folders", 7, 5, lambda row: str(row.directories) if isinstance(row, FileTree) else ""
    ),
    SmallColumn("read ahead", 10, 2, lambda row: f"{row.read:,}"),
    SmallColumn("then opened", 11, 3, lambda row: f"{row.used:,}"),
    SmallColumn("left out", 8, 4, lambda row: f"{row.lost:,}" if isinstance(row, FileTree) else ""),
)


def small_columns(width: int) -> tuple[int, list[SmallColumn]]:
    """The width of the names, and the columns that fit beside them."""
    chosen: list[SmallColumn] = []
    for column in sorted(SMALL_COLUMNS, key=lambda c: c.order):
        if NAME_MIN + sum(c.width + 1 for c in [*chosen, column]) <= width:
            chosen.append(column)
    name = width - sum(c.width + 1 for c in chosen)
    return name, [c for c in SMALL_COLUMNS if c in chosen]


def rows_of(small: SmallFilesAhead | None) -> list[Row]:
    """What has a line of its own."""
    return [*small.orders, *small.trees] if small is not None else []


def total(small: SmallFilesAhead) -> str:
    """The whole run in a sentence."""
    if not small.read:
        return "none read ahead yet"
    size = format_size(small.used_bytes)
    return f"{small.used:,} of {small.read:,} read ahead were opened ({size})"


def small_lines(small: SmallFilesAhead, width: int, rows: int, glyphs: Glyphs) -> list[Text]:
    """Titles, a line for each tree or order, at most ``rows`` lines, the last one with the sum."""
    shown = rows_of(small)[: max(0, rows - 2)]
    hidden = len(rows_of(small)) - len(shown) + small.trees_not_listed + small.orders_not_listed
    name, columns = small_columns(width)
    lines = [_line("small files in", name, [(c, c.title) for c in columns], "bold")]
    for row in shown:
        if isinstance(row, FollowedFiles):
            what = words.fit(
                f"process {row.pid}, at {row.position:,} of {row.files:,}", name, glyphs.more
            )
        else:
            what = words.short_path(row.path, name, glyphs.more)
        lines.append(_line(what, name, [(c, c.text(row)) for c in columns]))
    more = f"; {hidden} more not shown" if hidden else ""
    if rows > 1:
        told = words.fit(f"in all: {total(small)}{more}", width, glyphs.more)
        lines.append(Text(told, draw.FAINT))
    return lines[:rows]


def _line(what: str, name: int, cells: Sequence[tuple[SmallColumn, str]], style: str = "") -> Text:
    text = what.ljust(name)
    for column, cell in cells:
        text += " " + (cell.rjust(column.width) if column.right else cell.ljust(column.width))
    return Text(text.rstrip(), style)
