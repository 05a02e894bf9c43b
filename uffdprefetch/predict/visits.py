# SPDX-License-Identifier: Apache-2.0
"""Whether a file that is read here and there is worth reading whole.

How often processes begin at places of it that nobody can tell has a law (predict/survival.py): of
so many more places some would hit what is missing, and each would be a miss. Who walks in steps
never goes back, so a place counts twice for each that lies behind the last one, or before it.
"""

from __future__ import annotations

from math import ceil, exp, inf, log

from uffdprefetch.base.record import dataclass
from uffdprefetch.predict.storage import SHY, Link
from uffdprefetch.predict.survival import Law

#: The link's time is worth this part of its price where random readers leave it idle.
IDLE = 0.25
#: Less than this part of a file is little: nothing to read it for where no more is missing.
LITTLE_SHARE = 64
#: All of a file is read where its visits go on with this probability until that has paid. Where
#: nothing is known of such files that is when they have brought five ninths of it (simulated, pages
#: at random: 8/9 takes 0.03 of plain longer; 2/3 begins within jobs that read half of a file).
SURE = 0.75
#: As long as it is not likely that a file's visits go on, what is read of it for nothing is this
#: part of what they bring: half of what bench/harm_table.py allows to who gains less than a tenth
#: of its time. What is more is of the account of all guesses (predict/storage.py). Of what streams
#: miss by themselves guesses may lose as much: however much was lost before, who goes on gets one.
FREE_SHARE = 0.05


@dataclass
class Visits:
    """Of one file, since it was mapped. ``law``: of how many visits such files have."""

    law: Law
    number: int = 0  # of random places ...
    places: int = 0  # ... of all
    missed: int = 0  # ... that had not been read ahead
    since_ns: int = 0
    is_over: bool = False
    _on: int = 0
    _back: int = 0

    def begins(self, back: bool, missed: bool, now_ns: int) -> None:
        """A process begins at a place, before (``back``) or behind its last one."""
        self.since_ns = self.since_ns or now_ns
        self.places += 1
        self.missed += missed
        self._back += back
        self._on += not back
        number = 2 * min(self._back, self._on)
        if number > self.number:
            self.law.passed(max(1, self.number), number)
            self.number = number

    def over(self) -> None:
        """Nobody maps the file any more."""
        if self.places and not self.is_over:
            self.law.died(max(1, self.number))
            self.is_over = True

    def goes_on(self) -> None:
        """It is mapped again, soon after: a job may do so for each batch."""
        if self.is_over:
            self.law.revived(max(1, self.number))
            self.is_over = False

    def forget(self) -> None:
        """It is mapped again, long after."""
        self.is_over = False
        self.number = self.places = self.missed = self.since_ns = self._on = self._back = 0

    def each_bytes(self, touched_bytes: int, block_bytes: int, link: Link) -> float:
        """What one visit brings: its miss, and what else is read there."""
        return link.miss_bytes + max(0.0, touched_bytes / max(1, self.places) - block_bytes)

    def _turns(self, size: int, touched: int, block_bytes: int, link: Link) -> float:
        """What the visits bring without us, in times the size of the file, all parts of it that
        several of them bring counted each time."""
        each = self.each_bytes(touched, block_bytes, link)
        if each < block_bytes or not touched:  # how much of a block was touched nobody sees
            return self.places * each / size
        if touched >= size:
            return inf
        # who comes to what has been touched is not seen: the share exp(-n * run / size) was not,
        # after n visits to runs
        return -log(1 - touched / size) * each * self.places / touched

    def brought_bytes(self, size: int, touched: int, block_bytes: int, link: Link) -> float:
        """What the visits bring without us."""
        return size * (1 - exp(-self._turns(size, touched, block_bytes, link)))

    def are_enough(self, size: int, touched: int, block_bytes: int, link: Link) -> bool:
        """Whether they are likely to go on until they have brought so much that of the whole file
        no more than a part in SHY of that was read for nothing, which is what bench/harm_table.py
        allows to who gains a tenth of its time."""
        turns = self._turns(size, touched, block_bytes, link)
        if not turns:
            return False
        number = max(1, self.number)
        further = ceil(number * max(0.0, log(1 + SHY) / turns - 1))
        return self.law.window(number, SURE, further) >= further

    def will_gain(
        self, size: int, touched: int, spared: int, block_bytes: int, now_ns: int, link: Link
    ) -> bool:
        """Whether they are likely to go on until a tenth of their time is saved, if from now on a
        part in SHY of what they bring may be read for nothing (see FREE_SHARE). ``spared``: bytes
        that they have found in memory so far."""
        turns = self._turns(size, touched, block_bytes, link)
        if not 0 < turns < inf:
            return False
        number = max(1, self.number)
        later = turns * (1 + self.law.window(number, SURE, number) / number)
        now, then = 1 - exp(-turns), 1 - exp(-later)
        # of the visits in between so many come to what others have brought, or would have ...
        again = later - then - (turns - now)
        each = self.each_bytes(touched, block_bytes, link)
        took, busy = self._took(each, now_ns, link)
        if not took:
            return False
        # ... and find as much for each that was read for nothing; which their misses wait for
        costs = busy * link.stream_seconds(each) / took
        return spared / size + again / SHY - costs * then / SHY >= 2 * FREE_SHARE * then

    def _took(self, each: float, now_ns: int, link: Link) -> tuple[float, float]:
        """The seconds from one miss to the next, 0 where no bytes come sooner for it, and the price
        of the link's time meanwhile."""
        alone = link.miss_seconds + link.in_order_seconds(each - link.miss_bytes)
        alone = link.beside_others(alone, each)
        if not alone:
            return 0.0, 1.0
        took = min(alone, max(1e-5, (now_ns - self.since_ns) / 1e9 / max(1, self.missed)))
        return took, min(1.0, max(IDLE, link.stream_seconds(each) / took))

    def is_worth_it(
        self, size: int, missing: int, touched: int, block_bytes: int, now_ns: int, link: Link
    ) -> bool:
        """Whether the misses to be expected cost more than reading what is ``missing`` (bytes)."""
        if self.places <= 1 or missing * LITTLE_SHARE <= size:
            return False
        each = self.each_bytes(touched, block_bytes, link)
        # the share exp(-n * each / size) of the missing part is still missing after n more visits
        hits = self.law.expected(max(1, self.number), size / each) * missing / size
        took, busy = self._took(each, now_ns, link)
        return took > 0 and hits * took >= busy * SHY * link.stream_seconds(missing)
