# SPDX-License-Identifier: Apache-2.0
"""A trace as Chrome's JSON, which the Perfetto UI (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format" (Google). Processes are named by their rank. Threads hold slices
(complete events, 'X', so that none lacks its end): system calls, major faults and the sleeps within
them; shorter ones lie within longer ones and never cross. What was read ahead are pairs of
asynchronous events ('b', 'e'), rates are counters ('C'). Times are us since the trace's start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.units import format_size
from uffdprefetch.trace.analyse.block import requests_of_job
from uffdprefetch.trace.analyse.ranks import NOBODY, SERVICE, Ranks
from uffdprefetch.trace.analyse.series import bytes_per_second
from uffdprefetch.trace.file.events import FAULT_AFTER_AROUND, Call, Kind, of_kind
from uffdprefetch.trace.file.trace_file import Trace

Event = dict[str, Any]

#: Most slices, instants and pairs in a file: some 60 MB, which the UI opens in seconds. The longest
#: slices are kept, and every n-th of the others.
SLICES_MAX, INSTANTS_MAX, PAIRS_MAX = 200_000, 100_000, 50_000
COUNTER_STEPS_MAX = 4096
#: Process number for counters of the whole node: no job has process 0.
NODE_PID = 0


def _us(ns: Any) -> float:
    return round(float(ns) / 1000, 3)


def _thinned(events: Array, most: int) -> Array:
    return events[:: max(1, -(-len(events) // most))]


class _Export:
    """One trace on its way into events."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.start_ns, self.page_bytes = trace.start_ns, trace.page_bytes
        self.ranks = Ranks(trace)
        self.dropped: dict[str, int] = {}
        self.threads: set[tuple[int, int]] = set()

    def since(self, events: Array) -> Array:
        return events["time_ns"].astype(np.int64) - self.start_ns

    def place(self, event: Any) -> Event:
        file = self.trace.files.get(int(event["file"]))
        return {
            "file": file.path if file else "",
            "offset": int(event["offset"]),
            "page": int(event["offset"]) // self.page_bytes,
        }

    def kept(self, name: str, events: Array, most: int) -> Array:
        kept = _thinned(events, most)
        if len(kept) < len(events):
            self.dropped[name] = len(events) - len(kept)
        return kept

    # ---- slices

    def slices(self) -> list[Event]:
        """System calls, major faults, sleeps and checkpoints: those that took longest."""
        events = of_kind(self.trace.events, Kind.CALL, Kind.MAJOR, Kind.WAIT, Kind.TOUCH)
        if len(events) > SLICES_MAX:
            self.dropped["slices"] = len(events) - SLICES_MAX
            keep = np.argpartition(events["value"], -SLICES_MAX)[-SLICES_MAX:]
            events = events[np.sort(keep)]
        # A checkpoint's time is when it was touched, the others' when they ended.
        took: Array = events["value"].astype(np.int64)
        start = self.since(events) - np.where(events["kind"] == Kind.TOUCH, 0, took)
        end = start + took
        start = np.maximum(start, 0)
        found: list[Event] = []
        open_ends: list[int] = []
        thread: tuple[int, int] | None = None
        for i in np.lexsort((-end, start, events["tid"], events["pid"])):
            event = events[i]
            at = (int(event["pid"]), int(event["tid"]))
            if at != thread:
                thread, open_ends = at, []
                self.threads.add(at)
            first, last = int(start[i]), int(end[i])
            while open_ends and open_ends[-1] <= first:
                open_ends.pop()
            # Clocks are read at slightly different moments: what crosses its surroundings is cut.
            last = max(first, min([last, *open_ends[-1:]]))
            open_ends.append(last)
            found.append(
                {
                    "ph": "X", **self.described(event), "pid": at[0], "tid": at[1],
                    "ts": _us(first), "dur": round(_us(last) - _us(first), 3),
                }
            )  # fmt: skip
        return found

    def described(self, event: Any) -> Event:
        kind = int(event["kind"])
        if kind == Kind.CALL:
            what, fd = int(event["aux"]) & 0xFF, int(event["aux"]) >> 8
            name = Call(what).name.lower() if what in Call._value2member_map_ else f"call {what}"
            args = {"fd": fd, "returned": int(event["length"]), "offset": int(event["offset"])}
            return {"name": name, "cat": "call", "args": args}
        names = {Kind.MAJOR: "major fault", Kind.WAIT: "asleep in a fault"}
        name = names.get(Kind(kind), "checkpoint touched")
        return {"name": name, "cat": "fault", "args": self.place(event)}

    def instants(self) -> list[Event]:
        """Faults that found their page, and what the kernel decided to read ahead."""
        events = of_kind(self.trace.events, Kind.FAULT, Kind.AROUND, Kind.READAHEAD, Kind.READ)
        again = (events["kind"] == Kind.FAULT) & ((events["aux"] & FAULT_AFTER_AROUND) != 0)
        events = self.kept("instants", events[~again], INSTANTS_MAX)
        names = {Kind.READAHEAD: "readahead decided", Kind.READ: "read(2)"}
        found = []
        for event, since in zip(events, self.since(events), strict=True):
            at = (int(event["pid"]), int(event["tid"]))
            self.threads.add(at)
            found.append(
                {
                    "ph": "i", "s": "t", "name": names.get(Kind(int(event["kind"])), "fault"),
                    "cat": "fault", "pid": at[0], "tid": at[1], "ts": _us(max(0, int(since))),
                    "args": {**self.place(event), "bytes": int(event["length"])},
                }
            )  # fmt: skip
        return found

    # ---- what was read ahead

    def pairs(self) -> list[Event]:
        """Extents that our service warmed, and fills beyond a page: from asked for to there."""
        events = of_kind(self.trace.events, Kind.WARM, Kind.FILL)
        events = events[(events["kind"] == Kind.WARM) | (events["length"] > self.page_bytes)]
        events = self.kept("extents", events, PAIRS_MAX)
        found = []
        for i, (event, since) in enumerate(zip(events, self.since(events), strict=True)):
            warmed = event["kind"] == Kind.WARM
            name = f"{'warm' if warmed else 'fill'} {format_size(int(event['length']))}"
            # A rank's windows stand with the rank; those of nobody with our service.
            pid = int(event["pid"]) or int(event["tid"])
            cat = "warm" if warmed else "readahead"
            base = {"cat": cat, "id": i, "pid": pid, "tid": pid, "name": name}
            first = max(0, int(since))
            last = first + max(1000, int(event["value"]))
            args = {**self.place(event), "bytes": int(event["length"])}
            found.append({"ph": "b", **base, "ts": _us(first), "args": args})
            found.append({"ph": "e", **base, "ts": _us(last)})
        return found

    # ---- counters and names

    def counters(self) -> list[Event]:
        """Bytes per second into the page cache, and requests in flight."""
        span_ns = int(max(1, self.since(self.trace.events).max(initial=1)))
        rates = bytes_per_second(self.trace, self.ranks, self.start_ns, span_ns, 1024)
        found = []
        for name, row in rates.items():
            counter = f"MB/s by {name}" if name != "disks" else "MB/s from block devices"
            values = np.round(row / 1e6, 3)
            change = np.flatnonzero(np.diff(values, prepend=-1.0))
            found += [
                _counter(counter, i * span_ns / 1024, "MB/s", float(values[i])) for i in change
            ]
        flights = {
            "warming in flight": (Kind.WARM, of_kind(self.trace.events, Kind.WARM)),
            "block requests in flight": (
                Kind.BLOCK,
                requests_of_job(self.trace.events, self.ranks),
            ),
        }
        for name, (kind, events) in flights.items():
            took: Array = events["value"].astype(np.int64)
            first: Array = self.since(events) - (took if kind == Kind.BLOCK else 0)
            weight = events["length"] / (1 << 20) if kind == Kind.WARM else np.ones(len(events))
            unit = "MiB" if kind == Kind.WARM else "requests"
            found += [
                _counter(name, at, unit, value)
                for at, value in _in_flight(first, first + took, weight)
            ]
        return found

    def names(self) -> Iterator[Event]:
        """Metadata: what each process and thread is called, ranks in order."""
        pids = {pid for pid, _ in self.threads} | set(self.trace.processes)
        yield _meta("process_name", NODE_PID, 0, {"name": "the whole node"})
        yield _meta("process_sort_index", NODE_PID, 0, {"sort_index": -1})
        for pid in sorted(pids - {NODE_PID}):
            rank = int(self.ranks.of(np.array([pid]))[0])
            process = self.trace.processes.get(pid)
            command = f" {process.command}" if process and process.command else ""
            title = {SERVICE: "uffdprefetch service", NOBODY: "not of the job"}.get(
                rank, f"rank {rank}"
            )
            own = pid & (1 << 22) - 1  # file.read_all() adds the node's number above that
            yield _meta("process_name", pid, pid, {"name": f"{title}:{command} (pid {own})"})
            order = rank if rank >= 0 else 1_000_000 - rank
            yield _meta("process_sort_index", pid, pid, {"sort_index": order})
        for pid, tid in sorted(self.threads):
            name = "main" if pid == tid else f"thread {tid}"
            yield _meta("thread_name", pid, tid, {"name": name})


def _meta(name: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _counter(name: str, at_ns: float, unit: str, value: float) -> Event:
    event = {"ph": "C", "name": name, "pid": NODE_PID, "tid": 0, "ts": _us(at_ns)}
    return {**event, "args": {unit: round(value, 3)}}


def _in_flight(first: Array, last: Array, weight: Array) -> Iterator[tuple[float, float]]:
    """(ns, how much is under way from then on), at most COUNTER_STEPS_MAX of them."""
    times = np.concatenate([first, last])
    change = np.concatenate([weight, -weight])
    order = np.argsort(times, kind="stable")
    level = np.maximum(0.0, np.round(np.cumsum(change[order]), 6))
    times = np.maximum(times[order], 0)
    step = max(1, -(-len(times) // COUNTER_STEPS_MAX))
    for i in range(0, len(times), step):
        yield float(times[i]), float(level[i])
    if len(times):
        yield float(times[-1]), 0.0


def events(trace: Trace, report: dict[str, Any]) -> tuple[list[Event], dict[str, Any]]:
    """The trace's events in the order of their times, names first, and what is said of the whole.

    Pure. What a bound kept out is in the second's ``left_out``.
    """
    export = _Export(trace)
    timed = [*export.slices(), *export.instants(), *export.pairs(), *export.counters()]
    # Of slices that begin together the one around the other comes first.
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    recording = report.get("trace") or {}
    about = {
        "made_by": "uffdprefetch trace",
        "command": " ".join(map(str, recording.get("command") or [])),
        "host": recording.get("host") or "",
        "started_utc": recording.get("started_utc") or "",
        "missing": [f"{m.get('what')}: {m.get('why')}" for m in recording.get("missing") or []],
        "lost_events": recording.get("lost_events") or 0,
        "left_out": export.dropped,
    }
    return [*export.names(), *timed], about


def write(trace: Trace, report: dict[str, Any], path: str) -> None:
    """Write the trace for the Perfetto UI. Raises OSError."""
    found, about = events(trace, report)
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        file.write(json.dumps(about))
        file.write(',"traceEvents":[\n')
        for i, event in enumerate(found):
            file.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
