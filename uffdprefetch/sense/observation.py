# SPDX-License-Identifier: Apache-2.0
"""What was seen of a reader: an Observation is a touch, a Batch all that was seen at one time."""

from __future__ import annotations

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.state.reader import Region


@dataclass(frozen=True)
class Observation:
    """A process has touched [start, end) bytes of a file by ``at_ns``, CLOCK_MONOTONIC.

    ``new``: nobody of it was here before, as far as its page table told. ``told``: the touch itself
    was seen, by the pool or, where no page table can be read, by a checkpoint; else a page-table
    scan has found what it left, and those within 1 MiB are one Observation. In the pool every touch
    is told of what was not mapped; a fault of who goes on in order maps a part ahead, and where
    that ends the next fault tells, by ``passed``, that it was come over: so many bytes before the
    touch, or below 0 after it. Faults by which a thread has come over a stretch since the last turn
    are one Observation. ``again``: found by a scan that had begun in an earlier turn, or
    with an earlier part of it: it has the time of that.
    """

    start: int
    end: int
    at_ns: int
    new: bool = False
    told: bool = True
    passed: int = 0
    again: bool = False


@dataclass
class Batch:
    """What one look at a mapping has found by ``at_ns``, or its faults have told since the last
    turn. ``found``: exactly what is mapped and was not before, [start, end) bytes, of each look at
    a part of it in the order of the file."""

    region: Region
    at_ns: int
    touches: list[Observation] = field(default_factory=list)
    found: list[tuple[int, int]] = field(default_factory=list)
