# SPDX-License-Identifier: Apache-2.0
"""Whether a process gets the processors that it wants, as the kernel counts it."""

from __future__ import annotations

#: Of the calling thread: nanoseconds on a processor, in a run queue, time slices
#: (Documentation/scheduler/sched-stats.rst; CONFIG_SCHED_INFO).
SCHEDSTAT = "/proc/thread-self/schedstat"


class Shortage:
    """Whether the calling thread waited for a CPU between its looks."""

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._path = path
        self._last = self._counts()

    def _counts(self) -> tuple[int, int]:
        try:
            with open(self._path, "rb") as file:
                ran, waited, *_ = file.read().split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            return 0, 0  # a kernel that does not count: never short

    def look(self) -> bool:
        """Whether it has waited for a processor longer than it ran on one since the last look."""
        (ran, waited), last = self._counts(), self._last
        self._last = ran, waited
        return waited - last[1] > ran - last[0]
