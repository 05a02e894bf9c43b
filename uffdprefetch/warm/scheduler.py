# SPDX-License-Identifier: Apache-2.0
"""Which extent goes to storage next, and how many are under way.

Streams ask for ranges; the scheduler cuts them into extents, hands the one that is nearest to its
reader to the workers, and keeps just as much under way as storage needs to stay busy
(plan/depth.py). More would only stand before a demand miss.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from uffdprefetch import uffd, uffd_pool
from uffdprefetch.node.files import FileState, read_ahead_bytes
from uffdprefetch.plan.depth import Depth
from uffdprefetch.plan.window import Storage, note_extent
from uffdprefetch.progress.streams import Stream
from uffdprefetch.warm.limits import TokenBucket

MIB = 1 << 20
#: Grid on which ranges are cut. 4 MiB is one RPC on Lustre, and its usual stripe boundary; where
#: readahead(2) works, half of that: a demand miss waits behind what is under way.
EXTENT_BYTES = 4 * MIB
READAHEAD_EXTENT_BYTES = 2 * MIB
#: What a stream needs at this coordinate or beyond comes behind whatever any reader needs (larger
#: than any file or order); beyond this one nobody waits for it either (node/bulk.py).
LAST, PATIENT = 1 << 60, 1 << 61
RECENT = 64
#: Bandwidth is taken over busy stretches of this length.
METER_NS = 50_000_000


@dataclass
class Extent:
    """[start, end) bytes of a file, wanted by a stream; ``pages`` are checkpoints to copy.
    ``need``: where the stream is when it needs them, if it does not walk through the file itself
    but through an order of its records (node/planned.py)."""

    file: FileState
    start: int
    end: int
    stream: Stream | None
    pages: list[int]
    alone: bool = False
    need: int | None = None

    @property
    def at(self) -> int:
        """Where its stream needs it, in the stream's own coordinate."""
        return self.start if self.need is None else self.need


@dataclass
class Meter:
    """Bandwidth and base latency of storage, from finished extents (Little's law)."""

    bandwidth: float = 0.0
    _from_ns: int = 0  # a busy stretch that is being measured
    _bytes: int = 0
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def note(self, result: uffd.WarmResult, was_idle: bool, alone: bool) -> float | None:
        """Feed an extent that was really read; returns bytes/s when a busy stretch was long enough.

        ``was_idle``: nothing was under way before it. ``alone``: nothing was when it was sent, so
        that it did not stand behind others of ours.
        """
        sample = None
        if was_idle or not self._from_ns:
            self._from_ns, self._bytes = result.start_ns, 0
        self._bytes += result.bytes
        elapsed = result.done_ns - self._from_ns
        if elapsed >= METER_NS:
            sample = self._bytes * 1e9 / elapsed
            share = 0.3 if self.bandwidth else 1.0
            self.bandwidth += (sample - self.bandwidth) * share
            self._from_ns, self._bytes = result.done_ns, 0
        if alone and self.bandwidth:
            took = (result.done_ns - result.start_ns) / 1e9
            self._latencies.append(max(1e-4, took - result.bytes / self.bandwidth))
        return sample

    @property
    def storage(self) -> Storage:
        """What the planner needs to know."""
        latency = min(self._latencies) if self._latencies else 0.0
        return Storage(self.bandwidth, latency)


class Scheduler:
    """Extents in, finished extents out. One thread (the service's) calls everything here."""

    def __init__(
        self,
        workers: uffd.Workers,
        bucket: TokenBucket,
        on_pages: Callable[[FileState, list[int]], None],
        grid_bytes: int,
        on_warmed: Callable[[Extent, uffd.WarmResult], None] | None = None,
    ) -> None:
        self._workers = workers
        self._bucket = bucket
        self._on_pages = on_pages
        self._on_warmed = on_warmed
        self._grid_bytes = grid_bytes
        self._queues: dict[int, deque[Extent]] = {}
        self._streams: dict[int, Stream] = {}
        self._under_way: dict[int, Extent] = {}
        self._next_id = 1
        self.under_way_bytes = 0
        self.meter = Meter()
        self.pool: uffd_pool.Pool | None = None
        self._idle = True
        self._depth = Depth()
        self.prefetched_bytes = 0
        self.failed_extents = 0
        self.last_error = ""

    # -------------------------------------------------------------- asking

    def want(
        self, file: FileState, stream: Stream, start: int, end: int, need: int | None = None
    ) -> int:
        """Queue [start, end) for a stream, less what is under way; returns bytes. ``need``: see
        Extent.

        Another stream's queue does not count: its reader may need the range much later. Whoever
        comes second finds it under way, just read, or resident.
        """
        queued = 0
        for a, b in file.in_flight.missing(start, end):
            queue = self._queues.setdefault(id(stream), deque())
            if need is None and self._goes_on(queue, file, stream, a):
                queued -= queue[-1].end - queue[-1].start
                a = self._take_back(queue).start  # one request instead of two
            for extent in self._cut(file, stream, a, b):
                extent.need = need if need is None else need + extent.start - start
                queue.append(extent)
                self._streams[id(stream)] = stream
                queued += extent.end - extent.start
        return queued

    def _cut(self, file: FileState, stream: Stream, start: int, end: int) -> list[Extent]:
        size = EXTENT_BYTES if file.method == uffd.WARM_PREAD else READAHEAD_EXTENT_BYTES
        cuts = [start, *range((start // size + 1) * size, end, size), end]
        extents = []
        for a, b in pairwise(cuts):
            grid = self._grid_bytes
            pages = [
                at // uffd.PAGE_BYTES
                for at in range(-(-a // grid) * grid, b, grid)
                if at and at + uffd.PAGE_BYTES <= file.size_bytes and file.pooled is None
            ]
            pages = [p for p in pages if p not in file.written and p not in file.pending_pages]
            pages = pages[: uffd.PAGES_PER_JOB]
            file.pending_pages.update(pages)
            extents.append(Extent(file, a, b, stream, pages))
        return extents if stream.direction > 0 else extents[::-1]

    @staticmethod
    def _goes_on(queue: deque[Extent], file: FileState, stream: Stream, at: int) -> bool:
        last = queue[-1] if queue and stream.direction > 0 else None
        return last is not None and last.file is file and last.end == at

    @staticmethod
    def _take_back(queue: deque[Extent]) -> Extent:
        extent = queue.pop()
        extent.file.pending_pages.difference_update(extent.pages)
        return extent

    def copy(self, file: FileState, pages: list[int]) -> None:
        """Have checkpoint pages copied that no extent brings along."""
        pages = [p for p in pages if p not in file.written and p not in file.pending_pages]
        for i in range(0, len(pages), uffd.PAGES_PER_JOB):
            some = pages[i : i + uffd.PAGES_PER_JOB]
            if self._send(Extent(file, 0, 0, None, some)):
                file.pending_pages.update(some)

    def forget(self, stream: Stream) -> None:
        """Drop what a stream had queued."""
        for extent in self._queues.pop(id(stream), ()):
            extent.file.pending_pages.difference_update(extent.pages)
        self._streams.pop(id(stream), None)

    def forget_file(self, file: FileState) -> None:
        """Drop everything queued for a file."""
        for key, queue in list(self._queues.items()):
            if any(extent.file is file for extent in queue):
                self.forget(self._streams[key])

    def busy_with(self, file: FileState) -> bool:
        """Whether a worker still uses the file's descriptors."""
        return any(extent.file is file for extent in self._under_way.values())

    def under_way_by_rank(self) -> dict[int, int]:
        """Bytes that the workers are reading now, by the rank that they are for."""
        found: dict[int, int] = {}
        for extent in self._under_way.values():
            if extent.stream is not None:
                rank = extent.stream.rank
                found[rank] = found.get(rank, 0) + extent.end - extent.start
        return found

    @property
    def queued_bytes(self) -> int:
        """Asked for, not yet handed to a worker."""
        return sum(e.end - e.start for queue in self._queues.values() for e in queue)

    # -------------------------------------------------------------- sending

    @property
    def target_bytes(self) -> int:
        """How much to keep under way now."""
        return self._depth.bytes

    def _nearest(self, now_ns: int) -> int | None:
        """The stream whose reader stands closest before its next extent.

        In bytes, not by the readers' rates: who has waited shows a low rate and would wait again,
        until one rank is far behind all others. A slow reader's window bounds what it takes.
        """
        best, best_gap = None, 0
        for key, queue in self._queues.items():
            stream = self._streams[key]
            expected = stream.expected_bytes(now_ns, self._grid_bytes)
            gap = (queue[0].at - expected) * stream.direction
            if best is None or gap < best_gap:
                best, best_gap = key, gap
        return best

    def pump(self, now_ns: int) -> int:
        """Hand extents to the workers; returns ns after which to call again (0: no need)."""
        while self.under_way_bytes < self.target_bytes:
            key = self._nearest(now_ns)
            if key is None:
                return 0
            wait = self._bucket.wait_ns(now_ns)
            if wait:
                return wait
            queue = self._queues[key]
            extent = queue[0]
            file = extent.file
            if extent.at >= PATIENT and self.under_way_bytes > self._busy_bytes:
                return 0
            if file.changed or not (extent.pages or file.fresh(extent.start, extent.end)):
                file.pending_pages.difference_update(extent.pages)
            elif not self._send(extent):
                return 0  # the workers' queue is full; they will tell when it is not
            queue.popleft()
            if not queue:
                del self._queues[key], self._streams[key]
        return 0

    @property
    def _busy_bytes(self) -> float:
        """So much under way, and one extent, keeps the storage busy. A reader's own miss waits
        behind all of it: so of what nobody waits for there is no more."""
        storage = self.meter.storage
        return 2 * storage.bandwidth_bytes_per_second * storage.latency_seconds

    def _send(self, extent: Extent) -> bool:
        file = extent.file
        length = extent.end - extent.start
        extent.alone = self.under_way_bytes == 0
        if length and extent.alone:
            self._idle = True
        if file.pooled is not None and length:
            pooled = file.pooled
            sent = pooled.pool.submit(self._next_id, pooled.number, extent.start, length)
        else:
            sent = self._workers.submit(
                self._next_id,
                file.fd if length else file.page_fd,
                extent.start,
                length,
                method=file.method,
                chunk_bytes=file.chunk_bytes,
                checkpoint_fd=file.checkpoint_fds()[0] if extent.pages else -1,
                pages=extent.pages,
            )
        if sent:
            self._bucket.take(length)
            self._under_way[self._next_id] = extent
            self._next_id += 1
            file.in_flight.add(extent.start, extent.end)
            self.under_way_bytes += length
        return sent

    # -------------------------------------------------------------- finished

    def reap(self) -> None:
        """Take the workers' results: books, feedback to the windows, pages to announce."""
        done = self._workers.reap() + (self.pool.reap() if self.pool else [])
        for result in done:
            extent = self._under_way.pop(result.id)
            file, length = extent.file, extent.end - extent.start
            self.under_way_bytes -= length
            file.in_flight.remove(extent.start, extent.end)
            copied = [p for i, p in enumerate(extent.pages) if result.copied >> i & 1]
            file.pending_pages.difference_update(extent.pages)
            file.written.update(copied)
            if result.error:
                self.failed_extents += 1
                self.last_error = f"{file.path} at {extent.start}: errno {-result.error}"
            elif length:
                self._account(extent, result)
                if self._on_warmed is not None:
                    self._on_warmed(extent, result)
            if copied and not file.changed:
                self._on_pages(file, copied)

    def _account(self, extent: Extent, result: uffd.WarmResult) -> None:
        file, stream = extent.file, extent.stream
        if file.method == uffd.WARM_PROBE and result.method != uffd.WARM_PROBE:
            file.method, file.chunk_bytes = result.method, result.chunk_bytes
            if result.method == uffd.WARM_READAHEAD:
                # part of the probed range may have been resident: one call may bring more
                ahead = 2 * (read_ahead_bytes(file.key[0]) or 0)
                file.chunk_bytes = min(EXTENT_BYTES, max(file.chunk_bytes, ahead))
            name = "readahead(2)" if result.method == uffd.WARM_READAHEAD else "pread, FADV_RANDOM"
            file.method_reason = f"{name} of {file.chunk_bytes >> 10} KiB, by probing"
        file.recent.add(extent.start, extent.end)
        file.already_resident_bytes += result.resident_bytes
        self._bucket.take(-result.resident_bytes)
        if not result.bytes:
            return
        file.prefetched_bytes += result.bytes
        self.prefetched_bytes += result.bytes
        file.mark_prefetched(extent.start, extent.end)
        if result.bytes >= MIB:
            sample = self.meter.note(result, self._idle, extent.alone)
            if sample and self._queues:
                self._depth.note(sample)
            self._idle = False
        if stream is None:
            return
        late = (stream.position_bytes - extent.at) * stream.direction > 0
        if stream.direction < 0:
            late = stream.position_bytes < extent.end
        if late:
            file.late_bytes += result.bytes
        note_extent(stream, late)


def now_ns() -> int:
    """CLOCK_MONOTONIC: the clock of every time in the service and in the agents' events."""
    return time.monotonic_ns()
