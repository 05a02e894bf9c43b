# SPDX-License-Identifier: Apache-2.0
"""What components keep of a managed mapping (reader.py, Region)."""

from __future__ import annotations

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.record import dataclass, field


@dataclass
class AgentState:
    """What its agent has of a mapping, and is to do."""

    anchor: int = 0  # address at which it keeps a mapping of the file; 0: none
    brings_lease: bool = False  # the first one of its file that it has told of
    detaching: bool = False  # it is to give it back


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
    resume_at: int = 0  # where a scan of the whole mapping continues; 0: none
    whole_ns: int = 0  # end of the last scan of the whole mapping
    elsewhere_ns: int = 0  # of the last touch that was not ahead of a stream
    began_ns: int = 0  # begin of the present one, or of the last
    known_ns: int = 0  # touches before are in ``mapped``, as far as their pages are still mapped
    last_end_ns: int = 0  # end of the last scan
    told_ns: int = 0  # pool: of the last touch that has told what was passed
