# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a packed database into a directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from uffdprefetch.base.errors import EXIT_CANNOT, UffdPrefetchError, usage_error
from uffdprefetch.base.limits import words_of
from uffdprefetch.data.layout import DamagedError, Entry, shown
from uffdprefetch.pack.in_order import Admit, in_order
from uffdprefetch.pack.stored import Stored
from uffdprefetch.pack.verifying import Compared, Unmatched

#: Errors after which no other file can be written either.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def unpack(path: str, directory: str, say: Callable[[str], None]) -> tuple[int, int, int]:
    """How many files were written, how many not, each of which ``say`` is told of, and how many of
    these are damaged. A value that is not what was packed is not written.

    Raises UffdPrefetchError: 1 when it cannot be written, 2 when the database cannot be read, or is
    damaged, or ``directory`` has something in it.
    """
    written = wrong = damaged = 0
    with Stored(path) as stored:
        if not stored.description.complete:
            say(f"{path}: packing has not come to its end: what is in it is unpacked")
        try:
            os.makedirs(directory, exist_ok=True)
            if os.listdir(directory):
                raise usage_error(f"{directory}: there is something in it: name another directory")
        except OSError as error:
            raise _cannot(directory, error) from None
        root = os.fsencode(directory)

        def write(given: Unmatched, admit: Admit) -> Compared:
            admit(given.entry.size_bytes)
            return _written(stored, given.entry, root)

        for each in in_order(_entries(stored), write):
            if each.why:
                say(f"not written: {shown(each.path)}: {each.why}")
                wrong += 1
                damaged += each.damaged
            else:
                written += 1
    return written, wrong, damaged


def _entries(stored: Stored) -> Iterator[Unmatched]:
    return (Unmatched(entry) for entry in stored.in_order())


def _written(stored: Stored, entry: Entry, root: bytes) -> Compared:
    if any(part in (b"", b".", b"..") for part in entry.path.split(b"/")) or b"\0" in entry.path:
        return Compared(entry.path, "its path leads out of the directory")
    file = os.path.join(root, entry.path)
    try:
        value = stored.value(entry)
        os.makedirs(os.path.dirname(file), exist_ok=True)
        _write_whole(file, value)
        os.utime(file, ns=(entry.mtime_ns, entry.mtime_ns))
    except DamagedError as error:
        return Compared(entry.path, f"damaged in the database: {error.message}", damaged=True)
    except OSError as error:
        if error.errno in _FULL:
            raise _cannot(os.fsdecode(root), error) from None
        return Compared(entry.path, f"it cannot be written: {words_of(error)}")
    return Compared(entry.path, "")


def _write_whole(file: bytes, value: bytes) -> None:
    """Where it cannot be written to its end nothing of it is left."""
    with open(file, "xb", buffering=0) as out:
        left = memoryview(value)
        try:
            while left:
                left = left[out.write(left) :]
        except OSError:
            os.unlink(file)
            raise


def _cannot(directory: str, error: OSError) -> UffdPrefetchError:
    return UffdPrefetchError(f"cannot write {directory}: {error.strerror}", EXIT_CANNOT)
