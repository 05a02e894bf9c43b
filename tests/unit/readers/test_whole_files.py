# SPDX-License-Identifier: Apache-2.0
"""readers/whole_files.py: a file that is read here and there is read whole where that pays, once,
at the pace of its readers' misses, if it fits."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from guess_bed import AROUND, BLOCK, MIB, MS, SIZE, Bed, ended, opened, streaming

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.storage import SHY
from uffdprefetch.predict.streams import Stream
from uffdprefetch.predict.visits import FREE_SHARE, LITTLE_SHARE
from uffdprefetch.readers import whole_files as module
from uffdprefetch.readers.fixed_windows import FollowedStream
from uffdprefetch.state.files import FileState
from uffdprefetch.state.reader import Region
from uffdprefetch.warm.consumer import PrefetchRange, Priority

pytest_plugins = ("guess_bed",)

#: So many visits bring every file of these tests whole that it pays for.
MANY = 2500
#: By which the link is measured.
PROBES = 4 * MIB
#: Of a file that has come as a whole.
LITTLE = SIZE // LITTLE_SHARE
NO_ROOM = {"budget_bytes": SIZE - MIB}


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


# ---- where it pays ------------------------------------------------------------------------------


def test_a_file_that_is_read_here_and_there_is_read_whole_once(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    bed.visits(region, MANY)
    assert bed.said(file)["state"] == "done" and bed.missing(file) <= LITTLE
    assert bed.sent_bytes <= SIZE + PROBES
    assert SIZE // 3 < bed.said(file)["read_bytes"] <= SIZE, "the misses have brought the rest"
    assert bed.ledger.degradations == []
    before = bed.sent_bytes
    bed.visits(region, 400)
    assert bed.sent_bytes - before <= LITTLE, "all is there: not again"
    assert not bed.ahead._whole.running, "and no turn costs anything for it"


def test_a_few_places_of_it_are_no_reason(bed: Bed, file: FileState) -> None:
    bed.visits(bed.region(file), 60)
    bed.rest()
    assert bed.said(file)["state"] == "undecided" and bed.sent_bytes < 16 * MIB


def test_a_storage_on_which_a_miss_costs_no_more_than_its_bytes_is_none(
    bed: Bed, file: FileState
) -> None:
    bed.latency_ns = 0
    bed.visits(bed.region(file), MANY)
    assert bed.said(file)["state"] == "undecided" and bed.said(file)["read_bytes"] == 0


def test_nor_is_a_file_of_which_next_to_nothing_is_missing(bed: Bed, file: FileState) -> None:
    bed.of(file).add(0, SIZE)
    bed.visits(bed.region(file), MANY)
    assert bed.sent == []


@pytest.mark.parametrize("policy", ["none", "fixed", "plan"])
def test_under_the_users_own_policies_nothing_is_read_whole(
    file: FileState, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    bed = Bed(monkeypatch, policy=policy, size_bytes=MIB)
    bed.visits(bed.region(file), 600)
    assert bed.sent_bytes < SIZE // 4 and bed.arbiter.describe_file(file.path)["whole"] is None


def test_a_mapping_for_each_batch_makes_no_difference(bed: Bed, file: FileState) -> None:
    """As of numpy.memmap in a training loop: none lasts so long that it would pay for that one."""
    for _ in range(MANY // 12):
        region = bed.region(file)
        bed.visits(region, 12)
        assert not bed.ahead._of(file).visited.visits.is_over
        bed.unmap(region)
    assert bed.said(file)["state"] == "done" and bed.missing(file) <= LITTLE


def test_a_file_that_is_left_after_a_few_places_each_time_is_not_read_whole(
    bed: Bed, file: FileState
) -> None:
    """However often: those of a time before tell of no more of this one."""
    for _ in range(20):
        region = bed.region(file)
        bed.visits(region, 100)
        bed.unmap(region)
        bed.now += 2 * LATELY_NS
    assert bed.said(file)["state"] == "undecided" and bed.said(file)["read_bytes"] == 0


# ---- its pace -----------------------------------------------------------------------------------


def test_it_keeps_pace_with_the_misses_of_its_readers(bed: Bed, file: FileState) -> None:
    """Who reads a little has not much more than that read for nothing; who reads on has all of it,
    long before it has come by everywhere."""
    region, plain, source = bed.region(file), IntervalSet(), random.Random(9)
    for count in range(1, MANY):
        at = source.randrange(SIZE // BLOCK) * BLOCK
        plain.add(at // AROUND * AROUND, at // AROUND * AROUND + AROUND)
        bed.touch(region, at)
        if plain.total_bytes() < 0.3 * SIZE:
            assert SIZE - bed.missing(file) <= 2 * plain.total_bytes() + 20 * MIB, count
        if bed.missing(file) <= LITTLE:
            break
    assert bed.missing(file) <= LITTLE and plain.total_bytes() < 0.75 * SIZE


def test_where_its_visits_will_gain_half_as_much_as_they_bring_may_be_for_nothing(
    bed: Bed, file: FileState
) -> None:
    bed.visits(bed.region(file), 300)
    book, link = bed.ahead._of(file).visited, bed.ahead.measured()
    assert not book.gains and not book.goes_on
    size, touched = file.size_bytes, book.blocks * BLOCK
    brought = book.visits.brought_bytes(size, touched, BLOCK, link)
    before = book.over_bytes(link)
    book.gains = True
    assert book.over_bytes(link) - before == pytest.approx(-(1 / SHY - FREE_SHARE) * brought, abs=2)


def test_it_ends_when_nobody_comes_and_goes_on_when_somebody_does(
    bed: Bed, file: FileState
) -> None:
    region = streaming(bed, file)
    bed.rest(1, LATELY_NS + MS)
    assert bed.said(file)["state"] == "undecided"
    ended(bed, file)
    bed.visits(region, MANY)
    assert bed.said(file)["state"] == "done" and bed.missing(file) <= LITTLE


def test_who_comes_now_and_then_has_no_more_of_it_read_for_that(bed: Bed, file: FileState) -> None:
    """Each time that it begins again it goes on at the pace of all misses."""
    region = streaming(bed, file)
    bed.visits(region, 50)
    bed.rest(1, LATELY_NS + MS)
    before = bed.said(file)["read_bytes"]
    for _ in range(10):
        bed.visits(region, 2)
        bed.rest(50)
        bed.rest(1, LATELY_NS + MS)
    assert bed.said(file)["read_bytes"] - before < 10 * MIB


# ---- when it ends -------------------------------------------------------------------------------


def _changes(bed: Bed, region: Region) -> None:
    region.file.guard.changed = "modified"


def _is_closed(bed: Bed, region: Region) -> None:
    bed.scheduler.forget_file(region.file)
    bed.scheduler.reap()
    region.file.close()


def _is_known(bed: Bed, region: Region) -> None:
    bed.order(region, True)


def _leaves(bed: Bed, region: Region) -> None:
    bed.unmap(region)
    bed.core.mappings.left(region.reader.client)


@pytest.mark.parametrize("what", [_changes, _is_closed, _is_known, _leaves])
def test_it_ends_when_its_reason_has_gone(bed: Bed, file: FileState, what: Any) -> None:
    region = streaming(bed, file)
    what(bed, region)
    ended(bed, file)
    assert bed.said(file)["state"] == "stopped" and bed.ledger.degradations == []


def test_what_was_taken_back_is_not_told_as_read(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = streaming(bed, file)
    monkeypatch.setattr(bed.scheduler, "pump", lambda now: 0)
    bed.visits(region, 160)
    bed.scheduler.reap()
    assert bed.scheduler.queued_bytes >= MIB
    bed.order(region, True)
    assert bed.said(file)["read_bytes"] <= bed.sent_bytes


def test_where_memory_becomes_short_it_ends_with_one_finding(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = streaming(bed, file)
    monkeypatch.setattr(bed.limits, "ahead_bytes", lambda: (MIB, Limit.MEMORY))
    bed.now += 2 * LATELY_NS
    bed.visits(region, 1)
    assert bed.said(file)["state"] == "stopped"
    bed.visits(region, 200)
    (finding,) = bed.ledger.degradations
    assert "memory became short (MemAvailable)" in finding


def test_memory_is_looked_at_once_a_second(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def of(*_: Any) -> tuple[int, Limit]:
        asked.append(bed.now)
        return 1 << 40, Limit.BUDGET

    region = streaming(bed, file)
    monkeypatch.setattr(bed.ahead._whole._room, "of", of)
    for _ in range(50):
        bed.rest(1, 98 * MS)
        bed.visits(region, 1)
    assert bed.said(file)["state"] == "streamed" and 4 <= len(asked) <= 6, "in five seconds"


# ---- room ---------------------------------------------------------------------------------------


def test_a_file_that_does_not_fit_is_one_finding_and_no_read(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, **NO_ROOM)
    for rank in (5, 1, 5):
        bed.visits(bed.region(file, rank, 10 + rank), 400)
    (finding,) = bed.ledger.degradations
    assert finding.startswith(f"{file.path}: rank") and "a plan needs less" in finding
    assert "256 MiB do not fit in 255 MiB (--budget): not read whole" in finding
    said = bed.said(file)
    assert (said["state"], said["read_bytes"], said["ranks"]) == ("refused", 0, [1, 5])
    assert bed.sent_bytes < 16 * MIB


def test_a_file_that_just_fits_is_read(file: FileState, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(monkeypatch, budget_bytes=SIZE)
    monkeypatch.setattr(bed.limits, "ahead_bytes", lambda: (SIZE, Limit.BUDGET))
    bed.visits(bed.region(file), MANY)
    assert bed.said(file)["state"] == "done" and bed.ledger.degradations == []


def test_what_is_cached_already_needs_no_free_memory(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = bed.region(file)
    bed.visits(region, 100)
    cached = SIZE - bed.ahead._of(file).fronts.unknown * BLOCK
    for room, state in ((MIB, "refused"), (SIZE - cached // 2, "streamed")):
        monkeypatch.setattr(bed.limits, "ahead_bytes", lambda room=room: (room, Limit.MEMORY))
        bed.visits(region, 100)
        assert bed.said(file)["state"] == state


@pytest.mark.parametrize(("unmapped", "state"), [(False, "refused"), (True, "done")])
def test_files_that_are_read_whole_share_the_room(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch, unmapped: bool, state: str
) -> None:
    """Those that somebody maps."""
    bed = Bed(monkeypatch, budget_bytes=SIZE + SIZE // 2)
    region = bed.region(file)
    bed.visits(region, MANY)
    if unmapped:
        bed.unmap(region)
    bed.visits(bed.region(other, pid=8), MANY)
    assert (bed.said(file)["state"], bed.said(other)["state"]) == ("done", state)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    ("binds", "advice"),
    [
        (Limit.BUDGET, "with --budget 256MiB it could be"),
        (Limit.CGROUP, "with a higher memory limit of the job (Slurm: --mem) it could be"),
        (Limit.MEMORY, "on a node with more free memory it could be"),
    ],
)
def test_a_larger_budget_is_advised_only_where_nothing_else_is_in_its_way(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch, binds: Limit, advice: str,
    pooled: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(bed.limits, "at", lambda *_: binds)
    monkeypatch.setattr(bed.limits, "ahead_bytes", lambda: (SIZE - MIB, Limit.BUDGET))
    if pooled:
        in_the_pool(bed, file, SIZE - MIB, monkeypatch)
    bed.visits(bed.region(file), 600)
    (finding,) = bed.ledger.degradations
    assert f"256 MiB do not fit in 255 MiB (--budget): not read whole; {advice}" in finding


# ---- the pool -----------------------------------------------------------------------------------


def in_the_pool(
    bed: Bed, file: FileState, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Its part of a pool, of which the bed's workers are those of the pool."""

    def submit(number: int, _: int, start: int, length: int, **more: Any) -> bool:
        return bed.submit(number, file.opened.fd, start, length)

    def absent_chunks(start: int, end: int) -> int:
        chunks = range(start // BLOCK, -(-end // BLOCK))
        return sum(bed.missing(file, each * BLOCK, (each + 1) * BLOCK) > 0 for each in chunks)

    pool = SimpleNamespace(submit=submit)
    part: Any = SimpleNamespace(
        pool=pool, number=3, chunk_bytes=BLOCK, in_flight=IntervalSet(),
        absent_chunks=absent_chunks,
        absent=lambda start, end: bed.missing(file, start, end) > 0,
        come_over=lambda walk, start, end, forward: (start, end),
    )  # fmt: skip
    room = SimpleNamespace(
        budget_bytes=budget_bytes,
        limited_by=None,
        used_bytes=lambda: 0,
        window_bytes=lambda places, stream=False: budget_bytes // 2,
    )
    file.pooled = part
    monkeypatch.setattr(bed.windows, "pool", room)
    return part


def test_in_the_pool_what_it_lacks_is_read_into_it(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the page cache has."""
    in_the_pool(bed, file, 2 * SIZE, monkeypatch)
    monkeypatch.setattr(FileState, "resident_bytes", lambda *_: SIZE)
    bed.of(file).add(64 * MIB, 128 * MIB)
    bed.visits(bed.region(file), MANY)
    assert bed.said(file)["state"] == "done" and bed.missing(file) <= LITTLE
    assert not [at for at, length in bed.sent if length >= MIB and 64 * MIB <= at < 128 * MIB]


# ---- with others --------------------------------------------------------------------------------


def test_several_ranks_have_one_stream(bed: Bed, file: FileState) -> None:
    regions = [bed.region(file, rank, 10 + rank) for rank in range(4)]
    for _ in range(MANY // 4):
        for region in regions:
            bed.visits(region, 1)
    assert (bed.said(file)["state"], bed.said(file)["ranks"]) == ("done", [0, 1, 2, 3])
    assert bed.sent_bytes <= SIZE + PROBES


def test_it_yields_to_misses_and_whatever_else_is_wanted_comes_first(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FREE_BYTES", 2 * SIZE)  # what it has to read does not run out
    region = streaming(bed, file)
    bed.visits(region, 20)
    link = bed.scheduler.meter.link
    assert link is not None
    most = link.bandwidth_bytes_per_second * link.latency_seconds + (640 << 10)
    for _ in range(30):
        bed.visits(region, 1)
        assert bed.scheduler.under_way_bytes <= most, "before which a miss of anybody waits"
    assert bed.scheduler.queued_bytes, "else there is nothing to come before"
    bed.scheduler.reap()
    before = len(bed.sent)
    far = FollowedStream(Stream(1, 0, 7, 0, 0, 1, bed.now, active=True))
    bed.scheduler.want(far, PrefetchRange(file, SIZE - 4 * MIB, SIZE, priority=Priority.NEEDED))
    bed.scheduler.pump(bed.now)
    assert bed.sent[before][0] >= SIZE - 4 * MIB


# ---- what is said of it -------------------------------------------------------------------------


def test_nothing_is_said_of_who_goes_in_order(bed: Bed, file: FileState) -> None:
    bed.walk(bed.region(file), 0, 64 * MIB)
    assert bed.arbiter.describe_file(file.path)["whole"] is None


def test_the_summary_has_one_row_of_a_random_rank_however_often_it_maps(
    bed: Bed, file: FileState
) -> None:
    for rank in (0, 3):
        for _ in range(20):
            region = bed.region(file, rank, 7 + rank)
            bed.visits(region, 12)
            bed.touch(region, 100 * MIB)
            bed.unmap(region)
        for _ in range(2):
            bed.ledger.note_streams(region.reader, lambda walk: 0, is_served=True)
    found = [(row["pattern"], row["rank"], row["start_bytes"]) for row in bed.ledger.closed.streams]
    assert found == [("random", 0, 100 * MIB), ("random", 3, 100 * MIB)]
    assert bed.ledger.degradations == []


def test_who_does_not_jump_about_has_its_streams_in_the_summary(bed: Bed, file: FileState) -> None:
    """Beside one that does."""
    jumps, walks = bed.region(file), bed.region(file, 1, 8)
    bed.visits(jumps, 100)
    bed.walk(walks, 0, 64 * MIB)
    for region in (jumps, walks):
        bed.ledger.note_streams(region.reader, lambda walk: 0, is_served=True)
    assert [row["pattern"] for row in bed.ledger.closed.streams] == ["random", "consecutive"]


def test_of_many_files_those_that_nobody_maps_are_forgotten_first(
    bed: Bed, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 2)
    files = [opened(tmp_path / f"{number}.bin", 8 * MIB) for number in range(4)]
    for number, one in enumerate(files):
        region = bed.region(one)
        bed.visits(region, 400)
        assert bed.said(one)["state"] == "done"
        if number:
            bed.unmap(region)
    assert [one.path for one, _ in bed.ahead._whole._held()] == [files[0].path, files[3].path]
    for one in files:
        one.close()


def test_what_is_read_for_nothing_is_bounded_for_all_files_together(
    bed: Bed, tmp_path: Path
) -> None:
    """One file after the other, each left after some visits, and mapped: stacks of images."""
    files = [opened(tmp_path / f"{number}.stack", 64 * MIB) for number in range(8)]
    for file in files:
        bed.visits(bed.region(file), 200)
    read = [
        (bed.arbiter.describe_file(file.path)["whole"] or {"read_bytes": 0})["read_bytes"]
        for file in files
    ]
    visits = len(files) * 200 * AROUND
    for file in files:
        file.close()
    assert sum(map(bool, read)) > 1
    assert sum(read) < module.FREE_BYTES + visits // 6


def test_what_is_free_is_there_once(bed: Bed, file: FileState) -> None:
    """For whatever guess: of a job that gains nothing no more than FREE_BYTES is for nothing."""
    streaming(bed, file)
    book = bed.ahead._of(file).visited
    stream = book.streaming.stream
    assert stream is not None
    rooms = []
    for lost in (0, module.FREE_BYTES):
        bed.ahead.account.asked = bed.ahead.account.lost = lost
        bed.ahead._whole.step(bed.now)
        assert stream.most_bytes is not None
        rooms.append(stream.most_bytes - stream.absent_bytes)
    own = max(0, -book.over_bytes(bed.ahead.measured()))
    assert rooms[0] > own == rooms[1]
    room = bed.ahead.room_bytes()
    book.used_bytes = -8 * MIB  # so much of it more is for nothing
    bed.ahead._whole.step(bed.now)
    assert bed.ahead.room_bytes() == 0 <= room


def test_what_is_read_whole_is_no_guess_of_a_stream(bed: Bed, file: FileState) -> None:
    """Most of it is for nothing while it is read: no stream waits for that, nor is it lost when
    nobody maps the file any more."""
    region = bed.region(file)
    bed.visits(region, MANY)
    account, read = bed.ahead.account, bed.said(file)["read_bytes"]
    assert bed.said(file)["state"] == "done"
    assert account.asked < read // 4 and account.open < 8 * MIB and not account.over
    assert bed.ahead._of(file).visited.used_bytes <= read
    bed.unmap(region)
    assert account.lost < read // 4


def test_who_misses_in_another_file_does_not_wait_for_it(
    bed: Bed, file: FileState, other: FileState
) -> None:
    """Who misses in the file itself needs most of it."""
    region, beside = streaming(bed, file), bed.region(other, pid=8)
    book = bed.ahead._of(file).visited
    stream = book.streaming.stream
    assert stream is not None
    link = bed.ahead.measured()
    little = link.reach_bytes + (256 << 10)
    assert stream.terms.yield_bytes <= little + BLOCK, "nor who may stop soon"
    while not book.goes_on:
        bed.visits(region, 1)
    bed.visits(region, 1)
    assert stream.terms.yield_bytes > 2 * little - MIB
    before = stream.terms.yield_bytes
    bed.touch(beside, 16 * MIB)
    assert stream.terms.yield_bytes < before
