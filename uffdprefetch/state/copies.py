# SPDX-License-Identifier: Apache-2.0
"""Checkpoint pages of a file: copies of ours in a memfd, which jobs have mapped in its place.

One page of memory for each that was ever laid: none is freed as long as the memfd lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native import uffd

#: Name of the memfds in /proc/PID/maps.
MEMFD_NAME = "memfd:uffdprefetch-checkpoints"


def mapped_by(inode: int) -> int | None:
    """A process, among those we may inspect, that maps the checkpoint memfd of this inode."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/maps", errors="replace") as maps:
            for line in maps:
                if MEMFD_NAME in line and line.split()[4] == str(inode):
                    return int(name)
    return None


@dataclass
class Copies:
    """Of one file; pages by their numbers. Without a memfd until fds() is asked for."""

    size_bytes: int
    rw: int = -1
    ro: int = -1
    written: set[int] = field(default_factory=set)  # in the memfd
    pending: set[int] = field(default_factory=set)  # ... that a worker is to copy

    def fds(self) -> tuple[int, int]:
        """(read-write, read-only) descriptors of the memfd; made on first use. Raises OSError."""
        if self.rw < 0:
            self.rw, self.ro = uffd.checkpoint_memfd(self.size_bytes)
        if self.ro < 0:  # in_use() has closed it
            self.ro = os.open(f"/proc/self/fd/{self.rw}", os.O_RDONLY | os.O_CLOEXEC)
        return self.rw, self.ro

    @property
    def pages(self) -> int:
        """Pages of memory in the memfd."""
        if self.rw < 0:
            return 0
        return os.fstat(self.rw).st_blocks * 512 // uffd.PAGE_BYTES

    def in_use(self) -> bool:
        """Whether any other process, known or not, has the memfd open or mapped.

        A write lease is granted only on a file that nobody else has open, and a mapping counts as
        open. (The memfd's first description, ours, does not: it was not made by open(2).)
        """
        if self.rw < 0:
            return False
        if self.ro >= 0:
            os.close(self.ro)
            self.ro = -1
        try:
            fd = os.open(f"/proc/self/fd/{self.rw}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            return True
        except OSError:  # no leases on memfds here
            return mapped_by(os.fstat(fd).st_ino) is not None
        finally:
            os.close(fd)
        return False

    def missing(self, pages: Iterable[int]) -> list[int]:
        """Those that are neither there nor about to be."""
        return [p for p in pages if p not in self.written and p not in self.pending]

    def ask(self, page: int) -> None:
        """A worker is to copy it."""
        self.pending.add(page)

    def drop(self, pages: Iterable[int]) -> None:
        """No worker is to copy these any more."""
        self.pending.difference_update(pages)

    def came(self, copied: Iterable[int]) -> None:
        """These are there now."""
        self.written.update(copied)

    def keep(self, laid: set[int]) -> None:
        """What is not among these is copied anew before it is laid."""
        self.written &= laid

    def close(self) -> None:
        """Close the memfd, whose mappings live on: what is asked for from now on is another's."""
        for fd in (self.rw, self.ro):
            if fd >= 0:
                os.close(fd)
        self.rw = self.ro = -1
        self.written.clear()
