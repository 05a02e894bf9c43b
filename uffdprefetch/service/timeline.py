# SPDX-License-Identifier: Apache-2.0
"""What was read, windows and rates, noted on the ledger's time line."""

from __future__ import annotations

from uffdprefetch.base.clock import MS
from uffdprefetch.service.mappings import ManagedMappings
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.windows import Windows

#: Interval at which the time line is added to.
NOTE_NS = 10 * MS
#: Streams that have gone on since then are shown, if any has.
MOVING_NS = 1000 * MS


class TimelineNotes:
    """Of one run."""

    def __init__(
        self, ledger: Ledger, scheduler: Scheduler, mappings: ManagedMappings, windows: Windows
    ) -> None:
        self._ledger, self._scheduler = ledger, scheduler
        self._mappings, self._windows = mappings, windows
        self._noted_ns = 0
        self._noted_bytes = 0  # of the scheduler's

    def step(self, now: int) -> None:
        """Once a turn."""
        if now - self._noted_ns >= NOTE_NS:
            self.note(now)

    def note(self, now: int) -> None:
        """As it is now."""
        self._noted_ns = now
        seconds = max(0.0, now / 1e9 - self._ledger.started)
        more = self._scheduler.results.prefetched_bytes - self._noted_bytes
        if more:
            self._ledger.timeline.at(seconds).prefetched_bytes += more
            self._noted_bytes += more
        streams = [s for reader in self._mappings.readers() for s in reader.table.active()]
        if not streams:
            return
        streams = [s for s in streams if now - s.last_ns < MOVING_NS] or streams[:1]
        bin_ = self._ledger.timeline.at(seconds)
        widest = max(streams, key=lambda s: s.rate_bytes_per_second)
        bin_.window_bytes = self._windows.shown_bytes(widest)
        bin_.distance_bytes = self._windows.of(widest).step_bytes
        bin_.under_way_bytes = self._scheduler.under_way_bytes
        bin_.bandwidth_bytes_per_second = round(self._scheduler.meter.busy.bandwidth)
        bin_.reader_bytes_per_second = round(sum(s.rate_bytes_per_second for s in streams))
