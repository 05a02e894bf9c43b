# SPDX-License-Identifier: Apache-2.0
"""What one of a user's services on a node has to itself, by a number: a directory that it watches.

Each is a byte of a lock file in the runtime directory, held by an open file description lock
(fcntl(2), F_OFD_SETLK): one descriptor for all of them, and the kernel drops them with the service,
however that ends. Byte 0 is held by everybody: who gets it alone is the last, and removes the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from uffdprefetch.base.identity import file_name_safe

#: The highest number of a byte that can be locked alone: off_t's.
_BYTES = (1 << 63) - 1
_HELD = (errno.EAGAIN, errno.EACCES)


def _lock(fd: int, kind: int, start: int) -> bool:
    """Lock or free a byte; whether nobody else holds it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", kind, os.SEEK_SET, start, 1, 0))
    except OSError as error:
        if error.errno not in _HELD:
            raise
        return False
    return True


def place(device: int, inode: int) -> int:
    """The number of a file or directory on this node. Two that share one cannot both be claimed,
    which loses no more than the second."""
    return (device * 0x9E3779B97F4A7C15 + inode) % (_BYTES - 1)


def _path(directory: str, node: str | None) -> str:
    node = os.uname().nodename if node is None else node
    return os.path.join(directory, f"watched@{file_name_safe(node)}")


def _is_there(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _end(path: str, fd: int) -> None:
    """Close the lock file; the last one removes it."""
    try:
        if _lock(fd, fcntl.F_WRLCK, 0) and _is_there(path, fd):
            os.unlink(path)
    except OSError:
        pass  # the directory is gone, or not to be written
    os.close(fd)


def tidy(directory: str, node: str | None = None) -> None:
    """Remove the lock file of this node that nobody holds: of services that were killed."""
    path = _path(directory, node)
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    _end(path, fd)


class Claims:
    """The numbers that this process has claimed."""

    def __init__(self, directory: str, node: str | None = None) -> None:
        """``directory``: the runtime directory, which nodes may share. Raises OSError."""
        self._path = _path(directory, node)
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            try:
                # else its last holder is removing it, or has just removed it
                if _lock(self._fd, fcntl.F_RDLCK, 0) and _is_there(self._path, self._fd):
                    return
            except BaseException:
                os.close(self._fd)
                raise
            os.close(self._fd)

    def take(self, number: int) -> bool:
        """Claim a number (place()); whether nobody else has it. Raises OSError."""
        return _lock(self._fd, fcntl.F_WRLCK, number + 1)

    def give(self, number: int) -> None:
        """Others may have it again."""
        _lock(self._fd, fcntl.F_UNLCK, number + 1)

    def close(self) -> None:
        """Give all back; the last one removes the file."""
        _end(self._path, self._fd)
