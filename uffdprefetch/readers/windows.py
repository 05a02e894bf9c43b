# SPDX-License-Identifier: Apache-2.0
"""Windows ahead of walks: what lies before a reader that goes in order (predict/streams.py,
predict/window.py). It knows something of every reader, and is asked where nobody knows more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.pool.walkers import readers
from uffdprefetch.predict import window
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol import wire
from uffdprefetch.readers.bulk import Bulk
from uffdprefetch.readers.predictor import Observation
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.pagetable_scan import tell_seen
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import WINDOW, EventPublisher
from uffdprefetch.state.region import Region
from uffdprefetch.warm.consumer import Consumer, PrefetchRange
from uffdprefetch.warm.placement import CheckpointPlacer
from uffdprefetch.warm.scheduler import Scheduler

if TYPE_CHECKING:
    from uffdprefetch.readers.strides import Strides

#: While an order is pending, at most AWAIT_NS long, only walks of at least AWAIT_DENSITY get
#: windows: of records in a shuffled order some follow each other by chance.
AWAIT_NS = 2_000_000_000
AWAIT_DENSITY = 0.5
#: It always knows something; whoever knows an order knows more.
CONFIDENCE = 0.1


class Windows:
    """See readers/predictor.Predictor."""

    name = "windows"
    policies = frozenset({"auto", "fixed", "stride"})

    def __init__(
        self, config: Config, scheduler: Scheduler, ledger: Ledger, tap: EventPublisher,
        layout: CheckpointPlacer, bulk: Bulk, clock: Clock,
    ) -> None:  # fmt: skip
        self._config, self._scheduler, self._ledger, self._tap = config, scheduler, ledger, tap
        self._layout, self._bulk, self._clock = layout, bulk, clock
        self.strides: Strides | None = None

    def observe(self, client: Client, region: Region, seen: Observation) -> None:
        """See Predictor."""
        self.touch(client, region, seen)

    def touch(self, client: Client, region: Region, seen: Observation) -> tuple[Stream, int]:
        """Progress: (whose walk it is, how many bytes that went on)."""
        start, end, at_ns = seen.start, seen.end, seen.at_ns
        stream, forward = region.table.touch(start, end, at_ns)
        self.forget_absorbed(region)
        if self._config.policy == "fixed" and region.verdict == wire.ServingMode.CHECKPOINTS:
            stream.active = True  # [Haderbache]: the checkpoint that is hit first triggers
        self._ledger.touch(stream.rank, start, at_ns)
        news = mapped = end - start
        if forward:
            first = stream.position_bytes - (forward if stream.direction > 0 else 0)
            if region.verdict == wire.ServingMode.POOL:
                found = [(first, forward)]  # mapped in runs: more is not known
            else:
                found = pagetables.runs(client, region, first, first + forward)
            pagetables.note_used(region, found)
            stream.saw(forward, found)
            for a, n in found:
                mapped += n
                for low, high in region.scan.mapped.missing(a, a + n):
                    news += high - low
                    if self._tap.active and region.verdict != wire.ServingMode.POOL:
                        tell_seen(self._tap, client, region, low, high, self._clock.now_ns())
                region.scan.mapped.add(a, a + n)
        passed = news, news if seen.new else mapped
        if self._bulk.saw(region, stream, (start, end, at_ns), forward, passed):
            region.table.absorbed += region.table.streams
            region.table.streams.clear()  # what looks like walks is none
            self.forget_absorbed(region)
        strides = self.strides
        if strides is not None and (strides.hears_all or strides.watches_any or stream.skips):
            strides.touch(client, region, stream, at_ns)
        return stream, forward

    def forget_absorbed(self, region: Region) -> None:
        """Walks that were another's get nothing any more."""
        while region.table.absorbed:
            self._scheduler.forget(region.table.absorbed.pop())

    def confidence(self, client: Client, region: Region, now_ns: int) -> float:
        """See Predictor."""
        return CONFIDENCE

    def demand(
        self, client: Client, region: Region, now_ns: int
    ) -> Iterator[tuple[Consumer, PrefetchRange]]:
        """See Predictor: of each walk the next window."""
        pooled = region.verdict == wire.ServingMode.POOL
        for stream in readers(region, now_ns) if pooled else region.table.active():
            wanted = self._next(region, stream, now_ns)
            if wanted:
                start, end = wanted
                yield stream, PrefetchRange(region.file, start, end, pooled=pooled)
                self._tap.put(WINDOW, now_ns, stream.reader, region.file, start, end - start, 0)

    def _next(self, region: Region, stream: Stream, now: int) -> tuple[int, int] | None:
        if region.table.random:
            return None
        if not self._bulk.may_prefetch(region):
            return None
        pending_ns = region.order.pending_since_ns
        awaited = pending_ns and now - pending_ns < AWAIT_NS
        if awaited and not (stream.settled and (stream.density or 0.0) >= AWAIT_DENSITY):
            return None
        strides = self.strides
        if strides is not None and strides.watches_any and strides.holds(region, stream, now):
            return None
        ahead = self._layout.lookahead(stream, region)
        if self._config.policy == "fixed":
            return window.fixed(stream, region.span.end_bytes, ahead, self._config.threshold)
        return window.auto(stream, region.span.end_bytes, ahead)

    def dismissed(self, client: Client, region: Region) -> None:
        """See Predictor."""
        for stream in region.table.streams:
            self._scheduler.forget(stream)
            # what was asked for and not read is asked for again, should windows be back
            stream.frontier_bytes = stream.window_end_bytes = stream.position_bytes
            stream.trigger_bytes = 0

    def left(self, region: Region) -> None:
        """See Predictor: walks are the region's own."""
