# SPDX-License-Identifier: Apache-2.0
"""What a predictor is to the service (CONTRIBUTING.md says how to add one).

The service tells it what a process has touched of a file, and asks of each mapping that has gone on
what its reader will need next. One predictor at a time is in charge of a mapping: the arbiter
(readers/arbiter.py) asks the one that is surest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from uffdprefetch.state.client import Client
from uffdprefetch.state.region import Region
from uffdprefetch.warm.consumer import Consumer, PrefetchRange


@dataclass(frozen=True)
class Observation:
    """A process has touched [start, end) bytes of a file by ``at_ns``, CLOCK_MONOTONIC.

    ``new``: nobody of it was here before, as far as its page table told. ``told``: the touch itself
    was seen, by a checkpoint or by the pool; else a page-table scan has found what it left.
    """

    start: int
    end: int
    at_ns: int
    new: bool = False
    told: bool = True


class Predictor(Protocol):
    """Tells what a mapping's reader will need. ``name``: for people; ``policies``: under which of
    --policy it is asked."""

    name: str
    policies: frozenset[str]

    def observe(self, client: Client, region: Region, seen: Observation) -> None:
        """Something was touched. Cheap: it is called for every touch of every reader."""

    def confidence(self, client: Client, region: Region, now_ns: int) -> float:
        """How sure it is of what this reader will need: 0, it does not know, to 1."""

    def demand(
        self, client: Client, region: Region, now_ns: int
    ) -> Iterable[tuple[Consumer, PrefetchRange]]:
        """What is to be read that was not asked for before, and for whom: ranges within
        ``region.span``, ``pooled`` where the mapping is the pool's. Only the predictor in charge is
        asked. The scheduler leaves out what is in memory already, and what was read within the last
        second (FileState.recent)."""

    def dismissed(self, client: Client, region: Region) -> None:
        """Another predictor is in charge from now on: what waits to be read for this one's reader
        is to be taken back (Scheduler.forget), and asked for again should it be in charge again."""

    def left(self, region: Region) -> None:
        """The mapping is gone: what is kept of it, by ``id(region)``, goes."""
