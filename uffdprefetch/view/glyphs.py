# SPDX-License-Identifier: Apache-2.0
"""The characters of the pictures, in UTF-8 and in ASCII, and what is drawn with them: position
bars, gauges, sparklines. Pure functions.

Colours are of Okabe and Ito's palette, which colour-blind people can tell apart, and never say what
a character does not say too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from uffdprefetch.protocol.snapshot import Rank
from uffdprefetch.view.model import streams

READ = "#56B4E9"
AHEAD = "#56B4E9"
READERS = "#009E73"
ALERT = "bold #E69F00"
MISSES = "#E69F00"
FAINT = "dim"


@dataclass(frozen=True)
class Glyphs:
    """One set of characters; every one is a single cell wide."""

    passed: str
    forward: str
    backward: str
    ahead: str
    track: str
    full: str
    empty: str
    rule: str
    levels: str  # from nothing to full
    more: str
    dot: str


UNICODE = Glyphs("▆", "►", "◄", "▂", "·", "█", "░", "─", " ▁▂▃▄▅▆▇█", "…", "·")
ASCII = Glyphs("#", ">", "<", "+", ".", "#", ".", "-", " _.-=+*#", "...", "-")


def choose(encoding: str | None, environ: Mapping[str, str]) -> Glyphs:
    """The set for an output of this encoding; ASCII also where the user's locale says C or nothing
    at all (the interpreter takes UTF-8 there, the terminal may not)."""
    if (encoding or "").lower().replace("-", "") != "utf8":
        return ASCII
    locale = next((environ[n] for n in ("LC_ALL", "LC_CTYPE", "LANG") if environ.get(n)), "C")
    return ASCII if locale in ("C", "POSIX") else UNICODE


def cell(offset_bytes: int, size_bytes: int, width: int) -> int:
    """The cell of a bar of ``width`` cells that an offset falls into."""
    return min(width - 1, max(0, offset_bytes * width // max(1, size_bytes)))


def position_bar(rank: Rank, width: int, glyphs: Glyphs) -> Text:
    """The rank's file from end to end: what it has walked over, where it is, what is asked for
    ahead of it."""
    cells = [(glyphs.track, FAINT)] * width
    if rank.size_bytes:
        inside = streams(rank)
        for stream in inside:
            at = cell(stream.position_bytes, rank.size_bytes, width)
            front = cell(stream.frontier_bytes, rank.size_bytes, width)
            for i in _between(at, front):
                cells[i] = (glyphs.ahead, AHEAD)
        for stream in inside:
            start = cell(stream.start_bytes, rank.size_bytes, width)
            for i in _between(start, cell(stream.position_bytes, rank.size_bytes, width)):
                cells[i] = (glyphs.passed, READ)
        for stream in inside:
            marker = glyphs.forward if (rank.direction or 1) > 0 else glyphs.backward
            cells[cell(stream.position_bytes, rank.size_bytes, width)] = (marker, "bold")
    text = Text()
    for character, style in cells:
        text.append(character, style)
    return text


def _between(a: int, b: int) -> range:
    return range(min(a, b), max(a, b) + 1)


def gauge(share: float, width: int, glyphs: Glyphs, style: str = READ) -> Text:
    """A bar that is filled by ``share``, 0 to 1; anything above nothing shows."""
    filled = min(width, max(0, math.floor(share * width + 0.5)))
    if share > 0 and not filled:
        filled = 1
    text = Text().append(glyphs.full * filled, style)
    return text.append(glyphs.empty * (width - filled), FAINT)


def resample(values: Sequence[float], cells: int) -> list[float]:
    """All values over exactly ``cells`` cells: means of several where there are more values than
    cells, a value in several cells where there are fewer. [] without values."""
    count = len(values)
    found = []
    for i in range(cells if count else 0):
        first = i * count // cells
        some = values[first : max(first + 1, (i + 1) * count // cells)]
        found.append(sum(some) / len(some))
    return found


def chart(values: Sequence[float], cells: int, rows: int, glyphs: Glyphs, style: str) -> list[Text]:
    """A filled curve, ``rows`` lines high, right-aligned in ``cells``; its top is its peak. What is
    not nothing shows at least as the lowest level."""
    levels = len(glyphs.levels) - 1
    peak = max(values, default=0.0) or 1.0  # of the means: else a lone second flattens the rest
    lines = []
    for row in range(rows - 1, -1, -1):
        text = ""
        for value in values[-cells:]:
            height = value / peak * rows * levels
            if value > 0:
                height = max(1.0, height)
            text += glyphs.levels[min(levels, max(0, math.floor(height + 0.5) - row * levels))]
        lines.append(Text().append(text.rjust(cells), style))
    return lines
