# SPDX-License-Identifier: Apache-2.0
"""cffi binding of csrc/service/memory.c and pressure.c: how much memory is left, and the thread
that gives the pool's back before the kernel has to kill somebody."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from uffdprefetch import _uffd  # type: ignore[attr-defined]

_ffi: Any = _uffd.ffi
_lib: Any = _uffd.lib

ROOT = "/sys/fs/cgroup"
MEMINFO = "/proc/meminfo"
#: No limit is known.
UNLIMITED = (1 << 64) - 1


class MemoryRoom(NamedTuple):
    """What is left (csrc/service/helper.h, struct up_memory_room); bytes."""

    may_hold_bytes: int
    left_bytes: int
    limit_bytes: int
    least_limit_bytes: int
    group_limit_bytes: int
    is_cgroup: int
    canaries: int


def _room(c: Any) -> MemoryRoom:
    return MemoryRoom(*(int(getattr(c, name)) for name in MemoryRoom._fields))


class Memory:
    """The levels that bind this process: its memory cgroup, those above it, the machine."""

    def __init__(self, groups: str | None = None, root: str = ROOT, meminfo: str = MEMINFO) -> None:
        """``groups``: a text of /proc/PID/cgroup, by default this process's. Raises OSError."""
        if groups is None:
            with open("/proc/self/cgroup", errors="surrogateescape") as file:
                groups = file.read()
        pointer = _ffi.new("struct up_memory **")
        ret = _lib.up_memory_open(
            pointer, os.fsencode(root), os.fsencode(groups), os.fsencode(meminfo)
        )
        if ret < 0:
            raise OSError(-ret, os.strerror(-ret))
        self.pointer = pointer[0]

    def look(self, held_bytes: int = 0) -> MemoryRoom:
        """What is left now, with ``held_bytes`` in a pool."""
        out = _ffi.new("struct up_memory_room *")
        _lib.up_memory_look(self.pointer, held_bytes, out)
        return _room(out)

    def close(self) -> None:
        """Close its files."""
        _lib.up_memory_close(self.pointer)
        self.pointer = _ffi.NULL


def look(held_bytes: int = 0) -> MemoryRoom:
    """What is left to this process now, with ``held_bytes`` in a pool. Raises OSError."""
    memory = Memory()
    try:
        return memory.look(held_bytes)
    finally:
        memory.close()


class Pressure:
    """The thread that looks all the time; see csrc/service/pressure.c."""

    def __init__(self, pool: Any, exit_status: int, *, canary: bool = True) -> None:
        """``pool``: the C pointer of a pool, which outlives this, or None; ``exit_status``: of this
        process where there is no room for it. Raises OSError."""
        memory = Memory()
        options = _ffi.new("struct up_pressure_options *")
        options.memory, options.pool = memory.pointer, pool if pool is not None else _ffi.NULL
        options.exit_status, options.with_canary = exit_status, canary
        pointer = _ffi.new("struct up_pressure **")
        ret = _lib.up_pressure_start(pointer, options)
        if ret < 0:
            memory.close()
            raise OSError(-ret, os.strerror(-ret))
        self._pointer = pointer[0]

    def now(self) -> MemoryRoom:
        """What was left at its last look."""
        out = _ffi.new("struct up_memory_room *")
        _lib.up_pressure_now(self._pointer, out)
        return _room(out)

    def stop(self) -> None:
        """End it."""
        _lib.up_pressure_stop(self._pointer)
        self._pointer = _ffi.NULL
