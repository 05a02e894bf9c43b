# SPDX-License-Identifier: Apache-2.0
"""The report of bench/never_slower.py: what a row says of its pairs, and the table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from render import markdown_table
from runs import bootstrap_interval

SCHEMA = "uffdprefetch.bench.never_slower/1"
#: What `wrap` may take from start to exit: what plain takes and this share of it, what a bare
#: interpreter takes there, and this.
SHARE, SECONDS = 0.02, 0.020
WITHIN, EXCEEDS, NOT_DECIDED = "within", "exceeds", "not decided"
Row = dict[str, Any]
Report = dict[str, Any]


def judged(plain: Sequence[float], wrap: Sequence[float], bare: Sequence[float]) -> dict[str, Any]:
    """What the pairs say, in seconds from start to exit: the median of the paired differences,
    its bootstrap 95 % interval, what is allowed, and whether that holds. The three are of equal
    length, a pair at each place."""
    differences = [ours - without for without, ours in zip(plain, wrap, strict=True)]
    low, high = bootstrap_interval(differences)
    allowed = SHARE * statistics.median(plain) + statistics.median(bare) + SECONDS
    return {
        "plain_seconds": statistics.median(plain),
        "difference_seconds": statistics.median(differences),
        "difference_interval_seconds": [low, high],
        "allowed_seconds": allowed,
        "verdict": WITHIN if high <= allowed else EXCEEDS if low > allowed else NOT_DECIDED,
    }


def to_measure(
    names: Iterable[str], globs: str, there: Iterable[str], again: bool = False
) -> list[str]:
    """The rows of one of these globs (with semicolons, as names have commas); not those that are
    ``there``, except ``again``."""
    done = frozenset() if again else frozenset(there)
    patterns = globs.split(";")
    return [
        name
        for name in names
        if name not in done and any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def table(report: Report) -> str:
    """A line for each row."""
    lines = []
    for name, row in report["rows"].items():
        low, high = map(_milliseconds, row["difference_interval_seconds"])
        lines.append(
            [
                name,
                f"{row['file_bytes'] / 1e6:.0f}",
                str(len(row["runs"])),
                f"{row['plain_seconds']:.2f}",
                f"{_milliseconds(row['difference_seconds'])} [{low}, {high}]",
                _milliseconds(row["allowed_seconds"]),
                row["verdict"] if row["verdict"] == WITHIN else f"**{row['verdict']}**",
            ]
        )
    head = ["from start to exit", "MB", "pairs", "plain, s", "wrap - plain, ms", "allowed, ms", ""]
    return markdown_table(head, lines)


def markdown(report: Report) -> str:
    """All of a report as text."""
    rows = report["rows"].values()
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    dates = sorted(row["date"] for row in rows)
    parts = [
        f"`{report['command']}`",
        f"{dates[0]} to {dates[-1]}, Linux {report['kernel']}, {report['cpus']} CPUs, of commit "
        f"{commits}. Pairs of plain and wrap in random turn; medians, and in brackets the 95 % "
        f"bootstrap interval of the median of the paired differences. Allowed: {SHARE:.0%} of "
        f"plain, what a bare `python3 -I -c pass` takes there, and {1e3 * SECONDS:.0f} ms.",
    ] if rows else ["Nothing was measured."]  # fmt: skip
    if report["proactive_reclaim"]:
        parts.append(f"Disturbed: {report['proactive_reclaim']}.")
    parts.append(table(report))
    failures = report["failures"].items()
    parts += [f"FAILED: {name}: {error}" for name, error in failures]
    parts += [f"Left out: {name}: {reason}." for name, reason in report["skipped"].items()]
    return "\n\n".join(parts) + "\n"
