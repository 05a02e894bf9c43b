# SPDX-License-Identifier: Apache-2.0
"""Which extent goes to storage next, and how many are under way.

Streams ask for ranges; the scheduler cuts them into extents, hands the one that is nearest to its
reader to the workers, and keeps just as much under way as storage needs to stay busy
(warm/depth.py). More would only stand before a demand miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from uffdprefetch.base.cache_call import CHUNK_MAX_BYTES
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.record import dataclass, field, replace
from uffdprefetch.base.units import MIB
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.predict.storage import MISS_BYTES, UNDER_WAY_BYTES, Storage
from uffdprefetch.predict.streams import PlainRate
from uffdprefetch.state.files import FileState
from uffdprefetch.warm.consumer import Consumer, PrefetchRange, Priority
from uffdprefetch.warm.depth import Depth
from uffdprefetch.warm.meter import Meter
from uffdprefetch.warm.results import Results
from uffdprefetch.warm.token_bucket import TokenBucket

if TYPE_CHECKING:
    from uffdprefetch.state.pool_file import PoolFile

#: Grid on which ranges are cut. 4 MiB is one RPC on Lustre, and its usual stripe boundary; ...
EXTENT_BYTES = CHUNK_MAX_BYTES
#: ... where readahead(2) works, half of that: a demand miss waits behind what is under way. (Of
#: what yields only a window is.)
READAHEAD_EXTENT_BYTES = 2 * MIB
#: What yields to its readers' misses is read by as much as a miss brings, and by so many extents at
#: a time: when one has ended, the others go on until the service has sent the next.
EXTENTS = 4
#: Of a guess less is taken back too late.
GUESSED_EXTENT_BYTES = MIB
#: In what time the service, which shares its cores with the job, has sent the next request: what is
#: under way of what nobody waits for lasts as long.
RESPONSE_SECONDS = 0.008


def yielding_bytes(storage: Storage) -> int:
    """What of a stream, under way at one time, keeps the storage busy: what comes in its latency
    and what a miss brings, in whole requests of that size for each of the EXTENTS. No more than
    UNDER_WAY_BYTES: others share it, however fast it is."""
    step = EXTENTS * MISS_BYTES
    steps = -(-(storage.busy_bytes() + MISS_BYTES) // step)
    return min(steps * step, UNDER_WAY_BYTES)


def _cells(start: int, end: int, unit_bytes: int, size_bytes: int) -> tuple[int, int]:
    """[start, end) extended to whole requests of storage, of ``unit_bytes``, within the file."""
    if not unit_bytes:
        return start, end
    return start // unit_bytes * unit_bytes, min(size_bytes, -(-end // unit_bytes) * unit_bytes)


def _leave_pages(extent: Extent) -> None:
    """It goes nowhere, nor do checkpoint pages with it."""
    if extent.pages:
        extent.file.copies.drop(extent.pages)


@dataclass
class Extent:
    """One request: [start, end) bytes of a file for a consumer, a part of what is ``wanted``;
    ``pages`` are checkpoints to copy. ``need``: see PrefetchRange."""

    wanted: PrefetchRange
    start: int
    end: int
    consumer: Consumer | None = None
    need: int | None = None
    pooled: PoolFile | None = None  # where it goes; None: into the page cache
    pages: list[int] = field(default_factory=list)
    alone: bool = False
    sent_bytes: int = 0  # of it under way at one time
    file: FileState = field(init=False)
    cut: tuple[int, int] = field(init=False)  # [start, end), before it became a whole request

    def __post_init__(self) -> None:
        self.file, self.cut = self.wanted.file, (self.start, self.end)

    @property
    def whole(self) -> bool:
        """See PrefetchRange: of who walks through the file all is needed."""
        return self.wanted.whole or self.need is None

    @property
    def guessed(self) -> bool:
        """Whether it is of a window: its reader may never come to it."""
        return self.need is None and not self.wanted.whole

    @property
    def window_bytes(self) -> int:
        """How much of it may be under way at one time where it yields (see PrefetchRange); 0: all.
        Where the page cache is filled by reads, those have a size of their own; guesses are cut
        small, and all of them that are under way are bounded."""
        if not self.wanted.yield_bytes or self.wanted.guess or self.pooled:
            return 0
        if self.file.call.method != uffd.WARM_READAHEAD:
            return 0
        return max(MISS_BYTES, self.wanted.yield_bytes // EXTENTS)

    @property
    def asked_bytes(self) -> int:
        """How much of it storage has been asked for at one time."""
        length = self.end - self.start
        return min(length, self.window_bytes or length)

    @property
    def due_ns(self) -> int:
        """After how long its consumer comes there, at its present rate; 0: not known."""
        consumer = self.consumer
        if consumer is None or consumer.rate_bytes_per_second <= 0:
            return 0
        gap = (self.at - consumer.position_bytes) * consumer.direction
        return max(0, int(gap * 1e9 / consumer.rate_bytes_per_second))

    @property
    def in_flight(self) -> IntervalSet:
        """What is under way to where it goes."""
        return self.file.cache.in_flight if self.pooled is None else self.pooled.in_flight

    @property
    def fresh(self) -> bool:
        """Whether a byte of it is not where it goes."""
        if self.pooled is not None:
            return self.pooled.absent(self.start, self.end)
        return self.file.cache.fresh(self.start, self.end)

    @property
    def passed(self) -> bool:
        """Whether its consumer, which goes through the file in order, is beyond it."""
        consumer = self.consumer
        if consumer is None or self.need is not None:
            return False
        last = self.end if consumer.direction > 0 else self.start
        return (consumer.position_bytes - last) * consumer.direction >= 0

    @property
    def at(self) -> int:
        """Where its consumer needs it, in the consumer's own coordinate."""
        return self.start if self.need is None else self.need


class Device:
    """What is queued for a device (st_dev), and under way to it. A server that does not answer is
    its own files' affair: what waits for it counts here, and nowhere else."""

    def __init__(self) -> None:
        self.queued_bytes = 0
        self.under_way_bytes = 0
        self.depth = Depth()
        self.idle = True  # nothing was under way before what is now
        self.plain = PlainRate()
        self._idle_since_ns = 0
        self.probes = 0  # requests that were sent to learn what it brings (readers/ahead.py)

    def idle_ns(self, now_ns: int) -> int:
        """For how long nothing is under way to it."""
        return 0 if self.under_way_bytes else now_ns - self._idle_since_ns

    def came(self, size: int, now_ns: int) -> None:
        """So many bytes less are under way."""
        self.under_way_bytes -= size
        if not self.under_way_bytes:
            self._idle_since_ns = now_ns

    @property
    def full(self) -> bool:
        """Whether as much is under way as keeps it busy."""
        return self.under_way_bytes >= self.depth.bytes


class ExtentRequests:
    """What is under way: the extents that the workers, or the pool's threads, have taken."""

    def __init__(self, workers: uffd.Workers) -> None:
        self.workers = workers
        self.pool: uffd_pool.Pool | None = None
        self.extents: dict[int, Extent] = {}
        self._next_id = 1

    def send(self, extent: Extent) -> bool:
        """Hand one out; False: there is no room."""
        file, length, pooled = extent.file, extent.end - extent.start, extent.pooled
        if pooled is not None:
            sent = pooled.pool.submit(
                self._next_id, pooled.number, extent.start, length,
                due_ns=extent.due_ns, record=extent.wanted.record,
            )  # fmt: skip
        else:
            window, chunk = extent.window_bytes, file.call.chunk_bytes
            if window:  # by two requests at a time where they are not too small
                chunk = min(chunk, max(MISS_BYTES, window // 2))
            sent = self.workers.submit(
                self._next_id,
                file.opened.fd if length else file.opened.page_fd,
                extent.start,
                length,
                method=file.call.method,
                chunk_bytes=chunk,
                device=file.key[0],
                window_bytes=window,
                checkpoint_fd=file.copies.fds()[0] if extent.pages else -1,
                pages=extent.pages,
            )
        if sent:
            self.extents[self._next_id] = extent
            self._next_id += 1
        return sent

    def reap(self) -> Iterator[tuple[Extent, uffd.WarmResult]]:
        """Those that have ended."""
        for result in self.workers.reap() + (self.pool.reap() if self.pool else []):
            yield self.extents.pop(result.id), result


class Scheduler:
    """Extents in, finished extents out. One thread (the service's) calls everything here."""

    def __init__(
        self,
        workers: uffd.Workers,
        bucket: TokenBucket,
        grid_bytes: int,
        on_warmed: Callable[[Extent, uffd.WarmResult], None] | None = None,
        on_finding: Callable[[str], None] = lambda _: None,
        defer: Callable[[int, int, int, int], int | None] | None = None,
    ) -> None:
        """``on_finding``: told what a user should know of, once. ``defer``: of what lies in a
        window, [start, end) bytes of the pool's file of that number: None, or it waits, and for so
        many ns (0: until readers have moved); called with the end of what its reader has queued as
        well."""
        self.requests = ExtentRequests(workers)
        self.bucket = bucket
        self._on_warmed = on_warmed
        self._grid_bytes = grid_bytes
        self._queues: dict[int, deque[Extent]] = {}
        self._consumers: dict[int, Consumer] = {}
        self._devices: dict[int, Device] = {}
        self.meter = Meter()
        self.results = Results(self.meter, bucket, on_finding)
        self._defer = defer
        #: Told of each extent that goes to the workers.
        self.on_sent: Callable[[Extent], None] | None = None
        self._deferred: set[int] = set()  # consumers whose first extent waits so

    # -------------------------------------------------------------- asking

    def want(self, consumer: Consumer, wanted: PrefetchRange) -> int:
        """Queue a range for a consumer, less what is under way; returns bytes.

        Another consumer's queue does not count: its reader may need the range much later. Whoever
        comes second finds it under way, just read, or resident.
        """
        file, start, need, queued = wanted.file, wanted.start, wanted.need, 0
        if file.mappings.resting:
            return 0
        part = file.pooled if wanted.pooled else None
        under_way = file.cache.in_flight if part is None else part.in_flight
        for a, b in under_way.missing(start, wanted.end):
            queue = self._queues.setdefault(id(consumer), deque())
            if need is None and self._goes_on(queue, file, consumer, a, part):
                queued -= queue[-1].end - queue[-1].start
                a = self._take_back(queue).start  # one request instead of two
            for low, high in self._cut(consumer, a, b, self._grid(wanted)):
                at = need if need is None else need + low - start
                queue.append(Extent(wanted, low, high, consumer, at, part))
                self._consumers[id(consumer)] = consumer
                queued += high - low
        self.device_of(file).queued_bytes += queued
        return queued

    @staticmethod
    def _grid(wanted: PrefetchRange) -> int:
        """On which it is cut."""
        if wanted.guess and wanted.file.call.unit_bytes:
            return wanted.file.call.unit_bytes  # less costs a request as well
        if wanted.guess:
            several = wanted.yield_bytes >= 2 * GUESSED_EXTENT_BYTES
            return GUESSED_EXTENT_BYTES if several else GUESSED_EXTENT_BYTES // EXTENTS
        by_pread = wanted.file.call.unit_bytes or wanted.file.call.method == uffd.WARM_PREAD
        return EXTENT_BYTES if by_pread or wanted.yield_bytes else READAHEAD_EXTENT_BYTES

    @staticmethod
    def _cut(consumer: Consumer, start: int, end: int, size: int) -> list[tuple[int, int]]:
        cuts = list(pairwise([start, *range((start // size + 1) * size, end, size), end]))
        return cuts if consumer.direction > 0 else cuts[::-1]

    @staticmethod
    def _goes_on(
        queue: deque[Extent], file: FileState, consumer: Consumer, at: int, part: PoolFile | None
    ) -> bool:
        last = queue[-1] if queue and consumer.direction > 0 else None
        if last is None or last.pooled is not part:
            return False
        return last.file is file and last.end == at

    @staticmethod
    def _take_back(queue: deque[Extent]) -> Extent:
        extent = queue.pop()
        _leave_pages(extent)
        return extent

    def copy(self, file: FileState, pages: list[int]) -> None:
        """Have checkpoint pages copied that no extent brings along. Where each would be a request
        of its own, only those that are in the cache: the others are asked for again when a window
        has brought what lies around them."""
        pages = file.copies.missing(pages)
        if file.mappings.resting:
            return
        if file.call.unit_bytes:
            pages = [p for p in pages if file.has(p * uffd.PAGE_BYTES)]
        for page in pages:  # side by side: the job waits for the last of them
            if self._send(Extent(PrefetchRange(file, 0, 0), 0, 0, pages=[page])):
                file.copies.ask(page)
        self.requests.workers.start()

    def begin(
        self, file: FileState, start: int, may_begin: Callable[[int], bool] = lambda _: True
    ) -> None:
        """A mapping of the file itself begins at this offset. Where a request costs more than its
        bytes, the first of them goes out before its reader comes, if so many bytes may: until that
        is known to walk, each of its pages would be one."""
        if not file.call.unit_bytes or file.blocks.was_here(start):
            return
        low, high = _cells(start, start + 1, file.call.unit_bytes, file.size_bytes)
        if file.cache.fresh(low, high) and may_begin(high - low):
            self._send(Extent(PrefetchRange(file, low, high, guess=True), low, high))
            self.requests.workers.start()

    def forget(self, consumer: Consumer) -> None:
        """Drop what a consumer had queued."""
        for extent in self._queues.pop(id(consumer), ()):
            _leave_pages(extent)
            self.device_of(extent.file).queued_bytes -= extent.end - extent.start
        self._consumers.pop(id(consumer), None)

    def take_back(
        self, consumer: Consumer, file: FileState, start: int, end: int
    ) -> list[tuple[int, int]]:
        """Drop what a consumer had queued that meets [start, end) of a file; returns what was."""
        queue = self._queues.get(id(consumer), deque())
        taken = [e for e in queue if e.file is file and e.start < end and start < e.end]
        for extent in taken:
            queue.remove(extent)
            _leave_pages(extent)
            self.device_of(file).queued_bytes -= extent.end - extent.start
        if not queue:
            self.forget(consumer)
        return [(extent.start, extent.end) for extent in taken]

    def change(self, consumer: Consumer, priority: Priority, yield_bytes: int) -> None:
        """What a consumer has queued is wanted so from now on."""
        for extent in self._queues.get(id(consumer), ()):
            extent.wanted = replace(extent.wanted, priority=priority, yield_bytes=yield_bytes)

    def first_queued(self, consumer: Consumer) -> int | None:
        """Where in its file the next of what a consumer has queued begins."""
        queue = self._queues.get(id(consumer))
        return queue[0].start if queue else None

    def forget_file(self, file: FileState) -> None:
        """Drop everything queued for a file."""
        for key, queue in list(self._queues.items()):
            if any(extent.file is file for extent in queue):
                self.forget(self._consumers[key])

    def busy_with(self, file: FileState) -> bool:
        """Whether a worker still uses the file's descriptors."""
        return any(extent.file is file for extent in self.requests.extents.values())

    def under_way_by_rank(self) -> dict[int, int]:
        """Bytes that the workers are reading now, by the rank that they are for."""
        found: dict[int, int] = {}
        for extent in self.requests.extents.values():
            if extent.consumer is not None:
                rank = extent.consumer.rank
                found[rank] = found.get(rank, 0) + extent.end - extent.start
        return found

    # -------------------------------------------------------------- sending

    def device_of(self, file: FileState) -> Device:
        """What is asked of the device that a file lies on."""
        device = self._devices.get(file.key[0])
        if device is None:
            device = self._devices[file.key[0]] = Device()
        return device

    @property
    def queued_bytes(self) -> int:
        """Asked for, not yet handed to a worker."""
        return sum(device.queued_bytes for device in self._devices.values())

    @property
    def under_way_bytes(self) -> int:
        """Handed to the workers, of all devices."""
        return sum(device.under_way_bytes for device in self._devices.values())

    @property
    def target_bytes(self) -> int:
        """How much to keep under way now, to all devices together."""
        return sum(device.depth.bytes for device in self._devices.values())

    def _nearest(self, now_ns: int, closed: set[Device]) -> int | None:
        """The consumer whose next extent goes first: the one that stands closest before it. Not of
        a device that is ``closed``.

        In bytes, not by the readers' rates: who has waited shows a low rate and would wait again,
        until one rank is far behind all others. A slow reader's window bounds what it takes.
        """
        best, best_gap = None, (Priority.BACKGROUND, 0)
        for key, queue in self._queues.items():
            if key in self._deferred or self.device_of(queue[0].file) in closed:
                continue
            consumer = self._consumers[key]
            expected = consumer.expected_bytes(now_ns, self._grid_bytes)
            gap = queue[0].wanted.priority, (queue[0].at - expected) * consumer.direction
            if best is None or gap < best_gap:
                best, best_gap = key, gap
        return best

    def pump(self, now_ns: int) -> int:
        """Hand extents to the workers; returns ns after which to call again (0: no need)."""
        wait = self._hand_out(now_ns)
        self.requests.workers.start()
        return wait

    def _hand_out(self, now_ns: int) -> int:
        closed = {device for device in self._devices.values() if device.full}
        self._deferred.clear()
        again_ns = 0
        while (key := self._nearest(now_ns, closed)) is not None:
            wait = self.bucket.wait_ns(now_ns) if self.bucket.rate else 0
            if wait:
                return wait
            queue = self._queues[key]
            extent = queue[0]
            device = self.device_of(extent.file)
            if extent.wanted.guess and extent.passed:
                self._drop_first(key)
                continue
            deferred_ns = self._deferred_ns(extent, queue[-1])
            if deferred_ns is not None and extent.passed:  # it was not needed
                _leave_pages(extent)
                self._drop_first(key)
                continue
            if deferred_ns is not None:
                self._deferred.add(key)
                again_ns = min(again_ns or deferred_ns, deferred_ns or again_ns)
                continue
            if extent.wanted.priority == Priority.BACKGROUND and self._is_busy(extent):
                closed.add(device)  # nothing that is nearer waits for it
                continue
            if extent.wanted.guess and self._would_delay(extent):
                self._deferred.add(key)
                continue
            if not self._hand(extent):
                closed.add(device)  # its queue is full; the workers will tell when it is not
                continue
            self._drop_first(key)
            if device.full:
                closed.add(device)
        return again_ns

    def _drop_first(self, key: int) -> None:
        """Of a consumer's queue."""
        queue = self._queues[key]
        extent = queue.popleft()
        self.device_of(extent.file).queued_bytes -= extent.end - extent.start
        if not queue:
            del self._queues[key], self._consumers[key]

    def _deferred_ns(self, extent: Extent, last: Extent) -> int | None:
        """See __init__()."""
        part = extent.file.pooled if extent.guessed and extent.pooled is not None else None
        if self._defer is None or part is None:
            return None
        end = last.end if last.file is extent.file else extent.end
        return self._defer(part.number, extent.start, extent.end, max(end, extent.end))

    def _hand(self, extent: Extent) -> bool:
        """Hand the first of a queue to the workers, unless it is there. False: there is no room."""
        file = extent.file
        if extent.pooled is not file.pooled:
            extent.pooled = None  # it has been closed since
        fresh = extent.fresh
        if file.guard.changed or file.mappings.resting or not (extent.pages or fresh):
            _leave_pages(extent)
            return True
        if fresh and extent.whole:
            length = extent.end - extent.start
            self._round(extent)
            self.device_of(file).queued_bytes += extent.end - extent.start - length
        return self._send(extent)

    @staticmethod
    def _round(extent: Extent) -> None:
        """Where a request costs more than its bytes: the whole of what one brings, less what is
        under way. A guess has been where its reader is: it goes on to the end, if half of that was
        asked for."""
        file = extent.file
        cell = _cells(extent.start, extent.end, file.call.unit_bytes, file.size_bytes)
        for start, end in extent.in_flight.missing(*cell):
            if not start <= extent.start < end:
                continue
            if extent.wanted.guess:
                start, least = extent.start, (extent.start + end) // 2
                end = end if extent.end >= least else extent.end
            if extent.need is not None:
                extent.need += start - extent.start
            extent.start, extent.end = start, max(end, extent.end)

    def _waits_for(self, device: Device) -> bool:
        """Whether an extent is only not under way because enough others are."""
        return device.queued_bytes > 0 and any(
            key not in self._deferred and self.device_of(queue[0].file) is device
            for key, queue in self._queues.items()
        )

    def _is_busy(self, extent: Extent) -> bool:
        """Whether what is under way keeps the storage busy without this extent, for which nobody
        waits. A reader's own miss waits behind all of it: so there is no more."""
        under_way = self.device_of(extent.file).under_way_bytes
        if extent.window_bytes:
            return under_way + extent.asked_bytes > extent.wanted.yield_bytes
        storage, link = self.meter.storage, self.meter.link or Storage()
        # who leaves the link idle tells nothing of what keeps it busy, but what was read alone does
        rate = max(storage.bandwidth_bytes_per_second, link.bandwidth_bytes_per_second)
        seconds = max(2 * storage.latency_seconds, RESPONSE_SECONDS)
        return under_way > rate * seconds

    def _would_delay(self, extent: Extent) -> bool:
        """Whether a reader's miss would stand behind more of what is only guessed than it yields
        to."""
        under_way = self.device_of(extent.file).under_way_bytes
        consumer, asked = extent.consumer, extent.asked_bytes
        if not under_way or consumer is None:
            return under_way > 0 and under_way + asked > extent.wanted.yield_bytes
        if under_way + asked > (consumer.depth_of_all_bytes or extent.wanted.yield_bytes):
            return True
        own = sum(
            one.sent_bytes for one in self.requests.extents.values() if one.consumer is consumer
        )
        return own > 0 and own + asked > (consumer.depth_bytes or extent.wanted.yield_bytes)

    def _send(self, extent: Extent) -> bool:
        device = self.device_of(extent.file)
        length = extent.end - extent.start
        extent.alone = device.under_way_bytes == 0
        if length and extent.alone:
            device.idle = True
        sent = self.requests.send(extent)
        if sent:
            if self.bucket.rate:
                self.bucket.take(length)
            extent.in_flight.add(extent.start, extent.end)
            if length and self.on_sent is not None:
                self.on_sent(extent)
            extent.sent_bytes = extent.asked_bytes
            device.under_way_bytes += extent.sent_bytes
        return sent

    # -------------------------------------------------------------- finished

    def reap(self) -> None:
        """Take the workers' results: books, feedback to the windows, pages to announce."""
        for extent, result in self.requests.reap():
            file, device = extent.file, self.device_of(extent.file)
            device.came(extent.sent_bytes, result.done_ns)
            extent.in_flight.remove(extent.start, extent.end)
            if extent.pages:
                file.copies.drop(extent.pages)
                file.copies.came(p for i, p in enumerate(extent.pages) if result.copied >> i & 1)
            if result.error or extent.end == extent.start:
                self.results.none(extent, result)
                continue
            # of records in a known order what is beside them tells as well
            beside = device.under_way_bytes if extent.need is not None else 0
            sample = self.results.note(extent, result, device.idle, beside)
            if sample is not None:
                device.idle = False
            if sample and self._waits_for(device):
                device.depth.note(sample)
            if self._on_warmed is not None:
                self._on_warmed(extent, result)
