# SPDX-License-Identifier: Apache-2.0
"""The counts of bench/lab/speculate.py as [LMDBIO-DM] figures 11 and 12, by matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

#: Drawn for a count of 0 on the logarithmic axes.
_ZERO = 0.3
_WAYS = {
    "values": (
        "first record's size, bounds corrected (LMDBIO-DM): pages of values",
        "#b2182b",
        "o",
    ),
    "tree": ("the same: leaf and branch pages", "#ef8a62", "^"),
    "head": ("a few tree pages read first (ours): both", "#2166ac", "s"),
    "needed": ("pages needed", "#888888", ""),
}


def _column(result: dict[str, Any], processes: str, way: str, column: str) -> list[int]:
    return list(result["processes"][processes][way][column])


def _missed(result: dict[str, Any], processes: str, way: str) -> list[int]:
    """Where values and tree are one line, their sum."""
    if way == "head":
        values = _column(result, processes, "head", "missed_values")
        tree = _column(result, processes, "head", "missed_tree")
        return [a + b for a, b in zip(values, tree, strict=True)]
    return _column(result, processes, "paper", f"missed_{way}")


def _line(ax: Any, x: list[int], y: list[float], way: str, **style: Any) -> None:
    label, colour, marker = _WAYS[way]
    shown = [max(value, _ZERO) for value in y]
    ax.plot(x, shown, color=colour, marker=marker, markersize=3, lw=1, label=label, **style)


def _axes(ax: Any, across: str, title: str, top: float) -> None:
    from matplotlib.ticker import FuncFormatter

    ax.set_yscale("log")
    ax.set_ylim(_ZERO * 0.6, max(10.0, top * 4))
    ax.axhline(0.55, color="#cccccc", lw=0.5)

    def words(value: float, _: object) -> str:
        if value < 1:
            return ""
        return f"{value:,.0f}" if value < 1e4 else f"{value / 1e6:g} M" if value >= 1e6 else (
            f"{value / 1e3:g} k"
        )  # fmt: skip

    ax.yaxis.set_major_formatter(FuncFormatter(words))
    ax.set_yticks([_ZERO], labels=["0"], minor=True)
    ax.set_xlabel(across)
    ax.set_title(title, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(which="minor", length=0)


def draw(document: dict[str, Any], path: Path) -> None:
    """A row for each data set: missed and redundant pages by iteration with the most processes,
    missed pages in all by number of processes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 8, "axes.titlesize": 8.5, "axes.linewidth": 0.7})
    results = document["results"]
    fig, rows = pyplot.subplots(
        len(results), 3, figsize=(10, 2.35 * len(results) + 1.5), squeeze=False
    )
    most = "0"
    for axes, (name, result) in zip(rows, results.items(), strict=True):
        numbers = sorted(map(int, result["processes"]))
        most = str(numbers[-1])
        iterations = list(range(1, result["iterations"] + 1))
        needed = _column(result, most, "paper", "needed")
        missed, redundant, total = axes
        for way in ("values", "tree", "head"):
            _line(missed, iterations, _missed(result, most, way), way)
        _line(missed, iterations, needed, "needed", ls=":")
        _axes(missed, "iteration", f"{name} ({result['what']})\nmissed pages", max(needed))
        paper = _column(result, most, "paper", "redundant")
        head = _column(result, most, "head", "redundant")
        _line(redundant, iterations, paper, "values")
        _line(redundant, iterations, head, "head")
        _line(redundant, iterations, needed, "needed", ls=":")
        _axes(redundant, "iteration", "redundant pages", max(*paper, *needed))
        sums = {
            way: [sum(_missed(result, str(number), way)) for number in numbers]
            for way in ("values", "tree", "head")
        }
        for way, values in sums.items():
            _line(total, numbers, values, way)
        all_needed = [sum(_column(result, str(n), "paper", "needed")) for n in numbers]
        _line(total, numbers, all_needed, "needed", ls=":")
        _axes(total, "processes", "missed pages, all iterations", max(all_needed))
        total.set_xscale("log", base=2)
        total.set_xticks(numbers, labels=[str(number) for number in numbers])
        total.minorticks_off()
        total.set_yticks([_ZERO], labels=["0"], minor=True)
    height = fig.get_figheight()
    handles, labels = rows[0][0].get_legend_handles_labels()
    fig.suptitle(
        "Speculating where records lie: pages missed and pages read in vain", x=0.012, y=0.995,
        ha="left", va="top", fontsize=11, fontweight="bold",
    )  # fmt: skip
    fig.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0.005, 1 - 0.3 / height), ncols=2,
        frameon=False, handlelength=2.5,
    )  # fmt: skip
    sizes = ", ".join(f"{name}: {r['batch_records']:,}" for name, r in results.items())
    caption = (
        "As LMDBIO-DM, figures 11 and 12. An LMDB written by py-lmdb, 1000 records a"
        f" transaction, is read by py-lmdb in {most} processes (left, middle), each its part of"
        f" each batch (records a batch: {sizes}). Missed: touched by a process for the first time,"
        " and not among the pages that it would have fetched before. Redundant: among them, and not"
        " touched. Touches are noted page by page (the mapping is protected). Logarithmic; 0 is"
        " drawn at the bottom."
    )
    fig.text(
        0.012, 0.008, textwrap.fill(caption, 172), ha="left", va="bottom", fontsize=7.5,
        color="#444444",
    )  # fmt: skip
    fig.tight_layout(rect=(0, 0.55 / height, 1, 1 - 0.72 / height), h_pad=1.2, w_pad=1.5)
    fig.savefig(path, dpi=170)
