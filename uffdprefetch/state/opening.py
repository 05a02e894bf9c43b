# SPDX-License-Identifier: Apache-2.0
"""Opens files on storage that may hang.

A job passes the description that it maps. The service needs its own (a seek or FADV on the job's
would affect the job), and open(2) may wait minutes for a metadata server: so each open has a
thread to itself, which nothing waits for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from uffdprefetch.base import file_systems
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.state import quick_disks

T = TypeVar("T")

#: Concurrent opens; beyond it mappings are refused.
OPENS_MAX = 64
#: Threads that stay for the next open: a thread's start takes longer than most opens, and of a job
#: that maps a thousand files a second some are under way at a time.
KEPT_THREADS = 8
#: O_NONBLOCK: another's write lease would block us for fs.lease-break-time.
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


#: Inode generation (FS_IOC_GETVERSION, include/uapi/linux/fs.h, _IOR('v', 1, long)).
FS_IOC_GETVERSION = 0x80087601


def generation(fd: int) -> int | None:
    """The inode's generation, which differs when its number is reused; None where unsupported. May
    wait for a FUSE daemon."""
    own = -1
    try:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH:
            fd = own = os.open(f"/proc/self/fd/{fd}", FLAGS)
        answer = fcntl.ioctl(fd, FS_IOC_GETVERSION, bytes(8))
    except OSError:
        return None
    finally:
        uffd.close_file(own)
    return int.from_bytes(answer[:4], sys.byteorder)


class Opened(NamedTuple):
    """The service's own descriptions of a file (for extents, for single pages, for forked children
    to map, -1 where nothing of ours may lie over it), and its status. ``was``: what a description
    that is opened later must be of; None where the inode tells. ``on_quick_disk``: asked for a pool
    alone (state/quick_disks.py)."""

    fd: int
    page_fd: int
    map_fd: int
    status: os.stat_result
    generation: int | None
    f_type: int
    was: uffd.FileStatus | None = None
    on_quick_disk: bool = False

    def closed(self) -> Opened:
        """The same when the descriptions have been closed."""
        return self._replace(fd=-1, page_fd=-1, map_fd=-1)

    def close(self) -> None:
        """Close the descriptions, soon."""
        for fd in (self.fd, self.page_fd, self.map_fd):
            uffd.close_file(fd)


#: Of mounts, by their numbers: their file systems' types, which their servers or daemons are asked
#: once for all files.
_types: dict[int, int] = {}


def _type_of(fd: int) -> int:
    """f_type of the file system of a descriptor. Raises OSError."""
    mount = uffd.mount_of(fd)
    found = _types.get(mount)
    if found is None:
        found = file_systems.type_of(fd)
        if len(_types) >= ENTRIES_MAX:
            _types.clear()
        if mount:
            _types[mount] = found
    return found


def reopen(fd: int, for_children: bool = True, for_pool: bool = False) -> Opened:
    """Open the file behind ``fd``; ``for_children``: with what forked ones are to map;
    ``for_pool``: which may serve it. Raises OSError, ESTALE where another file has taken its place;
    may block on storage."""
    path = f"/proc/self/fd/{fd}"
    before = uffd.file_status(fd)
    with contextlib.ExitStack() as undo:
        fds = []
        for _ in range(2 + for_children):
            fds.append(os.open(path, FLAGS))
            undo.callback(uffd.close_file, fds[-1])
        one, page_fd, map_fd = (*fds, -1)[:3]
        was, f_type = None, _type_of(one)
        if file_systems.known(f_type).pages_by_path:
            # Asked last: a later rename leaves these descriptions what they are.
            was = uffd.file_status(fds[-1], asked=True)
            if was != before:
                raise OSError(errno.ESTALE, "changed or replaced since it was mapped")
        status = os.fstat(one)
        is_quick = for_pool and quick_disks.is_on_one(one, status)
        undo.pop_all()
    return Opened(one, page_fd, map_fd, status, generation(one), f_type, was, is_quick)


class Opener:
    """Opens files, and does else what may wait for storage, asynchronously."""

    def __init__(self, wake_fd: int, *, for_children: bool = True, for_pool: bool = False) -> None:
        """``wake_fd``: an eventfd that is incremented when something has ended; -1: who made this
        calls step() without. The others: see reopen()."""
        self._wake_fd, self._ways = wake_fd, (for_children, for_pool)
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._under_way = 0
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._kept = 0  # threads that nothing has been given to

    def open(
        self, what: int | str | Callable[[], int | str], then: Callable[[Opened | OSError], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Open the file of a descriptor, which is closed afterwards, or of a path, or of what
        a function finds of these, which may block and raise OSError; step() calls ``then`` with the
        result; an OSError of a descriptor has its file's name (ECANCELED: it is not wanted when its
        turn comes)."""
        if not self.run(lambda: _open(what, is_wanted, *self._ways), then):
            if isinstance(what, int):
                uffd.close_file(what)
            then(OSError(errno.EAGAIN, f"{OPENS_MAX} other files do not open"))

    def run(self, work: Callable[[], T], then: Callable[[T | OSError], None]) -> bool:
        """Have ``work`` done by a thread that does nothing else meanwhile; step() calls ``then``
        with its result, or with the OSError that it raises. False: too much is under way, and
        nothing is done."""
        if self._under_way >= OPENS_MAX:
            return False
        self._under_way += 1
        with self._lock:
            is_kept = self._kept > 0
            self._kept -= is_kept
        self._work.put(partial(self._do, work, then))
        if not is_kept:
            threading.Thread(target=self._serve, daemon=True).start()
        return True

    def _serve(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                if self._kept >= KEPT_THREADS:
                    return
                self._kept += 1

    def _do(self, work: Callable[[], T], then: Callable[[T | OSError], None]) -> None:
        result: T | OSError
        try:
            result = work()
        except OSError as error:
            result = error
        self._done.put(partial(then, result))
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def step(self) -> None:
        """Call ``then`` of what has ended."""
        while not self._done.empty():
            then = self._done.get()
            self._under_way -= 1
            then()


def _open(
    what: int | str | Callable[[], int | str],
    is_wanted: Callable[[], bool] = lambda: True,
    for_children: bool = True,
    for_pool: bool = False,
) -> Opened:
    """See Opener.open()."""
    fd = -1
    try:
        if callable(what):
            what = what()
        fd = what if isinstance(what, int) else os.open(what, FLAGS)
        if not is_wanted():
            raise OSError(errno.ECANCELED, "not wanted any more")
        return reopen(fd, for_children, for_pool)
    except OSError as error:
        if fd >= 0 and error.errno != errno.ECANCELED:
            with contextlib.suppress(OSError):
                error.filename = os.readlink(f"/proc/self/fd/{fd}")
        raise
    except ValueError as error:  # no name of a file: a NUL, a lone surrogate
        raise OSError(errno.EINVAL, str(error)) from None
    finally:
        uffd.close_file(fd)
