# SPDX-License-Identifier: Apache-2.0
"""readers/stated.py: what the job, or its user, has said will be needed is streamed, once, in the
file's order, behind whoever reads, if it fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guess_bed import MIB, MS, SIZE, Bed, opened
from small_pool import part_of

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import uffd
from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers import stated as module
from uffdprefetch.readers.fixed_windows import FollowedStream
from uffdprefetch.state.files import FileState
from uffdprefetch.warm.consumer import PrefetchRange
from uffdprefetch.warm.scheduler import EXTENT_BYTES

pytest_plugins = ("guess_bed",)


def believing(monkeypatch: pytest.MonkeyPatch, **config: Any) -> Bed:
    """A bed where all that is said may be asked for: as of a job that has used what it has named
    before."""
    bed = Bed(monkeypatch, **config)
    bed.stated._bound = lambda stream: (1 << 40, 16 * MIB)
    return bed


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return believing(monkeypatch)


def read(bed: Bed) -> IntervalSet:
    """What was read; a byte that was read twice fails."""
    found = IntervalSet()
    for start, length in bed.sent:
        assert not found.overlaps(start, start + length), (start, length)
        found.add(start, start + length)
    return found


def said(bed: Bed, file: FileState) -> tuple[str, int]:
    found = bed.arbiter.describe_file(file.path)["stated"]
    assert found is not None
    return found["state"], found["read_bytes"]


def test_a_range_is_streamed_in_order_and_nothing_else(bed: Bed, file: FileState) -> None:
    bed.stated.needed(bed.region(file), 8 * MIB, 100 * MIB)
    bed.rest(200)
    assert list(read(bed)) == [(8 * MIB, 100 * MIB)]
    assert bed.sent == sorted(bed.sent)
    assert said(bed, file) == ("done", 92 * MIB)


def test_ranges_that_repeat_and_overlap_are_read_once(bed: Bed, file: FileState) -> None:
    region, other = bed.region(file), bed.region(file, 1, 8)
    for turn in range(20):
        for start in range(0, SIZE - 8 * MIB, 8 * MIB):
            bed.stated.needed(other if turn % 2 else region, start, start + 12 * MIB)
        bed.rest(2)
    bed.rest(200)
    assert list(read(bed)) == [(0, SIZE - 4 * MIB)]
    assert said(bed, file) == ("done", SIZE - 4 * MIB)


def test_saying_it_again_asks_the_kernel_nothing(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    bed.stated.needed(region, 0, 64 * MIB)
    bed.rest(100)
    sent, looked = len(bed.sent), len(bed.looked)
    for _ in range(100):
        bed.stated.needed(region, 0, 64 * MIB)
        bed.turn()
    assert (len(bed.sent), len(bed.looked)) == (sent, looked)


def test_what_the_kernel_has_dropped_since_is_read_when_it_is_said_again(
    bed: Bed, file: FileState
) -> None:
    region = bed.region(file)
    bed.stated.needed(region, 0, 64 * MIB)
    bed.rest(100)
    bed.now += 2 * module.LATELY_NS
    bed.of(file).remove(0, 32 * MIB)
    file.cache.forget_recent()
    before = len(bed.sent)
    bed.stated.needed(region, 0, 64 * MIB)
    bed.rest(100)
    assert sum(n for _, n in bed.sent[before:]) == 32 * MIB
    assert said(bed, file) == ("done", 96 * MIB)


def test_what_is_there_already_is_not_read(bed: Bed, file: FileState) -> None:
    bed.of(file).add(0, SIZE)
    bed.stated.needed(bed.region(file), 0, SIZE)
    bed.rest(50)
    assert bed.sent == [] and said(bed, file) == ("done", 0)


def test_windows_come_first(bed: Bed, file: FileState) -> None:
    bed.stated.needed(bed.region(file), 0, SIZE)
    bed.stated.step(bed.now)
    assert bed.scheduler.queued_bytes > 8 * MIB, "else there is nothing to come before"
    far = FollowedStream(Stream(1, 0, 7, 0, 0, 1, bed.now, active=True))
    bed.scheduler.want(far, PrefetchRange(file, SIZE - 4 * MIB, SIZE))
    bed.scheduler.pump(bed.now)
    assert bed.sent[0][0] == SIZE - 4 * MIB


@pytest.mark.parametrize(
    ("latency_ms", "bandwidth", "expected"),
    [
        (0, 0.0, 512 << 10),
        (1, 0.0, 512 << 10),
        (5, 0.0, 2 * (512 << 10)),
        (5, 1e9, 10 * (512 << 10)),
    ],
)
def test_a_reader_that_goes_on_before_the_stream_stands_behind_what_keeps_the_storage_busy(
    file: FileState, monkeypatch: pytest.MonkeyPatch, latency_ms: int, bandwidth: float,
    expected: int,
) -> None:  # fmt: skip
    """Of what the user has said, which is no guess."""
    bed = Bed(monkeypatch, policy="plan", whole=("*.bin",))
    if latency_ms:
        page = uffd.WarmResult(1, 0, 0, latency_ms * MS, 0, 4096, 1, uffd.WARM_READAHEAD, 0, 0)
        bed.scheduler.meter.note_pages(page, 1)
    bed.scheduler.meter.busy.bandwidth = bandwidth
    region = bed.region(file)
    bed.stated.attached(region)
    bed.touch(region, 0)  # where the stream is, too
    assert bed.scheduler.under_way_bytes >= 4 * MIB
    for at in range(96 * MIB, SIZE, 64 * MIB):  # faster than it comes
        bed.touch(region, at)
        bed.touch(region, at + MIB // 2)
        assert bed.scheduler.under_way_bytes == expected
    bed.rest(2000)
    assert list(read(bed)) == [(0, SIZE)] and said(bed, file)[0] == "done"


@pytest.mark.parametrize("whole", [(), ("tokens.*",)])
def test_of_a_reader_whose_order_is_known_what_the_user_has_said_counts_alone(
    file: FileState, monkeypatch: pytest.MonkeyPatch, whole: tuple[str, ...]
) -> None:
    bed = believing(monkeypatch, whole=whole)
    region = bed.region(file)
    bed.stated.attached(region)
    bed.stated.needed(region, 0, SIZE)
    bed.turn()
    bed.order(region, True)
    bed.rest(2000)
    some = read(bed).total_bytes()
    assert said(bed, file)[0] == ("done" if whole else "stopped")
    assert some == SIZE if whole else 0 < some <= SIZE // 8


def test_a_file_that_was_named_first_is_read_first(
    bed: Bed, file: FileState, other: FileState
) -> None:
    """A job that maps all of its shards and then loads them needs them in this order."""
    order: list[FileState] = []
    submit = bed.submit

    def noted(number: int, fd: int, start: int, length: int, **how: object) -> bool:
        order.append(file if fd == file.opened.fd else other)
        return submit(number, fd, start, length, **how)

    bed.scheduler.requests.workers.submit = noted  # type: ignore[method-assign]
    bed.stated.needed(bed.region(other), 0, 24 * MIB)
    bed.stated.needed(bed.region(file), 0, 24 * MIB)
    bed.rest(100)
    assert [one is other for one in order] == [True] * 24 + [False] * 24


def test_what_does_not_fit_is_not_begun(file: FileState, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = believing(monkeypatch, budget_bytes=SIZE - 1)
    bed.stated.needed(bed.region(file), 0, SIZE)
    bed.rest(50)
    assert bed.sent == [] and said(bed, file) == ("refused", 0)
    assert bed.ledger.degradations == [], "windows serve it; nobody has asked us by name"


def test_of_ranges_that_are_named_one_by_one_those_that_fit_are_read_until_some_are_used(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most --budget lies ahead of the readers."""
    bed = believing(monkeypatch, budget_bytes=100 * MIB)
    region = bed.region(file)
    for start in range(0, SIZE, 32 * MIB):
        bed.stated.needed(region, start, start + 32 * MIB)
        bed.turn()
    bed.rest(200)
    assert list(read(bed)) == [(0, 96 * MIB)]
    file.blocks.mark_used(0, 64 * MIB)
    bed.now += 2 * module.LATELY_NS
    bed.stated.needed(region, 96 * MIB, 160 * MIB)
    bed.rest(200)
    assert list(read(bed)) == [(0, 160 * MIB)]


def test_two_files_share_the_room(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = believing(monkeypatch, budget_bytes=SIZE + SIZE // 2)
    bed.stated.needed(bed.region(file), 0, SIZE)
    bed.turn()
    bed.stated.needed(bed.region(other), 0, SIZE)
    bed.rest(400)
    assert said(bed, file)[0] == "done" and said(bed, other) == ("refused", 0)


def test_it_ends_when_memory_becomes_short_or_the_file_changes(
    bed: Bed, file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.stated.needed(bed.region(file), 0, SIZE)
    bed.stated.needed(bed.region(other), 0, SIZE)
    bed.rest(20)
    other.guard.changed = "modified"
    bed.turn()
    assert said(bed, other)[0] == "stopped" and bed.ledger.degradations == []
    monkeypatch.setattr(bed.limits, "ahead_bytes", lambda: (MIB, Limit.MEMORY))
    bed.now += 2 * module.LATELY_NS
    bed.rest(20)
    assert said(bed, file)[0] == "stopped" and bed.missing(file)
    (finding,) = bed.ledger.degradations
    assert "MemAvailable" in finding
    assert not bed.scheduler.queued_bytes


@pytest.mark.parametrize(("policy", "whole"), [("plan", True), ("none", False)])
def test_the_users_own_policies(
    file: FileState, monkeypatch: pytest.MonkeyPatch, policy: str, whole: bool
) -> None:
    """They say what is read; that all of a file will be needed, the user has said as well."""
    bed = Bed(monkeypatch, policy=policy, whole=("*.bin",))
    region = bed.region(file)
    bed.stated.needed(region, 0, 8 * MIB)
    bed.rest(20)
    assert bed.sent == []
    bed.stated.attached(region)
    bed.rest(200)
    assert bool(bed.sent) == whole


def test_what_the_job_says_is_a_guess_that_is_bound(bed: Bed, file: FileState) -> None:
    """Arrow says of all columns that they will be needed, whoever reads some of them."""
    most = [8 * MIB]
    bed.stated._bound = lambda stream: (most[0], 4 * MIB)
    bed.stated.needed(bed.region(file), 0, 100 * MIB)
    bed.rest(50)
    assert list(read(bed)) == [(0, 8 * MIB)]
    most[0] = 20 * MIB
    bed.rest(50)
    assert list(read(bed)) == [(0, 20 * MIB)]


def test_so_much_of_it_is_under_way_as_a_miss_may_wait_for(bed: Bed, file: FileState) -> None:
    bed.stated._bound = lambda stream: (1 << 40, 3 * MIB)
    bed.stated.needed(bed.region(file), 0, SIZE)
    for _ in range(20):
        bed.turn()
        assert MIB <= bed.scheduler.under_way_bytes <= 3 * MIB


@pytest.mark.parametrize("turns", [0, 20])
@pytest.mark.parametrize("how", ["--whole", "populated", "populated later"])
def test_what_the_user_says_and_what_is_populated_is_none(
    file: FileState, monkeypatch: pytest.MonkeyPatch, how: str, turns: int
) -> None:
    """Whatever the job says beside that: MAP_POPULATE had brought all of it before it returned."""
    bed = Bed(monkeypatch, whole=("*.bin",) if how == "--whole" else ())
    region = bed.region(file)
    if how == "populated later":
        bed.stated.needed(region, 0, SIZE)
    elif how == "populated":
        bed.advice.populated(region)
    else:
        bed.stated.attached(region)
    bed.rest(turns)
    bed.stated.needed(region, 0, MIB)
    if how == "populated later":
        bed.advice.populated(region)
    bed.rest(2000)
    assert list(read(bed)) == [(0, SIZE)]


def test_whole_reads_what_matches_from_its_first_mapping_on_once(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = believing(monkeypatch, whole=("tokens.*",))
    for one in (file, other, file):
        bed.stated.attached(bed.region(one))
        bed.turn()
    assert bed.sent, "before any touch"
    bed.rest(200)
    assert list(read(bed)) == [(0, SIZE)]
    found = bed.arbiter.describe_file(file.path)["stated"]
    assert found is not None and "--whole" in found["why"]
    assert bed.arbiter.describe_file(other.path)["stated"] is None


def test_whole_that_does_not_fit_is_one_finding(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = believing(monkeypatch, whole=("tokens.*",), budget_bytes=SIZE - 1)
    for _ in range(3):
        bed.stated.attached(bed.region(file))
        bed.now += 2 * module.LATELY_NS
        bed.turn()
    (finding,) = bed.ledger.degradations
    assert "--whole" in finding and "--budget" in finding and bed.sent == []


def test_a_mapping_of_the_pool_has_it_read_to_the_pool(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, wanted = bed.region(file), []
    region.mode = ServingMode.POOL
    monkeypatch.setattr(
        bed.scheduler, "want", lambda _, one: wanted.append(one) or one.end - one.start
    )
    chunks = SIZE >> 16
    file.pooled = part_of(None, 3, 1 << 16, np.zeros(chunks, np.uint8), np.zeros(chunks, np.uint32))
    bed.stated.needed(region, 0, 8 * MIB)
    bed.stated.step(bed.now)
    assert wanted and all(one.pooled for one in wanted)
    file.pooled = None


@pytest.fixture
def many(tmp_path: Path) -> Iterator[list[FileState]]:
    files = [opened(tmp_path / str(number)) for number in range(4)]
    yield files
    for file in files:
        file.close()


def test_of_many_files_one_that_nobody_maps_is_forgotten(
    bed: Bed, many: list[FileState], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 2)
    for file in many:
        region = bed.region(file)
        bed.stated.needed(region, 0, MIB)
        bed.rest(20, 100 * MS)
        bed.unmap(region)
    assert [bed.arbiter.describe_file(file.path)["stated"] is not None for file in many] == [
        False, False, True, True,
    ]  # fmt: skip


def test_what_is_given_up_batch_by_batch_costs_no_more_than_what_is_left(
    bed: Bed, file: FileState
) -> None:
    """A job that says MADV_DONTNEED behind it of each batch: nothing is looked at twice for it."""
    region, step = bed.region(file), 256 << 10
    bed.stated.needed(region, 0, SIZE)
    bed.rest(4)
    for at in range(0, SIZE, step):
        bed.stated.unneeded(region, at, at + step)
        bed.turn()
    bed.rest(200)
    assert len(bed.looked) == len(set(bed.looked)) <= 2 * SIZE // EXTENT_BYTES


def test_of_what_is_given_up_only_that_is_taken_back(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    bed.stated.needed(region, 0, SIZE)
    bed.stated.step(bed.now)  # it is queued, and nothing is under way
    queued = bed.scheduler.queued_bytes
    assert queued > 12 * MIB
    bed.stated.unneeded(region, 9 * MIB, 10 * MIB + 4096)
    assert queued - 6 * EXTENT_BYTES < bed.scheduler.queued_bytes < queued
    bed.rest(2000)
    assert list(read(bed)) == [(0, 9 * MIB), (10 * MIB + 4096, SIZE)]
