# SPDX-License-Identifier: Apache-2.0
"""A simulation as a picture: time by what it was spent on, as [HDMLP] figures 5.4 to 5.8, or
seconds over the number of nodes."""

from __future__ import annotations

import io
import os
import textwrap
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.report.png import matplotlib_or_error
from uffdprefetch.report.simulate import FILE_SYSTEM, OTHERS, OWN

COMPUTE, PRELOAD = "#9aa5b1", "#332288"
#: Shades of a kind of source, for its sources in their order.
SHADES = {
    FILE_SYSTEM: ("#cc3311",),
    OWN: ("#117733", "#44aa99", "#88ccaa", "#bbe3d0"),
    OTHERS: ("#ddaa33", "#eecc77", "#f5e0ad", "#faf0d8"),
}
LINES = (
    "#332288",
    "#cc3311",
    "#117733",
    "#ddaa33",
    "#88ccee",
    "#aa4499",
    "#44aa99",
    "#882255",
    "#999933",
    "#666666",
    "#0077bb",
    "#ee7733",
)
MARKS = "osD^vP*X<>ph"
#: Share of the longest bar below which a source is left out of the legend: it cannot be seen.
THIN = 0.001


def refuse_what_cannot_be_drawn(path: str) -> None:
    """Before minutes are spent on simulating; leaves what is there as it is, and nothing new.

    Raises UffdPrefetchError (exit 2).
    """
    if not path.lower().endswith(".png"):
        raise usage_error(f"--png {path}: a picture's name ends in .png")
    existed = os.path.exists(path)
    if existed and not os.path.isfile(path):
        raise usage_error(f"--png {path}: is no file: give another name")
    try:
        with open(path, "ab"):
            pass
        if not existed:
            os.unlink(os.path.realpath(path))
    except OSError as error:
        raise usage_error(f"--png: cannot write {path}: {error.strerror}") from None
    try:
        matplotlib_or_error("--png")
    except UffdPrefetchError as error:
        raise usage_error(error.message) from None


def write(document: dict[str, Any], path: str) -> None:
    """Draw ``document`` (report.simulate.document) into ``path``, as PNG.

    Raises UffdPrefetchError (exit 1) without matplotlib.
    """
    mpl = matplotlib_or_error("--png")
    nodes = {row["nodes"] for row in document["policies"]}
    figure = _scaling(mpl, document) if len(nodes) > 1 else _sources(mpl, document)
    save(figure, path)


def save(figure: Any, path: str) -> None:
    """Write a figure as PNG; raises UffdPrefetchError (exit 1) when it cannot be."""
    try:
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")  # before an older picture is lost
        _write(drawn.getvalue(), path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UffdPrefetchError(f"cannot write {path}: {why}") from None


def _write(data: bytes, path: str) -> None:
    """All of it, or no file. Raises OSError."""
    file = open(path, "wb")
    try:
        with file:
            file.write(data)
    except OSError:
        os.unlink(path)
        raise


def _colours(kinds: dict[str, str]) -> dict[str, str]:
    """Of each source, by its kind (report.simulate)."""
    colours, counted = dict[str, str](), dict.fromkeys(SHADES, 0)
    for name, kind in kinds.items():
        shades = SHADES[kind]
        colours[name] = shades[min(counted[kind], len(shades) - 1)]
        counted[kind] += 1
    return colours


def _sources(mpl: Any, document: dict[str, Any]) -> Any:
    """Stacked bars: computing, preloading, stall by the source that was waited for."""
    rows = [row for row in document["policies"] if row["seconds"] is not None]
    figure = mpl.figure.Figure(
        figsize=(7.4, 1.5 + 0.32 * max(1, len(rows))), dpi=200, layout="constrained"
    )
    axes = figure.add_subplot()
    # Rows may have storage of their own.
    kinds = {name: kind for row in rows for name, kind in row["source_kinds"].items()}
    colours = _colours(kinds)
    left = [0.0] * len(rows)
    places = range(len(rows))
    thin = max((row["seconds"] for row in rows), default=0.0) * THIN

    def stack(values: list[float], colour: str, label: str) -> None:
        if not any(value > 0 for value in values):
            return
        # A label that begins with _ is none.
        axes.barh(
            places,
            values,
            left=left,
            color=colour,
            height=0.72,
            label=label if max(values) > thin else "_",
        )
        for i, value in enumerate(values):
            left[i] += value

    stack([row["compute_seconds"] for row in rows], COMPUTE, "computing")
    stack([row["preload_seconds"] for row in rows], PRELOAD, "preloading")
    for name in kinds:
        values = [row["stall_seconds_by_source"].get(name, 0.0) for row in rows]
        stack(values, colours[name], f"waiting for {name}")
    right = max(left, default=1.0)
    digits = 1 if right >= 20 else 2 if right >= 2 else 3
    for i, row in enumerate(rows):
        upto = max(left[i], row["published_seconds"] or 0.0)
        text = f"{row['seconds']:,.{digits}f} s"
        axes.text(upto + 0.012 * right, i, text, va="center", fontsize=7)
    published = [
        (row["published_seconds"], i) for i, row in enumerate(rows) if row["published_seconds"]
    ]
    if published:
        axes.scatter(
            *zip(*published, strict=True),
            marker="|",
            s=140,
            color="black",
            zorder=3,
            label="published",
        )
    axes.set_xlim(0, 1.13 * max([right, *(p for p, _ in published)]))
    axes.set_yticks(list(places), [row["name"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.xaxis.set_major_formatter(mpl.ticker.StrMethodFormatter(f"{{x:,.{max(0, digits - 1)}f}}"))
    axes.set_title("\n".join(textwrap.wrap(document["title"], 90)), fontsize=9, loc="left")
    if rows:
        figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _scaling(mpl: Any, document: dict[str, Any]) -> Any:
    """Seconds over nodes, one line a policy."""
    figure = mpl.figure.Figure(figsize=(7.4, 4.4), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(row["name"] for row in document["policies"]))
    for i, name in enumerate(names):
        points = [
            (row["nodes"], row["seconds"])
            for row in document["policies"]
            if row["name"] == name and row["seconds"] is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                label=name,
                color=LINES[i % len(LINES)],
                marker=MARKS[i % len(MARKS)],
                markersize=4.5,
                linewidth=1.3,
            )
    counts = sorted({row["nodes"] for row in document["policies"]})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("nodes")
    axes.set_ylabel("seconds")
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_title("\n".join(textwrap.wrap(document["title"], 90)), fontsize=9, loc="left")
    axes.legend(fontsize=8, frameon=False)
    return figure
