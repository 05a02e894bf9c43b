# SPDX-License-Identifier: Apache-2.0
"""What an announcing process maps when an order is asked for: its files, and the pages of them that
are in page tables."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.native import uffd
from uffdprefetch.orders.opens import JobOpens

_scanning = threading.Lock()  # uffd.touched_runs() has one buffer


@dataclass(frozen=True)
class MappedFile:
    """A file that the announcing process and its children map. ``regions``: (pid, address, file
    offset, bytes) each."""

    path: str
    regions: Sequence[tuple[int, int, int, int]]

    def present(self, starts: Array, ends: Array) -> Array:
        """For each range of the file the share of its pages in one process's page table, the
        largest of all processes."""
        share: Array = np.zeros(len(starts))
        for pid, address, offset, length in self.regions:
            try:
                fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                    first = max(start // uffd.PAGE_BYTES * uffd.PAGE_BYTES, offset)
                    last = min(-(-end // uffd.PAGE_BYTES) * uffd.PAGE_BYTES, offset + length)
                    if share[i] == 1 or first >= last:
                        continue
                    mapped = _mapped_bytes(fd, address + first - offset, last - first)
                    share[i] = max(share[i], mapped / (last - first))
            except OSError:
                continue
            finally:
                os.close(fd)
        return share


def _mapped_bytes(pagemap_fd: int, address: int, length: int) -> int:
    """Bytes of [address, +length) in a process's page table. Raises OSError."""
    mapped, end = 0, address + length
    while address < end:
        with _scanning:
            runs, stopped = uffd.touched_runs(pagemap_fd, address, end - address)
        mapped += sum(size for _, size in runs)
        if len(runs) < uffd.RUNS_AT_ONCE:
            break
        address = max(stopped, sum(runs[-1]))
    return mapped


class ResolveRequest:
    """State of the announcing process when an order is asked for."""

    def __init__(
        self,
        files: Sequence[dict[str, Any]],
        read_items: int,
        resolved: Sequence[tuple[int, str]],
        pid: int = 0,
        opens: JobOpens | None = None,
    ) -> None:
        """``files``: of the service's question; ``read_items``: progress in items; ``resolved``:
        (part of the announcement, path) of the orders that the service has, with an empty path
        that of its whole files; ``pid``: of the process itself; ``opens``: what it was seen to open
        (None: nothing is looked for)."""
        self.files = [
            MappedFile(each["path"], [(r[0], r[1], r[2], r[3]) for r in each["regions"]])
            for each in files
        ]
        self.read_items = read_items
        self._resolved = {(part, path) for part, path in resolved}
        self._pid = pid
        self.opens = opens

    def resolved_files(self, part: int) -> set[str]:
        """The mapped files of which the service has the part's order."""
        return {path for number, path in self._resolved if number == part and path}

    @property
    def files_ordered(self) -> set[int]:
        """Parts of which the service has the order of whole files."""
        return {number for number, path in self._resolved if not path}

    def file_numbers(self) -> dict[tuple[int, int], int]:
        """Which of ``files``, of those that the process itself maps, has this (device, inode)."""
        found: dict[tuple[int, int], int] = {}
        for i, file in enumerate(self.files):
            key = identity(file.path)
            if key is not None and self.mappings(i):
                found[key] = i
        return found

    def mappings(self, number: int) -> list[tuple[int, int, int]]:
        """(address, offset, bytes) of the process's own mappings of ``files[number]``."""
        return [row[1:] for row in self.files[number].regions if row[0] == self._pid]


def same_file(a: str, b: str) -> bool:
    """Whether two paths are one file, or an LMDB's directory and its data file."""
    inside = os.path.join(a, "data.mdb")
    a = inside if os.path.isdir(a) else a
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def identity(path: str) -> tuple[int, int] | None:
    """Device and inode."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
