# SPDX-License-Identifier: Apache-2.0
"""Which addresses of a recorded process are which bytes of which file."""

from __future__ import annotations

import time

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.file.events import HUGE_BYTES, Kind, empty, event
from uffdprefetch.trace.file.trace_file import TracedFile
from uffdprefetch.trace.record.kernel_tracer import SILENT
from uffdprefetch.trace.record.process_identity import mappings

PAGE_BYTES = 4096


class TracedMappings:
    """Those of a recording."""

    def __init__(self) -> None:
        # by process: (address of the file's byte 0, first, end, number)
        self._by_process: dict[int, list[tuple[int, int, int, int]]] = {}

    def is_new(self, pid: int, number: int, address: int, offset: int, length: int) -> bool:
        """Whether it lies in none of this file that is known; from now on it is what is there."""
        known = self._by_process.setdefault(pid, [])
        base, end = address - offset, address + length
        if any(
            (base, number) == (b, n) and low <= address and end <= high for b, low, high, n in known
        ):
            return False
        known[:] = [one for one in known if end <= one[1] or one[2] <= address]
        known.append((base, address, end, number))
        return True

    def map_all(self, pid: int, file: TracedFile) -> Array:
        """MAP events for mappings of a file that were not told yet."""
        found = []
        for address, length, offset, _, _ in mappings(pid, file.device, file.inode):
            if self.is_new(pid, file.id, address, offset, length):
                found.append(
                    event(Kind.MAP, time.monotonic_ns(), pid, pid, file.id,
                           offset=offset, length=length, value=address)
                )  # fmt: skip
        return np.concatenate(found) if found else empty()

    def locate(self, events: Array) -> Array:
        """Faults of which only the address is known: those in a file become AROUND of its huge
        page, the others go."""
        silent = events["kind"] == SILENT
        if not silent.any():
            return events
        events = events.copy()
        where = np.flatnonzero(silent)
        keep = ~silent
        for pid in np.unique(events["pid"][where]).tolist():
            mine = where[events["pid"][where] == pid]
            for base, low, high, number in self._by_process.get(pid, ()):
                address = events["value"][mine]
                hit = mine[(address >= low) & (address < high)]
                page = (events["value"][hit] - np.uint64(base)) & ~np.uint64(PAGE_BYTES - 1)
                events["offset"][hit] = page & ~np.uint64(HUGE_BYTES - 1)
                events["length"][hit] = HUGE_BYTES
                events["aux"][hit] = (page & np.uint64(HUGE_BYTES - 1)) // np.uint64(PAGE_BYTES)
                events["kind"][hit] = Kind.AROUND
                events["file"][hit] = number
                keep[hit] = True
        return events[keep]
