# SPDX-License-Identifier: Apache-2.0
"""cffi binding of csrc/service/reads.c: the thread that looks, in /proc, which threads of a job
wait in a system call that reads."""

from __future__ import annotations

import os
import resource
from enum import IntEnum
from typing import Any, NamedTuple

from uffdprefetch.native import uffd
from uffdprefetch.native.layout import layout

_ffi: Any = uffd._ffi
_lib: Any = uffd._lib
_checked = uffd._checked

SIGHTINGS_AT_ONCE = 1024
#: Of the descriptors that this process may have, this part may be kept open, ...
DESCRIPTORS_PART = 4
#: ... and no more than this: two or three for each thread that reads. A text of one that is opened
#: anew costs three times as much.
DESCRIPTORS_MOST = 4096
_SIGHTING = layout("up_read_sighting")


def descriptors() -> int:
    """How many may be kept open, by the limit of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(soft // DESCRIPTORS_PART, DESCRIPTORS_MOST) if soft >= 0 else DESCRIPTORS_MOST


class ReadCall(IntEnum):
    """In which call a thread was seen; GOES_ON: in none, how far it has come since."""

    GOES_ON = _lib.UP_READ_GOES_ON
    READ = _lib.UP_READ_READ
    PREAD = _lib.UP_READ_PREAD
    READV = _lib.UP_READ_READV
    PREADV = _lib.UP_READ_PREADV
    SENDFILE = _lib.UP_READ_SENDFILE
    COPY = _lib.UP_READ_COPY


class ReadSensor(IntEnum):
    """By what a process is seen."""

    UNSEEN = _lib.UP_READ_UNSEEN
    SYSCALL = _lib.UP_READ_BY_SYSCALL
    FDINFO = _lib.UP_READ_BY_FDINFO
    REFUSED = _lib.UP_READ_REFUSED
    ENDED = _lib.UP_READ_ENDED


class Sighting(NamedTuple):
    """A thread that waits in a call which reads, or how far one has come that did
    (csrc/service/helper.h, struct up_read_sighting)."""

    at_ns: int
    offset: int
    asked_bytes: int
    rchar: int
    inode: int
    pid: int
    tid: int
    fd: int
    mount: int
    flags: int
    call: int
    state: int


class LookedAt(NamedTuple):
    """A process, as of the last look (csrc/service/helper.h, struct up_read_process)."""

    looks: int
    waiting_ns: int
    running_ns: int
    rchar: int
    threads: int
    sensor: int
    error: int
    left_out: int


class LookCounts(NamedTuple):
    """Of the thread that looks (csrc/service/helper.h, struct up_reads_counts)."""

    looks: int
    sightings: int
    lost: int
    cpu_ns: int
    period_ns: int
    processes: int
    threads: int
    descriptors: int


class OpenFile(NamedTuple):
    """The file behind a descriptor of a process (csrc/service/helper.h, struct up_read_file)."""

    device: int
    inode: int
    size_bytes: int
    mode: int


def open_file(pid: int, fd: int) -> OpenFile:
    """What a process has open there, as far as the kernel knows it without asking storage; the file
    itself is not opened. Raises OSError."""
    out = _ffi.new("struct up_read_file *")
    ret = _lib.up_read_file(pid, fd, out)
    if ret < 0:
        raise OSError(-ret, os.strerror(-ret), f"/proc/{pid}/fd/{fd}")
    return OpenFile(*(int(getattr(out, name)) for name in OpenFile._fields))


class Reads:
    """The thread. It opens nothing but files of /proc."""

    def __init__(self, event_fd: int, descriptors: int) -> None:
        """``event_fd`` is incremented after a look that has found something; ``descriptors``: how
        many may be kept open. Raises OSError."""
        pointer = _ffi.new("struct up_reads **")
        _checked(_lib.up_reads_create(pointer, event_fd, descriptors), "who reads")
        self._pointer = pointer[0]
        self._out = _ffi.new("struct up_read_sighting[]", SIGHTINGS_AT_ONCE)

    def add(self, pid: int) -> None:
        """Look at this process, too. Raises OSError: ESRCH, EEXIST, or ENOSPC, where there are too
        many."""
        _checked(_lib.up_reads_add(self._pointer, pid), f"process {pid}")

    def remove(self, pid: int) -> None:
        """No longer; what was seen of it before may still come. Raises OSError (ESRCH)."""
        _checked(_lib.up_reads_remove(self._pointer, pid), f"process {pid}")

    def drain(self) -> list[Sighting]:
        """What was seen since the last call, oldest first."""
        found: list[Sighting] = []
        n = SIGHTINGS_AT_ONCE
        while n == SIGHTINGS_AT_ONCE:
            n = _lib.up_reads_drain(self._pointer, self._out, SIGHTINGS_AT_ONCE)
            data = _ffi.buffer(self._out, n * _SIGHTING.size)
            found += [Sighting(*fields) for fields in _SIGHTING.iter_unpack(data)]
        return found

    def process(self, pid: int) -> LookedAt:
        """As of the last look. Raises OSError (ESRCH)."""
        out = _ffi.new("struct up_read_process *")
        _checked(_lib.up_reads_process(self._pointer, pid, out), f"process {pid}")
        return LookedAt(*(int(getattr(out, name)) for name in LookedAt._fields))

    def counts(self) -> LookCounts:
        """Since it began."""
        out = _ffi.new("struct up_reads_counts *")
        _lib.up_reads_counts(self._pointer, out)
        return LookCounts(*(int(getattr(out, name)) for name in LookCounts._fields))

    def close(self) -> None:
        """End the thread."""
        _lib.up_reads_destroy(self._pointer)
        self._pointer = _ffi.NULL
