# SPDX-License-Identifier: Apache-2.0
"""The picture of bench/harm.py: time and bytes of each case, of plain's, by matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from harm_table import MORE_BYTES, MORE_SECONDS, MOST_BYTES, PLAIN, WITHIN, verdicts

_COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#e08214", "#542788", "#888888")
#: Ratios beyond are drawn at the edge, with their figure.
_LEAST, _MOST = 0.1, 10.0


def _ratios(ax: Any, rows: list[dict[str, Any]], report: dict[str, Any], figure: str) -> None:
    """A line for each case: its variants' ratios, and a tick where what is allowed ends."""
    names = [name for name in report["cases"] if any(row["case"] == name for row in rows)]
    places = {name: -number for number, name in enumerate(names)}
    ours = [variant for variant in report["variants"] if variant != PLAIN]
    ax.axvline(1.0, color="#888888", lw=0.8)
    for row in rows:
        number = ours.index(row["variant"])
        colour = _COLOURS[number % len(_COLOURS)]
        y = places[row["case"]] + 0.28 * (0.5 - number / max(1, len(ours) - 1))
        found, allowed = row[f"{figure}_ratio"], row[f"allowed_{figure}_ratio"]
        x = min(max(found, _LEAST), _MOST)
        over = found > allowed
        ax.plot([x], [y], marker="o", ms=4.2, color=colour, mfc=colour if over else "white",
                ls="", clip_on=False, zorder=3)  # fmt: skip
        ax.plot([allowed] * 2, [y - 0.16, y + 0.16], color=colour, lw=1.2, alpha=0.6)
        if found > _MOST:
            ax.annotate(f"{found:.0f}", (x, y), (5, -3), textcoords="offset points", fontsize=6.5)
    ax.set_xscale("log")
    ax.set_xlim(_LEAST, _MOST)
    ax.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], labels=["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    ax.minorticks_off()
    ax.set_ylim(-len(names) + 0.4, 0.6)
    ax.set_yticks(list(places.values()), labels=list(places))
    ax.grid(axis="y", color="#eeeeee", lw=0.6)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def draw(report: dict[str, Any], path: Path) -> None:
    """A row of two pictures for each bed: time, bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    pyplot.rcParams.update({"font.size": 8, "axes.titlesize": 8.5, "axes.linewidth": 0.7})
    rows = verdicts(report)
    beds = [bed for bed in report["beds"] if any(row["bed"] == bed for row in rows)]
    if not beds:
        raise ValueError("nothing was measured: there is nothing to draw")
    counts = [len({row["case"] for row in rows if row["bed"] == bed}) for bed in beds]
    height = sum(0.2 * count + 0.75 for count in counts) + 1.3
    fig, axes = pyplot.subplots(
        len(beds), 2, figsize=(10, height), sharey="row", squeeze=False, height_ratios=counts
    )
    for (time, size), bed in zip(axes, beds, strict=True):
        mine = [row for row in rows if row["bed"] == bed]
        _ratios(time, mine, report, "time")
        _ratios(size, mine, report, "bytes")
        time.set_title(f"{bed}: seconds in the program, of plain's", loc="left")
        size.set_title("bytes over the link, of plain's", loc="left")
    ours = [variant for variant in report["variants"] if variant != PLAIN]
    handles = [
        Line2D([], [], color=_COLOURS[number % len(_COLOURS)], marker="o", ls="", label=variant)
        for number, variant in enumerate(ours)
    ]
    over = sum(row["verdict"] != WITHIN for row in rows)
    fig.suptitle(
        f"What wrong guesses cost: {over} of {len(rows)} exceed what is allowed", x=0.012, y=0.995,
        ha="left", va="top", fontsize=11, fontweight="bold",
    )  # fmt: skip
    fig.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.005, 1 - 0.28 / height),
        ncols=len(ours), frameon=False,
    )  # fmt: skip
    caption = (
        "Each dot is a job under wrap, the median of its paired rounds, each from cold; filled:"
        " more than allowed, which ends at the tick of its colour. Time: 1.02 of plain (a walk"
        f" beside a random reader 1.05) and {1e3 * MORE_SECONDS:.0f} ms. Bytes: {MOST_BYTES:g} of"
        f" plain's and {MORE_BYTES >> 20} MiB; 1.5 at 0.9 of plain's time, 2.5 at half of it."
        " Logarithmic; what is beyond is at the edge."
    )
    fig.text(
        0.012, 0.06 / height, textwrap.fill(caption, 172), ha="left", va="bottom", fontsize=7.5,
        color="#444444",
    )  # fmt: skip
    fig.tight_layout(rect=(0, 0.42 / height, 1, 1 - 0.5 / height), h_pad=1.0, w_pad=1.5)
    fig.savefig(path, dpi=170)
    pyplot.close(fig)
