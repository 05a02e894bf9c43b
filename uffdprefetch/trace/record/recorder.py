# SPDX-License-Identifier: Apache-2.0
"""The recorder: takes what the kernel and our service report, and keeps it in a trace file.

A process of its own (``uffdprefetch record``, started by ``trace`` and ``wrap --trace``): neither
the job nor the service waits for it. Killed, it leaves what it had written; when the disk is full
it says so once and lets go.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.file.trace_file import Writer
from uffdprefetch.trace.record.event_log import EventLog
from uffdprefetch.trace.record.file_registry import FileRegistry
from uffdprefetch.trace.record.kernel_tracer import KernelTracer
from uffdprefetch.trace.record.process_identity import TraceLimits
from uffdprefetch.trace.record.service_messages import ServiceMessages

#: The last turns end with one of at most this many events (other programs go on making some), or at
#: this time limit, which fits twice into the starter's (starter.END_SECONDS).
FEW_EVENTS, DRAIN_SECONDS = 500, 5.0


class Recorder:
    """Turns of: take, name, count, write. One thread calls everything."""

    def __init__(self, writer: Writer, limits: TraceLimits, witness: KernelTracer | None) -> None:
        self._witness = witness
        self.known = FileRegistry(limits, witness)
        self._service = ServiceMessages(self.known, witness)
        self._log = EventLog(writer, self.known, limits.max_events)
        self.events_seen = 0

    @property
    def failed(self) -> str | None:
        """Why nothing is written any more, for people."""
        return self._log.failed

    def turn(self, messages: Sequence[bytes]) -> int:
        """Take what has come, from the kernel and in ``messages`` of the service; how many."""
        parts = [part for message in messages for part in self._service.take(message)]
        if self._witness is not None:
            # paths last: what the events speak of has been opened before
            events, new = self._witness.drain()
            parts += self.known.take(events, new, self._witness.opened())
        return self._take([part for part in parts if len(part)])

    def _take(self, parts: list[Array]) -> int:
        count = sum(len(part) for part in parts)
        if count:
            events = self.known.files.settle(np.concatenate(parts))
            self.events_seen += len(events)
            self._log.add(events)
        self._log.write(time.monotonic_ns())
        return count

    def _drain(self) -> None:
        """Take all that waits: a turn takes a part of what a busy machine has kept us from."""
        until = time.monotonic() + DRAIN_SECONDS
        while self.turn(()) > FEW_EVENTS and time.monotonic() < until:
            pass

    def adopt(self, pid: int) -> None:
        """Record a process that runs already."""
        self._take([part for part in self.known.adopt(pid) if len(part)])

    def finish(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Take what is left, write the end; the totals that stand there."""
        if self._witness is not None:
            self._drain()
            last = self._witness.stop()
            self._drain()
            late = self.known.files.name_late(at_the_end=True)
            self._take([self.known.mappings.locate(last), *late])
        totals = {
            "ended_ns": time.monotonic_ns(),
            "events_seen": self.events_seen,
            "events_kept": self._log.kept,
            "lost_events": (self._witness.lost() if self._witness else 0) + self._service.lost,
            "raw_until_ns": self._log.raw_until_ns,
            "recorder_cpu_seconds": round(time.process_time(), 3),
            **extra,
        }
        self._log.end(totals)
        return totals
