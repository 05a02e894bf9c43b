# SPDX-License-Identifier: Apache-2.0
"""Traces with a known truth: a small model of the kernel's faults, fault-around and readahead.

A reader is a generator of what it does: a page number (a touch), or one of Sleep, Unmap, Read. The
model reports what the kernel's tracepoints would (bpf/faults.c, seen on Linux 6.18), and keeps what
really happened, to be compared with what the analysis makes of it.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.file.events import EVENT, FAULT_AFTER_AROUND, Call, Kind, ReadaheadSite
from uffdprefetch.trace.file.trace_file import Trace, TracedFile, TracedProcess, Writer

PAGE_BYTES = 4096
START_NS = 10**12
MS = 1_000_000


@dataclass(frozen=True)
class Sleep:
    """The reader computes."""

    ns: int


@dataclass(frozen=True)
class Unmap:
    """The reader drops the file from its page table (and maps it again)."""


@dataclass(frozen=True)
class Evict:
    """The machine drops all of the file from the page cache."""


@dataclass(frozen=True)
class Read:
    """read(2) of pages."""

    page: int
    pages: int


@dataclass(frozen=True)
class Write:
    """write(2), to no file that is looked at."""


Step = int | Sleep | Unmap | Evict | Read | Write


@dataclass
class Reader:
    """A thread of a process of a rank, and what it really did."""

    rank: int
    pid: int
    tid: int
    file: int
    random_advice: bool
    base: int
    now_ns: int
    mapped: set[int]
    touched: set[int] = field(default_factory=set)
    faults: int = 0
    majors: int = 0
    stall_ns: int = 0


class Machine:
    """One node with one page cache. Sizes in pages."""

    def __init__(
        self,
        pages: int,
        readahead: int = 32,
        latency_ns: int = MS,
        cached: bool = False,
        around: int = 16,
        marks: bool = True,
        path: str = "/data/train.bin",
    ) -> None:
        self.readahead, self.latency_ns, self.around = readahead, latency_ns, around
        self.marks = marks  # whether readahead goes on before its end is waited for
        self.files = {
            1: TracedFile(1, path, pages * PAGE_BYTES, read_ahead_bytes=readahead * PAGE_BYTES)
        }
        self.cache: dict[int, set[int]] = {1: set(range(pages)) if cached else set()}
        self.marked: dict[int, set[int]] = {1: set()}
        self.rows: list[tuple[int, ...]] = []
        self.readers: list[Reader] = []
        self.mappings: dict[tuple[int, int], set[int]] = {}
        self.filled: list[int] = []
        self.meta: dict[str, Any] = {
            "host": "node1", "command": ["train"], "source": "bpf", "missing": [],
            "started_ns": START_NS, "started_unix_ns": 1_790_000_000 * 10**9, "page_bytes": 4096,
        }  # fmt: skip
        self.lost = 0

    def add_file(self, path: str, pages: int, cached: bool = False, **more: Any) -> int:
        """Another file: its number."""
        number = max(self.files) + 1
        self.files[number] = TracedFile(number, path, pages * PAGE_BYTES, **more)
        self.cache[number] = set(range(pages)) if cached else set()
        self.marked[number] = set()
        return number

    def reader(
        self, rank: int, pid: int | None = None, tid: int | None = None, file: int = 1,
        random_advice: bool = False, shift: int = 0, start_ns: int = 10 * MS,
    ) -> Reader:  # fmt: skip
        """A thread; ``shift``: pages by which its mapping is off a 64 KiB boundary."""
        pid = 1000 + rank if pid is None else pid
        base = 0x7F00_0000_0000 + shift * PAGE_BYTES
        mapped = self.mappings.setdefault((pid, file), set())
        reader = Reader(
            rank, pid, tid or pid, file, random_advice, base, START_NS + start_ns, mapped
        )
        self.readers.append(reader)
        self.event(reader, Kind.MAP, 0, self.files[file].size_bytes, value=base)
        return reader

    def event(
        self, by: Reader, kind: Kind, offset: int, length: int = PAGE_BYTES, value: int = 0,
        aux: int = 0, time_ns: int | None = None, file: int | None = None,
    ) -> None:  # fmt: skip
        """Report an event of a reader, now."""
        number = by.file if file is None else file
        at = by.now_ns if time_ns is None else time_ns
        self.rows.append((at, offset, length, value, by.pid, by.tid, kind, number, aux))

    # ------------------------------------------------------------ the kernel

    def _fill(self, by: Reader, start: int, end: int) -> bool:
        """Bring what is missing of [start, end) into the cache; whether anything was."""
        cache = self.cache[by.file]
        missing = [p for p in range(start, end) if p not in cache]
        cache.update(missing)
        self.filled += missing
        for run in np.split(np.array(missing), np.flatnonzero(np.diff(missing) != 1) + 1):
            if len(run):
                first = int(run[0]) * PAGE_BYTES
                self.event(by, Kind.FILL, first, len(run) * PAGE_BYTES, 500, len(run))
        return bool(missing)

    def _ahead(self, by: Reader, start: int, size: int, part: int, how: ReadaheadSite) -> None:
        last = self.files[by.file].size_bytes // PAGE_BYTES
        start, end = max(0, start), min(last, start + size)
        if how == ReadaheadSite.ASYNC:
            self.event(by, Kind.READAHEAD, start * PAGE_BYTES, aux=ReadaheadSite.ASYNC << 8)
        self.event(
            by, Kind.READAHEAD, start * PAGE_BYTES, size * PAGE_BYTES, part * PAGE_BYTES,
            ReadaheadSite.ORDER << 8,
        )  # fmt: skip
        self._fill(by, start, end)
        if end - part > start and self.marks:
            self.marked[by.file].add(end - part)

    def _around(self, by: Reader, page: int, kind: Kind) -> bool:
        """Map what is cached around a page; whether anything was."""
        shift = by.base // PAGE_BYTES % self.around
        low = (page + shift) // self.around * self.around - shift
        last = self.files[by.file].size_bytes // PAGE_BYTES
        start, end = max(0, low), min(last, low + self.around)
        there = [p for p in range(start, end) if p in self.cache[by.file]]
        if not there:
            return False
        by.mapped.update(p for p in there if p not in self.marked[by.file])
        length, address = (end - start) * PAGE_BYTES, by.base + page * PAGE_BYTES
        self.event(by, kind, start * PAGE_BYTES, length, address, page - low)
        return True

    def touch(self, by: Reader, page: int) -> None:
        """One byte of a page is read by the processor."""
        by.touched.add(page)
        if page in by.mapped:
            by.now_ns += 300
            return
        by.faults += 1
        after = self._around(by, page, Kind.AROUND)
        if page in by.mapped:
            by.now_ns += 500
            return
        at, offset = by.now_ns, page * PAGE_BYTES
        self.event(
            by, Kind.FAULT, offset, value=by.base + offset, aux=FAULT_AFTER_AROUND if after else 0
        )
        if page in self.cache[by.file]:
            if page in self.marked[by.file]:
                self.marked[by.file].discard(page)
                size = self.readahead
                part = size // 4
                self._ahead(by, page + part, size, part, ReadaheadSite.ASYNC)
            by.mapped.add(page)
            by.now_ns += 700
            return
        if by.random_advice:
            self._fill(by, page, page + 1)
        else:
            size = self.readahead
            self._ahead(by, max(0, page - size // 2), size, size // 4, ReadaheadSite.ORDER)
            self.marked[by.file].discard(page)
        by.now_ns += self.latency_ns
        by.majors += 1
        by.stall_ns += by.now_ns - at
        self.event(by, Kind.WAIT, offset, value=self.latency_ns - 1000, time_ns=by.now_ns - 500)
        self.event(by, Kind.MAJOR, offset, value=by.now_ns - at)
        self._around(by, page, Kind.MAPPED)
        by.mapped.add(page)

    def _do(self, by: Reader, step: Step) -> None:
        if isinstance(step, int | np.integer):
            self.touch(by, int(step))
        elif isinstance(step, Sleep):
            by.now_ns += step.ns
        elif isinstance(step, Unmap):
            by.mapped.clear()
        elif isinstance(step, Evict):
            pages = sorted(self.cache[by.file])
            for run in np.split(np.array(pages), np.flatnonzero(np.diff(pages) != 1) + 1):
                if len(run):
                    length = len(run) * PAGE_BYTES
                    self.event(by, Kind.EVICT, int(run[0]) * PAGE_BYTES, length, 0, len(run))
            self.cache[by.file].clear()
            self.marked[by.file].clear()
            for (_, file), mapped in self.mappings.items():
                if file == by.file:
                    mapped.clear()
        elif isinstance(step, Read):
            if self._fill(by, step.page, step.page + step.pages):
                by.now_ns += self.latency_ns
            by.touched.update(range(step.page, step.page + step.pages))
            by.now_ns += 1000
            self.event(by, Kind.READ, step.page * PAGE_BYTES, step.pages * PAGE_BYTES)
        else:
            by.now_ns += 2000
            self.event(by, Kind.CALL, 0, 64, 2000, Call.WRITE | 1 << 8, file=0)

    def run(self, walks: Iterable[tuple[Reader, Iterable[Step]]]) -> None:
        """Let readers go, each by its own clock."""
        queue: list[tuple[int, int, Reader, Iterator[Step]]] = []
        for i, (by, steps) in enumerate(walks):
            heapq.heappush(queue, (by.now_ns, i, by, iter(steps)))
        while queue:
            _, i, by, steps = heapq.heappop(queue)
            for step in steps:
                self._do(by, step)
                if queue and by.now_ns > queue[0][0]:
                    heapq.heappush(queue, (by.now_ns, i, by, steps))
                    break

    # ------------------------------------------------------------ the trace

    def trace(self, tail_ns: int = 10 * MS) -> Trace:
        """What a recorder would have written."""
        events = np.array(self.rows, EVENT)
        events = events[np.argsort(events["time_ns"], kind="stable")]
        processes = {
            r.pid: TracedProcess(r.pid, 999, r.rank, r.rank, "python3") for r in self.readers
        }
        last = int(events["time_ns"][-1]) if len(events) else START_NS
        end = {"ended_ns": last + tail_ns, "lost_events": self.lost, "raw_until_ns": None,
               "recorder_cpu_seconds": 0.1}  # fmt: skip
        return Trace(dict(self.meta), events, dict(self.files), processes, None, end, None, "t")


# ---- walks --------------------------------------------------------------------------------------


def extents(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """(first page, end) of records of these sizes, one after the other."""
    ends = np.cumsum(list(sizes)).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def records(which: Iterable[tuple[int, int]], batch: int = 0, pause_ns: int = 0) -> Iterator[Step]:
    """Read records page by page; compute after each ``batch`` of them."""
    for i, (start, end) in enumerate(which, 1):
        yield from range(start, end)
        if batch and i % batch == 0:
            yield Sleep(pause_ns)


def order(pattern: str, count: int, rank: int, ranks: int) -> list[int]:
    """The records that a rank of such a pattern reads, in order."""
    part = range(rank * count // ranks, (rank + 1) * count // ranks)
    if pattern == "consecutive":
        return list(part)
    if pattern == "backward":
        return list(part)[::-1]
    if pattern == "random":
        return np.random.default_rng(5).permutation(count)[rank::ranks].tolist()
    n = int(pattern.removeprefix("stride "))
    return list(range(rank % n, count, n))


# ---- reports ------------------------------------------------------------------------------------


def written(trace: Trace, path: Path) -> Path:
    """The trace as a file."""
    with open(path, "wb", buffering=0) as file:
        writer = Writer(file, trace.meta)
        writer.block("files", [vars(f) for f in trace.files.values()])
        writer.block("processes", [vars(p) for p in trace.processes.values()])
        writer.events(trace.events)
        writer.block("end", trace.end)
    return path


def without_index(*_: object) -> None:
    """No file of these traces exists."""


def report_of(machine: Machine) -> dict[str, Any]:
    report = analyse(machine.trace(), without_index)
    json.dumps(report, allow_nan=False)
    return report


def readers_of(report: dict[str, Any], file: int = 1) -> list[dict[str, Any]]:
    return [reader for reader in report["readers"] if reader["file"] == file]


def truth(machine: Machine, rank: int) -> list[Reader]:
    return [reader for reader in machine.readers if reader.rank == rank]


def check_counts(machine: Machine, report: dict[str, Any]) -> None:
    """Whatever the pattern: faults, pages and bytes are what the model did."""
    for reader in readers_of(report):
        mine = truth(machine, reader["rank"])
        touched = set().union(*(r.touched for r in mine))
        assert reader["faults"] == {
            "total": sum(r.faults for r in mine),
            "minor": sum(r.faults - r.majors for r in mine),
            "major": sum(r.majors for r in mine),
        }
        assert reader["touched_pages_least"] <= len(touched) <= reader["touched_pages"]
        assert reader["stall_seconds"] == pytest.approx(sum(r.stall_ns for r in mine) / 1e9)
        assert sum(e["faults"] for e in reader["epochs"]) == reader["faults"]["total"]
        assert sum(e["major"] for e in reader["epochs"]) == reader["faults"]["major"]
    file = report["files"][0]
    assert file["fill_bytes"] == len(machine.filled) * PAGE_BYTES
    assert file["filled_pages"] == len(set(machine.filled))
    assert file["refilled_bytes"] == (len(machine.filled) - len(set(machine.filled))) * PAGE_BYTES
    assert sum(file["fill_by"].values()) == file["fill_bytes"]
    everything = set().union(*(r.touched for r in machine.readers))
    useless = len(set(machine.filled) - everything)
    assert file["useless_bytes"] <= useless * PAGE_BYTES
