# SPDX-License-Identifier: Apache-2.0
"""What the rules of findings.py share: a finding's shape, and sums over the report. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from uffdprefetch.base.units import format_duration, format_size

#: An entry of the report's `files` or `readers`.
Entry = dict[str, Any]

MIB = 1 << 20
#: Least share of all ranks' time that a cost has with severity high, medium.
HIGH, MEDIUM = 0.2, 0.05
_SEVERITIES = ("low", "medium", "high")
#: Share of a finding's cost, not counted by earlier findings, from which all of it counts as its
#: own.
TOLD_ONCE = 0.99
#: Share of a file's touched pages from which a rank counts as a reader of all of it.
ALL = 0.8
#: Bytes that a fault maps (fault-around, mm/memory.c): shorter pieces look like single pages.
AROUND_BYTES = 65536
#: Least bytes of a reader for which reading ahead can pay: some ten of the kernel's reads.
WALK_BYTES = 2 * MIB
#: Patterns with a direction.
IN_ORDER = ("consecutive", "sequential", "strided", "backward")
WRAP = "run it under `uffdprefetch wrap -- CMD`"


@dataclass
class Finding:
    """A rule's finding. ``cost``: seconds that ``readers`` stalled, or of ``waits``, where
    these are no page faults; None where nothing measures it. ``least``: the severity if that is
    higher than the cost's."""

    title: str
    detail: str
    remedy: str
    source: str
    cost: float | None = None
    least: str = "low"
    readers: Sequence[Entry] = ()
    files: Sequence[Entry] = ()
    waits: str = ""
    #: Seconds of the cost that other findings are about, too.
    told: float = 0.0

    def entry(self, report: ReportLookup) -> Entry:
        """The document's entry."""
        ranks = {reader["rank"] for reader in self.readers}
        own = None if self.cost is None else max(0.0, self.cost - self.told)
        if own is None:
            text = "not measured"
        elif self.told and not own:
            text = "its stall is in other findings"
        else:
            text = f"{format_duration(own)} {self.waits or 'of stall'}" if own else "no stall"
            text += ", more of it in other findings" if self.told else ""
        return {
            "severity": report.severity(own, self.least),
            "cost": own,
            "cost_text": text,
            "title": self.title,
            "detail": self.detail,
            "remedy": self.remedy,
            "source": self.source,
            "rank": ranks.pop() if len(ranks) == 1 else None,
            "file": self.files[0]["id"] if len(self.files) == 1 else None,
        }


@dataclass
class FileKind:
    """Files that differ in the numbers of their names only (shards of a data set)."""

    files: list[Entry]
    readers: list[Entry] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its usual name."""
        first = name_of(self.files[0])
        return first if len(self.files) == 1 else f"{len(self.files)} files like {first}"

    @property
    def size_bytes(self) -> int:
        return sum(file["size_bytes"] for file in self.files)

    def sum(self, field_name: str) -> int:
        """Sum of a figure over its files, without those that are null."""
        return sum(file[field_name] or 0 for file in self.files)

    def of(self, readers: Sequence[Entry]) -> FileKind:
        """The part of it that these readers read."""
        numbers = {reader["file"] for reader in readers}
        return FileKind([file for file in self.files if file["id"] in numbers], list(readers))

    def only(self, files: Sequence[Entry]) -> FileKind:
        """These files of it."""
        numbers = {file["id"] for file in files}
        return FileKind(list(files), [r for r in self.readers if r["file"] in numbers])


class ReportLookup:
    """A report to look things up in."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.trace: dict[str, Any] = document["trace"]
        self.files: list[Entry] = document["files"]
        self.readers: list[Entry] = document["readers"]
        self.others: list[Entry] = document["others"]
        self.ranks = [entry["rank"] for entry in document["ranks"]]
        self.service: dict[str, Any] | None = document["service"]
        self.seconds = float(self.trace["seconds"])
        self.page_bytes = int(self.trace["page_bytes"])
        self.run_seconds = self.seconds * max(1, len(self.ranks))
        self.kinds = list(self._kinds())

    def _kinds(self) -> Iterator[FileKind]:
        found: dict[str, FileKind] = {}
        for file in self.files:
            found.setdefault(re.sub("[0-9]+", "#", file["path"]), FileKind([])).files.append(file)
        of_file = {file["id"]: kind for kind in found.values() for file in kind.files}
        for reader in self.readers:
            of_file[reader["file"]].readers.append(reader)
        yield from found.values()

    @property
    def wrapped(self) -> bool:
        """Whether our service read ahead."""
        return bool(self.trace["wrapped"])

    def stall(self, readers: Sequence[Entry]) -> float | None:
        """Seconds that these readers stalled, None where that was not measured."""
        known = [r["stall_seconds"] for r in readers if r["stall_seconds"] is not None]
        return sum(known) if known else None

    @property
    def read_call_seconds(self) -> float:
        """Time of the job in read(2) and its kind, of files whose open was seen."""
        return sum((file["read_calls"] or {}).get("seconds", 0.0) for file in self.files)

    def size_of(self, pages: float) -> str:
        """Pages as people write sizes."""
        return format_size(pages * self.page_bytes)

    def severity(self, cost: float | None, least: str = "low") -> str:
        """Severity of a cost, by its share of the run."""
        share = 0.0 if cost is None or not self.run_seconds else cost / self.run_seconds
        found = "high" if share >= HIGH else "medium" if share >= MEDIUM else "low"
        return max(found, least, key=_SEVERITIES.index)

    def matters(self, readers: Sequence[Entry]) -> bool:
        """Whether they stalled for a part of their ranks' run that is worth a change."""
        stall, ranks = self.stall(readers), {reader["rank"] for reader in readers}
        return stall is not None and stall >= MEDIUM * self.seconds * len(ranks)

    def is_read_whole(self, kind: FileKind) -> bool:
        """Whether nearly all of its bytes were touched, as far as faults tell."""
        return kind.sum("touched_pages") >= ALL * kind.sum("pages")

    def wrap_helps(self, kind: FileKind) -> bool:
        """Whether reading ahead would bring these readers what they use, and is what they wait for.

        Of a job that waits in read(2) mappings are not what it waits for. `wrap` reads ahead of
        who goes in order for a while, and of who jumps about where all of a file is used. Of a
        part of a file it brings what nobody wants.
        """
        if self.wrapped or self.read_call_seconds > (self.stall(self.readers) or 0.0):
            return False
        if all(reader["pattern"]["name"] in IN_ORDER for reader in kind.readers):
            return all(self._is_walk(reader) for reader in kind.readers)
        return self.is_read_whole(kind)

    def _is_walk(self, reader: Entry) -> bool:
        """Whether a reader that goes in order takes more than a page here and there."""
        pieces = reader["runs"]["bytes_p50"]
        if reader["pattern"]["name"] != "consecutive" and pieces < AROUND_BYTES:
            return False
        return bool(reader["touched_pages"] * self.page_bytes >= WALK_BYTES)


def name_of(file: Entry) -> str:
    """A file's usual name: an LMDB's is its directory."""
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


def who_text(readers: Sequence[Entry], verb: str) -> str:
    """'rank 0 reads', 'ranks 0-3 read'."""
    ranks = {reader["rank"] for reader in readers}
    return f"{ranks_text(list(ranks))} {verb}" + ("s" if len(ranks) == 1 else "")


def percent(share: float) -> str:
    """'93 %', '0.4 %'; what is nearly all is not rounded to all."""
    value = share * 100
    if value >= 10 or value == 0:
        return f"{min(99, round(value)) if share < 1 else 100} %"
    return f"{value:.1f} %"


def settle(found: list[Finding], report: ReportLookup) -> list[Finding]:
    """Let each second of stall be told once: by the first of the findings about its reader, which
    are in the order of their rules, causes before what follows from them. Returns them by what is
    left of their costs; then by severity."""
    left = {
        (r["rank"], r["file"]): r["stall_seconds"] for r in report.readers if r["stall_seconds"]
    }
    for one in found:
        if not one.cost or one.waits:
            continue
        mine = {key for r in one.readers if (key := (r["rank"], r["file"])) in left}
        there = sum(left[key] for key in mine)
        own = min(one.cost, there)
        one.told = one.cost - own if own < TOLD_ONCE * one.cost else 0.0
        for key in mine if there else ():
            left[key] -= own * left[key] / there
    order = ("high", "medium", "low")
    return sorted(
        found,
        key=lambda f: (
            f.told - (f.cost or 0.0),
            order.index(report.severity((f.cost or 0.0) - f.told, f.least)),
        ),
    )
