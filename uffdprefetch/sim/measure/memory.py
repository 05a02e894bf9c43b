# SPDX-License-Identifier: Apache-2.0
"""Memory bandwidth: threads read disjoint parts, as STREAM does ([HDMLP] section 5.1.1)."""

from __future__ import annotations

import numpy as np

from uffdprefetch.sim.measure.barrier import seconds_from_barrier

MB = 1e6
#: Bytes read by each thread: many times the last-level cache.
PART_BYTES = 64 << 20


class MemoryBenchmark:
    """Reads of memory that is larger than the caches."""

    def __init__(self, most_threads: int) -> None:
        self.parts = [np.ones(PART_BYTES // 8) for _ in range(most_threads)]

    def run(self, threads: int) -> float:
        """MB/s of one run."""

        def read(number: int) -> None:
            # numpy releases the GIL while it reduces.
            np.maximum.reduce(self.parts[number])

        return threads * PART_BYTES / MB / seconds_from_barrier(threads, read)
