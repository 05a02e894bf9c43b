# SPDX-License-Identifier: Apache-2.0
"""Which pages of which files a process has mapped and touched: its program, its libraries, whatever
else. By /proc/PID/maps and its page table, which the service may read of its user's processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from uffdprefetch.base.procfs import maps_text
from uffdprefetch.native import uffd
from uffdprefetch.native.uffd import PageTable

Runs = list[tuple[int, int]]
"""Of a file, as (offset, bytes)."""

_DELETED = " (deleted)"
#: Names in /proc/PID/maps that are none of files on storage.
_NO_FILES = ("/dev/", "/memfd:", "/SYSV", "/anon_hugepage", "/proc/", "/sys/")


def mapped_to_read(maps: str) -> Iterator[tuple[str, int, int, int]]:
    """The parts of files that a text of /proc/PID/maps shows, but for those that are written by it:
    (path, offset, address, bytes)."""
    for line in maps.split("\n"):
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith("/") or fields[1][1::2] == "ws":
            continue
        path = fields[5]
        if path.startswith(_NO_FILES) or path.endswith(_DELETED):
            continue
        start, end = (int(word, 16) for word in fields[0].split("-"))
        yield path, int(fields[2], 16), start, end - start


def touched(pid: int, maps: str) -> dict[str, Runs]:
    """Of each file that a process has mapped the pages in its page table: those that it has
    touched, and those around them that were in memory. ``maps``: of the process, just now. None of
    a file where its page table cannot be read, or it has ended."""
    found: dict[str, Runs] = {}
    table = PageTable(pid)
    try:
        for path, offset, address, length in mapped_to_read(maps):
            shift = offset - address
            runs = found.setdefault(path, [])
            end = address + length
            while address < end:
                some = table.runs(address, end - address)
                runs += [(at + shift, size) for at, size in some]
                if len(some) < uffd.RUNS_AT_ONCE:
                    break
                address = some[-1][0] + some[-1][1]
    finally:
        table.close()
    return found


def is_elsewhere(pid: int) -> bool:
    """Whether a path may mean something else to a process than to us: it has mounts of its own (a
    container), or another root. No, if it has ended."""
    try:
        other = os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
        return other or os.readlink(f"/proc/{pid}/root") != "/"
    except OSError:
        return False


def look(pid: int) -> tuple[str, dict[str, Runs]] | None:
    """/proc/PID/maps of a process, and touched(); None: it has ended, or is another user's."""
    maps = maps_text(pid)
    return (maps, touched(pid, maps)) if maps else None
