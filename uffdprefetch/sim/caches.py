# SPDX-License-Identifier: Apache-2.0
"""Where a sequence of accesses finds its items: in memory, or on the disks below it. Pure.

Items have sizes; an item larger than memory is never kept. Belady's rule ([Belady]) is optimal
for items of one size, and nearly so for similar sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from uffdprefetch.sim.evict_rules import EVICT, Group

NEVER = 1 << 62
#: Key of a next use that is not known: later than any that is, that of the newest the latest.
UNKNOWN = 1 << 61


def hits(items: np.ndarray, sizes: np.ndarray, capacity: float, evict: str) -> np.ndarray:
    """(len(items),) bool: :func:`tiers` of memory alone."""
    return tiers(items, sizes, [capacity], evict) > 0


def tiers(
    items: np.ndarray,
    sizes: np.ndarray,
    capacities: Sequence[float],
    evict: str,
    epochs: Sequence[int] = (0,),
    copies: Mapping[int, int] = MappingProxyType({}),
) -> np.ndarray:
    """(len(items),) int8: 0 where an access finds its item nowhere, 1 in memory, 2, 3, ... on that
    disk. ``sizes`` is by item, in the unit of ``capacities``: of memory and of each disk.

    What leaves memory is copied to the first disk that has room. The copy stays when the item comes
    back. Once the disks are full nothing goes there, and of what may leave memory that with a copy
    leaves first (csrc/service/pool/spill.c, pool/eviction.copied_first). ``copies``: what lies on a
    disk from the start, by item, beside what these have room for.

    evict: "lru" the least recently used, "newest" the most recently used; "cyclic" the item that a
    reader going round all items in order reaches last; "belady" the one whose next use is farthest;
    "planned" by Belady's rule within each of the ``epochs`` (their first accesses), of what is not
    used again in it the newest.
    """
    if len(items) and sizes[np.unique(items)].sum() <= capacities[0]:
        # All of it fits: every access but the first.
        found: np.ndarray = np.ones(len(items), np.int8)
        found[np.unique(items, return_index=True)[1]] = 0
        return found
    return _Tiers(items, sizes, capacities, evict, epochs, copies).run()


def next_uses(items: np.ndarray) -> np.ndarray:
    """For each access the index of the item's next one, NEVER if there is none."""
    order = np.argsort(items, kind="stable")
    following: np.ndarray = np.full(len(items), NEVER, np.int64)
    same = items[order[:-1]] == items[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    return following


class _Tiers:
    """One sequence of accesses."""

    def __init__(
        self,
        items: np.ndarray,
        sizes: np.ndarray,
        capacities: Sequence[float],
        evict: str,
        epochs: Sequence[int],
        copies: Mapping[int, int],
    ) -> None:
        self._items, self._sizes = items, sizes.tolist()
        self._capacity, self._room = capacities[0], list(capacities[1:])
        self._clairvoyant = evict == "belady"
        by_use = evict in ("belady", "planned")
        #: Of "planned": first accesses of the epochs, with an end.
        self._epochs = [*epochs, NEVER] if evict == "planned" else [0, NEVER]
        self._following = next_uses(items).tolist() if by_use else []
        self._copies = dict(copies)  # item -> its disk
        self._memory = EVICT[evict](int(items.max(initial=0)) + 1)
        #: Once the disks are full: what of memory has a copy there, which leaves first.
        self._copied: Group | None = None
        self._used = 0.0

    def run(self) -> np.ndarray:
        """See tiers()."""
        found: np.ndarray = np.zeros(len(self._items), np.int8)
        number = 0
        for at, item in enumerate(self._items.tolist()):
            if at >= self._epochs[number + 1]:
                number += 1
                self._begin_epoch(self._epochs[number + 1])
            found[at] = self._access(at, item, self._epochs[number + 1])
        return found

    def _access(self, at: int, item: int, end: int) -> int:
        group = self._memory
        if self._copied is not None and item in self._copies:
            group = self._copied
        if item in group:
            group.use(item, self._key(at, end))
            return 1
        source = self._copies.get(item, 0)
        if self._sizes[item] <= self._capacity and not self._is_last(at):
            group.use(item, self._key(at, end))
            self._used += self._sizes[item]
            while self._used > self._capacity:
                self._evict(item)
        return source

    def _is_last(self, at: int) -> bool:
        """Whether it is known to be never used again: it is not kept."""
        return self._clairvoyant and self._following[at] == NEVER

    def _key(self, at: int, end: int) -> int:
        """When the item used at ``at`` will be used again, as far as that is known by then;
        ``end``: of the epoch."""
        if not self._following:
            return at
        following: int = self._following[at]
        return following if following < end or self._clairvoyant else UNKNOWN + at

    def _begin_epoch(self, end: int) -> None:
        """Its order is known from now on."""
        for group in filter(None, (self._memory, self._copied)):
            for item, key in group.items():
                if key >= UNKNOWN:
                    group.use(item, self._key(key - UNKNOWN, end))

    def _evict(self, coming: int) -> None:
        """One item leaves memory; ``coming``: that for which."""
        group = self._copied or self._memory
        victim, key = group.first(coming)
        size = self._sizes[victim]
        may_be_copied = self._room and self._copied is None and victim not in self._copies
        if may_be_copied and key < NEVER:
            disk = next((j for j, room in enumerate(self._room) if size <= room), None)
            if disk is None:  # full: what has a copy goes in its place
                self._copied = group.parted(self._copies)
                return
            self._room[disk] -= size
            self._copies[victim] = disk + 2
        group.remove(victim)
        self._used -= size
