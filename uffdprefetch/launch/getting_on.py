# SPDX-License-Identifier: Apache-2.0
"""Whether a service that is not up gets on with its start, from outside: a job that is over waits
for no other."""

from __future__ import annotations

import time

#: Time in which one that is awaited has to get on.
STANDS_SECONDS = 1.0
#: Processor time that it has to have in that. A start takes 0.08 s of it and more: with as little
#: it is up in eight seconds, of the ten that there are (service.START_TIMEOUT_SECONDS).
LEAST_NS = 10_000_000


class GettingOn:
    """Of one process, from now on. ``pid`` 0: it is in no namespace that we see, and stands."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._had_ns, self._since = _processor_ns(pid), time.monotonic()

    def stands(self) -> bool:
        """Whether it has stood still for STANDS_SECONDS; to be asked more often than that."""
        now = time.monotonic()
        if now < self._since + STANDS_SECONDS:
            return False
        had_ns = _processor_ns(self._pid)
        if had_ns < self._had_ns + LEAST_NS:
            return True
        self._had_ns, self._since = had_ns, now
        return False


def _processor_ns(pid: int) -> int:
    """What its first thread has had; 0: not known."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
