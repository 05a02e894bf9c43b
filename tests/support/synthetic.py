# SPDX-License-Identifier: Apache-2.0
"""Traces of readers that never were: ranks that skip, go contiguously or shuffle, cold or served.

For the tests of what is drawn of a trace, and for bench/lab/tracepage.py, which wants millions of
events: everything is made as columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.trace.file.events import EVENT, FAULT_AFTER_AROUND, Call, Kind
from uffdprefetch.trace.file.trace_file import Trace, TracedFile, TracedProcess

START_NS = 1_000_000_000_000
STARTED_UNIX_NS = 1_790_000_000 * 10**9
PAGE, AROUND = 4096, 65536
SERVICE_PID = 900
BATCH = 32
PATTERNS = ("skip", "contiguous", "shuffled")


def order_of(pattern: str, rank: int, ranks: int, records: int, rng: Any) -> Any:
    """Which records a rank reads in an epoch, in order."""
    everything = np.arange(records)
    if pattern == "skip":
        return everything[rank::ranks]
    if pattern == "contiguous":
        return everything[rank * records // ranks : (rank + 1) * records // ranks]
    return rng.permutation(records)[rank::ranks]


def _events(rows: dict[str, Any]) -> Any:
    n = max(len(v) for v in rows.values() if hasattr(v, "__len__"))
    events = np.zeros(n, EVENT)
    for name, values in rows.items():
        events[name] = values
    return events


def _touches(sizes: Any, starts: Any, order: Any) -> tuple[Any, Any, Any]:
    """(page entered, start of its fault-around range, whether it is its record's first) of each
    fault-around range that the records of `order` lie in."""
    low = starts[order] // AROUND
    n = (starts[order] + sizes[order] - 1) // AROUND - low + 1
    first = np.cumsum(n) - n
    step = np.arange(int(n.sum())) - np.repeat(first, n)
    around = (np.repeat(low, n) + step) * AROUND
    begins = step == 0
    page = np.where(begins, np.repeat(starts[order], n), around)
    return page, around, begins


def make(
    pattern: str = "skip",
    ranks: int = 4,
    records: int = 400,
    epochs: int = 2,
    cold: bool = True,
    served: bool = False,
    path: str = "/data/train.lmdb/data.mdb",
    miss_ns: int = 1_500_000,
    batch_ns: int = 30_000_000,
    seed: int = 0,
) -> Trace:
    """A trace as the BPF recorder leaves it.

    ``cold``: the first epoch misses once per record. ``served``: our service warmed it in windows
    of 4 MiB, so that one record in 64 is missed.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 48, records) * PAGE
    starts = np.cumsum(sizes) - sizes + 2 * PAGE
    size_bytes = int(starts[-1] + sizes[-1])
    parts = []
    for rank in range(ranks):
        clock = START_NS + 50_000_000 + rank * 700_000
        who = {"pid": 1000 + rank, "tid": 1000 + rank}
        parts.append(_calls(clock, who))
        for epoch in range(epochs):
            order = order_of(pattern, rank, ranks, records, rng)
            page, around, begins = _touches(sizes, starts, order)
            nth = np.cumsum(begins) - 1
            missed = begins & (cold and epoch == 0) & ((nth % 64 == 3) | (not served))
            noise = rng.integers(8_000, 60_000, len(page))
            steps = noise + missed * rng.integers(miss_ns // 2, miss_ns * 3 // 2, len(page))
            ends = begins & (nth % BATCH == 0) & (nth > 0)
            steps = steps + ends * batch_ns
            time = clock + np.cumsum(steps)
            clock = int(time[-1])
            wait = np.where(missed, steps - noise - ends * batch_ns, 0)
            entered = time - wait
            file = {"file": 1, **who}
            length = np.minimum(AROUND, size_bytes - around)
            parts.append(
                _events(
                    {
                        "time_ns": entered,
                        "offset": around,
                        "length": length,
                        "kind": Kind.AROUND,
                        "aux": (page - around) // PAGE,
                        **file,
                    }
                )
            )
            t, w, o = entered[missed], wait[missed], page[missed]
            if len(t):
                parts += [
                    _events({"time_ns": t + 1000, "offset": o, "length": PAGE, "kind": Kind.FAULT,
                             "aux": FAULT_AFTER_AROUND, **file}),
                    _events({"time_ns": t + 2000, "offset": o, "length": 2 * AROUND,
                             "kind": Kind.FILL, "value": 40_000, "aux": 32, **file}),
                    _events({"time_ns": t + w - 500, "offset": o, "length": PAGE,
                             "kind": Kind.WAIT, "value": w - 5000, **file}),
                    _events({"time_ns": t + w, "offset": o, "length": PAGE, "kind": Kind.MAJOR,
                             "value": w, **file}),
                ]  # fmt: skip
            if served and epoch == 0:
                parts.append(_warm(entered, page, size_bytes, who["pid"]))
    events = np.concatenate(parts)
    events = events[np.argsort(events["time_ns"], kind="stable")]
    trace = Trace(
        meta={
            "host": "node1", "kernel": "6.18", "command": ["python", "train.py"],
            "started_ns": START_NS, "started_unix_ns": STARTED_UNIX_NS, "source": "bpf",
            "page_bytes": PAGE, "missing": [],
        },
        events=events,
        files={1: TracedFile(1, path, size_bytes, file_system="fuse", read_ahead_bytes=131072)},
        processes={
            1000 + r: TracedProcess(1000 + r, 999, r, r, "python train.py") for r in range(ranks)
        },
        path="made.uptrace",
    )  # fmt: skip
    if served:
        trace.processes[SERVICE_PID] = TracedProcess(SERVICE_PID, role="service", command="service")
    trace.end = {
        "ended_ns": int(events["time_ns"][-1]) + 100_000_000, "status": 0, "lost_events": 0,
        "events_seen": len(events), "events_kept": len(events), "raw_until_ns": None,
        "recorder_cpu_seconds": 0.2,
    }  # fmt: skip
    return trace


def _warm(entered: Any, page: Any, size_bytes: int, pid: int, window: int = 4 << 20) -> Any:
    """Windows of 1 MiB extents, each 60 ms ahead of the first access to it."""
    extent, first = np.unique(page // (1 << 20), return_index=True)
    when = np.maximum(START_NS, entered[first] - 60_000_000)
    order = np.argsort(when, kind="stable")
    start = extent[order] << 20
    return _events(
        {
            "time_ns": when[order], "offset": start,
            "length": np.minimum(1 << 20, size_bytes - start), "value": 4_000_000, "pid": pid,
            "tid": SERVICE_PID, "kind": Kind.WARM, "file": 1,
        }
    )  # fmt: skip


def _calls(clock: int, who: dict[str, int]) -> Any:
    """As [Stanovnik] figure 4: opens, headers and maps at the start, then clusters of writes."""
    rows = []
    for i in range(12):
        rows.append((clock + i * 400_000, 0, 3, 40_000, Call.OPEN | 3 << 8))
        rows.append((clock + i * 400_000 + 90_000, 0, 832, 4_000, Call.READ | 3 << 8))
        rows.append((clock + i * 400_000 + 150_000, 0, 1 << 30, 9_000, Call.MMAP | 3 << 8))
    for i in range(60):
        at = clock + 50_000_000 + i * 9_000_000
        if (i // 15) % 2 == 0:
            rows.append((at, 0, 180, 12_000, Call.WRITE | 1 << 8))
    columns = np.array(rows, np.uint64).T
    names = ("time_ns", "offset", "length", "value", "aux")
    return _events({**dict(zip(names, columns, strict=True)), "kind": Kind.CALL, **who})
