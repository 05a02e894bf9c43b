# SPDX-License-Identifier: Apache-2.0
"""What a recorder knows of the job: its files by number, its mappings, its processes.

The kernel tells device, inode, descriptor and address; names are found here, in time, since what
they belong to may be gone the next moment. Of what is no record file (programs, libraries, small
files) only what it cost is kept: what came from storage, and who waited for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.procfs import descendants, file_readers
from uffdprefetch.trace.file.events import COST_KINDS, EVENT, HUGE_BYTES, Call, Kind, empty
from uffdprefetch.trace.file.trace_file import TracedFile
from uffdprefetch.trace.record.kernel_tracer import SILENT, KernelTracer, NewFile, OpenedFile
from uffdprefetch.trace.record.process_identity import (
    Paths,
    Processes,
    describe_file,
    group_of,
    kernel_device,
    mapped_paths,
    mappings,
    size_of,
)
from uffdprefetch.trace.record.seen_opens import SeenOpens

PAGE_BYTES = 4096
#: First number of files named by the recorder, which grow downwards (BPF's grow from 1).
OUR_NUMBERS = 65_000
NUMBERS = 1 << 16
#: Time for which a file's name is looked for in the processes that touch it.
UNNAMED_NS = 2_000_000_000
#: Descriptors whose opens are remembered, and opens of each, until a mapping names the descriptor.
DESCRIPTORS_MAX, OPENS_MAX = 65536, 64
#: Longest read(2) whose file is told by its fills of the page cache.
CALL_NS = 1 << 39
CALL_KEY = np.uint64(4 * CALL_NS)


class FileRegistry:
    """Files, mappings and processes of a recording. One thread calls everything."""

    def __init__(
        self, include: Sequence[str], min_size_bytes: int, witness: KernelTracer | None
    ) -> None:
        self._paths = Paths(include, min_size_bytes)
        self._witness = witness
        self._only_included = bool(include)
        self.processes = Processes()
        self.births_ns = 0  # when a process was last heard to begin
        self._files: dict[int, TracedFile] = {}
        self._new_files: list[TracedFile] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._unwanted: Array = np.zeros(NUMBERS, bool)
        self._is_other: Array = np.zeros(NUMBERS, bool)  # programs, libraries, small files
        self._last_took = empty()  # of each thread the last READ
        # a file may have been given a number by us and by BPF at the same time
        self._number: Array = np.arange(NUMBERS, dtype="<u2")
        self._unnamed: dict[int, tuple[NewFile, int]] = {}  # and until when to look for a name
        self._opens = SeenOpens()
        # by process: (address of the file's byte 0, first, end, number)
        self._mapped: dict[int, list[tuple[int, int, int, int]]] = {}

    def take(
        self, events: Array, new: Sequence[NewFile], opened: Sequence[OpenedFile]
    ) -> list[Array]:
        """The kernel's news: the events, and those that follow from what is found out of them."""
        parts = [self._open(one) for one in opened]
        for one in new:
            parts += self._new_file(one)
        if self._unnamed:
            parts += self.name_late()
        parts += self._opens.unnamed()
        events = self._about_processes(events, parts)
        parts.append(self._name_reads(self.locate(events)))
        return [part for part in parts if len(part)]

    def settle(self, events: Array) -> Array:
        """``events`` (changed) with each file under its one number, without those not wanted."""
        events["file"] = self._number[events["file"]]
        unwanted = self._unwanted[events["file"]]
        other = self.is_other(events)
        if other.any():
            unwanted |= other & ~np.isin(events["kind"], COST_KINDS)
        return events[~unwanted] if unwanted.any() else events

    def is_other(self, events: Array) -> Array:
        """Which are of programs and small files."""
        found: Array = self._is_other[events["file"]]
        return found

    def new_files(self) -> list[TracedFile]:
        """Files that have come since the last call."""
        files, self._new_files = self._new_files, []
        return files

    # -------------------------------------------------------------- files

    def _open(self, opened: OpenedFile) -> Array:
        """An open that was seen: its path is a name for later, and a CALL."""
        key = self._paths.opened(opened.pid, opened.path, executed=opened.fd < 0)
        if opened.fd < 0:
            return empty()
        descriptors = self._opens.descriptors
        opens = descriptors.setdefault((opened.pid, opened.fd), [])
        opens.append((opened.time_ns, key))
        del opens[:-OPENS_MAX]
        while len(descriptors) > DESCRIPTORS_MAX:
            del descriptors[next(iter(descriptors))]
        number = self._numbers.get(key, 0) if key else 0
        if key and not number and self._paths.wanted(self._paths.path_of(key), False, 0):
            # small, or not touched yet; lock files are wanted whatever they are
            number = self.name(*key, self._paths.path_of(key))
        event = _event(
            Kind.CALL, opened.time_ns, opened.pid, opened.tid, number,
            value=opened.took_ns, aux=Call.OPEN | (opened.fd & 0xFFFFFF) << 8,
        )  # fmt: skip
        return self._opens.note(key, event) if key and not number else event

    def _new_file(self, new: NewFile) -> list[Array]:
        """A process of the job has touched a file for the first time: keep it?"""
        known = self._numbers.get((new.device, new.inode))
        if known is not None:
            self._number[new.number] = known
            return []
        path, code = self._paths.find(new.pid, new.device, new.inode)
        if not path:  # its open, or exec, is perhaps just being told; later the process is gone
            self._unnamed[new.number] = (new, time.monotonic_ns() + UNNAMED_NS)
            return []
        return self._decide(new, path, code)

    def name_late(self, at_the_end: bool = False) -> list[Array]:
        """Try again to name what had no name; at the end what has none is decided without."""
        found, now = [], time.monotonic_ns()
        for number, (new, until) in list(self._unnamed.items()):
            path = self._paths.path_of((new.device, new.inode))
            if path or now > until or at_the_end:
                del self._unnamed[number]
                code = self._paths.is_code((new.device, new.inode))
                found += self._decide(new, path, code)
        return found + self._opens.unnamed(at_the_end)

    def _decide(self, new: NewFile, path: str, code: bool) -> list[Array]:
        assert self._witness is not None
        size_bytes = size_of(path)
        # whatever a program opens has a name by now; the rest is anonymous memory, pipes, the like
        nameless = not path and "CALLS" in self._witness.features
        if nameless or not self._paths.wanted(path, code, size_bytes):
            if nameless or self._only_included:
                self._unwanted[new.number] = True
                self._witness.ignore(new.inode, new.device)
            else:
                self._witness.costs_only(new.inode, new.device, new.number)
                self._is_other[new.number] = True
                other = TracedFile(
                    new.number, path, size_bytes, new.device, new.inode, group=group_of(path)
                )
                self._new_files.append(other)
                return self._opens.named((new.device, new.inode), new.number)
            return []
        file = describe_file(new.number, path, new.device, new.inode)
        self._numbers[new.device, new.inode] = new.number
        self._add(file)
        opens = self._opens.named((new.device, new.inode), new.number)
        return [self._map(new.pid, file), *opens]

    def _add(self, file: TracedFile) -> None:
        self._files[file.id] = file
        self._new_files.append(file)

    def name(self, device: int, inode: int, path: str) -> int:
        """Take a file in before the kernel has reported it, under a number of ours."""
        number = self._numbers.get((device, inode))
        if number is None:
            number = OUR_NUMBERS - len(self._numbers)
            self._numbers[device, inode] = number
            self._add(describe_file(number, path, device, inode))
            if self._witness is not None:
                self._witness.include(inode, device, number)
        return number

    def know_files_of(self, pid: int) -> None:
        """Names for what the launcher has mapped: its child has it too, until it runs the job."""
        for path in mapped_paths(pid):
            self._paths.opened(pid, path)

    # -------------------------------------------------------------- processes and mappings

    def _about_processes(self, events: Array, parts: list[Array]) -> Array:
        """Births, new programs, new mappings: who they are must be read while they are there.

        What is found goes to ``parts``; returns the events without the mappings, which the kernel
        tells by descriptor.
        """
        begun = events[np.isin(events["kind"], (Kind.BORN, Kind.EXEC))]
        if len(begun):
            self.births_ns = time.monotonic_ns()
        for event in begun:
            if event["kind"] == Kind.BORN:
                self.processes.identify(int(event["value"]), int(event["aux"]))
            else:
                self.processes.identify(int(event["pid"]))
        maps = events["kind"] == Kind.MAP
        for event in events[maps]:
            parts.append(self._mapping_made(event))
        for pid in {int(e["value"]) for e in begun if e["kind"] == Kind.BORN}:
            parts += [self._map(pid, file) for file in self._files.values()]
        return events[~maps]

    def _mapping_made(self, event: np.void) -> Array:
        """A mapping as mmap(2) made it: of which file, the open of its descriptor tells."""
        pid, fd = int(event["pid"]), int(event["aux"])
        # descriptors are numbers that come again: the last open before the mapping
        before = [key for at, key in self._opens_of(pid, fd) if at <= event["time_ns"]]
        if before and before[-1] is None:  # no regular file
            return empty()
        key = before[-1] if before else None
        if key is None:
            found = [self._map(pid, file) for file in self._files.values()]
            return np.concatenate(found) if found else empty()
        path = self._paths.path_of(key)
        number = self._numbers.get(key)
        if number is None:
            if not self._paths.wanted(path, self._paths.is_code(key), size_of(path)):
                return empty()
            number = self.name(*key, path)
        address, offset, length = (int(event[n]) for n in ("value", "offset", "length"))
        if not self._is_new_mapping(pid, number, address, offset, length):
            return empty()
        return _event(
            Kind.MAP, int(event["time_ns"]), pid, int(event["tid"]), number,
            offset=offset, length=length, value=address,
        )  # fmt: skip

    def _is_new_mapping(
        self, pid: int, number: int, address: int, offset: int, length: int
    ) -> bool:
        """Whether it lies in none of this file that is known; from now on it is what is there."""
        known = self._mapped.setdefault(pid, [])
        base, end = address - offset, address + length
        if any(
            (base, number) == (b, n) and low <= address and end <= high for b, low, high, n in known
        ):
            return False
        known[:] = [one for one in known if end <= one[1] or one[2] <= address]
        known.append((base, address, end, number))
        return True

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
            for base, low, high, number in self._mapped.get(pid, ()):
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

    def _name_reads(self, events: Array) -> Array:
        """Calls of read(2) and pread(2) with the file that the thread took pages of meanwhile, as
        the page cache tells: what a descriptor stands for may have changed unseen."""
        what = events["aux"] & 0xFF
        calls = np.flatnonzero(
            (events["kind"] == Kind.CALL) & ((what == Call.READ) | (what == Call.PREAD))
        )
        took = np.concatenate([self._last_took, events[events["kind"] == Kind.READ]])
        if len(took):
            start = max(int(took["time_ns"].min()), int(took["time_ns"].max()) - CALL_NS)
            took = took[took["time_ns"] >= start]
            took = took[np.lexsort((took["time_ns"], took["tid"]))]
            last = np.append(took["tid"][1:] != took["tid"][:-1], True)
            self._last_took = took[last]
        if not len(calls) or not len(took):
            return events
        events = events.copy()
        rows = events[calls]
        # by thread, then by time
        since = np.clip(rows["time_ns"].astype("<i8") - start, 0, 2 * CALL_NS).astype("<u8")
        key = took["tid"].astype("<u8") * CALL_KEY + (took["time_ns"] - np.uint64(start))
        at = np.searchsorted(key, rows["tid"].astype("<u8") * CALL_KEY + since, side="right")
        found = took[np.maximum(at, 1) - 1]
        within = (at > 0) & (found["tid"] == rows["tid"]) & (found["time_ns"] <= rows["time_ns"])
        within &= found["time_ns"] + rows["value"] >= rows["time_ns"]
        events["file"][calls[within]] = found["file"][within]
        return events

    def _opens_of(self, pid: int, fd: int) -> list[tuple[int, tuple[int, int] | None]]:
        """The latest opens that gave a process this descriptor, or its parent, in order."""
        opens = self._opens.descriptors.get((pid, fd))
        if opens is None:
            above = self.processes.known.get(pid)
            opens = self._opens.descriptors.get((above.parent, fd)) if above else None
        return opens or []

    def _map(self, pid: int, file: TracedFile) -> Array:
        """MAP events for mappings of a file that were not told yet."""
        found = []
        for address, length, offset, _, _ in mappings(pid, file.device, file.inode):
            if self._is_new_mapping(pid, file.id, address, offset, length):
                found.append(
                    _event(Kind.MAP, time.monotonic_ns(), pid, pid, file.id,
                           offset=offset, length=length, value=address)
                )  # fmt: skip
        return np.concatenate(found) if found else empty()

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
                    number = self.name(kernel_device(st.st_dev), st.st_ino, mapping.path)
                    found = self._map(one, self._files[number])
                    parts.append(found)
                    if self._witness is not None:
                        for event in found:
                            self._witness.mapped(one, int(event["value"]), int(event["length"]))
        return parts


def _event(
    kind: Kind, time_ns: int, pid: int, tid: int, file: int,
    offset: int = 0, length: int = 0, value: int = 0, aux: int = 0,
) -> Array:  # fmt: skip
    return np.array([(time_ns, offset, length, value, pid, tid, kind, file, aux)], EVENT)
