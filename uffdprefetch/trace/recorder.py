# SPDX-License-Identifier: Apache-2.0
"""The recorder: takes what the kernel and our service report, and keeps it in a trace file.

A process of its own (``uffdprefetch record``, started by ``trace`` and ``wrap --trace``): neither
the job nor the service waits for it. Killed, it leaves what it had written; when the disk is full
it says so once and lets go.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from uffdprefetch.messages import say
from uffdprefetch.node import wire
from uffdprefetch.node.observe import descendants, read_only_files
from uffdprefetch.trace.events import EVENT, HUGE_BYTES, Call, Kind, empty
from uffdprefetch.trace.file import File, Process, Writer
from uffdprefetch.trace.names import (
    Paths,
    Processes,
    describe_file,
    kernel_device,
    mapped_paths,
    mappings,
)
from uffdprefetch.trace.overview import Overview
from uffdprefetch.trace.witness import (
    CHILDREN_ONLY,
    SILENT,
    NewFile,
    Opened,
    Witness,
)

PAGE_BYTES = 4096
#: Raw events are written when this many have come, or after this long.
BLOCK_EVENTS = 1 << 15
BLOCK_NS = 500_000_000
#: The overview: after this long, and then ever more rarely, so that all of them stay small.
OVERVIEW_NS = 2_000_000_000
OVERVIEW_SHARE = 4
#: Numbers of files that the service named first: from here downwards (BPF's own grow from 1).
SERVICE_NUMBERS = 65_000
UNNAMED_NS = 2_000_000_000
#: Opened descriptors whose files are remembered: whoever maps one, does it soon.
DESCRIPTORS_MAX, OPENS_MAX = 65536, 64


class Recorder:
    """Turns of: take, name, count, write. One thread calls everything."""

    def __init__(
        self,
        writer: Writer,
        include: Sequence[str],
        min_size_bytes: int,
        max_events: int,
        witness: Witness | None,
    ) -> None:
        self._writer = writer
        self._paths = Paths(include, min_size_bytes)
        self._max_events = max_events
        self._witness = witness
        self.processes = Processes()
        self._files: dict[int, File] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._ignored: set[int] = set()
        self._unnamed: dict[int, tuple[NewFile, int]] = {}  # and until when to look for a name
        # a file may have been given a number by us and by BPF at the same time
        self._number: np.ndarray[Any, Any] = np.arange(65536, dtype="<u2")
        self._service_files: np.ndarray[Any, Any] = np.zeros(65536, "<u2")
        self._unwritten: list[np.ndarray[Any, Any]] = []
        self._unwritten_events = 0
        self._new_files: list[File] = []
        self._launchers: set[int] = set()
        self._descriptors: dict[tuple[int, int], list[tuple[int, tuple[int, int] | None]]] = {}
        self._mapped: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        now = time.monotonic_ns()
        self._overview = Overview(now)
        self._written_ns = now
        self._overview_ns = now + OVERVIEW_NS
        self.seen = self.kept = 0
        self.lost_by_service = 0
        self.raw_until_ns: int | None = None
        self.failed: str | None = None

    # -------------------------------------------------------------- taking

    def turn(self, messages: Sequence[bytes]) -> int:
        """Take what has come, from the kernel and in ``messages`` of the service; how many."""
        parts = [self._from_service(message) for message in messages]
        if self._witness is not None:
            # paths last: what the events speak of has been opened before
            events, new = self._witness.drain()
            for opened in self._witness.opened():
                parts.append(self._open(opened))
            for file in new:
                parts.append(self._new_file(file))
            if self._unnamed:
                parts += self._name_late()
            events = self._about_processes(events, parts)
            parts.append(self._locate(events))
        return self._take([part for part in parts if len(part)])

    def _take(self, parts: list[np.ndarray[Any, Any]]) -> int:
        taken = sum(len(part) for part in parts)
        if taken:
            events = np.concatenate(parts)
            events["file"] = self._number[events["file"]]
            if self._ignored:
                events = events[~np.isin(events["file"], list(self._ignored))]
            self.seen += len(events)
            self._overview.add(events)
            room = self._max_events - self.kept
            if len(events) > room:
                if self.raw_until_ns is None:
                    last = events["time_ns"][room - 1] if room else events["time_ns"][0]
                    self.raw_until_ns = int(last)
                events = events[:room]
            self.kept += len(events)
            self._unwritten.append(events)
            self._unwritten_events += len(events)
        self._write(time.monotonic_ns())
        return taken

    # -------------------------------------------------------------- the kernel's

    def _open(self, opened: Opened) -> np.ndarray[Any, Any]:
        """An open that was seen: its path is a name for later, and a CALL."""
        key = self._paths.opened(opened.pid, opened.path, executed=opened.fd < 0)
        if opened.fd < 0:
            return empty()
        opens = self._descriptors.setdefault((opened.pid, opened.fd), [])
        opens.append((opened.time_ns, key))
        del opens[:-OPENS_MAX]
        while len(self._descriptors) > DESCRIPTORS_MAX:
            del self._descriptors[next(iter(self._descriptors))]
        number = self._numbers.get(key, 0) if key else 0
        if key and not number and self._paths.wanted(self._paths.path_of(key), False, 0):
            # small, or not touched yet; lock files are wanted whatever they are
            number = self._name(*key, self._paths.path_of(key))
        return _event(
            Kind.CALL, opened.time_ns, opened.pid, opened.tid, number,
            value=opened.took_ns, aux=Call.OPEN | (opened.fd & 0xFFFFFF) << 8,
        )  # fmt: skip

    def _new_file(self, new: NewFile) -> np.ndarray[Any, Any]:
        """A process of the job has touched a file for the first time: keep it?"""
        known = self._numbers.get((new.device, new.inode))
        if known is not None:
            self._number[new.number] = known
            return empty()
        path, code = self._paths.find(new.pid, new.device, new.inode)
        if not path:  # its open, or exec, is perhaps just being told; later the process is gone
            self._unnamed[new.number] = (new, time.monotonic_ns() + UNNAMED_NS)
            return empty()
        return self._decide(new, path, code)

    def _name_late(self, at_the_end: bool = False) -> list[np.ndarray[Any, Any]]:
        found, now = [], time.monotonic_ns()
        for number, (new, until) in list(self._unnamed.items()):
            path = self._paths.path_of((new.device, new.inode))
            if path or now > until or at_the_end:
                del self._unnamed[number]
                code = self._paths.is_code((new.device, new.inode))
                found.append(self._decide(new, path, code))
        return found

    def _decide(self, new: NewFile, path: str, code: bool) -> np.ndarray[Any, Any]:
        assert self._witness is not None
        file = describe_file(new.number, path, new.device, new.inode)
        # whatever a program opens has a name by now; the rest is anonymous memory, pipes, the like
        nameless = not path and "CALLS" in self._witness.have
        if nameless or not self._paths.wanted(path, code, file.size_bytes):
            self._ignored.add(new.number)
            self._witness.ignore(new.inode, new.device)
            return empty()
        self._numbers[new.device, new.inode] = new.number
        self._add(file)
        return self._map(new.pid, file)

    def _add(self, file: File) -> None:
        self._files[file.id] = file
        self._new_files.append(file)

    def _name(self, device: int, inode: int, path: str) -> int:
        """Take a file in before the kernel has reported it, under a number of ours."""
        number = self._numbers.get((device, inode))
        if number is None:
            number = SERVICE_NUMBERS - len(self._numbers)
            self._numbers[device, inode] = number
            self._add(describe_file(number, path, device, inode))
            if self._witness is not None:
                self._witness.include(inode, device, number)
        return number

    def _about_processes(
        self, events: np.ndarray[Any, Any], parts: list[np.ndarray[Any, Any]]
    ) -> np.ndarray[Any, Any]:
        """Births, new programs, new mappings: who they are must be read while they are there.

        What is found goes to ``parts``; returns the events without the mappings, which the kernel
        tells by descriptor.
        """
        told = events[np.isin(events["kind"], (Kind.BORN, Kind.EXEC))]
        for event in told:
            if event["kind"] == Kind.BORN:
                self.processes.look(int(event["value"]), int(event["aux"]))
            else:
                self.processes.look(int(event["pid"]))
        maps = events["kind"] == Kind.MAP
        for event in events[maps]:
            parts.append(self._map_told(event))
        for pid in {int(e["value"]) for e in told if e["kind"] == Kind.BORN}:
            parts += [self._map(pid, file) for file in self._files.values()]
        return events[~maps]

    def _map_told(self, event: np.void) -> np.ndarray[Any, Any]:
        """A mapping as mmap(2) made it: of which file, the open of its descriptor tells."""
        pid, fd = int(event["pid"]), int(event["aux"])
        opens = self._descriptors.get((pid, fd))
        if opens is None:
            above = self.processes.known.get(pid)
            opens = self._descriptors.get((above.parent, fd)) if above else None
        # descriptors are numbers that come again: the last open before the mapping
        before = [key for at, key in opens or () if at <= event["time_ns"]]
        if before and before[-1] is None:  # no regular file
            return empty()
        key = before[-1] if before else None
        if key is None:
            found = [self._map(pid, file) for file in self._files.values()]
            return np.concatenate(found) if found else empty()
        path = self._paths.path_of(key)
        number = self._numbers.get(key)
        if number is None:
            file = describe_file(0, path, *key)
            if not self._paths.wanted(path, self._paths.is_code(key), file.size_bytes):
                return empty()
            number = self._name(*key, path)
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
        """Whether it lies in none that is known; from now on it is."""
        known = self._mapped.setdefault((pid, number), [])
        base, end = address - offset, address + length
        if any(base == b and low <= address and end <= high for b, low, high in known):
            return False
        known.append((base, address, end))
        return True

    def _locate(self, events: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Faults of which only the address is known: those in a file become AROUND of its huge
        page, the others go."""
        silent = events["kind"] == SILENT
        if not silent.any():
            return events
        events = events.copy()
        where = np.flatnonzero(silent)
        keep = ~silent
        for (pid, number), ranges in self._mapped.items():
            mine = where[events["pid"][where] == pid]
            for base, start, end in ranges:  # the latest last: it is what lies there now
                address = events["value"][mine]
                hit = mine[(address >= start) & (address < end)]
                page = (events["value"][hit] - np.uint64(base)) & ~np.uint64(PAGE_BYTES - 1)
                events["offset"][hit] = page & ~np.uint64(HUGE_BYTES - 1)
                events["length"][hit] = HUGE_BYTES
                events["aux"][hit] = (page & np.uint64(HUGE_BYTES - 1)) // np.uint64(PAGE_BYTES)
                events["kind"][hit] = Kind.AROUND
                events["file"][hit] = number
                keep[hit] = True
        return events[keep]

    def _map(self, pid: int, file: File) -> np.ndarray[Any, Any]:
        """MAP events for mappings of a file that were not told yet."""
        found = []
        for address, length, offset, _, _ in mappings(pid, file.device, file.inode):
            if self._is_new_mapping(pid, file.id, address, offset, length):
                found.append(
                    _event(Kind.MAP, time.monotonic_ns(), pid, pid, file.id,
                           offset=offset, length=length, value=address)
                )  # fmt: skip
        return np.concatenate(found) if found else empty()

    def know_files_of(self, pid: int) -> None:
        """Names for what the launcher has mapped: its child has it too, until it runs the job."""
        for path in mapped_paths(pid):
            self._paths.opened(pid, path)

    def adopt(self, pid: int) -> None:
        """Record a process that runs already: itself, its mappings, its children."""
        for one in descendants(pid):
            self.processes.look(one)
            if self._witness is not None:
                self._witness.follow(one)
            try:
                with open(f"/proc/{one}/maps", errors="surrogateescape") as maps:
                    mapped = read_only_files(maps.read(), 1)
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
                    number = self._name(kernel_device(st.st_dev), st.st_ino, mapping.path)
                    found = self._map(one, self._files[number])
                    self._take([found])
                    if self._witness is not None:
                        for event in found:
                            self._witness.mapped(one, int(event["value"]), int(event["length"]))

    # -------------------------------------------------------------- the service's

    def _ours(self) -> set[int]:
        """The recorder and the service: their launcher's children too, and not the job."""
        service = {p.pid for p in self.processes.known.values() if p.role == "service"}
        return {os.getpid(), *service}

    def _from_service(self, message: bytes) -> np.ndarray[Any, Any]:
        try:
            kind, body = wire.unpack_stream(message)
            if kind == wire.Type.EVENTS:
                events = np.frombuffer(body, EVENT).copy()
                events["file"] = self._service_files[events["file"]]
                return events
            told = json.loads(body)
            if not isinstance(told, dict):
                raise ValueError("not an object")
            self.lost_by_service = told.get("lost", self.lost_by_service)
            self._tables(told)
        except (wire.WireError, ValueError, KeyError, TypeError) as error:
            say(f"trace: a message of the service cannot be read: {error}")
        return empty()

    def _tables(self, told: dict[str, Any]) -> None:
        for entry in told.get("files", ()):
            device = kernel_device(entry["st_dev"])
            number = self._name(device, entry["inode"], entry["path"])
            self._service_files[entry["id"]] = number
        for entry in told.get("processes", ()):
            pid = entry["pid"]
            if pid not in self.processes.known and self._witness is not None:
                self._witness.follow(pid)
            self.processes.put(Process(**entry))
        if "service" in told:
            self.processes.put(Process(told["service"], command="uffdprefetch", role="service"))
        for pid in told.get("launchers", ()):
            if self._witness is not None and pid not in self._launchers:
                self._launchers.add(pid)
                self._witness.follow(pid, CHILDREN_ONLY)
                for child in descendants(pid)[1:]:
                    if child not in self._ours():
                        self.adopt(child)

    # -------------------------------------------------------------- writing

    def _write(self, now: int) -> None:
        due = now - self._written_ns >= BLOCK_NS
        if self.failed or not (due or self._unwritten_events >= BLOCK_EVENTS):
            return
        self._written_ns = now
        try:
            self._flush()
            if now >= self._overview_ns:
                self._writer.block("overview", self._overview.body())
                elapsed = now - self._overview.start_ns
                self._overview_ns = now + max(OVERVIEW_NS, elapsed // OVERVIEW_SHARE)
        except OSError as error:
            self._fail(error)

    def _flush(self) -> None:
        """Tables before the events that speak of them."""
        if self._new_files:
            self._writer.block("files", [asdict(file) for file in self._new_files])
            self._new_files = []
        changed = self.processes.changed()
        if changed:
            self._writer.block("processes", changed)
        if self._unwritten:
            self._writer.events(np.concatenate(self._unwritten))
            self._unwritten, self._unwritten_events = [], 0

    def _fail(self, error: OSError) -> None:
        self.failed = error.strerror or str(error)
        say(
            f"trace ends after {self._writer.written_bytes} bytes: {self.failed};"
            " the job goes on without being recorded"
        )

    def finish(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Take what is left, write the end; the totals that stand there."""
        if self._witness is not None:
            self.turn(())
            last = self._witness.stop()
            self.turn(())
            self._take([self._locate(last), *self._name_late(at_the_end=True)])
        totals = {
            "ended_ns": time.monotonic_ns(),
            "events_seen": self.seen,
            "events_kept": self.kept,
            "lost_events": (self._witness.lost() if self._witness else 0) + self.lost_by_service,
            "raw_until_ns": self.raw_until_ns,
            "recorder_cpu_seconds": round(time.process_time(), 3),
            **extra,
        }
        if not self.failed:
            try:
                self._flush()
                self._writer.block("overview", self._overview.body())
                self._writer.block("end", totals)
            except OSError as error:
                self._fail(error)
        return totals


def _event(
    kind: Kind, time_ns: int, pid: int, tid: int, file: int,
    offset: int = 0, length: int = 0, value: int = 0, aux: int = 0,
) -> np.ndarray[Any, Any]:  # fmt: skip
    return np.array([(time_ns, offset, length, value, pid, tid, kind, file, aux)], EVENT)
