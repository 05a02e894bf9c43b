# SPDX-License-Identifier: Apache-2.0
"""Rules by which items leave memory: of some, which one leaves first. Pure."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container


class Group(ABC):
    """Items in memory, of which one rule says which leaves first; each with a key."""

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}  # item -> key

    def use(self, item: int, key: int) -> None:
        """It is there from now on, with this key."""
        self._kept[item] = key

    @abstractmethod
    def first(self, coming: int) -> tuple[int, int]:
        """The item that leaves first, for ``coming``, and its key."""

    def remove(self, item: int) -> None:
        """It is there, and leaves."""
        del self._kept[item]

    @abstractmethod
    def empty(self) -> Group:
        """Another one by the same rule."""

    def items(self) -> list[tuple[int, int]]:
        """(item, key) of all; of a rule that goes by time, in the order in which they were used."""
        return list(self._kept.items())

    def __contains__(self, item: object) -> bool:
        return item in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def parted(self, those: Container[int]) -> Group:
        """Those of these items that are in it, which leave it."""
        part = self.empty()
        for item, key in self.items():
            if item in those:
                self.remove(item)
                part.use(item, key)
        return part


class _ByTime(Group):
    """The least recently used leaves first, or the most recently used (``newest``)."""

    def __init__(self, newest: bool) -> None:
        super().__init__()
        self._newest = newest
        self._kept = self._order = OrderedDict[int, int]()

    def use(self, item: int, key: int) -> None:
        super().use(item, key)
        self._order.move_to_end(item)

    def first(self, coming: int) -> tuple[int, int]:
        item = next(reversed(self._order) if self._newest else iter(self._order))
        return item, self._kept[item]

    def empty(self) -> Group:
        return _ByTime(self._newest)


class _ByKey(Group):
    """That of the greatest key leaves first."""

    def __init__(self) -> None:
        super().__init__()
        self._farthest: list[tuple[int, int]] = []  # heap of (-key, item); old entries stay

    def use(self, item: int, key: int) -> None:
        super().use(item, key)
        heapq.heappush(self._farthest, (-key, item))

    def first(self, coming: int) -> tuple[int, int]:
        while True:
            negative, item = self._farthest[0]
            if self._kept.get(item) == -negative:
                return item, -negative
            heapq.heappop(self._farthest)

    def empty(self) -> Group:
        return _ByKey()


class _InOrder(Group):
    """That leaves first which a reader going round all items in order reaches last."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self._end, self._places = end, Numbers(end)

    def use(self, item: int, key: int) -> None:
        if item not in self:
            self._places.add(item)
        super().use(item, key)

    def first(self, coming: int) -> tuple[int, int]:
        # From ``coming`` on the one just below it is reached last.
        item = self._places.below(coming)
        if item < 0:
            item = self._places.below(self._end)
        return item, self._kept[item]

    def remove(self, item: int) -> None:
        self._places.remove(item)
        super().remove(item)

    def empty(self) -> Group:
        return _InOrder(self._end)


class Numbers:
    """A set of numbers below ``end`` with predecessor search.

    A bitmap in words of 64 bits, and bitmaps of its non-empty words above it.
    """

    def __init__(self, end: int) -> None:
        self.levels = []
        while True:
            end = (end >> 6) + 1  # so that below(end) is valid
            self.levels.append([0] * end)
            if end <= 1:
                break

    def add(self, number: int) -> None:
        for words in self.levels:
            words[number >> 6] |= 1 << (number & 63)
            number >>= 6

    def remove(self, number: int) -> None:
        for words in self.levels:
            words[number >> 6] &= ~(1 << (number & 63))
            if words[number >> 6]:
                break
            number >>= 6

    def below(self, number: int) -> int:
        """The greatest member less than ``number``; -1 if there is none."""
        for height, words in enumerate(self.levels):
            word = words[number >> 6] if number >> 6 < len(words) else 0
            word &= (1 << (number & 63)) - 1
            if word:
                number = (number >> 6 << 6) + word.bit_length() - 1
                for lower in reversed(self.levels[:height]):
                    number = (number << 6) + lower[number].bit_length() - 1
                return number
            number >>= 6
        return -1


#: The rules by their names, of items below a number.
EVICT: dict[str, Callable[[int], Group]] = {
    "cyclic": _InOrder,
    "lru": lambda _: _ByTime(newest=False),
    "newest": lambda _: _ByTime(newest=True),
    "belady": lambda _: _ByKey(),
    "planned": lambda _: _ByKey(),
}
