# SPDX-License-Identifier: Apache-2.0
"""Which pages of a file in the pool are compared with the file."""

from __future__ import annotations

import numpy as np

from uffdprefetch.base.cache_call import CHUNK_MAX_BYTES
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.state.pool_file import PoolFile

#: Of which one page is compared with the file.
SAMPLED_BYTES = CHUNK_MAX_BYTES


def sampled_pages(
    pooled: PoolFile, size_bytes: int, most: int, spilled: uffd_pool.DiskCopies | None = None
) -> list[int]:
    """A random page of each SAMPLED_BYTES with chunks that are resident, or lie in the disk tier
    (service/freshness.py)."""
    page_bytes, random = uffd.PAGE_BYTES, np.random.default_rng()
    there = np.asarray(pooled.books.state) == uffd_pool.PRESENT
    if spilled is not None:
        there |= spilled.mask()
    chunks = random.permutation(np.flatnonzero(there))
    cells = chunks * pooled.chunk_bytes // SAMPLED_BYTES
    _, first = np.unique(cells, return_index=True)
    chosen = chunks[random.permutation(first)[:most]]
    per = pooled.chunk_bytes // page_bytes
    pages = chosen * per + random.integers(0, per, len(chosen))
    return sorted(int(page) for page in pages if (page + 1) * page_bytes <= size_bytes)
