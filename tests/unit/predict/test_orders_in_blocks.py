# SPDX-License-Identifier: Apache-2.0
"""predict/order/seen.py on orders that are known by blocks of 64 KiB (`wrap --learn`): a page of
one that is mapped tells that its reader was there."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import warnings_fail
from walked_orders import KIB, PAGE, fixed_records

from uffdprefetch.base.units import MIB
from uffdprefetch.predict.order.extents import OrderExtents, grain_bytes
from uffdprefetch.predict.order.seen import SeenCursor

pytestmark = warnings_fail

BLOCK, BLOCKS = 64 * KIB, 4096
ORDER = np.random.default_rng(3).permutation(BLOCKS)


@pytest.mark.parametrize(("in_blocks", "wanted"), [(True, 64), (False, 0)])
def test_a_page_of_each_block_moves_the_position(in_blocks: bool, wanted: int) -> None:
    units = OrderExtents.of(fixed_records(ORDER, BLOCK), BLOCKS * BLOCK, PAGE)
    units.in_blocks = in_blocks
    walk = SeenCursor(units, BLOCKS * BLOCK)
    walk.due(64 * BLOCK)
    found = sorted((block * BLOCK + PAGE, block * BLOCK + 2 * PAGE) for block in ORDER[:64])
    assert walk.mapped([(int(a), int(b)) for a, b in found], 1) == []
    assert walk.position == wanted


def test_another_order_is_still_found_wrong() -> None:
    units = OrderExtents.of(fixed_records(ORDER, BLOCK), BLOCKS * BLOCK, PAGE)
    units.in_blocks = True
    walk = SeenCursor(units, BLOCKS * BLOCK)
    walk.due(64 * BLOCK)
    other = np.random.default_rng(4).permutation(BLOCKS)
    for at in range(0, 1024, 64):
        found = [
            (int(block) * BLOCK, int(block + 1) * BLOCK) for block in sorted(other[at : at + 64])
        ]
        walk.looked(found, walk.mapped(found, at + 1))
    assert walk.wrong is not None


@pytest.mark.parametrize(
    ("size_tib", "grain_mib"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 4)]
)
def test_an_order_of_whole_large_files_is_cut_no_finer_than_its_arrays_may_be(
    size_tib: int, grain_mib: int
) -> None:
    """32 MiB each, of eight bytes a piece."""
    grain = grain_bytes(size_tib << 40)
    assert grain == grain_mib * MIB
    assert 8 * (size_tib << 40) // grain <= 32 * MIB
