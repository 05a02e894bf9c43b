# SPDX-License-Identifier: Apache-2.0
"""The report of bench/reads.py: what is allowed, the tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harm_table import MORE_BYTES, MORE_SECONDS, PLAIN, WARM, WITHIN, median, paired, rounds_of
from reads_cases import Limit
from render import markdown_table, number

SCHEMA = "uffdprefetch.bench.reads/1"
#: Of the limit that a job may take; MORE_SECONDS beside it, as nothing is known of it at first.
MOST_OF_LIMIT = {Limit.LARGER.value: 1.05, Limit.SUM.value: 1.10}
#: Of plain's bytes that a job may read whose reads are nobody's to guess; MORE_BYTES beside it.
MOST_BYTES = 1.05
Run = dict[str, Any]
Report = dict[str, Any]


def limit_seconds(case: dict[str, Any], rounds: dict[str, Run], bandwidth: int) -> float | None:
    """Of a round; None where a job has no limit, or no warm run there."""
    warm = rounds.get(WARM)
    if warm is None or case["limit"] == Limit.NONE.value:
        return None
    transfer_seconds = warm["file_bytes"] / bandwidth
    if case["limit"] == Limit.SUM.value:
        return float(transfer_seconds + warm["seconds"])
    return float(max(transfer_seconds, warm["seconds"]))


def judged(
    case: dict[str, Any], plain: Sequence[Run], ours: Sequence[Run], limits: Sequence[float | None]
) -> dict[str, Any]:
    """What the rounds say of a variant; each list has a round at each place."""
    plain_seconds, time_ratio = median(plain, "seconds"), paired(plain, ours, "seconds")
    of_limit = [
        (run["seconds"] / limit, (run["seconds"] - MORE_SECONDS) / limit)
        for run, limit in zip(ours, limits, strict=True)
        if limit is not None
    ]
    exceeds = []
    if case["limit"] == Limit.NONE.value:
        if time_ratio * plain_seconds > case["most_time"] * plain_seconds + MORE_SECONDS:
            exceeds.append("time")
        more_bytes = [
            run["bytes_read"] - MOST_BYTES * before["bytes_read"]
            for before, run in zip(plain, ours, strict=True)
        ]
        if statistics.median(more_bytes) > MORE_BYTES:
            exceeds.append("bytes")
    elif of_limit:
        after_begin = statistics.median(ratio for _, ratio in of_limit)
        if after_begin > MOST_OF_LIMIT[case["limit"]]:
            exceeds.append("limit")
    known = [limit for limit in limits if limit is not None]
    return {
        "rounds": len(ours),
        "seconds": median(ours, "seconds"),
        "total_seconds": median(ours, "total_seconds"),
        "plain_seconds": plain_seconds,
        "time_ratio": time_ratio,
        "bytes_ratio": paired(plain, ours, "bytes_read") if median(plain, "bytes_read") else None,
        "limit_seconds": statistics.median(known) if known else None,
        "limit_ratio": statistics.median(ratio for ratio, _ in of_limit) if of_limit else None,
        "verdict": " and ".join(exceeds) or WITHIN,
    }


def verdicts(report: Report) -> list[dict[str, Any]]:
    """Of each case on each bed, each variant; of plain against itself."""
    found = []
    for bed in report["beds"]:
        bandwidth = report["settings"].get(bed, {}).get("bandwidth_bytes_per_second")
        for name, case in report["cases"].items():
            rounds = rounds_of(report, bed, name).values()
            for variant in report["variants"]:
                both = [one for one in rounds if PLAIN in one and variant in one]
                if variant == WARM or not both:
                    continue
                limits = [limit_seconds(case, one, bandwidth) for one in both]
                ours = [one[variant] for one in both]
                row = judged(case, [one[PLAIN] for one in both], ours, limits)
                if variant == PLAIN:
                    row["verdict"] = WITHIN
                found.append({"bed": bed, "case": name, "variant": variant, **row, "runs": ours})
    return found


# ---- text ------------------------------------------------------------------------------------


def _by_case(rows: Sequence[dict[str, Any]], bed: str) -> dict[str, dict[str, dict[str, Any]]]:
    """A bed's rows: by case, by variant."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["bed"] == bed:
            found.setdefault(row["case"], {})[row["variant"]] = row
    return found


def seconds_table(report: Report, rows: Sequence[dict[str, Any]], bed: str) -> str:
    """Seconds in the program, of plain and of the limit."""
    ours = [variant for variant in report["variants"] if variant not in (PLAIN, WARM)]
    lines = []
    for name, mine in _by_case(rows, bed).items():
        plain = mine[PLAIN]
        line = [name, str(plain["rounds"]), number(plain["limit_seconds"])]
        line += [number(plain["seconds"]), number(plain["limit_ratio"])]
        for variant in ours:
            row = mine.get(variant)
            if row is None:
                line += ["n/a"] * 4 + [""]
                continue
            line += [number(row[name]) for name in ("seconds", "time_ratio", "bytes_ratio")]
            line.append(number(row["limit_ratio"]))
            line.append("" if row["verdict"] == WITHIN else f"**{row['verdict']}**")
        lines.append(line)
    head = ["seconds in the program", "rounds", "limit", PLAIN, "of limit"]
    for variant in ours:
        head += [variant, "of plain", "bytes, of plain's", "of limit", "exceeds"]
    return markdown_table(head, lines)


def service_seconds(run: Run) -> float | None:
    """CPU seconds of the service with its workers, as the summary has them."""
    service = (run["tool"] or {}).get("service")
    if not service:
        return None
    return float(service["cpu_seconds"] + service["worker_cpu_seconds"])


def requests_table(report: Report, rows: Sequence[dict[str, Any]], bed: str) -> str:
    """What the bed has counted, and what it took beside the program."""
    lines = []
    for name, mine in _by_case(rows, bed).items():
        for variant, row in mine.items():
            runs = row["runs"]
            used = [seconds for run in runs if (seconds := service_seconds(run)) is not None]
            lines.append(
                [
                    f"{name}, {variant}",
                    f"{median(runs, 'bytes_read') / 1e6:.1f}",
                    f"{median(runs, 'requests'):.0f}",
                    *(f"{median(runs, what):.0f}" for what in ("lookups", "opens")),
                    number(row["total_seconds"]),
                    number(median(runs, "program_cpu_seconds")),
                    number(statistics.median(used)) if used else "n/a",
                ]
            )
    head = ["over the link", "MB", "requests", "lookups", "opens", "start to exit, s"]
    return markdown_table([*head, "program, CPU s", "service, CPU s"], lines)


def said(rows: Sequence[dict[str, Any]], bed: str) -> str:
    """What the last run of each said."""
    lines = [
        [f"{row['case']}, {row['variant']}", " / ".join(row["runs"][-1]["said"]).replace("|", "/")]
        for row in rows
        if row["bed"] == bed and row["runs"][-1]["tool"] is not None
    ]
    return markdown_table(["the summary", "said"], lines)


def counted(rows: Sequence[dict[str, Any]], bed: str) -> str:
    """How many cases hold, by variant."""
    parts = []
    mine = [row for row in rows if row["bed"] == bed and row["variant"] != PLAIN]
    for variant in dict.fromkeys(row["variant"] for row in mine):
        these = [row for row in mine if row["variant"] == variant]
        held = sum(row["verdict"] == WITHIN for row in these)
        time = statistics.geometric_mean(row["time_ratio"] for row in these)
        parts.append(
            f"{variant}: {held} of {len(these)} within; time {time:.2f} of plain in the mean."
        )
    return " ".join(parts)


def markdown(report: Report) -> str:
    """All of a report as text."""
    rows = verdicts(report)
    commits = "; ".join(f"{name}: {', '.join(of)}" for name, of in report["commits"].items())
    limits = " and ".join(f"{MOST_OF_LIMIT[limit.value]:g}" for limit in (Limit.LARGER, Limit.SUM))
    parts = [
        f"`{report['command']}`",
        f"Linux {report['kernel']}, {report['cpus']} CPUs; {commits}. The variants in turn, each "
        "on a mount of its own, so nothing is in memory; medians of the rounds, ratios paired; "
        "every result compared. Limit: of streams the larger of bytes over bandwidth and of the "
        f"seconds with all in memory, of small files their sum; allowed are {limits} of it. "
        f"Of harm.*: the case's share of plain's time, and {MOST_BYTES:g} of plain's bytes and "
        f"{MORE_BYTES >> 20} MiB. {1e3 * MORE_SECONDS:.0f} ms are allowed beside. Seconds are "
        "those in the program, without its imports.",
    ]
    if report["proactive_reclaim"]:
        parts.append(f"Disturbed: {report['proactive_reclaim']}.")
    for bed in report["beds"]:
        if any(row["bed"] == bed for row in rows):
            parts += [f"### {bed}", counted(rows, bed), seconds_table(report, rows, bed)]
            parts += [requests_table(report, rows, bed), said(rows, bed)]
    parts += [
        f"FAILED: {one['case']}, {one['variant']}, {one['bed']}: {one['error']}"
        for one in report["failures"]
    ]
    parts += [f"Not run: {name}: {reason}." for name, reason in report["skipped"].items()]
    return "\n\n".join(part for part in parts if part) + "\n"
