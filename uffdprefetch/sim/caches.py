# SPDX-License-Identifier: Apache-2.0
"""Cache hits of a sequence of accesses by eviction policy. Pure.

Items have sizes; an item larger than the cache is never kept. Belady's rule ([Belady]) is optimal
for items of one size, and nearly so for similar sizes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

NEVER = 1 << 62


def hits(items: np.ndarray, sizes: np.ndarray, capacity: float, evict: str) -> np.ndarray:
    """(len(items),) bool. ``sizes`` is by item, in the unit of ``capacity``.

    evict: "lru" the least recently used; "cyclic" the item that a reader going round all items in
    order reaches last; "belady" the one whose next use is farthest.
    """
    if len(items) and sizes[np.unique(items)].sum() <= capacity:
        # All of it fits: every access but the first.
        found: np.ndarray = np.ones(len(items), bool)
        found[np.unique(items, return_index=True)[1]] = False
        return found
    return EVICT[evict](items, sizes, capacity)


def _lru(items: np.ndarray, sizes: np.ndarray, capacity: float) -> np.ndarray:
    found: np.ndarray = np.zeros(len(items), bool)
    kept: OrderedDict[int, float] = OrderedDict()
    used = 0.0
    size_of = sizes.tolist()
    for at, item in enumerate(items.tolist()):
        if item in kept:
            kept.move_to_end(item)
            found[at] = True
            continue
        size = size_of[item]
        if size > capacity:
            continue
        kept[item] = size
        used += size
        while used > capacity:
            used -= kept.popitem(last=False)[1]
    return found


def next_uses(items: np.ndarray) -> np.ndarray:
    """For each access the index of the item's next one, NEVER if there is none."""
    order = np.argsort(items, kind="stable")
    following: np.ndarray = np.full(len(items), NEVER, np.int64)
    same = items[order[:-1]] == items[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    return following


def _belady(items: np.ndarray, sizes: np.ndarray, capacity: float) -> np.ndarray:
    found: np.ndarray = np.zeros(len(items), bool)
    next_use: dict[int, int] = {}  # of what is kept
    farthest: list[tuple[int, int]] = []  # heap of (-next use, item); old entries stay
    used = 0.0
    size_of = sizes.tolist()
    for at, (item, following) in enumerate(
        zip(items.tolist(), next_uses(items).tolist(), strict=True)
    ):
        size = size_of[item]
        if item in next_use:
            found[at] = True
        elif following == NEVER or size > capacity:
            continue  # never used again: not kept
        else:
            used += size
        next_use[item] = following
        heapq.heappush(farthest, (-following, item))
        while used > capacity:
            negative, victim = heapq.heappop(farthest)
            if next_use.get(victim) == -negative:
                del next_use[victim]
                used -= size_of[victim]
    return found


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


def _cyclic(items: np.ndarray, sizes: np.ndarray, capacity: float) -> np.ndarray:
    found: np.ndarray = np.zeros(len(items), bool)
    end = int(items.max(initial=0)) + 1
    kept = Numbers(end)
    inside = bytearray(end)
    used = 0.0
    size_of = sizes.tolist()
    for at, item in enumerate(items.tolist()):
        if inside[item]:
            found[at] = True
            continue
        size = size_of[item]
        if size > capacity:
            continue
        while used + size > capacity:
            # From ``item`` on the one just below it is reached last.
            victim = kept.below(item)
            if victim < 0:
                victim = kept.below(end)
            kept.remove(victim)
            inside[victim] = 0
            used -= size_of[victim]
        kept.add(item)
        inside[item] = 1
        used += size
    return found


EVICT: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
    "cyclic": _cyclic,
    "lru": _lru,
    "belady": _belady,
}
