# SPDX-License-Identifier: Apache-2.0
"""A pool without its threads: what it would have evicted is told instead."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from uffdprefetch.base.config import Config
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.pool.node_pool import NodePool
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.pool_file import PoolFile


def part_of(
    native: Any, number: int, chunk_bytes: int, state: np.ndarray, touched_ms: np.ndarray
) -> PoolFile:
    """A file's part of a pool; nothing of it is kept for others, and nothing was evicted."""
    part = PoolFile(native, number, -1, chunk_bytes)
    kept, refaults = np.zeros((2, len(state)), np.uint8)
    left: np.ndarray = np.zeros(len(state), np.uint32)
    part.books = uffd_pool.Books(state.data, touched_ms.data, kept.data, refaults.data, left.data)
    return part


def pool_of(budget_bytes: int, evict: str) -> tuple[NodePool, list[tuple[int, int, int]]]:
    """A pool that holds 64 blocks of 64 KiB of file 3, the first of them touched first, and the
    victims that it is told."""
    told: list[tuple[int, int, int]] = []

    def tell(victims: Iterator[tuple[int, int, int]]) -> None:
        told[:] = victims

    native: Any = SimpleNamespace(set_victims=tell, evictions=lambda: 0)
    settings = Config.of(engine="pool", budget_bytes=budget_bytes, evict=evict)
    pool = NodePool(settings, -1, Ledger(), make=lambda *_, **__: native)
    state = np.full(64, uffd_pool.PRESENT, np.uint8)
    touched = np.arange(1, 65, dtype=np.uint32)
    part = part_of(native, 3, 64 << 10, state, touched)
    pool.files.by_number[3] = SimpleNamespace(pooled=part, size_bytes=64 * (64 << 10))  # type: ignore[assignment]
    return pool, told
