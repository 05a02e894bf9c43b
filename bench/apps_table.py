# SPDX-License-Identifier: Apache-2.0
"""The report of bench/apps.py as text: medians of the rounds. Pure."""

from __future__ import annotations

import statistics
from typing import Any

from render import markdown_table, number

SCHEMA = "uffdprefetch.bench.apps/1"
PLAIN, WRAP, POOL, CAT, PEER = "plain", "wrap", "pool", "cat", "peer"
COLUMNS = (PLAIN, WRAP, POOL, CAT, PEER)
TITLES = {PLAIN: "plain", WRAP: "wrap", POOL: "wrap, pool", CAT: "cat first", PEER: "by hand"}
#: Share of a file that may be missing in memory after `cat` without being told.
NOT_WARM_SHARE = 0.01
Run = dict[str, Any]
Report = dict[str, Any]


def limit_seconds(run: Run, bandwidth: int) -> float:
    """Of the round of a run after `cat`: the larger of its seconds and the bytes' transfer."""
    transfer_seconds = run["file_bytes"] / bandwidth if bandwidth else 0.0
    return max(run["seconds"], transfer_seconds)


def rounds_of(report: Report, program: str) -> list[dict[str, Run]]:
    """A program's runs: round by round, by column."""
    rounds: dict[int, dict[str, Run]] = {}
    for run in report["runs"]:
        if run["program"] == program:
            rounds.setdefault(run["round"], {})[run["column"]] = run
    return list(rounds.values())


def median_of(rounds: list[dict[str, Run]], column: str, *figures: str) -> float | None:
    """Median over the rounds of the sum of some figures; None where no round has the column."""
    values = [sum(one[column][f] for f in figures) for one in rounds if column in one]
    return statistics.median(values) if values else None


def to_limit(rounds: list[dict[str, Run]], column: str, bandwidth: int) -> float | None:
    """Median of the ratio of a column's seconds to the limit of the same round."""
    ratios = [
        (one[column]["seconds"] + one[column]["before_seconds"])
        / limit_seconds(one[CAT], bandwidth)
        for one in rounds
        if column in one and CAT in one
    ]
    return statistics.median(ratios) if ratios else None


def columns_of(report: Report) -> list[str]:
    """Those that any run has."""
    return [name for name in COLUMNS if any(run["column"] == name for run in report["runs"])]


def seconds_table(report: Report) -> str:
    """Seconds in the program, and from start to exit."""
    bandwidth = report["bed"]["bandwidth_bytes_per_second"]
    columns, rows = columns_of(report), []
    for program in report["programs"]:
        rounds = rounds_of(report, program["name"])
        limits = [limit_seconds(one[CAT], bandwidth) for one in rounds if CAT in one]
        row = [program["name"], f"{program['file_bytes'] / 1e6:.0f}"]
        row.append(number(statistics.median(limits) if limits else None))
        for column in columns:
            inner = median_of(rounds, column, "seconds")
            total = median_of(rounds, column, "before_seconds", "total_seconds")
            before = median_of(rounds, column, "before_seconds")
            if inner is None:
                row.append("n/a")
                continue
            first = f"{before:.2f} + " if column in (CAT, PEER) and before and before > 0.01 else ""
            row.append(f"{first}{inner:.2f} ({number(total)})")
        for column in (PLAIN, WRAP, POOL):
            if column in columns:
                row.append(number(to_limit(rounds, column, bandwidth)))
        rows.append(row)
    head = ["seconds in the program (start to exit)", "MB", "limit", *(TITLES[c] for c in columns)]
    head += [f"{TITLES[c]} / limit" for c in (PLAIN, WRAP, POOL) if c in columns]
    return markdown_table(head, rows)


def counters_table(report: Report) -> str:
    """What the bed and the kernel have counted."""
    columns, rows = columns_of(report), []
    for program in report["programs"]:
        rounds, row = rounds_of(report, program["name"]), [program["name"]]
        for column in columns:
            read = median_of(rounds, column, "bytes_read")
            requests = median_of(rounds, column, "requests")
            faults = median_of(rounds, column, "major_faults")
            row.append(
                "n/a" if read is None
                else f"{read / program['file_bytes']:.3f} / {requests:.0f} / {faults:.0f}"
            )  # fmt: skip
        rows.append(row)
    head = ["bytes read / of the files, requests, major faults", *(TITLES[c] for c in columns)]
    return markdown_table(head, rows)


def gained_table(report: Report) -> str:
    """What the summary says that was gained, beside what was."""
    rows = []
    for program in report["programs"]:
        rounds = rounds_of(report, program["name"])
        both = [one for one in rounds if PLAIN in one and WRAP in one]
        if not both:
            continue
        told = [one[WRAP]["tool"]["totals"].get("saved_at_least_seconds") for one in both]
        row = [program["name"]]
        for figure in ("seconds", "total_seconds"):
            saved = [one[PLAIN][figure] - one[WRAP][figure] for one in both]
            row.append(number(statistics.median(saved)))
        known = [one for one in told if one is not None]
        row.append(number(statistics.median(known)) if known else "n/a")
        row.append(" ".join("n/a" if one is None else f"{one:.2f}" for one in told))
        rows.append(row)
    head = ["saved by wrap, s", "in the program", "start to exit", "told, at least", "each round"]
    return markdown_table(head, rows)


def conditions(report: Report) -> str:
    """How it was measured."""
    bed = report["bed"]
    lines = [
        f"`{report['command']}`",
        "",
        f"{report['date']}, Linux {report['kernel']}, {report['cpus']} CPUs. Bed: "
        f"{bed['bandwidth_bytes_per_second'] / 1e6:g} MB/s, {bed['latency_us'] / 1000:g} ms, "
        f"read_ahead_kb {bed['read_ahead_kb']}. {report['pairs']} rounds, the columns in turn, "
        "each from cold; medians. limit: the larger of the seconds in the program after `cat` and "
        "of the bytes over the bandwidth. By hand: of weights the prefetcher of "
        "bench/programs/prefetcher.py, beside the loader; else `vmtouch -t` first.",
    ]
    if report["proactive_reclaim"]:
        lines += ["", f"Disturbed: {report['proactive_reclaim']}."]
    gone = [
        1 - run["resident_bytes_at_start"] / run["file_bytes"]
        for run in report["runs"]
        if run["column"] == CAT
    ]
    if gone and max(gone) > NOT_WARM_SHARE:
        lines += ["", f"Disturbed: after `cat` up to {max(gone):.1%} of the files had gone again."]
    lines += [f"\nLeft out: {one['what']}: {one['reason']}." for one in report["skipped"]]
    lines += [
        f"\nFAILED: {one['program']}, {one['column']}: {one['error']}" for one in report["failures"]
    ]
    return "\n".join(lines)


def markdown(report: Report) -> str:
    """All of a report as text."""
    parts = ["## Real programs", conditions(report), seconds_table(report), counters_table(report)]
    if {PLAIN, WRAP} <= set(columns_of(report)):
        parts.append(gained_table(report))
    return "\n\n".join(parts) + "\n"
