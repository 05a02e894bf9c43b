# SPDX-License-Identifier: Apache-2.0
"""Chooses the call that fills a file's page cache: by file system type, else by a probe.

The type is f_type of statfs(2). What is known of a type was measured or follows from its kernel
module; other types are probed on the file itself (csrc/service/warm.c, probe), and every choice is
verified in use (Doubt): bytes requested against bytes that arrived.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

#: The calls, numbered as in csrc/service/helper.h (enum up_warm_method).
PROBE, READAHEAD, PREAD = 0, 1, 2

LUSTRE = 0x0BD00BD0
KIB, MIB = 1 << 10, 1 << 20
#: A Lustre RPC, and its usual stripe; preads of 8 MiB and more bypass the cache there.
LUSTRE_RPC_BYTES = 4 * MIB
#: Largest request: the scheduler's extents are no longer.
CHUNK_MAX_BYTES = 4 * MIB
#: VM_READAHEAD_PAGES (include/linux/pagemap.h): what a readahead(2) always brings where it works.
CHUNK_LEAST_BYTES = 128 * KIB


class FileSystem(NamedTuple):
    """What is known of a type. ``unit_bytes``: its storage's request size, where a request costs
    more than its bytes (0: no rounding). ``counts_reads``: whether its reads are counted in the
    reading thread's read_bytes of /proc/PID/io. ``pages_by_path``: whether one inode may be two
    files, one after the other: its daemon names files by path, so that a description that is opened
    after a rename(2) over it brings the new file's bytes where the old one is mapped."""

    name: str
    call: int = PROBE
    unit_bytes: int = 0
    counts_reads: bool = False
    in_memory: bool = False
    pages_by_path: bool = False


#: include/uapi/linux/magic.h and the file systems' own headers. READAHEAD: those that use the
#: kernel's generic readahead. PROBE: those with a cache of their own (GPFS, ZFS, BeeGFS), and those
#: that were not tried.
FILE_SYSTEMS = {
    LUSTRE: FileSystem("Lustre", PREAD, LUSTRE_RPC_BYTES, counts_reads=True),
    0xEF53: FileSystem("ext2/3/4", READAHEAD, counts_reads=True),
    0x58465342: FileSystem("XFS", READAHEAD, counts_reads=True),
    0x9123683E: FileSystem("btrfs", READAHEAD),
    0xF2F52010: FileSystem("F2FS", READAHEAD),
    0x65735546: FileSystem("FUSE", READAHEAD, pages_by_path=True),
    0x6969: FileSystem("NFS", READAHEAD),
    0x00C36400: FileSystem("Ceph", READAHEAD),
    0xFF534D42: FileSystem("CIFS", READAHEAD),
    0xFE534D42: FileSystem("SMB2", READAHEAD),
    0x73717368: FileSystem("squashfs", READAHEAD),
    0xE0F5E1E2: FileSystem("EROFS", READAHEAD),
    0x794C7630: FileSystem("overlayfs"),
    0x47504653: FileSystem("GPFS"),
    0x19830326: FileSystem("BeeGFS"),
    0x2FC12FC1: FileSystem("ZFS"),
    0x01021997: FileSystem("9p"),
    0x5346414F: FileSystem("AFS"),
    0x01021994: FileSystem("tmpfs", in_memory=True),
    0x858458F6: FileSystem("ramfs", in_memory=True),
    0x958458F6: FileSystem("hugetlbfs", in_memory=True),
}
CALLS = {READAHEAD: "readahead(2)", PREAD: "pread, FADV_RANDOM", PROBE: "not known yet"}


def type_of(path_or_fd: str | int) -> int:
    """f_type of statfs(2), the first word of the structure on 64-bit machines; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(256)
    if isinstance(path_or_fd, int):
        failed = libc.fstatfs(path_or_fd, buffer)
    else:
        failed = libc.statfs(os.fsencode(path_or_fd), buffer)
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(struct.unpack_from("<q", buffer)[0]) & 0xFFFFFFFF


def known(f_type: int) -> FileSystem:
    """What is known of a type."""
    return FILE_SYSTEMS.get(f_type, FileSystem(f"unknown (0x{f_type:08X})"))


# ---- the kernel's readahead ---------------------------------------------------------------------


def mount_of(device: int, mountinfo: str) -> tuple[str, str]:
    """(file system type, mount point) of a device number in the text of /proc/self/mountinfo."""
    return _mount(device, mountinfo)[:2]


def type_at(path: str, mountinfo: str) -> str:
    """The type of the file system that a path lies in, by the path's words: nothing is asked of the
    file system, which may not answer any more."""
    longest, found = -1, "unknown"
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4]).rstrip("/")
        if len(point) >= longest and (path == point or path.startswith(f"{point}/")):
            longest, found = len(point), after[0]
    return found


def _mount(device: int, mountinfo: str) -> tuple[str, str, str]:
    """The same, and the mount source. A device with several mounts has one type: the last is
    taken."""
    want = f"{os.major(device)}:{os.minor(device)}"
    found = ("unknown", "", "")
    for line in mountinfo.splitlines():
        if f" {want} " not in line:
            continue
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) > 4 and fields[2] == want:
            found = (after[0], fields[4], after[1] if len(after) > 1 else "")
    return found


def read_ahead_files(device: int, mountinfo: str, sys: Path = Path("/sys")) -> list[Path]:
    """The read_ahead_kb files that may be a device's.

    Most are named by its number, of a partition by its disk's; Lustre's by the file system and a
    client's address, which only root can match to a mount: all of the file system's.
    """
    bdi = sys / "class" / "bdi"
    number = f"{os.major(device)}:{os.minor(device)}"
    own = bdi / number / "read_ahead_kb"
    kind, _, source = _mount(device, mountinfo)
    if kind != "lustre":
        disk = sys / "dev" / "block" / number
        if not own.exists() and (disk / "partition").exists():
            own = bdi / (disk.resolve().parent / "dev").read_text().strip() / "read_ahead_kb"
        return [own]
    names = {source.rpartition(":/")[2].partition("/")[0] or "lustre", "lustre"}
    found = [p / "read_ahead_kb" for name in sorted(names) for p in sorted(bdi.glob(f"{name}-*"))]
    return found or [own]


def read_ahead_bytes(device: int, mountinfo: str | None = None) -> int | None:
    """The device's read_ahead_kb in bytes, None where there is none. Never written: that panics a
    node with a Lustre client. ``mountinfo``: the text of /proc/self/mountinfo, by who has just read
    it."""
    try:
        if mountinfo is None:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        files = read_ahead_files(device, mountinfo)
        return max(int(file.read_bytes()) * 1024 for file in files)
    except (OSError, ValueError):
        return None


# ---- the choice ---------------------------------------------------------------------------------


class Choice(NamedTuple):
    """A call, its request size, and the reason."""

    call: int
    chunk_bytes: int
    reason: str


def _with(call: int, chunk_bytes: int, why: str) -> Choice:
    return Choice(call, chunk_bytes, f"{CALLS[call]} of {chunk_bytes >> 10} KiB, {why}")


def choose(f_type: int, ahead_bytes: int | None, residency_known: bool) -> Choice:
    """The call for a file: by its type; else by a probe; where residency cannot be queried, so that
    a probe shows nothing, by read_ahead_kb. ``ahead_bytes``: its value, None where unknown;
    ``residency_known``: whether the kernel answers us. FADV_SEQUENTIAL, which goes with
    readahead(2), doubles what one call brings."""
    kind = known(f_type)
    unknown = "" if residency_known else "; its residency is not told to us"
    of_it = f"known of {kind.name}{unknown}"
    chunk = min(CHUNK_MAX_BYTES, max(CHUNK_LEAST_BYTES, 2 * (ahead_bytes or 0)))
    if kind.call == PREAD:
        return _with(PREAD, kind.unit_bytes, of_it)
    if kind.call == READAHEAD and ahead_bytes == 0:
        return _with(PREAD, CHUNK_MAX_BYTES, f"{kind.name}, but its read_ahead_kb is 0")
    if kind.call == READAHEAD and ahead_bytes:
        return _with(READAHEAD, chunk, of_it)
    if residency_known:
        return Choice(PROBE, CHUNK_LEAST_BYTES, "not probed yet")
    if ahead_bytes:
        return _with(READAHEAD, chunk, "by read_ahead_kb: its residency is not told to us")
    return _with(PREAD, CHUNK_MAX_BYTES, "its residency is not told to us")


def probed(call: int, chunk_bytes: int, ahead_bytes: int | None) -> Choice:
    """The choice after a probe, which may underestimate: part of its range may have been
    resident."""
    if call == READAHEAD:
        least = max(CHUNK_LEAST_BYTES, 2 * (ahead_bytes or 0))
        chunk_bytes = min(CHUNK_MAX_BYTES, max(chunk_bytes, least))
    return _with(call, chunk_bytes, "by probing")


# ---- verified in use ----------------------------------------------------------------------------

#: A choice is judged over this many requested bytes ...
DOUBT_BYTES = 32 * MIB
#: ... and wrong when less than this share arrived. Losing some is normal: FUSE drops readahead
#: under load (fs/fuse/file.c), and reclaim takes pages when memory is short.
DOUBT_SHARE = 0.25


@dataclass
class Doubt:
    """Bytes requested and arrived over the last DOUBT_BYTES of a file."""

    _last: deque[tuple[int, int]] = field(default_factory=deque)
    _asked: int = 0
    _arrived: int = 0

    def note(self, asked_bytes: int, arrived_bytes: int) -> tuple[int, int] | None:
        """Note an extent; (asked, arrived) when the call has failed by DOUBT_SHARE, after which it
        starts over, else None."""
        if not asked_bytes:
            return None
        self._last.append((asked_bytes, min(arrived_bytes, asked_bytes)))
        self._asked += asked_bytes
        self._arrived += self._last[-1][1]
        if self._asked < DOUBT_BYTES:
            return None
        if self._arrived < DOUBT_SHARE * self._asked:
            found = self._asked, self._arrived
            self.forget()
            return found
        while self._last and self._asked - self._last[0][0] >= DOUBT_BYTES:
            asked, arrived = self._last.popleft()
            self._asked -= asked
            self._arrived -= arrived
        return None

    def forget(self) -> None:
        """Start over: another call is used."""
        self._last.clear()
        self._asked = self._arrived = 0


def corrected(call: int, asked_bytes: int, arrived_bytes: int) -> Choice | None:
    """The choice after a call that failed: pread for readahead(2). None after pread: the cache does
    not keep what is read."""
    if call != READAHEAD:
        return None
    detail = f"readahead(2) brought {arrived_bytes >> 20} of {asked_bytes >> 20} MiB"
    return _with(PREAD, CHUNK_MAX_BYTES, f"since {detail}")


def cells(start: int, end: int, unit_bytes: int, size_bytes: int) -> tuple[int, int]:
    """[start, end) extended to whole requests of storage, within the file."""
    if not unit_bytes:
        return start, end
    return start // unit_bytes * unit_bytes, min(size_bytes, -(-end // unit_bytes) * unit_bytes)
