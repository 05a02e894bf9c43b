# SPDX-License-Identifier: Apache-2.0
"""What of a file was read ahead, and what was used, by blocks of 64 KiB.

Bounded by construction: one byte of flags per block (16 MiB per TiB).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.predict import gain
from uffdprefetch.predict.storage import BLOCK_BYTES

_PREFETCHED, _USED = 1, 2
_SET = {bit: bytes(i | bit for i in range(256)) for bit in (_PREFETCHED, _USED)}
_ANY_USED = re.compile(rb"[\x02\x03]")  # _USED, be it _PREFETCHED or not
_IS_NEW = bytes(not i & _USED for i in range(256))


@dataclass
class Blocks:
    """Of one file; ``used``: what readers were seen to come to, for what was gained;
    ``tensor_starts``: bytes a touch of which is no walk (readers/tensor_starts.py), None: not asked
    for."""

    size_bytes: int
    flags: bytearray = field(init=False)
    used: gain.Used = field(default_factory=gain.Used)
    tensor_starts: IntervalSet | None = None

    def __post_init__(self) -> None:
        """Raises MemoryError when the file is too large for the flags."""
        self.flags = bytearray(-(-self.size_bytes // BLOCK_BYTES))

    def was_here(self, at: int) -> bool:
        """Whether the block at a file offset has been prefetched, or observed in use."""
        return at < self.size_bytes and bool(self.flags[at // BLOCK_BYTES])

    def untouched(self, start: int, end: int) -> int:
        """How many blocks of [start, end) bytes were neither prefetched nor observed in use."""
        return self.flags.count(
            0, start // BLOCK_BYTES, -(-min(end, self.size_bytes) // BLOCK_BYTES)
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

    def tell_used(self, start: int, end: int, *under_way: IntervalSet) -> None:
        """To the books for what was gained, before they are marked: somebody has come to
        [start, end) bytes. ``under_way``: what is being read."""
        first, last = start // BLOCK_BYTES, -(-min(end, self.size_bytes) // BLOCK_BYTES)
        part = self.flags[first:last]
        if not (part.count(0) or part.count(_PREFETCHED)):
            return
        new, count = part.translate(_IS_NEW), len(self.flags)
        at = new.find(1)
        while at >= 0:
            over = new.find(0, at)
            a, b = first + at, first + (len(new) if over < 0 else over)
            ahead = self.flags.count(_PREFETCHED, a, b)
            span = a * BLOCK_BYTES, b * BLOCK_BYTES
            if not ahead and any(ranges.overlaps(*span) for ranges in under_way):
                ahead = b - a  # it comes late
            before = a > 0 and bool(self.flags[a - 1] & _USED)
            behind = b < count and bool(self.flags[b] & _USED)
            self.used.came(b - a, ahead, before, behind)
            at = new.find(1, b - first)

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

    def unused_bytes(self, first: int, last: int) -> int:
        """Bytes of the blocks first to last - 1 that are prefetched and not used yet."""
        return self.flags.count(_PREFETCHED, first, last) * BLOCK_BYTES
