# SPDX-License-Identifier: Apache-2.0
"""State of a record file: the service's descriptors, and its parts, each of which has an owner.

Bounded by construction: one byte of flags per 64 KiB of file (16 MiB per TiB), one page of memory
per checkpoint ever laid.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import uffd
from uffdprefetch.predict import gain
from uffdprefetch.state.cached import AllCached
from uffdprefetch.state.copies import Copies
from uffdprefetch.state.file_call import FileCall
from uffdprefetch.state.guard import Guard
from uffdprefetch.state.opening import Opened

if TYPE_CHECKING:
    from uffdprefetch.native.pool import FileCounts
    from uffdprefetch.state.pool_file import PoolFile

#: Resolution of *used*: fault-around maps the cached pages of an aligned 64 KiB.
BLOCK_BYTES = gain.BLOCK_BYTES
_PREFETCHED, _USED = 1, 2
_SET = {bit: bytes(i | bit for i in range(256)) for bit in (_PREFETCHED, _USED)}
_ANY_USED = re.compile(rb"[\x02\x03]")  # _USED, be it _PREFETCHED or not
_IS_NEW = bytes(not i & _USED for i in range(256))
Key = tuple[int, int, int, int]


@dataclass
class FileState:
    """A file under management. ``key`` = (device, inode, size, mtime_ns)."""

    key: Key
    path: str
    fd: int  # the service's own description: extents
    page_fd: int  # another, FADV_RANDOM: single checkpoint pages
    map_fd: int  # another: for forked children to map
    size_bytes: int
    call: FileCall
    guard: Guard = field(default_factory=Guard)
    in_flight: IntervalSet = field(default_factory=IntervalSet)
    recent: IntervalSet = field(default_factory=IntervalSet)  # made resident within a second
    blocks: bytearray = field(default_factory=bytearray)
    used: gain.Used = field(default_factory=gain.Used)  # for what was gained
    prefetched_bytes: int = 0
    already_resident_bytes: int = 0
    late_bytes: int = 0
    opened_again: bool = False  # since the last look
    generation: int | None = None
    f_type: int = 0  # of its file system, as statfs(2) has it; 0: not known
    was: uffd.FileStatus | None = None  # see Opened
    attached: int = 0  # regions
    copied: bool = False  # it was mapped private and writable
    says_random: bool = False  # a job has said so (MADV_RANDOM), last
    idle_ns: int = 0  # since when it is unmapped
    last_pid: int = 0  # the process that mapped it last
    tensor_starts: IntervalSet | None = None  # readers/tensor_starts.py; None: not asked for
    streamed: bool = False  # some of it was read for no walk (readers/file_stream.py)
    resting: bool = False  # unmapped: not read, about to be closed (admission.py)
    pooled: PoolFile | None = None  # its part of the node's pool
    pool_counts: FileCounts | None = None
    copies: Copies = field(init=False)
    all_cached: AllCached = field(init=False)

    def __post_init__(self) -> None:
        self.copies = Copies(self.size_bytes)
        self.all_cached = AllCached(self.resident_bytes, self.size_bytes)

    @classmethod
    def open(cls, opened: Opened, path: str) -> FileState:
        """Take over ``opened``, unless this raises: OSError, or MemoryError when the file is too
        large for the block flags."""
        st = opened.status
        os.posix_fadvise(opened.page_fd, 0, 0, os.POSIX_FADV_RANDOM)
        return cls(
            key=(st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns),
            path=path,
            fd=opened.fd,
            page_fd=opened.page_fd,
            map_fd=opened.map_fd,
            size_bytes=st.st_size,
            call=FileCall.of(opened),
            guard=Guard.of(opened),
            blocks=bytearray(-(-st.st_size // BLOCK_BYTES)),
            generation=opened.generation,
            f_type=opened.f_type,
            was=opened.was,
        )

    def in_use(self) -> bool:
        """Whether somebody else has copies of ours open or mapped."""
        return self.copies.in_use()

    def fresh(self, start: int, end: int) -> bool:
        """Whether any byte of [start, end) is neither in flight nor recently made resident."""
        return any(self.recent.missing(a, b) for a, b in self.in_flight.missing(start, end))

    def was_here(self, at: int) -> bool:
        """Whether the block at a file offset has been prefetched, or observed in use."""
        return at < self.size_bytes and bool(self.blocks[at // BLOCK_BYTES])

    def resident_bytes(self, start: int, length: int) -> int | None:
        """Bytes of [start, +length) in the page cache; None where the kernel does not say."""
        return uffd.resident_bytes(self.fd, start, length)[0]

    def has(self, at: int) -> bool:
        """Whether the page at a file offset is cached; by our flags where the kernel does not
        say."""
        residency = self.resident_bytes(at, uffd.PAGE_BYTES)
        return bool(self.blocks[at // BLOCK_BYTES]) if residency is None else residency > 0

    def _mark(self, start: int, end: int, bit: int) -> None:
        a, b = start // BLOCK_BYTES, -(-min(end, self.size_bytes) // BLOCK_BYTES)
        if a < b:
            self.blocks[a:b] = self.blocks[a:b].translate(_SET[bit])

    @property
    def cold(self) -> bool:
        """Whether nothing of it was read ahead yet."""
        return not (self.prefetched_bytes or self.already_resident_bytes)

    def mark_prefetched(self, start: int, end: int) -> None:
        """We have read [start, end) bytes from storage."""
        self._mark(start, end, _PREFETCHED)

    def mark_used(self, start: int, end: int) -> None:
        """[start, end) bytes are in some reader's page table."""
        self._mark(start, end, _USED)

    def tell_used(self, start: int, end: int) -> None:
        """To the books for what was gained, before they are marked: somebody has come to
        [start, end) bytes."""
        first, last = start // BLOCK_BYTES, -(-min(end, self.size_bytes) // BLOCK_BYTES)
        part = self.blocks[first:last]
        if not (part.count(0) or part.count(_PREFETCHED)):
            return
        new, count = part.translate(_IS_NEW), len(self.blocks)
        at = new.find(1)
        while at >= 0:
            over = new.find(0, at)
            a, b = first + at, first + (len(new) if over < 0 else over)
            ahead = self.blocks.count(_PREFETCHED, a, b)
            if not ahead and self._under_way(a * BLOCK_BYTES, b * BLOCK_BYTES):
                ahead = b - a  # it comes late
            before = a > 0 and bool(self.blocks[a - 1] & _USED)
            behind = b < count and bool(self.blocks[b] & _USED)
            self.used.came(b - a, ahead, before, behind)
            at = new.find(1, b - first)

    def _under_way(self, start: int, end: int) -> bool:
        pooled = self.pooled is not None and self.pooled.in_flight.overlaps(start, end)
        return pooled or self.in_flight.overlaps(start, end)

    def block_counts(self, first: int = 0, last: int | None = None) -> tuple[int, int, int]:
        """(prefetched and used, prefetched only, used only), in bytes at 64 KiB; of all blocks, or
        of the blocks first to last - 1."""
        bits = (_PREFETCHED | _USED, _PREFETCHED, _USED)
        counts = [self.blocks.count(bit, first, last) * BLOCK_BYTES for bit in bits]
        beyond = -self.size_bytes % BLOCK_BYTES  # of the last block, of which the file has a part
        blocks = len(self.blocks)
        if beyond and first < blocks <= (blocks if last is None else last):
            for i, bit in enumerate(bits):
                counts[i] -= beyond * (self.blocks[-1] == bit)
        return counts[0], counts[1], counts[2]

    def pieces_used(self, piece_bytes: int) -> tuple[int, int]:
        """Pieces of the file, of so many bytes each, in which something was used: those in which
        all of that had been read ahead, and the others. No more are counted than there are runs."""
        blocks, ahead, own = max(1, piece_bytes // BLOCK_BYTES), 0, 0
        used = _ANY_USED.search(self.blocks)
        while used and (ahead < self.used.runs or own < self.used.demand_runs):
            first = used.start() // blocks * blocks
            if self.blocks.count(_USED, first, first + blocks):
                own += 1
            else:
                ahead += 1
            used = _ANY_USED.search(self.blocks, first + blocks)
        return ahead, own

    def unused_bytes(self, first: int, last: int) -> int:
        """Bytes of the blocks first to last - 1 that are prefetched and not used yet."""
        return self.blocks.count(_PREFETCHED, first, last) * BLOCK_BYTES

    def deleted(self) -> bool:
        """Whether the file is unlinked. (NFS clients and FUSE rename an open one instead.)"""
        try:
            if uffd.file_status(self.fd).links == 0:
                return True
            name = os.path.basename(os.readlink(f"/proc/self/fd/{self.fd}"))
        except OSError:
            return False
        return name.startswith((".nfs", ".fuse_hidden"))

    def park(self) -> None:
        """Close our descriptors of the file, and the lease; flags and checkpoint pages are kept for
        unpark()."""
        self.guard.park(self.fd)
        for fd in (self.fd, self.page_fd, self.map_fd):
            uffd.close_file(fd)
        self.fd = self.page_fd = self.map_fd = -1

    def unpark(self, opened: Opened) -> bool:
        """Reopen with descriptions of the same file, of the same size and mtime. Returns whether it
        is unwritten since park(), by ctime, which a writer cannot set back; else the checkpoint
        pages are made anew."""
        self.fd, self.page_fd, self.map_fd = opened.fd, opened.page_fd, opened.map_fd
        self.was = opened.was
        self.resting, self.idle_ns = False, 0
        os.posix_fadvise(self.page_fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.call.use_again(self.fd)
        same = self.guard.go_on(self.fd)
        if not same:
            self.copies.close()
        return same

    def close(self) -> None:
        """Close our descriptors. Mappings of the checkpoint memfd live on."""
        self.guard.close(self.fd)
        for fd in (self.fd, self.page_fd, self.map_fd):
            uffd.close_file(fd)
        self.copies.close()
        self.fd = self.page_fd = self.map_fd = -1
