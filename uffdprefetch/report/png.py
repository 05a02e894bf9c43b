# SPDX-License-Identifier: Apache-2.0
"""A trace as one picture for a paper, by matplotlib: access maps, stall, iterations.

As [Stanovnik] figures 5, 7 and 9, with what they could not show: misses, what was read ahead, and
how long each rank stood still. Ranks differ in shape and lightness as well as in colour, so that
the picture can be read in grey.
"""

from __future__ import annotations

import textwrap
from typing import Any

from uffdprefetch.base.errors import EXIT_CANNOT, UffdPrefetchError, pip_install
from uffdprefetch.report import captions, panels
from uffdprefetch.trace.analyse.pictures import pictures
from uffdprefetch.trace.file.trace_file import Trace

WIDTH_INCHES, DPI = 7.4, 220
MAPS_MAX = 3
RANKS_IN_LEGEND = 8
_STYLE = {"font.size": 8, "axes.titlesize": 8.5, "hatch.linewidth": 0.5, "axes.linewidth": 0.7}
#: Characters of a caption's line, and of the legend's.
_CAPTION_COLUMNS, _LEGEND_COLUMNS = 146, 100


def matplotlib_or_error(option: str) -> Any:
    """The modules of matplotlib that draw without a screen; UffdPrefetchError names ``option``."""
    try:
        import matplotlib
        from matplotlib import collections, colors, figure, lines, patches, ticker  # noqa: F401
    except ImportError:
        raise UffdPrefetchError(
            f"{option} needs matplotlib: {pip_install('matplotlib')}",
            EXIT_CANNOT,
        ) from None
    return matplotlib


# ---- around the panels --------------------------------------------------------------------------


def _legend_entries(mpl: Any, drawn: dict[str, Any]) -> list[Any]:
    line, patch = mpl.lines.Line2D, mpl.patches.Patch
    entries: list[Any] = []
    ranks = drawn["ranks"]
    for i, rank in enumerate(ranks[:RANKS_IN_LEGEND]):
        last = i == RANKS_IN_LEGEND - 1 and len(ranks) > RANKS_IN_LEGEND
        label = f"rank {rank}" + (f" … {ranks[-1]}" if last else "")
        colour, shape = panels.look_of(i)
        entries.append(
            line([], [], linestyle="", marker=shape, markersize=4.5, color=colour, label=label)
        )
    kinds = {s.kind for s in drawn["streams"] if len(s)}
    named = {"major": "miss", "missed": "miss", "late": "late: on its way"}
    if "major" in kinds:
        kinds.discard("missed")  # drawn alike
    for kind, label in named.items():
        if kind in kinds:
            colour, marker = panels.MISSES[kind]
            entries.append(
                line([], [], linestyle="", marker=marker, markersize=5, color=colour, label=label)
            )
    names = {
        "warm": "read ahead by our service",
        "kernel": "read ahead by the kernel",
        "other": "brought in by others",
    }
    for kind, label in names.items():
        if kind in kinds:
            hatch, edge = ("//////", "white") if kind == "warm" else (None, None)
            entries.append(
                patch(facecolor=panels.BANDS[kind], edgecolor=edge, hatch=hatch, alpha=0.6,
                      label=label)
            )  # fmt: skip
    return entries


def _legend(fig: Any, entries: list[Any], y: float) -> None:
    """One legend for the whole figure, above it, where it covers nothing."""
    if not entries:
        return
    rows = _legend_rows(entries)
    columns = -(-len(entries) // rows)
    # A legend is filled column by column; people read it row by row.
    in_rows = [entry for i in range(columns) for entry in entries[i::columns]]
    fig.legend(
        handles=in_rows, loc="upper left", bbox_to_anchor=(0.075, y), ncols=columns, fontsize=7.5,
        frameon=False, handletextpad=0.4, columnspacing=1.4, borderaxespad=0, borderpad=0,
    )  # fmt: skip


def _legend_rows(entries: list[Any]) -> int:
    return max(1, -(-sum(len(e.get_label()) + 6 for e in entries) // _LEGEND_COLUMNS))


def _caption(report: dict[str, Any], drawn: dict[str, Any], letters: dict[str, str]) -> str:
    texts = captions.captions(report, drawn)
    parts = []
    for name, letter in letters.items():
        text = texts["map" if name == "detail" else name]["text"]
        if name == "detail":
            text = "The framed part of the map, access by access."
        parts.append(f"({letter}) {text}")
    lacks = captions.lacks_of_trace(report)
    if lacks:
        each = [w["what"] + (f" ({w['why']})" if w["why"] else "") for w in lacks]
        parts.append(f"Not in this trace: {'; '.join(each)}.")
    if len(drawn["files"]) > MAPS_MAX or drawn["files_left_out"]:
        more = len(drawn["files"]) - MAPS_MAX + drawn["files_left_out"]
        parts.append(f"{more} more files with fewer accesses are not shown.")
    return " ".join(parts)


def _title(report: dict[str, Any]) -> str:
    about = report.get("trace") or {}
    command = captions.short_command(about.get("command") or [], 92)
    return panels.plain(command or about.get("path") or "trace")


def _frame(ax: Any, mpl: Any, part: tuple[float, float, float, float]) -> None:
    """Where the enlarged part lies, with a frame that can be seen however small it is."""
    t0, t1, low, high = part
    (x0, x1), (y0, y1) = ax.get_xlim(), ax.get_ylim()
    width, height = max(t1 - t0, (x1 - x0) * 0.014), max(high - low, (y1 - y0) * 0.03)
    corner = ((t0 + t1 - width) / 2, (low + high - height) / 2)
    ax.add_patch(mpl.patches.Rectangle(corner, width, height, fill=False, linewidth=1, zorder=6))


# ---- the figure ---------------------------------------------------------------------------------


def draw(trace: Trace, report: dict[str, Any], mpl: Any) -> Any:
    """The figure, a matplotlib Figure: a row per access map, then stall and iterations."""
    drawn = pictures(trace, report)
    files = drawn["files"][:MAPS_MAX]
    letters = {"map": "a", "detail": "b", "stall": "c", "iterations": "d"}
    if not files:
        letters = {"map": "a", "stall": "b", "iterations": "c"}
    caption = textwrap.wrap(panels.plain(_caption(report, drawn, letters)), _CAPTION_COLUMNS)
    entries = _legend_entries(mpl, drawn)
    lower = min(3.2, 1.55 + 0.09 * max(0, len(drawn["ranks"]) - 8))
    heights = [2.75] * max(1, len(files)) + [lower]
    head_inches = 0.38 + 0.17 * _legend_rows(entries) + 0.28
    foot_inches = 0.13 * len(caption) + 0.55
    total = sum(heights) + 0.68 * (len(heights) - 1) + head_inches + foot_inches
    fig = mpl.figure.Figure(figsize=(WIDTH_INCHES, total), dpi=DPI)
    grid = fig.add_gridspec(
        len(heights), 2, width_ratios=[2.2, 1], height_ratios=heights, left=0.08, right=0.985,
        top=1 - head_inches / total, bottom=foot_inches / total, wspace=0.3,
        hspace=0.68 / (sum(heights) / len(heights)),
    )  # fmt: skip
    fig.suptitle(_title(report), x=0.012, ha="left", y=1 - 0.1 / total, va="top", fontsize=9.5,
                 fontweight="bold")  # fmt: skip
    texts = captions.captions(report, drawn)
    for row, file in enumerate(files):
        left, right = fig.add_subplot(grid[row, 0]), fig.add_subplot(grid[row, 1])
        panels.access_map(left, mpl, drawn, file)
        # which data set it is, not where this machine keeps it
        path = "/".join(file["path"].rsplit("/", 2)[-2:])
        path = path if len(path) <= 60 else "…" + path[-59:]
        left.set_title(f"({letters['map']}) {panels.plain(path)}", loc="left")
        streams = [s for s in drawn["streams"] if s.file == file["id"]]
        part = panels.detail(right, mpl, drawn, streams)
        if part is not None:
            right.set_title(f"({letters['detail']}) single accesses", loc="left")
            _frame(left, mpl, part)
    if not files:
        ax = fig.add_subplot(grid[0, :])
        ax.set_title(f"({letters['map']}) access map", loc="left")
        panels.instead(ax, texts["map"]["empty"])
    _lower(fig, mpl, grid, drawn, texts, letters)
    _legend(fig, entries, 1 - 0.36 / total)
    fig.text(0.012, 0.07 / total, "\n".join(caption), fontsize=6.8, va="bottom", color="#3f4a55",
             linespacing=1.25)  # fmt: skip
    return fig


def _lower(
    fig: Any, mpl: Any, grid: Any, drawn: dict[str, Any], texts: dict[str, dict[str, Any]],
    letters: dict[str, str],
) -> None:  # fmt: skip
    """Below the maps: stall under the map's time axis, iterations beside it."""
    left, right = fig.add_subplot(grid[-1, 0]), fig.add_subplot(grid[-1, 1])
    left.set_title(f"({letters['stall']}) stall by rank [% of the time]", loc="left")
    if drawn["series"]["stall_share"] is None or not drawn["ranks"]:
        panels.instead(left, texts["stall"]["empty"])
    else:
        image = panels.stall(left, mpl, drawn)
        bar = fig.colorbar(image, cax=left.inset_axes([1.015, 0, 0.018, 1]))
        bar.ax.tick_params(length=2, pad=1.5, labelsize=7)
    right.set_title(f"({letters['iterations']}) time of each iteration", loc="left")
    if drawn["iterations"]:
        panels.iterations(right, mpl, drawn)
    else:
        panels.instead(right, texts["iterations"]["empty"], 26)


def write(trace: Trace, report: dict[str, Any], path: str) -> None:
    """Write the picture as PNG; raises UffdPrefetchError without matplotlib, and OSError."""
    mpl = matplotlib_or_error("--format png")
    with mpl.rc_context(_STYLE):
        fig = draw(trace, report, mpl)
        fig.savefig(path, format="png", metadata={"Software": "uffdprefetch"})
