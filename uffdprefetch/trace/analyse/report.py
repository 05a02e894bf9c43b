# SPDX-License-Identifier: Apache-2.0
"""A trace becomes a report (docs/trace-report.md): numbers and words, ready for JSON. Pure, but
for the index of a record file, which is read where the file is still there."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.analyse.block import block_report
from uffdprefetch.trace.analyse.findings import findings
from uffdprefetch.trace.analyse.others import others_report
from uffdprefetch.trace.analyse.phases import phases
from uffdprefetch.trace.analyse.reader_report import PIDS_LISTED
from uffdprefetch.trace.analyse.records import open_records
from uffdprefetch.trace.analyse.survey import OpenRecords, Survey
from uffdprefetch.trace.file.events import RECORDED_CALLS, Call, Kind
from uffdprefetch.trace.file.sensors import Sensor
from uffdprefetch.trace.file.trace_file import Trace

SCHEMA = "uffdprefetch.trace-report/1"
COMMANDS_LISTED = 16


def _about_trace(work: Survey) -> dict[str, Any]:
    trace, meta, end = work.trace, work.trace.meta, work.trace.end or {}
    source = "bpf" if work.by_bpf else "service"
    if work.by_bpf and work.by_service:
        source = "bpf+service"
    started = int(meta.get("started_unix_ns") or 0) / 1e9
    raw_until = end.get("raw_until_ns")
    return {
        "path": trace.path,
        "host": meta.get("host"),
        "command": list(meta.get("command") or []),
        "started_utc": datetime.fromtimestamp(started, timezone.utc).isoformat(timespec="seconds"),
        "seconds": work.seconds,
        "source": source,
        "wrapped": work.wrapped,
        "page_bytes": work.page_bytes,
        "missing": list(meta.get("missing") or []),
        "events": len(trace.events),
        "lost_events": int(end.get("lost_events") or 0),
        "raw_until_seconds": None if raw_until is None else (raw_until - work.start_ns) / 1e9,
        "truncated": trace.truncated
        or (None if trace.end is not None else "the recorder did not come to its end"),
        "recorder_cpu_seconds": end.get("recorder_cpu_seconds"),
    }


def _ranks(trace: Trace) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for process in sorted(trace.processes.values(), key=lambda p: p.pid):
        if process.role != "job":
            continue
        entry = found.setdefault(process.rank, {"rank": process.rank, "pids": [], "commands": []})
        if len(entry["pids"]) < PIDS_LISTED:
            entry["pids"].append(process.pid)
        if process.command not in entry["commands"] and len(entry["commands"]) < COMMANDS_LISTED:
            entry["commands"].append(process.command)
    return [found[rank] for rank in sorted(found)]


def _calls(work: Survey) -> tuple[dict[str, int | None] | None, Array]:
    """(count of each system call of the job, None: not recorded; times of its writes in
    seconds)."""
    if work.misses(Sensor.CALLS):
        return None, np.zeros(0)
    events = work.trace.events
    rows = events[events["kind"] == Kind.CALL]
    rows = rows[work.ranks.of(rows["pid"]) >= 0]
    what = rows["aux"] & 0xFF
    counts = {
        call.name.lower(): int((what == call).sum()) if call in RECORDED_CALLS else None
        for call in Call
    }
    writes = rows["time_ns"][what == Call.WRITE].astype(np.int64) - work.start_ns
    return counts, np.sort(writes) / 1e9


def analyse(trace: Trace, open_index: OpenRecords = open_records) -> dict[str, Any]:
    """The report of a trace, ``uffdprefetch.trace-report/1``.

    ``open_index``: (path, bytes, page size) to the index of a record file, or None. Raises nothing
    for a trace that file.read() gave.
    """
    work = Survey(trace, open_index)
    events = trace.events
    order = np.argsort(events["file"], kind="stable")
    numbers = events["file"][order]
    files: list[dict[str, Any]] = []
    readers: list[dict[str, Any]] = []
    times: dict[int, tuple[str, Array]] = {}
    for number in sorted(trace.files):
        a = int(np.searchsorted(numbers, number))
        b = int(np.searchsorted(numbers, number, side="right"))
        # one file has most of the events: no copy of what is all of them
        some = events if b - a == len(events) else events[order[a:b]]
        entry, found = work.file(trace.files[number], some)
        files.append(entry)
        readers += work.readers(found, some)
        if found:
            all_times = np.concatenate([r.accesses.time_ns for r in found])
            times[number] = (trace.files[number].path, np.sort(all_times) / 1e9)
    calls, writes = _calls(work)
    report = {
        "schema": SCHEMA,
        "trace": _about_trace(work),
        "ranks": _ranks(trace),
        "files": files,
        "others": others_report(trace, work.ranks),
        "readers": sorted(readers, key=lambda r: (r["file"], r["rank"])),
        "phases": phases(times, writes, work.seconds),
        "calls": calls,
        "service": work.served.report() if work.by_service else None,
        "block": None if work.misses(Sensor.BLOCK) else block_report(events, work.ranks),
    }
    report["findings"] = findings(report)
    return report
