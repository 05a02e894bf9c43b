# SPDX-License-Identifier: Apache-2.0
"""The trace for the Perfetto UI: valid, sorted, balanced, named by rank, bounded."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic

from uffdprefetch.report import perfetto
from uffdprefetch.trace.file.events import EVENT, Call, Kind
from uffdprefetch.trace.file.trace_file import Trace, TracedProcess


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("perfetto") / "trace.json"
    trace = synthetic.make("skip", records=300, served=True)
    report = {"trace": {"command": ["train.py"], "missing": [{"what": "block I/O", "why": "no"}]}}
    perfetto.write(trace, report, str(path))
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def of_phase(written: dict[str, Any], *phases: str) -> list[dict[str, Any]]:
    return [event for event in written["traceEvents"] if event["ph"] in phases]


def test_events_are_in_the_order_of_their_times(written: dict[str, Any]) -> None:
    times = [event["ts"] for event in written["traceEvents"]]
    assert times == sorted(times) and times[0] >= 0
    assert times[-1] > 0


def test_slices_of_a_thread_lie_within_each_other_or_apart(written: dict[str, Any]) -> None:
    open_ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    nested = 0
    for event in of_phase(written, "X"):
        stack = open_ends[event["pid"], event["tid"]]
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        end = round(event["ts"] + event["dur"], 3)
        assert event["dur"] >= 0
        assert not stack or end <= stack[-1] + 1e-3, event
        nested += bool(stack)
        stack.append(end)
    assert nested  # sleeps lie within the major faults they are part of


def test_each_extent_that_was_read_ahead_begins_and_ends(written: dict[str, Any]) -> None:
    begun: Counter[tuple[str, int]] = Counter()
    for event in of_phase(written, "b", "e"):
        key = (event["cat"], event["id"])
        begun[key] += 1 if event["ph"] == "b" else -1
        assert begun[key] in (0, 1), "an end before its beginning, or two beginnings"
    assert begun and not any(begun.values())
    assert {cat for cat, _ in begun} == {"warm", "readahead"}


def test_processes_are_named_by_their_rank_and_sorted_by_it(written: dict[str, Any]) -> None:
    names = {e["pid"]: e["args"]["name"] for e in of_phase(written, "M")
             if e["name"] == "process_name"}  # fmt: skip
    order = {e["pid"]: e["args"]["sort_index"] for e in of_phase(written, "M")
             if e["name"] == "process_sort_index"}  # fmt: skip
    for rank in range(4):
        assert names[1000 + rank].startswith(f"rank {rank}: ")
        assert order[1000 + rank] == rank
    assert names[synthetic.SERVICE_PID].startswith("uffdprefetch service")
    assert order[synthetic.SERVICE_PID] > max(order[1000 + rank] for rank in range(4))
    named = {(e["pid"], e["tid"]) for e in of_phase(written, "M") if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in of_phase(written, "X", "i")} <= named


def test_calls_and_faults_are_there_with_counters(written: dict[str, Any]) -> None:
    assert {e["name"] for e in of_phase(written, "X")} >= {"open", "mmap", "write", "major fault"}
    assert any(e["name"].startswith("MB/s by") for e in of_phase(written, "C"))
    flight = [e["args"]["MiB"] for e in of_phase(written, "C") if e["name"] == "warming in flight"]
    assert max(flight) > 0 and flight[-1] == 0
    assert written["otherData"]["missing"] == ["block I/O: no"]


def test_beyond_its_bounds_the_longest_slices_are_kept_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(perfetto, "SLICES_MAX", 50)
    monkeypatch.setattr(perfetto, "INSTANTS_MAX", 40)
    monkeypatch.setattr(perfetto, "PAIRS_MAX", 30)
    trace = synthetic.make("skip", records=300)
    found, about = perfetto.events(trace, {})
    count = Counter(event["ph"] for event in found)
    assert count["X"] == 50 and count["i"] <= 40 and count["b"] == count["e"] <= 30
    slices = [event["dur"] for event in found if event["ph"] == "X"]
    majors = trace.events[trace.events["kind"] == Kind.MAJOR]["value"]
    assert max(slices) == pytest.approx(majors.max() / 1000)
    assert set(about["left_out"]) == {"slices", "instants", "extents"}


def test_a_slice_that_crosses_its_surroundings_is_cut() -> None:
    # A read of 10 us, and within it a fault whose end was stamped 3 us too late.
    rows = [
        (10_000, 0, 64, 10_000, 7, 7, Kind.CALL, 0, Call.READ | 3 << 8),
        (13_000, 0, 4096, 6_000, 7, 7, Kind.MAJOR, 1, 0),
    ]
    trace = Trace(meta={"started_ns": 0}, events=np.array(rows, EVENT))
    trace.processes = {7: TracedProcess(7)}
    read, fault = (e for e in perfetto.events(trace, {})[0] if e["ph"] == "X")
    assert (read["ts"], read["dur"]) == (0, 10)
    assert (fault["ts"], fault["dur"]) == (7, 3)


def test_an_empty_trace_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    perfetto.write(Trace(meta={}), {}, str(path))
    assert json.loads(path.read_text())["traceEvents"]
