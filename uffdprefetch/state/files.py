# SPDX-License-Identifier: Apache-2.0
"""State of a record file: the service's descriptors, and its parts, each of which has an owner.

Bounded by construction: one byte of flags per 64 KiB of file (16 MiB per TiB), one page of memory
per checkpoint ever laid.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native import uffd
from uffdprefetch.predict.used import Blocks
from uffdprefetch.state.account import FileAccount
from uffdprefetch.state.cached import AllCached
from uffdprefetch.state.copies import Copies
from uffdprefetch.state.file_call import FileCall
from uffdprefetch.state.guard import Guard
from uffdprefetch.state.mappings import Mappings
from uffdprefetch.state.opening import Opened

if TYPE_CHECKING:
    from uffdprefetch.state.pool_file import PoolFile

Key = tuple[int, int, int, int]


@dataclass
class PageCache:
    """What the service has brought, or is bringing, of a file into the page cache, and whether all
    of it is there. Ranges in bytes."""

    all: AllCached
    in_flight: IntervalSet = field(default_factory=IntervalSet)
    recent: IntervalSet = field(default_factory=IntervalSet)  # made resident within a second

    def fresh(self, start: int, end: int) -> bool:
        """Whether any byte of [start, end) is neither in flight nor recently made resident."""
        return any(self.recent.missing(a, b) for a, b in self.in_flight.missing(start, end))

    def forget_recent(self) -> None:
        """The kernel may have taken it back."""
        self.recent = IntervalSet()


@dataclass
class FileState:
    """A file under management. ``key`` = (device, inode, size, mtime_ns)."""

    key: Key
    path: str
    opened: Opened  # page_fd has FADV_RANDOM
    size_bytes: int
    call: FileCall
    guard: Guard = field(default_factory=Guard)
    mappings: Mappings = field(default_factory=Mappings)
    account: FileAccount = field(default_factory=FileAccount)
    pooled: PoolFile | None = None  # its part of the node's pool
    copies: Copies = field(init=False)
    cache: PageCache = field(init=False)
    blocks: Blocks = field(init=False)

    def __post_init__(self) -> None:
        self.copies = Copies(self.size_bytes)
        self.cache = PageCache(AllCached(self.resident_bytes, self.size_bytes))
        self.blocks = Blocks(self.size_bytes)

    @classmethod
    def open(cls, opened: Opened, path: str, takes_lease: bool = True) -> FileState:
        """Take over ``opened``, unless this raises: OSError, or MemoryError when the file is too
        large for the block flags. ``takes_lease``: see Guard."""
        st = opened.status
        os.posix_fadvise(opened.page_fd, 0, 0, os.POSIX_FADV_RANDOM)
        return cls(
            key=(st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns),
            path=path,
            opened=opened,
            size_bytes=st.st_size,
            call=FileCall.of(opened),
            guard=Guard.of(opened, takes_lease),
        )

    def in_use(self) -> bool:
        """Whether somebody else has copies of ours open or mapped."""
        return self.copies.in_use()

    @property
    def under_way(self) -> tuple[IntervalSet, ...]:
        """What of it is being read, to the page cache and to the pool."""
        cached = self.cache.in_flight
        return (cached,) if self.pooled is None else (cached, self.pooled.in_flight)

    def resident_bytes(self, start: int, length: int) -> int | None:
        """Bytes of [start, +length) in the page cache; None where the kernel does not say."""
        return uffd.resident_bytes(self.opened.fd, start, length)[0]

    def has(self, at: int) -> bool:
        """Whether the page at a file offset is cached; by our flags where the kernel does not
        say."""
        residency = self.resident_bytes(at, uffd.PAGE_BYTES)
        return self.blocks.was_here(at) if residency is None else residency > 0

    def deleted(self) -> bool:
        """Whether the file is unlinked."""
        return uffd.is_deleted(self.opened.fd)

    def park(self) -> None:
        """Close our descriptors of the file, and the lease; flags and checkpoint pages are kept for
        unpark()."""
        self.guard.park(self.opened.fd)
        self.opened.close()
        self.opened = self.opened.closed()

    def unpark(self, opened: Opened) -> bool:
        """Reopen with descriptions of the same file, of the same size and mtime. Returns whether it
        is unwritten since park(), by ctime, which a writer cannot set back; else the checkpoint
        pages are made anew."""
        self.opened = opened
        self.mappings.wanted()
        os.posix_fadvise(opened.page_fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.call.use_again(opened.fd)
        same = self.guard.go_on(opened.fd)
        if not same:
            self.copies.close()
        return same

    def close(self) -> None:
        """Close our descriptors. Mappings of the checkpoint memfd live on."""
        self.guard.close(self.opened.fd)
        self.opened.close()
        self.opened = self.opened.closed()
        self.copies.close()
