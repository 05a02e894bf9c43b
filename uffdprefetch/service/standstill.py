# SPDX-License-Identifier: Apache-2.0
"""How long the service has stood still: neither computed nor waited for what was due.

It is stopped (SIGSTOP, a debugger, a frozen control group), gets no CPU, or waits for a file system
in its own thread. The job goes on meanwhile, and nothing is read ahead for it.
"""

from __future__ import annotations

from uffdprefetch.base.clock import CLOCK, MS, Clock

#: What is shorter is a busy machine's. Of a longer one the wait that it began in is not seen, a
#: second at most: housekeeping is due by then.
LEAST_NS = 1000 * MS


class Standstill:
    """Of one thread's loop; ``ns``: in all."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._then, self._cpu = clock.now_ns(), clock.cpu_ns()
        self.ns = 0

    def waited(self, at_most_ns: int) -> None:
        """Call after each wait of the loop, with the longest that it was to take."""
        now, cpu = self._clock.now_ns(), self._clock.cpu_ns()
        still = now - self._then - at_most_ns - (cpu - self._cpu)
        if still >= LEAST_NS:
            self.ns += still
        self._then, self._cpu = now, cpu
