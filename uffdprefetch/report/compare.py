# SPDX-License-Identifier: Apache-2.0
"""Two runs of one job beside each other, by their recordings or summaries: what got better, what
got worse. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from uffdprefetch.base.units import format_duration, format_rate, format_size
from uffdprefetch.report.columns import aligned
from uffdprefetch.report.line import seconds_of

SCHEMA = "uffdprefetch.comparison/1"
#: Difference up to which two figures count as alike: the usual variation of runs.
ALIKE_SHARE = 0.1
#: Times up to which two count as alike, and directories of programs and small files are left out:
#: what a start from memory takes of each.
ALIKE_SECONDS = 0.01
#: Rows of one table.
ROWS_MAX = 20

_FORMATS: dict[str, Callable[[float], str]] = {
    "seconds": format_duration,
    "bytes": format_size,
    "share": lambda share: f"{share * 100:.0f} %",
    "count": lambda count: f"{count:,.0f}".replace(",", " "),
}


class Figure(NamedTuple):
    """One figure of both runs; None: not known. ``unit``: of _FORMATS; ``more_is_better``: None:
    neither is."""

    name: str
    unit: str
    before: float | None
    after: float | None
    more_is_better: bool | None = False

    @property
    def verdict(self) -> str | None:
        """better, worse, or None where that cannot be said."""
        if self.before is None or self.after is None or self.more_is_better is None:
            return None
        most = max(self.before, self.after)
        if self.unit == "seconds" and most < ALIKE_SECONDS:
            return None
        if abs(self.after - self.before) <= ALIKE_SHARE * most:
            return None
        return "better" if (self.after > self.before) == self.more_is_better else "worse"

    def text(self, value: float | None) -> str:
        """A value, for people."""
        return "n/a" if value is None else _FORMATS[self.unit](value)

    def change(self) -> str:
        """The change from before to after, in words."""
        if self.before is None or self.after is None:
            return ""
        if not self.before:
            return "" if not self.after else "from none"
        if self.after >= 2 * self.before:
            return f"x {self.after / self.before:.1f}"
        return f"{(self.after / self.before - 1) * 100:+.0f} %"


def _figure(
    name: str, unit: str, pair: Iterable[float | None], more_is_better: bool | None = False
) -> Figure:
    before, after = pair
    return Figure(name, unit, before, after, more_is_better)


def _document(
    before: str, after: str, figures: Sequence[Figure], parts: Sequence[tuple[str, list[Figure]]],
    commands: Sequence[Sequence[str] | None],
) -> dict[str, Any]:  # fmt: skip
    """``commands``: of both, None where one is not told."""

    def rows(some: Sequence[Figure]) -> list[dict[str, Any]]:
        return [{**one._asdict(), "verdict": one.verdict} for one in some]

    return {
        "schema": SCHEMA,
        "before": before,
        "after": after,
        "commands": list(commands),
        "figures": rows(figures),
        "parts": [{"of": name, "figures": rows(some)} for name, some in parts],
    }


def of_traces(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two reports of recordings (trace/analyse/report.py): the run; then each rank's
    mapping of each file, paired by path and rank, what calls have read of each file, and programs
    and small files by directory; what differs most first."""

    def stalled(report: Mapping[str, Any]) -> float | None:
        return _sum([one.get("stall_seconds") for one in report["readers"]])

    def sum_of(report: Mapping[str, Any], name: str) -> float | None:
        return _sum([file.get(name) for file in report["files"]])

    def majors(report: Mapping[str, Any]) -> float | None:
        return _sum([(one.get("faults") or {}).get("major") for one in report["readers"]])

    both = before, after
    figures = [
        _figure("time", "seconds", [one["trace"]["seconds"] for one in both]),
        _figure("stall, all threads", "seconds", map(stalled, both)),
        _figure("major faults", "count", map(majors, both)),
        _figure("in read(2)", "seconds", [_in_calls(one, one["files"], "seconds") for one in both]),
        _figure(
            "by read(2)", "bytes", [_in_calls(one, one["files"], "bytes") for one in both], None
        ),
        _figure(
            "read calls", "count", [_in_calls(one, one["files"], "count") for one in both], None
        ),
        _figure(
            "programs, small files",
            "seconds",
            [
                None if one["calls"] is None else _sum([g["wait_seconds"] for g in one["others"]])
                for one in both
            ],
        ),
        _figure("brought in", "bytes", [sum_of(one, "fill_bytes") for one in both]),
        _figure("never used of it", "bytes", [sum_of(one, "useless_bytes") for one in both]),
    ]
    readers = [_readers(one) for one in both]
    parts: list[tuple[str, list[Figure]]] = []
    for path, rank in dict.fromkeys((*readers[0], *readers[1])):
        pair = [some.get((path, rank), {}) for some in readers]
        if not any(_faulted(one) for one in pair):
            continue
        stall = _figure("stall", "seconds", [one.get("stall_seconds") for one in pair])
        major = [(one.get("faults") or {}).get("major") for one in pair]
        parts.append((f"{path}, rank {rank}", [stall, _figure("major faults", "count", major)]))
    parts += [*_files_by_calls(before, after), *_other_files(before, after)]
    parts.sort(key=lambda part: -abs((part[1][0].after or 0) - (part[1][0].before or 0)))
    commands = [one["trace"].get("command") for one in both]
    return _document(_named(before), _named(after), figures, parts, commands)


def _faulted(reader: Mapping[str, Any]) -> bool:
    """Whether it maps the file, as far as is known."""
    faults = reader.get("faults") or {}
    return bool(reader) and faults.get("total") != 0


def _in_calls(
    report: Mapping[str, Any], files: Iterable[Mapping[str, Any]], name: str
) -> float | None:
    """A figure of the job's read calls of these files; None: they were not recorded."""
    if report["calls"] is None:
        return None
    return sum((file.get("read_calls") or {}).get(name, 0) for file in files)


def _files_by_calls(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, list[Figure]]]:
    """Each file that was read by calls in either run."""
    files = [{file["path"]: file for file in one["files"]} for one in (before, after)]
    both = list(zip((before, after), files, strict=True))
    parts = []
    for path in dict.fromkeys((*files[0], *files[1])):
        if not any((some.get(path) or {}).get("read_calls") for some in files):
            continue
        seconds, size, count = (
            [_in_calls(report, [some[path]], name) if path in some else None
             for report, some in both]
            for name in ("seconds", "bytes", "count")
        )  # fmt: skip
        figures = [
            _figure("in read(2)", "seconds", seconds), _figure("by read(2)", "bytes", size, None),
            _figure("read calls", "count", count, None),
        ]  # fmt: skip
        parts.append((path, figures))
    return parts


def _other_files(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, list[Figure]]]:
    """Programs, libraries and small files, by directory, where they took time in either run."""
    groups = [{one["name"]: one for one in report["others"]} for report in (before, after)]
    parts = []
    for name in dict.fromkeys((*groups[0], *groups[1])):
        pair = [some.get(name) or {} for some in groups]
        if max(one.get("wait_seconds", 0.0) for one in pair) < ALIKE_SECONDS:
            continue
        opens, reads = ([(one.get(what) or {}) for one in pair] for what in ("opens", "read_calls"))
        figures = [
            _figure("waited", "seconds", [one.get("wait_seconds") for one in pair]),
            _figure("in opens", "seconds", [one.get("seconds") for one in opens]),
            _figure("in read(2)", "seconds", [one.get("seconds") for one in reads]),
            _figure("by the job itself", "bytes", [one.get("fill_bytes") for one in pair]),
        ]
        parts.append((name, figures))
    return parts


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _named(report: Mapping[str, Any]) -> str:
    return str(report["trace"].get("path") or "?")


def _readers(report: Mapping[str, Any]) -> dict[tuple[str, int], Mapping[str, Any]]:
    paths = {file["id"]: file["path"] for file in report["files"]}
    return {(paths.get(one["file"], "?"), one["rank"]): one for one in report["readers"]}


#: Of a summary's totals: name, unit, whether more is better.
_TOTALS = (
    ("waited_seconds", "seconds", False), ("demand_misses", "count", False),
    ("prefetched_bytes", "bytes", None), ("coverage", "share", True), ("accuracy", "share", True),
    ("storage_read_bytes", "bytes", False), ("unserved_read_bytes", "bytes", None),
)  # fmt: skip
_OF_A_FILE = (("prefetched_bytes", "bytes", None), ("demand_used_blocks_bytes", "bytes", False))


def of_summaries(
    before: Mapping[str, Any], after: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Compare two summaries (docs/summary-schema.md): the run, its ranks, its files. ``names``: of
    the summaries' own files."""
    both = before, after
    figures = [_figure("time", "seconds", [seconds_of(one) for one in both])]
    figures += [
        _figure(_words(name), unit, [one["totals"].get(name) for one in both], better)
        for name, unit, better in _TOTALS
    ]
    parts: list[tuple[str, list[Figure]]] = []
    ranks = [{one["rank"]: one for one in some.get("ranks") or []} for some in both]
    for rank in sorted({*ranks[0], *ranks[1]}):
        pair = [some.get(rank, {}) for some in ranks]
        missed = _figure("demand misses", "count", [one.get("demand_misses") for one in pair])
        parts.append((f"rank {rank}", [missed]))
    files = [{one["path"]: one for one in some.get("files") or []} for some in both]
    for path in dict.fromkeys((*files[0], *files[1])):
        pair = [some.get(path, {}) for some in files]
        rows = [
            _figure(_words(name), unit, [one.get(name) for one in pair], better)
            for name, unit, better in _OF_A_FILE
        ]
        parts.append((path, rows))
    commands = [(one.get("job") or {}).get("command") for one in both]
    return _document(names[0], names[1], figures, parts, commands)


def _words(name: str) -> str:
    known = {
        "waited_seconds": "waited, all threads",
        "demand_used_blocks_bytes": "mapped and not prefetched",
        "unserved_read_bytes": "by read(2)",
        "storage_read_bytes": "read from storage",
        "prefetched_bytes": "prefetched",
    }
    return known.get(name, name.replace("_", " "))


def lines(document: Mapping[str, Any], width: int = 80) -> list[str]:
    """Lines for a terminal: a table of the run, then the parts that differ most."""
    rows = [("", "before", "after", "", "")]
    for one in document["figures"]:
        rows.append(_row(one["name"], one))
    shown = document["parts"][:ROWS_MAX]
    for part in shown:
        rows.append((part["of"], "", "", "", ""))
        rows += [_row(f"  {one['name']}", one) for one in part["figures"]]
    out = [f"before: {document['before']}", f"after:  {document['after']}"]
    first, second = document.get("commands") or (None, None)
    if first and second and first != second:
        out.append(f"not of one command: {shlex.join(first)} and {shlex.join(second)}")
    out.append("")
    names = [row[0] for row in rows]
    most = max(20, width - 44)
    rows = [(_cut(name, most), *row[1:]) for name, row in zip(names, rows, strict=True)]
    out += [line.rstrip()[:width] for line in aligned(rows)]
    if len(document["parts"]) > len(shown):
        out.append(f"and {len(document['parts']) - len(shown)} more (in JSON all of them)")
    forecast = document.get("predicted")
    if forecast:
        out.append(
            f"predicted by a replay of the first one: {format_duration(forecast['seconds'])}"
            f" ({format_rate(forecast['bandwidth_bytes_per_second'])},"
            f" {forecast['latency_seconds'] * 1000:.2g} ms a request)"
        )
    return out


def _row(name: str, one: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    figure = Figure(*(one[field] for field in Figure._fields))
    return (
        name, figure.text(figure.before), figure.text(figure.after), figure.change(),
        one["verdict"] or "",
    )  # fmt: skip


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"...{name[3 - most :]}"
