# SPDX-License-Identifier: Apache-2.0
"""What a predictor is to the service (CONTRIBUTING.md says how to add one).

The service tells it what a process has touched of a file, and asks of each reader that has gone on
what it will need next. One predictor at a time is in charge of a reader: the arbiter
(readers/arbiter.py) asks the one that is surest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, ClassVar

from uffdprefetch.predict.streams import Stream
from uffdprefetch.sense.observation import Batch
from uffdprefetch.state.reader import Reader, Region, Trait
from uffdprefetch.warm.consumer import Consumer, PrefetchRange


class Confidence(IntEnum):
    """How sure a predictor is of a reader; whoever is surest is in charge."""

    NONE = 0
    GUESS = 1  # by streams: something is always known
    SEEKS = 2  # records of which a sequence will soon be known
    AWAITS = 3  # an order that is to become known
    KNOWS = 4  # an order


class RangeSource:
    """Who has ranges read (Arbiter.want()): a predictor, or who adds some whoever is in charge."""

    #: Whether step() has something to do: else it is not called.
    busy: bool = True

    def attached(self, region: Region) -> bool:
        """A mapping is managed from now on; whether to ask of its reader before it has touched
        anything."""
        return False

    def step(self, now_ns: int) -> None:
        """Once a turn, when all is known of what was touched."""

    def describe_file(self, path: str) -> dict[str, dict[str, Any] | None]:
        """For the summary (docs/summary-schema.md): what it has made of a file, by the key under
        which that stands there."""
        return {}


class Predictor(RangeSource, ABC):
    """Tells what a reader (a process that reads a file) will need."""

    #: For people.
    name: ClassVar[str]
    #: Under which of --policy it is asked.
    policies: ClassVar[frozenset[str]]
    #: Whom it concerns: readers of this trait; None, all. It is told and asked of nobody else.
    trait: Trait | None = None
    #: While it is in charge it is asked no more often than this.
    every_ns: int = 0

    def observe(self, batch: Batch, streams: Sequence[Stream | None]) -> bool:
        """What was seen of a reader since the last turn, and of each of its touches the stream that
        it brought on (None where its order is known, and streams would say no more); whether what
        was found is a reason to ask of the reader, as a touch always is. Cheap: it is called of
        every reader, once a turn in which it was seen."""
        return False

    @abstractmethod
    def confidence(self, reader: Reader, now_ns: int) -> Confidence:
        """How sure it is of what this reader will need."""

    @abstractmethod
    def demand(self, reader: Reader, now_ns: int) -> Iterable[tuple[Consumer, PrefetchRange]]:
        """What is to be read that was not asked for before, and for whom: ranges within
        ``reader.span``, ``pooled`` as ``reader.reads_pool`` says. Only the predictor in charge is
        asked. The scheduler leaves out what is in memory already, and what was read
        within the last second (PageCache.recent)."""

    def has_more(self, reader: Reader) -> bool:
        """Whether demand() has kept back some of what is wanted now: it is asked again, as soon as
        ``every_ns`` allows."""
        return False

    def take_back(self, reader: Reader, start: int, end: int) -> None:
        """What waits to be read for a reader, of what was asked for in [start, end), is not to be
        read: should it go on there, it is asked for again."""

    def ended(self, streams: Sequence[Stream]) -> None:
        """These streams were another's, or none: nothing is read for them any more."""

    def dismissed(self, reader: Reader) -> None:
        """Another predictor is in charge from now on: what waits to be read for this one's reader
        is to be taken back (Scheduler.forget), and asked for again should it be in charge again."""

    def unmapped(self, region: Region) -> None:
        """A mapping has gone; its reader stays."""

    def left(self, reader: Reader) -> None:
        """The process is gone, or has mapped too many other files since it mapped this one: what is
        kept of the reader goes."""
