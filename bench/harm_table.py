# SPDX-License-Identifier: Apache-2.0
"""The report of bench/harm.py: what is allowed, what a case says of its runs, the tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import told
from render import markdown_table

SCHEMA = "uffdprefetch.bench.harm/1"
PLAIN = "plain"
#: Plain, with all in memory.
WARM = "warm"
#: Seconds that a job may take beside its share of plain's: the service starts beside it.
MORE_SECONDS = 0.050
#: Bytes that may be read, of plain's, where a job takes at most so much of plain's time.
BYTES_OF_TIME = ((0.5, 2.5), (0.9, 1.5))
#: Where it gains less than that; and the bytes that are allowed beside it.
MOST_BYTES, MORE_BYTES = 1.1, 4 << 20
WITHIN = "within"
Run = dict[str, Any]
Report = dict[str, Any]


# ---- runs ------------------------------------------------------------------------------------


def rounds_of(report: Report, bed: str, case: str) -> dict[int, dict[str, Run]]:
    """A case's runs on a bed: by round, by variant."""
    rounds: dict[int, dict[str, Run]] = {}
    for run in report["runs"]:
        if (run["bed"], run["case"]) == (bed, case):
            rounds.setdefault(run["round"], {})[run["variant"]] = run
    return dict(sorted(rounds.items()))


def missing(
    report: Report, bed: str, case: str, variants: Iterable[str], rounds: int
) -> Iterator[int]:
    """Rounds of a case that lack one of the variants, or failed in one: they are run whole, as only
    what ran in turns can be compared."""
    there = rounds_of(report, bed, case)
    return (number for number in range(rounds) if not set(variants) <= set(there.get(number, ())))


def forget(report: Report, case: str, bed: str = "", number: int | None = None) -> None:
    """A case's runs and failures; of one bed and round, where they are given."""
    for part in ("runs", "failures"):
        report[part] = [
            one
            for one in report[part]
            if one["case"] != case
            or (bed and one["bed"] != bed)
            or (number is not None and one["round"] != number)
        ]


# ---- what is allowed -------------------------------------------------------------------------


def most_bytes(plain_bytes: float, time_ratio: float) -> float:
    """That a job may read. What is gained pays for bytes: never less than without a gain."""
    most = MOST_BYTES * plain_bytes + MORE_BYTES
    for most_time, share in BYTES_OF_TIME:
        if time_ratio <= most_time:
            return max(most, share * plain_bytes)
    return most


def median(runs: Sequence[Run], figure: str) -> float:
    """Of the rounds."""
    return statistics.median(run[figure] for run in runs)


def paired(plain: Sequence[Run], ours: Sequence[Run], figure: str) -> float:
    """The median of the rounds' ratios; plain and ours are pairs, a round at each place."""
    pairs = zip(plain, ours, strict=True)
    return statistics.median(b[figure] / max(a[figure], 1e-9) for a, b in pairs)


def judged(plain: Sequence[Run], ours: Sequence[Run], most_time: float) -> dict[str, Any]:
    """What the rounds say of a variant; plain and ours are pairs, a round at each place."""
    time_ratio, bytes_ratio = paired(plain, ours, "seconds"), paired(plain, ours, "bytes_read")
    plain_seconds, plain_bytes = median(plain, "seconds"), median(plain, "bytes_read")
    allowed_seconds = most_time * plain_seconds + MORE_SECONDS
    allowed_bytes = most_bytes(plain_bytes, time_ratio)
    # The ratio is paired, and so is what it is compared with.
    exceeds = [
        word
        for word, found, allowed in (
            ("time", time_ratio * plain_seconds, allowed_seconds),
            ("bytes", bytes_ratio * plain_bytes, allowed_bytes),
        )
        if found > allowed
    ]
    return {
        "rounds": len(plain),
        "plain_seconds": plain_seconds,
        "time_ratio": time_ratio,
        "allowed_time_ratio": allowed_seconds / plain_seconds,
        "plain_bytes": plain_bytes,
        "bytes_ratio": bytes_ratio,
        "allowed_bytes_ratio": allowed_bytes / max(plain_bytes, 1),
        "saved_seconds": statistics.median(
            a["seconds"] - b["seconds"] for a, b in zip(plain, ours, strict=True)
        ),
        "more_from_start_to_exit_seconds": statistics.median(
            b["total_seconds"] - a["total_seconds"] for a, b in zip(plain, ours, strict=True)
        ),
        "verdict": " and ".join(exceeds) or WITHIN,
    }


def verdicts(report: Report) -> list[dict[str, Any]]:
    """Of each case on each bed, each variant but plain."""
    found = []
    for bed in report["beds"]:
        for name, case in report["cases"].items():
            rounds = rounds_of(report, bed, name).values()
            for variant in report["variants"]:
                both = [one for one in rounds if PLAIN in one and variant in one]
                if variant == PLAIN or not both:
                    continue
                plain, ours = [one[PLAIN] for one in both], [one[variant] for one in both]
                row = judged(plain, ours, case["most_time"])
                seconds = [told.told_seconds(run["tool"]["totals"]) for run in ours]
                found.append({"bed": bed, "case": name, "variant": variant, **row,
                              "said": ours[-1]["said"],
                              "truth": told.beside(row["saved_seconds"], seconds)})  # fmt: skip
    return found


# ---- text ------------------------------------------------------------------------------------


def _cell(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["n/a", "n/a", ""]
    verdict = row["verdict"]
    return [
        f"{row['time_ratio']:.2f}",
        f"{row['bytes_ratio']:.2f}",
        "" if verdict == WITHIN else f"**{verdict}**",
    ]


def table(report: Report, rows: Sequence[dict[str, Any]], bed: str) -> str:
    """A line for each case on a bed."""
    ours = [variant for variant in report["variants"] if variant != PLAIN]
    lines = []
    for name, case in report["cases"].items():
        mine = {r["variant"]: r for r in rows if (r["bed"], r["case"]) == (bed, name)}
        if not mine:
            continue
        first = next(iter(mine.values()))
        line = [f"{name} (control)" if case["control"] else name]
        line += [f"{first['plain_seconds']:.2f}", f"{first['plain_bytes'] / 1e6:.0f}"]
        for variant in ours:
            line += _cell(mine.get(variant))
        lines.append(line)
    head = ["of plain", "plain, s", "MB"]
    for variant in ours:
        head += [f"{variant}: time", "bytes", "exceeds"]
    return markdown_table(head, lines)


def said(report: Report, rows: Sequence[dict[str, Any]], bed: str) -> str:
    """What each run's first line said, beside the seconds in the program that were saved."""
    lines = [
        [
            f"{row['case']}, {row['variant']}",
            f"{row['saved_seconds']:+.2f}",
            f"{row['more_from_start_to_exit_seconds']:+.2f}",
            (row["said"] or ["nothing"])[0].replace("|", "/"),
        ]
        for row in rows
        if row["bed"] == bed
    ]
    held = ((f"{row['case']}, {row['variant']}", row["truth"]) for row in rows if row["bed"] == bed)
    table = markdown_table(["seconds", "saved", "more from start to exit", "said"], lines)
    return f"{table}\n\nWhat each run told that it saved is {'; '.join(told.counted(held))}."


def counted(rows: Sequence[dict[str, Any]], bed: str) -> str:
    """How many cases hold, by variant."""
    mine = [row for row in rows if row["bed"] == bed]
    parts = []
    for variant in dict.fromkeys(row["variant"] for row in mine):
        these = [row for row in mine if row["variant"] == variant]
        held = sum(row["verdict"] == WITHIN for row in these)
        time = statistics.geometric_mean(row["time_ratio"] for row in these)
        count = statistics.geometric_mean(max(row["bytes_ratio"], 1e-3) for row in these)
        worst = max(these, key=lambda row: row["time_ratio"])
        parts.append(
            f"{variant}: {held} of {len(these)} within; time {time:.2f} of plain in the geometric "
            f"mean, bytes {count:.2f}; the slowest {worst['time_ratio']:.2f} ({worst['case']})."
        )
    return " ".join(parts)


def markdown(report: Report) -> str:
    """All of a report as text."""
    rows = verdicts(report)
    commits = "; ".join(f"{name}: {', '.join(of)}" for name, of in report["commits"].items())
    bytes_of_time = ", ".join(f"{b:g} at {t:g}" for t, b in reversed(BYTES_OF_TIME))
    parts = [
        f"`{report['command']}`",
        f"Linux {report['kernel']}, {report['cpus']} CPUs; {commits}. The variants in turn, each "
        "from cold; medians of the rounds, paired; every result compared. Allowed: the case's "
        f"share of plain's time (a table below has it) and {1e3 * MORE_SECONDS:.0f} ms; "
        f"{MOST_BYTES:g} of plain's bytes and {MORE_BYTES >> 20} MiB, and of less of plain's time "
        f"more: {bytes_of_time}. Seconds are those in the program, without its imports.",
    ]
    if report["proactive_reclaim"]:
        parts.append(f"Disturbed: {report['proactive_reclaim']}.")
    for bed in report["beds"]:
        if any(row["bed"] == bed for row in rows):
            parts += [f"### {bed}", counted(rows, bed), table(report, rows, bed)]
            parts += [said(report, rows, bed)]
    parts += [
        f"FAILED: {one['case']}, {one['variant']}, {one['bed']}: {one['error']}"
        for one in report["failures"]
    ]
    parts += [f"Not run: {name}: {reason}." for name, reason in report["skipped"].items()]
    return "\n\n".join(parts) + "\n"
