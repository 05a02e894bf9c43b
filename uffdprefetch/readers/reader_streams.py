# SPDX-License-Identifier: Apache-2.0
"""What a touch says of its reader: which stream it brought on (predict/streams.py), and whether the
reader goes in order at all (predict/randomness.py). Every predictor builds on these. And the head
of what all readers of a file brought on together, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from uffdprefetch.predict.bounds import LATELY_COUNT
from uffdprefetch.predict.fronts import Front
from uffdprefetch.predict.randomness import PASSED_SHARE, Access
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.streams import Feedback, Rate, Stream
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Reader, Region, Trait
from uffdprefetch.warm.windows import Windows

#: In the pool one in this many touches of a reader whose order is known goes to its streams, too:
#: they show it, and go on when the order is dropped.
PLANNED_EVERY = 16


class Step(NamedTuple):
    """A touch brought ``stream`` on; its reader is known to have come over [start, end) bytes.
    ``goes_on``: see there."""

    stream: Stream
    start: int
    end: int
    goes_on: bool


def come_over(seen: Observation) -> tuple[int, int]:
    """[start, end) bytes: the touch, with what its reader has come over since the last one."""
    return max(0, seen.start - max(0, seen.passed)), seen.end - min(0, seen.passed)


def goes_on(reader: Reader, stream: Stream) -> bool:
    """Whether the reader's last touch, which is in this stream, goes on with it. In a file that
    is no larger than a stream's reach, that of a random reader is in one, too."""
    return stream.settled and reader.jumps.in_order and reader.access is not Access.JUMPS


class ReaderStreams:
    """The streams of all readers. The service's thread calls everything here."""

    def __init__(self, policy: str, ledger: Ledger, windows: Windows) -> None:
        self._policy, self._ledger, self._windows = policy, ledger, windows

    def touched(self, batch: Batch) -> list[Step | None]:
        """What each touch was of a stream; None for a reader whose order is known: its streams
        would say nothing more. What streams have come over in the pool that was not known to be
        mapped is found with it."""
        return [self._touch(batch, seen) for seen in batch.touches]

    def _touch(self, batch: Batch, seen: Observation) -> Step | None:
        region, reader = batch.region, batch.region.reader
        reader.pool.last_mode = region.mode
        if self._is_planned(region):
            self._ledger.touch(reader.rank, seen.start, seen.at_ns)
            # should the order be a wrong one, it is known by then whether the reader jumps about
            reader.saw(seen.start, seen.end, seen.at_ns, False)
            if seen.told and region.mode == ServingMode.POOL:
                pagetables.note_told(region, seen.start, seen.end, seen.at_ns)
            elif seen.told:
                pagetables.note_used(region, [(seen.start, seen.end - seen.start)])
            if seen.told:
                region.scan.mapped.add(seen.start, seen.end)
            return None
        stream, forward = reader.table.touch(seen.start, seen.end, seen.at_ns)
        if self._policy == "fixed" and region.mode == ServingMode.CHECKPOINTS:
            stream.active = True  # the checkpoint that is hit first triggers [Haderbache]
        self._ledger.touch(reader.rank, seen.start, seen.at_ns)
        low, high = come_over(seen)
        if region.mode == ServingMode.POOL and self._windows.pool:
            part = region.file.pooled
            if part is not None and not seen.passed:
                low, high = part.come_over(stream, low, high, forward)
            one_page = seen.end - seen.start < BLOCK_BYTES
            # who goes in order enters a block by its first page, or its last one
            by_page = one_page and (
                seen.end % BLOCK_BYTES == 0 if seen.passed < 0
                else seen.passed > 0 and seen.start % BLOCK_BYTES > 0
            )  # fmt: skip
            pagetables.note_told(region, low, high, seen.at_ns, by_page=by_page)
        passed_bytes = self._passed(batch, stream, seen, forward, low, high)
        # in a second epoch nothing is news; and a random reader has been nearly everywhere at last
        jumps = reader.access is Access.JUMPS
        over = 0 < forward <= PASSED_SHARE * passed_bytes[0 if jumps else 1]
        if region.mode == ServingMode.POOL and self._windows.pool:
            over = 0 < forward <= high - low
        self._judge(region, seen, over)
        if stream.skips:
            reader.traits.add(Trait.SKIPS)
        return Step(stream, low, high, goes_on(reader, stream))

    @staticmethod
    def _is_planned(region: Region) -> bool:
        reader = region.reader
        if not reader.order.announced:
            return False
        if region.mode != ServingMode.POOL:
            return True
        reader.pool.planned += 1
        return reader.pool.planned % PLANNED_EVERY != 0

    def _passed(
        self, batch: Batch, stream: Stream, seen: Observation, forward: int, low: int, high: int
    ) -> tuple[int, int]:
        """Of what a stream has gone over with this touch: how much is mapped that was not before,
        and how much tells of a stream."""
        region, news = batch.region, seen.end - seen.start
        mapped, first = region.scan.mapped, stream.position_bytes
        if not forward:
            if region.mode == ServingMode.POOL:
                mapped.add(seen.start, seen.end)
            return news, news
        first -= forward if stream.direction > 0 else 0
        if region.mode != ServingMode.POOL:
            stream.passed.saw(forward, mapped.within(first, first + forward))  # the scan has told
            return news, news
        start, end = max(low, first), min(high, first + forward)
        found = [(start, end - start)] if start < end else []
        pagetables.note_used(region, found)
        stream.passed.saw(forward, found)
        fresh = mapped.missing(start, end)
        batch.found += fresh
        mapped.add(start, end)
        news += sum(b - a for a, b in fresh)
        return news, seen.end - seen.start + max(0, end - start)

    def _judge(self, region: Region, seen: Observation, passed_over: bool) -> None:
        """Whether the reader goes in order: what looks like streams of one that jumps about is
        none."""
        reader = region.reader
        # one scan of the whole page table, in several pieces, has one time
        at_ns = reader.seen_ns if seen.again else seen.at_ns
        reader.saw(seen.start, seen.end, at_ns, passed_over)
        if reader.access is Access.JUMPS:
            self._drop(reader)

    def forget(self, reader: Reader) -> None:
        """What it has touched so far is no sign of what it will touch."""
        self._drop(reader)
        reader.forget_jumps()

    @staticmethod
    def _drop(reader: Reader) -> None:
        reader.table.absorbed += reader.table.streams
        reader.table.streams.clear()


class Head:
    """A front, as the scheduler sees it. ``depths``: how much may be under way for it, and for all
    where something for it is to go with it."""

    def __init__(
        self,
        front: Front,
        reader: Reader,
        now_ns: int,
        depths: tuple[Callable[[Front], int], Callable[[Front], int]],
    ) -> None:
        self.front = front
        self._depth_bytes, self._depth_of_all_bytes = depths
        self.rank, self.reader = reader.rank, reader.pid
        self.feedback = Feedback()
        self._rate = Rate(now_ns)
        self._noted = front.position

    @property
    def direction(self) -> int:
        """See Consumer."""
        return self.front.direction

    @property
    def position_bytes(self) -> int:
        """See Consumer."""
        return self.front.position * BLOCK_BYTES

    @property
    def rate_bytes_per_second(self) -> float:
        """See Consumer."""
        return self._rate.bytes_per_second

    @property
    def depth_bytes(self) -> int:
        """See Consumer."""
        return self._depth_bytes(self.front)

    @property
    def depth_of_all_bytes(self) -> int:
        """See Consumer."""
        return self._depth_of_all_bytes(self.front)

    @property
    def last_ns(self) -> int:
        """When it went on last."""
        return self.front.last_ns

    @property
    def settled(self) -> bool:
        """Whether it has come so far that what follows its file may be what it comes to."""
        return self.front.length >= LATELY_COUNT

    def moved(self, now_ns: int) -> None:
        """The front has."""
        gone = abs(self.front.position - self._noted) * BLOCK_BYTES
        self._rate.note(gone, now_ns)
        self._noted = self.front.position

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """See Consumer."""
        gone = self.rate_bytes_per_second * max(0, now_ns - self.front.last_ns) / 1e9
        return self.position_bytes + self.direction * min(int(gone), most_bytes)
