# SPDX-License-Identifier: Apache-2.0
"""What a trace consists of: events of 48 bytes, all of one shape.

bpf/event.h is the same in C. Times are CLOCK_MONOTONIC ns, offsets and lengths bytes of the file,
``pid`` is a process (the kernel's tgid) and ``tid`` a thread of it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array

#: One event; an array of them is what recorder, file and analysis hand on.
EVENT = np.dtype(
    [
        ("time_ns", "<u8"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("value", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("kind", "<u2"),
        ("file", "<u2"),
        ("aux", "<u4"),
    ]
)
EVENT_BYTES = 48
assert EVENT.itemsize == EVENT_BYTES
#: ``file`` of an event that belongs to no file.
NO_FILE = 0


class Kind(IntEnum):
    """Kind of an event. `value` and `aux` are 0 where not mentioned."""

    # ---- the kernel's tracepoints (BPF): a witness that does not ask us
    #: A page fault that looked the page up in the page cache (filemap_fault). offset: the page,
    #: length: one page, value: the address; aux: FAULT_* bits.
    FAULT = 1
    #: The FAULT of the same thread and page before this was a major one: the page was not in the
    #: cache. value: ns since that fault began, to its end where it had to wait.
    MAJOR = 2
    #: Fault-around: what was cached of [offset, +length) was mapped with a fault. value: the
    #: address of the fault; aux: which page of the range it was, NO_PAGE when not known. One fault
    #: is one AROUND, or one FAULT (and then perhaps a MAPPED), or an AROUND and then a FAULT with
    #: FAULT_AFTER_AROUND.
    AROUND = 3
    #: A thread slept within a fault (of the page `offset`) and went on now. value: ns asleep.
    #: Without a MAJOR the page was on its way already (readahead, another reader, a prefetcher).
    WAIT = 4
    #: Pages came into the page cache, one folio after the other. time_ns: the first, value: ns from
    #: the first to the last, aux: folios. pid: who brought them.
    FILL = 5
    #: Pages left the page cache. As FILL.
    EVICT = 6
    #: A readahead decision. length: bytes to read, value: bytes of it that are the asynchronous
    #: part (where the next decision is triggered), aux: folio order | how << 8 (a ReadaheadSite).
    READAHEAD = 7
    #: read(2) and the like took [offset, +length) through the page cache.
    READ = 8
    #: A block request was completed. time_ns: the end, value: ns since it was issued, offset: on
    #: the device, aux: device (major << 20 | minor). pid: who issued it.
    BLOCK = 9
    #: A system call ended. value: ns it took, offset: its file offset argument (pread, mmap) or 0,
    #: length: what it returned (bytes; mmap: the length mapped), aux: a Call | fd << 8
    #: (mmap: the fd mapped, 0xffffff for none). file: of an open, and of a read whose open was
    #: seen.
    CALL = 10
    #: A mapping of a file: [offset, +length) of it lies at address `value`.
    MAP = 11
    #: A process was born of process aux; ran a new program; ended.
    BORN = 12
    EXEC = 13
    EXIT = 14
    #: Fault-around as the end of a fault that had to wait: the FAULT was reported before, and this
    #: is no other one. As AROUND.
    MAPPED = 15

    # ---- our service (under wrap, or where BPF is not to be had)
    #: A checkpoint was touched. offset: its page, value: ns until it was answered. Of the pool
    #: (aux: POOL_* bits): a page that was not mapped yet; [offset, +length) is what its reader has
    #: come over since the touch before, the page is its last one (POOL_BACKWARD: its first).
    TOUCH = 20
    #: Pages newly found in a reader's page table. time_ns: when we scanned it; value: ns since the
    #: scan before (the resolution in time).
    SEEN = 21
    #: An extent was warmed. time_ns: when it was asked for, value: ns until it was there, aux: KiB
    #: of it that were cached already. pid: the rank's process it was for (0: none), tid: ours.
    WARM = 22
    #: A window was planned for a reader (pid).
    WINDOW = 23
    #: A major-fault count of /proc (no BPF): value: how many more since the last sample of pid.
    MAJORS = 24
    #: [offset, +length) was punched out of the pool: it is read again when it is wanted again.
    PUNCH = 25
    #: Once a second, of a file that nodes share: bytes that came from other nodes so far (offset),
    #: went to them (length), were read from storage (value).
    NODES = 26
    #: Once a second, of a file in the pool that has a disk tier (`--spill`): bytes that came back
    #: from there so far (offset), that went there (length), that left memory before they could
    #: (value). aux: DISK_* bits.
    DISK = 27


#: ``aux`` of FAULT: an AROUND of the same fault was reported before; the kernel itself touched.
FAULT_AFTER_AROUND = 1
FAULT_KERNEL = 2
#: ``aux`` of TOUCH: the pool answered; it had to be read first; its reader goes backward.
POOL_TOUCH = 1
POOL_MISS = 2
POOL_BACKWARD = 4
#: ``aux`` of DISK: nothing goes there any more; nothing comes from there either.
DISK_FULL = 1
DISK_OFF = 2
#: ``length`` of an AROUND that mapped a huge page.
HUGE_BYTES = 2 << 20
#: ``aux`` of AROUND: the page is not known.
NO_PAGE = 0xFFFFFFFF


class ReadaheadSite(IntEnum):
    """Where a readahead decision was made (mm/readahead.c)."""

    SYNC = 1  # asked for: page_cache_sync_ra; length: what the reader wanted
    ASYNC = 2  # a marked page was met: page_cache_async_ra
    ORDER = 3  # page_cache_ra_order: what will be read, in large folios
    UNBOUNDED = 4  # page_cache_ra_unbounded: what will be read, page by page


class Call(IntEnum):
    """The system calls of [Stanovnik] figure 4."""

    OPEN = 1
    MMAP = 2
    READ = 3
    PREAD = 4
    WRITE = 5
    CLOSE = 6
    MUNMAP = 7


#: Kinds of events kept of a file with a `group` (trace_file.TracedFile): its cost, not its pattern.
COST_KINDS = (Kind.FILL, Kind.READAHEAD, Kind.MAJOR, Kind.CALL)
#: Calls of which bpf/calls.c makes events.
RECORDED_CALLS = frozenset((Call.OPEN, Call.MMAP, Call.READ, Call.PREAD, Call.WRITE))


def empty(n: int = 0) -> np.ndarray[Any, Any]:
    """n events of zeros."""
    return np.zeros(n, EVENT)


def of_kind(events: np.ndarray[Any, Any], *kinds: Kind) -> np.ndarray[Any, Any]:
    """The events of these kinds, in order."""
    if len(kinds) == 1:
        return events[events["kind"] == kinds[0]]
    return events[np.isin(events["kind"], kinds)]


def event(
    kind: Kind, time_ns: int, pid: int, tid: int, file: int,
    offset: int = 0, length: int = 0, value: int = 0, aux: int = 0,
) -> Array:  # fmt: skip
    """One event, as an array."""
    return np.array([(time_ns, offset, length, value, pid, tid, kind, file, aux)], EVENT)
