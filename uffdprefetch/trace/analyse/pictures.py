# SPDX-License-Identifier: Apache-2.0
"""A trace and its report as data to draw, for HTML and PNG alike. Pure.

All of it is bounded but for the access map's single marks (`streams`), which whoever draws or
packs them bounds; their `grid` is bounded too.
"""

from __future__ import annotations

from typing import Any

from uffdprefetch.trace.analyse import density, marks, series
from uffdprefetch.trace.analyse.ranks import Ranks
from uffdprefetch.trace.file.trace_file import Trace

#: Points of the per-iteration picture, over all ranks: bounds the page.
ITERATIONS_MAX = 60_000
#: Marks from which a page opens with a grid of bins, before the single marks are unpacked.
MARKS_WITHOUT_GRID = 150_000
#: Files that get an access map: those with most marks.
MAPS_MAX = 6


def _seconds(trace: Trace, report: dict[str, Any], start_ns: int) -> float:
    """Length of the time axes: to the last event, or where single events are not all, to the
    end of the run. (A recorder may end long after what it recorded.)"""
    about = report.get("trace") or {}
    last_ns = int(trace.events["time_ns"].max()) if len(trace.events) else start_ns
    seen = (last_ns - start_ns) / 1e9 * 1.004
    if about.get("raw_until_seconds") is not None or not len(trace.events):
        seen = max(seen, about.get("seconds") or 0.0)
    return float(max(seen, 1e-6))


def _ranks(trace: Trace, report: dict[str, Any], streams: list[marks.MarkStream]) -> list[int]:
    named = {entry["rank"] for entry in report.get("ranks") or []}
    named |= {p.rank for p in trace.processes.values() if p.role != "service"}
    return sorted(named | {s.rank for s in streams if s.rank >= 0})


def _size_bytes(
    trace: Trace, streams: list[marks.MarkStream], boxes: list[density.Boxes]
) -> dict[int, int]:
    """By file: its size, or how far marks go."""
    sizes = {number: file.size_bytes for number, file in trace.files.items()}
    for s in streams:
        if len(s):
            end = int((s.offset - s.before + s.length).max())
            sizes[s.file] = max(sizes.get(s.file, 1), end)
    for b in boxes:
        # The overview's bins are coarse: they do not make a file larger that is known.
        sizes.setdefault(b.file, int(b.high.max()) + 1)
    return {number: max(1, size) for number, size in sizes.items()}


def _iterations(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Per reader that has them: when each iteration began, how long it was and how much stall."""
    found = []
    readers = [r for r in report.get("readers") or [] if (r.get("iterations") or {}).get("seconds")]
    total = sum(len(r["iterations"]["seconds"]) for r in readers)
    step = max(1, -(-total // ITERATIONS_MAX))
    for reader in readers:
        listed = reader["iterations"]
        found.append(
            {
                "rank": reader["rank"],
                "file": reader["file"],
                "count": listed.get("count") or len(listed["seconds"]),
                "step": step,
                "seconds": listed["seconds"][::step],
                "start_seconds": (listed.get("start_seconds") or [])[::step],
                "stall_seconds": (listed.get("stall_seconds") or [])[::step],
            }
        )
    return found


def _epochs(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"rank": reader["rank"], "file": reader["file"], **epoch}
        for reader in report.get("readers") or []
        for epoch in reader.get("epochs") or []
    ]


def pictures(trace: Trace, report: dict[str, Any]) -> dict[str, Any]:
    """What is to be drawn of a trace.

    ``seconds`` is the length of every time axis and ``ranks`` the ranks in order. ``files`` are
    those with marks, most marks first, at most MAPS_MAX (``files_left_out`` counts the others),
    each with ``size_bytes`` as the height of its map. ``streams`` are their marks and ``grid``
    those marks in bins, None while there are few. Series are as in trace/analyse/series.py;
    ``epochs``, ``iterations`` and ``phases`` come from the report.
    """
    start_ns = trace.start_ns
    span_ns = int(_seconds(trace, report, start_ns) * 1e9)
    streams = marks.collect(trace)
    raw_until = (report.get("trace") or {}).get("raw_until_seconds")
    raw_until_ns = None if raw_until is None else int(raw_until * 1e9)
    boxes: list[density.Boxes] = []
    if raw_until_ns is not None and trace.overview:
        boxes = density.from_overview(trace.overview, Ranks(trace), start_ns, raw_until_ns)
    ranks = _ranks(trace, report, streams)
    sizes = _size_bytes(trace, streams, boxes)
    count = {number: 0 for number in sizes}
    for s in streams:
        count[s.file] += len(s)
    for b in boxes:
        count[b.file] += len(b.low)
    drawn = sorted((n for n in count if count[n]), key=lambda n: -count[n])
    kept, left_out = drawn[:MAPS_MAX], drawn[MAPS_MAX:]
    shown = [s for s in streams if s.file in kept]
    boxes = [b for b in boxes if b.file in kept]
    total = sum(len(s) for s in shown)
    grid = None
    if total > MARKS_WITHOUT_GRID or boxes:
        grid = density.grid([*map(density.Boxes.of, shown), *boxes], span_ns, sizes)
    paths = {number: file.path for number, file in trace.files.items()}
    return {
        "seconds": span_ns / 1e9,
        "page_bytes": trace.page_bytes,
        "raw_until_seconds": raw_until,
        "ranks": ranks,
        "files": [
            {"id": n, "path": paths.get(n, f"file {n}"), "size_bytes": sizes[n], "marks": count[n]}
            for n in kept
        ],
        "files_left_out": len(left_out),
        "marks": total,
        "streams": shown,
        "grid": grid,
        "series": series.series(trace, streams, ranks, start_ns, span_ns, raw_until_ns),
        "calls": series.call_dots(trace, ranks, start_ns, span_ns),
        "iterations": _iterations(report),
        "epochs": _epochs(report),
        "phases": report.get("phases") or [],
    }
