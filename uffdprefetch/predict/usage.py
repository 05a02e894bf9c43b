# SPDX-License-Identifier: Apache-2.0
"""Was what a prefetcher had read of any use? One that reads mostly for nothing stops. Pure.

Only what is known counts: what its reader has passed, or has left behind for good. What lies ahead
of a reader is no waste yet, however slow it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from uffdprefetch.predict.bulk import MISS_BYTES
from uffdprefetch.predict.window import Storage

MIB = 1 << 20
#: By the last so many bytes that are known a prefetcher is judged: four windows of a reader that
#: has just begun (predict/window.py).
JUDGED_BYTES = 64 * MIB
#: What the first miss of a run brings of it: the kernel reads around it (mm/filemap.c).
RUN_BYTES = MISS_BYTES // 2
#: A miss costs at least so many times what its bytes do in order: the latency of a storage that is
#: seldom idle is measured as less than it is.
LEAST_TIMES = 3
#: Short notes are put together, so that few are remembered.
NOTE_BYTES = MIB


@dataclass(frozen=True)
class Known:
    """What is known of some bytes that a reader has passed: how many were touched, in how many runs
    (each a miss or more, had they not been read before), and how many were not."""

    touched_bytes: int = 0
    untouched_bytes: int = 0
    runs: int = 0

    @property
    def bytes(self) -> int:
        """Of how many."""
        return self.touched_bytes + self.untouched_bytes

    def __add__(self, other: Known) -> Known:
        return Known(
            self.touched_bytes + other.touched_bytes,
            self.untouched_bytes + other.untouched_bytes,
            self.runs + other.runs,
        )

    def __sub__(self, other: Known) -> Known:
        return self + Known(-other.touched_bytes, -other.untouched_bytes, -other.runs)

    def is_wasted(self, storage: Storage) -> bool:
        """Whether most of it was read for nothing: more than half was not touched, and the misses
        would have cost less than to read it all (a reader that skips records gains by that)."""
        if 2 * self.untouched_bytes <= self.bytes:
            return False
        more = max(0, self.touched_bytes - self.runs * RUN_BYTES)
        misses = self.runs + more // MISS_BYTES
        latency_bytes = storage.latency_seconds * storage.bandwidth_bytes_per_second
        return misses * max(latency_bytes + MISS_BYTES, LEAST_TIMES * MISS_BYTES) <= self.bytes


class Usage:
    """The last JUDGED_BYTES of one prefetcher of which it is known whether they were touched.

    While it prefetches, that is of what it has read. While it is stopped, of all that its reader
    passes and that it would have read: so it begins again when that would pay.
    """

    def __init__(self) -> None:
        self._notes: deque[Known] = deque()  # the oldest first
        self.known = Known()
        self.stopped = False

    def note(self, more: Known, storage: Storage) -> bool:
        """So much more is known; whether the prefetcher stops by it."""
        self.known += more
        if self._notes and self._notes[-1].bytes < NOTE_BYTES:
            more += self._notes.pop()
        self._notes.append(more)
        while self.known.bytes - self._notes[0].bytes >= JUDGED_BYTES:
            self.known -= self._notes.popleft()
        before, wasted = self.stopped, self.known.is_wasted(storage)
        self.stopped = wasted and (before or self.known.bytes >= JUDGED_BYTES)
        return self.stopped and not before
