# SPDX-License-Identifier: Apache-2.0
"""Eviction where readers' orders are known: Belady's rule as far as the orders go. Pure.

([Belady]; [HDMLP] section 4.2: what is needed last need not be held.) After the known orders comes
another epoch in an unknown one, in which any block may come first: so of the blocks without a known
next use the newest is evicted, and a fixed part of the file stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.units import PAGE_BYTES
from uffdprefetch.pool.eviction import (
    NOBODY,
    SKIP,
    BlockReader,
    Residents,
    distances,
    evictable,
    farthest_first,
    newest_first,
    smallest,
)
from uffdprefetch.predict.storage import SLOW_BYTES_PER_SECOND


def victims(
    residents: Residents,
    readers: Sequence[BlockReader],
    count: int,
    next_use_distance_bytes: Array,
    known: Array,
    block_bytes: int,
    now_ms: int,
    rate_bytes_per_second: float,
) -> Array:
    """Rows of at most ``count`` blocks to evict, best victim first (pool/eviction.Policy).

    next_use_distance_bytes: float64, one a row, bytes of the orders before the block's next use;
    inf: none as far as they are known. known: bool, whether it is in any order at all; others (a
    B-tree's pages, files without orders) go by ``readers``, or by their age (now_ms, as touched).
    """
    free = evictable(residents, readers)
    distance = next_use_distance_bytes.copy()
    other = ~known
    if other.any():
        estimated = _estimated(residents, readers, block_bytes, now_ms, rate_bytes_per_second)
        distance[other] = estimated[other]
    used_up = free & known & np.isinf(distance)
    first = smallest(residents, newest_first(residents, used_up), count)
    if len(first) >= count:
        return first
    # a uint32 covers 16 TiB of an order in pages
    units = np.minimum(distance / PAGE_BYTES, float(SKIP - np.uint32(2))).astype(np.uint32)
    rest = smallest(residents, farthest_first(units, free & ~used_up), count - len(first))
    return np.concatenate((first, rest))


def _estimated(
    residents: Residents, readers: Sequence[BlockReader], block_bytes: int, now_ms: int, rate: float
) -> Array:
    """Estimated bytes until each block's next use, where no order says: as far ahead as its last
    use is ago, at the reader's rate; where that is not known yet, at a slow link's."""
    ahead = distances(residents, readers)
    age_ms = np.maximum(now_ms - residents.touched.astype(np.int64), 0)
    by_age = age_ms / 1e3 * (rate or SLOW_BYTES_PER_SECOND)
    return np.where(ahead == NOBODY, by_age, ahead.astype(np.float64) * block_bytes)
