# SPDX-License-Identifier: Apache-2.0
"""What programs, libraries and small files cost, by package or directory; what read(2) took."""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.analyse.fills import decisions
from uffdprefetch.trace.analyse.ranks import Ranks
from uffdprefetch.trace.file.events import Call, Kind
from uffdprefetch.trace.file.trace_file import Trace


def others_report(trace: Trace, ranks: Ranks) -> list[dict[str, Any]]:
    """``others`` (docs/trace-report.md), what was waited for longest first: one entry a group."""
    events = trace.other_events
    events = events[ranks.of(events["pid"]) >= 0]
    groups = sorted({file.group for file in trace.others.values()})
    number = {group: i for i, group in enumerate(groups)}
    group_of: Array = np.full(65536, -1, np.int64)
    members = np.zeros(len(groups), np.int64)
    for file in trace.others.values():
        group_of[file.id] = number[file.group]
        members[number[file.group]] += 1
    of = group_of[events["file"]]
    order = np.argsort(of, kind="stable")
    events, of = events[order], of[order]
    ends = np.searchsorted(of, np.arange(len(groups) + 1))
    found = []
    for group, i in number.items():
        mine = events[ends[i] : ends[i + 1]]
        fills = mine[mine["kind"] == Kind.FILL]
        majors = mine[mine["kind"] == Kind.MAJOR]
        reads, opens = read_calls(mine), _opens(mine)
        ahead = mine[mine["kind"] == Kind.READAHEAD]
        # decided once for each request; a page that is read alone is not decided about
        requests = max(len(decisions(ahead)[0]), len(fills))
        if not requests and not len(majors) and reads is None and opens is None:
            continue
        waited = int(majors["value"].sum()) / 1e9
        waited += sum(one["seconds"] for one in (reads, opens) if one)
        found.append(
            {
                "name": group,
                "files": int(members[i]),
                "requests": requests,
                "fill_bytes": int(fills["length"].sum()),
                "major_faults": len(majors),
                "opens": opens,
                "read_calls": reads,
                "wait_seconds": waited,
            }
        )
    return sorted(found, key=lambda one: (-one["wait_seconds"], -one["fill_bytes"], one["name"]))


def read_calls(events: Array) -> dict[str, Any] | None:
    """Calls of read(2) and pread(2) among these events: count, bytes, seconds; None: none."""
    mine = _calls(events, Call.READ, Call.PREAD)
    if not len(mine):
        return None
    return {
        "count": len(mine),
        "bytes": int(mine["length"].sum()),
        "seconds": int(mine["value"].sum()) / 1e9,
    }


def _opens(events: Array) -> dict[str, Any] | None:
    """Calls of open(2) that succeeded: count, seconds; None: none."""
    mine = _calls(events, Call.OPEN)
    return {"count": len(mine), "seconds": int(mine["value"].sum()) / 1e9} if len(mine) else None


def _calls(events: Array, *which: Call) -> Array:
    return events[(events["kind"] == Kind.CALL) & np.isin(events["aux"] & 0xFF, which)]
