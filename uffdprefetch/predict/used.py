# SPDX-License-Identifier: Apache-2.0
"""What of a file was read ahead, what was used, and how its readers came to it: the books, by
blocks of 64 KiB. What was gained is worked out from them (predict/gain.py).

Bounded by construction: one byte of flags per block (16 MiB per TiB).
"""

from __future__ import annotations

import re
from itertools import islice
from math import inf
from typing import NamedTuple

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.base.units import PAGE_BYTES
from uffdprefetch.predict.storage import BLOCK_BYTES

#: A reader that goes back by slices begins anew in one of so many looks that see it go back.
GAPS_SHARE = 16
_NEITHER, _PREFETCHED, _USED = 0, 1, 2
_SET = {bit: bytes(i | bit for i in range(256)) for bit in (_PREFETCHED, _USED)}
_ANY_USED = re.compile(rb"[\x02\x03]")  # _USED, be it _PREFETCHED or not
#: Of a stretch that is used what one miss and the request behind it bring, and more.
_APART = re.compile(rb"[\x02\x03]{3,}")
_IS_NEW = bytes(not i & _USED for i in range(256))


class FirstMisses(NamedTuple):
    """Of a reader where nothing was read ahead for it: its major faults, and what was mapped by
    them, in so many runs, that lie in so many blocks; and the ns in which that was."""

    faults: int = 0
    mapped_bytes: int = 0
    runs: int = 0
    blocks: int = 0
    ns: int = 0

    def plus(self, other: FirstMisses) -> FirstMisses:
        """Both together."""
        return FirstMisses(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def a_block(self) -> float:
        """How many misses a reader that goes on has for each block; 0: the kernel reads ahead for
        it, so that half of each block that it came to was mapped at once (one fault maps two halves
        where the mapping's addresses are no multiples of a block), or fewer than a block has pages
        tell: beside a few pages a process that starts misses in its libraries."""
        more = self.faults - self.runs
        is_whole = 2 * self.mapped_bytes >= self.blocks * BLOCK_BYTES
        if more < BLOCK_BYTES // PAGE_BYTES or is_whole:
            return 0.0
        return min(BLOCK_BYTES / PAGE_BYTES, more * BLOCK_BYTES / self.mapped_bytes)

    @property
    def rows_share(self) -> float:
        """Of blocks that a reader came to in order, the part that was a miss each all the same: the
        kernel reads on when the last part of a request is touched, and who comes by rows that lie
        apart leaves that out. 0: fewer than a block has pages tell."""
        on = self.mapped_bytes / BLOCK_BYTES - self.runs
        if on < BLOCK_BYTES // PAGE_BYTES:
            return 0.0
        return min(1.0, max(0, self.faults - self.runs) / on)

    @property
    def brings_bytes(self) -> float:
        """What one miss has brought of what the reader came to, should another of the process's
        have been elsewhere; 0: too few tell."""
        return self.mapped_bytes / (self.faults - 1) if self.faults > 1 else 0.0

    def most_seconds(self, side_by_side: float) -> float:
        """One has taken no longer, should one more have been under way; so many ``side_by_side`` at
        a time."""
        return self.ns / 1e9 * side_by_side / (self.faults + 1) if self.ns else inf

    @property
    def tells(self) -> tuple[float, int]:
        """Of two, that of the reader with more misses a block, or of which more is known."""
        return self.a_block, self.faults


@dataclass
class Used:
    """What readers were seen to come to in a file, in blocks, each once.

    Of what was read ahead, ``runs``: those that began where their reader had been neither before
    nor behind; ``went_on``: blocks of those that went on, by the power of two of the ns that passed
    for each: (blocks, ns); ``back``: in looks that found some right before what was used: (blocks,
    ns), so many ``looks_back``, and ``gaps`` looks in which a run began anew; ``by_page``: see
    looked(); ``passed``: blocks of which it is not known when. ``demand_runs``, ``demand_blocks``:
    of what nobody had read ahead.
    """

    runs: int = 0
    back: tuple[int, int] = (0, 0)
    by_page: int = 0
    looks_back: int = 0
    gaps: int = 0
    went_on: dict[int, tuple[int, int]] = field(default_factory=dict)
    passed: int = 0
    demand_runs: int = 0
    demand_blocks: int = 0
    first: FirstMisses = field(default_factory=FirstMisses)
    _begun: bool = False  # since the last look, a run,
    _behind: bool = False  # or one right before what was used

    def came(
        self, blocks: int, ahead: int, used_before: bool, used_behind: bool, *, seen: bool = True
    ) -> None:
        """A run of blocks was used for the first time, ``ahead`` of which had been read ahead;
        ``used_before`` (or behind): and so were those at its beginning (its end) already;
        ``seen``: while how its reader waits was."""
        anew = not used_before and not used_behind
        self._begun |= anew
        self._behind |= used_behind and not used_before
        self.demand_blocks += (blocks - ahead) * seen
        if ahead:
            self.runs += anew
            self.passed += ahead - anew
        else:
            self.demand_runs += anew and seen

    def looked(self, since_ns: int, *, by_page: bool = False) -> None:
        """All of what was passed in so many ns has been told; ``by_page``: by the touch of a page,
        to which its reader has gone back from the next one, or on by rows that lie apart."""
        self.looks_back += self._behind
        self.gaps += self._begun
        if by_page and not self._begun:
            self.by_page += self.passed
        elif self._behind and not self._begun:
            self.back = self.back[0] + self.passed, self.back[1] + since_ns * (self.passed > 0)
        elif self.passed:
            kind = (since_ns // self.passed).bit_length()
            blocks, ns = self.went_on.get(kind, (0, 0))
            self.went_on[kind] = blocks + self.passed, ns + since_ns
        self.passed, self._begun, self._behind = 0, False, False

    @property
    def backward(self) -> bool:
        """Whether who goes backward does so page by page. One that reads slices in order, and goes
        back from each to the one before it, is seen in the middle of one now and then."""
        return self.gaps * GAPS_SHARE < self.looks_back

    @property
    def ahead_blocks(self) -> int:
        """Read ahead, and then used."""
        went_on = (self.back, *self.went_on.values())
        return self.runs + self.passed + self.by_page + sum(n for n, _ in went_on)

    @property
    def blocks(self) -> int:
        """All that anybody came to."""
        return self.ahead_blocks + self.demand_blocks


@dataclass
class Blocks:
    """Of one file; ``used``: what readers were seen to come to, for what was gained;
    ``tensor_starts``: bytes a touch of which is no stream (readers/tensor_starts.py), None: not
    asked for."""

    size_bytes: int
    flags: bytearray = field(init=False)
    used: Used = field(default_factory=Used)
    tensor_starts: IntervalSet | None = None

    def __post_init__(self) -> None:
        """Raises MemoryError when the file is too large for the flags."""
        self.flags = bytearray(-(-self.size_bytes // BLOCK_BYTES))

    def was_here(self, at: int) -> bool:
        """Whether the block at a file offset has been prefetched, or observed in use."""
        return at < self.size_bytes and bool(self.flags[at // BLOCK_BYTES])

    @property
    def any_gained(self) -> bool:
        """Whether anything that was read ahead was used."""
        return (_PREFETCHED | _USED) in self.flags

    def is_own(self, start: int, end: int, *under_way: IntervalSet) -> bool:
        """Whether nothing of [start, end) bytes was read ahead, or is being read."""
        first, last = start // BLOCK_BYTES, -(-min(end, self.size_bytes) // BLOCK_BYTES)
        ahead = self.flags.count(_PREFETCHED, first, last)
        ahead += self.flags.count(_PREFETCHED | _USED, first, last)
        return not ahead and not any(ranges.overlaps(start, end) for ranges in under_way)

    def untouched(self, start: int, end: int) -> int:
        """How many blocks of [start, end) bytes were neither prefetched nor observed in use."""
        return self.flags.count(
            _NEITHER, start // BLOCK_BYTES, -(-min(end, self.size_bytes) // BLOCK_BYTES)
        )

    def _mark(self, start: int, end: int, bit: int) -> None:
        a, b = start // BLOCK_BYTES, -(-min(end, self.size_bytes) // BLOCK_BYTES)
        if a < b:
            self.flags[a:b] = self.flags[a:b].translate(_SET[bit])

    def mark_prefetched(self, start: int, end: int) -> None:
        """We have read [start, end) bytes from storage."""
        self._mark(start, end, _PREFETCHED)

    def mark_used(self, start: int, end: int) -> None:
        """[start, end) bytes are in some reader's page table."""
        self._mark(start, end, _USED)

    def tell_used(
        self, start: int, end: int, *under_way: IntervalSet, mine: IntervalSet, seen: bool = True
    ) -> None:
        """To the books for what was gained, before they are marked: a reader has come to
        [start, end) bytes. ``under_way``: what is being read; ``mine``: where it was before;
        ``seen``: see Used.came()."""
        first, last = start // BLOCK_BYTES, -(-min(end, self.size_bytes) // BLOCK_BYTES)
        part = self.flags[first:last]
        if not (part.count(_NEITHER) or part.count(_PREFETCHED)):
            return
        new = part.translate(_IS_NEW)
        at = new.find(1)
        begun = first + at
        while at >= 0:
            over = new.find(0, at)
            a, b = first + at, first + (len(new) if over < 0 else over)
            ahead = self.flags.count(_PREFETCHED, a, b)
            if ahead < b - a:
                ahead += self._late(a, b, under_way)
            # where others were before it has not been: it comes from elsewhere all the same
            before = a > begun or mine.overlaps((first - 1) * BLOCK_BYTES, a * BLOCK_BYTES)
            behind = mine.overlaps(b * BLOCK_BYTES, (last + 1) * BLOCK_BYTES)
            self.used.came(b - a, ahead, before, behind, seen=seen)
            at = new.find(1, b - first)

    def _late(self, first: int, last: int, under_way: tuple[IntervalSet, ...]) -> int:
        """How many of the blocks first to last - 1 are being read, and are not there as a whole:
        requests are larger than what a reader goes over between two looks."""
        late = IntervalSet()
        for ranges in under_way:
            for start, length in ranges.within(first * BLOCK_BYTES, last * BLOCK_BYTES):
                late.add(start // BLOCK_BYTES, -(-(start + length) // BLOCK_BYTES))
        return sum(self.flags.count(_NEITHER, a, b) for a, b in late)

    def counts(self, first: int = 0, last: int | None = None) -> tuple[int, int, int]:
        """(prefetched and used, prefetched only, used only), in bytes at 64 KiB; of all blocks, or
        of the blocks first to last - 1."""
        bits = (_PREFETCHED | _USED, _PREFETCHED, _USED)
        counts = [self.flags.count(bit, first, last) * BLOCK_BYTES for bit in bits]
        beyond = -self.size_bytes % BLOCK_BYTES  # of the last block, of which the file has a part
        blocks = len(self.flags)
        if beyond and first < blocks <= (blocks if last is None else last):
            for i, bit in enumerate(bits):
                counts[i] -= beyond * (self.flags[-1] == bit)
        return counts[0], counts[1], counts[2]

    def requests_used(self, request_bytes: int) -> tuple[int, int]:
        """Aligned parts of the file, each what one request brings, in which something was used:
        those in which all of that had been read ahead, and the others. No more are counted than
        there are runs."""
        blocks, ahead, own = max(1, request_bytes // BLOCK_BYTES), 0, 0
        used = _ANY_USED.search(self.flags)
        while used and (ahead < self.used.runs or own < self.used.demand_runs):
            first = used.start() // blocks * blocks
            if self.flags.count(_USED, first, first + blocks):
                own += 1
            else:
                ahead += 1
            used = _ANY_USED.search(self.flags, first + blocks)
        return ahead, own

    def stretches_used(self) -> int:
        """So many that are too long for one request lie apart. No more are counted than runs."""
        most = self.used.runs + self.used.demand_runs
        return sum(1 for _ in islice(_APART.finditer(self.flags), most))

    def unused_bytes(self, first: int, last: int) -> int:
        """Bytes of the blocks first to last - 1 that are prefetched and not used yet."""
        return self.flags.count(_PREFETCHED, first, last) * BLOCK_BYTES
