# SPDX-License-Identifier: Apache-2.0
"""What the rules of findings.py share: a finding's shape, and sums over the report. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from uffdprefetch.base.units import format_duration, format_size

Found = dict[str, Any]

MIB = 1 << 20
#: Severities of a cost: its share of the time of all ranks, from which it is one.
HIGH, MEDIUM = 0.2, 0.05


class Report:
    """A report to look things up in."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.trace: dict[str, Any] = document["trace"]
        self.files: list[dict[str, Any]] = document["files"]
        self.readers: list[dict[str, Any]] = document["readers"]
        self.others: list[dict[str, Any]] = document["others"]
        self.ranks = [entry["rank"] for entry in document["ranks"]]
        self.service: dict[str, Any] | None = document["service"]
        self.seconds = float(self.trace["seconds"])
        self.page_bytes = int(self.trace["page_bytes"])
        self.run_seconds = self.seconds * max(1, len(self.ranks))

    @property
    def wrapped(self) -> bool:
        """Whether our service was there."""
        return self.service is not None

    def of_file(self, number: int) -> list[dict[str, Any]]:
        """The readers of a file."""
        return [reader for reader in self.readers if reader["file"] == number]

    def stall(self, readers: Sequence[dict[str, Any]]) -> float | None:
        """Seconds that these readers stalled, None where that was not measured."""
        known = [r["stall_seconds"] for r in readers if r["stall_seconds"] is not None]
        return sum(known) if known else None

    def size_of(self, pages: float) -> str:
        """Pages as people write sizes."""
        return format_size(pages * self.page_bytes)

    def severity(self, cost: float | None, least: str = "low") -> str:
        """How much of the run a cost is."""
        share = 0.0 if cost is None or not self.run_seconds else cost / self.run_seconds
        found = "high" if share >= HIGH else "medium" if share >= MEDIUM else "low"
        order = ("low", "medium", "high")
        return max(found, least, key=order.index)

    def matters(self, readers: Sequence[dict[str, Any]]) -> bool:
        """Whether they stalled for a part of the run that is worth a change."""
        stall = self.stall(readers)
        return stall is not None and stall >= MEDIUM * self.seconds * len(readers)


def name_of(file: dict[str, Any]) -> str:
    """What people call a file: an LMDB by its directory."""
    folder, name = os.path.split(file["path"])
    return os.path.basename(folder) or name if name == "data.mdb" else name


def ranks_text(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 0-3', 'ranks 0, 2, 5'."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]}-{ordered[-1]}"
    shown = ", ".join(map(str, ordered[:8]))
    return f"ranks {shown}" + (" ..." if len(ordered) > 8 else "")


def percent(share: float) -> str:
    """'93 %', '0.4 %'; what is nearly all is not rounded to all."""
    value = share * 100
    if value >= 10 or value == 0:
        return f"{min(99, round(value)) if share < 1 else 100} %"
    return f"{value:.1f} %"


def finding(
    report: Report,
    title: str,
    detail: str,
    remedy: str,
    source: str,
    cost: float | None = None,
    least: str = "low",
    readers: Sequence[dict[str, Any]] = (),
    file: int | None = None,
) -> Found:
    """A finding as it stands in the document. ``least``: its severity if it costs no time that is
    known; ``rank`` is given when ``readers`` are of one."""
    ranks = {reader["rank"] for reader in readers}
    if cost is None:
        text = "n/a (not measured)"
    else:
        text = f"{format_duration(cost)} of stall" if cost else "no stall"
    return {
        "severity": report.severity(cost, least),
        "cost": cost,
        "cost_text": text,
        "title": title,
        "detail": detail,
        "remedy": remedy,
        "source": source,
        "rank": ranks.pop() if len(ranks) == 1 else None,
        "file": file,
    }
