# SPDX-License-Identifier: Apache-2.0
"""Where a process that reads here and there in a file begins next: by the step after such a step.

A reader of every n-th record, or of some columns of each row group, makes the same few steps again
and again. What came after each of its last steps is remembered; how long such a chain holds is a
law of its own (predict/survival.py). Places and steps are in blocks.
"""

from __future__ import annotations

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.predict.storage import Link, least_probability
from uffdprefetch.predict.survival import Law

#: Different steps that are remembered: what a row group of a table has.
STEPS_MAX = 16
#: Places that are told at most.
PLACES_MAX = 64


@dataclass
class Steps:
    """Of one process in one file. ``law``: how many steps such chains go on for."""

    law: Law
    at: int | None = None
    step: int | None = None
    right: int = 0  # steps that were told, one after the other
    _next: dict[int, int] = field(default_factory=dict)  # a step: the one after it

    def begins(self, at: int) -> bool:
        """It begins a stream here; whether that is where its last step has told."""
        if self.at is None:
            self.at = at
            return True
        step, was_right = at - self.at, True
        told = self._next.get(self.step) if self.step is not None else None
        # records of unequal length begin in the block before or after
        if told is not None and abs(step - told) <= 1:
            step = told
            self.right += 1
            self.law.passed(self.right, self.right + 1)
        elif self.right:
            self.law.died(self.right)
            self.right, was_right = 0, False
        if self.step is not None:
            self._next[self.step] = step
            if len(self._next) > STEPS_MAX:
                del self._next[next(iter(self._next))]
        self.at, self.step = at, step
        return was_right

    def places(self, blocks: int, block_bytes: int, ahead_bytes: float, link: Link) -> list[int]:
        """Where it begins next, of which ``blocks`` are worth reading at each; no more than lie
        within ``ahead_bytes`` of reading."""
        if not self.right or self.at is None or self.step is None:
            return []
        size = blocks * block_bytes
        gain = link.latency_seconds / link.stream_seconds(size)
        most = min(PLACES_MAX, max(1, int(ahead_bytes / size)))
        number = self.law.window(self.right, least_probability(gain, link, 1.0), most)
        found, at, step = list[int](), self.at, self.step
        for _ in range(number):
            after = self._next.get(step)
            if after is None:
                break
            at, step = at + after, after
            found.append(at)
        return found
