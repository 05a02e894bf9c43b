# SPDX-License-Identifier: Apache-2.0
"""The table of the files: how much of each is in memory (page cache or pool), and what prefetching
brought of it. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from uffdprefetch.base.units import format_size
from uffdprefetch.protocol.snapshot import File, Snapshot
from uffdprefetch.view import glyphs as draw
from uffdprefetch.view import words
from uffdprefetch.view.glyphs import Glyphs

NAME_MIN = 12
GAUGE = 11
#: Titles of the column of resident bytes, by where they are.
IN_MEMORY, IN_POOL, IN_EITHER = "in the page cache", "in the pool", "in pool or cache"


@dataclass(frozen=True)
class FileColumn:
    """One column; ``order``: who stays when there is little room, lowest first."""

    title: str
    width: int
    order: int
    text: Callable[[File, int, Glyphs], Text]
    right: bool = True


def _cached(file: File, width: int, glyphs: Glyphs) -> Text:
    resident = file.resident_bytes
    if file.pool_resident_bytes is not None:
        resident = file.pool_resident_bytes
    if resident is None:
        counted = file.counted_seconds_ago is not None
        why = f"n/a ({file.resident_why})" if counted else words.NA
        return Text().append(words.fit(why, width, glyphs.more) or words.NA, draw.FAINT)
    share = min(1.0, resident / max(1, file.size_bytes))
    text = draw.gauge(share, GAUGE, glyphs, draw.READERS)
    return text.append(f" {words.percent(share):>5}")


def _plain(value: Callable[[File], str]) -> Callable[[File, int, Glyphs], Text]:
    return lambda file, width, glyphs: Text(value(file))


COLUMNS = (
    FileColumn("size", 8, 2, _plain(lambda f: format_size(f.size_bytes))),
    FileColumn(IN_MEMORY, GAUGE + 6, 1, _cached, right=False),
    FileColumn("used", 6, 3, _plain(lambda f: words.short_size(f.used_bytes))),
    FileColumn("wasted", 6, 4, _plain(lambda f: words.short_size(f.wasted_bytes))),
    FileColumn("prefetched", 10, 5, _plain(lambda f: words.short_size(f.prefetched_bytes))),
    FileColumn("file system", 12, 6, _plain(lambda f: f.file_system[:12]), right=False),
    FileColumn(
        "served by",
        11,
        7,
        _plain(lambda f: (f.served_by or "nothing").replace("_", " ")),
        right=False,
    ),
)


def file_columns(width: int) -> tuple[int, list[FileColumn]]:
    """The width of the names, and the columns that fit beside them."""
    chosen: list[FileColumn] = []
    for column in sorted(COLUMNS, key=lambda c: c.order):
        # the later ones only where the names keep some room
        name = NAME_MIN if column.order <= 4 else 2 * NAME_MIN
        if name + sum(c.width + 1 for c in [*chosen, column]) <= width:
            chosen.append(column)
    name = width - sum(c.width + 1 for c in chosen)
    return name, [c for c in COLUMNS if c in chosen]


def _memory(snapshot: Snapshot) -> str:
    pooled = {file.pool_resident_bytes is not None for file in snapshot.files}
    return IN_EITHER if len(pooled) > 1 else IN_POOL if True in pooled else IN_MEMORY


def file_lines(snapshot: Snapshot, width: int, rows: int, glyphs: Glyphs) -> list[Text]:
    """Titles and a line for each file, at most ``rows`` lines; the last one counts the others."""
    files = snapshot.files[: rows - 1]
    hidden = len(snapshot.files) - len(files) + snapshot.files_not_listed
    if hidden and len(files) > 1:
        files, hidden = files[:-1], hidden + 1
    name, columns = file_columns(width)
    titles = "file".ljust(name)
    for column in columns:
        title = _memory(snapshot) if column.title == IN_MEMORY else column.title
        title = title.rjust(column.width) if column.right else title
        titles += f" {title.ljust(column.width)}"
    lines = [Text().append(titles.rstrip(), "bold")]
    for file in files:
        line = Text(words.short_path(file.path, name, glyphs.more).ljust(name))
        for column in columns:
            cell = column.text(file, column.width, glyphs)
            space = " " * (column.width - cell.cell_len)
            line.append(" ")
            line.append(space if column.right else "").append_text(cell)
            line.append("" if column.right else space)
        line.rstrip()
        lines.append(line)
    if hidden and rows > 2:
        lines.append(Text().append(f"{glyphs.more} {hidden} more files", draw.FAINT))
    return lines
