# SPDX-License-Identifier: Apache-2.0
"""What a reader's own first misses have brought (state/reader.py, FirstLooks)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.file_states import file_of
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.units import PAGE_BYTES
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.used import FirstMisses
from uffdprefetch.state import processes
from uffdprefetch.state.reader import FIRST_LOOKS, FirstLooks

PIECE, MS = 2 * BLOCK_BYTES, 1_000_000


class Job:
    """A process, one mapping of it, and looks at that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.faults: int | None = 40  # of its libraries
        monkeypatch.setattr(processes, "major_faults", lambda _pid: self.faults)
        self.file = file_of(64 * BLOCK_BYTES)
        self.mapped, self.laid = IntervalSet(), set[int]()
        self.now = 10**12
        self.looks, self.news = FirstLooks(7), list[tuple[int, int]]()

    def miss(self, start: int, end: int, faults: int = 1) -> None:
        """[start, end) bytes are mapped with so many major faults."""
        self.mapped.add(start, end)
        self.news.append((start, end))
        self.faults = None if self.faults is None else self.faults + faults

    def look(self) -> FirstMisses:
        region: Any = SimpleNamespace(
            checkpoints=SimpleNamespace(laid=self.laid), file=self.file,
            scan=SimpleNamespace(mapped=self.mapped, last_end_ns=self.now),
        )  # fmt: skip
        self.now += 2 * MS
        self.looks.look(region, self.news)
        self.news = []
        return self.looks.found


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_page_by_page_each_miss_brings_one(job: Job) -> None:
    """Under MADV_RANDOM, that nobody has heard of: nothing was told of 6 s that were saved."""
    job.miss(0, 120 * PAGE_BYTES, 120)
    assert job.look() == FirstMisses()  # what it finds was touched nobody knows when
    for page in range(120, 136, 2):
        job.miss(page * PAGE_BYTES, (page + 2) * PAGE_BYTES, 2)
        job.look()
    found = job.looks.found
    assert (found.faults, found.mapped_bytes, found.runs) == (16, 16 * PAGE_BYTES, 0)
    assert found.a_block == 16


def test_misses_that_are_read_ahead_for_bring_more(job: Job) -> None:
    job.look()
    for at in range(0, 8 * PIECE, PIECE):
        job.miss(at, at + PIECE)
        job.look()
    assert job.looks.found == FirstMisses(8, 8 * PIECE, 1, 16, 16 * MS)
    assert job.looks.found.brings_bytes == PIECE * 8 / 7 and not job.looks.found.a_block


def test_what_was_read_ahead_or_is_under_way_is_none_of_them(job: Job) -> None:
    """The first request of ours is a probe elsewhere in the file: what the reader came to after
    that was not looked at any more."""
    job.look()
    job.file.account.came(BLOCK_BYTES, 0)
    job.file.blocks.mark_prefetched(0, BLOCK_BYTES)
    job.file.cache.in_flight.add(BLOCK_BYTES, 2 * BLOCK_BYTES)
    job.miss(0, 2 * BLOCK_BYTES, 0)
    job.miss(9 * BLOCK_BYTES, 9 * BLOCK_BYTES + PAGE_BYTES)
    job.miss(20 * BLOCK_BYTES, 20 * BLOCK_BYTES + PAGE_BYTES)
    assert job.look() == FirstMisses(2, 2 * PAGE_BYTES, 2, 2, 2 * MS)
    assert not job.looks.over
    job.miss(PAGE_BYTES, BLOCK_BYTES, 0)  # and nothing else
    job.look()
    assert job.looks.over


def test_a_fault_elsewhere_and_a_checkpoint_are_none(job: Job) -> None:
    job.look()
    job.laid.add(5)
    job.miss(5 * PAGE_BYTES, 6 * PAGE_BYTES, 9)
    assert job.look() == FirstMisses()
    job.miss(0, PAGE_BYTES, 9)  # each has mapped a page at least
    assert job.look() == FirstMisses(1, PAGE_BYTES, 1, 1, 2 * MS)


def test_who_goes_back_begins_nothing_anew(job: Job) -> None:
    job.miss(10 * PIECE, 11 * PIECE)
    job.look()
    job.miss(9 * PIECE, 10 * PIECE)
    assert job.look() == FirstMisses(1, PIECE, 0, 2, 2 * MS)


def test_of_a_process_that_has_ended_nothing_more_is_known(job: Job) -> None:
    job.look()
    job.faults = None
    job.miss(0, PAGE_BYTES)
    assert job.look() == FirstMisses()
    assert not job.looks.over
    for _ in range(FIRST_LOOKS):
        job.look()
    assert job.looks.over
