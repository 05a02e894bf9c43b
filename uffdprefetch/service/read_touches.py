# SPDX-License-Identifier: Apache-2.0
"""What is seen of a file that is read by calls is told as touches of a mapping are; and what a call
asks for is asked for."""

from __future__ import annotations

from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.predict.storage import MISS_BYTES
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.sense.pagetables import tell_seen
from uffdprefetch.sense.read_calls import ReadSeen
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import Region
from uffdprefetch.warm.consumer import FileConsumer, PrefetchRange
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.windows import Windows

#: By thread: who has the rest of its call read, and where that ends.
Calls = dict[int, tuple[FileConsumer, int]]


class ReadTouches:
    """Of all files that are read by calls."""

    def __init__(
        self, arbiter: Arbiter, scheduler: Scheduler, windows: Windows, ledger: Ledger,
        publisher: EventPublisher,
    ) -> None:  # fmt: skip
        self._arbiter, self._scheduler, self._windows = arbiter, scheduler, windows
        self._ledger, self._publisher = ledger, publisher
        self._calls: dict[int, Calls] = {}  # by region
        self.read_bytes = 0

    def begin(self, client: Client, region: Region) -> None:
        """It is followed from now on."""
        self._ledger.serving.served(region.file, region.mode)
        self._publisher.region(client, region)

    def note(self, region: Region, one: ReadSeen) -> None:
        """What was read of it, or is being read."""
        size = region.file.size_bytes
        start, end = one.start, min(one.end, size)
        if not one.proven and one.waiting:  # where it is, and what that brings
            end = min(max(end, min(one.asked_end, start + MISS_BYTES)), size)
        if start < end:
            self._touched(region, start, end, one.at_ns)
        self._ask_rest(region, one)

    def _touched(self, region: Region, start: int, end: int, at_ns: int) -> None:
        """[start, end) was read: now, be it for the first time or not."""
        batch = Batch(region, at_ns)

        def tell(low: int, high: int) -> None:
            batch.found.append((low, high))
            if self._publisher.active:
                tell_seen(self._publisher, region, low, high, at_ns)

        missed = sum(  # who waits for what is being read is late, and no miss
            region.file.blocks.untouched(low, high)
            for low, high in region.file.cache.in_flight.missing(start, end)
        )
        self._ledger.jobs.missed(region.reader.rank, missed)
        region.scan.mapped.remove(start, end)
        clusters = pagetables.note_found(region, start, end, [(start, end - start)], tell)
        since_ns = region.scan.last_end_ns or region.scan.news_ns
        region.file.blocks.used.looked(max(0, at_ns - since_ns))
        region.scan.last_end_ns = region.scan.news_ns = at_ns
        batch.touches += [
            Observation(low, high, at_ns, new=True, told=False) for low, high in clusters
        ]
        self.read_bytes += end - start
        self._arbiter.observe(batch)

    def _ask_rest(self, region: Region, one: ReadSeen) -> None:
        """A call under way asks for more than the kernel has under way: that is no guess. Of what
        lies within two of its windows it reads the second when the first has come, and goes on
        behind it by itself, unless it finds there what we have read."""
        calls, file = self._calls.setdefault(region.id, {}), region.file
        consumer, _ = calls.pop(one.tid, (None, 0))
        end = min(one.asked_end, file.size_bytes)
        ahead = file.call.ahead_bytes
        start = one.position + 2 * (MISS_BYTES if ahead is None else ahead)
        if not one.waiting or end <= start:
            if consumer is not None:
                self._scheduler.forget(consumer)
            return
        if consumer is None:
            consumer = FileConsumer(region.reader.rank, one.pid)
        calls[one.tid] = consumer, end
        if len(calls) > ENTRIES_MAX:  # of threads that have ended, perhaps
            self._scheduler.forget(calls.pop(next(iter(calls)))[0])
        consumer.position_bytes = one.position
        each, _ = self._windows.share_bytes(file)
        end = min(end, start + each)
        for low, high in file.cache.in_flight.missing(start, end):
            self._arbiter.want(consumer, PrefetchRange(file, low, high))

    def end(self, region: Region, *, gains: bool = True) -> None:
        """It is not followed any more; ``gains``: not as it gains nothing by that."""
        for consumer, end in self._calls.pop(region.id, {}).values():
            self._scheduler.forget(consumer)
            if gains:  # nobody saw the end of that call; but a call has one
                rest = consumer.position_bytes, end - consumer.position_bytes
                pagetables.note_used(region, [rest])
                self.read_bytes += rest[1]
