# SPDX-License-Identifier: Apache-2.0
"""service/agents.py: how many mappings a process may have told of at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.protocol import wire
from uffdprefetch.service import agents
from uffdprefetch.service.opened_files import FIRST_READ
from uffdprefetch.state.pending import PendingMappings
from uffdprefetch.state.reader import FIRST_OBSERVED


def attach() -> wire.Attach:
    return wire.Attach(
        region=agents.REGIONS_MAX, flags=0, address=1 << 20, length_bytes=1 << 20, offset_bytes=0,
        device=1, inode=2, size_bytes=1 << 20, mtime_ns=3, map_flags=1, advice=0,
    )  # fmt: skip


def client(*regions: int) -> Any:
    return SimpleNamespace(regions=dict.fromkeys(regions), pending=PendingMappings())


def test_what_it_has_not_told_of_takes_no_place_of_a_mapping() -> None:
    """A process with many mappings that reads files, too, was disconnected."""
    told = range(agents.REGIONS_MAX - 1)
    others = [first + number for first in (FIRST_OBSERVED, FIRST_READ) for number in range(1, 9)]
    agents._check_attach(client(*told, *others), attach())


def test_more_than_it_may_tell_of_are_refused() -> None:
    with pytest.raises(wire.WireError):
        agents._check_attach(client(*range(agents.REGIONS_MAX)), attach())
