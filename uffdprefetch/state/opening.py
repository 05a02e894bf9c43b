# SPDX-License-Identifier: Apache-2.0
"""Opening files on storage that may not answer.

A job hands over the description that it maps. The service needs some of its own (a seek or an
FADV on the job's would change the job), and open(2) asks a far metadata server, which may be away
for minutes: so each open has a thread of its own, and nobody waits for it.
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
from typing import NamedTuple

from uffdprefetch.state import file_systems

#: Opens that hang at the same time; more than these are refused, and their mappings not served.
OPENS_MAX = 64
#: O_NONBLOCK: somebody's write lease would hold us for fs.lease-break-time.
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


#: The number of an inode's life (FS_IOC_GETVERSION, include/uapi/linux/fs.h, _IOR('v', 1, long)).
FS_IOC_GETVERSION = 0x80087601


def generation(fd: int) -> int | None:
    """Tells a file from an earlier one with the same inode number; None where nobody says. A FUSE
    daemon may be asked, and be waited for."""
    try:
        answer = fcntl.ioctl(fd, FS_IOC_GETVERSION, bytes(8))
    except OSError:
        return None
    return int.from_bytes(answer[:4], sys.byteorder)


class Opened(NamedTuple):
    """Descriptions of one file that only the service uses (to warm extents, to read single pages,
    for forked children to map), and what its storage has told of it."""

    fd: int
    page_fd: int
    map_fd: int
    status: os.stat_result
    generation: int | None
    f_type: int

    def close(self) -> None:
        """Close the descriptions."""
        for fd in (self.fd, self.page_fd, self.map_fd):
            os.close(fd)


def reopen(fd: int) -> Opened:
    """Descriptions of the file behind ``fd``. Raises OSError; may wait as long as the storage
    does."""
    path = f"/proc/self/fd/{fd}"
    with contextlib.ExitStack() as undo:
        fds = []
        for _ in range(3):
            fds.append(os.open(path, FLAGS))
            undo.callback(os.close, fds[-1])
        one, page_fd, map_fd = fds
        status, f_type = os.fstat(one), file_systems.type_of(one)
        undo.pop_all()
    return Opened(one, page_fd, map_fd, status, generation(one), f_type)


class Opener:
    """Opens without making anybody wait."""

    def __init__(self, wake_fd: int) -> None:
        """``wake_fd``: an eventfd that is added to when an open has ended."""
        self._wake_fd = wake_fd
        self._done: queue.SimpleQueue[tuple[Callable[[Opened | OSError], None], Opened | OSError]]
        self._done = queue.SimpleQueue()
        self._under_way = 0

    def open(self, what: int | str, then: Callable[[Opened | OSError], None]) -> None:
        """Open anew what a descriptor is, which is closed when that has ended, or what lies at a
        path; step() calls ``then`` with the result."""
        if self._under_way >= OPENS_MAX:
            if isinstance(what, int):
                os.close(what)
            then(OSError(errno.EAGAIN, f"{OPENS_MAX} other files do not open"))
            return
        self._under_way += 1
        threading.Thread(target=self._open, args=(what, then), daemon=True).start()

    def _open(self, what: int | str, then: Callable[[Opened | OSError], None]) -> None:
        result: Opened | OSError
        fd = -1
        try:
            fd = what if isinstance(what, int) else os.open(what, FLAGS)
            result = reopen(fd)
        except OSError as error:
            result = error
        finally:
            if fd >= 0:
                os.close(fd)
        self._done.put((then, result))
        os.eventfd_write(self._wake_fd, 1)

    def step(self) -> None:
        """Hand on what has been opened."""
        while not self._done.empty():
            then, result = self._done.get()
            self._under_way -= 1
            then(result)
