# SPDX-License-Identifier: Apache-2.0
"""readers/bulk.py: what it keeps of a file's readers, and what it tells the engine of them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bulk_bed import BLOCK, MIB, MS, SIZE, Bed, opened, streaming, until

from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers import bulk as module
from uffdprefetch.readers.predictor import Observation
from uffdprefetch.state import reader as reader_module
from uffdprefetch.state.files import FileState

pytest_plugins = ("bulk_bed",)

#: Of which nothing is streamed, so that only the readers change.
NO_ROOM = {"budget_bytes": SIZE - 1}


def jump_about(
    bed: Bed, region: Any, forward: int = 0, passed_bytes: tuple[int, int] = (0, 0)
) -> tuple[bool, Stream]:
    """Touches all over the file, each said to have brought its stream ``forward`` bytes on:
    whether the reader is random then, and the stream."""
    source, answer = random.Random(11), False
    stream = Stream(1, region.reader.rank, region.reader.pid, 0, 0, bed.now, bed.now)
    region.reader.table = SimpleNamespace(
        touch=lambda start, end, at_ns: (stream, forward), streams=[], absorbed=[],
        active=lambda: [],
    )  # fmt: skip
    bed.walks._passed = lambda *_: passed_bytes  # type: ignore[method-assign]
    for _ in range(64):
        bed.now += 2 * MS
        at = source.randrange(8 * MIB // BLOCK, SIZE // BLOCK) * BLOCK
        bed.arbiter.observe(region, Observation(at, at + BLOCK, bed.now))
        answer = region.reader.random
    bed.arbiter.plan()
    return answer, stream


def walk(bed: Bed, region: Any, count: int = 40) -> None:
    for at in range(0, count * BLOCK, BLOCK):
        bed.touch(region, at)


# ---- what was passed over -----------------------------------------------------------------------


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
    file: FileState, monkeypatch: pytest.MonkeyPatch, forward: int, mapped: int, expected: bool
) -> None:
    bed = Bed(monkeypatch, **NO_ROOM)
    assert jump_about(bed, bed.region(file), forward, (0, mapped))[0] is expected


@pytest.mark.parametrize(("news", "expected"), [(0, True), (8 * MIB, False)])
def test_of_a_random_reader_only_what_it_reads_for_the_first_time_tells_of_a_walk(
    file: FileState, monkeypatch: pytest.MonkeyPatch, news: int, expected: bool
) -> None:
    """It has been nearly everywhere at last: all that it passes over is mapped."""
    bed = Bed(monkeypatch, **NO_ROOM)
    region = bed.region(file)
    assert jump_about(bed, region)[0]
    assert jump_about(bed, region, 8 * MIB, (news, 8 * MIB))[0] is expected


class Pool:
    """Of which a fault maps what ``walked`` says."""

    def __init__(
        self, walked: Callable[[int, int, int], tuple[int, int]], budget_bytes: int = SIZE
    ) -> None:
        self._walked, self.budget_bytes, self.limited_by = walked, budget_bytes, None

    def walked(
        self, part: object, stream: Stream, start: int, end: int, forward: int
    ) -> tuple[int, int]:
        stream.mapped_bytes += BLOCK  # as it does where it goes on
        return self._walked(start, end, forward)


def mapped_with_it(start: int, end: int, forward: int) -> tuple[int, int]:
    return end - forward, end


def the_page_alone(start: int, end: int, forward: int) -> tuple[int, int]:
    return start, end


@pytest.mark.parametrize(
    ("walked", "forward", "expected"),
    [
        (mapped_with_it, 8 * MIB, False),
        (the_page_alone, 8 * MIB, True),
        (the_page_alone, 0, True),
    ],
)
def test_in_the_pool_it_is_what_a_fault_maps_that_tells_of_a_walk(
    file: FileState, monkeypatch: pytest.MonkeyPatch,
    walked: Callable[[int, int, int], tuple[int, int]], forward: int, expected: bool,
) -> None:  # fmt: skip
    """Page tables tell nothing there: what is near is mapped with it, whoever reads."""
    bed = Bed(monkeypatch, **NO_ROOM)
    monkeypatch.setattr(bed.layout, "pool", Pool(walked))
    region = bed.region(file)
    region.verdict = ServingMode.POOL
    found, stream = jump_about(bed, region, forward, (8 * MIB, 8 * MIB))
    assert found is expected
    assert stream.mapped_bytes == 64 * BLOCK, "asked once a touch"


def test_a_mapping_that_is_not_of_the_pool_is_judged_by_its_page_table(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, **NO_ROOM)
    monkeypatch.setattr(bed.layout, "pool", Pool(mapped_with_it))
    assert jump_about(bed, bed.region(file), 8 * MIB)[0]


# ---- whom nobody watches ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["changed", "fixed"])
def test_readers_of_a_changed_file_or_under_another_policy_are_not_watched(
    file: FileState, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    bed = Bed(monkeypatch, **({"policy": "fixed"} if how == "fixed" else {}))
    file.changed = "modified" if how == "changed" else None
    region = bed.region(file)
    bed.crops(region, 100)
    bed.rest(20)
    assert bed.bulk.describe(file.path) is None and bed.sent == []


def test_a_file_that_has_changed_is_no_finding(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not managed any more, so that it would not fit is no news."""
    bed = Bed(monkeypatch, **NO_ROOM)
    region = bed.region(file)
    jump_about(bed, region)
    file.changed = "modified"
    bed.rest(20)
    assert bed.ledger.degradations == []


def test_a_rank_that_jumps_about_later_is_named_too(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, **NO_ROOM)
    until(bed, file, "refused")
    assert bed.said(file)["ranks"] == [0]
    bed.crops(bed.region(file, rank=3, pid=8), 100)
    assert bed.said(file)["ranks"] == [0, 3]


# ---- what the engine asks -----------------------------------------------------------------------


def test_a_reader_is_not_doubted_before_it_has_jumped_a_few_times(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An LMDB is entered by its root, a branch and a leaf."""
    bed = Bed(monkeypatch)
    region = bed.region(file)
    assert region.reader.may_prefetch, "before it has come at all"
    for at in (0, 200 * MIB, 100 * MIB):
        bed.touch(region, at)
        assert region.reader.may_prefetch
    for at in (150 * MIB, 50 * MIB, 220 * MIB, 20 * MIB):
        bed.touch(region, at)
    assert not region.reader.may_prefetch


def test_orderly_is_who_has_walked_for_a_while(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, **NO_ROOM)
    walker, jumper = bed.region(file, pid=7), bed.region(file, pid=8)
    assert not walker.reader.jumps.is_sequential, "nothing is known of it"
    walk(bed, walker, 5)
    assert not walker.reader.jumps.is_sequential, "not for sure"
    walk(bed, walker)
    bed.crops(jumper, 100)
    assert walker.reader.jumps.is_sequential and not jumper.reader.jumps.is_sequential
    assert not bed.region(file, pid=9).reader.jumps.is_sequential
    assert not bed.region(other, pid=7).reader.jumps.is_sequential, "of another file"


def test_only_page_tables_of_random_readers_of_which_all_is_decided_are_looked_at_less_often(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, **NO_ROOM)
    jumper, walker = bed.region(file, pid=7), bed.region(file, pid=8)
    assert bed.bulk.rest_ns(jumper.reader) == 0
    jump_about(bed, jumper)
    assert bed.bulk.rest_ns(jumper.reader) == 0, "its file is not judged yet"
    bed.rest(20)
    walk(bed, walker)
    assert bed.said(file)["state"] == "refused"
    assert bed.bulk.rest_ns(jumper.reader) > 0
    assert bed.bulk.rest_ns(walker.reader) == 0
    assert bed.bulk.rest_ns(bed.region(file, pid=9).reader) == 0, "who has read nothing yet"
    assert bed.bulk.rest_ns(bed.region(other, pid=7).reader) == 0


def test_page_tables_are_looked_at_as_ever_while_the_file_is_streamed_and_then_no_more(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should its reader begin to walk, the stream must end."""
    bed = Bed(monkeypatch)
    region = streaming(bed, file)
    assert bed.bulk.rest_ns(region.reader) == 0
    bed.rest()
    assert bed.said(file)["state"] == "done" and bed.bulk.rest_ns(region.reader) > 0


# ---- what is kept -------------------------------------------------------------------------------


def test_the_oldest_of_many_readers_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that maps one file after the other would fill the memory."""
    bed = Bed(monkeypatch, **NO_ROOM)
    monkeypatch.setattr(reader_module, "UNMAPPED_MAX", 2)
    files = [opened(tmp_path / str(number)) for number in range(5)]
    for file in files:
        bed.unmap(bed.region(file))
    names = [os.path.basename(reader.file.path) for reader in bed.clients[7].readers.values()]
    assert names == ["3", "4"]
    for file in files:
        file.close()


@pytest.mark.parametrize("idle", [True, False])
def test_of_many_files_one_that_nobody_maps_is_forgotten_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    bed = Bed(monkeypatch, **NO_ROOM)
    monkeypatch.setattr(module, "FILES_MAX", 2)
    mapped, left, new = files = [opened(tmp_path / name) for name in ("a", "b", "c")]
    regions = [bed.region(file) for file in files]
    bed.crops(regions[0], 100)
    bed.crops(regions[1], 100)
    assert bed.said(mapped)["ranks"] == bed.said(left)["ranks"] == [0]
    left.attached = 0 if idle else 1
    bed.crops(regions[2], 100)
    assert bed.bulk.describe(mapped.path)
    kept, gone = (new, left) if idle else (left, new)
    assert bed.bulk.describe(kept.path) and bed.bulk.describe(gone.path) is None
    for file in files:
        file.close()


# ---- the summary's streams ----------------------------------------------------------------------


def note(bed: Bed, region: Any) -> list[dict[str, Any]]:
    """The rows that the end of a mapping adds."""
    before = len(bed.ledger.streams)
    bed.bulk.note_streams(region.reader)
    return bed.ledger.streams[before:]


def test_who_does_not_jump_about_has_its_walks_in_the_summary(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one that does, as well as alone, and where this has never heard of the file."""
    bed = Bed(monkeypatch, **NO_ROOM)
    until(bed, file, "refused")
    beside, alone, unheard = bed.region(file, 1, 8), bed.region(other), bed.region(other)
    walk(bed, beside)
    unheard.reader.table.touch(0, MIB, bed.now)
    assert [row["pattern"] for row in note(bed, unheard)] == ["consecutive"]
    walk(bed, alone)
    assert [row["pattern"] for row in note(bed, beside)] == ["consecutive"]
    assert [row["pattern"] for row in note(bed, alone)] == ["consecutive"]


def test_a_reader_whose_order_became_known_has_no_row_of_a_random_one(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, **NO_ROOM)
    region = until(bed, file, "refused")
    bed.order(region, True)
    assert "random" not in [row["pattern"] for row in note(bed, region)]


def test_a_random_rank_has_one_row_which_tells_where_it_was_last(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, **NO_ROOM)
    region = until(bed, file, "refused")
    bed.touch(region, 100 * MIB)
    (row,) = note(bed, region)
    assert (row["pattern"], row["start_bytes"]) == ("random", 100 * MIB)
    assert note(bed, region) == []


# ---- processes that go --------------------------------------------------------------------------


def leaves(bed: Bed, pid: int) -> None:
    (reader,) = bed.clients.pop(pid).readers.values()
    for region in list(reader.regions.values()):
        bed.unmap(region)
    bed.arbiter.left(reader)
    bed.turn()


def test_a_stream_for_a_process_that_has_gone_ends_when_the_others_walk(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    walk(bed, bed.region(file, rank=1, pid=8))
    streaming(bed, file)
    assert bed.said(file)["state"] == "streamed"
    leaves(bed, 7)
    assert bed.said(file)["state"] == "undecided"


def test_a_stream_whose_last_reader_has_gone_is_told_as_what_it_was(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    streaming(bed, file)
    leaves(bed, 7)
    assert bed.said(file)["state"] == "streamed"
