# SPDX-License-Identifier: Apache-2.0
"""In which order ranks come to the 64 KiB blocks of a file for the first time: what `wrap --learn`
keeps of a run (docs/learn.md). Pure.

Bounded by construction: a bit a block and rank, and 16 bytes for each run of blocks, of which a
rank has no more than there are blocks: 256 MiB a TiB.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from uffdprefetch.predict.storage import BLOCK_BYTES

# eight ranks of a file share a byte for each of its blocks
_SET = tuple(bytes(i | 1 << bit for i in range(256)) for bit in range(8))
_IS_NEW = tuple(bytes(not i >> bit & 1 for i in range(256)) for bit in range(8))


class RankOf(NamedTuple):
    """A rank, and how many there are; 0: no launcher has said."""

    rank: int
    world: int


@dataclass
class RankTouches:
    """What one rank has come to of one file. ``spans``: starts and ends of runs in turn, in bytes,
    in the order in which it came there; ``blocks``: of 64 KiB, in all; ``in_order_blocks``: of
    them, those in runs that go on where it has been."""

    spans: array[int] = field(default_factory=lambda: array("q"))
    blocks: int = 0
    in_order_blocks: int = 0
    is_given_up: bool = False
    _goes_on: bool = False

    def came(self, start: int, end: int, blocks: int, beside: bool) -> int:
        """To [start, end) bytes; ``beside``: to where it has been. Returns the runs that are
        new."""
        spans = self.spans
        self.blocks += blocks
        if spans and spans[-1] == start:
            spans[-1] = end
            new = 0
        else:
            self._goes_on = beside or not spans
            spans.extend((start, end))
            new = 1
        self.in_order_blocks += blocks * self._goes_on
        return new

    def give_up(self) -> int:
        """Nothing is to be known of it any more. Returns the runs that there were."""
        runs = len(self.spans) // 2
        self.spans, self.is_given_up = array("q"), True
        return runs


class FirstTouches:
    """Of one file."""

    def __init__(self, size_bytes: int) -> None:
        """Raises MemoryError when the file is too large for the flags."""
        self._size_bytes = size_bytes
        self._planes = [bytearray(-(-size_bytes // BLOCK_BYTES))]
        self.ranks: dict[RankOf, RankTouches] = {}
        self._places: dict[RankOf, tuple[bytearray, int]] = {}  # whose bit is where

    def of(self, rank: RankOf) -> RankTouches:
        """Of one rank. Raises MemoryError."""
        found = self.ranks.get(rank)
        if found is None:
            number, bit = divmod(len(self.ranks), len(_SET))
            if number == len(self._planes):
                self._planes.append(bytearray(len(self._planes[0])))
            found = self.ranks[rank] = RankTouches()
            self._places[rank] = self._planes[number], bit
        return found

    def came(self, rank: RankOf, start: int, end: int) -> int:
        """A rank was in [start, end) bytes. Returns the runs that are new. Raises MemoryError."""
        touches = self.of(rank)
        if touches.is_given_up:
            return 0
        plane, bit = self._places[rank]
        first, last = start // BLOCK_BYTES, min(-(-end // BLOCK_BYTES), len(plane))
        part = plane[first:last]
        new, runs = part.translate(_IS_NEW[bit]), 0
        at = new.find(1)
        while at >= 0:
            over = new.find(0, at)
            a, b = first + at, first + (len(new) if over < 0 else over)
            beside = any(plane[i] >> bit & 1 for i in (a - 1, b) if 0 <= i < len(plane))
            until = min(b * BLOCK_BYTES, self._size_bytes)
            runs += touches.came(a * BLOCK_BYTES, until, b - a, beside)
            at = new.find(1, b - first)
        plane[first:last] = part.translate(_SET[bit])
        return runs
