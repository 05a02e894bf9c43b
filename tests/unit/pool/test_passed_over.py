# SPDX-License-Identifier: Apache-2.0
"""Faults of the pool's memory, as readers are told of them (service/pool_bridge.py): those by which
a thread comes over a record are one touch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from uffdprefetch.base.units import PAGE_BYTES
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native.pool import PoolEvent
from uffdprefetch.predict.storage import BLOCK_BYTES as BLOCK
from uffdprefetch.sense.observation import Batch
from uffdprefetch.service.pool_bridge import PoolBridge
from uffdprefetch.state.publisher import POOL_MISS, POOL_TOUCH

FILE, SLOT, REGION = 3, 0, 7


def fault(block: int, passed: int = 0, *, tid: int = 1, kind: int = uffd_pool.TOUCH) -> PoolEvent:
    """Of the first page of a block; ``passed`` blocks were come over."""
    at = block * BLOCK
    return PoolEvent(
        1000 + at, at, PAGE_BYTES, kind, FILE, SLOT, REGION, tid, 0, passed=passed * BLOCK
    )


class Bridge:
    """One, and what it tells."""

    def __init__(self, events: list[PoolEvent]) -> None:
        self.seen: list[tuple[int, int, int]] = []
        self.published: list[tuple[int, int, int]] = []
        self.file: Any = SimpleNamespace(pooled=None)
        region: Any = SimpleNamespace(
            file=self.file, agent=SimpleNamespace(detaching=False),
            checkpoints=SimpleNamespace(fired={}, armed={}),
        )  # fmt: skip
        client = SimpleNamespace(
            regions={REGION: region}, pid=9, watched=SimpleNamespace(pool_misses=0)
        )
        pool: Any = SimpleNamespace(
            pool=SimpleNamespace(drain=lambda: events), chunk_bytes=BLOCK,
            files=SimpleNamespace(by_number={FILE: self.file}),
            processes=SimpleNamespace(slots={SLOT: client}),
        )  # fmt: skip
        self.client, nobody = client, cast(Any, None)
        arbiter: Any = SimpleNamespace(observe=self._observe)
        publisher: Any = SimpleNamespace(active=True, put=self._put)
        PoolBridge(pool, nobody, arbiter, nobody, nobody, publisher, nobody).take_events()

    def _observe(self, batch: Batch) -> list[None]:
        self.seen += [(one.start, one.end, one.passed) for one in batch.touches]
        return [None for _ in batch.touches]

    def _put(
        self, kind: int, at_ns: int, pid: int, file: object, start: int, length: int, value: int,
        how: int, tid: int,
    ) -> None:  # fmt: skip
        self.published.append((start, length, how))


def test_the_faults_of_a_record_are_one_touch_and_each_is_published() -> None:
    events = [fault(8, kind=uffd_pool.MISS), fault(9, 1), fault(10, 1), fault(11, 1)]
    bridge = Bridge(events)
    assert bridge.seen == [(8 * BLOCK, 11 * BLOCK + PAGE_BYTES, 0)]
    ways = [POOL_TOUCH | POOL_MISS, POOL_TOUCH, POOL_TOUCH, POOL_TOUCH]
    assert bridge.published == [
        (event.offset, PAGE_BYTES, how) for event, how in zip(events, ways, strict=True)
    ]
    assert bridge.client.watched.pool_misses == 1


def test_what_was_come_over_before_the_first_of_them_stays_with_it() -> None:
    assert Bridge([fault(8, 4), fault(12, 4)]).seen == [
        (8 * BLOCK, 12 * BLOCK + PAGE_BYTES, 4 * BLOCK)
    ]


@pytest.mark.parametrize(
    "second",
    [
        fault(9),  # where nothing was come over
        fault(9, 1, tid=2),
        fault(20, 1),  # of another stream
        fault(7, -1),
    ],
)
def test_others_are_touches_of_their_own(second: PoolEvent) -> None:
    assert Bridge([fault(8), second]).seen == [
        (one.offset, one.offset + PAGE_BYTES, one.passed) for one in (fault(8), second)
    ]
