# SPDX-License-Identifier: Apache-2.0
"""What a touch says of its reader: which walk it brought on (predict/streams.py), and whether the
reader goes in order at all (predict/randomness.py). Every predictor builds on these."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.units import MAX_BYTES
from uffdprefetch.predict.randomness import PASSED_SHARE, Access
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.predictor import Observation
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.pagetable_scan import tell_seen
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import Reader, Region, Trait
from uffdprefetch.warm.placement import CheckpointPlacer
from uffdprefetch.warm.scheduler import Scheduler

#: In the pool one in this many touches of a reader whose order is known goes to its walks, too:
#: they show it, and go on when the order is dropped.
PLANNED_EVERY = 16


class Step(NamedTuple):
    """A touch brought ``walk`` on; its reader is known to have come over [start, end) bytes."""

    walk: Stream
    start: int
    end: int


class Walks:
    """The walks of all readers. The service's thread calls everything here."""

    def __init__(
        self, policy: str, scheduler: Scheduler, ledger: Ledger, tap: EventPublisher,
        layout: CheckpointPlacer, clock: Clock,
        passed: Callable[[Region, list[tuple[int, int]]], None] | None = None,
        taken_back: Callable[[Reader, int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """``passed`` hears what a walk has come over that was not known to be mapped;
        ``taken_back``: takes back what waits to be read for a reader in [start, end) and is no
        walk's."""
        self._policy, self._scheduler, self._ledger = policy, scheduler, ledger
        self._tap, self._layout, self._clock = tap, layout, clock
        self._hears_passed, self._taken_back = passed, taken_back

    def touch(self, region: Region, seen: Observation) -> Step | None:
        """What a touch was of a walk; None for a reader whose order is known: its walks would say
        nothing more."""
        reader = region.reader
        reader.last_mode = region.verdict
        if self._is_planned(region):
            self._ledger.touch(reader.rank, seen.start, seen.at_ns)
            # should the order be a wrong one, it is known by then whether the reader jumps about
            reader.saw(seen.start, seen.end, seen.at_ns, False)
            if seen.told and region.verdict == ServingMode.POOL:
                pagetables.note_told(region, seen.start, seen.end, seen.at_ns)
            elif seen.told:
                pagetables.note_used(region, [(seen.start, seen.end - seen.start)])
            if seen.told:
                region.scan.mapped.add(seen.start, seen.end)
            return None
        stream, forward = reader.table.touch(seen.start, seen.end, seen.at_ns)
        self.forget_absorbed(reader)
        for low, high in reader.unneeded.touched(seen.start, seen.end, seen.at_ns):
            self.take_back(reader, low, high)
        if self._policy == "fixed" and region.verdict == ServingMode.CHECKPOINTS:
            stream.active = True  # the checkpoint that is hit first triggers [Haderbache]
        self._ledger.touch(reader.rank, seen.start, seen.at_ns)
        low, high = seen.known
        if region.verdict == ServingMode.POOL and self._layout.pool:
            if not seen.passed:
                pool, part = self._layout.pool, region.file.pooled
                low, high = pool.come_over(part, stream, low, high, forward)
            pagetables.note_told(region, low, high, seen.at_ns)
        passed_bytes = self._passed(region, stream, seen, forward, low, high)
        step = Step(stream, low, high)
        # in a second epoch nothing is news; and a random reader has been nearly everywhere at last
        over = 0 < forward <= PASSED_SHARE * passed_bytes[0 if reader.access is Access.JUMPS else 1]
        if region.verdict == ServingMode.POOL and self._layout.pool:
            over = 0 < forward <= high - low
        self._judge(region, seen, over)
        if stream.skips:
            reader.traits.add(Trait.SKIPS)
        return step

    @staticmethod
    def _is_planned(region: Region) -> bool:
        reader = region.reader
        if not reader.order.announced:
            return False
        if region.verdict != ServingMode.POOL:
            return True
        reader.pool.planned += 1
        return reader.pool.planned % PLANNED_EVERY != 0

    def _passed(
        self, region: Region, stream: Stream, seen: Observation, forward: int, low: int, high: int
    ) -> tuple[int, int]:
        """Of what a walk has gone over with this touch: how much is mapped that was not before, and
        how much tells of a walk."""
        news = mapped = seen.end - seen.start
        if not forward:
            return news, news if seen.new else mapped
        first = stream.position_bytes - (forward if stream.direction > 0 else 0)
        if region.verdict == ServingMode.POOL:
            start, end = max(low, first), min(high, first + forward)
            found = [(start, end - start)] if start < end else []
        else:
            found = pagetables.runs(region, first, first + forward)
        pagetables.note_used(region, found)
        stream.saw(forward, found)
        fresh = list[tuple[int, int]]()
        for a, n in found:
            mapped += n
            for low, high in region.scan.mapped.missing(a, a + n):
                news += high - low
                fresh.append((low, high))
                if self._tap.active and region.verdict != ServingMode.POOL:
                    tell_seen(self._tap, region, low, high, self._clock.now_ns())
            region.scan.mapped.add(a, a + n)
        if fresh and self._hears_passed is not None:
            self._hears_passed(region, fresh)
        return news, news if seen.new else mapped

    def _judge(self, region: Region, seen: Observation, passed_over: bool) -> None:
        """Whether the reader goes in order: what looks like walks of one that jumps about is
        none."""
        reader = region.reader
        # one scan of the whole page table, in several pieces, has one time
        at_ns = reader.seen_ns if region.scan.resume_at else seen.at_ns
        reader.saw(seen.start, seen.end, at_ns, passed_over)
        if reader.access is Access.JUMPS:
            self._drop(reader)

    def forget(self, reader: Reader) -> None:
        """What it has touched so far is no sign of what it will touch."""
        self._drop(reader)
        reader.forget_jumps()

    def _drop(self, reader: Reader) -> None:
        reader.table.absorbed += reader.table.streams
        reader.table.streams.clear()
        self.forget_absorbed(reader)

    def take_back(self, reader: Reader, start: int = 0, end: int = MAX_BYTES) -> None:
        """What waits to be read for its walks, of those that have asked for a part of
        [start, end); should they go on, it is asked for again."""
        for stream in reader.table.streams:
            low, high = sorted((stream.position_bytes, stream.frontier_bytes))
            if high <= start or low >= end:
                continue
            self._scheduler.forget(stream)
            stream.frontier_bytes = stream.window_end_bytes = stream.position_bytes
            stream.trigger_bytes = 0
        if self._taken_back is not None:
            self._taken_back(reader, start, end)

    def forget_absorbed(self, reader: Reader) -> None:
        """Walks that were another's get nothing any more."""
        while reader.table.absorbed:
            self._scheduler.forget(reader.table.absorbed.pop())
