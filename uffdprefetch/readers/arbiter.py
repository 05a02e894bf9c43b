# SPDX-License-Identifier: Apache-2.0
"""Who says what a reader will need: of all predictors the one that is surest.

Of every reader that has gone on since the last turn the predictor in charge is asked; what it wants
goes to the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from uffdprefetch.base.clock import Clock
from uffdprefetch.readers.predictor import Observation, Predictor
from uffdprefetch.readers.walks import Step, Walks
from uffdprefetch.state.reader import Reader, Region
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


class Arbiter:
    """The predictors of one service. Its thread calls everything here."""

    def __init__(
        self, policy: str, scheduler: Scheduler, layout: CheckpointPlacer, walks: Walks,
        clock: Clock, readers: Callable[[], list[Reader]],
    ) -> None:  # fmt: skip
        self._scheduler, self._layout, self._walks = scheduler, layout, walks
        self._policy, self._clock, self._readers = policy, clock, readers
        self._predictors: list[Predictor] = []
        # those of them that want to hear of touches, and of scans
        self._touched: list[Predictor] = []
        self._scanned: list[Predictor] = []
        self._due: dict[int, _Due] = {}  # by reader
        self._charges: dict[Reader, _Charge] = {}

    def add(self, predictor: Predictor) -> None:
        """Ask it, too: before those that have been there, and of the equally sure the first is
        taken."""
        self._predictors.insert(0, predictor)
        if type(predictor).observe is not Predictor.observe:
            self._touched.insert(0, predictor)
        if type(predictor).scanned is not Predictor.scanned:
            self._scanned.insert(0, predictor)

    # -------------------------------------------------------------- what is told

    def observe(self, region: Region, seen: Observation) -> Step | None:
        """A process has touched something; the walk that went on by it, if any."""
        self.due(region)
        step = self._walks.touch(region, seen)
        reader, walk = region.reader, step.walk if step else None
        for predictor in self._touched:
            if predictor.trait is None or predictor.trait in reader.traits:
                predictor.observe(reader, region, seen, walk)
        return step

    def scanned(self, region: Region, found: list[tuple[int, int]]) -> None:
        """All that one page-table scan has found, in the order of the file."""
        now = self._clock.now_ns()
        if any([predictor.scanned(region, found, now) for predictor in self._scanned]):
            self.due(region)

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

    def plan(self) -> None:
        """Ask of every reader that is due what it needs next, and have it read."""
        due, self._due = self._due, {}
        now = self._clock.now_ns()
        for key, one in due.items():
            reader = one.reader
            mapped = any(not region.detaching for region in reader.regions.values())
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
                for consumer, wanted in chosen.demand(reader, now):
                    self._scheduler.want(consumer, wanted)
                if chosen.has_more(reader):
                    self._due[key] = one
            for region in one.regions.values():
                if not region.detaching:
                    self._layout.refresh(region)

    def _surest(self, reader: Reader, now: int) -> Predictor | None:
        """Of those that it concerns and the run's policy allows; None: of none of them."""
        best, most = None, 0.0
        for predictor in self._predictors:
            concerned = predictor.trait is None or predictor.trait in reader.traits
            if concerned and self._policy in predictor.policies:
                sure = predictor.confidence(reader, now)
                if sure > most:
                    best, most = predictor, sure
        return best
