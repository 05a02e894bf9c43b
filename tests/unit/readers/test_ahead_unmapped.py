# SPDX-License-Identifier: Apache-2.0
"""What a process has touched is learned from though the file is unmapped before the next turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.file_states import file_of
from uffdprefetch.predict.randomness import Access
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.ahead import Ahead
from uffdprefetch.sense.observation import Batch
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import Unneeded
from uffdprefetch.warm.scheduler import Device

MIB = 1 << 20
NOW = 10**9


def ahead() -> Ahead:
    scheduler: Any = SimpleNamespace(
        meter=SimpleNamespace(link=None, is_sure=False, lacks_large=True),
        under_way_bytes=1,
        forget=lambda consumer: None,
        device_of=lambda file: Device(),
    )
    shards: Any = SimpleNamespace(beyond=lambda *_: iter(()))
    room: Any = SimpleNamespace(holders=[])
    windows: Any = SimpleNamespace(
        asked=lambda *_: None, share_bytes=lambda file: (1 << 40, 1 << 40)
    )
    return Ahead(
        scheduler, Ledger(), EventPublisher(), room, shards,
        lambda reader: None, lambda *_: 0, windows,
    )  # fmt: skip


def mapped(number: int, size_bytes: int) -> Any:
    """A mapping of a file of the kind that all of them are."""
    file = file_of(size_bytes, f"/data/{number}.bin", number)
    file.opened = file.opened._replace(fd=3)
    reader = SimpleNamespace(
        file=file, pid=7, rank=0, reads_pool=False, says_random=False,
        regions={}, access=Access.UNKNOWN,
        unneeded=Unneeded(),
        table=SimpleNamespace(streams=[]), span=SimpleNamespace(start_bytes=0, end_bytes=1 << 30),
    )  # fmt: skip
    return SimpleNamespace(file=file, reader=reader, mode=ServingMode.PAGE_TABLES)


def wanted_bytes(policy: Ahead) -> int:
    """Ahead of one who has come over a MiB of another such file."""
    region = mapped(0, 1 << 30)
    policy.observe(Batch(region, NOW, [], [(0, MIB)]), [])
    return sum(wanted.end - wanted.start for _, wanted in policy.demand(region.reader, NOW))


def test_streams_of_mappings_that_go_before_the_next_turn_tell_how_far_such_streams_go() -> None:
    far, near = ahead(), ahead()
    for number in range(1, 17):
        for policy, size in ((far, 8 * MIB), (near, MIB)):
            region = mapped(number, 9 * MIB)
            policy.observe(Batch(region, NOW, [], [(0, size)]), [])
            policy.unmapped(region)
    assert wanted_bytes(near) < wanted_bytes(ahead()) < wanted_bytes(far)
