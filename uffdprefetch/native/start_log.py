# SPDX-License-Identifier: Apache-2.0
"""What processes of a job have opened while it started, as they have noted it
(csrc/common/startlog.h, csrc/job/startlog.c)."""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

from uffdprefetch.native import uffd

_ffi: Any = uffd._ffi
_lib: Any = uffd._lib

_ENTRY_BYTES: int = _ffi.sizeof("struct up_start_entry")
#: Of `taken`: the rest is bytes of text.
_SLOTS_SHIFT = 32


class Noted(NamedTuple):
    """An open(2) that has returned, or (``is_directory``) the working directory of a process when
    it was loaded. ``pid``: that of the process or of one that it was forked from; ``directory``:
    of openat(2), where the path is not absolute."""

    pid: int
    path: str
    directory: int
    flags: int
    is_missing: bool
    is_directory: bool


class StartLog:
    """Of one job on one node. Whatever lies in it, nothing outside it is read."""

    def __init__(self, fd: int) -> None:
        """``fd``: of protocol/start_log.py, whose size is sealed. Raises OSError, ValueError."""
        self._memory = mmap.mmap(fd, _lib.UP_START_LOG_BYTES)
        self._log = _ffi.from_buffer("struct up_start_log *", self._memory)
        self._seen = 0  # slots
        self._unfilled: list[int] = []  # of those

    @property
    def lost(self) -> int:
        """What was opened when there was no room any more."""
        return int(self._log.lost)

    def take(self, most: int) -> list[Noted]:
        """Up to ``most`` of what was noted since: in order, but for those who took their time."""
        taken = min(int(self._log.taken) >> _SLOTS_SHIFT, _lib.UP_START_SLOTS)
        slots = [*self._unfilled, *range(self._seen, min(taken, self._seen + most))]
        self._seen = max(self._seen, min(taken, self._seen + most))
        self._unfilled, found = [], []
        for slot in slots:
            at = int(self._log.slot[slot])
            if not at:
                self._unfilled.append(slot)
                continue
            noted = self._entry((at - 1) * 8)
            if noted is not None:
                found.append(noted)
        return found

    def _entry(self, at: int) -> Noted | None:
        """None: it is none, as no process of ours writes it."""
        room = _lib.UP_START_TEXT_BYTES - at - _ENTRY_BYTES
        if room < 0:
            return None
        text = self._log.text + at
        entry = _ffi.cast("struct up_start_entry *", text)[0:1][0]
        size, kind = int(entry.bytes), int(entry.kind)
        if not 0 < size <= room or kind not in (_lib.UP_START_OPEN, _lib.UP_START_DIRECTORY):
            return None
        path = bytes(_ffi.buffer(text + _ENTRY_BYTES, size))
        if b"\0" in path:
            return None
        return Noted(
            int(entry.pid), os.fsdecode(path), int(entry.directory), int(entry.flags),
            bool(entry.missing), kind == _lib.UP_START_DIRECTORY,
        )  # fmt: skip

    def end(self) -> None:
        """Nothing more is wanted: what processes open from now on costs them nothing."""
        self._log.over = 1

    def close(self) -> None:
        """Read it no more; it is over for those who write it, too."""
        self.end()
        self._log = None
        self._memory.close()
