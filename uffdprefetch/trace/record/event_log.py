# SPDX-License-Identifier: Apache-2.0
"""What a recorder writes: blocks of events, the tables that they speak of, the overview."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.messages import say
from uffdprefetch.trace.file.trace_file import Writer
from uffdprefetch.trace.record.file_registry import FileRegistry
from uffdprefetch.trace.record.overview import Overview

#: Events, and their age, at which a block is written.
BLOCK_EVENTS = 1 << 15
BLOCK_NS = 500_000_000
#: Least period of writing the overview; it grows to 1 / OVERVIEW_SHARE of the run so far, which
#: bounds the sum of all of them.
OVERVIEW_NS = 2_000_000_000
OVERVIEW_SHARE = 4


class EventLog:
    """Of one recording, until the disk is full."""

    def __init__(self, writer: Writer, known: FileRegistry, max_events: int) -> None:
        self._writer, self._known, self._max_events = writer, known, max_events
        self._unwritten: list[Array] = []
        self._unwritten_events = 0
        now = time.monotonic_ns()
        self._overview = Overview(now)
        self._written_ns = now
        self._overview_ns = now + OVERVIEW_NS
        self.kept = 0  # events
        self.raw_until_ns: int | None = None  # None: all are kept
        self.failed: str | None = None

    def add(self, events: Array) -> None:
        """Events under their files' numbers; ``max_events`` are kept as they are."""
        other = self._known.files.is_other(events)
        self._overview.add(events[~other] if other.any() else events)
        room = self._max_events - self.kept
        if len(events) > room:
            if self.raw_until_ns is None:
                last = events["time_ns"][room - 1] if room else events["time_ns"][0]
                self.raw_until_ns = int(last)
            events = events[:room]
        self.kept += len(events)
        self._unwritten.append(events)
        self._unwritten_events += len(events)

    def write(self, now: int) -> None:
        """What is due."""
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
        files = self._known.files.new_files()
        if files:
            self._writer.block("files", [asdict(file) for file in files])
        changed = self._known.processes.changed()
        if changed:
            self._writer.block("processes", changed)
            if self._known.processes.wrapped:
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

    def end(self, totals: dict[str, Any]) -> None:
        """The rest, and the totals."""
        if self.failed:
            return
        try:
            self._flush()
            self._writer.block("overview", self._overview.body())
            self._writer.block("end", totals)
        except OSError as error:
            self._fail(error)
