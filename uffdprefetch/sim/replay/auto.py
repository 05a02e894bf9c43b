# SPDX-License-Identifier: Apache-2.0
"""`--policy auto`, wrap's default, as a replay policy: the service's core (node.py) observes the
replayed touches, and its requests to workers are what is read ahead.

A rank's threads and workers count as one reader. Not replayed: strides by a record index.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from uffdprefetch.base.config import Config
from uffdprefetch.service.door import READAHEAD_EXTENT_BYTES
from uffdprefetch.sim.replay.demand import Demand
from uffdprefetch.sim.replay.engine import Range, Resident
from uffdprefetch.sim.replay.link import StorageModel
from uffdprefetch.sim.replay.node import ReplayNode
from uffdprefetch.sim.replay.policies import InPool, Plain, chunked


class Auto(Plain):
    """`--engine cache`; ``room_bytes``: --budget."""

    paced = True
    engine = "cache"

    def __init__(self, room_bytes: int = 1 << 50) -> None:
        self.room_bytes, self.request_bytes = room_bytes, READAHEAD_EXTENT_BYTES

    def begin(self, demand: Demand, storage: StorageModel, resident: Resident) -> None:
        super().begin(demand, storage, resident)
        self.demand, self.page, self._now = demand, demand.page_bytes, 0.0
        sizes = [demand.pages(file) * self.page for file in range(len(demand.files))]
        self.node = ReplayNode(
            sizes,
            [file.path for file in demand.files],
            self.page,
            [pages * self.page for pages in self.around],
            self._there,
            Config(engine=self.engine, budget_bytes=self.room_bytes),
            self._on_rearm,
        )
        self.out: deque[tuple[int, Range, int]] = deque()  # (request number, pages, bytes)

    def _there(self, file: int, start: int, length: int) -> int:
        """Bytes of a file that are in memory now."""
        ready = self.resident.ready[file][start // self.page : -(-(start + length) // self.page)]
        return int(np.count_nonzero(ready <= self._now)) * self.page

    def on_touch(
        self, stream: int, access: int, file: int, first: int, end: int, now: float
    ) -> float:
        answering = super().on_touch(stream, access, file, first, end, now)
        self._observe(stream, file, first, end, now)
        self._turn(now)
        return answering

    def _observe(self, stream: int, file: int, first: int, end: int, now: float) -> None:
        self._now = now
        rank = self.demand.streams[stream].rank
        self.node.touched(rank, file, first, end, self.resident.ready[file], now)

    def _on_rearm(self, rank: int, file: int, pages: list[int]) -> None:
        """Nothing is unmapped where the page cache is mapped."""

    def _turn(self, now: float) -> None:
        self._now = now
        self.node.turn(now)
        self.out.extend(self.node.workers.sent)
        self.node.workers.sent.clear()

    def on_evict(self, file: int, first: int, end: int) -> None:
        self.node.on_evict(file, first, end)

    def next_range(self, now: float) -> Range | None:
        """Kernel readahead first, then the service's requests."""
        wanted = super().next_range(now)
        while wanted is None:
            if not self.out:
                self._turn(now)
            if not self.out:
                break
            wanted = self._cut(self.out[0][1])
            if self.resident.missing(wanted) is None:  # it is there already
                self.on_request(wanted, now, now)
                wanted = None
        return wanted

    def _cut(self, wanted: Range) -> Range:
        return wanted

    def on_request(self, wanted: Range, now: float, until: float) -> None:
        if self.out and self._cut(self.out[0][1]) == wanted:
            number, pages, length = self.out.popleft()
            self.node.asked(number, pages, length, now, until)

    def due(self, now: float) -> float | None:
        return self.node.due()


class PoolAuto(InPool, Auto):
    """`--engine pool`: touches that the pool answers are observed."""

    engine = "pool"

    def __init__(self, budget_bytes: int) -> None:
        InPool.__init__(self, budget_bytes)
        Auto.__init__(self, budget_bytes)

    def on_pool_touches(
        self, stream: int, file: int, touches: list[tuple[int, int]], now: float
    ) -> None:
        one = self.demand.streams[stream]
        self.node.on_pool_touches(one.rank, file, touches, one.thread, now)

    def _on_rearm(self, rank: int, file: int, pages: list[int]) -> None:
        """These pages are unmapped from a rank, so that the next touch is observed."""
        self.mapped[file][rank][pages] = False

    def _observe(self, stream: int, file: int, first: int, end: int, now: float) -> None:
        """Unused: see on_pool_touches()."""

    def _cut(self, wanted: Range) -> Range:
        return chunked(wanted)
