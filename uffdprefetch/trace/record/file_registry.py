# SPDX-License-Identifier: Apache-2.0
"""What a recorder knows of the job: its files by number, its mappings, its processes.

The kernel tells device, inode, descriptor and address; who and what that is must be found out while
it is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.procfs import descendants, file_readers
from uffdprefetch.trace.file.events import Kind, empty, event
from uffdprefetch.trace.record.file_numbers import FileNumbers
from uffdprefetch.trace.record.kernel_tracer import KernelTracer, NewFile, OpenedFile
from uffdprefetch.trace.record.process_identity import (
    Paths,
    Processes,
    TraceLimits,
    kernel_device,
    size_of,
)
from uffdprefetch.trace.record.traced_mappings import TracedMappings
from uffdprefetch.trace.record.traced_reads import TracedReads


class FileRegistry:
    """Files, mappings and processes of a recording. One thread calls everything."""

    def __init__(self, limits: TraceLimits, witness: KernelTracer | None) -> None:
        self._paths = Paths(limits)
        self._witness = witness
        self.processes = Processes()
        self.births_ns = 0  # when a process was last heard to begin
        self.mappings = TracedMappings()
        self.files = FileNumbers(self._paths, self.mappings, bool(limits.include), witness)
        self._reads = TracedReads()

    def take(
        self, events: Array, new: Sequence[NewFile], opened: Sequence[OpenedFile]
    ) -> list[Array]:
        """The kernel's news: the events, and those that follow from what is found out of them."""
        parts = [self.files.open(one) for one in opened]
        for one in new:
            parts += self.files.touched(one)
        parts += self.files.name_late()
        events = self._about_processes(events, parts)
        parts.append(self._reads.name(self.mappings.locate(events)))
        return [part for part in parts if len(part)]

    def _about_processes(self, events: Array, parts: list[Array]) -> Array:
        """Births, new programs, new mappings: who they are must be read while they are there.

        What is found goes to ``parts``; returns the events without the mappings, which the kernel
        tells by descriptor.
        """
        begun = events[np.isin(events["kind"], (Kind.BORN, Kind.EXEC))]
        if len(begun):
            self.births_ns = time.monotonic_ns()
        for one in begun:
            if one["kind"] == Kind.BORN:
                self.processes.identify(int(one["value"]), int(one["aux"]))
            else:
                self.processes.identify(int(one["pid"]))
        maps = events["kind"] == Kind.MAP
        for one in events[maps]:
            parts.append(self._mapping_made(one))
        for pid in {int(e["value"]) for e in begun if e["kind"] == Kind.BORN}:
            parts += [self.mappings.map_all(pid, file) for file in self.files.kept()]
        return events[~maps]

    def _mapping_made(self, made: np.void) -> Array:
        """A mapping as mmap(2) made it: of which file, the open of its descriptor tells."""
        pid, fd = int(made["pid"]), int(made["aux"])
        # descriptors are numbers that come again: the last open before the mapping
        before = [key for at, key in self._opens_of(pid, fd) if at <= made["time_ns"]]
        if before and before[-1] is None:  # no regular file
            return empty()
        key = before[-1] if before else None
        if key is None:
            found = [self.mappings.map_all(pid, file) for file in self.files.kept()]
            return np.concatenate(found) if found else empty()
        path = self._paths.path_of(key)
        number = self.files.of(key)
        if number is None:
            if not self._paths.wanted(path, self._paths.is_code(key), size_of(path)):
                return empty()
            number = self.files.name(*key, path)
        address, offset, length = (int(made[n]) for n in ("value", "offset", "length"))
        if not self.mappings.is_new(pid, number, address, offset, length):
            return empty()
        return event(
            Kind.MAP, int(made["time_ns"]), pid, int(made["tid"]), number,
            offset=offset, length=length, value=address,
        )  # fmt: skip

    def _opens_of(self, pid: int, fd: int) -> list[tuple[int, tuple[int, int] | None]]:
        """The latest opens that gave a process this descriptor, or its parent, in order."""
        opens = self.files.opens_of(pid, fd)
        if opens is None:
            above = self.processes.known.get(pid)
            opens = self.files.opens_of(above.parent, fd) if above else None
        return opens or []

    def adopt(self, pid: int) -> list[Array]:
        """Record a process that runs already: itself, its mappings, its children; MAP events."""
        parts: list[Array] = []
        for one in descendants(pid):
            self.processes.identify(one)
            if self._witness is not None:
                self._witness.follow(one)
            try:
                with open(f"/proc/{one}/maps", errors="surrogateescape", newline="\n") as maps:
                    mapped = file_readers(maps.read(), 1)
            except OSError:
                continue
            for mapping in mapped:
                try:
                    st = os.stat(mapping.path)
                except OSError:
                    continue
                if st.st_ino == mapping.inode and self._paths.wanted(
                    mapping.path, False, st.st_size
                ):
                    number = self.files.name(kernel_device(st.st_dev), st.st_ino, mapping.path)
                    found = self.mappings.map_all(one, self.files.described(number))
                    parts.append(found)
                    if self._witness is not None:
                        for made in found:
                            self._witness.mapped(one, int(made["value"]), int(made["length"]))
        return parts
