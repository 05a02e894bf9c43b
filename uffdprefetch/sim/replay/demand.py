# SPDX-License-Identifier: Apache-2.0
"""A recorded job's demand: which pages, in which order, after which think times. Pure, but for the
index of a record file, which is read where the file still exists.

A page fault is recorded, a touch of a mapped page is not. So the extent of an access is the record
that begins there, by the file's index; else everything up to the next access, upwards or downwards,
if that lies within what was mapped, or the page alone. The think time is that from one fault's end
to the next fault.

What a miss brings depends on what the kernel was told (madvise) and on what it has seen of the
reader: 4 KiB under MADV_RANDOM or after many misses, else readahead around the page. So it is taken
from the recording, where each fill of the page cache has its thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.trace.analyse.accesses import READS, Accesses, accesses
from uffdprefetch.trace.analyse.fills import brought_by_misses
from uffdprefetch.trace.analyse.folios import Folios
from uffdprefetch.trace.analyse.records import RecordPages, open_records
from uffdprefetch.trace.analyse.survey import OpenRecords, Survey
from uffdprefetch.trace.file.events import Kind
from uffdprefetch.trace.file.trace_file import Trace, TracedFile

#: The kernel's default readahead, where a trace lacks the file system's (mm/readahead.c).
READ_AHEAD_BYTES = 128 << 10
#: Share of what a thread brought that no miss of its own brought, from which readahead went on by
#: its marks. A reader of one page in each window passes them by, and misses each window.
GOES_ON = 0.5


@dataclass(frozen=True)
class ThreadAccesses:
    """One thread's accesses, in order: parallel columns."""

    rank: int
    thread: int
    file: Array  # place of the file in Demand.files
    first: Array  # page
    end: Array  # the page after the last
    down: Array  # bool: its pages are touched from the last one to the first
    # pages before the missed one, and from it on, that a miss in it brings; 0, 0: not recorded
    before: Array
    after: Array
    goes_on: Array  # bool: the kernel was seen to read on after what a miss brought
    think_ns: Array  # since the end of the access before; of the first, since the job began
    tail_ns: int  # after the last one

    def __len__(self) -> int:
        return len(self.first)


def again(stream: ThreadAccesses, epochs: int) -> ThreadAccesses:
    """The same accesses ``epochs`` times; a later epoch begins after the median think time."""
    if epochs == 1:
        return stream
    first = stream.think_ns.copy()
    later = first.copy()
    later[0] = np.median(first)
    one = stream
    file, start, end = (np.tile(column, epochs) for column in (one.file, one.first, one.end))
    down, before, after = (np.tile(column, epochs) for column in (one.down, one.before, one.after))
    goes_on = np.tile(one.goes_on, epochs)
    think_ns = np.concatenate([first, *[later] * (epochs - 1)])
    return ThreadAccesses(
        one.rank, one.thread, file, start, end, down, before, after, goes_on, think_ns, one.tail_ns
    )  # fmt: skip


@dataclass(frozen=True)
class Demand:
    """A job's accesses."""

    files: list[TracedFile]
    streams: list[ThreadAccesses]
    page_bytes: int
    seconds: float  # that the recorded job took
    # of the thread that waited longest: its time less all think_ns, of which minor waits are part
    stall_seconds: float
    command: list[str]
    misses: int = 0  # accesses that the recorded job waited for storage in
    # of one of them, on average: how long, and what it brought
    miss_seconds: float = 0.0
    miss_bytes: int = 0
    read_call_share: float = 0.0  # part of the pages that read(2) and its kind took
    wrapped: bool = False  # recorded under wrap, which read ahead

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

    def repeated(self, epochs: int) -> Demand:
        """All accesses ``epochs`` times over."""
        return replace(self, streams=[again(stream, epochs) for stream in self.streams])


def demand_of(trace: Trace, open_index: OpenRecords = open_records) -> Demand:
    """The recorded accesses.

    Raises UffdPrefetchError (exit 2) where a trace has no accesses to replay.
    """
    work = Survey(trace, open_index)
    events = trace.events
    files: list[TracedFile] = []
    parts: list[_Part] = []
    for number in sorted(trace.files):
        some = events[events["file"] == number]
        rank = work.ranks.of(some["pid"])
        maps, fills = some[some["kind"] == Kind.MAP], some[some["kind"] == Kind.FILL]
        file, index = trace.files[number], None
        folios = Folios(some, work.page_bytes, -(-file.size_bytes // work.page_bytes))
        most = read_ahead_pages(file, work.page_bytes)
        for one in np.unique(rank[rank >= 0]).tolist():
            found = accesses(some[rank == one], maps, work.start_ns, work.page_bytes)
            if not len(found):
                continue
            if not files or files[-1] is not file:
                files.append(file)
                index = open_index(file.path, file.size_bytes, work.page_bytes)
            brought = brought_by_misses(found, fills, work.start_ns, work.page_bytes, most)
            filled = fills["tid"], fills["length"].astype(np.int64) // work.page_bytes
            parts.append(_Part(one, len(files) - 1, folios.widen(found), brought, filled, index))
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
    taken = [part.accesses.part(part.accesses.sensor == READS) for part in parts]
    read_pages = sum(int((a.sure - a.page).sum()) for a in taken)
    pages = sum(int((s.end - s.first).sum()) for s in streams)
    return Demand(
        files,
        streams,
        work.page_bytes,
        took_ns / 1e9,
        max(stalls) / 1e9,
        list(trace.meta.get("command") or []),
        *_misses(parts, work.page_bytes),
        min(1.0, read_pages / max(1, pages)),
        bool(work.kinds[Kind.WARM]),
    )


def _misses(parts: list[_Part], page_bytes: int) -> tuple[int, float, int]:
    """(misses, seconds, bytes) as Demand has them."""
    took, pages = [], []
    for part in parts:
        a, (before, after) = part.accesses, part.brought
        took.append((a.until_ns - a.time_ns)[a.major])
        pages.append((before + after)[a.major])
    seconds, brought = np.concatenate(took), np.concatenate(pages)
    if not len(seconds):
        return 0, 0.0, 0
    return len(seconds), float(seconds.mean()) / 1e9, round(float(brought.mean()) * page_bytes)


@dataclass(frozen=True)
class _Part:
    """A rank's accesses to a file; ``brought``: as brought_by_misses() tells it of each."""

    rank: int
    file: int
    accesses: Accesses
    brought: tuple[Array, Array]
    filled: tuple[Array, Array]  # (thread, pages) of each fill of the file
    index: RecordPages | None


def read_ahead_pages(file: TracedFile, page_bytes: int) -> int:
    """The kernel's readahead window of a file, at least a page."""
    known = file.read_ahead_bytes
    return max(1, (READ_AHEAD_BYTES if known is None else known) // page_bytes)


def _streams(parts: list[_Part], begin_ns: int, end_ns: int) -> list[ThreadAccesses]:
    columns: dict[tuple[int, int], list[tuple[Array, ...]]] = {}
    for part in parts:
        for tid in np.unique(part.accesses.tid).tolist():
            mine = part.accesses.tid == tid
            before, after = (column[mine] for column in part.brought)
            found = _wanted(part.accesses.part(mine), before, after, part.index)
            which: Array = np.full(len(found[0]), part.file, np.int64)
            of_thread, pages = part.filled
            filled, missed = int(pages[of_thread == tid].sum()), int(before.sum() + after.sum())
            goes_on: Array = np.full(len(found[0]), filled - missed >= GOES_ON * filled)
            columns.setdefault((part.rank, tid), []).append((*found, goes_on, which))
    streams = []
    for (rank, tid), several in sorted(columns.items()):
        joined = [np.concatenate(column) for column in zip(*several, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        time_ns, until_ns, first, end, down, before, after, goes_on, file = (
            one[order] for one in joined
        )
        until_ns = np.maximum.accumulate(until_ns)
        think = np.maximum(0, time_ns - np.r_[begin_ns, until_ns[:-1]])
        tail = max(0, end_ns - int(until_ns[-1]))
        streams.append(
            ThreadAccesses(rank, tid, file, first, end, down, before, after, goes_on, think, tail)
        )  # fmt: skip
    return streams


def _wanted(
    a: Accesses, before: Array, after: Array, index: RecordPages | None
) -> tuple[Array, ...]:
    """(request time, completion time, first page, end, down, before, after) of one thread's
    accesses to one file, merged by record; the columns are those of ThreadAccesses."""
    following = np.r_[a.page[1:], -1]
    upwards = (following > a.page) & (following <= a.mapped.high)
    down = (following >= 0) & (following < a.page) & (following >= a.mapped.low - 1)
    end = np.where(upwards, following, np.where(down, a.page + 1, np.maximum(a.sure, a.page + 1)))
    first = np.where(down, following + 1, a.page)
    record: np.ndarray = np.full(len(a), -1, np.int64)
    if index is not None and index.tells:
        record = index.of_accesses(a.page, a.sure, a.tid)
        low, high = index.pages_of(record)
        first = np.where(record >= 0, np.minimum(low, first), first)
        end = np.where(record >= 0, np.maximum(high, a.page + 1), end)
        down &= record < 0
    # A later miss at a place where none was recorded brings what the reader's last one brought.
    known: Array = np.flatnonzero(after)
    if len(known):
        last = np.maximum(0, np.searchsorted(known, np.arange(len(a)), side="right") - 1)
        before, after = before[known[last]], after[known[last]]
    # Successive accesses to one record are merged: waits are summed, think time moves behind it.
    same = np.r_[False, (record[1:] >= 0) & (record[1:] == record[:-1])]
    start = np.flatnonzero(~same)
    waited = np.add.reduceat(a.until_ns - a.time_ns, start)
    return (
        a.time_ns[start],
        a.time_ns[start] + waited,
        np.minimum.reduceat(first, start),
        np.maximum.reduceat(end, start),
        down[start],
        before[start],
        after[start],
    )
