# SPDX-License-Identifier: Apache-2.0
"""cffi binding of csrc/service/helper.h: rings, checkpoint memfds, warm workers, residency, page
tables.

The C functions return >= 0 or -errno, which :func:`_checked` turns into OSError.
"""

from __future__ import annotations

import operator
import os
import struct
import threading
from typing import Any, NamedTuple

from uffdprefetch import _uffd  # type: ignore[attr-defined]
from uffdprefetch.native.crews import Crews
from uffdprefetch.native.layout import layout

_ffi: Any = _uffd.ffi
_lib: Any = _uffd.lib

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
EVENT = layout("up_event")
EVENTS_AT_ONCE = 2048
RESULTS_AT_ONCE = 256
RUNS_AT_ONCE = 512

WARM_PROBE: int = _lib.UP_WARM_PROBE
WARM_READAHEAD: int = _lib.UP_WARM_READAHEAD
WARM_PREAD: int = _lib.UP_WARM_PREAD


def _checked(ret: int, what: str) -> int:
    if ret < 0:
        raise OSError(-ret, f"{what}: {os.strerror(-ret)}")
    return ret


class Event(NamedTuple):
    """One touch of an armed checkpoint (csrc/common/wire.h, struct up_event)."""

    time_ns: int
    page: int
    region: int
    tid: int
    handle_ns: int
    flags: int


class RingCounts(NamedTuple):
    """The agent's counters; written by the job, hence untrusted."""

    head: int
    tail: int
    dropped: int
    faults: int
    laid: int
    rearmed: int
    failed: int
    overlays: int
    state: int


class Ring:
    """The event ring of one process, written by the agent.

    ``fd``: the sealed memfd to pass to the agent; close it once sent.
    """

    _out = _ffi.new("char[]", EVENTS_AT_ONCE * EVENT.size)

    def __init__(self) -> None:
        pointer, fd = _ffi.new("struct up_ring **"), _ffi.new("int *")
        _checked(_lib.up_ring_create(pointer, fd), "event ring")
        self.pointer = pointer[0]
        self.fd: int = fd[0]

    def drain(self) -> list[Event]:
        """Take the pending events, oldest first."""
        n = _lib.up_ring_drain(self.pointer, Ring._out, EVENTS_AT_ONCE)
        if not n:
            return []
        data = _ffi.buffer(Ring._out, n * EVENT.size)
        return [Event(*fields) for fields in EVENT.iter_unpack(data)]

    def counts(self) -> RingCounts:
        """The agent's present counters."""
        c = _ffi.new("struct up_ring_counts *")
        _lib.up_ring_counts(self.pointer, c)
        return RingCounts(*(int(getattr(c, name)) for name in RingCounts._fields))

    def close(self) -> None:
        """Unmap the ring; the agent's mapping of it stays valid."""
        if self.pointer:
            _lib.up_ring_destroy(self.pointer)
            self.pointer = _ffi.NULL


class BpfRing:
    """A BPF ring buffer with records of one size, read in batches instead of by callbacks."""

    def __init__(self, fd: int, size_bytes: int, record_bytes: int, most: int = 1 << 16) -> None:
        """``fd``: of the map; ``most``: records taken at once. Raises OSError."""
        pointer = _ffi.new("struct up_bpf_ring **")
        _checked(_lib.up_bpf_ring_open(pointer, fd, size_bytes), "BPF ring")
        self._pointer = pointer[0]
        self._record_bytes = record_bytes
        self._most = most
        self._out = _ffi.new("char[]", record_bytes * most)

    def drain(self) -> bytes:
        """The pending records, concatenated, oldest first."""
        n = _lib.up_bpf_ring_drain(self._pointer, self._out, self._record_bytes, self._most)
        return bytes(_ffi.buffer(self._out, n * self._record_bytes))

    def close(self) -> None:
        """Unmap it; the BPF map is its creator's."""
        _lib.up_bpf_ring_close(self._pointer)
        self._pointer = _ffi.NULL


def checkpoint_memfd(size_bytes: int) -> tuple[int, int]:
    """A sparse memfd of size_bytes: (read-write descriptor, read-only descriptor for the jobs).

    Raises OSError (EFBIG, ENOMEM, EMFILE).
    """
    rw, ro = _ffi.new("int *"), _ffi.new("int *")
    _checked(_lib.up_checkpoint_memfd(size_bytes, rw, ro), "checkpoint memfd")
    return int(rw[0]), int(ro[0])


def settle_malloc() -> None:
    """Have malloc(3) keep little of what this process frees, and nothing for each of its threads.
    Before the first of them."""
    _lib.up_settle_malloc()


def close_file(fd: int) -> None:
    """Close a descriptor of a file. Where its server may be told, in a thread, and for 5 ms at most
    somebody waits."""
    _lib.up_close_file(fd)


def is_uffd(fd: int) -> bool:
    """Whether a received descriptor is a userfaultfd; reading another might block."""
    return os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[userfaultfd]"


class FileStatus(NamedTuple):
    """Of statx(2): what a file is (csrc/common/status.h)."""

    links: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


def file_status(fd: int, *, asked: bool = False) -> FileStatus:
    """fstat(2) that does not wait for a server; or, ``asked``, that does, and is not older than the
    call. Raises OSError."""
    status = _ffi.new("struct up_file_status *")
    _checked(_lib.up_file_status(fd, asked, status), "statx")
    return FileStatus(*(int(getattr(status, name)) for name in FileStatus._fields))


def is_deleted(fd: int) -> bool:
    """Whether a file has no name any more, as far as the kernel knows without asking storage. (NFS
    clients and FUSE rename an open one instead.)"""
    return int(_lib.up_file_deleted(fd)) > 0


def mount_of(fd: int) -> int:
    """The number of the mount that a description is of, which no other one ever has; 0: the kernel
    does not tell (before 6.8)."""
    return int(_lib.up_mount_of(fd))


def resident_bytes(fd: int, offset: int, length: int) -> tuple[int | None, str]:
    """(bytes of [offset, +length) in the page cache, the call that reported it).

    (None, reason) where unknown: cachestat(2) and mincore(2) answer only owners of the file and
    those who may write it (mm/mincore.c, can_do_mincore).
    """
    sensor = _ffi.new("int *")
    n = _lib.up_resident_bytes(fd, offset, length, sensor)
    if n < 0:
        return None, os.strerror(-n)
    return int(n), "cachestat" if sensor[0] == _lib.UP_CACHESTAT else "mincore"


_RUN = struct.Struct("=QQ")


class _RunRoom(threading.local):
    """Of each thread its own, as calls of C run side by side: that which records a start looks,
    too."""

    def __init__(self) -> None:
        self.runs = _ffi.new("uint64_t[]", 2 * RUNS_AT_ONCE)
        self.next = _ffi.new("uint64_t *")


_room = _RunRoom()


def touched_runs(pagemap_fd: int, address: int, length: int) -> tuple[list[tuple[int, int]], int]:
    """Runs (address, bytes) of present page-table entries in [address, +length), in order.

    At most 512; the second value is the address where the scan stopped. Raises OSError
    (ESRCH when the address space is gone).
    """
    runs, more = _room.runs, _room.next
    n = _checked(
        _lib.up_touched_runs(pagemap_fd, address, length, runs, RUNS_AT_ONCE, more), "page table"
    )
    return list(_RUN.iter_unpack(_ffi.buffer(runs, n * _RUN.size))), int(more[0])


class PageTable:
    """A process's page table, as /proc/PID/pagemap shows it."""

    def __init__(self, pid: int) -> None:
        self._fd, self.error = -1, ""
        try:
            self._fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.error = error.strerror or str(error)

    @property
    def is_readable(self) -> bool:
        """Whether it is; else ``error`` says why not."""
        return self._fd >= 0

    def runs(self, address: int, length: int) -> list[tuple[int, int]]:
        """Runs of pages present in it in [address, +length), as (address, bytes), in order; at most
        one call's (512 runs), none where it cannot be read."""
        if self._fd < 0:
            return []
        try:
            return touched_runs(self._fd, address, length)[0]
        except OSError:
            return []

    def close(self) -> None:
        """Look no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class WarmResult(NamedTuple):
    """A worker's result of one job (csrc/service/helper.h, struct up_warm_result)."""

    id: int
    submit_ns: int
    start_ns: int
    done_ns: int
    resident_bytes: int
    bytes: int
    copied: int
    method: int
    chunk_bytes: int
    error: int
    sensor: int = 0
    asked_bytes: int = 0
    came_bytes: int = 0
    storage_bytes: int = -1
    waited_bytes: int = 0
    idle_start_ns: int = 0
    idle_done_ns: int = 0

    @property
    def took_ns(self) -> int:
        """Without the time in which it waited for room in a pool and nothing was being read."""
        return self.done_ns - self.start_ns - (self.idle_done_ns - self.idle_start_ns)


_RESULT = layout("up_warm_result")
_RESULT_FIELDS = operator.itemgetter(
    *map(
        [name for name, _ in _ffi.typeof("struct up_warm_result").fields].index, WarmResult._fields
    )
)


def warm_results(out: Any, count: int) -> list[WarmResult]:
    """The first of an array of struct up_warm_result."""
    rows = _RESULT.iter_unpack(_ffi.buffer(out, count * _RESULT.size))
    return [WarmResult._make(_RESULT_FIELDS(row)) for row in rows]


class Workers:
    """C threads that read extents into the page cache. ``event_fd`` counts finished jobs.

    Each device that is being read from has ``threads`` of its own, and what is queued for it waits
    for nothing but them: one whose server does not answer holds up nobody who reads elsewhere.
    """

    def __init__(self, threads: int, event_fd: int) -> None:
        """Raises OSError when there can be no threads."""

        def make() -> Any:
            pointer = _ffi.new("struct up_workers **")
            _checked(_lib.up_workers_create(pointer, threads, event_fd), "warm workers")
            return pointer[0]

        self._crews = Crews(make)
        self._crews.begin()
        self._job = _ffi.new("struct up_warm_job *")
        self._out = _ffi.new("struct up_warm_result[]", RESULTS_AT_ONCE)

    def submit(
        self,
        job_id: int,
        fd: int,
        offset: int,
        length: int,
        *,
        method: int,
        chunk_bytes: int,
        device: int = 0,
        window_bytes: int = 0,
        checkpoint_fd: int = -1,
        pages: list[int] | None = None,
    ) -> bool:
        """Queue one extent (bytes) of a file on ``device`` and up to 16 checkpoint pages to copy,
        for start(). Of a readahead(2) of it no more than ``window_bytes`` are under way at one time
        (0: all). False: the device's queue is full, or too many others are being read from."""
        job = self._job
        job.id, job.fd, job.offset, job.length = job_id, fd, offset, length
        job.method, job.chunk_bytes, job.checkpoint_fd = method, chunk_bytes, checkpoint_fd
        job.window_bytes = window_bytes
        pages = pages or []
        job.pages = len(pages)
        for i, page in enumerate(pages):
            job.page[i] = page
        return self._crews.submit(device, lambda crew: int(_lib.up_workers_submit(crew, job)))

    def start(self) -> None:
        """Begin with what is queued; short extents that were queued together are read together."""
        for crew in self._crews.busy:
            _lib.up_workers_start(crew)

    def reap(self) -> list[WarmResult]:
        """Jobs finished since the last call."""
        found: list[WarmResult] = []

        def take(crew: Any) -> int:
            n = int(_lib.up_workers_reap(crew, self._out, RESULTS_AT_ONCE))
            found.extend(warm_results(self._out, n))
            return n

        self._crews.reap(take)
        return found

    def cpu_seconds(self) -> float:
        """CPU time of the workers, including the reads' copies."""
        return sum(_lib.up_workers_cpu_ns(crew) for crew in self._crews.all) / 1e9

    def close(self) -> None:
        """Wait for reads in flight and end the threads."""
        for crew in self._crews.dissolve():
            _lib.up_workers_destroy(crew)
