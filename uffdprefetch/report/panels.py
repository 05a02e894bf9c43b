# SPDX-License-Identifier: Apache-2.0
"""The panels of the picture for papers (report/png.py), each drawn into a matplotlib Axes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np

from uffdprefetch.report.text import printable
from uffdprefetch.trace.analyse import density
from uffdprefetch.trace.analyse.marks import MarkStream

#: Colours of ranks, after Okabe and Ito, as in page/page.css; with four markers they make 28 pairs.
COLOURS = ("#0072b2", "#c39400", "#009e73", "#cc79a7", "#6b4c9a", "#8c510a", "#3f9fb5")
SHAPES = ("o", "^", "s", "D")
#: By kind: colour and marker; colour of a band.
MISSES = {"late": ("#b8693f", "+"), "major": ("#d53e00", "x"), "missed": ("#d53e00", "x")}
BANDS = {"kernel": "#9aa3ad", "other": "#d3d8de", "warm": "#4d9fd6"}
#: Grid of a map in time and offset: a rank has at most one mark in a cell, as more would overlap in
#: print.
COLUMNS, ROWS = 900, 420
BANDS_MAX = 4000
MIXED_LAYERS = 24
#: Accesses of each rank that the enlarged part of a map shows.
DETAIL_ACCESSES = 12
_RAMP = ("#fdf6ea", "#f6cf96", "#e08a3c", "#a83c17", "#45100a")


def plain(text: object) -> str:
    """A string of a trace: no control characters, and no dollars, which would be formulas."""
    return printable(text).replace("$", r"\$")


def look_of(number: int) -> tuple[str, str]:
    """Colour and marker of the rank with this place among the ranks."""
    return COLOURS[number % len(COLOURS)], SHAPES[number % len(SHAPES)]


# ---- units of the axes --------------------------------------------------------------------------


def byte_unit(span_bytes: float) -> tuple[int, str]:
    """(bytes, name) of the unit that an axis of this length is labelled in."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(np.log2(max(1.0, span_bytes / 4)) // 10)))
    return 1024**power, units[power]


def time_unit(span_seconds: float) -> tuple[float, str]:
    """(seconds, name) of the unit that an axis of this length is labelled in."""
    if span_seconds >= 7200:
        return 3600.0, "h"
    if span_seconds >= 600:
        return 60.0, "min"
    if span_seconds >= 0.5:
        return 1.0, "s"
    return (1e-3, "ms") if span_seconds >= 5e-4 else (1e-6, "us")


def _label_axes(ax: Any, mpl: Any) -> None:
    """Ticks at round numbers of a fitting unit; far from zero as distances from a round place."""
    ticker = mpl.ticker
    low, high = ax.get_ylim()
    scale, unit = byte_unit(high - low)
    step = _binary_step((high - low) / scale / 5) * scale
    far = low > 4 * (high - low)
    base = int(low // (1024 * scale)) * 1024 * scale if far else 0
    ax.yaxis.set_major_locator(ticker.MultipleLocator(step))
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{(v - base) / scale:g}"))
    size, of = byte_unit(1024 * scale * 4)
    place = f"after {base // size} {of}" if base else "in the file"
    ax.set_ylabel(f"offset {place} [{unit}]")
    left, right = ax.get_xlim()
    each, name = time_unit(right - left)
    start = left if left > 4 * (right - left) else 0.0
    ax.xaxis.set_major_locator(ticker.FixedLocator(_ticks_from(start or left, right, each)))
    ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{(v - start) / each:.4g}"))
    ax.set_xlabel(f"time [{name}]" + (f" after {start:.5g} s" if start else ""))


def _ticks_from(t0: float, t1: float, each: float) -> list[float]:
    """Round distances from t0, where that is 0 or what times are told from."""
    span = (t1 - t0) / each
    power = 10 ** np.floor(np.log10(span / 6))
    step = next(s * power for s in (1, 2, 5, 10) if s * power * 6 >= span)
    first = 0.0 if t0 == 0 or t0 > 4 * (t1 - t0) else -((t0 / each) % step) + step
    return [t0 + (first + i * step) * each for i in range(int((span - first) / step) + 1)]


def _binary_step(about: float) -> float:
    return float(2.0 ** np.round(np.log2(max(about, 1e-9))))


# ---- marks --------------------------------------------------------------------------------------


def _one_per_place(stream: MarkStream, span_ns: float, size_bytes: int) -> MarkStream:
    """At most one mark for each place of a map that can be told from others, the first."""
    column = (stream.start_ns * (COLUMNS / span_ns)).astype(np.int64)
    row = (stream.offset * (ROWS / size_bytes)).astype(np.int64)
    _, first = np.unique(column * (ROWS + 1) + row, return_index=True)
    return stream.part(np.sort(first))


def _bands(ax: Any, mpl: Any, streams: Iterable[MarkStream], span_ns: int, size_bytes: int) -> None:
    """Draw what was read ahead as rectangles, or, of many, their raster."""
    for kind in ("kernel", "other", "warm"):
        some = [s for s in streams if s.kind == kind]
        n = sum(map(len, some))
        if not n:
            continue
        if n > BANDS_MAX:
            boxes = [density.Boxes.of(s) for s in some]
            grid = density.grid(boxes, span_ns, {s.file: size_bytes for s in some})
            covered = np.zeros(grid.columns * grid.rows)
            for cells in grid.cells:
                covered[cells.index] = 1
            image = np.ma.masked_equal(covered.reshape(grid.columns, grid.rows).T, 0)
            ax.imshow(
                image, origin="lower", aspect="auto", extent=(0, span_ns / 1e9, 0, size_bytes),
                cmap=mpl.colors.ListedColormap([BANDS[kind]]), alpha=0.45, zorder=1,
                interpolation="nearest",
            )  # fmt: skip
            continue
        corners = [_rectangle(s, i) for s in some for i in range(len(s))]
        ax.add_collection(
            mpl.collections.PolyCollection(
                corners, facecolors=BANDS[kind], edgecolors=BANDS[kind], alpha=0.45,
                linewidths=0.4, hatch="////" if kind == "warm" else None, zorder=1,
                rasterized=True,
            )
        )  # fmt: skip


def _rectangle(s: MarkStream, i: int) -> list[tuple[float, float]]:
    x0, x1 = s.start_ns[i] / 1e9, (s.start_ns[i] + s.duration_ns[i]) / 1e9
    y0 = float(s.offset[i] - s.before[i])
    y1 = y0 + float(s.length[i])
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


def _accesses(ax: Any, streams: list[MarkStream], place: dict[int, int], size: float) -> None:
    """Ranks in turn, a random part of each after the other (always the same one), so that no rank
    lies above all others and no pattern is seen that is none."""
    rng = np.random.default_rng(1)
    layers = [rng.integers(0, MIXED_LAYERS, len(s)) for s in streams]
    for k in range(MIXED_LAYERS):
        for n in range(len(streams)):
            stream, chosen = streams[(n + k) % len(streams)], layers[(n + k) % len(streams)] == k
            if not chosen.any():
                continue
            colour, shape = look_of(place.get(stream.rank, 0))
            ax.scatter(
                stream.start_ns[chosen] / 1e9, stream.offset[chosen], s=size, linewidths=0,
                c=colour, marker=shape, zorder=3, rasterized=True,
            )  # fmt: skip


def _misses(ax: Any, streams: Iterable[MarkStream], span_ns: float, size_bytes: int) -> None:
    """Crosses, upright for late ones, below the accesses and larger than they: a fringe where they
    are many."""
    misses = [s for s in streams if s.layer == "miss"]
    size = 16 if sum(map(len, misses)) < 300 else 8
    for kind, (colour, marker) in MISSES.items():
        for stream in (s for s in misses if s.kind == kind):
            coarse = (stream.start_ns * (160 / span_ns)).astype(np.int64) * 80
            coarse += (stream.offset * (79 / size_bytes)).astype(np.int64)
            _, first = np.unique(coarse, return_index=True)
            some = stream.part(first)
            ax.scatter(
                some.start_ns / 1e9, some.offset, s=size, marker=marker, linewidths=0.7, c=colour,
                zorder=2, rasterized=True,
            )  # fmt: skip


# ---- panels -------------------------------------------------------------------------------------


def access_map(ax: Any, mpl: Any, drawn: dict[str, Any], file: dict[str, Any]) -> None:
    span_ns, size = drawn["seconds"] * 1e9, file["size_bytes"]
    streams = [s for s in drawn["streams"] if s.file == file["id"]]
    place = {rank: i for i, rank in enumerate(drawn["ranks"])}
    _bands(ax, mpl, streams, int(span_ns), size)
    demand = [s for s in streams if s.layer == "demand"]
    thinned = [_one_per_place(s, span_ns, size) for s in demand]
    _beyond(ax, drawn, file, place)
    _misses(ax, streams, span_ns, size)
    _accesses(ax, thinned, place, 2.4)
    ax.set_xlim(0, drawn["seconds"])
    ax.set_ylim(0, size)
    _label_axes(ax, mpl)


def _beyond(ax: Any, drawn: dict[str, Any], file: dict[str, Any], place: dict[int, int]) -> None:
    """Where single events end, the overview's cells."""
    grid, until = drawn["grid"], drawn["raw_until_seconds"]
    if grid is None or until is None:
        return
    ax.axvline(until, color="#59636e", linewidth=0.7, linestyle=":")
    for cells in grid.cells:
        if cells.file != file["id"] or cells.rank not in place or cells.kind in BANDS:
            continue
        x = (cells.index // grid.rows + 0.5) * (drawn["seconds"] / grid.columns)
        y = (cells.index % grid.rows + 0.5) * (file["size_bytes"] / grid.rows)
        colour = MISSES[cells.kind][0] if cells.kind in MISSES else look_of(place[cells.rank])[0]
        ax.scatter(
            x[x > until], y[x > until], s=1.2, linewidths=0, zorder=2, alpha=0.6, c=colour,
            rasterized=True,
        )  # fmt: skip


def _detail_of(
    drawn: dict[str, Any], streams: list[MarkStream]
) -> tuple[float, float, float, float] | None:
    """(start, end, low, high) of a part with some accesses of a rank in its first half."""
    demand = [s for s in streams if s.layer == "demand" and s.rank >= 0 and len(s) > 2]
    if not demand:
        return None
    one = max(demand, key=len)
    # Not from the start, where headers are read, and in the first epoch, where it is slow.
    first = len(one) // 6
    last = min(len(one) - 1, first + DETAIL_ACCESSES)
    start, end = one.start_ns[first] / 1e9, one.start_ns[last] / 1e9
    part = one.part(slice(first, last + 1))
    low = float((part.offset - part.before).min())
    high = float((part.offset - part.before + part.length).max())
    pad_seconds, pad = (end - start) * 0.06 or 1e-4, (high - low) * 0.06
    return max(0.0, start - pad_seconds), end + pad_seconds, max(0.0, low - pad), high + pad


def detail(ax: Any, mpl: Any, drawn: dict[str, Any], streams: list[MarkStream]) -> Any:
    """Single accesses with their ranges, and how long a miss was waited for."""
    part = _detail_of(drawn, streams)
    if part is None:
        ax.set_axis_off()
        return None
    t0, t1, low, high = part
    place = {rank: i for i, rank in enumerate(drawn["ranks"])}

    def within(s: MarkStream) -> MarkStream:
        start, bottom = s.start_ns / 1e9, s.offset - s.before
        seen = (start <= t1) & (start + s.duration_ns / 1e9 >= t0)
        return s.part(seen & (bottom <= high) & (bottom + s.length >= low))

    shown = [within(s) for s in streams]
    _bands(ax, mpl, shown, int(drawn["seconds"] * 1e9), int(high))
    for s in shown:
        colour, shape = look_of(place.get(s.rank, 0))
        x = s.start_ns / 1e9
        if s.layer == "demand":
            bottom = s.offset - s.before
            ax.vlines(x, bottom, bottom + s.length, colors=colour, linewidth=1.6, alpha=0.45)
            ax.scatter(x, s.offset, s=15, c=colour, marker=shape, linewidths=0.3,
                       edgecolors="white", zorder=3)  # fmt: skip
        elif s.layer == "miss":
            colour, shape = MISSES[s.kind]
            ax.hlines(s.offset, x, x + s.duration_ns / 1e9, colors=colour, linewidth=0.9, zorder=4)
            ax.scatter(x, s.offset, s=22, c=colour, marker=shape, linewidths=1, zorder=5)
    ax.set_xlim(t0, t1)
    ax.set_ylim(low, high)
    _label_axes(ax, mpl)
    return part


def stall(ax: Any, mpl: Any, drawn: dict[str, Any]) -> Any:
    share = drawn["series"]["stall_share"]
    columns = 360
    bins = share.shape[1]
    edges = np.linspace(0, bins, min(columns, bins) + 1).astype(np.int64)
    means = np.add.reduceat(share, edges[:-1], axis=1) / np.diff(edges)
    ramp = mpl.colors.LinearSegmentedColormap.from_list("stall", _RAMP)
    image = ax.imshow(
        np.clip(means, 0, 1) * 100, aspect="auto", interpolation="nearest", cmap=ramp, vmin=0,
        vmax=100, extent=(0, drawn["seconds"], len(means) - 0.5, -0.5),
    )  # fmt: skip
    ranks = drawn["ranks"]
    every = max(1, -(-len(ranks) // 12))
    ax.set_yticks(range(0, len(ranks), every), [str(r) for r in ranks[::every]])
    ax.set_ylabel("rank")
    each, name = time_unit(drawn["seconds"])
    ax.xaxis.set_major_locator(mpl.ticker.FixedLocator(_ticks_from(0.0, drawn["seconds"], each)))
    ax.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda v, _: f"{v / each:g}"))
    ax.set_xlabel(f"time [{name}]")
    return image


def iterations(ax: Any, mpl: Any, drawn: dict[str, Any]) -> None:
    place = {rank: i for i, rank in enumerate(drawn["ranks"])}
    longest = max(max(r["seconds"]) for r in drawn["iterations"])
    each, name = time_unit(longest * 0.9)
    points = sum(len(r["seconds"]) for r in drawn["iterations"])
    for reader in drawn["iterations"]:
        colour, shape = look_of(place.get(reader["rank"], 0))
        seconds = np.array(reader["seconds"])
        ax.scatter(
            np.arange(len(seconds)) * reader["step"], seconds / each, s=3 if points > 1500 else 7,
            linewidths=0, c=colour, marker=shape, rasterized=True,
        )  # fmt: skip
    ax.set_ylim(0, longest / each * 1.08)
    ax.xaxis.set_major_locator(mpl.ticker.MaxNLocator(6, integer=True))
    ax.set_xlabel("iteration")
    ax.set_ylabel(f"time [{name}]")


def instead(ax: Any, text: str, columns: int = 80) -> None:
    """Draw a text in the place of a picture, wrapped at ``columns`` characters."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.text(0.5, 0.5, "\n".join(textwrap.wrap(plain(text), columns)), ha="center", va="center",
            fontsize=8, color="#3f4a55", transform=ax.transAxes)  # fmt: skip
