# SPDX-License-Identifier: Apache-2.0
"""Which chunks are used again and again, told by misses alone: the kernel's refault distance. Pure.

[Weiner] (mm/workingset.c). What is mapped makes no fault, so how often a resident chunk is used is
not seen. What is seen is that it was evicted and is missed again, and how many chunks were evicted
in between: its *refault distance*. Where that is short, twice running, keeping the chunk would have
saved a read at the price of little else: it is *active*, and victims are chosen among the others.
The second time is what the kernel's second touch is: of the blocks of an unknown permutation some
come back soon by chance, and hardly any of them twice.

A scan makes nothing active: its distances are what it leaves out of the pool in a whole round, and
misses on a stream are not even asked (service/pool_bridge.py).

The books are arrays with one entry a chunk (native/pool.Books): ``left``, the number of evictions
when the chunk was evicted last, and ``refaults``, how often running it came back soon, up to
ACTIVE. These are the ghost entries: 5 bytes for each chunk of the files in the pool, 80 MiB for
1 TiB, of which pages that were never written take no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from uffdprefetch.base.arrays import Array, BoolArray, ByteArray
from uffdprefetch.native.pool import ACTIVE

#: A refault distance is short up to this fraction of the pool: what is activated displaces no more
#: than that, and of twice the pool, read in unknown orders, one chunk in 128 comes back so soon. So
#: much is never active: it is for what is read once, and to find what is used now.
NEAR_SHARE = 8
#: A chunk stays active until this many times the pool has been evicted since it was itself. Whether
#: it is still used is not seen; if so, it costs one more miss then.
LASTS_POOLS = 4


class Ghosts(NamedTuple):
    """The books of one file, one entry a chunk."""

    refaults: ByteArray
    left: Array  # uint32, modulo 2**32; 0: never
    present: BoolArray


def refaulted(refaults: int, distance: int, pool_chunks: int) -> int:
    """A chunk's short refaults running after one more of this distance."""
    return min(refaults + 1, ACTIVE) if distance <= max(1, pool_chunks // NEAR_SHARE) else 0


def retire(files: Sequence[Ghosts], evictions: int, pool_chunks: int) -> None:
    """Make ordinary again what was proven too long ago, and the longest ago of what is too much.

    One more short refault makes it active again. ``evictions``: the number of chunks that were
    evicted so far, modulo 2**32.
    """
    found = [np.flatnonzero((file.refaults >= ACTIVE) & file.present) for file in files]
    ages = [
        np.uint32(evictions) - file.left[chunks] for file, chunks in zip(files, found, strict=True)
    ]
    oldest = min(LASTS_POOLS * pool_chunks, 2**32 - 1)
    most = pool_chunks - pool_chunks // NEAR_SHARE
    if sum(map(len, ages)) > most:
        kept = np.partition(np.concatenate(ages), most)[most]
        oldest = min(oldest, max(0, int(kept) - 1))
    for file, chunks, its in zip(files, found, ages, strict=True):
        file.refaults[chunks[its > oldest]] = ACTIVE - 1
