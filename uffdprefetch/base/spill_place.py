# SPDX-License-Identifier: Apache-2.0
"""Where the pool's disk tier may be (`--spill`), and how large: what is asked of a directory before
anything is written there. By doing: its file is made, written and read once."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import resource
import sys

from uffdprefetch.base import file_systems
from uffdprefetch.base.errors import usage_error
from uffdprefetch.base.file_systems import FileSystem, Medium
from uffdprefetch.base.units import format_size, format_size_exact, parse_size

#: So much of a file system stays free, and no less than a twentieth of it: what else writes there
#: has to have room, and ext4 keeps the same part for root.
FREE_BYTES = 1 << 30
FREE_PART = 20
#: What is written and read to try a file: a chunk of the pool.
TRIED_BYTES = 64 << 10
#: So much is written and read before a file is relied on: a disk of 100 MB/s is busy with it for a
#: second.
TRIAL_BYTES = 64 << 20
OVERLAY = "overlayfs"


def parse(text: str) -> tuple[str, int | None]:
    """DIR or DIR:SIZE. None: as the disk has room. Raises UffdPrefetchError (exit 2)."""
    directory, colon, size = text.rpartition(":")
    if not colon or "/" in size:
        return text, None
    if not directory:
        raise usage_error(f"{text!r} names no directory")
    return directory, parse_size(size)


def written(directory: str, size_bytes: int | None) -> str:
    """The inverse of parse()."""
    return directory if size_bytes is None else f"{directory}:{format_size_exact(size_bytes)}"


def why_not(directory: str) -> str | None:
    """Why nothing may be put there; None: it may."""
    try:
        kind = file_systems.at(directory)
        if kind.name == OVERLAY:
            kind = _below(directory, kind)
        stat = os.statvfs(directory)
    except OSError as error:
        return f"{error.strerror}"
    if kind.medium is not Medium.LOCAL:
        return f"{_what(kind)}: name a directory on a disk of this node"
    free = stat.f_bavail * stat.f_frsize
    if not allowed_bytes(free, stat.f_blocks * stat.f_frsize, 0):
        return f"only {format_size(free)} are free there"
    return None


def _what(kind: FileSystem) -> str:
    return {
        Medium.MEMORY: f"{kind.name} is memory, as the pool itself",
        Medium.NETWORK: f"{kind.name} is no disk of this node",
    }.get(kind.medium, f"{kind.name} may be no disk of this node")


def _below(directory: str, overlay: FileSystem) -> FileSystem:
    """The file system that an overlay writes to; itself where that is not to be seen. Raises
    OSError."""
    device = os.stat(directory).st_dev
    want = f" {os.major(device)}:{os.minor(device)} "
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        for line in file:
            upper = re.search(r"[ ,]upperdir=([^, \n]+)", line)
            if want in line and upper is not None:
                with contextlib.suppress(OSError):  # from within a container it is not to be seen
                    return file_systems.at(upper[1].replace("\\040", " "))
    return overlay


def open_file(directory: str) -> int:
    """A file without a name there, past the page cache; nothing of it is left when whoever holds it
    has ended. Raises OSError."""
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        fd = os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
        name = os.path.join(directory, f".uffdprefetch-{os.urandom(8).hex()}")
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(name)
    try:
        _try(fd)
    except OSError:
        os.close(fd)
        raise
    return fd


def _try(fd: int) -> None:
    """Raises OSError where the file cannot be written and read past the page cache."""
    with mmap.mmap(-1, TRIED_BYTES) as page:
        page.write(b"\x5a" * TRIED_BYTES)
        os.pwritev(fd, [page], 0)
        page[:] = bytes(TRIED_BYTES)
        os.preadv(fd, [page], 0)
        if page[:] != b"\x5a" * TRIED_BYTES:
            raise OSError(errno.EIO, "it does not bring what was written")
    os.ftruncate(fd, 0)


def allowed_bytes(free_bytes: int, total_bytes: int, used_bytes: int) -> int:
    """How large a file may be that has ``used_bytes`` of a disk's blocks, for all others to have
    room. ``free_bytes``: for whom it is."""
    return max(0, used_bytes + free_bytes - max(FREE_BYTES, total_bytes // FREE_PART))


def limit_bytes() -> int:
    """No file of this process may be larger: a write beyond it is an error, and a signal."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def default_bytes(free_bytes: int, allowed: int) -> int:
    """Without a SIZE: half of what is free."""
    return min(free_bytes // 2, allowed)


def room_of(fd: int) -> tuple[int, int, int]:
    """(free, in all, taken by this file) of the disk of an open file, bytes. Raises OSError."""
    stat = os.fstatvfs(fd)
    used = os.fstat(fd).st_blocks * 512
    return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize, used
