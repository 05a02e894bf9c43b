# SPDX-License-Identifier: Apache-2.0
"""Whether it pays to read ahead in a known order: on fast storage a reader's own misses may cost
less than deciding what comes next. Pure.

Nothing is lost there as by a guess (predict/storage.py): what is read is needed. What it takes is
CPU time, which may be the job's. What it saves is what the reader did not have in memory yet: where
it reads faster than the service follows, its own misses come first, and nothing is saved.
"""

from __future__ import annotations

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.predict.bounds import CPU_PART
from uffdprefetch.predict.order.guard import SAMPLE_BYTES, SAMPLES
from uffdprefetch.predict.storage import MISS_BYTES
from uffdprefetch.predict.streams import Feedback


@dataclass
class AskedInOrder:
    """What was asked for in all orders of a service, and answered: each has as large a part of the
    service's CPU time."""

    asked_bytes: int = 0


@dataclass
class OrderWorth(Feedback):
    """Of one order. CPU times are those of the service's thread: what its workers take the reader
    would take itself, to fill the page cache."""

    of_all: AskedInOrder = field(default_factory=AskedInOrder)
    until_ns: int = 0  # its reader is left to itself; 0: it is not
    _asked_bytes: int = 0  # since the trial began ...
    _saved_misses: float = 0.0
    _began: tuple[int, int, int] | None = None  # ... when, at which CPU time, of_all.asked_bytes
    _miss_seconds: float = 0.0  # the least that was seen, as others stand before some; 0: none was

    def came(self, asked_bytes: int, brought_bytes: int, seconds: float) -> None:
        """See Feedback."""
        self._asked_bytes += asked_bytes
        self.of_all.asked_bytes += asked_bytes
        if not brought_bytes:
            return
        misses = max(1.0, brought_bytes / MISS_BYTES)
        self._saved_misses += misses
        if brought_bytes == asked_bytes:  # else it may have been under way for its reader
            self._miss_seconds = min(self._miss_seconds or seconds, seconds / misses)

    def leaves_alone(self, now_ns: int, cpu_ns: int) -> bool:
        """Whether the reader is left to itself now: what it was told to need last, as much as a
        wrong order may cost, has saved less time than it took. So it is tried now and then only."""
        if now_ns < self.until_ns:
            return True
        if self._began is None or self.until_ns:
            self._begin(now_ns, cpu_ns)
            return False
        if self._asked_bytes < SAMPLES * SAMPLE_BYTES:
            return False
        began_ns, began_cpu_ns, asked_before = self._began
        share = self._asked_bytes / (self.of_all.asked_bytes - asked_before)
        took = (cpu_ns - began_cpu_ns) / 1e9 * share
        told = bool(self._miss_seconds) or not self._saved_misses
        pays = not told or self._saved_misses * self._miss_seconds >= took
        self._begin(now_ns, cpu_ns)
        if not pays:
            self.until_ns = now_ns + CPU_PART * (now_ns - began_ns)
        return not pays

    def _begin(self, now_ns: int, cpu_ns: int) -> None:
        """Another trial."""
        self._began = now_ns, cpu_ns, self.of_all.asked_bytes
        self._asked_bytes, self._saved_misses, self.until_ns = 0, 0.0, 0
