# SPDX-License-Identifier: Apache-2.0
"""predict/used.py: what looks at those who go backward say of how they do."""

from __future__ import annotations

import pytest

from uffdprefetch.predict.used import Used


@pytest.mark.parametrize(("looks", "backward"), [(16, False), (17, True)])
def test_who_leaves_a_gap_in_one_look_of_sixteen_goes_back_by_slices(
    looks: int, backward: bool
) -> None:
    uses = Used()
    for look in range(looks):
        uses.came(4, 4, used_before=False, used_behind=True)
        if not look:  # it has begun a slice anew
            uses.came(4, 4, used_before=False, used_behind=False)
        uses.looked(1_000_000)
    assert uses.backward is backward
