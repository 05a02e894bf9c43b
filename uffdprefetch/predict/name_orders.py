# SPDX-License-Identifier: Apache-2.0
"""Names that are opened one after the other: which of four orders explains that, and not by chance.

Programs that go over many files open them as readdir(3) has them (tar, find, grep, os.walk), by
their names' bytes (a shell's pattern, rsync, ImageFolder), by inode number (cp), or as readdir has
them from behind (who keeps directories on a stack). Each open has a likelihood of lying so near
behind one that was opened so short a time ago. Its logarithms, of each order, are summed up until
they suffice: the cumulative sum test [Page].
"""

from __future__ import annotations

from enum import IntEnum
from itertools import groupby
from math import log2
from typing import Protocol

from uffdprefetch.predict.bounds import LATELY_COUNT

#: Opens in which it shows whether an order holds, and a suffix is read.
WINDOW_FILES = 8
#: Sum of the logarithms (base 2) of how unlikely what was seen is in an order drawn by chance: in
#: one of a thousand walks without an order one is found, and what it wants is lost.
PROOF_BITS = 10.0
#: An open that an order does not explain speaks so much against it: of a program that follows it,
#: one in eight would be such.
MISS_BITS = 3.0
#: Names between two opens of a stream: as many threads open side by side.
GAP_NAMES = 4


class NameOrder(IntEnum):
    """An order in which names are gone over."""

    READDIR = 0
    SORTED = 1
    INODE = 2
    REVERSED = 3


class Names(Protocol):
    """Names of a directory (sense/listing.py), by their index in the order of readdir(3)."""

    def __len__(self) -> int: ...

    def find(self, name: str) -> int:
        """Its index; -1: it is none of them."""

    def name(self, index: int) -> str:
        """The name of an index."""

    def place(self, order: NameOrder, index: int) -> int:
        """Where an order has it."""

    def index(self, order: NameOrder, place: int) -> int:
        """What an order has there."""


def suffix(name: str) -> str:
    """What a name ends in, from its last period on; all digits are the same, however many."""
    _, period, end = name.rpartition(".")
    if not period or end.isalpha():
        return end if period else ""
    return "".join("#" if digit else "".join(some) for digit, some in groupby(end, str.isdigit))


class DirectoryPass:
    """Which names of a directory were opened in this pass through it, and which lately."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.number = 0  # in this pass
        self.total = 0  # in all of them
        self._opened = bytearray(len(names))
        self._lately: dict[int, int] = {}  # index: total by then

    def __contains__(self, index: int) -> bool:
        return bool(self._opened[index])

    @property
    def left(self) -> int:
        """How many were not opened in this pass."""
        return len(self._opened) - self.number

    def age(self, index: int) -> int:
        """How many opens ago a name was opened, 1 of the last one; 0: not lately."""
        when = self._lately.get(index)
        return 0 if when is None else self.total - when + 1

    def lately(self) -> dict[int, int]:
        """The names that were opened last in this pass, and when, by ``total``."""
        return {index: when for index, when in self._lately.items() if index in self}

    def begins_anew(self, index: int) -> bool:
        """Whether the next open, of ``index``, is the first one of another pass. (A program may
        open a file twice, soon after each other.)"""
        if index not in self or (self.number < WINDOW_FILES and self.left):
            return False
        age = self.age(index)
        return not age or age >= self.number

    def add(self, index: int) -> bool:
        """Whether it is the name's first open of this pass."""
        if self.begins_anew(index):
            self._opened = bytearray(len(self._opened))
            self.number = 0
        if self._opened[index]:
            return False
        self._opened[index] = True
        self.number += 1
        self.total += 1
        self._lately.pop(index, None)
        self._lately[index] = self.total
        if len(self._lately) > LATELY_COUNT:
            del self._lately[next(iter(self._lately))]
        return True


class OrderEvidence:
    """What speaks for each of the orders, in all directories of a tree."""

    def __init__(self) -> None:
        self.bits = dict.fromkeys(NameOrder, 0.0)
        self.needed_bits = PROOF_BITS
        self.suffixes: dict[str, int] = {}
        self._opens = 0

    def best(self) -> NameOrder | None:
        """The order that is proven."""
        order = max(self.bits, key=lambda each: self.bits[each])
        return order if self.bits[order] >= self.needed_bits else None

    def note(self, opened: DirectoryPass, index: int) -> None:
        """``index`` is about to be opened, and was not in this pass."""
        for order in NameOrder:
            bits = self.bits_for(opened, order, index)
            # no more than is lost by some opens that it does not explain
            most = self.needed_bits + 2 * MISS_BITS
            self.bits[order] = min(most, max(0.0, self.bits[order] + bits))

    def bits_for(self, opened: DirectoryPass, order: NameOrder, index: int) -> float:
        """How unlikely it is that by chance a name is so near behind one that was opened so short a
        time ago, against how likely it is where streams follow the order: the more there are, and
        the less of them in step, the less does an open say."""
        place = opened.names.place(order, index)
        if not opened.number:
            if place >= GAP_NAMES:
                return 0.0
            # whoever opens the first name of many need not go on
            return min(PROOF_BITS - 2, max(0.0, log2(len(opened.names) / (place + 1)) - 1))
        pairs = self._pairs(opened, order, place)
        if not pairs:
            return -MISS_BITS
        bits = log2(max(1, opened.left)) - 1 - 1.5 * log2(pairs)
        return max(0.0 if pairs == 1 else -MISS_BITS, bits)

    def _pairs(self, opened: DirectoryPass, order: NameOrder, place: int) -> int:
        """How many of the last opens, and names behind each, are as near to a place as its next
        neighbour that was opened; 0: none was, of the names just before it."""
        best, between = 0, 0
        for before in range(place - 1, max(-1, place - 1 - LATELY_COUNT), -1):
            other = opened.names.index(order, before)
            age = opened.age(other)
            if age and other in opened:
                pairs = age * (between + 1)
                best = min(best or pairs, pairs)
            between += not self.leaves_out(opened.names.name(other))
            if between >= GAP_NAMES:
                break
        return best

    def opens(self, name: str) -> None:
        """A name of a file is opened."""
        self._opens += 1
        if len(self.suffixes) <= WINDOW_FILES // 2:
            end = suffix(name)
            self.suffixes[end] = self.suffixes.get(end, 0) + 1

    def leaves_out(self, name: str) -> bool:
        """Whether files of its suffix were never opened, where few suffixes were."""
        few = 0 < len(self.suffixes) <= WINDOW_FILES // 2
        return few and self._opens >= WINDOW_FILES and suffix(name) not in self.suffixes

    def believe(self, order: NameOrder | None) -> None:
        """An order is likely, by what is known elsewhere: one open that is as it says will do."""
        if order is not None:
            self.bits[order] += self.needed_bits - 2

    def was_wrong(self, for_nothing: bool) -> None:
        """An order that was proven did not hold. ``for_nothing``: more was wanted in vain than was
        used; then twice as much has to speak for one, until what is lost so is one file in some
        hundred opens."""
        self.bits = dict.fromkeys(NameOrder, 0.0)
        if for_nothing:
            self.needed_bits = min(2 * self.needed_bits, PROOF_BITS * 100 * WINDOW_FILES)
        else:
            self.needed_bits = max(PROOF_BITS, self.needed_bits / 2)
