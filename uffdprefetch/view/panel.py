# SPDX-License-Identifier: Apache-2.0
"""`wrap --live` on a terminal: the compact picture, and the escape sequences that keep it at the
bottom of the screen while the job writes above it. Pure functions; live.py writes.

The technique is that of apt's progress bar: a scroll region (DECSTBM) that ends above the panel, so
that whatever the job writes scrolls there as ever. Each sequence is one write, saves the cursor and
the attributes first (DECSC) and gives them back (DECRC): the job's output is not touched, wherever
it stands. What the job itself does with scroll regions, saved cursors or the alternate screen meets
ours: such a program is better watched by `top` from another terminal.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from uffdprefetch.base.units import format_duration
from uffdprefetch.view import glyphs as draw
from uffdprefetch.view import model, words
from uffdprefetch.view.glyphs import UNICODE, Glyphs
from uffdprefetch.view.model import LIVE, View
from uffdprefetch.view.ranks import rank_columns, rank_lines, title_line
from uffdprefetch.view.render import alert_lines, history_lines, rate_text

#: Most lines of the panel, beside a third of the screen.
ROWS_MAX = 8
WIDTH_MIN, SCREEN_MIN = 40, 9
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_WHOLE = "\x1b[r"


def rows_for(view: View, width: int, screen_rows: int) -> int:
    """How many lines the panel takes of a screen; 0 where it is too small for one."""
    if width < WIDTH_MIN or screen_rows < SCREEN_MIN:
        return 0
    ranks = len(view.snapshot.ranks) + bool(view.snapshot.ranks_not_listed) or 1
    wanted = 3 + ranks + bool(words.alerts(view))
    return min(wanted, ROWS_MAX, screen_rows // 3)


def panel(view: View, width: int, rows: int, glyphs: Glyphs = UNICODE) -> list[Text]:
    """Exactly ``rows`` lines of at most ``width`` cells: what goes on, the ranks, the last minutes,
    the gravest alert."""
    snapshot = view.snapshot
    lines = [_headline(view, width, glyphs)]
    alerts = alert_lines(view, width, 1, glyphs) if rows > 1 else []
    left = rows - len(lines) - len(alerts)
    if left >= 2:
        chart = left >= 3
        ranks = rank_lines(snapshot, width, left - 1 - chart, glyphs)
        lines += [title_line(rank_columns(width)), *ranks]
        if chart:
            values = snapshot.history.prefetch_bytes_per_second
            lines += history_lines("prefetch", values, width, 1, rate_text, glyphs, draw.READ)
    lines += alerts
    lines += [Text("")] * (rows - len(lines))
    return lines[:rows]


def _headline(view: View, width: int, glyphs: Glyphs) -> Text:
    snapshot = view.snapshot
    parts = [
        f"{snapshot.run} {format_duration(round(snapshot.seconds))}",
        words.reading(snapshot),
        f"hit {words.percent(model.hit_share(snapshot))}",
        words.pool(snapshot.pool) if snapshot.pool else "",
        f"stall {words.percent(model.stall_share(snapshot))}",
        f"ahead {words.short_size(snapshot.node.ahead_bytes)}",
        f"wasted {words.short_size(model.wasted_bytes(snapshot))}",
    ]
    if len(parts[0]) > width // 2:
        parts[0] = format_duration(round(snapshot.seconds))
    if view.state != LIVE:
        parts = parts[:1]
    line = words.join_fitting(parts, width - 6, f" {glyphs.dot} ")
    rule = glyphs.rule
    text = Text().append(rule * 2 + " ", draw.FAINT).append(line, "bold " + draw.READ)
    return text.append(" " + rule * (width - len(line) - 4), draw.FAINT)


# ---- escape sequences ---------------------------------------------------------------------------


def to_ansi(lines: Sequence[Text], width: int, colour: bool) -> list[str]:
    """Lines of text with their colours, nothing else in them: no newline, no cursor movement."""
    found = []
    for line in lines:
        out = io.StringIO()
        console = Console(
            file=out,
            width=width + 1,
            force_terminal=True,
            color_system="256" if colour else None,
            no_color=not colour,
            legacy_windows=False,
            highlight=False,
            _environ={},
        )
        console.print(line, end="", soft_wrap=True)
        found.append(out.getvalue().replace("\n", ""))
    return found


def enter(screen_rows: int, rows: int) -> str:
    """Make room for the panel: the cursor stays on its line of text, which moves up if it must.

    IND (ESC D) and not a newline: the column of an unfinished line stays.
    """
    return (
        "\x1bD" * rows
        + f"\x1b[{rows}A"
        + _SAVE
        + f"\x1b[1;{screen_rows - rows}r"  # this homes the cursor
        + _RESTORE
    )


def drawing(lines: Sequence[str], screen_rows: int) -> str:
    """The panel, at the bottom. The region is set again: a job's reset may have lifted it."""
    first = screen_rows - len(lines) + 1
    text = "".join(f"\x1b[{first + i};1H\x1b[0m{line}\x1b[0m\x1b[K" for i, line in enumerate(lines))
    return f"{_SAVE}\x1b[1;{first - 1}r{text}{_RESTORE}"


def leave(screen_rows: int, rows: int) -> str:
    """Take the panel away: the whole screen scrolls again, the cursor is where it was."""
    first = screen_rows - rows + 1
    lines = "".join(f"\x1b[{first + i};1H\x1b[0m\x1b[2K" for i in range(rows))
    return f"{_SAVE}{_WHOLE}{lines}{_RESTORE}"


def leave_after_resize() -> str:
    """The same when the screen has another size by now, and the terminal has moved the lines it had
    as it saw fit: what stands below the cursor is what is left of the panel."""
    return f"{_SAVE}{_WHOLE}{_RESTORE}\x1b[J"
