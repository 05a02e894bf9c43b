# SPDX-License-Identifier: Apache-2.0
"""A managed mapping of one process, and each component's state of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import uffd
from uffdprefetch.predict.checkpoints import Span
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol import wire
from uffdprefetch.state.files import FileState

if TYPE_CHECKING:
    from uffdprefetch.state.reader import Reader

#: First number of regions that no agent numbered (service/observe.py); agents' numbers are below
#: (csrc/job/mapping.c, claim_region).
FIRST_OBSERVED = 1 << 32
#: How far from a mapping the position of a walk in it may be: that is the end of a page, or of what
#: one fault maps.
NEXT_TO_BYTES = 64 << 10


@dataclass
class CheckpointState:
    """Armed pages of a mapping by page number; in the pool one page of each 4 MiB cell, by cell."""

    offered: list[int] = field(default_factory=list)  # sent to the agent to lay
    laid: set[int] = field(default_factory=set)  # with a checkpoint over them
    fired: dict[int, int] = field(default_factory=dict)  # touched, not rearmed: time in ns
    armed: dict[int, int] = field(default_factory=dict)  # pool: cell -> a page read there
    rearm_at_ns: int = 0  # pool: when to check them again


@dataclass
class ScanState:
    """Page-table scans of a mapping: the next, the last, and their results."""

    due_ns: int = 0
    news_ns: int = 0  # of the last touch, or when it was mapped
    mapped: IntervalSet = field(default_factory=IntervalSet)  # file ranges present at the last scan
    #: The runs of it, as looks have found them: (offset, bytes).
    runs: set[tuple[int, int]] = field(default_factory=set)
    resume_at: int = 0  # where a scan of the whole mapping continues; 0: none
    whole_ns: int = 0  # end of the last scan of the whole mapping
    elsewhere_ns: int = 0  # of the last touch that was not ahead of a walk
    began_ns: int = 0  # begin of the present one, or of the last
    known_ns: int = 0  # touches before are in ``mapped``, as far as their pages are still mapped
    last_end_ns: int = 0  # end of the last scan
    told_ns: int = 0  # pool: of the last touch that has told what was passed


@dataclass
class Region:
    """A managed mapping of one process. Addresses and offsets in bytes."""

    id: int
    file: FileState
    address: int
    length_bytes: int
    offset_bytes: int
    verdict: wire.ServingMode
    reader: Reader
    mapped_ns: int = 0  # since then it is ours
    anchor: int = 0  # address at which its agent keeps a mapping of the file; 0: none
    detaching: bool = False
    brings_lease: bool = False  # the first one of its file that its agent has told of
    reads: wire.Stated = wire.Stated.NORMAL  # how the job says that it reads it
    checkpoints: CheckpointState = field(default_factory=CheckpointState)
    scan: ScanState = field(default_factory=ScanState)

    @property
    def span(self) -> Span:
        """The mapped range of the file."""
        end = min(self.offset_bytes + self.length_bytes, self.file.size_bytes)
        return Span(self.offset_bytes, end, uffd.PAGE_BYTES)

    @property
    def lease_fd(self) -> int:
        """What its agent is to have, to give the file's lease back by; -1: nothing."""
        return self.file.fd if self.brings_lease and self.file.leased else -1

    @property
    def walks(self) -> list[Stream]:
        """Of its reader's walks those that are in it."""
        low, high = self.offset_bytes - NEXT_TO_BYTES, self.offset_bytes + self.length_bytes
        return [
            s for s in self.reader.table.streams if low <= s.position_bytes <= high + NEXT_TO_BYTES
        ]

    def offset_of(self, address: int) -> int:
        """The file offset at an address of the mapping."""
        return self.offset_bytes + address - self.address

    def address_of(self, offset: int) -> int:
        """The address of a file offset."""
        return self.address + offset - self.offset_bytes
