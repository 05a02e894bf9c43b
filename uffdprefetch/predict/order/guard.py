# SPDX-License-Identifier: Apache-2.0
"""Is what is prefetched for an order read, and does its reader come on? The one trial of an order
that the job itself announces: its indices are compared in the job, one by one (job/hook.py), but
where their records are may be wrong, or read from elsewhere. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from uffdprefetch.base.units import MIB

#: One range of what was handed out is watched for each of these bytes of the order, ...
SAMPLE_BYTES = 256 << 10
#: ... and so many are judged together: those of 64 MiB, what a wrong order may cost.
SAMPLES = 256
#: An order is wrong where less than this part of them was touched. What lies between two records
#: and is prefetched with them need not be: half of it at the most.
TOUCHED_PART = 0.25
#: ... while its readers were seen to read at least this: nobody reads, or nothing is seen where the
#: pages leave the page table at once. And wrong is one whose readers were seen to read as much, and
#: all that is prefetched for it, while its position stood still.
READ_BYTES = 16 * MIB


class OrderGuard:
    """Offsets in bytes of the file, ``need`` and positions in those of the order, times in ns."""

    def __init__(self, now_ns: int = 0) -> None:
        self._moved_ns = now_ns
        self._ahead: deque[tuple[int, int, int]] = deque()  # (need, start, end)
        self._behind: deque[tuple[int, int, int]] = deque()  # (passed when, start, end)
        self._next_need = 0
        self._judged = self._touched = self._read_bytes = 0
        self._position = self._sent = self._stood_bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether there is anything to judge."""
        return bool(self._behind)

    @property
    def stands_still(self) -> str | None:
        """Why the order is wrong if its reader is not known to be near its end; None: it is not."""
        ahead_bytes = max(0, self._sent - self._position)
        if self._stood_bytes < ahead_bytes + READ_BYTES:
            return None
        return f"{self._stood_bytes / MIB:.0f} MiB were read, and none of it was next in the order"

    def handed(self, start: int, end: int, need: int) -> None:
        """[start, end) is prefetched, for the reader's coming to ``need``."""
        self._sent = max(self._sent, need + end - start)
        while start < end and need + end - start > self._next_need:
            skipped = max(0, self._next_need - need)
            start, need = start + skipped, need + skipped
            self._ahead.append((need, start, min(end, start + SAMPLE_BYTES)))
            self._next_need = need + SAMPLE_BYTES

    def found(self, read_bytes: int) -> None:
        """So much was touched now."""
        self._read_bytes += read_bytes
        self._stood_bytes += read_bytes

    def scanned(self, read_bytes: int, since_ns: int) -> None:
        """So much was newly found in a page table, and touched since then."""
        self._read_bytes += read_bytes
        if self._moved_ns <= since_ns:
            self._stood_bytes += read_bytes

    def passed(self, position: int, now_ns: int) -> None:
        """The reader is there."""
        if position > self._position:
            self._position, self._moved_ns, self._stood_bytes = position, now_ns, 0
        while self._ahead and self._ahead[0][0] < position:
            self._behind.append((now_ns, *self._ahead.popleft()[1:]))

    def unmapped(self) -> None:
        """A mapping has gone, with what its page table told: what was passed and is not judged yet
        cannot be judged any more."""
        self._behind.clear()

    def judge(self, known_ns: int, touched: Callable[[int, int], bool]) -> str | None:
        """What was touched before ``known_ns`` is known, and ``touched`` tells of any part of a
        range. None, or why the order is wrong."""
        while self._behind and self._behind[0][0] <= known_ns:
            _, start, end = self._behind.popleft()
            self._judged += 1
            self._touched += touched(start, end)
        if self._judged < SAMPLES:
            return None
        found, judged, read_bytes = self._touched, self._judged, self._read_bytes
        self._judged = self._touched = self._read_bytes = 0
        if found >= TOUCHED_PART * judged or read_bytes < READ_BYTES:
            return None
        return (
            f"{found} of {judged} ranges that were prefetched for it were touched, and"
            f" {read_bytes / MIB:.0f} MiB were read"
        )
