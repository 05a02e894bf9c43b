# SPDX-License-Identifier: Apache-2.0
"""Orders of records that tests walk through."""

from __future__ import annotations

import numpy as np

from uffdprefetch.predict.order.order import Order

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4096


def fixed_records(records: np.ndarray, size: int, header: int = 0) -> Order:
    """Records of one size, read in this order."""
    starts = header + np.asarray(records, np.int64) * size
    return Order(starts, starts + size, np.arange(len(starts)))


def shuffled(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)
