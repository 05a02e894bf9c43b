# SPDX-License-Identifier: Apache-2.0
"""When a service that was asked to end does so while its launcher has not come to it yet."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.service.ending import Ending


@pytest.mark.parametrize(
    ("may_come", "none", "ends"), [(True, True, False), (False, True, True), (False, False, False)]
)
def test_who_is_awaited_can_come_or_is_not(may_come: bool, none: bool, ends: bool) -> None:
    """Who came before its socket was removed is served on."""
    launchers = SimpleNamespace(has_come=lambda pid: False, parting=False)
    peers: Any = SimpleNamespace(
        launchers=launchers, over=False, none=none, only_strangers=False, may_come=may_come
    )
    freshness: Any = SimpleNamespace(may_end=lambda: True)
    ending = Ending(os.getppid(), peers, freshness)
    ending._terminate()
    assert ending.has_come == ends
