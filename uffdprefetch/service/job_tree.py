# SPDX-License-Identifier: Apache-2.0
"""Which processes a job consists of: short ones, too, of which no agent tells."""

from __future__ import annotations

from dataclasses import dataclass

from uffdprefetch.base.clock import CLOCK, MS, Clock
from uffdprefetch.base.procfs import descendants
from uffdprefetch.predict.bounds import CPU_PART
from uffdprefetch.sense.pagetable_scan import LOOK_SLOWEST_NS, LOOKS

#: A process that reads for a tenth of a second is found in its first tenth.
LOOK_NS = 10 * MS


@dataclass
class JobTree:
    """Of one run."""

    clock: Clock = CLOCK
    due_ns: int = 0
    _pids: frozenset[int] = frozenset()
    _changed_ns: int = 0

    def look(self, jobs: list[int], now_ns: int) -> tuple[frozenset[int], frozenset[int]]:
        """Those that have come and those that have gone since the last look, if one is due: the
        longer none has, the rarer. ``jobs``: pids of the commands that launchers run."""
        if now_ns < self.due_ns:
            return frozenset(), frozenset()
        began = self.clock.cpu_ns()
        before, self._pids = self._pids, frozenset(pid for job in jobs for pid in descendants(job))
        if self._pids != before:
            self._changed_ns = now_ns
        quiet_ns = (now_ns - self._changed_ns) // LOOKS
        wait_ns = max(LOOK_NS, min(LOOK_SLOWEST_NS, quiet_ns))
        self.due_ns = now_ns + max(wait_ns, CPU_PART * (self.clock.cpu_ns() - began))
        return self._pids - before, before - self._pids
