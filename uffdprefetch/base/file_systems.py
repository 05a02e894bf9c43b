# SPDX-License-Identifier: Apache-2.0
"""What is known of each type of file system: one table, of which everybody asks.

The type is f_type of statfs(2). What is known of one was measured or follows from its kernel
module; what is not known is found out on the file itself, by whoever asks.
"""

from __future__ import annotations

import ctypes
import os
import struct
from enum import Enum
from typing import NamedTuple

#: The calls, numbered as in csrc/service/helper.h (enum up_warm_method).
PROBE, READAHEAD, PREAD = 0, 1, 2

LUSTRE, TMPFS = 0x0BD00BD0, 0x01021994
#: A Lustre RPC, and its usual stripe; preads of 8 MiB and more bypass the cache there.
LUSTRE_RPC_BYTES = 4 << 20


class Medium(Enum):
    """Where the files are. ``LOCAL``: no other machine can write them, so that a lease here binds
    all writers. ``NETWORK``: every node sees the same files. ``UNKNOWN``: either may stand behind
    it."""

    UNKNOWN = "unknown"
    MEMORY = "memory"
    LOCAL = "local"
    NETWORK = "network"


class FileSystem(NamedTuple):
    """A row of the table.

    ``call`` fills its page cache: READAHEAD, where it uses the kernel's generic readahead; PROBE,
    where it has a cache of its own or was not tried. ``unit_bytes``: its storage's request size,
    where a request costs more than its bytes (0: no rounding). ``counts_reads``: whether its reads
    are counted in the reading thread's read_bytes of /proc/PID/io; None: not tried.
    ``pages_by_path``: whether one inode may be two files, one after the other: its daemon names
    files by path, so that a description that is opened after a rename(2) over it brings the new
    file's bytes where the old one is mapped. ``asks_server``: whether each look at a directory is
    the server's answer. ``opens_held``: whether who opens, looks at, reads and closes a file that
    another process has read and holds open asks the server next to nothing, and of a file that is
    removed meanwhile no name stays behind (as on NFS and FUSE): what is read ahead stays open until
    its job has opened it. ``mounts``: its types in mountinfo, if they are not its name.
    ``settings``: by what its client's own readahead is told; its read_ahead_kb is never written.
    """

    name: str
    medium: Medium = Medium.UNKNOWN
    call: int = PROBE
    unit_bytes: int = 0
    counts_reads: bool | None = None
    pages_by_path: bool = False
    asks_server: bool = False
    opens_held: bool = False
    mounts: tuple[str, ...] = ()
    settings: str = ""

    @property
    def in_memory(self) -> bool:
        """Whether there is nothing to prefetch."""
        return self.medium is Medium.MEMORY

    @property
    def one_machine(self) -> bool:
        """Whether no other machine can write its files."""
        return self.medium in (Medium.MEMORY, Medium.LOCAL)

    @property
    def is_coherent(self) -> bool:
        """Whether a look at a directory tells what all machines have done there by then."""
        return self.one_machine or self.asks_server


_NETWORK, _LOCAL, _MEMORY = Medium.NETWORK, Medium.LOCAL, Medium.MEMORY

#: By f_type: include/uapi/linux/magic.h and the file systems' own headers. What a column is for
#: says FileSystem. Not NETWORK: 9p and overlayfs, which may stand before a local one. GPFS asks its
#: token manager. kAFS is the kernel's own module (fs/afs), mounted by the same word as others' AFS.
FILE_SYSTEMS = {
    LUSTRE: FileSystem(
        "Lustre", _NETWORK, PREAD, LUSTRE_RPC_BYTES, counts_reads=True, asks_server=True,
        opens_held=True, settings="lctl get_param llite.*.max_read_ahead*",
    ),
    0x6969: FileSystem("NFS", _NETWORK, READAHEAD, mounts=("nfs", "nfs4")),
    0x00C36400: FileSystem("Ceph", _NETWORK, READAHEAD),
    0xFF534D42: FileSystem("CIFS", _NETWORK, READAHEAD),
    0xFE534D42: FileSystem("SMB2", _NETWORK, READAHEAD, mounts=("smb3",)),
    0x47504653: FileSystem("GPFS", _NETWORK, asks_server=True),
    0x19830326: FileSystem("BeeGFS", _NETWORK),
    0x5346414F: FileSystem("AFS", _NETWORK),
    0x6B414653: FileSystem("kAFS", _NETWORK, READAHEAD, mounts=("afs",)),
    0x20030528: FileSystem("OrangeFS", _NETWORK, mounts=("pvfs2",)),
    0xAAD7AAEA: FileSystem("PanFS", _NETWORK),
    0x7461636F: FileSystem("OCFS2", _NETWORK),
    0x01161970: FileSystem("GFS2", _NETWORK),
    0x65735546: FileSystem(
        "FUSE", call=READAHEAD, counts_reads=False, pages_by_path=True, mounts=("fuse", "fuseblk"),
    ),
    0x01021997: FileSystem("9p"),
    0x794C7630: FileSystem("overlayfs", mounts=("overlay",)),
    0xEF53: FileSystem(
        "ext2/3/4", _LOCAL, READAHEAD, counts_reads=True, mounts=("ext2", "ext3", "ext4"),
    ),
    0x58465342: FileSystem("XFS", _LOCAL, READAHEAD, counts_reads=True),
    0x9123683E: FileSystem("btrfs", _LOCAL, READAHEAD),
    0xF2F52010: FileSystem("F2FS", _LOCAL, READAHEAD),
    0x73717368: FileSystem("squashfs", _LOCAL, READAHEAD),
    0xE0F5E1E2: FileSystem("EROFS", _LOCAL, READAHEAD),
    0x2FC12FC1: FileSystem("ZFS", _LOCAL),
    0xCA451A4E: FileSystem("bcachefs", _LOCAL),
    0x3153464A: FileSystem("JFS", _LOCAL),
    0x52654973: FileSystem("ReiserFS", _LOCAL),
    0x3434: FileSystem("NILFS2", _LOCAL),
    0x9660: FileSystem("ISO 9660", _LOCAL, mounts=("iso9660",)),
    0x15013346: FileSystem("UDF", _LOCAL),
    0x4D44: FileSystem("FAT", _LOCAL, mounts=("msdos", "vfat")),
    0x2011BAB0: FileSystem("exFAT", _LOCAL),
    0x7366746E: FileSystem("NTFS", _LOCAL, mounts=("ntfs3",)),
    TMPFS: FileSystem("tmpfs", _MEMORY, mounts=("tmpfs", "devtmpfs")),
    0x858458F6: FileSystem("ramfs", _MEMORY),
    0x958458F6: FileSystem("hugetlbfs", _MEMORY),
    0x9FA0: FileSystem("proc", _MEMORY),
    0x62656572: FileSystem("sysfs", _MEMORY),
}  # fmt: skip


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
    """The row of a type."""
    return FILE_SYSTEMS.get(f_type, FileSystem(f"unknown (0x{f_type:08X})"))


def at(path_or_fd: str | int) -> FileSystem:
    """The row of the file system of a file or directory. Raises OSError."""
    return known(type_of(path_or_fd))


def mounted(kind: str) -> FileSystem:
    """The row of a type by its word in /proc/self/mountinfo ("fuse.sshfs"), without asking the file
    system itself: the first of those that share it."""
    plain = kind.partition(".")[0]
    for one in FILE_SYSTEMS.values():
        if plain in (one.mounts or (one.name.lower(),)):
            return one
    return FileSystem(kind)
