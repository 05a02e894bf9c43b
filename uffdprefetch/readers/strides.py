# SPDX-License-Identifier: Apache-2.0
"""Ranks that skip: a sequence of records that is inferred becomes the order that is prefetched.

Where page tables show gaps between what a rank reads (predict/streams.py) the file's index is
asked for; with it predict/stride.py finds the sequence, and a PlannedReader follows it. A window
over all of the gaps would read what other nodes' ranks need: with `--policy stride` none is opened
as long as this goes on. `--policy auto` has its windows until there is a sequence, and asks only
where a rank surely skips. It is a guess: when it turns out wrong, the windows are back without a
word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from uffdprefetch.base.record import dataclass
from uffdprefetch.native.uffd import RUNS_AT_ONCE
from uffdprefetch.orders.indices import IndexSource
from uffdprefetch.predict.bounds import CPU_PART, ENTRIES_MAX, LATELY_NS, LIST_MAX
from uffdprefetch.predict.checkpoints import DISTANCE_MIN_BYTES
from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.streams import (
    BACK_BYTES,
    DENSITY,
    PIECE_BYTES,
    PIECES,
    RATE_SAMPLE_NS,
    Stream,
)
from uffdprefetch.predict.window import LOOKAHEAD_MAX_BYTES
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.known_order import AWAIT_NS, KnownOrders, PlannedReader
from uffdprefetch.readers.predictor import Confidence, Predictor
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.observation import Batch
from uffdprefetch.sense.pagetables import LOOK_AT_ONCE_BYTES, LOOK_SLOWEST_NS
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Process, Reader, Trait
from uffdprefetch.warm.consumer import Consumer, PrefetchRange

if TYPE_CHECKING:  # they bring numpy, which a service where nobody skips spares
    from uffdprefetch.formats.index import RecordIndex
    from uffdprefetch.predict.stride import Seen
    from uffdprefetch.readers.stride_order import StridedReader

#: --policy auto: how far a stream must have skipped. To ask for an index starts the helper
#: (0.3 to 0.7 s of a core) and reads the B-tree, and sooner would help little: the six periods
#: that a sequence takes are 18 MiB of 16 ranks' records of 192 KiB.
SURE_BYTES = PIECES * PIECE_BYTES
#: Sequences of one rank in one file that may turn out wrong.
ATTEMPTS = 3


@dataclass
class _Watch:
    """What is known of one rank in one file. Times in ns, 0: never."""

    file: FileState
    rank: int
    since_ns: int = 0  # it seems to skip
    index_ns: int = 0  # the index is there
    next_ns: int = 0
    every_ns: int = RATE_SAMPLE_NS
    attempts: int = 0
    over: str | None = None  # why nothing more is inferred
    order: StridedReader | None = None

    def holds(self, now: int) -> bool:
        """Whether to open no windows now: until the index is there (it is read from the same slow
        storage), and then until there is a sequence. What is read is read on demand meanwhile."""
        if not self.since_ns or self.over or self.attempts or self.order is not None:
            return False
        if not self.index_ns:
            return now - self.since_ns < AWAIT_NS
        return now - self.index_ns < AWAIT_NS


class Strides(Predictor):
    """The inferred orders of a service: an OrderSource, whose orders are followed as all others
    are. In charge itself it wants nothing: of a reader whose records will soon be known.
    ``always``: every reader is taken to skip until it is seen not to, `--policy stride`."""

    name = "strides"
    policies = frozenset({"auto", "stride"})

    def __init__(
        self, indices: IndexSource, known_orders: KnownOrders, ledger: Ledger,
        readers: Callable[[], list[Reader]], always: bool,
    ) -> None:  # fmt: skip
        self._indices, self._known_orders, self._ledger = indices, known_orders, ledger
        self._all, self._always = readers, always
        self._clock = known_orders.clock
        self.trait = None if always else Trait.SKIPS
        self._watches: dict[tuple[Key, int], _Watch] = {}
        self._left_out: dict[Key, tuple[int, bool]] = {}  # (until when it holds, what was found)

    # ---- a source of orders ---------------------------------------------------------------------

    def readers(self, reader: Reader) -> list[PlannedReader]:
        """See known_order.OrderSource."""
        watch = self._watch(reader)
        return [watch.order] if watch is not None and watch.order is not None else []

    def pending(self, reader: Reader) -> bool:
        """See known_order.OrderSource: nobody has said that there is one."""
        return False

    def mapped(self, client: Process) -> None:
        """See OrderSource: `--policy stride` asks at once, as the helper takes a while."""
        for region in client.regions.values() if self._always else ():
            self._indices.get(region.file)

    def _watch(self, reader: Reader) -> _Watch | None:
        name = reader.file.key, reader.rank
        watch = self._watches.get(name)
        if watch is not None and watch.file is not reader.file:  # closed, and opened again
            if watch.order is not None:
                self._known_orders.remove(watch.order)
            del self._watches[name]
            return None
        return watch

    # ---- a predictor ----------------------------------------------------------------------------

    def observe(self, batch: Batch, streams: Sequence[Stream | None]) -> bool:
        """See Predictor."""
        if batch.region.mode != ServingMode.POOL:  # which maps in pieces: not what was read
            for seen, stream in zip(batch.touches, streams, strict=True):
                if stream is not None:
                    self._went_on(batch.region.reader, stream, seen.at_ns)
        return False

    def _went_on(self, reader: Reader, stream: Stream, now: int) -> None:
        watch = self._watch(reader)
        if watch is None:
            watch = _Watch(reader.file, reader.rank)
            self._watches[reader.file.key, reader.rank] = watch
        if watch.order is not None:
            self._follow(watch, watch.order, now)
        elif (
            watch.over is None
            and now >= watch.next_ns
            and self._known_orders.order_of(reader) is None
            and (self._always or self._surely(reader, stream, now))
        ):
            watch.since_ns = watch.since_ns or now
            self._seek(watch, now)

    def confidence(self, reader: Reader, now_ns: int) -> Confidence:
        """See Predictor. `--policy auto` has its windows until there is a sequence."""
        watch = self._watch(reader) if self._always else None
        if watch is None or not watch.holds(now_ns):
            return Confidence.NONE
        streams = reader.table.active()
        dense = any(
            stream.settled and (stream.passed.density or 0.0) >= DENSITY for stream in streams
        )
        return Confidence.NONE if dense else Confidence.SEEKS

    def demand(self, reader: Reader, now_ns: int) -> tuple[tuple[Consumer, PrefetchRange], ...]:
        """See Predictor."""
        return ()

    def _surely(self, reader: Reader, stream: Stream, now: int) -> bool:
        """`--policy auto`: whether a rank skips what no rank of this node reads."""
        return (
            stream.skips
            and reader.access is Access.WALKS
            and not self._known_orders.pending(reader)
            and self._leaves_out(reader.file, now)
        )

    def _leaves_out(self, file: FileState, now: int) -> bool:
        """Whether it is sure that the ranks of this node together skip: where they read all of it,
        one window over that brings the same in larger requests."""
        until_ns, found = self._left_out.get(file.key, (0, False))
        if now >= until_ns:
            began = self._clock.cpu_ns()
            found = self._look_together(file)
            until_ns = now + max(LOOK_SLOWEST_NS, CPU_PART * (self._clock.cpu_ns() - began))
            self._left_out[file.key] = until_ns, found
        return found

    def _look_together(self, file: FileState) -> bool:
        readers = [reader for reader in self._all() if reader.file is file]
        streams = [
            (reader, max(active, key=lambda s: s.last_ns))
            for reader in readers
            if (active := reader.table.active())
        ]
        latest = max((stream.last_ns for _, stream in streams), default=0)
        streams = [each for each in streams if latest - each[1].last_ns < LATELY_NS]
        if {reader.rank for reader in readers} - {reader.rank for reader, _ in streams}:
            return False  # one of them has yet to begin, or waits: what it reads is not known
        # of what all have passed: one that is ahead has met its own records only; and less what
        # several threads read out of order
        spans = [sorted((stream.start_bytes, stream.position_bytes)) for _, stream in streams]
        low = max((a for a, _ in spans), default=0) + BACK_BYTES
        high = min((b for _, b in spans), default=0) - BACK_BYTES
        low = max(low, high - SURE_BYTES)
        if high - low < DISTANCE_MIN_BYTES:
            return False
        for reader, _ in streams:
            for region in reader.regions.values():
                pagetables.note_used(region, pagetables.runs(region, low, high))
        first, last = low // BLOCK_BYTES, -(-high // BLOCK_BYTES)
        both, _, other = file.blocks.counts(first, last)
        return both + other < DENSITY * (last - first) * BLOCK_BYTES

    # ---- finding a sequence ---------------------------------------------------------------------

    def _seek(self, watch: _Watch, now: int) -> None:
        index = self._indices.get(watch.file)
        if index is None:
            watch.over = self._indices.why_not(watch.file)
            watch.next_ns = now + RATE_SAMPLE_NS
            if watch.over and self._always:
                self._ledger.degrade(
                    f"--policy stride needs to know the records: {watch.over};"
                    " prefetched by position",
                    watch.file.path,
                )
            return
        watch.index_ns = watch.index_ns or now
        began = self._clock.cpu_ns()
        self._infer(watch, index, now)
        watch.every_ns = min(LATELY_NS, watch.every_ns * 5 // 4)
        watch.next_ns = now + max(watch.every_ns, CPU_PART * (self._clock.cpu_ns() - began))

    def _infer(self, watch: _Watch, index: RecordIndex, now: int) -> None:
        from uffdprefetch.predict import stride
        from uffdprefetch.readers.stride_order import StridedReader

        if index.file_bytes < stride.RECORD_MIN_BYTES * len(index):
            watch.over = "its records are too small to tell them apart"
            return
        streams = self._streams(watch)
        seen = self._seen(index, streams)
        if seen is None:
            return
        direction = streams[0][1].direction
        found = stride.infer(seen, direction)
        if found is None:
            return
        if len(index) // found.period * found.run > LIST_MAX:
            watch.over = f"{found}: too many records"
            return
        order = watch.order = StridedReader(watch.file, watch.rank, index, found, self._clock)
        self._known_orders.add(order)
        order.compare(seen, now)

    def _streams(self, watch: _Watch, since: int = 0) -> list[tuple[Reader, Stream]]:
        """The present stream of each process of the rank, the one that moved last first; of those
        that have moved since then."""
        found = []
        for reader in self._all():
            active = [s for s in reader.table.active() if s.last_ns >= since]
            if reader.rank == watch.rank and reader.file is watch.file and active:
                found.append((reader, max(active, key=lambda s: s.last_ns)))
        found.sort(key=lambda each: -each[1].last_ns)
        return [each for each in found if each[1].direction == found[0][1].direction]

    def _seen(
        self,
        index: RecordIndex,
        streams: list[tuple[Reader, Stream]],
        span_bytes: int = LOOK_AT_ONCE_BYTES,
    ) -> Seen | None:
        """What they have read of what all that move have passed, ``span_bytes`` back."""
        from uffdprefetch.predict import stride

        if not streams:
            return None
        latest, direction = streams[0][1].last_ns, streams[0][1].direction
        places = [s.position_bytes for _, s in streams if latest - s.last_ns < LATELY_NS]
        starts = [s.start_bytes for _, s in streams]
        if direction > 0:
            high = min(places)
            low = max(min(starts), high - span_bytes)
        else:
            low = max(places)
            high = min(max(starts), low + span_bytes)
        runs: list[tuple[int, int]] = []
        for region in [r for reader, _ in streams for r in reader.regions.values()]:
            at = low
            while at < high and len(runs) < ENTRIES_MAX:
                some = pagetables.runs(region, at, high)
                runs += some
                if len(some) < RUNS_AT_ONCE:
                    break
                at = sum(some[-1])
        if len(runs) >= ENTRIES_MAX:
            return None
        return stride.look(index, runs, low, high, direction)

    # ---- following it ---------------------------------------------------------------------------

    def _follow(self, watch: _Watch, order: StridedReader, now: int) -> None:
        """How far it is, and whether that is still what is read."""
        if order.wrong is None and now >= order.next_ns:
            began = self._clock.cpu_ns()
            index = self._indices.get(watch.file)
            streams = self._streams(watch, order.begun_ns)
            seen = None if index is None else self._seen(index, streams, LOOKAHEAD_MAX_BYTES)
            if seen is not None:
                order.compare(seen, now)
            order.next_ns = now + max(RATE_SAMPLE_NS, CPU_PART * (self._clock.cpu_ns() - began))
        if order.wrong is not None:
            self._known_orders.remove(order)
            watch.order = None
            watch.attempts += 1
            watch.next_ns, watch.every_ns = now + LOOK_SLOWEST_NS, LOOK_SLOWEST_NS
            if watch.attempts >= ATTEMPTS:
                watch.over = "no sequence holds"
