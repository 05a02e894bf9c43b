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

from uffdprefetch.base.messages import say
from uffdprefetch.base.procfs import descendants
from uffdprefetch.protocol import wire
from uffdprefetch.trace.file.events import EVENT, empty
from uffdprefetch.trace.file.trace_file import TracedProcess, Writer
from uffdprefetch.trace.record.file_registry import NUMBERS, FileRegistry
from uffdprefetch.trace.record.kernel_tracer import CHILDREN_ONLY, KernelTracer
from uffdprefetch.trace.record.overview import Overview
from uffdprefetch.trace.record.process_identity import kernel_device

#: Events, and their age, at which a block is written.
BLOCK_EVENTS = 1 << 15
BLOCK_NS = 500_000_000
#: Least period of writing the overview; it grows to 1 / OVERVIEW_SHARE of the run so far, which
#: bounds the sum of all of them.
OVERVIEW_NS = 2_000_000_000
OVERVIEW_SHARE = 4
#: The last turns end with one of at most this many events (other programs go on making some), or at
#: this time limit, which fits twice into the starter's (starter.END_SECONDS).
FEW_EVENTS, DRAIN_SECONDS = 500, 5.0


class Recorder:
    """Turns of: take, name, count, write. One thread calls everything."""

    def __init__(
        self,
        writer: Writer,
        include: Sequence[str],
        min_size_bytes: int,
        max_events: int,
        witness: KernelTracer | None,
    ) -> None:
        self._writer = writer
        self._max_events = max_events
        self._witness = witness
        self.known = FileRegistry(include, min_size_bytes, witness)
        self._service_files: np.ndarray[Any, Any] = np.zeros(NUMBERS, "<u2")
        self._launchers: set[int] = set()
        self._unwritten: list[np.ndarray[Any, Any]] = []
        self._unwritten_events = 0
        now = time.monotonic_ns()
        self._overview = Overview(now)
        self._written_ns = now
        self._overview_ns = now + OVERVIEW_NS
        self.events_seen = self.events_kept = 0
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
            parts += self.known.take(events, new, self._witness.opened())
        return self._take([part for part in parts if len(part)])

    def _take(self, parts: list[np.ndarray[Any, Any]]) -> int:
        count = sum(len(part) for part in parts)
        if count:
            events = self.known.settle(np.concatenate(parts))
            self.events_seen += len(events)
            other = self.known.is_other(events)
            self._overview.add(events[~other] if other.any() else events)
            room = self._max_events - self.events_kept
            if len(events) > room:
                if self.raw_until_ns is None:
                    last = events["time_ns"][room - 1] if room else events["time_ns"][0]
                    self.raw_until_ns = int(last)
                events = events[:room]
            self.events_kept += len(events)
            self._unwritten.append(events)
            self._unwritten_events += len(events)
        self._write(time.monotonic_ns())
        return count

    def _drain(self) -> None:
        """Take all that waits: a turn takes a part of what a busy machine has kept us from."""
        until = time.monotonic() + DRAIN_SECONDS
        while self.turn(()) > FEW_EVENTS and time.monotonic() < until:
            pass

    def adopt(self, pid: int) -> None:
        """Record a process that runs already."""
        self._take([part for part in self.known.adopt(pid) if len(part)])

    # -------------------------------------------------------------- the service's

    def _ours(self) -> set[int]:
        """The recorder and the service: their launcher's children too, and not the job."""
        service = {p.pid for p in self.known.processes.known.values() if p.role == "service"}
        return {os.getpid(), *service}

    def _from_service(self, message: bytes) -> np.ndarray[Any, Any]:
        try:
            kind, body = wire.unpack_stream(message)
            if kind == wire.Type.EVENTS:
                events = np.frombuffer(body, EVENT).copy()
                events["file"] = self._service_files[events["file"]]
                return events
            document = json.loads(body)
            if not isinstance(document, dict):
                raise ValueError("not an object")
            self.lost_by_service = document.get("lost", self.lost_by_service)
            self._tables(document)
        except (wire.WireError, ValueError, KeyError, TypeError) as error:
            say(f"trace: a message of the service cannot be read: {error}")
        return empty()

    def _tables(self, document: dict[str, Any]) -> None:
        for entry in document.get("files", ()):
            device = kernel_device(entry["st_dev"])
            number = self.known.name(device, entry["inode"], entry["path"])
            self._service_files[entry["id"]] = number
        for entry in document.get("processes", ()):
            pid = entry["pid"]
            if pid not in self.known.processes.known and self._witness is not None:
                self._witness.follow(pid)
            self.known.processes.put(TracedProcess(**entry))
        if "service" in document:
            service = TracedProcess(document["service"], command="uffdprefetch", role="service")
            self.known.processes.put(service)
        for pid in document.get("launchers", ()):
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
        files = self.known.new_files()
        if files:
            self._writer.block("files", [asdict(file) for file in files])
        changed = self.known.processes.changed()
        if changed:
            self._writer.block("processes", changed)
            if self.known.processes.wrapped:
                self._writer.block("meta", {"wrapped": True})
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
            self._drain()
            last = self._witness.stop()
            self._drain()
            self._take([self.known.locate(last), *self.known.name_late(at_the_end=True)])
        totals = {
            "ended_ns": time.monotonic_ns(),
            "events_seen": self.events_seen,
            "events_kept": self.events_kept,
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
