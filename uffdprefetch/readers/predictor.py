# SPDX-License-Identifier: Apache-2.0
"""What a predictor is to the service (CONTRIBUTING.md says how to add one).

The service tells it what a process has touched of a file, and asks of each reader that has gone on
what it will need next. One predictor at a time is in charge of a reader: the arbiter
(readers/arbiter.py) asks the one that is surest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from uffdprefetch.predict.streams import Stream
from uffdprefetch.state.reader import Reader, Region, Trait
from uffdprefetch.warm.consumer import Consumer, PrefetchRange

#: Files, and kinds of them, of which a predictor keeps something; of those that nobody maps the
#: first go.
FILES_MAX = 4096
#: Who guesses by walks always knows something; whoever knows an order knows more.
GUESS_CONFIDENCE = 0.1


@dataclass(frozen=True)
class Observation:
    """A process has touched [start, end) bytes of a file by ``at_ns``, CLOCK_MONOTONIC.

    ``new``: nobody of it was here before, as far as its page table told. ``told``: the touch itself
    was seen, by a checkpoint (`--policy fixed`) or by the pool; else a page-table scan has found
    what it left. A scan tells of touches later, those within 1 MiB in one
    Observation, and exactly by Predictor.scanned(). In the pool every touch is told of what was not
    mapped; a fault of who goes on in order maps a part ahead, and where that ends the next fault
    tells, by ``passed``, that it was come over: so many bytes before the touch, or below 0 after
    it.
    """

    start: int
    end: int
    at_ns: int
    new: bool = False
    told: bool = True
    passed: int = 0

    @property
    def known(self) -> tuple[int, int]:
        """[start, end) bytes, with what was come over since the last touch."""
        return max(0, self.start - max(0, self.passed)), self.end - min(0, self.passed)


class Predictor(ABC):
    """Tells what a reader (a process that reads a file) will need."""

    #: For people.
    name: ClassVar[str]
    #: Under which of --policy it is asked.
    policies: ClassVar[frozenset[str]]
    #: Whom it concerns: readers of this trait; None, all. It is told and asked of nobody else.
    trait: Trait | None = None
    #: While it is in charge it is asked no more often than this.
    every_ns: int = 0

    def observe(  # noqa: B027
        self, reader: Reader, region: Region, seen: Observation, walk: Stream | None
    ) -> None:
        """Something was touched through a mapping, and brought this walk on (None where its order
        is known, and walks would say no more). Cheap: it is called for every touch of every
        reader."""

    def scanned(self, region: Region, found: list[tuple[int, int]], now_ns: int) -> bool:
        """A page-table scan has found these ranges [start, end) mapped, and none before, in the
        order of the file; whether that is a reason to ask of the reader."""
        return False

    @abstractmethod
    def confidence(self, reader: Reader, now_ns: int) -> float:
        """How sure it is of what this reader will need: 0, it does not know, to 1."""

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

    def dismissed(self, reader: Reader) -> None:  # noqa: B027
        """Another predictor is in charge from now on: what waits to be read for this one's reader
        is to be taken back (Scheduler.forget), and asked for again should it be in charge again."""

    def unmapped(self, region: Region) -> None:  # noqa: B027
        """A mapping has gone; its reader stays."""

    def left(self, reader: Reader) -> None:  # noqa: B027
        """The process is gone, or has mapped too many other files since it mapped this one: what is
        kept of the reader goes."""
