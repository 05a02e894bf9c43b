# SPDX-License-Identifier: Apache-2.0
"""cffi binding of csrc/service/names.c: which names are opened in marked directories, by
fanotify(7) in its form without privileges, or by inotify(7)."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from uffdprefetch import _uffd  # type: ignore[attr-defined]
from uffdprefetch.native.layout import layout

_ffi: Any = _uffd.ffi
_lib: Any = _uffd.lib

FILE: int = _lib.UP_NAMES_FILE
DIRECTORY: int = _lib.UP_NAMES_DIRECTORY
GONE: int = _lib.UP_NAMES_GONE
LOST: int = _lib.UP_NAMES_LOST

_EVENT = layout("up_name_event")


class NameEvent(NamedTuple):
    """An open (csrc/service/helper.h, struct up_name_event). ``pid``: 0 where it is not told."""

    directory: int
    pid: int
    kind: int
    name: str


def _checked(ret: int, what: str) -> int:
    if ret < 0:
        raise OSError(-ret, f"{what}: {os.strerror(-ret)}")
    return ret


class _Group:
    """A queue of events. ``fd``: readable when there are some."""

    def __init__(self, fd: int, read: Any) -> None:
        self.fd = fd
        self._read = read
        self._out = _ffi.new("struct up_name_event[]", _lib.UP_NAMES_AT_ONCE)

    def read(self) -> list[NameEvent]:
        """What one read(2) brings; none: the queue is empty. Raises OSError."""
        n = _checked(self._read(self.fd, self._out), "read of opened names")
        found = []
        for directory, pid, kind, length, name in _EVENT.iter_unpack(
            _ffi.buffer(self._out, n * _EVENT.size)
        ):
            found.append(NameEvent(directory, pid, kind, os.fsdecode(name[:length])))
        return found

    def close(self) -> None:
        """Its marks go with it."""
        os.close(self.fd)


class Fanotify(_Group):
    """A group of fanotify(7). ``directory`` is a descriptor; O_PATH suffices."""

    def __init__(self) -> None:
        """Raises OSError: EPERM (before Linux 5.13), EMFILE (a user's groups), ENOSYS."""
        super().__init__(_checked(_lib.up_fanotify_open(), "fanotify"), _lib.up_fanotify_read)

    @staticmethod
    def identify(directory: int) -> int:
        """By what events call it. It may ask the file system's server. Raises OSError: EOPNOTSUPP,
        where there are no file handles."""
        out = _ffi.new("uint64_t *")
        _checked(_lib.up_fanotify_identify(directory, out), "name_to_handle_at")
        return int(out[0])

    def mark(self, directory: int) -> None:
        """Raises OSError: ENODEV, EXDEV, EOPNOTSUPP (a file system that it cannot tell apart),
        EACCES (no right to read it), ENOSPC (the user's marks)."""
        _checked(_lib.up_fanotify_mark(self.fd, directory), "fanotify_mark")

    def unmark(self, directory: int) -> None:
        """Raises OSError (ENOENT: it has none)."""
        _checked(_lib.up_fanotify_unmark(self.fd, directory), "fanotify_mark")


class Inotify(_Group):
    """An instance of inotify(7)."""

    def __init__(self) -> None:
        """Raises OSError (EMFILE: the user's instances)."""
        super().__init__(_checked(_lib.up_inotify_open(), "inotify"), _lib.up_inotify_read)

    def mark(self, directory: int) -> int:
        """The watch, by which events call it. Raises OSError: EACCES, ENOSPC (user's watches)."""
        return _checked(_lib.up_inotify_mark(self.fd, directory), "inotify_add_watch")

    def unmark(self, watch: int) -> None:
        """Raises OSError (EINVAL: it has none)."""
        _checked(_lib.up_inotify_unmark(self.fd, watch), "inotify_rm_watch")
