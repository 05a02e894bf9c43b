# SPDX-License-Identifier: Apache-2.0
"""Whether the bytes prefetched for an order are read, and whether its reader advances. This is the
only trial of an order that the job announces: the job compares the indices one by one
(job/hook.py), but their records' places may be wrong, or read from elsewhere. Pure.

Why not the account of guesses (predict/storage.py)? That bounds what may be lost and lets a guess
go on; an order is right or wrong, and a wrong one is dropped for good, with its reason told. A
right one is followed from its beginning, without a bound that it must earn, and what lies between
its records is no loss. It is also known to be wrong where its reader stands still: the account sees
no positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from uffdprefetch.base.units import MIB
from uffdprefetch.predict.sequences import AGREE
from uffdprefetch.predict.storage import UNDER_WAY_BYTES

#: Sampling interval: one issued range is watched per 256 KiB of the order.
SAMPLE_BYTES = 256 << 10
#: Samples per verdict: those of 64 MiB, which is what a wrong order may cost.
SAMPLES = 256
#: Share of touched samples below which an order is wrong. Gaps between records are prefetched, too,
#: at most as many bytes again, and need not be touched.
TOUCHED_PART = 0.25
#: Least bytes observed before a verdict: without readers, or where pages leave the page table at
#: once, little is seen. Also the bytes, beyond those prefetched ahead, that may be read while the
#: position stands still.
READ_BYTES = UNDER_WAY_BYTES


class OrderGuard:
    """Offsets in bytes of the file, ``need`` and positions in those of the order, times in ns."""

    def __init__(self, now_ns: int = 0) -> None:
        self._moved_ns = now_ns
        self._ahead: deque[tuple[int, int, int]] = deque()  # (need, start, end)
        self._behind: deque[tuple[int, int, int]] = deque()  # (passed when, start, end)
        self._next_need = 0
        self._judged = self._touched = self._read_bytes = 0
        self._position = self._sent = self._stood_bytes = self._stood_times = 0

    @property
    def has_samples(self) -> bool:
        """Whether there are samples to judge."""
        return bool(self._behind)

    @property
    def stands_still(self) -> str | None:
        """Why the order is wrong if its reader is not known to be near its end; None: it is not. A
        single look finds all that a fast reader has gone on by, and that may be much."""
        ahead_bytes = max(0, self._sent - self._position)
        if self._stood_times < AGREE or self._stood_bytes < ahead_bytes + READ_BYTES:
            return None
        return f"{self._stood_bytes / MIB:.0f} MiB were read, and none of it was next in the order"

    def on_issued(self, start: int, end: int, need: int) -> None:
        """[start, end) was issued, for when the reader comes to ``need``."""
        self._sent = max(self._sent, need + end - start)
        while start < end and need + end - start > self._next_need:
            skipped = max(0, self._next_need - need)
            start, need = start + skipped, need + skipped
            self._ahead.append((need, start, min(end, start + SAMPLE_BYTES)))
            self._next_need = need + SAMPLE_BYTES

    def on_touched(self, read_bytes: int) -> None:
        """``read_bytes`` were touched now."""
        self._read_bytes += read_bytes
        self._stand(read_bytes)

    def scanned(self, read_bytes: int, since_ns: int) -> None:
        """``read_bytes`` were new in a page table, touched since ``since_ns``."""
        self._read_bytes += read_bytes
        if self._moved_ns <= since_ns:
            self._stand(read_bytes)

    def _stand(self, read_bytes: int) -> None:
        self._stood_bytes += read_bytes
        self._stood_times += 1

    def on_position(self, position: int, now_ns: int) -> None:
        """The reader has come to ``position``."""
        if position > self._position:
            self._position, self._moved_ns = position, now_ns
            self._stood_bytes = self._stood_times = 0
        while self._ahead and self._ahead[0][0] < position:
            self._behind.append((now_ns, *self._ahead.popleft()[1:]))

    def unmapped(self) -> None:
        """A mapping has gone, and its page table with it: passed samples cannot be judged any
        more."""
        self._behind.clear()

    def judge(self, known_ns: int, touched: Callable[[int, int], bool]) -> str | None:
        """Judge samples passed until ``known_ns``, to which touches are known; ``touched`` tells of
        any part of a range. None, or why the order is wrong."""
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
