# SPDX-License-Identifier: Apache-2.0
"""A file's part of the node's pool: which of its chunks are there, and who has come to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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
    state: npt.NDArray[np.uint8]
    touched_ms: npt.NDArray[np.uint32]
    kept: npt.NDArray[np.uint8]  # for other nodes: what is HELD is no choice of a policy's
    refaults: npt.NDArray[np.uint8]  # the working set's books: pool/workingset.py
    left: npt.NDArray[np.uint32]
    in_flight: IntervalSet = field(default_factory=IntervalSet)
    faulted_ns: int = 0  # its last fault
    has_active: bool = False  # it may have active chunks

    def touched(self, start: int, end: int) -> bool:
        """Whether a fault has mapped any of [start, end) bytes since it was read."""
        chunks = self.touched_ms[start // self.chunk_bytes : -(-end // self.chunk_bytes)]
        return bool(chunks.any())

    def is_mapped(self, start: int, end: int) -> bool:
        """Whether all of [start, end) bytes is there, and was mapped by a fault since it was
        read."""
        chunks = slice(start // self.chunk_bytes, -(-end // self.chunk_bytes))
        there = self.state[chunks] == uffd_pool.PRESENT
        return bool(there.all() and self.touched_ms[chunks].all())

    def absent(self, start: int, end: int) -> bool:
        """Whether any of [start, end) bytes is not there."""
        chunks = self.state[start // self.chunk_bytes : -(-end // self.chunk_bytes)]
        return bool((chunks != uffd_pool.PRESENT).any())

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
