# SPDX-License-Identifier: Apache-2.0
"""readers/reader_streams.py: of what is touched, what tells that a reader goes in order."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from guess_bed import BLOCK, MIB, MS, SIZE, Bed

from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.state.files import FileState
from uffdprefetch.state.reader import Region

pytest_plugins = ("guess_bed",)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


def jumps_about(
    bed: Bed, region: Region, forward: int = 0, passed_bytes: tuple[int, int] = (0, 0),
    come_over: int = 0,
) -> bool:  # fmt: skip
    """Touches all over the file, each said to have brought one walk ``forward`` bytes on, over so
    much that is mapped (for the first time, at all): whether the reader is random then."""
    source = random.Random(11)
    stream = Stream(1, region.reader.rank, region.reader.pid, 0, 0, bed.now, bed.now)
    table: Any = SimpleNamespace(
        touch=lambda start, end, at_ns: (stream, forward), streams=[], absorbed=[],
        active=list,
    )  # fmt: skip
    region.reader.table = table
    bed.arbiter._streams._passed = lambda *_: passed_bytes  # type: ignore[method-assign]
    for _ in range(64):
        bed.now += 2 * MS
        at = source.randrange(8 * MIB // BLOCK, SIZE // BLOCK) * BLOCK
        seen = Observation(at, at + BLOCK, bed.now, passed=come_over)
        bed.arbiter.observe(Batch(region, bed.now, [seen]))
    return region.reader.access is Access.JUMPS


@pytest.mark.parametrize(
    ("forward", "mapped", "expected"),
    [
        (8 * MIB, 8 * MIB, False),
        (8 * MIB, MIB, False),  # an eighth of it
        (8 * MIB, MIB - BLOCK, True),
        (8 * MIB, 0, True),
        (0, MIB, True),  # it has gone nowhere
    ],
)
def test_a_touch_is_in_order_when_what_was_passed_over_was_read(
    bed: Bed, file: FileState, forward: int, mapped: int, expected: bool
) -> None:
    assert jumps_about(bed, bed.region(file), forward, (0, mapped)) is expected


@pytest.mark.parametrize(("news", "expected"), [(0, True), (8 * MIB, False)])
def test_of_a_random_reader_only_what_it_reads_for_the_first_time_tells_of_a_stream(
    bed: Bed, file: FileState, news: int, expected: bool
) -> None:
    """It has been nearly everywhere at last: all that it passes over is mapped."""
    region = bed.region(file)
    assert jumps_about(bed, region)
    assert jumps_about(bed, region, 8 * MIB, (news, 8 * MIB)) is expected


@pytest.mark.parametrize(
    ("come_over", "forward", "expected"),
    [(8 * MIB, 8 * MIB, False), (0, 8 * MIB, True), (MIB, 8 * MIB, True), (8 * MIB, 0, True)],
)
def test_in_the_pool_it_is_what_a_fault_says_that_was_come_over(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch, come_over: int, forward: int,
    expected: bool,
) -> None:  # fmt: skip
    """Page tables tell nothing there: what is near is mapped with it, whoever reads."""
    pool = SimpleNamespace(come_over=lambda part, stream, start, end, forward: (start, end))
    monkeypatch.setattr(bed.windows, "pool", pool)
    region = bed.region(file)
    region.mode = ServingMode.POOL
    assert jumps_about(bed, region, forward, (8 * MIB, 8 * MIB), come_over) is expected


def test_who_jumps_about_has_no_streams(bed: Bed, file: FileState) -> None:
    """What looks like some is chance: in a file of a few hundred MiB any two touches are near."""
    region = bed.region(file)
    bed.visits(region, 100)
    assert region.reader.access is Access.JUMPS and region.reader.table.streams == []


def test_a_long_look_at_a_page_table_is_no_stream(bed: Bed, file: FileState) -> None:
    """It brings what was touched since the last one piece by piece, in the order of the file."""
    region, source = bed.region(file), random.Random(5)
    bed.visits(region, 100)
    for _ in range(5):
        for at in sorted(source.randrange(SIZE // BLOCK) * BLOCK for _ in range(40)):
            bed.touch(region, at)
            bed.again = True
            assert region.reader.access is Access.JUMPS
        bed.again = False


def test_in_the_pool_one_of_sixteen_touches_in_a_known_order_goes_to_the_streams(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SimpleNamespace(come_over=lambda part, stream, start, end, forward: (start, end))
    monkeypatch.setattr(bed.windows, "pool", pool)
    monkeypatch.setattr(type(bed.region(file).reader.order), "announced", True)
    region = bed.region(file)
    region.mode = ServingMode.POOL
    touches = [Observation(at * BLOCK, (at + 1) * BLOCK, bed.now) for at in range(64)]
    steps = bed.arbiter._streams.touched(Batch(region, bed.now, touches))
    assert [at for at, step in enumerate(steps) if step is not None] == [15, 31, 47, 63]
