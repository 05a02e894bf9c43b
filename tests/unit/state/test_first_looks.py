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


def test_a_look_that_finds_what_was_read_ahead_or_is_under_way_is_none_of_them(job: Job) -> None:
    """Its faults may have been waits for that, and they are not counted: from the look on that
    finds nothing but own misses again, which tells later, too."""
    job.look()
    job.file.blocks.mark_prefetched(0, BLOCK_BYTES)
    job.file.cache.in_flight.add(BLOCK_BYTES, 2 * BLOCK_BYTES)
    for ahead in ((0, BLOCK_BYTES), (BLOCK_BYTES, 2 * BLOCK_BYTES)):
        job.miss(*ahead)
        job.miss(9 * BLOCK_BYTES, 9 * BLOCK_BYTES + PAGE_BYTES)
        assert job.look() == FirstMisses()
    job.miss(19 * BLOCK_BYTES, 19 * BLOCK_BYTES + PAGE_BYTES)
    assert job.look() == FirstMisses(), "from here on"
    for at in range(FIRST_LOOKS):
        assert not job.looks.over
        job.miss((10 + at % 9) * BLOCK_BYTES, (10 + at % 9) * BLOCK_BYTES + PAGE_BYTES)
        assert job.look().faults == at + 1
    assert job.looks.over


def test_a_fault_elsewhere_and_a_checkpoint_are_none(job: Job) -> None:
    job.look()
    job.laid.add(50)
    job.miss(50 * PAGE_BYTES, 51 * PAGE_BYTES, 9)
    assert job.look() == FirstMisses()
    job.miss(0, PAGE_BYTES, 9)  # each has mapped a page at least
    assert job.look() == FirstMisses(1, PAGE_BYTES, 1, 1, 2 * MS)


def test_rows_that_lie_apart_miss_in_each_block_in_order(job: Job) -> None:
    """Of cut-outs of an image, whose mapping's addresses are no multiples of a block: each miss
    maps what is around it but for the page at which the kernel would read on."""
    job.look()
    for row in range(20):
        start = row * BLOCK_BYTES + BLOCK_BYTES // 2
        job.miss(start, start + 9 * PAGE_BYTES)
        job.miss(start + 10 * PAGE_BYTES, start + BLOCK_BYTES, 0)
        job.look()
    assert job.looks.found.runs == 1
    assert job.looks.found.rows_share == 1.0


def test_who_is_read_ahead_for_misses_in_no_block_in_order(job: Job) -> None:
    job.look()
    job.miss(0, PIECE)
    for at in range(PIECE, 16 * PIECE, PIECE):
        job.miss(at, at + PIECE, 0)
        job.look()
    assert job.looks.found.rows_share == 0.0
    job.miss(30 * PIECE, 31 * PIECE, 99)  # of libraries, which were not in memory
    job.look()
    assert job.looks.found.rows_share < 0.1


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
