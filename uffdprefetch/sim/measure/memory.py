# SPDX-License-Identifier: Apache-2.0
"""Memory read by threads, each its own part (as STREAM does, paper 5 section 5.1.1)."""

from __future__ import annotations

import threading
import time

import numpy as np

from uffdprefetch.sim.measure.bounds import Budget

MB = 1e6
#: By each thread: many times the last cache level.
PART_BYTES = 64 << 20


class Memory:
    """Reads of memory that is larger than the caches."""

    def __init__(self, most_threads: int) -> None:
        self.parts = [np.ones(PART_BYTES // 8) for _ in range(most_threads)]

    def run(self, threads: int, budget: Budget) -> float | None:
        """MB/s of one run; None when the budget is used up."""
        if not budget.take(threads * PART_BYTES):
            return None
        gate = threading.Barrier(threads + 1)
        ends = [0.0] * threads

        def read(number: int) -> None:
            gate.wait()
            # numpy releases the interpreter's lock while it reduces.
            np.maximum.reduce(self.parts[number])
            ends[number] = time.monotonic()

        workers = [threading.Thread(target=read, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        gate.wait()
        began = time.monotonic()
        for worker in workers:
            worker.join()
        return threads * PART_BYTES / MB / max(1e-9, max(ends) - began)
