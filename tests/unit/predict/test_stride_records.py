# SPDX-License-Identifier: Apache-2.0
"""Which records a skipping rank reads, from page tables as the kernel would leave them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
from conftest import warnings_fail
from strided_records import KIB, MIB, PAGE, index_of, mapped_by, uneven

from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.places import Listed, RecordPlaces, one_part
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.stride import Skipping, fits, infer, look

pytestmark = warnings_fail


def inferred(
    index: RecordIndex, runs: list[tuple[int, int]], direction: int = 1
) -> Skipping | None:
    """What the service would find at the reader's present place."""
    low, high = runs[0][0], runs[-1][0] + runs[-1][1]
    seen = look(index, runs, low, high, direction)
    return None if seen is None else infer(seen, direction)


# ---- what is found ----------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True], ids=["cold", "all cached"])
@pytest.mark.parametrize("period", [2, 3, 4, 16, 61, 256])
def test_a_rank_of_many_is_known_after_six_periods_and_24_records(
    period: int, cached: bool
) -> None:
    rank, periods = period * 2 // 3, max(6, 24 // period)
    index = index_of([192 * KIB] * ((periods + 2) * period))
    for less in (1, 2):
        order = range(rank, rank + (periods - less) * period + 1, period)
        assert inferred(index, mapped_by(index, order, cached)) is None
    order = range(rank, rank + periods * period + 1, period)
    assert inferred(index, mapped_by(index, order, cached)) == Skipping(rank, 1, period)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("period", [3, 4, 7, 16, 40])
def test_records_of_all_sizes_up_to_192_kib(period: int, seed: int) -> None:
    """Small ones beside those that are read are mapped with them, here and there."""
    rank = seed % period
    index = index_of(uneven(20 * period, seed))
    found = inferred(index, mapped_by(index, range(rank, 19 * period, period)))
    assert found == Skipping(rank, 1, period)


@pytest.mark.parametrize(("run", "period"), [(2, 8), (8, 32), (32, 128), (3, 4)])
@pytest.mark.parametrize("stop", [0, 1, 2])
def test_batches_of_consecutive_records(run: int, period: int, stop: int) -> None:
    """Also while the reader is in the middle of one."""
    index = index_of(uneven(12 * period))
    first = period - run // 2  # its runs go over the multiples of the period
    order = [j for j in range(10 * period + first + run) if (j - first) % period < run]
    order = order[: len(order) - stop * run // 3]
    found = inferred(index, mapped_by(index, order))
    assert found == Skipping(first, run, period)


def test_a_reader_that_goes_backward() -> None:
    index = index_of(uneven(400))
    for first, run, period in ((5, 1, 16), (14, 4, 16)):
        forward = Skipping(first, run, period)
        order = forward.members(len(index))
        assert inferred(index, mapped_by(index, order[-40:]), -1) == Skipping(
            first, run, period, -1
        )


def test_a_rank_that_began_in_the_middle_after_other_reading() -> None:
    """All records at the beginning, a few at random: what counts is what it reads now."""
    index = index_of([192 * KIB] * 1000)
    order = [*range(50), 333, 337, *range(403, 600, 8)]
    assert inferred(index, mapped_by(index, order)) == Skipping(3, 1, 8)


def test_pages_that_have_left_the_page_table() -> None:
    """A checkpoint that was taken out, a page that was reclaimed: one in sixteen may be missing."""
    index = index_of([192 * KIB] * 200)
    runs = []
    for start, length in mapped_by(index, range(3, 200, 8), cached=False, leaves=False):
        runs += [(start, 20 * PAGE), (start + 21 * PAGE, length - 21 * PAGE)]
    assert inferred(index, runs) == Skipping(3, 1, 8)


def test_small_records_need_more_periods_and_are_told_from_their_neighbours() -> None:
    source = random.Random(5)
    index = index_of([source.randrange(8, 33) * KIB for _ in range(3000)])
    assert inferred(index, mapped_by(index, range(7, 10 * 40, 40))) is None
    assert inferred(index, mapped_by(index, range(7, 60 * 40, 40))) == Skipping(7, 1, 40)


def test_members_are_every_period_in_reading_order() -> None:
    assert Skipping(1, 1, 4).members(12).tolist() == [1, 5, 9]
    assert Skipping(3, 2, 4).members(12).tolist() == [0, 3, 4, 7, 8, 11]
    assert Skipping(3, 2, 4, -1).members(12).tolist() == [11, 8, 7, 4, 3, 0]
    assert Skipping(3, 2, 4).has(np.arange(6)).tolist() == [True, False, False, True, True, False]
    assert str(Skipping(3, 1, 4)) == "record 3 of each 4"
    assert str(Skipping(3, 2, 4, -1)) == "2 records from 3 of each 4, backward"


# ---- what must not be found -------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True], ids=["cold", "all cached"])
@pytest.mark.parametrize("seed", range(5))
def test_a_contiguous_reader_is_never_taken_for_one_that_skips(seed: int, cached: bool) -> None:
    index = index_of(uneven(600, seed))
    assert inferred(index, mapped_by(index, range(50, 550), cached)) is None


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("seed", range(8))
def test_a_random_reader_is_never_taken_for_one_that_skips(share: float, seed: int) -> None:
    source = random.Random(seed)
    sizes = uneven(3000, seed) if seed % 2 else [192 * KIB] * 3000
    index = index_of(sizes)
    order = [j for j in range(3000) if source.random() < share]
    assert inferred(index, mapped_by(index, order, cached=bool(seed & 2))) is None


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_vary_are_no_period(seed: int) -> None:
    source = random.Random(seed)
    order = [0]
    while order[-1] < 1900:
        order.append(order[-1] + source.choice([7, 8, 8, 9]))
    index = index_of([192 * KIB] * 2000)
    assert inferred(index, mapped_by(index, order)) is None


def test_records_that_are_read_in_part_tell_nothing() -> None:
    index = index_of([192 * KIB] * 400)
    runs = [(int(index.extents(j)[0][0]) // PAGE * PAGE, PAGE) for j in range(3, 400, 8)]
    assert inferred(index, runs) is None


def test_gaps_that_one_request_would_read_as_well_are_not_worth_it() -> None:
    index = index_of([24 * KIB] * 2000)
    assert inferred(index, mapped_by(index, range(1, 2000, 3), cached=False)) is None
    assert inferred(index, mapped_by(index, range(1, 2000, 8), cached=False)) == Skipping(1, 1, 8)


def test_many_records_in_what_one_fault_maps_are_left_alone() -> None:
    index = index_of([3 * KIB] * 4000)
    assert inferred(index, mapped_by(index, range(1, 4000, 100), cached=False)) is None


def test_records_that_do_not_lie_in_the_order_of_their_numbers_are_left_alone() -> None:
    index = index_of([192 * KIB] * 300)
    (column,) = index.places.columns
    assert isinstance(column, Listed)
    runs = mapped_by(index, range(3, 300, 8))
    swapped = Listed(column.start[::-1].copy(), column.length)
    assert look(RecordIndex("lmdb", index.file_bytes, RecordPlaces(one_part(300), [swapped])),
                runs, 0, index.file_bytes) is None  # fmt: skip
    twice = RecordPlaces(
        one_part(300), [column, Listed(column.start + 4096, column.length * 0 + 8)]
    )
    assert look(RecordIndex("arrow", index.file_bytes, twice), runs, 0, index.file_bytes) is None


def test_nothing_mapped_and_no_records_are_no_evidence() -> None:
    index = index_of([192 * KIB] * 30)
    seen = look(index, [], 0, index.file_bytes)
    assert seen is not None and not seen.mapped.any() and infer(seen) is None
    assert look(index, [(0, MIB)], 0, 2 * PAGE) is None
    assert look(index_of([]), [(0, MIB)], 0, MIB) is None


# ---- whether it still holds -------------------------------------------------------------------


def still(index: RecordIndex, order: Iterable[int], skipping: Skipping) -> bool | None:
    runs = mapped_by(index, order)
    seen = look(index, runs, runs[0][0], sum(runs[-1]))
    assert seen is not None
    return fits(skipping, seen)


def test_a_sequence_fits_as_long_as_its_records_and_little_else_are_read() -> None:
    index = index_of(uneven(400))
    assert still(index, range(3, 400, 8), Skipping(3, 1, 8)) is True
    assert still(index, range(3, 30, 8), Skipping(3, 1, 8)) is None
    assert still(index, [*range(3, 200, 8), *range(200, 400)], Skipping(3, 1, 8)) is False
    assert still(index, range(5, 400, 8), Skipping(3, 1, 8)) is False
    assert still(index, range(3, 400, 16), Skipping(3, 1, 8)) is False


def test_the_constant_is_that_of_the_kernel() -> None:
    assert BLOCK_BYTES == 16 * PAGE
