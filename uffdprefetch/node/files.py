# SPDX-License-Identifier: Apache-2.0
"""One record file as the service holds it: descriptors of its own, checkpoint pages, block books.

Bounded by construction: one byte of books per 64 KiB of file (16 MiB per TiB), one page of memory
per checkpoint ever laid.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from uffdprefetch import uffd
from uffdprefetch.intervals import IntervalSet

if TYPE_CHECKING:
    from uffdprefetch.node.pool import PoolFile
    from uffdprefetch.uffd_pool import FileCounts

#: Resolution of *used*: the kernel's fault-around maps the cached pages of an aligned 64 KiB.
BLOCK_BYTES = 65536
_PREFETCHED, _USED = 1, 2
_SET = {bit: bytes(i | bit for i in range(256)) for bit in (_PREFETCHED, _USED)}
#: File systems that are memory themselves: nothing to warm (include/uapi/linux/magic.h).
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs", "proc", "sysfs"}
#: Given to readahead where neither a probe nor sysfs tells more.
CHUNK_BYTES = 128 << 10

Key = tuple[int, int, int, int]


def mount_of(device: int, mountinfo: str) -> tuple[str, str]:
    """(file system type, mount point) of a device number in the text of /proc/self/mountinfo.

    A bind mount lists its device twice; the last one is as good as any: the type is the same.
    """
    want = f"{os.major(device)}:{os.minor(device)}"
    found = ("unknown", "")
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) > 4 and fields[2] == want:
            found = (right.split()[0], fields[4])
    return found


def read_ahead_bytes(device: int) -> int | None:
    """The device's read_ahead_kb in bytes. Read only: writing a Lustre client's panics the node."""
    name = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
    try:
        return int(Path(name).read_text()) * 1024
    except (OSError, ValueError):
        return None


@dataclass
class FileState:
    """A file under management. ``key`` = (device, inode, size, mtime_ns)."""

    key: Key
    path: str
    fd: int  # the service's own description: extents
    page_fd: int  # another, FADV_RANDOM: single checkpoint pages
    map_fd: int  # another: what forked children map
    size_bytes: int
    file_system: str
    checkpoint_rw: int = -1
    checkpoint_ro: int = -1
    method: int = uffd.WARM_PROBE
    chunk_bytes: int = CHUNK_BYTES
    method_reason: str = "not probed yet"
    written: set[int] = field(default_factory=set)  # checkpoint pages that are in the memfd
    pending_pages: set[int] = field(default_factory=set)  # ... that a worker is to copy
    in_flight: IntervalSet = field(default_factory=IntervalSet)
    recent: IntervalSet = field(default_factory=IntervalSet)  # made resident within a second
    blocks: bytearray = field(default_factory=bytearray)
    prefetched_bytes: int = 0
    already_resident_bytes: int = 0
    late_bytes: int = 0
    leased: bool = False
    writer: bool = False  # somebody had it open for writing when we came: page tables only
    guard: str = ""  # how a change of the file would be noticed
    changed: str | None = None  # why nothing of this file is managed any more
    attached: int = 0  # regions
    pooled: PoolFile | None = None  # its part of the node's pool
    pool_counts: FileCounts | None = None

    @classmethod
    def open(cls, fd: int, path: str) -> FileState:
        """Take over ``fd`` (a description that only we use), unless this raises: OSError, or
        MemoryError when the file is too large for the block books."""
        st = os.fstat(fd)
        own = f"/proc/self/fd/{fd}"
        with contextlib.ExitStack() as undo:
            page_fd = os.open(own, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, page_fd)
            map_fd = os.open(own, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, map_fd)
            os.posix_fadvise(page_fd, 0, 0, os.POSIX_FADV_RANDOM)
            kind, _ = mount_of(st.st_dev, Path("/proc/self/mountinfo").read_text())
            state = cls(
                key=(st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns),
                path=path,
                fd=fd,
                page_fd=page_fd,
                map_fd=map_fd,
                size_bytes=st.st_size,
                file_system=kind,
                blocks=bytearray(-(-st.st_size // BLOCK_BYTES)),
            )
            state._choose_blindly()
            state._take_lease()
            undo.pop_all()
        return state

    def _choose_blindly(self) -> None:
        """Where the kernel does not tell us what is cached, a probe sees nothing: go by sysfs."""
        told, why = uffd.resident_bytes(self.fd, 0, uffd.PAGE_BYTES)
        if told is not None:
            return
        ahead = read_ahead_bytes(self.key[0])
        if ahead:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self.method, self.chunk_bytes = uffd.WARM_READAHEAD, 2 * ahead
        else:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
            self.method, self.chunk_bytes = uffd.WARM_PREAD, 4 << 20
        self.method_reason = f"residency of this file is not told to us ({why}); by read_ahead_kb"

    def _take_lease(self) -> None:
        """A read lease makes a new local writer wait until we have detached (fcntl(2)).

        Tried once: a page that was copied while a writer was there must never be laid, also when
        the writer has gone and the file looks the same.
        """
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BlockingIOError:
            self.writer = True
            self.guard = "size and mtime, once a second (no lease: a writer has it open)"
        except OSError as error:
            self.guard = f"size and mtime, once a second (no lease: {error.strerror})"
        else:
            self.leased, self.guard = True, "read lease"

    def lease_breaking(self) -> bool:
        """Whether somebody waits to write."""
        return self.leased and fcntl.fcntl(self.fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK

    def release_lease(self) -> None:
        """Let the writer in."""
        if self.leased:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            self.leased = False

    def look_for_change(self) -> str | None:
        """Compare size and mtime with those at attach time: what changed, or None."""
        try:
            st = os.fstat(self.fd)
        except OSError as error:
            return f"fstat: {error.strerror}"
        if st.st_size != self.size_bytes:
            return f"size {self.size_bytes} -> {st.st_size}"
        if st.st_mtime_ns != self.key[3]:
            return "modified"
        return None

    def checkpoint_fds(self) -> tuple[int, int]:
        """(read-write, read-only) descriptors of the checkpoint memfd; made on first use."""
        if self.checkpoint_rw < 0:
            self.checkpoint_rw, self.checkpoint_ro = uffd.checkpoint_memfd(self.size_bytes)
        return self.checkpoint_rw, self.checkpoint_ro

    def fresh(self, start: int, end: int) -> bool:
        """Whether any byte of [start, end) is neither under way nor just been made resident."""
        if self.pooled is not None:
            return self.pooled.absent(start, end)
        return any(self.recent.missing(a, b) for a, b in self.in_flight.missing(start, end))

    def _mark(self, start: int, end: int, bit: int) -> None:
        a, b = start // BLOCK_BYTES, -(-min(end, self.size_bytes) // BLOCK_BYTES)
        if a < b:
            self.blocks[a:b] = self.blocks[a:b].translate(_SET[bit])

    def mark_prefetched(self, start: int, end: int) -> None:
        """[start, end) bytes were read from storage by us."""
        self._mark(start, end, _PREFETCHED)

    def mark_used(self, start: int, end: int) -> None:
        """[start, end) bytes are in some reader's page table."""
        self._mark(start, end, _USED)

    def block_counts(self, first: int = 0, last: int | None = None) -> tuple[int, int, int]:
        """(prefetched and used, prefetched only, used only), in bytes at 64 KiB; of all blocks, or
        of the blocks first to last - 1."""
        bits = (_PREFETCHED | _USED, _PREFETCHED, _USED)
        used, unused, other = (self.blocks.count(bit, first, last) for bit in bits)
        return used * BLOCK_BYTES, unused * BLOCK_BYTES, other * BLOCK_BYTES

    def unused_bytes(self, first: int, last: int) -> int:
        """Of the blocks first to last - 1: prefetched, and in nobody's page table yet."""
        return self.blocks.count(_PREFETCHED, first, last) * BLOCK_BYTES

    def close(self) -> None:
        """Close our descriptors. Mappings of the checkpoint memfd live on."""
        for fd in (self.fd, self.page_fd, self.map_fd, self.checkpoint_rw, self.checkpoint_ro):
            if fd >= 0:
                os.close(fd)
        self.fd = self.page_fd = self.map_fd = self.checkpoint_rw = self.checkpoint_ro = -1
        self.leased = False
