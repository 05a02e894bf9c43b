# SPDX-License-Identifier: Apache-2.0
"""Threads that start at a barrier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def seconds_from_barrier(threads: int, work: Callable[[int], None]) -> float:
    """Seconds from the common start to the end of the last; ``work`` gets each thread's number.

    Raises the first exception that one of them raised, and RuntimeError when a thread cannot be
    started.
    """
    gate = threading.Barrier(threads + 1)
    ends = [0.0] * threads
    failed: list[Exception] = []

    def run(number: int) -> None:
        try:
            gate.wait()
            work(number)
        except Exception as error:
            failed.append(error)
        ends[number] = time.monotonic()

    workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    try:
        for worker in workers:
            worker.start()
    except RuntimeError:
        gate.abort()  # else the started threads would wait for ever
        raise
    gate.wait()
    began = time.monotonic()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]
    return max(1e-9, max(ends) - began)
