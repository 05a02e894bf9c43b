# SPDX-License-Identifier: Apache-2.0
"""What is read to measure a link (readers/ahead.py, _probe()): no more than a run may lose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.predict.storage import FREE_BYTES
from uffdprefetch.readers.ahead import Ahead

MIB = 1 << 20
BLOCKS = 4096


@pytest.mark.parametrize(("unit_bytes", "most"), [(4 * MIB, 1), (MIB, 4), (0, 99)])
def test_where_each_is_a_whole_request_few_are_sent(unit_bytes: int, most: int) -> None:
    device = SimpleNamespace(probes=0)
    meter = SimpleNamespace(is_sure=False, lacks_large=True)
    ahead: Any = SimpleNamespace(
        _scheduler=SimpleNamespace(device_of=lambda file: device, meter=meter, under_way_bytes=0),
        account=SimpleNamespace(open=0, spare_bytes=lambda *given: FREE_BYTES),
        _is_near=lambda reader: False,
        _free_bytes=lambda reader: FREE_BYTES,
        _unless_there=lambda of, reader, start, end: (start, end),
    )
    of: Any = SimpleNamespace(
        file=SimpleNamespace(call=SimpleNamespace(unit_bytes=unit_bytes)),
        fronts=SimpleNamespace(blocks=BLOCKS, flags=bytearray(BLOCKS)),
    )
    reader: Any = None
    sent = sum(len(Ahead._probe(ahead, of, reader, 0)) for _ in range(50))
    assert 0 < sent == device.probes <= most
    assert sent * unit_bytes <= FREE_BYTES and (sent == most or not unit_bytes)
