# SPDX-License-Identifier: Apache-2.0
"""The clock passed to the service's parts: the machine's, a simulation's, or a test's."""

from __future__ import annotations

import time
from collections.abc import Callable

MS = 1_000_000


class Clock:
    """``now_ns``: CLOCK_MONOTONIC, as all times in the service and in the agents' events;
    ``cpu_ns``: CPU time of the calling thread, by which sensors limit their overhead."""

    def __init__(
        self,
        now_ns: Callable[[], int] = time.monotonic_ns,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self.now_ns, self.cpu_ns = now_ns, cpu_ns


#: The machine's clock.
CLOCK = Clock()
