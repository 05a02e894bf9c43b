# SPDX-License-Identifier: Apache-2.0
"""Whether two nodes have the same file open, from what each can see of it alone.

A path tells nothing: each node may have a file of its own there. So a file is shared only where its
file system has the same bytes for every node (a network file system that is known, or one that the
user names), and where size, times, inode and bytes from some places agree. FUSE file systems make
up inodes and ctimes on each node: there more bytes are compared instead.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b

from uffdprefetch.base import file_systems
from uffdprefetch.base.file_systems import Medium

ID_BYTES = 16
PROBES, PROBES_FUSE = 3, 16
PROBE_BYTES = 4096
#: LL_IOC_DATA_VERSION of lustre_user.h: _IOWR('f', 218, struct ioc_data_version {u64 version; u32
#: layout version; u32 flags}); no flags, so that no client has to flush.
_DATA_VERSION = 0xC01066DA
_DATA_VERSION_SIZE = struct.Struct("<QII")


Fields = dict[str, int | str]


class NotSharedError(Exception):
    """The file stays this node's own; the message says why, for people."""


def is_named(path: str, shared_globs: Sequence[str]) -> bool:
    """Whether the user has said that all nodes see the same file there."""
    return any(fnmatchcase(path, glob) for glob in shared_globs)


def fields(fd: int, path: str, f_type: int, shared_globs: Sequence[str] = ()) -> Fields:
    """Properties, by name, that are equal on all nodes that see the same file. ``path``: as the job
    has it open. It reads a few pages and asks the servers, so it may wait for storage. Raises
    NotSharedError, OSError."""
    kind = file_systems.known(f_type)
    on_network = kind.medium is Medium.NETWORK
    if not on_network and not is_named(path, shared_globs):
        why = f"{kind.name} is not a network file system"
        if kind.medium is Medium.UNKNOWN:
            why += f" as far as is known; --share {path} says that all nodes see the same file"
        raise NotSharedError(why)
    status = os.fstat(fd)
    found: Fields = {
        "path": path, "size": status.st_size, "mtime": status.st_mtime_ns,
    }  # fmt: skip
    if on_network:
        found |= {"ctime": status.st_ctime_ns, "inode": status.st_ino}
        if f_type == file_systems.LUSTRE and (version := data_version(fd)):
            found["data version"] = version
    found["bytes"] = probe(fd, status.st_size, PROBES if on_network else PROBES_FUSE)
    return found


def data_version(fd: int) -> int:
    """Lustre's count of writes to a file's objects; 0 where its servers have none."""
    try:
        answer = fcntl.ioctl(fd, _DATA_VERSION, bytes(_DATA_VERSION_SIZE.size))
    except OSError:
        return 0
    return int(_DATA_VERSION_SIZE.unpack(answer)[0])


def probe(fd: int, size_bytes: int, places: int) -> str:
    """A hash of pages that are spread evenly over a file, the first and the last among them. Raises
    OSError."""
    digest = blake2b(digest_size=ID_BYTES)
    last = max(0, size_bytes - PROBE_BYTES)
    for turn in range(places):
        at = last * turn // max(1, places - 1) // PROBE_BYTES * PROBE_BYTES
        digest.update(os.pread(fd, PROBE_BYTES, at if turn < places - 1 else last))
    return digest.hexdigest()


def identity(values: Fields) -> bytes:
    """ID_BYTES that two nodes have in common if all fields are equal, and by no chance else."""
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=ID_BYTES).digest()


def difference(own: Fields, other: Fields) -> str:
    """Which fields keep two nodes from sharing a file, for people; '': none."""
    names = [name for name in own.keys() | other.keys() if own.get(name) != other.get(name)]
    return ", ".join(sorted(names))
