# SPDX-License-Identifier: Apache-2.0
"""How many threads fill the pool, how large the blocks are that leave it, and how many are chosen
at a time. The figures are those of docs/pool.md and of the constants' comments."""

from __future__ import annotations

import importlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.base.config import Config
from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.pool.loader import Loader
from uffdprefetch.pool.node_pool import NodePool
from uffdprefetch.pool.size import NEARLY_FULL
from uffdprefetch.state.ledger import Histogram, Ledger

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Native:
    """A pool of no memory, of which so many victims are left."""

    def __init__(self) -> None:
        self.left, self.threads = 0, 0

    def make(self, budget: int, chunk: int, threads: int, *_: Any, **__: Any) -> Any:
        self.threads = threads
        return self

    def set_victims(self, rows: Any) -> None:
        list(rows)

    def victims_left(self) -> int:
        return self.left

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0


def pool_of(
    native: Native, allowed: int, limit: Limit, budget: int = GIB, ledger: Ledger | None = None
) -> NodePool:
    limits: Any = SimpleNamespace(pool_bytes=lambda held: (allowed, limit))
    settings = Config.of(engine="pool", budget_bytes=budget)
    return NodePool(settings, -1, ledger or Ledger(), limits=limits, make=native.make)


@pytest.mark.parametrize(
    ("allowed_mib", "limit", "threads"),
    [
        (1024, Limit.BUDGET, 16),
        (480, Limit.MEMORY, 10),  # of an eighth, 6 MiB each
        (4096, Limit.MEMORY, 16),
        (48, Limit.MEMORY, 4),
    ],
)
def test_so_many_threads_fill_it_as_an_eighth_of_it_has_room_for_their_buffers(
    allowed_mib: int, limit: Limit, threads: int
) -> None:
    native = Native()
    pool_of(native, allowed_mib * MIB, limit)
    assert native.threads == threads


@pytest.mark.parametrize(
    ("planned", "block_kib"), [(False, 2048), (True, 32)], ids=["unknown", "planned"]
)
def test_of_known_orders_smaller_blocks_leave(planned: bool, block_kib: int) -> None:
    native = Native()
    pool = pool_of(native, GIB, Limit.BUDGET)
    order: Any = SimpleNamespace(file=SimpleNamespace(pooled=None), rate_bytes_per_second=0.0)
    pool.victims._chunk_bytes = 4 * KIB  # so that none is bounded by the size of a chunk
    pool.victims.plan([], [order] if planned else [])
    assert pool.victims.block_bytes == block_kib * KIB


def test_a_list_of_a_small_pool_has_eight_blocks() -> None:
    native = Native()
    pool = pool_of(native, MIB, Limit.BUDGET, MIB)
    pool.victims.plan([])
    pool.size.used_bytes = lambda: MIB  # type: ignore[method-assign]
    native.left = 5
    assert not pool.victims.wants_list()
    native.left = 4
    assert pool.victims.wants_list(), "half of it is used"


@pytest.mark.parametrize(
    ("room_mib", "disk", "loads"),
    [(400, None, False), (380, None, True), (7000, SimpleNamespace(), True)],
)
def test_who_chooses_is_loaded_when_less_room_is_left_than_storage_fills_meanwhile(
    room_mib: int, disk: Any, loads: bool
) -> None:
    """With a disk at once: what will leave is written before."""
    native = Native()
    pool = pool_of(native, 8 * GIB, Limit.BUDGET, budget=8 * GIB)
    pool.disk = disk
    pool.loader = Loader("colorsys", list[str]().append)  # which takes no time
    pool.loader.aside = True
    native.used_bytes = lambda: int(NEARLY_FULL * 8 * GIB) - room_mib * MIB  # type: ignore[attr-defined]
    assert not pool.can_choose() or loads
    assert (pool.loader._thread is not None) == loads


def test_who_chooses_is_waited_for_by_nobody_and_a_pool_is_served_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left of a module whose import has failed is not gone on with: numpy's had no
    `matrix`, and the service died."""
    native, gate, ledger = Native(), threading.Event(), Ledger()
    pool = pool_of(native, GIB, Limit.BUDGET, ledger=ledger)
    pool.loader.aside = True
    native.used_bytes = lambda: GIB - MIB  # type: ignore[attr-defined]

    def fails(_: str) -> None:
        gate.wait()
        raise AttributeError("module 'numpy' has no attribute 'matrix'")

    monkeypatch.setattr(importlib, "import_module", fails)
    assert not pool.can_choose(), "it is being loaded, though the pool is nearly full"
    gate.set()
    pool.loader.close()
    assert not pool.can_choose() and not pool.can_choose()
    (told,) = ledger.degradations
    assert "next in turn" in told and "no attribute 'matrix'" in told


def test_the_quickest_fills_leave_out_what_the_page_cache_has_answered_in_part() -> None:
    """Of stacks of images one of 0.13 ms made a link without a latency, and nothing was told."""
    made = Histogram()
    for ns in (130_000, 250_000, *[1_300_000] * 60):
        made.add(ns)
    bins = [made._bins.get(one, 0) for one in range(max(made._bins) + 1)]
    counts = SimpleNamespace(fill_bin=bins, fill_sum_ns=made.sum, fill_max_ns=made.max)
    pool: Any = SimpleNamespace(pool=SimpleNamespace(counts=lambda: counts), chunk_bytes=64 * KIB)
    quickest = NodePool.quickest_fills(pool)
    assert len(quickest) == 3
    assert {size for size, _ in quickest} == {64 * KIB}
    assert all(1.1e-3 < seconds <= 1.3e-3 for _, seconds in quickest)
