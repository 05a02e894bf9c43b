# SPDX-License-Identifier: Apache-2.0
"""sense/pagetable_scan.py: how far a look goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.base.clock import Clock
from uffdprefetch.predict.checkpoints import Span
from uffdprefetch.predict.streams import SETTLED_BYTES, Stream
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.sense import pagetable_scan
from uffdprefetch.sense.pagetable_scan import LOOK_FIRST_NS, PagetableScanner
from uffdprefetch.state.region import ScanState

MIB, MS, SIZE, NOW = 1 << 20, 1_000_000, 1 << 30, 10**12


@pytest.mark.parametrize("walks", [True, False])
def test_a_walk_of_a_reader_that_is_doubted_does_not_narrow_the_look(
    monkeypatch: pytest.MonkeyPatch, walks: bool
) -> None:
    """Two touches of a random reader may lie like one fast walk; ahead of that there is nothing."""
    looked: list[tuple[int, int]] = []

    def new_touches(region: Any, start: int, end: int, tell: Any) -> tuple[list[Any], int]:
        looked.append((start, end))
        return [], 0

    monkeypatch.setattr(pagetable_scan.pagetables, "new_touches", new_touches)
    stream = Stream(1, 0, 7, 0, 2 * SETTLED_BYTES, NOW - MS, NOW - MS, active=True)
    reader: Any = SimpleNamespace(
        may_prefetch=walks, order=SimpleNamespace(announced=False, followed=False), pid=7,
        file=None,
    )  # fmt: skip
    region: Any = SimpleNamespace(
        reader=reader, walks=[stream], verdict=ServingMode.CHECKPOINTS, offset_bytes=0,
        span=Span(0, SIZE, 4096), scan=ScanState(whole_ns=NOW - MS),
    )  # fmt: skip
    layout: Any = SimpleNamespace(lookahead=lambda _: 16 * MIB)
    tap: Any = SimpleNamespace(active=False)
    scanner = PagetableScanner(
        layout, tap, lambda *_: None, lambda *_: None, Clock(lambda: NOW, lambda: 0)
    )
    scanner.look(region, NOW, 1)
    assert ((0, SIZE) in looked) is not walks
    assert (region.scan.due_ns - NOW == LOOK_FIRST_NS) is not walks
