# SPDX-License-Identifier: Apache-2.0
"""What leaves memory when it is full: chunks of 64 KiB, by LRU, cyclic or Belady's rule. Pure."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.sim.caches import Numbers
from uffdprefetch.sim.replay.demand import Demand

CHUNK_PAGES = 16
NEVER = 1 << 62


class Keep(ABC):
    """Chunks that are in memory; the one that leaves is the subclass's to choose.

    Chunks of all files are numbered through.
    """

    def __init__(self, demand: Demand, capacity_bytes: int) -> None:
        self.capacity = max(1, capacity_bytes // (CHUNK_PAGES * demand.page_bytes))
        self.base: list[int] = []  # of each file: its first chunk's number
        self.total = 0
        for file in range(len(demand.files)):
            self.base.append(self.total)
            self.total += -(-demand.pages(file) // CHUNK_PAGES)
        self.kept: OrderedDict[int, int] = OrderedDict()  # chunk -> file
        #: Told of the pages [first, end) of a file that leave.
        self.gone: Callable[[int, int, int], None] = lambda file, first, end: None

    def chunks(self, file: int, first: int, end: int) -> range:
        """The numbers of the chunks of pages [first, end)."""
        base = self.base[file]
        return range(base + first // CHUNK_PAGES, base + (end - 1) // CHUNK_PAGES + 1)

    def touch(self, file: int, first: int, end: int) -> None:
        """Pages [first, end) are used."""
        for chunk in self.chunks(file, first, end):
            self.passed(chunk)
            if chunk in self.kept:
                self.kept.move_to_end(chunk)

    def add(self, file: int, first: int, end: int, ready: list[Array]) -> None:
        """Pages come in; chunks leave as far as needed, and their pages are absent."""
        for chunk in self.chunks(file, first, end):
            if chunk not in self.kept:
                while len(self.kept) >= self.capacity:
                    victim = self.victim()
                    owner = self.kept.pop(victim)
                    self.left(victim)
                    low = (victim - self.base[owner]) * CHUNK_PAGES
                    ready[owner][low : low + CHUNK_PAGES] = np.inf
                    self.gone(owner, low, low + CHUNK_PAGES)
                self.kept[chunk] = file
                self.entered(chunk)
            self.kept.move_to_end(chunk)

    @abstractmethod
    def victim(self) -> int:
        """Which chunk leaves; there is one."""

    # What a subclass may want to hear; by itself nobody does.

    def passed(self, chunk: int) -> None:  # noqa: B027
        """A thread touched the chunk, whether or not it is kept."""

    def entered(self, chunk: int) -> None:  # noqa: B027
        """It is kept now."""

    def left(self, chunk: int) -> None:  # noqa: B027
        """It is not kept any more."""


class Lru(Keep):
    """What was used longest ago."""

    def victim(self) -> int:
        return next(iter(self.kept))


class Cyclic(Keep):
    """What readers that go on in order, again and again, reach last: just behind the one that
    touched last."""

    def __init__(self, demand: Demand, capacity_bytes: int) -> None:
        super().__init__(demand, capacity_bytes)
        self.numbers = Numbers(max(1, self.total))
        self.place = 0

    def passed(self, chunk: int) -> None:
        self.place = chunk

    def entered(self, chunk: int) -> None:
        self.numbers.add(chunk)

    def left(self, chunk: int) -> None:
        self.numbers.remove(chunk)

    def victim(self) -> int:
        behind = self.numbers.below(self.place)
        return behind if behind >= 0 else self.numbers.below(self.total)


class Belady(Keep):
    """What is needed last, of all threads' orders as they were recorded."""

    def __init__(self, demand: Demand, capacity_bytes: int) -> None:
        super().__init__(demand, capacity_bytes)
        self.uses = self._uses(demand)  # chunk -> numbers of accesses, the next one last
        self.done = 0  # touches so far
        self.farthest: list[tuple[int, int]] = []  # heap of (-next use, chunk); old ones stay

    def _uses(self, demand: Demand) -> dict[int, list[int]]:
        """The chunks' touches, numbered in the order in which threads that never wait would come
        to them."""
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

    def passed(self, chunk: int) -> None:
        mine = self.uses.get(chunk)
        if mine:
            mine.pop()
        if chunk in self.kept:
            heapq.heappush(self.farthest, (-self._next(chunk), chunk))

    def entered(self, chunk: int) -> None:
        heapq.heappush(self.farthest, (-self._next(chunk), chunk))

    def victim(self) -> int:
        while True:
            negative, chunk = heapq.heappop(self.farthest)
            if chunk in self.kept and self._next(chunk) == -negative:
                return chunk
