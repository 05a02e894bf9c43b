# SPDX-License-Identifier: Apache-2.0
"""A file's part of the node's pool: which of its chunks are there, and who has come to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.predict.checkpoints import DISTANCE_MIN_BYTES
from uffdprefetch.predict.streams import Stream


@dataclass
class PoolFile:
    """One file's part of the pool."""

    pool: uffd_pool.Pool
    number: int
    memfd: int  # read-only: what the jobs map
    chunk_bytes: int
    in_flight: IntervalSet = field(default_factory=IntervalSet)
    faulted_ns: int = 0  # its last fault
    has_active: bool = False  # it may have active chunks

    @cached_property
    def books(self) -> uffd_pool.Books:
        """What is there of it."""
        return self.pool.books(self.number)

    def say_random(self, so: bool) -> None:
        """See FileMappings."""
        self.pool.say_random(self.number, so)

    def touched(self, start: int, end: int) -> bool:
        """Whether a fault has mapped any of [start, end) bytes since it was read."""
        return any(self.books.touched_ms[self._chunks(start, end)])

    def is_mapped(self, start: int, end: int) -> bool:
        """Whether all of [start, end) bytes is there, and was mapped by a fault since it was
        read."""
        touched = self.books.touched_ms[self._chunks(start, end)]
        return not self.absent(start, end) and all(touched)

    def absent(self, start: int, end: int) -> bool:
        """Whether any of [start, end) bytes is not there."""
        return self.absent_chunks(start, end) > 0

    def absent_chunks(self, start: int, end: int) -> int:
        """Of those that [start, end) bytes lie in."""
        state = self.books.state[self._chunks(start, end)].tobytes()
        return len(state) - state.count(uffd_pool.PRESENT)

    def _chunks(self, start: int, end: int) -> slice:
        return slice(start // self.chunk_bytes, -(-end // self.chunk_bytes))

    def come_over(self, stream: Stream, start: int, end: int, forward: int) -> tuple[int, int]:
        """For a touch of [start, end) of which the fault does not tell that its reader has come
        over more: the bytes that it has read since the last one, ``forward`` at the most. Where
        pages of an earlier epoch are still mapped, one page of each cell faults, wherever in it
        that lies (warm/placement.py, _rearm_pool)."""
        low, high = (end - forward, start) if stream.direction > 0 else (end, start + forward)
        near = 0 < forward <= 2 * DISTANCE_MIN_BYTES + end - start
        if not near or not self.is_mapped(low, high):
            return start, end
        return min(low, start), max(high, end)
