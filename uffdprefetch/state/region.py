# SPDX-License-Identifier: Apache-2.0
"""A managed mapping of one process, and what each part of the service remembers of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import uffd
from uffdprefetch.predict.checkpoints import Span
from uffdprefetch.predict.streams import Stream, StreamTable
from uffdprefetch.protocol import wire
from uffdprefetch.state.files import FileState

if TYPE_CHECKING:
    from uffdprefetch.readers.known_order import PlannedReader

#: Numbers of regions that no agent has given (service/observe.py); those of agents end below it
#: (csrc/mapping.c, claim_region).
FIRST_OBSERVED = 1 << 32


@dataclass
class CheckpointState:
    """Armed pages of a mapping by page number; in the pool one page of each 4 MiB cell, by cell."""

    offered: list[int] = field(default_factory=list)  # that the agent was told to lay
    laid: set[int] = field(default_factory=set)  # with a checkpoint over them
    fired: dict[int, int] = field(default_factory=dict)  # touched, not armed again: when, ns
    armed: dict[int, int] = field(default_factory=dict)  # pool: cell -> a page read there
    rearm_at_ns: int = 0  # pool: when to look at them again


@dataclass
class ScanState:
    """Page-table scans of a mapping: the next, the last, and what they have found."""

    due_ns: int = 0
    every_ns: int = 0
    mapped: IntervalSet = field(default_factory=IntervalSet)  # file ranges found, at the last scan
    scattered: bool = False  # too many separate ranges: no use in scanning often
    resume_at: int = 0  # where the present scan of the whole mapping goes on; 0: none is under way
    whole_ns: int = 0  # when the last of the whole mapping ended
    last_end_ns: int = 0  # when the last of any kind ended


@dataclass
class OrderState:
    """Whose known order the reader of a mapping follows."""

    reader: PlannedReader | None = None  # the last one
    followed: bool = False  # ... and it is still to be followed
    planned_ns: int = 0  # when what it needs next was last looked at
    last_progress_ns: int = 0  # when it was last heard how far it is; 0: never
    pending_since_ns: int = 0  # since when an order is to become known; 0: none is

    @property
    def announced(self) -> bool:
        """Whether the order is known from elsewhere than from how the reader walks."""
        return self.followed and self.reader is not None and not self.reader.inferred


@dataclass
class PoolState:
    """Touches of a mapping of the pool's memory."""

    planned_touches: int = 0  # of a reader whose order is known
    #: thread -> (whose walk it is on, whose it touched last)
    walkers: dict[int, tuple[Stream, Stream]] = field(default_factory=dict)


@dataclass
class Region:
    """A managed mapping of one process. Addresses and offsets in bytes."""

    id: int
    file: FileState
    address: int
    length_bytes: int
    offset_bytes: int
    verdict: wire.ServingMode
    table: StreamTable
    detaching: bool = False
    checkpoints: CheckpointState = field(default_factory=CheckpointState)
    scan: ScanState = field(default_factory=ScanState)
    order: OrderState = field(default_factory=OrderState)
    pool: PoolState = field(default_factory=PoolState)

    @property
    def span(self) -> Span:
        """What of the file it shows."""
        end = min(self.offset_bytes + self.length_bytes, self.file.size_bytes)
        return Span(self.offset_bytes, end, uffd.PAGE_BYTES)

    def offset_of(self, address: int) -> int:
        """The file offset that an address of the mapping shows."""
        return self.offset_bytes + address - self.address

    def address_of(self, offset: int) -> int:
        """The address that shows a file offset."""
        return self.address + offset - self.offset_bytes
