# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of a measurement: `python bench/render.py F.json [-o TABLE.md] [--png DIR]`.

Reads what bench/run.py wrote, nothing else. A table says which command made it, on what, and how
many rounds; a picture's caption says what is on it. Pictures need matplotlib.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reports import Report, load

from uffdprefetch.base.errors import UffdPrefetchError

SCHEMA = "uffdprefetch.bench/1"
BASELINE = "plain mmap"
WARM = "warm cache"
TOOL = "uffdprefetch"
# Share of a run's wall time, over all CPUs, from which a report mentions steal.
DISTURBED_STEAL_SHARE = 0.02


# ---- pure: a report to text -----------------------------------------------------------------


def number(value: float | None, digits: int = 2) -> str:
    """A figure for a table; n/a for None."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def ratio(value: float | None, interval: Sequence[float] | None) -> str:
    """`1.04 [1.02, 1.07]`, or n/a."""
    if value is None:
        return "n/a"
    return (
        f"{value:.2f}"
        if interval is None
        else f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
    )


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def conditions(report: Report) -> str:
    """The paragraph above a table: command, machine, bed, data, disturbance."""
    bed, data = report["bed"], report["dataset"]
    lines = [
        f"`{report['command']}`",
        "",
        f"{report['date']}, Linux {report['kernel']}, {report['cpus']} CPUs. Bed: "
        f"{bed['bandwidth_bytes_per_second'] / 1e6:g} MB/s, {bed['latency_us'] / 1000:g} ms, "
        f"read_ahead_kb {bed['read_ahead_kb']}, {bed['max_background']} requests in flight at "
        f"most. Data: {data['records']} records, {data['file_bytes'] / 1e9:.2f} GB. "
        f"{report['pairs']} rounds, the variants in turn; medians, and in brackets the 95 % "
        "bootstrap interval of the median ratio within a round. limit = max(warm run, bytes / "
        "bandwidth) of the same round.",
    ]
    disturbed = disturbances(report)
    if disturbed:
        lines += ["", "Disturbed: " + " ".join(disturbed)]
    return "\n".join(lines)


def disturbances(report: Report) -> list[str]:
    """Disturbances of the measurement, in sentences."""
    found = []
    runs = report["runs"]
    capacity = report["cpus"] or 1
    stolen = [
        run
        for run in runs
        if run["steal_seconds"] > DISTURBED_STEAL_SHARE * run["wall_seconds"] * capacity
    ]
    if stolen:
        worst = max(run["steal_seconds"] / run["wall_seconds"] / capacity for run in stolen)
        found.append(
            f"in {len(stolen)} of {len(runs)} runs the hypervisor took more than "
            f"{DISTURBED_STEAL_SHARE:.0%} of the CPU time (at most {worst:.1%})."
        )
    astray = [run for run in runs if run["as_prepared"] is False]
    if astray:
        found.append(f"{len(astray)} runs were not as cold or as warm as they were prepared.")
    if report.get("proactive_reclaim"):
        found.append(f"{report['proactive_reclaim']}.")
    errors: dict[str, list[str]] = {}
    for failure in report.get("failures", []):
        errors.setdefault(failure["variant"], []).append(failure["error"])
    for variant, texts in errors.items():
        found.append(f"FAILED: {variant}, {len(texts)} runs, the first with: {texts[0]}.")
    return found


def median_of(report: Report, case: str, variant: str, *path: str) -> float | None:
    """Median over the rounds of a figure of a run, by its path of keys; None where it is null."""
    values = []
    for run in report["runs"]:
        if (run["case"], run["variant"]) != (case, variant):
            continue
        value: Any = run
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            values.append(float(value))
    return statistics.median(values) if values else None


def case_table(report: Report, case: str) -> str:
    """One case: a row for each variant, a row for each variant, in the order measured."""
    rows = []
    for row in (row for row in report["summary"] if row["case"] == case):
        name = row["variant"]

        def of(*path: str, name: str = name) -> float | None:
            return median_of(report, case, name, *path)

        largest = of("bed", "largest_request_bytes")
        rows.append(
            [
                f"**{name}**" if name == TOOL else name,
                number(row["median_seconds"]),
                number(row["median_stall_seconds"]),
                ratio(row["ratio_to_limit"], row["ratio_to_limit_interval"]),
                ratio(row["ratio_to_baseline"], row["ratio_to_baseline_interval"]),
                number(of("bed", "requests"), 0),
                number(None if largest is None else largest / 1024, 0),
                number(of("bed", "most_in_flight"), 0),
                number(of("children_cpu_seconds")),
                str(row["runs"]),
            ]
        )
    head = [
        case,
        "epoch 1 s",
        "stall s",
        "ratio to limit",
        "ratio to plain",
        "requests",
        "largest KiB",
        "most in flight",
        "CPU s",
        "runs",
    ]
    return markdown_table(head, rows)


def overview(report: Report) -> str:
    """All cases side by side: ratio to limit (median) per variant."""
    cases = list(dict.fromkeys(row["case"] for row in report["summary"]))
    variants = list(dict.fromkeys(row["variant"] for row in report["summary"]))
    found = {(row["case"], row["variant"]): row["ratio_to_limit"] for row in report["summary"]}
    rows = [[name, *(number(found.get((case, name))) for case in cases)] for name in variants]
    return markdown_table(["ratio to limit", *cases], rows)


_SWEEP = re.compile(r"fixed size (\d+) distance (\d+) MiB")


def sweep_cells(report: Report) -> dict[tuple[int, int], float]:
    """Median seconds by (size, distance) in MiB of the runs of `--policy fixed`."""
    cells = {}
    for row in report["summary"]:
        match = _SWEEP.fullmatch(row["variant"])
        if match:
            cells[int(match[1]), int(match[2])] = row["median_seconds"]
    return cells


def sweep_table(report: Report) -> str:
    """[Haderbache] figure 8 as a table: seconds by size and distance."""
    cells = sweep_cells(report)
    sizes = sorted({size for size, _ in cells})
    distances = sorted({distance for _, distance in cells})
    rows = [
        [f"size {size} MiB", *(number(cells.get((size, distance))) for distance in distances)]
        for size in sizes
    ]
    return markdown_table(["epoch 1 s", *(f"distance {d} MiB" for d in distances)], rows)


def timeline_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The bins of the tool's summary (docs/summary-schema.md, `timeline`), each with its start.

    `seconds` counts from the service's start, which is the job's within its start-up time.
    """
    timeline = (run["tool_summary"] or {}).get("timeline")
    if not isinstance(timeline, dict) or not isinstance(timeline.get("bins"), list):
        return []
    return [
        {"seconds": number * timeline["bin_seconds"], **bin_}
        for number, bin_ in enumerate(timeline["bins"])
    ]


def timeline_table(report: Report) -> str | None:
    """What the tool's summary says of its window over time; None when it says nothing."""
    for run in report["runs"]:
        timeline = timeline_of(run)
        if timeline:
            names = [name for name in timeline[0] if _plain(timeline[0][name])]
            rows = [[_cell(point.get(name)) for name in names] for point in _thin(timeline, 20)]
            return markdown_table(names, rows)
    return None


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "n/a" if value is None else str(value)


def _thin(points: Sequence[Any], most: int) -> list[Any]:
    step = max(1, -(-len(points) // most))
    return list(points[::step])


def markdown(report: Report) -> str:
    """The whole text of a report."""
    cases = list(dict.fromkeys(row["case"] for row in report["summary"]))
    parts = [f"## {report['suite']}", conditions(report)]
    if len(cases) > 1:
        parts.append(overview(report))
    parts += [case_table(report, case) for case in cases]
    if sweep_cells(report):
        parts.append(sweep_table(report))
    if report["suite"] == "adapt":
        timeline = timeline_table(report)
        parts.append(timeline or "The tool's summary holds no timeline.")
    if report["skipped"]:
        parts.append(
            "Not run: "
            + "; ".join(f"{one['variant']} ({one['reason']})" for one in report["skipped"])
            + "."
        )
    return "\n\n".join(parts) + "\n"


# ---- pictures -------------------------------------------------------------------------------


def draw_cases(report: Report, directory: Path) -> list[Path]:
    """A picture per case: bars of the ratio to the limit (else seconds), with intervals."""
    import matplotlib.pyplot as plt

    made = []
    for case in dict.fromkeys(row["case"] for row in report["summary"]):
        rows = [row for row in report["summary"] if row["case"] == case][::-1]
        as_ratio = all(row["ratio_to_limit"] is not None for row in rows)
        key = "ratio_to_limit" if as_ratio else "median_seconds"
        values = [row[key] for row in rows]
        figure, axes = plt.subplots(figsize=(8, 1.1 + 0.4 * len(rows)), layout="constrained")
        colours = [_colour(row["variant"]) for row in rows]
        errors = None
        if as_ratio:
            spans = [row["ratio_to_limit_interval"] for row in rows]
            errors = [
                [max(0.0, v - lo) for v, (lo, _) in zip(values, spans, strict=True)],
                [max(0.0, hi - v) for v, (_, hi) in zip(values, spans, strict=True)],
            ]
            axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        bars = axes.barh(
            [row["variant"] for row in rows], values, 0.62, color=colours, xerr=errors,
            error_kw={"elinewidth": 1, "capsize": 3},
        )  # fmt: skip
        axes.bar_label(bars, fmt="%.2f", padding=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.12)
        axes.set_xlabel(
            "epoch 1 over the limit (1 = as fast as can be)" if as_ratio else "epoch 1, seconds"
        )
        rounds = f"medians of {rows[0]['runs']} rounds, 95 % intervals"
        if rows[0]["runs"] == 1:
            rounds = "one round"
        axes.set_title(f"{case}: {rounds}", loc="left", fontsize=11, fontweight="bold")
        name = re.sub(r"[^a-z0-9.]+", "-", f"{report['suite']}-{case}".lower())
        made.append(directory / f"{name}.png")
        figure.savefig(made[-1], dpi=150)
        plt.close(figure)
    return made


def _colour(variant: str) -> str:
    if variant == TOOL or variant.startswith("fixed"):
        return "#1b7837"
    return {BASELINE: "#b2182b", WARM: "#878787"}.get(variant, "#92a8c9")


def draw_sweep(report: Report, directory: Path) -> list[Path]:
    """[Haderbache] figure 8: seconds over distance, a line for each size."""
    cells = sweep_cells(report)
    if not cells:
        return []
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for size in sorted({size for size, _ in cells}):
        points = sorted((d, seconds) for (s, d), seconds in cells.items() if s == size)
        axes.plot([d for d, _ in points], [s for _, s in points], marker="o", label=f"{size} MiB")
    for row in report["summary"]:
        if row["case"].startswith("sweep") and row["variant"] in (BASELINE, WARM):
            axes.axhline(
                row["median_seconds"],
                color=_colour(row["variant"]),
                linestyle="--",
                label=row["variant"],
            )
    axes.set_xlabel("distance between checkpoints, MiB")
    axes.set_ylabel("epoch 1, seconds")
    axes.set_ylim(bottom=0)
    axes.set_title("--policy fixed: prefetch size and checkpoint distance", fontsize=10)
    axes.legend(title="size", fontsize=8)
    path = directory / f"{report['suite']}-sweep-lines.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]


#: What is drawn of the tool's own timeline over the link's bandwidth: key, words, colour, style.
_RATES = (
    ("bandwidth_bytes_per_second", "measured by uffdprefetch", "#1f6fb2", "-"),
    ("reader_bytes_per_second", "what the reader got", "#d9822b", "--"),
)


def draw_timeline(report: Report, directory: Path) -> list[Path]:
    """The tool's own timeline of the first run that has one: what the link gave, what was measured
    of it and what the reader got; and how far ahead of it was asked for."""
    for run in report["runs"]:
        timeline = timeline_of(run)
        if not any(point.get("window_bytes") for point in timeline or ()):
            continue
        import matplotlib.pyplot as plt

        figure, (rates, window) = plt.subplots(
            2, 1, figsize=(8, 4.6), sharex=True, layout="constrained",
            gridspec_kw={"height_ratios": [2, 1]},
        )  # fmt: skip
        end = timeline[-1]["seconds"]
        steps = [(e["seconds"], e["bandwidth_bytes_per_second"] / 1e6) for e in run["events"]]
        if steps:
            times, values = [t for t, _ in steps] + [end], [v for _, v in steps]
            rates.stairs(values, times, fill=True, color="#dfe4e8", label="the link gives")
        for key, words, colour, style in _RATES:
            points = [(p["seconds"], p[key] / 1e6) for p in timeline if p.get(key) is not None]
            rates.step(
                [t for t, _ in points], [v for _, v in points], style, where="post",
                color=colour, label=words,
            )  # fmt: skip
        rates.set_ylabel("MB/s")
        rates.legend(frameon=False, fontsize=9)
        points = [(p["seconds"], p["window_bytes"] / 1e6) for p in timeline if p["window_bytes"]]
        window.fill_between(
            [t for t, _ in points], [v for _, v in points], step="post", color="#1f6fb2", alpha=0.35
        )
        window.set_ylabel("MB asked for ahead")
        window.set_xlabel("seconds (the tool's clock starts some tenths of a second later)")
        for axes in (rates, window):
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
        changes = ", ".join(f"{value:g}" for _, value in steps)
        rates.set_title(
            f"The link changes during a run ({changes} MB/s)" if steps else "A run over time",
            loc="left", fontsize=11, fontweight="bold",
        )  # fmt: skip
        path = directory / f"{report['suite']}-timeline.png"
        figure.savefig(path, dpi=150)
        plt.close(figure)
        return [path]
    return []


# ---- command --------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Render; 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="bench/render.py", description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, nargs="+", help="what bench/run.py --json wrote")
    parser.add_argument("-o", "--output", type=Path, help="Markdown file (default: stdout)")
    parser.add_argument("--png", type=Path, metavar="DIR", help="also draw pictures, in DIR")
    args = parser.parse_args(argv)
    try:
        reports = [load(path, SCHEMA) for path in args.report]
        text = "\n".join(markdown(report) for report in reports)
        if args.output:
            args.output.write_text(text)
        else:
            print(text, end="")
        if args.png:
            try:
                import matplotlib
            except ImportError:
                print("render: pictures need matplotlib: pip install matplotlib", file=sys.stderr)
                return 1
            matplotlib.use("agg")
            args.png.mkdir(parents=True, exist_ok=True)
            for report in reports:
                for draw in (draw_cases, draw_sweep, draw_timeline):
                    for path in draw(report, args.png):
                        print(f"render: {path}", file=sys.stderr)
    except (UffdPrefetchError, OSError, ValueError) as error:
        print(f"render: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
