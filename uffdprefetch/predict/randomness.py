# SPDX-License-Identifier: Apache-2.0
"""Does a reader go in order or jump about? From where its touches lie, one after the other.

Nearness makes streams (predict/streams.py); in a file of a few hundred MiB any two touches lie
within the reach of one stream, and a random reader looks like a few fast ones. Here a touch is *in
order* when it lies next to one of the last touches, or when what was passed over to come there was
read, too; else it is a *jump*. A reader that jumps may still walk in large steps, forward or
backward: then its jumps have a trend (the test of Mann and Kendall, [Kendall]), also where several
walk at a time or begin again. What one look has found at once comes in the order of the file: such
touches are ties, and two looks are compared.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from enum import Enum
from math import sqrt

from uffdprefetch.base.units import MIB
from uffdprefetch.predict.bounds import LATELY_COUNT

#: So many jumps among them make a reader one that jumps about: a record of 192 KiB is one jump and
#: up to three touches in order. Where of the later half half as many are jumps it goes in order by
#: now.
JUMPS_RANDOM = 16
#: The last touches: next to them is in order, and two thirds of them in order show a stream. No
#: more are kept of one scan, spread evenly over it.
RECENT = 16
#: Next to: closer than this, and runs of one look so near are one touch. Kernel fault-around and
#: readahead, pages that a B-tree skips, records that a few ranks skip; ...
NEAR_BYTES = MIB
#: ... in a small file closer than this part of it: of random touches one in eight is near the last.
NEAR_SHARE = 256
#: Standard deviations from chance that are a trend: random readers, which are judged again and
#: again, show one in 1 of 10^6 cases. Half as many leave it open.
TREND = 5.0
#: One part in this many of what was passed over must have been read, for a touch to be in order.
PASSED_SHARE = 8
#: A reader is judged again every EVERY touches.
EVERY = 8
#: (ns, where in bytes, whether it is in order, number).
Touch = tuple[int, int, bool, int]


class Access(Enum):
    """How a reader goes through a file, as far as its touches show."""

    UNKNOWN = "unknown"
    WALKS = "walks"
    JUMPS = "jumps"


def trend(touches: Iterable[tuple[int, int]]) -> float:
    """How far (ns, offset in bytes), in order of time, go one way, in standard deviations from what
    chance gives: Kendall's S of all pairs of different times; below 0: backward."""
    batches: dict[int, list[int]] = {}
    for at_ns, start in touches:
        batches.setdefault(at_ns, []).append(start)
    before, score = list[int](), 0
    for batch in batches.values():
        for start in batch:
            score += bisect_left(before, start) + bisect_right(before, start) - len(before)
        before = sorted(before + batch)
    variance = _variance(len(before)) - sum(_variance(len(batch)) for batch in batches.values())
    return score / sqrt(variance) if variance else 0.0


def _variance(count: int) -> float:
    """Of S of so many in random order; less that of each tie, where there are some."""
    return count * (count - 1) * (2 * count + 5) / 18


class RandomnessDetector:
    """The touches of one reader (a process) of one file."""

    def __init__(self, file_bytes: int) -> None:
        self._near_bytes = min(NEAR_BYTES, file_bytes // NEAR_SHARE)
        self._last: deque[tuple[int, int]] = deque(maxlen=RECENT)  # (start, end)
        self._touches: deque[Touch] = deque(maxlen=LATELY_COUNT)
        self._together = (0, 1)  # of the last time: how many are remembered, and each which one
        self.count = 0
        self.access = Access.UNKNOWN
        self.in_order = True  # the last touch
        #: While it jumps about: jumps since, and when it began.
        self.jumps = self.since_ns = 0

    def saw(self, start: int, end: int, at_ns: int, passed_over: bool = False) -> None:
        """A touch of [start, end) bytes; those with one ``at_ns`` were seen together.
        ``passed_over``: what lies between it and the stream's last touch was read, too."""
        near = any(a - self._near_bytes <= start <= b + self._near_bytes for a, b in self._last)
        self.in_order = passed_over or near or not self._last
        if self._last:  # the first one is next to nothing
            self._remember(at_ns, start, self.in_order)
        self._last.append((start, end))
        self.count += 1
        self.jumps += 1
        if self.count % EVERY == 0:
            self._judge()

    def _remember(self, at_ns: int, start: int, in_order: bool) -> None:
        touches, (kept, step) = self._touches, self._together
        if not touches or touches[-1][0] != at_ns:
            kept, step = 0, 1
        elif (self.count - touches[-kept][3]) % step:
            return
        if kept == RECENT:
            last = [touches.pop() for _ in range(kept)]
            touches.extend(last[-1::-2])
            kept, step = kept // 2, 2 * step
        touches.append((at_ns, start, in_order, self.count))
        self._together = kept + 1, step

    @property
    def last(self) -> tuple[int, int]:
        """[start, end) of the last touch."""
        return self._last[-1] if self._last else (0, 0)

    def jumped(self) -> tuple[int, int]:
        """(touches that were not in order, ns of the oldest touch) as far back as it remembers."""
        jumps = sum(not touch[2] for touch in self._touches)
        oldest_ns, *_, number = self._touches[0]
        return jumps * (self.count - number) // len(self._touches), oldest_ns

    def _judge(self) -> None:
        before, touches = self.access, list(self._touches)
        jumps = [touch[:2] for touch in touches if not touch[2]]
        deviations = abs(trend(jumps))
        if self._jumps_about(touches, len(jumps), deviations):
            self.access = Access.JUMPS
            if before is not Access.JUMPS:
                self.jumps, self.since_ns = self.jumped()
        elif self.count > RECENT and (deviations >= TREND or self._goes_on(touches[-RECENT:])):
            self.access = Access.WALKS  # next to no random reader ever does
        else:
            self.access = Access.UNKNOWN

    def _jumps_about(self, touches: list[Touch], jumps: int, deviations: float) -> bool:
        later = touches[-LATELY_COUNT // 2 :]
        if sum(not touch[2] for touch in later) <= JUMPS_RANDOM // 4:
            return False
        if self.access is Access.JUMPS:
            return deviations < TREND
        return jumps >= JUMPS_RANDOM and deviations < TREND / 2

    @staticmethod
    def _goes_on(touches: list[Touch]) -> bool:
        """Whether these are in order, most of them."""
        return 3 * sum(touch[2] for touch in touches) >= 2 * len(touches)
