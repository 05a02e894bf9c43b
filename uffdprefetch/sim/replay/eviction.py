# SPDX-License-Identifier: Apache-2.0
"""Eviction of 64 KiB chunks from full memory: LRU, cyclic or Belady's rule. Pure."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.sim.evict_rules import Numbers
from uffdprefetch.sim.replay.demand import Demand

#: The unit of eviction: the pool's chunk, 64 KiB.
CHUNK_PAGES = 16
NEVER = 1 << 62


class EvictionPolicy(ABC):
    """Chunks in memory, numbered across all files; a subclass chooses the victim."""

    def __init__(self, demand: Demand, capacity_bytes: int) -> None:
        self.capacity = max(1, capacity_bytes // (CHUNK_PAGES * demand.page_bytes))
        self.base: list[int] = []  # of each file: its first chunk's number
        self.total = 0
        for file in range(len(demand.files)):
            self.base.append(self.total)
            self.total += -(-demand.pages(file) // CHUNK_PAGES)
        self.resident: OrderedDict[int, int] = OrderedDict()  # chunk -> file

    def chunks(self, file: int, first: int, end: int) -> range:
        """The numbers of the chunks of pages [first, end)."""
        base = self.base[file]
        return range(base + first // CHUNK_PAGES, base + (end - 1) // CHUNK_PAGES + 1)

    def access(self, file: int, first: int, end: int) -> None:
        """Pages [first, end) are used."""
        for chunk in self.chunks(file, first, end):
            self.on_access(chunk)
            if chunk in self.resident:
                self.resident.move_to_end(chunk)

    def insert(
        self, file: int, first: int, end: int, ready: list[Array]
    ) -> list[tuple[int, int, int]]:
        """Pages [first, end) are read: chunks are evicted until they fit, and absent in ``ready``
        from then on. Returns those: (file, first page, end)."""
        evicted = []
        for chunk in self.chunks(file, first, end):
            if chunk not in self.resident:
                while len(self.resident) >= self.capacity:
                    victim = self.victim()
                    owner = self.resident.pop(victim)
                    self.on_evict(victim)
                    low = (victim - self.base[owner]) * CHUNK_PAGES
                    ready[owner][low : low + CHUNK_PAGES] = np.inf
                    evicted.append((owner, low, low + CHUNK_PAGES))
                self.resident[chunk] = file
                self.on_insert(chunk)
            self.resident.move_to_end(chunk)
        return evicted

    @abstractmethod
    def victim(self) -> int:
        """The chunk to evict; memory is full."""

    # Hooks of a subclass.

    def on_access(self, chunk: int) -> None:  # noqa: B027
        """A thread touched the chunk, resident or not."""

    def on_insert(self, chunk: int) -> None:  # noqa: B027
        """A chunk has become resident."""

    def on_evict(self, chunk: int) -> None:  # noqa: B027
        """A chunk is no longer resident."""


class LruEviction(EvictionPolicy):
    """Least recently used."""

    def victim(self) -> int:
        return next(iter(self.resident))


class CyclicEviction(EvictionPolicy):
    """The chunk just behind the last touch: readers that go round in order reach it last."""

    def __init__(self, demand: Demand, capacity_bytes: int) -> None:
        super().__init__(demand, capacity_bytes)
        self.numbers = Numbers(max(1, self.total))
        self.place = 0

    def on_access(self, chunk: int) -> None:
        self.place = chunk

    def on_insert(self, chunk: int) -> None:
        self.numbers.add(chunk)

    def on_evict(self, chunk: int) -> None:
        self.numbers.remove(chunk)

    def victim(self) -> int:
        behind = self.numbers.below(self.place)
        return behind if behind >= 0 else self.numbers.below(self.total)


class BeladyEviction(EvictionPolicy):
    """The chunk whose next use in the threads' recorded orders is farthest."""

    def __init__(self, demand: Demand, capacity_bytes: int) -> None:
        super().__init__(demand, capacity_bytes)
        self.uses = self._uses(demand)  # chunk -> numbers of accesses, the next one last
        self.done = 0  # touches so far
        self.farthest: list[tuple[int, int]] = []  # heap of (-next use, chunk); stale ones stay

    def _uses(self, demand: Demand) -> dict[int, list[int]]:
        """The chunks' touches, numbered by the time at which threads that never wait make them."""
        order = []
        for stream in demand.streams:
            when = np.cumsum(stream.think_ns).tolist()
            order += list(
                zip(
                    when,
                    range(len(stream)),
                    stream.file.tolist(),
                    stream.first.tolist(),
                    stream.end.tolist(),
                    strict=True,
                )
            )
        order.sort()
        uses: dict[int, list[int]] = {}
        number = 0
        for _, _, file, first, end in order:
            for chunk in self.chunks(file, first, end):
                uses.setdefault(chunk, []).append(number)
                number += 1
        for each in uses.values():
            each.reverse()
        return uses

    def _next(self, chunk: int) -> int:
        mine = self.uses.get(chunk)
        return mine[-1] if mine else NEVER

    def on_access(self, chunk: int) -> None:
        mine = self.uses.get(chunk)
        if mine:
            mine.pop()
        if chunk in self.resident:
            heapq.heappush(self.farthest, (-self._next(chunk), chunk))

    def on_insert(self, chunk: int) -> None:
        heapq.heappush(self.farthest, (-self._next(chunk), chunk))

    def victim(self) -> int:
        while True:
            negative, chunk = heapq.heappop(self.farthest)
            if chunk in self.resident and self._next(chunk) == -negative:
                return chunk
