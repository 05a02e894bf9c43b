# SPDX-License-Identifier: Apache-2.0
"""A recorded job's demand: which pages, in which order, after which think times. Pure, but for the
index of a record file, which is read where the file still exists.

A page fault is recorded, a touch of a mapped page is not. So the extent of an access is the record
that begins there, by the file's index; else everything up to the next access if that lies within
what was mapped, or the page alone. The think time is that from one fault's end to the next fault.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.trace.analyse.accesses import Accesses, accesses
from uffdprefetch.trace.analyse.records import RecordIndex, open_records
from uffdprefetch.trace.analyse.survey import OpenRecords, Survey
from uffdprefetch.trace.file.events import Kind
from uffdprefetch.trace.file.trace_file import File, Trace


@dataclass(frozen=True)
class Stream:
    """One thread's accesses, in order: parallel columns."""

    rank: int
    thread: int
    file: Array  # place of the file in Demand.files
    first: Array  # page
    end: Array  # the page after the last
    think_ns: Array  # since the end of the access before; of the first, since the job began
    tail_ns: int  # after the last one

    def __len__(self) -> int:
        return len(self.first)


def again(stream: Stream, epochs: int) -> Stream:
    """The same accesses ``epochs`` times; a later epoch begins after the median think time."""
    if epochs == 1:
        return stream
    first = stream.think_ns.copy()
    later = first.copy()
    later[0] = np.median(first)
    return Stream(
        stream.rank,
        stream.thread,
        np.tile(stream.file, epochs),
        np.tile(stream.first, epochs),
        np.tile(stream.end, epochs),
        np.concatenate([first, *[later] * (epochs - 1)]),
        stream.tail_ns,
    )


@dataclass(frozen=True)
class Demand:
    """A job's accesses."""

    files: list[File]
    streams: list[Stream]
    page_bytes: int
    seconds: float  # that the recorded job took
    # of the thread that waited longest: its time less all think_ns, of which minor waits are part
    stall_seconds: float
    command: list[str]

    def pages(self, file: int) -> int:
        return -(-self.files[file].size_bytes // self.page_bytes)

    @property
    def wanted_bytes(self) -> int:
        """Distinct bytes."""
        total = 0
        for number in range(len(self.files)):
            seen: Array = np.zeros(self.pages(number) + 1, np.int64)
            for stream in self.streams:
                mine = stream.file == number
                np.add.at(seen, stream.first[mine], 1)
                np.add.at(seen, np.minimum(stream.end[mine], len(seen) - 1), -1)
            total += int((np.cumsum(seen) > 0).sum()) * self.page_bytes
        return total


def demand_of(trace: Trace, epochs: int = 1, open_index: OpenRecords = open_records) -> Demand:
    """The recorded accesses, ``epochs`` times over.

    Raises UffdPrefetchError (exit 2) where a trace has no accesses to replay.
    """
    work = Survey(trace, open_index)
    events = trace.events
    files: list[File] = []
    parts = []
    for number in sorted(trace.files):
        some = events[events["file"] == number]
        rank = work.ranks.of(some["pid"])
        maps = some[some["kind"] == Kind.MAP]
        file, index = trace.files[number], None
        for one in np.unique(rank[rank >= 0]).tolist():
            found = accesses(some[rank == one], maps, work.start_ns, work.page_bytes)
            if not len(found):
                continue
            if not files or files[-1] is not file:
                files.append(file)
                index = open_index(file.path, file.size_bytes, work.page_bytes)
            parts.append((one, len(files) - 1, found, index))
    begin_ns = int(trace.meta.get("job_started_ns") or work.start_ns) - work.start_ns
    end_ns = int(trace.meta.get("job_ended_ns") or 0) - work.start_ns
    if end_ns <= begin_ns:
        end_ns = int(work.seconds * 1e9)
    streams = _streams(parts, begin_ns, end_ns)
    if not streams:
        raise UffdPrefetchError(
            f"{trace.path}: no access of the job was recorded, so there is nothing to replay", 2
        )
    took_ns = end_ns - begin_ns
    stalls = [took_ns - int(s.think_ns.sum()) - s.tail_ns for s in streams]
    for number, file in enumerate(files):  # a file that grew has the size that was read
        read = max((int(s.end[s.file == number].max(initial=0)) for s in streams), default=0)
        files[number] = replace(file, size_bytes=max(file.size_bytes, read * work.page_bytes))
    streams = [again(stream, epochs) for stream in streams]
    return Demand(
        files,
        streams,
        work.page_bytes,
        took_ns / 1e9,
        max(stalls) / 1e9,
        list(trace.meta.get("command") or []),
    )


def _streams(
    parts: list[tuple[int, int, Accesses, RecordIndex | None]], begin_ns: int, end_ns: int
) -> list[Stream]:
    columns: dict[tuple[int, int], list[tuple[Array, ...]]] = {}
    for rank, file, found, index in parts:
        for tid in np.unique(found.tid).tolist():
            mine = found.part(found.tid == tid)
            first, end, time_ns, until_ns = _wanted(mine, index)
            which: Array = np.full(len(first), file, np.int64)
            columns.setdefault((rank, tid), []).append((time_ns, until_ns, which, first, end))
    streams = []
    for (rank, tid), several in sorted(columns.items()):
        time_ns, until_ns, which, first, end = map(np.concatenate, zip(*several, strict=True))
        order = np.argsort(time_ns, kind="stable")
        time_ns, until_ns = time_ns[order], np.maximum.accumulate(until_ns[order])
        think = np.maximum(0, time_ns - np.r_[begin_ns, until_ns[:-1]])
        tail = max(0, end_ns - int(until_ns[-1]))
        streams.append(Stream(rank, tid, which[order], first[order], end[order], think, tail))
    return streams


def _wanted(a: Accesses, index: RecordIndex | None) -> tuple[Array, Array, Array, Array]:
    """(first page, end, request time, completion time) of one thread's accesses to one file, merged
    by record."""
    following = np.r_[a.page[1:], -1]
    within = (following > a.page) & (following <= a.high)
    end = np.where(within, following, np.maximum(a.sure, a.page + 1))
    first = a.page.copy()
    record: np.ndarray = np.full(len(a), -1, np.int64)
    if index is not None and index.tells:
        record = index.of_accesses(a.page, a.sure, a.tid)
        low, high = index.pages_of(record)
        first = np.where(record >= 0, np.minimum(low, first), first)
        end = np.where(record >= 0, np.maximum(high, a.page + 1), end)
    # Successive accesses to one record are merged: waits are summed, think time moves behind it.
    same = np.r_[False, (record[1:] >= 0) & (record[1:] == record[:-1])]
    start = np.flatnonzero(~same)
    waited = np.add.reduceat(a.until_ns - a.time_ns, start)
    return (
        np.minimum.reduceat(first, start),
        np.maximum.reduceat(end, start),
        a.time_ns[start],
        a.time_ns[start] + waited,
    )
