# SPDX-License-Identifier: Apache-2.0
"""Who says what a reader will need: of all predictors the one that is surest.

Of every reader that has gone on since the last turn the predictor in charge is asked; what it wants
goes to the scheduler, and so does what others add. Nobody else asks for reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.base.units import MAX_BYTES
from uffdprefetch.readers.predictor import Confidence, Predictor, RangeSource
from uffdprefetch.readers.reader_streams import ReaderStreams, Step
from uffdprefetch.sense.observation import Batch
from uffdprefetch.state.files import FileState
from uffdprefetch.state.reader import Reader, Region
from uffdprefetch.warm.consumer import Consumer, PrefetchRange
from uffdprefetch.warm.placement import CheckpointPlacer
from uffdprefetch.warm.scheduler import Scheduler


@dataclass
class _Due:
    """To be asked about in the next turn; the mappings through which it was touched."""

    reader: Reader
    regions: dict[int, Region] = field(default_factory=dict)


@dataclass
class _Charge:
    """Who says what a reader needs, and was last asked then."""

    by: Predictor | None = None
    asked_ns: int = 0

    @property
    def next_ns(self) -> int:
        """Before then it is not asked about."""
        return self.asked_ns + (self.by.every_ns if self.by is not None else 0)


class _Listeners:
    """Of those who have ranges read, who wants to hear of what."""

    def __init__(self) -> None:
        self.attached: list[RangeSource] = []
        self.steps: list[RangeSource] = []
        self.seen: list[Predictor] = []
        self.keep_back: list[Predictor] = []  # they may have more

    def add(self, source: RangeSource) -> None:
        """One more."""
        if type(source).attached is not RangeSource.attached and source not in self.attached:
            self.attached.append(source)
        if type(source).step is not RangeSource.step and source not in self.steps:
            self.steps.append(source)

    def add_predictor(self, predictor: Predictor) -> None:
        """... who is told of what is seen."""
        self.add(predictor)
        if type(predictor).observe is not Predictor.observe:
            self.seen.insert(0, predictor)
        if type(predictor).has_more is not Predictor.has_more:
            self.keep_back.append(predictor)


class Arbiter:
    """The predictors of one service. Its thread calls everything here."""

    def __init__(
        self, policy: str, scheduler: Scheduler, layout: CheckpointPlacer, streams: ReaderStreams,
        clock: Clock, readers: Callable[[], list[Reader]],
    ) -> None:  # fmt: skip
        self._scheduler, self._layout, self._streams = scheduler, layout, streams
        self._policy, self._clock, self._readers = policy, clock, readers
        self._predictors: list[Predictor] = []
        self._listeners = _Listeners()
        self._due: dict[int, _Due] = {}  # by reader
        self._charges: dict[Reader, _Charge] = {}
        #: Hears what is seen of readers before anybody is asked about them; wants nothing read.
        self.on_seen: Callable[[Batch], None] | None = None
        #: Whether so many bytes may be read before anybody has come to them.
        self.may_begin: Callable[[int], bool] = lambda _: True

    def add(self, predictor: Predictor) -> None:
        """Ask it, too: before those that have been there, and of the equally sure the first is
        taken."""
        self._predictors.insert(0, predictor)
        self._listeners.add_predictor(predictor)

    def listen(self, source: RangeSource) -> None:
        """Tell it of mappings, and of turns, before it is asked or without that."""
        self._listeners.add(source)

    # -------------------------------------------------------------- what is told

    def attached(self, region: Region) -> None:
        """It is managed from now on."""
        for source in self._listeners.attached:
            if source.attached(region):
                self.due(region)

    def step(self, now_ns: int) -> None:
        """Once a turn, before plan()."""
        for source in self._listeners.steps:
            if source.busy:
                source.step(now_ns)

    def observe(self, batch: Batch) -> list[Step | None]:
        """Something was seen of a reader; of each touch the stream that went on by it, if any."""
        reader, asks = batch.region.reader, bool(batch.touches)
        if self.on_seen is not None:
            self.on_seen(batch)
        steps = self._streams.touched(batch)
        streams = [step.stream if step else None for step in steps]
        self.end_streams(reader)
        for seen, step in zip(batch.touches, steps, strict=True):
            if step is not None:
                for low, high in reader.unneeded.touched(seen.start, seen.end, seen.at_ns):
                    self.take_back(reader, low, high)
        for predictor in self._listeners.seen:
            if predictor.trait is None or predictor.trait in reader.traits:
                asks = predictor.observe(batch, streams) or asks
        if asks:
            self.due(batch.region)
        return steps

    def take_back(self, reader: Reader, start: int = 0, end: int = MAX_BYTES) -> None:
        """What waits to be read for a reader, of what was asked for in [start, end), is not read
        now."""
        for predictor in self._predictors:
            predictor.take_back(reader, start, end)

    def end_streams(self, reader: Reader) -> None:
        """Streams that were another's get nothing any more."""
        ended, reader.table.absorbed = reader.table.absorbed, []
        if ended:
            for predictor in self._predictors:
                predictor.ended(ended)

    def refresh(self, reader: Reader) -> None:
        """Once a second: its streams of long ago end, and what has fired long ago is armed again
        even where nothing moves."""
        reader.table.expire(self._clock.now_ns())
        self.end_streams(reader)
        for region in reader.regions.values():
            if not region.agent.detaching:
                self._layout.refresh(region)

    def due(self, region: Region) -> None:
        """Ask of its reader in the next turn."""
        reader = region.reader
        due = self._due.get(id(reader))
        if due is None:
            due = self._due[id(reader)] = _Due(reader)
        due.regions[region.id] = region

    def orders_came(self) -> None:
        """Orders have come, or readers have said how far they are: everybody is asked about."""
        for reader in self._readers():
            self._charge(reader).asked_ns = 0  # now, not only when it would be asked again anyway
            for region in reader.regions.values():
                self.due(region)

    def unmapped(self, region: Region) -> None:
        """The mapping is gone from our management."""
        due = self._due.get(id(region.reader))
        if due is not None:
            due.regions.pop(region.id, None)
            if not region.reader.regions:
                del self._due[id(region.reader)]
        for predictor in self._predictors:
            predictor.unmapped(region)

    def left(self, reader: Reader) -> None:
        """The process is gone."""
        self._due.pop(id(reader), None)
        self._charges.pop(reader, None)
        for predictor in self._predictors:
            predictor.left(reader)

    # -------------------------------------------------------------- what is wanted

    @property
    def due_ns(self) -> int | None:
        """When plan() is due though nothing happens."""
        charges = (self._charges.get(due.reader) for due in self._due.values())
        return min((one.next_ns if one is not None else 0 for one in charges), default=None)

    @property
    def idle(self) -> bool:
        """Whether plan() would do nothing."""
        return not self._due

    def in_charge(self, reader: Reader) -> Predictor | None:
        """Who says what it needs; None before anybody was asked."""
        charge = self._charges.get(reader)
        return charge.by if charge is not None else None

    def _charge(self, reader: Reader) -> _Charge:
        found = self._charges.get(reader)
        if found is None:
            found = self._charges[reader] = _Charge()
        return found

    def want(self, consumer: Consumer, wanted: PrefetchRange) -> int:
        """Have a range read; returns the bytes that are queued for it. By this alone is anything
        asked for: by the predictor in charge of a reader, in plan(), and by any number that add
        ranges whoever that is: what a job or its user has said, files that are read whole, tensor
        starts."""
        return self._scheduler.want(consumer, wanted)

    def begin(self, file: FileState, start: int) -> None:
        """A mapping begins at this offset: its first request, if that goes out before it is
        touched."""
        if self._policy != "none":
            self._scheduler.begin(file, start, self.may_begin)

    def plan(self) -> None:
        """Ask of every reader that is due what it needs next, and have it read."""
        due, self._due = self._due, {}
        now = self._clock.now_ns()
        for key, one in due.items():
            reader = one.reader
            mapped = any(not region.agent.detaching for region in reader.regions.values())
            if reader.file.guard.changed or not mapped:
                continue
            charge = self._charge(reader)
            if now < charge.next_ns:
                self._due[key] = one
                continue
            charge.asked_ns = now
            chosen, before = self._surest(reader, now), charge.by
            if before is not None and before is not chosen:
                before.dismissed(reader)
            charge.by = chosen
            if chosen is not None:
                for consumer, wanted in list(chosen.demand(reader, now)):
                    self.want(consumer, wanted)
                if chosen in self._listeners.keep_back and chosen.has_more(reader):
                    self._due[key] = one
            for region in one.regions.values():
                if region.checkpoints.fired and not region.agent.detaching:
                    self._layout.refresh(region)

    def describe_file(self, path: str) -> dict[str, dict[str, Any] | None]:
        """For the summary (docs/summary-schema.md): what was made of a file by each key there."""
        found: dict[str, dict[str, Any] | None] = {"whole": None, "stated": None}
        for source in self._listeners.steps:
            found |= source.describe_file(path)
        return found

    def _surest(self, reader: Reader, now: int) -> Predictor | None:
        """Of those that it concerns and the run's policy allows; None: of none of them."""
        best, most = None, Confidence.NONE
        for predictor in self._predictors:
            concerned = predictor.trait is None or predictor.trait in reader.traits
            if concerned and self._policy in predictor.policies:
                sure = predictor.confidence(reader, now)
                if sure > most:
                    best, most = predictor, sure
        return best
