# SPDX-License-Identifier: Apache-2.0
"""How a command shows its document: as JSON, as tables on a terminal, or as plain text.

A module of report/ makes the document and says how it reads, by a TextReport; the rest is here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

#: Of a column in a terminal's table: its two blanks and its border.
COLUMN_EXTRA = 3


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """One line a row: the first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in rows
    ]


@dataclass(frozen=True)
class TextTable:
    """Rows of cells. Without ``heads`` each row is a fact and its name. ``left``: columns to the
    left; ``dim``: rows that say little; ``least_wanted``: heads of the columns that are left out
    where a terminal is too narrow, the first one first."""

    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    title: str = ""
    left: int = 1
    dim: Collection[int] = ()
    least_wanted: Sequence[str] = ()

    def lines(self) -> list[str]:
        """As plain text."""
        rows = [self.heads, *self.rows] if self.heads else self.rows
        return [*([self.title] if self.title else []), *aligned(rows, self.left)]

    def print(self, console: Console) -> None:
        """With rich."""
        from rich.table import Table
        from rich.text import Text

        hidden = self._too_wide(console.width)
        shown = Table(show_header=bool(self.heads), title_justify="left")
        shown.title = Text(self.title) if self.title else None
        kept = [i for i in range(len(self.rows[0])) if i not in hidden] if self.rows else []
        for i in kept or range(len(self.heads)):
            shown.add_column(
                self.heads[i] if self.heads else "",
                justify="left" if i < self.left else "right",
                overflow="fold",
                style=None if self.heads or i else "bold",
            )
        for number, row in enumerate(self.rows):
            style = "dim" if number in self.dim else None
            shown.add_row(*(Text(row[i]) for i in kept), style=style)
        console.print(shown)
        if hidden:
            names = ", ".join(self.heads[i] for i in sorted(hidden))
            console.print(Text(f"{names}: in a wider terminal, or by --json", style="dim"))

    def _too_wide(self, columns: int) -> set[int]:
        """Numbers of the columns for which there is no room."""
        hidden: set[int] = set()
        if not self.least_wanted:
            return hidden
        widths = [max(map(len, one)) for one in zip(self.heads, *self.rows, strict=True)]
        for head in self.least_wanted:
            some = [width for i, width in enumerate(widths) if i not in hidden]
            if sum(some) + COLUMN_EXTRA * len(some) + 1 <= columns:
                break
            hidden.add(self.heads.index(head))
        return hidden


@dataclass(frozen=True)
class TextReport:
    """What a document says to people. ``to_copy``: the notes have command lines in them, which a
    terminal must not break."""

    tables: Sequence[TextTable] = ()
    notes: Sequence[str] = ()
    to_copy: bool = False

    def plain(self) -> str:
        """As plain text: tables, their columns aligned, then the notes."""
        lines = [line for table in self.tables for line in table.lines()]
        return "".join(f"{line}\n" for line in (*lines, *self.notes))

    def print(self) -> None:
        """On a terminal, with rich."""
        from rich.console import Console
        from rich.text import Text

        console = Console()
        for table in self.tables:
            table.print(console)
        for note in self.notes:
            style = "" if self.to_copy else "dim"
            console.print(Text(note, style=style), soft_wrap=self.to_copy)


def show(document: dict[str, Any], report: TextReport, as_json: bool) -> None:
    """On stdout: JSON, tables for a terminal, or plain text. ``report``: of the document."""
    if as_json:
        print(json.dumps(document, indent=2))
    elif report.tables and sys.stdout.isatty():
        report.print()
    else:
        sys.stdout.write(report.plain())
