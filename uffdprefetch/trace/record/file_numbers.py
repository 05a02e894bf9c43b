# SPDX-License-Identifier: Apache-2.0
"""The files of a recording by their numbers, and which of them are kept.

The kernel tells device and inode; names are found here, in time, since what they belong to may be
gone the next moment. Of what is no record file (programs, libraries, small files) only what it cost
is kept: what came from storage, and who waited for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.file.events import COST_KINDS, Call, Kind, empty, event
from uffdprefetch.trace.file.trace_file import TracedFile
from uffdprefetch.trace.record.kernel_tracer import KernelTracer, NewFile, OpenedFile
from uffdprefetch.trace.record.process_identity import (
    Paths,
    describe_file,
    group_of,
    mapped_paths,
    size_of,
)
from uffdprefetch.trace.record.seen_opens import SeenOpens
from uffdprefetch.trace.record.traced_mappings import TracedMappings

#: First number of files named by the recorder, which grow downwards (BPF's grow from 1).
OUR_NUMBERS = 65_000
NUMBERS = 1 << 16
#: Time for which a file's name is looked for in the processes that touch it.
UNNAMED_NS = 2_000_000_000
#: Descriptors whose opens are remembered, and opens of each, until a mapping names the descriptor.
DESCRIPTORS_MAX, OPENS_MAX = 65536, 64


class FileNumbers:
    """Those of a recording. A file may have been given one by us and one by BPF at the same time:
    then ours counts."""

    def __init__(
        self, paths: Paths, mappings: TracedMappings, only_included: bool,
        witness: KernelTracer | None,
    ) -> None:  # fmt: skip
        """``only_included``: --include decides which are kept, whatever they cost."""
        self._paths, self._mappings, self._witness = paths, mappings, witness
        self._only_included = only_included
        self._files: dict[int, TracedFile] = {}
        self._new_files: list[TracedFile] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._unwanted: Array = np.zeros(NUMBERS, bool)
        self._is_other: Array = np.zeros(NUMBERS, bool)  # programs, libraries, small files
        self._number: Array = np.arange(NUMBERS, dtype="<u2")  # the one that counts
        self._unnamed: dict[int, tuple[NewFile, int]] = {}  # and until when to look for a name
        self._opens = SeenOpens()

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

    def open(self, opened: OpenedFile) -> Array:
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
        call = event(
            Kind.CALL, opened.time_ns, opened.pid, opened.tid, number,
            value=opened.took_ns, aux=Call.OPEN | (opened.fd & 0xFFFFFF) << 8,
        )  # fmt: skip
        return self._opens.note(key, call) if key and not number else call

    def touched(self, new: NewFile) -> list[Array]:
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
        return [self._mappings.map_all(new.pid, file), *opens]

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

    def of(self, key: tuple[int, int]) -> int | None:
        """The number of a file that is kept, by device and inode."""
        return self._numbers.get(key)

    def kept(self) -> Iterable[TracedFile]:
        """All files with a name that are kept."""
        return self._files.values()

    def described(self, number: int) -> TracedFile:
        """One of them."""
        return self._files[number]

    def opens_of(self, pid: int, fd: int) -> list[tuple[int, tuple[int, int] | None]] | None:
        """The latest opens that gave a process this descriptor, in order; None: it had none."""
        return self._opens.descriptors.get((pid, fd))
