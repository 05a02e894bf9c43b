# SPDX-License-Identifier: Apache-2.0
"""The table of the ranks: which columns fit, and a line for each rank. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from uffdprefetch.base.units import format_size
from uffdprefetch.protocol.snapshot import Rank, Snapshot
from uffdprefetch.view import glyphs as draw
from uffdprefetch.view import model, words
from uffdprefetch.view.glyphs import Glyphs

BAR_MIN = 10
BAR_WIDE = 30
#: Hit share below which, and stall share above which, a figure is drawn as an alert.
LOW_HIT = 0.9
HIGH_STALL = 0.1
#: Time without a touch after which a reader is shown as pausing.
IDLE_SECONDS = 10.0


@dataclass(frozen=True)
class RankColumn:
    """One column of a table. ``order``: who stays when there is little room, lowest first;
    ``wide``: only where the bar has room beside it."""

    title: str
    width: int
    order: int
    text: Callable[[Rank, int], str]
    right: bool = True
    alert: Callable[[Rank], bool] = lambda rank: False
    wide: bool = False


def _position(rank: Rank, width: int) -> str:
    inside = model.streams(rank)
    return format_size(inside[0].position_bytes) if inside else words.NA


def _rate(rank: Rank) -> str:
    """Of its streams; who jumps about is on none."""
    if rank.pattern == "random" and not rank.read_bytes_per_second:
        return words.NA
    return words.megabytes(rank.read_bytes_per_second)


def _idle(rank: Rank) -> bool:
    return rank.quiet_seconds is not None and rank.quiet_seconds > IDLE_SECONDS


RANK_COLUMNS = (
    RankColumn("rank", 4, 0, lambda r, w: str(r.rank)),
    RankColumn("pid", 7, 13, lambda r, w: str(r.pids[0]) if r.pids else words.NA, wide=True),
    RankColumn(
        "file", 14, 12, lambda r, w: words.short_path(r.file or "-", w), right=False, wide=True
    ),
    RankColumn("", BAR_MIN, 1, lambda r, w: "", right=False),
    RankColumn("at", 5, 2, lambda r, w: words.percent(model.share(r))),
    RankColumn("offset", 9, 11, _position, wide=True),
    RankColumn(
        "pattern", 11, 4, lambda r, w: words.pattern(r.pattern, r.stride_bytes, w), right=False
    ),
    RankColumn("MB/s", 5, 3, lambda r, w: _rate(r)),
    RankColumn(
        "hit",
        5,
        5,
        lambda r, w: words.percent(r.hit.share),
        alert=lambda r: r.hit.share is not None and r.hit.share < LOW_HIT,
    ),
    RankColumn(
        "misses",
        6,
        10,
        lambda r, w: words.NA if r.hit.misses is None else str(r.hit.misses),
        wide=True,
    ),
    RankColumn(
        "stall",
        5,
        6,
        lambda r, w: words.percent(r.stall.share),
        alert=lambda r: r.stall.share is not None and r.stall.share > HIGH_STALL,
    ),
    RankColumn("window", 6, 7, lambda r, w: words.short_size(r.window_bytes)),
    RankColumn("flight", 6, 8, lambda r, w: words.short_size(r.in_flight_bytes)),
    RankColumn("wasted", 6, 9, lambda r, w: words.short_size(r.wasted_bytes)),
    RankColumn("late", 5, 14, lambda r, w: str(r.late_extents), wide=True),
)


def rank_columns(width: int) -> list[tuple[RankColumn, int]]:
    """The columns that fit and their widths; what is left over goes to the bar, and from a wide
    screen a little to the patterns."""
    chosen: list[RankColumn] = []
    for column in sorted(RANK_COLUMNS, key=lambda c: c.order):
        needed = sum(c.width + 1 for c in [*chosen, column]) - 1
        if needed <= width - (BAR_WIDE - BAR_MIN if column.wide else 0):
            chosen.append(column)
    spare = width - (sum(c.width + 1 for c in chosen) - 1)
    widths = {c.title: c.width for c in chosen}
    if "pattern" in widths and spare > 24:
        widths["pattern"] += 9
        spare -= 9
    if "" in widths:
        widths[""] += spare
    return [(c, widths[c.title]) for c in RANK_COLUMNS if c in chosen]


def title_line(columns: Sequence[tuple[RankColumn, int]]) -> Text:
    cells = []
    for column, width in columns:
        title = "position in the file" if column.title == "" else column.title
        title = title if len(title) <= width else "position"
        cells.append(title.rjust(width) if column.right else title.ljust(width))
    return Text(" ".join(cells), "bold")


def rank_line(rank: Rank, columns: Sequence[tuple[RankColumn, int]], glyphs: Glyphs) -> Text:
    """One rank as a line of a table."""
    line = Text()
    for column, width in columns:
        if line:
            line.append(" ")
        if column.title == "":
            line.append_text(draw.position_bar(rank, width, glyphs))
            continue
        text = column.text(rank, width)
        style = draw.ALERT if column.alert(rank) else draw.FAINT if text == words.NA else ""
        if _idle(rank) and column.title == "MB/s":
            style = draw.FAINT
        line.append(text.rjust(width) if column.right else text.ljust(width), style)
    return line


def folded_line(ranks: Sequence[Rank], not_listed: int, width: int, glyphs: Glyphs) -> Text:
    """The ranks that have no line of their own: how many, and the worst of them."""
    count = len(ranks) + not_listed
    parts = [f"{glyphs.more} {count} more rank{'' if count == 1 else 's'}"]
    known_rates = [r for r in ranks if _rate(r) != words.NA]
    slowest = min(known_rates, key=lambda r: r.read_bytes_per_second, default=None)
    if slowest is not None:
        parts.append(f"slowest {slowest.rank}: {_rate(slowest)} MB/s")
    hits = [r for r in ranks if r.hit.share is not None]
    if hits:
        worst = min(hits, key=lambda r: r.hit.share or 0.0)
        parts.append(f"worst hit {worst.rank}: {words.percent(worst.hit.share)}")
    known = [share for r in ranks if (share := model.share(r)) is not None]
    if known:
        parts.append(f"at {words.percent(min(known))} to {words.percent(max(known))}")
    return Text(words.join_fitting(parts, width), draw.FAINT)


def rank_lines(snapshot: Snapshot, width: int, rows: int, glyphs: Glyphs) -> list[Text]:
    """The ranks in at most ``rows`` lines, the titles not counted; at least one line."""
    if not snapshot.ranks:
        what = "mapped a file" if snapshot.small_files is None else "mapped or read a large file"
        return [Text(words.fit(f"no process of the job has {what} yet", width), draw.FAINT)]
    columns = rank_columns(width)
    ranks = snapshot.ranks
    if len(ranks) <= rows and not snapshot.ranks_not_listed:
        return [rank_line(rank, columns, glyphs) for rank in ranks]
    shown = max(0, rows - 1)
    lines = [rank_line(rank, columns, glyphs) for rank in ranks[:shown]]
    return [*lines, folded_line(ranks[shown:], snapshot.ranks_not_listed, width, glyphs)]
