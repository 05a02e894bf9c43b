# SPDX-License-Identifier: Apache-2.0
"""Which extent goes to storage next, with a pool that only takes notes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from uffdprefetch import uffd
from uffdprefetch.node.files import FileState
from uffdprefetch.progress.streams import Stream
from uffdprefetch.warm.limits import TokenBucket
from uffdprefetch.warm.scheduler import READAHEAD_EXTENT_BYTES, Scheduler

MIB = 1 << 20
NOW = 10**12


class Notes:
    """A pool: (start, length) of each job in order; finish() lets all of them have been read."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self._under_way: list[tuple[int, int]] = []

    def submit(self, number: int, fd: int, start: int, length: int, **_: Any) -> bool:
        self.sent.append((start, length))
        self._under_way.append((number, length))
        return True

    def reap(self) -> list[uffd.WarmResult]:
        done = [
            uffd.WarmResult(
                id=number, submit_ns=NOW, start_ns=NOW, done_ns=NOW + 7_000_000, resident_bytes=0,
                bytes=length, copied=0, method=uffd.WARM_READAHEAD, chunk_bytes=MIB, error=0,
            )
            for number, length in self._under_way
        ]  # fmt: skip
        self._under_way.clear()
        return done


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FileState]:
    path = tmp_path / "records"
    with open(path, "wb") as sparse:
        sparse.truncate(1 << 30)
    state = FileState.open(os.open(path, os.O_RDONLY), str(path))
    yield state
    state.close()


def reader(number: int, position: int, rate: float) -> Stream:
    stream = Stream(number, number, 1, position - 64 * MIB, position, 1, NOW, active=True)
    stream.rate_bytes_per_second = rate
    return stream


def test_a_rank_that_has_waited_is_not_served_less_for_it(file: FileState) -> None:
    """Its measured rate is low because it waited; by rates it would fall behind further."""
    notes = Notes()
    scheduler = Scheduler(notes, TokenBucket(None, MIB), lambda *_: None, 4 * MIB)  # type: ignore[arg-type]
    places = (100 * MIB, 500 * MIB, 800 * MIB)
    for number, (place, rate) in enumerate(zip(places, (300e6, 40e6, 150e6), strict=True)):
        stream = reader(number, place, rate)
        assert scheduler.want(file, stream, place, place + 40 * MIB) == 40 * MIB
    while scheduler.queued_bytes:
        scheduler.pump(NOW)
        scheduler.reap()
    got = dict.fromkeys(places, 0)
    for start, length in notes.sent:
        place = max(p for p in places if p <= start)
        got[place] += length
        assert max(got.values()) - min(got.values()) <= READAHEAD_EXTENT_BYTES * 2
    assert set(got.values()) == {40 * MIB}
