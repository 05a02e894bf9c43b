# SPDX-License-Identifier: Apache-2.0
"""What the kernel does by itself, and what `wrap` would do, as replay policies. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from uffdprefetch.sim.replay.demand import Demand
from uffdprefetch.sim.replay.engine import Range, Resident
from uffdprefetch.sim.replay.keep import CHUNK_PAGES

Array = np.ndarray[Any, Any]

#: The kernel's readahead where a trace does not tell the file system's (mm/readahead.c).
READ_AHEAD_BYTES = 128 << 10
#: A walk is known after so much of it in order: the service's first checkpoints.
WALK_BYTES = 1 << 20
#: Between checkpoints, as the design has it where a stream is known.
DISTANCE_BYTES = 8 << 20
#: A touch this near after the last one goes on with the walk: what other ranks skip lies between.
NEAR_BYTES = 1 << 20


class Plain:
    """mmap as it is: read-around on a miss, one window more when its mark is met
    (mm/filemap.c, do_sync_mmap_readahead and do_async_mmap_readahead)."""

    request_bytes = READ_AHEAD_BYTES

    def begin(self, demand: Demand) -> None:
        page = demand.page_bytes
        self.around = [
            max(1, (READ_AHEAD_BYTES if f.read_ahead_bytes is None else f.read_ahead_bytes) // page)
            for f in demand.files]
        self.marks: list[dict[int, int]] = [{} for _ in demand.files]  # page -> window's end
        self.queue: deque[Range] = deque()

    def miss(self, stream: int, file: int, page: int) -> Range:
        around = self.around[file]
        first = max(0, page - around // 2)
        end = max(page + 1, first + around)
        if around > 1:
            self.marks[file][end - max(1, around // 4)] = end
        return file, first, end

    def touched(self, stream: int, access: int, file: int, first: int, end: int) -> None:
        marks = self.marks[file]
        for page in [p for p in marks if first <= p < end] if len(marks) < end - first else [
                p for p in range(first, end) if p in marks]:
            start = marks.pop(page)
            after = start + self.around[file]
            marks[start] = after
            self.queue.append((file, start, after))

    def wants(self, resident: Resident) -> Range | None:
        while self.queue:
            wanted = resident.missing(self.queue.popleft())
            if wanted is not None:
                return wanted
        return None


class Windows(Plain):
    """`--policy fixed`: of each thread that walks, ``size`` bytes ahead; the next when
    ``threshold`` of them are passed, which is seen at checkpoints ``distance`` bytes apart. Misses
    are the kernel's."""

    def __init__(self, size_bytes: int, distance_bytes: int = DISTANCE_BYTES,
                 threshold: float = 0.75, request_bytes: int = 1 << 20) -> None:
        self.size_bytes, self.distance_bytes = size_bytes, distance_bytes
        self.threshold, self.request_bytes = threshold, request_bytes

    def begin(self, demand: Demand) -> None:
        super().begin(demand)
        self.page = demand.page_bytes
        self.size = max(1, self.size_bytes // self.page)
        self.distance = max(1, self.distance_bytes // self.page)
        self.begun = [-1] * len(demand.streams)  # where the walk began
        self.last = [(-1, -1)] * len(demand.streams)  # (file, page after the last touched)
        self.upto = [0] * len(demand.streams)  # end of its window
        self.next: list[int] = [0] * len(demand.streams)  # the place that asks for the next

    def touched(self, stream: int, access: int, file: int, first: int, end: int) -> None:
        super().touched(stream, access, file, first, end)
        before, at = self.last[stream]
        self.last[stream] = (file, max(end, at) if before == file and first >= at - 1 else end)
        if before != file or not 0 <= first - at <= NEAR_BYTES // self.page:
            if before == file and first < at and at - first <= NEAR_BYTES // self.page:
                return  # a page of the B-tree, or the record again
            self.begun[stream], self.upto[stream], self.next[stream] = first, 0, 0
            return
        if (end - self.begun[stream]) * self.page < WALK_BYTES:
            return
        # Until a walk is known its checkpoints are dense; then it is seen where it met one.
        seen = end // self.distance * self.distance if self.upto[stream] else end
        if seen < self.next[stream]:
            return
        start = max(end, self.upto[stream])
        self.upto[stream] = max(start, end + self.size)
        self.next[stream] = self.upto[stream] - int(self.size * (1 - self.threshold))
        step = max(1, self.request_bytes // self.page)
        for low in range(start, self.upto[stream], step):
            self.queue.append((file, low, min(low + step, self.upto[stream])))


class Planned(Plain):
    """`--plan`: each thread's accesses are known, and read in order, at most ``lookahead`` bytes
    ahead of it."""

    def __init__(self, lookahead_bytes: int, request_bytes: int = 1 << 20) -> None:
        self.lookahead_bytes, self.request_bytes = lookahead_bytes, request_bytes

    def begin(self, demand: Demand) -> None:
        super().begin(demand)
        self.streams = demand.streams
        # Bytes of the order up to each access.
        self.before = [
            np.r_[0, np.cumsum((s.end - s.first) * demand.page_bytes)] for s in self.streams]
        self.at = [0] * len(self.streams)
        self.asked = [0] * len(self.streams)
        # A thread's order is read ahead once it reads: before that the file is not mapped.
        self.reads = [False] * len(self.streams)

    def miss(self, stream: int, file: int, page: int) -> Range:
        self.reads[stream] = True
        return super().miss(stream, file, page)

    def touched(self, stream: int, access: int, file: int, first: int, end: int) -> None:
        super().touched(stream, access, file, first, end)
        self.at[stream] = access
        self.reads[stream] = True

    def wants(self, resident: Resident) -> Range | None:
        """Of the thread that has the least ahead."""
        while True:
            best, least = -1, self.lookahead_bytes
            for number, stream in enumerate(self.streams):
                self.asked[number] = max(self.asked[number], self.at[number])
                if self.reads[number] and self.asked[number] < len(stream):
                    ahead = int(self.before[number][self.asked[number]]
                                - self.before[number][self.at[number]])
                    if ahead < least:
                        best, least = number, ahead
            if best < 0:
                return super().wants(resident)
            stream, k = self.streams[best], self.asked[best]
            self.asked[best] += 1
            wanted = resident.missing((int(stream.file[k]), int(stream.first[k]),
                                       int(stream.end[k])))
            if wanted is not None:
                return wanted


def chunked(wanted: Range) -> Range:
    """A range in whole chunks of the pool."""
    file, first, end = wanted
    return (file, first // CHUNK_PAGES * CHUNK_PAGES, -(-end // CHUNK_PAGES) * CHUNK_PAGES)


class PoolWindows(Windows):
    """`--engine pool`: windows, and misses of one chunk."""

    def miss(self, stream: int, file: int, page: int) -> Range:
        return chunked((file, page, page + 1))


class PoolPlanned(Planned):
    """`--engine pool --plan`."""

    def miss(self, stream: int, file: int, page: int) -> Range:
        super().miss(stream, file, page)
        return chunked((file, page, page + 1))

    def wants(self, resident: Resident) -> Range | None:
        wanted = super().wants(resident)
        return None if wanted is None else chunked(wanted)
