# SPDX-License-Identifier: Apache-2.0
"""What a fault of the pool's memory tells that its reader has come over (readers/predictor.py,
Observation.passed): that is booked as touched, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from guess_bed import BLOCK, MIB, MS, Bed
from small_pool import part_of, pool_of

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.units import PAGE_BYTES
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.predict.fronts import TOUCHED
from uffdprefetch.predict.storage import Storage, least_gain, stream_gain
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.state.files import FileState
from uffdprefetch.warm.meter import Meter

pytest_plugins = ("guess_bed",)


class Pooled(Bed):
    """A mapping of the pool's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: FileState) -> None:
        super().__init__(monkeypatch)
        pool, _ = pool_of(512 * MIB, "lru")
        chunks = file.size_bytes // BLOCK
        self.state = np.zeros(chunks, np.uint8)
        self.touched_ms = np.zeros(chunks, np.uint32)
        native: Any = SimpleNamespace(submit=lambda *_: True, reap=list, used_bytes=lambda: 0)
        file.pooled = part_of(native, 3, BLOCK, self.state, self.touched_ms)
        monkeypatch.setattr(self.windows, "pool", pool.size)
        self.file, self.mapping = file, self.region(file)

    def fault(self, at: int, passed: int = 0, length: int = BLOCK) -> None:
        """Of one block."""
        self.now += MS
        seen = Observation(at, at + length, self.now, passed=passed)
        self.arbiter.observe(Batch(self.mapping, self.now, [seen]))
        self.arbiter.plan()

    @property
    def booked(self) -> list[tuple[int, int]]:
        """What the file's books, and what guesses, take for touched; they agree."""
        flags, found, guessed = self.ahead._of(self.file).fronts.flags, IntervalSet(), IntervalSet()
        for block in range(len(flags)):
            at = block * BLOCK
            if flags[block] & TOUCHED:
                guessed.add(at, at + BLOCK)
            if any(self.file.blocks.counts(block, block + 1)[i] for i in (0, 2)):
                found.add(at, at + BLOCK)
        assert list(found) == list(guessed)
        return list(found)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch, file: FileState) -> Pooled:
    return Pooled(monkeypatch, file)


@pytest.mark.parametrize("epoch", [1, 2])
def test_what_a_fault_says_that_was_passed_is_booked(bed: Pooled, epoch: int) -> None:
    if epoch == 2:  # all of it has been there before
        bed.mapping.scan.mapped.add(0, 4 * MIB)
    bed.fault(0)
    bed.fault(MIB, passed=MIB - BLOCK)
    assert bed.booked == [(0, MIB + BLOCK)]


def test_so_it_is_of_who_goes_backward(bed: Pooled) -> None:
    bed.fault(2 * MIB)
    bed.fault(MIB, passed=-(MIB - BLOCK))
    assert bed.booked == [(MIB, 2 * MIB + BLOCK)]


@pytest.mark.parametrize("page", [0, 7, 15])
def test_who_goes_back_from_page_to_page_touches_the_last_page_of_each_block_first(
    bed: Pooled, page: int
) -> None:
    """Each block was a miss of its own then; who goes back piece by piece has half as many."""
    bed.file.blocks.mark_prefetched(0, 2 * MIB)
    for block in range(31, 15, -1):
        at = block * BLOCK + page * PAGE_BYTES
        bed.fault(at, passed=-BLOCK if block < 31 else 0, length=PAGE_BYTES)
    used = bed.file.blocks.used
    assert used.ahead_blocks == 16
    assert used.by_page == (15 if page == 15 else 0)


@pytest.mark.parametrize("page", [0, 7, 15])
def test_who_goes_on_by_rows_enters_blocks_elsewhere_than_by_their_first_page(
    bed: Pooled, page: int
) -> None:
    """Where the kernel reads on is left out then, and each block was a miss of its own."""
    bed.file.blocks.mark_prefetched(0, 2 * MIB)
    for block in range(16):
        bed.fault(block * BLOCK + page * PAGE_BYTES, passed=BLOCK * (block > 0), length=PAGE_BYTES)
    used = bed.file.blocks.used
    assert used.ahead_blocks == 16
    assert used.by_page == (15 if page else 0)


def test_a_touch_goes_on_from_the_one_before_it(bed: Pooled) -> None:
    """Before any look has found that mapped: of records of a few blocks each was a miss."""
    bed.file.blocks.mark_prefetched(0, 2 * MIB)
    bed.fault(MIB, length=PAGE_BYTES)
    bed.fault(MIB + BLOCK, length=PAGE_BYTES)
    assert (bed.file.blocks.used.runs, bed.file.blocks.used.ahead_blocks) == (1, 2)


@pytest.mark.parametrize("apart", [MIB, 16 * MIB, 64 * MIB])
def test_what_lies_between_two_touches_is_not(bed: Pooled, apart: int) -> None:
    bed.fault(0)
    bed.fault(apart)
    assert bed.booked == [(0, BLOCK), (apart, apart + BLOCK)]


def test_of_an_earlier_epoch_what_is_still_mapped_is(bed: Pooled) -> None:
    """It does not fault (state/pool_file.py, come_over())."""
    bed.state[:] = uffd_pool.PRESENT
    bed.touched_ms[:] = 1
    bed.fault(0)
    bed.fault(MIB)
    assert bed.booked == [(0, MIB + BLOCK)]


def test_who_goes_on_in_order_is_read_ahead_of_on_a_link_whose_misses_are_left_to_the_kernel(
    bed: Pooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the pool's threads that read what is missed, too."""
    monkeypatch.setattr(Meter, "is_sure", True)
    monkeypatch.setattr(Meter, "link", Storage(3e9, 20e-6))
    for at in range(0, 32 * MIB, 2 * BLOCK):
        bed.fault(at, length=2 * BLOCK)
    near = bed.ahead.measured()
    assert stream_gain(1.0, 0.0, False, near) <= least_gain(near)
    of, reader = bed.ahead._of(bed.file), bed.mapping.reader
    (front,) = of.fronts.fronts
    assert bed.ahead._window(of, front, reader, bed.ahead._link(reader))[1] < 1.0
