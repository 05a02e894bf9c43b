# SPDX-License-Identifier: Apache-2.0
"""Reads one file whole, so that what is read is what the file was at one moment."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from uffdprefetch.data.layout import VALUE_BYTES_MAX, Entry
from uffdprefetch.pack.found import Found
from uffdprefetch.pack.in_order import Admit

#: How often a file is read that changes while it is.
TIMES = 2
#: Of one read(2): Linux gives no more at a time than 2 GiB less a page.
_READ_BYTES = 1 << 30


@dataclass(frozen=True)
class Packable:
    """What came of a file: its ``entry`` and its ``value`` as it is to be stored. ``why``: of one
    that is left out; neither: it is stored as it is already."""

    found: Found
    entry: Entry | None = None
    value: bytes = b""
    why: str = ""

    @property
    def held_bytes(self) -> int:
        return len(self.value)


class ChangedError(Exception):
    """A file was not the same before and after it was read."""


class WholeFileReader:
    """Reads files that are found. ``stored``: path -> entry of those that need not be read again;
    ``encode``: from a file's bytes to its value."""

    def __init__(
        self, stored: Mapping[bytes, Entry], encode: Callable[[bytes], bytes] | None
    ) -> None:
        self._stored, self._encode = stored, encode

    def read(self, found: Found, admit: Admit) -> Packable:
        """In any thread."""
        try:
            if found.data is not None:
                data, mtime_ns = found.data, found.mtime_ns
                if self._has(found, len(data), mtime_ns):
                    return Packable(found)
            else:
                if found.path in self._stored and self._has(found, *_asked(found.file)):
                    return Packable(found)
                data, mtime_ns = read_whole(found.file, admit)
        except OSError as error:
            return Packable(found, why=f"it cannot be read: {error.strerror}")
        except MemoryError:
            return Packable(found, why="there is no memory for its bytes")
        except ChangedError:
            return Packable(found, why=f"it changed while it was read, {TIMES} times")
        digest = hashlib.sha256(data).digest()
        entry = Entry(found.path, len(data), mtime_ns, found.source, digest)
        value = data if self._encode is None else self._encode(data)
        if len(value) > VALUE_BYTES_MAX:
            return Packable(found, why="it has 4 GiB or more, too much for a value of LMDB")
        return Packable(found, entry, value)

    def _has(self, found: Found, size_bytes: int, mtime_ns: int) -> bool:
        entry = self._stored.get(found.path)
        return entry is not None and (
            # of another source: it is no change of that file, but a second one of its name
            entry.source != found.source
            or (entry.size_bytes, entry.mtime_ns) == (size_bytes, mtime_ns)
        )


def _asked(file: bytes) -> tuple[int, int]:
    """Size and time of modification."""
    status = os.stat(file, follow_symlinks=False)
    return status.st_size, status.st_mtime_ns


def read_whole(file: bytes, admit: Admit) -> tuple[bytes, int]:
    """The bytes of a regular file, and its time of modification. ``admit`` is called with the bytes
    before they are read.

    Raises OSError, ChangedError.
    """
    for _ in range(TIMES):
        # O_NONBLOCK: what was a file when it was listed may be a pipe by now
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                raise ChangedError
            if before.st_size > VALUE_BYTES_MAX:
                raise OSError(errno.EFBIG, "4 GiB or more, too much for a value of LMDB")
            admit(before.st_size)
            data = _all_of(fd, before.st_size)
            if len(data) == before.st_size and _state(os.fstat(fd)) == _state(before):
                return data, before.st_mtime_ns
        finally:
            os.close(fd)
    raise ChangedError


def _all_of(fd: int, size_bytes: int) -> bytes:
    """To its end, and one byte more than was said if there is one."""
    pieces: list[bytes] = []
    at = 0
    while at <= size_bytes:
        piece = os.pread(fd, min(size_bytes + 1 - at, _READ_BYTES), at)
        if not piece:
            break
        pieces.append(piece)
        at += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
