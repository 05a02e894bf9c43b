# SPDX-License-Identifier: Apache-2.0
"""What a reader of the pool waits when nothing else is read (NodePool.least_wait_seconds)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from uffdprefetch.pool.node_pool import WAITS_LEAST, NodePool

MS = 1_000_000


def least(waits_ns: list[int]) -> float | None:
    bins = [0] * 512
    for ns in waits_ns:  # as csrc/service/pool/pool.c, pool_bin
        octave = max(0, ns.bit_length() - 4)
        bins[octave * 8 + (ns >> octave)] += 1
    counts = SimpleNamespace(wait_bin=bins, wait_sum_ns=sum(waits_ns), wait_max_ns=max(waits_ns))
    pool: Any = SimpleNamespace(pool=SimpleNamespace(counts=lambda: counts))
    return NodePool.least_wait_seconds(pool)


def test_the_shortest_of_some_is_told_and_none_of_a_few() -> None:
    assert least([MS] * (WAITS_LEAST - 1)) is None
    found = least([MS, *[50 * MS] * (WAITS_LEAST - 1)])
    assert found is not None and 1e-3 <= found <= 1.125e-3
