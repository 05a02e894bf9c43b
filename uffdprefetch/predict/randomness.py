# SPDX-License-Identifier: Apache-2.0
"""Does a reader go in order or jump about? From where its touches lie, one after the other.

Streams (predict/streams.py) find walks; in a file of a few hundred MiB any two touches lie within
the reach of one walk, and a random reader looks like a few fast ones. Here a touch is *in order*
when it lies next to one of the last touches, or when what was passed over to come there was read,
too; else it is a *jump*. A reader that jumps may still walk in large steps, forward or backward:
then its longest run in the other direction is short. Of n random jumps the longest monotone runs
are both about 2 sqrt(n) long (Ulam's problem; Vershik and Kerov, Logan and Shepp 1977). What one
look has found at once comes in the order of the file; there two looks are compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from itertools import pairwise, starmap
from math import comb, log2
from operator import mul

from uffdprefetch.base.units import MIB
from uffdprefetch.predict.sequences import longest_monotone_length

#: Window of touches that is judged.
TOUCHES = 64
#: So many jumps among them make a reader one that jumps about: a record of 192 KiB is one jump and
#: up to three touches in order.
JUMPS_RANDOM = 16
#: So few in the later half end it.
JUMPS_ORDERLY = 3
#: For trust, which is lent and taken back sooner.
RECENT = 16
#: Next to: closer than this, or than this part of a small file. Kernel fault-around and readahead,
#: records that a few ranks skip.
NEAR_BYTES = MIB
NEAR_LEAST_BYTES = 256 << 10
NEAR_SHARE = 256
#: Both longest runs at least this: chance gives 4 or more of 32 touches that were seen six at a
#: time, 10 or more of 64 seen singly (1 % quantiles); one walk gives 1, and 1 for each new epoch.
RUNS_RANDOM = 4
#: The order of the jumps may be judged from so many of them on, ...
TRUST_TOUCHES = 5
#: ... seen at so many different times, ...
TRUST_TIMES = 3
#: ... no more than so many at one.
TOGETHER = 2
#: Of a walk one in so many jumps may go the other way: an LMDB's leaf page.
UNLESS = 6
#: ... of a reader that has jumped about: it has to show twice as much.
UNLESS_RANDOM = 12
#: Most touches kept of one scan, spread evenly over it.
TOGETHER_MAX = 16
#: Two scans of at least MIXED_LEAST jumps each decide alone: of a random reader's pairs of touches
#: between this part and the rest of 1 goes back (2 x 8 of them: in nine cases of ten), of a walk's
#: none or all.
MIXED_LEAST = 8
MIXED_SHARE = 0.25
#: Evidence, in bits, for a walk: that what one scan saw lies beyond what the scans before saw would
#: by chance have this probability. BACK_SHARE of it may lie before (tree pages, pages seen late).
SURE_BITS = 30.0
BACK_SHARE = 0.2
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


def in_batches(touches: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Touches (ns, offset in bytes) in order of time; those of one time are a batch."""
    batches: dict[int, list[int]] = {}
    for at_ns, start in touches:
        batches.setdefault(at_ns, []).append(start)
    return list(batches.values())


def both_runs(touches: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(the shorter one of the longest rising and falling runs, number of batches)."""
    batches = in_batches(touches)
    return min(longest_monotone_length(batches, sign) for sign in (1, -1)), len(batches)


def _back(earlier: list[int], later: list[int]) -> float:
    """Which part of the pairs of touches go back, from one batch to the next."""
    back = sum(a > b for a in earlier for b in later)
    return back / (len(earlier) * len(later))


def mixed(touches: Iterable[tuple[int, int]]) -> bool:
    """Whether a batch of many, as a rule, lies all over where the one before lay."""
    batches = [batch for batch in in_batches(touches) if len(batch) >= MIXED_LEAST]
    found = [MIXED_SHARE < _back(a, b) < 1 - MIXED_SHARE for a, b in pairwise(batches)]
    return 2 * sum(found) > len(found)


def one_way(touches: Iterable[tuple[int, int]]) -> bool:
    """Whether the batches lie one beyond the other, surely by no chance: m and n random touches do
    in 2 of (m + n)! / (m! n!) cases. The last batch may still grow, so it counts for nothing."""
    batches = in_batches(touches)[:-1]
    sure = [log2(comb(len(a) + len(b), len(b))) for a, b in pairwise(batches)]
    if sum(sure) < SURE_BITS:
        return False
    back = sum(map(mul, sure, starmap(_back, pairwise(batches)))) / sum(sure)
    return not BACK_SHARE < back < 1 - BACK_SHARE


class RandomnessDetector:
    """The touches of one reader (a process) of one file."""

    def __init__(self, file_bytes: int) -> None:
        self._near_bytes = min(NEAR_BYTES, max(NEAR_LEAST_BYTES, file_bytes // NEAR_SHARE))
        self._last: deque[tuple[int, int]] = deque(maxlen=RECENT)  # (start, end)
        self._touches: deque[Touch] = deque(maxlen=TOUCHES)
        self._together = (0, 1)  # of the last time: how many are remembered, and each which one
        self.count = 0
        self.access = Access.UNKNOWN
        self.in_order = True  # the last touch
        #: While it jumps about: jumps since, and when it began.
        self.jumps = self.since_ns = 0

    def saw(self, start: int, end: int, at_ns: int, passed_over: bool = False) -> None:
        """A touch of [start, end) bytes; those with one ``at_ns`` were seen together.
        ``passed_over``: what lies between it and the walk's last touch was read, too."""
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
        if kept == TOGETHER_MAX:
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
        before = self.access
        if self._jumps_about():
            self.access = Access.JUMPS
            if before is not Access.JUMPS:
                self.jumps, self.since_ns = self.jumped()
        elif self.count > RECENT and self._walks():
            self.access = Access.WALKS  # next to no random reader ever does
        else:
            self.access = Access.UNKNOWN

    def _jumps_about(self) -> bool:
        touches = list(self._touches)
        jumps = [touch[:2] for touch in touches if not touch[2]]
        if self.access is Access.JUMPS:
            later = touches[-TOUCHES // 2 :]
            few = sum(not touch[2] for touch in later) <= JUMPS_ORDERLY
            return not (few or self._monotone(later, UNLESS_RANDOM) or one_way(jumps))
        if len(jumps) < JUMPS_RANDOM or one_way(jumps):
            return False
        many = len(touches) >= TOUCHES // 2 - 1
        return mixed(jumps) or (many and both_runs(jumps)[0] >= RUNS_RANDOM)

    @staticmethod
    def _monotone(touches: list[Touch], unless: int) -> bool:
        """Whether the jumps go one way, but for one in ``unless``. Of many that were seen together
        one_way() knows."""
        jumps = [touch[:2] for touch in touches if not touch[2]]
        if len(jumps) < TRUST_TOUCHES:
            return False
        run, batches = both_runs(jumps)
        seen_singly = batches >= TRUST_TIMES and len(jumps) <= TOGETHER * batches
        return seen_singly and run <= max(1, batches // unless)

    def _walks(self) -> bool:
        """Whether its last touches show a walk."""
        last = list(self._touches)[-RECENT:]
        if 3 * sum(touch[2] for touch in last) >= 2 * len(last):
            return True
        jumps = (touch[:2] for touch in self._touches if not touch[2])
        return self._monotone(last, UNLESS) or one_way(jumps)
