# SPDX-License-Identifier: Apache-2.0
"""readers/ahead.py in a service without a kernel: whom it reads ahead of, and what it counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from guess_bed import AROUND, BLOCK, MIB, MS, SIZE, Bed, opened

from uffdprefetch.base.file_systems import FILE_SYSTEMS, TMPFS, FileSystem
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.fronts import MISS_BLOCKS, Front
from uffdprefetch.predict.storage import FREE_BYTES, PIECE_BYTES, Storage
from uffdprefetch.readers import ahead as module
from uffdprefetch.sense.pagetables import LOOK_FIRST_NS
from uffdprefetch.state.files import FileState
from uffdprefetch.state.reader import Region
from uffdprefetch.warm.depth import MAX_SECONDS
from uffdprefetch.warm.meter import SAMPLES_LEAST, Meter
from uffdprefetch.warm.scheduler import RESPONSE_SECONDS

pytest_plugins = ("guess_bed",)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


# ---- who is read ahead of -----------------------------------------------------------------------


def test_a_stream_misses_at_its_beginning_only(bed: Bed, file: FileState) -> None:
    bed.walk(bed.region(file), 0, 128 * MIB)
    assert bed.misses < 32
    before = bed.misses
    bed.walk(bed.region(file), 128 * MIB, 250 * MIB)
    assert bed.misses == before and bed.ahead.account.lost < 2 * MIB


def test_a_file_that_is_mapped_piece_by_piece_is_read_ahead_of_in_each(
    bed: Bed, file: FileState
) -> None:
    for at in range(0, SIZE, 8 * MIB):
        region = bed.region(file)
        bed.walk(region, at, at + 8 * MIB)
        bed.unmap(region)
    assert bed.misses < 4 * SIZE // (8 * MIB), "of 64 touches in each piece"
    assert bed.sent_bytes <= SIZE + 4 * MIB


def test_when_an_order_was_followed_for_a_while_nothing_is_left_out_after_it(
    bed: Bed, file: FileState
) -> None:
    region = bed.region(file)
    bed.walk(region, 0, 12 * MIB)
    bed.order(region, True)
    assert not bed.scheduler.queued_bytes, "and what was queued is taken back"
    bed.walk(region, 12 * MIB, 24 * MIB)
    bed.order(region, False)
    before = bed.misses
    bed.walk(region, 24 * MIB, 128 * MIB)
    assert bed.misses - before < 16


def test_what_was_touched_while_an_order_is_followed_is_not_kept(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    bed.order(region, True)
    bed.walk(region, 0, 32 * MIB)
    assert not bed.ahead._of(file).processes
    bed.order(region, False)
    bed.sent.clear()
    bed.touch(region, 200 * MIB)
    assert bed.sent_bytes <= MIB, "which is what measures the link"


def test_ranks_that_read_the_same_are_read_ahead_of_once(bed: Bed, file: FileState) -> None:
    regions = [bed.region(file, rank, 10 + rank) for rank in range(4)]
    for at in range(0, 64 * MIB, AROUND):
        for region in regions:
            bed.touch(region, at, AROUND)
    assert bed.sent_bytes < bed.read().total_bytes() + 4 * MIB


def test_one_page_of_each_so_many_is_all_that_is_read_of_them(bed: Bed, file: FileState) -> None:
    """Records of which a reader takes every n-th: the chain holds, so its next places are read."""
    region = bed.region(file)
    for at in range(0, SIZE, 2 * MIB):
        bed.touch(region, at)
    assert bed.misses < 16 and bed.sent_bytes < 40 * MIB


def test_what_is_there_already_is_not_asked_for(bed: Bed, file: FileState) -> None:
    bed.of(file).add(0, SIZE)
    bed.walk(bed.region(file), 0, 128 * MIB)
    assert bed.sent == []


# ---- what a miss costs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead_bytes", "brings"), [(None, 128 << 10), (0, 4096), (MIB, MIB)], ids=str
)
def test_a_miss_brings_what_the_kernel_reads_around_it(
    bed: Bed, file: FileState, ahead_bytes: int | None, brings: int
) -> None:
    file.call.ahead_bytes = ahead_bytes
    assert bed.ahead._link(bed.region(file).reader).miss_bytes == brings


def test_the_link_is_measured_where_nobody_has_touched(bed: Bed, file: FileState) -> None:
    """Three times by some blocks, six by one, each alone, beyond what the kernel reads ahead of the
    last touch."""
    region = bed.region(file)
    for at in (0, 120, 40, 200, 80, 160, 20, 220, 60, 100, 140, 180):
        bed.touch(region, at * MIB)
    assert sorted(length for _, length in bed.sent) == [BLOCK] * 6 + [MIB] * 3
    link = bed.scheduler.meter.link
    assert link is not None
    assert link.bandwidth_bytes_per_second == pytest.approx(300e6, rel=0.1)
    assert link.latency_seconds == pytest.approx(1e-3, rel=0.1)
    assert bed.ahead.account.lost == 3 * MIB + 6 * BLOCK, "unless somebody comes to it"


def test_where_others_stand_beside_each_it_is_not_measured_for_ever(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "is_sure", False)
    region = bed.region(file)
    for at in range(37):
        bed.touch(region, at * 83 % 250 * MIB)
    assert len(bed.sent) == 4 * SAMPLES_LEAST


def test_nothing_is_measured_by_what_is_not_free_any_more(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    bed.ahead.account.asked = bed.ahead.account.lost = FREE_BYTES - MIB // 2
    bed.touch(region, 0)
    bed.touch(region, 120 * MIB)
    assert bed.sent == [], "a large read tells first"
    bed.ahead.account.asked = bed.ahead.account.lost = FREE_BYTES - MIB
    bed.touch(region, 40 * MIB)
    assert [length for _, length in bed.sent] == [MIB]


def test_it_is_measured_by_one_read_at_a_time(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands behind another tells of both."""
    monkeypatch.setattr(bed.scheduler, "reap", lambda: None)
    region = bed.region(file)
    for at in (0, 120, 40):
        bed.touch(region, at * MIB)
    assert len(bed.sent) == 1


def depth_at(bed: Bed, region: Region, front: Front | None = None, now_ns: int = 0) -> int:
    """How much may be under way for it in a turn that begins now, or then."""
    bed.ahead.step(now_ns or bed.now)
    return bed.ahead._depth_of_all_bytes(region.reader, front)


def misses(bed: Bed, region: Region, front: Front) -> None:
    """Just now, at a front of the region's file."""
    of = bed.ahead._of(region.file)
    bed.ahead._traffic.missed[region.reader.pid] = module.Miss(
        bed.now, region.reader.pid, of, front
    )


def test_beside_a_miss_of_somebody_else_less_is_under_way(bed: Bed, file: FileState) -> None:
    walker, other = bed.region(file), bed.region(file, 1, 8)
    bed.walk(walker, 0, 32 * MIB)
    alone = depth_at(bed, walker)
    bed.touch(other, 200 * MIB)
    missed_ns = bed.ahead._traffic.missed[8].at_ns
    beside = depth_at(bed, walker, now_ns=missed_ns)
    link = bed.ahead.measured()
    assert alone - beside == pytest.approx(
        link.bandwidth_bytes_per_second * RESPONSE_SECONDS, abs=1
    )
    later_ns = missed_ns + 4 * LOOK_FIRST_NS
    assert depth_at(bed, walker, now_ns=later_ns) == alone
    assert depth_at(bed, other, now_ns=missed_ns) == alone, "of itself"


def beside(bed: Bed, region: Region, front: Front | None = None) -> float:
    link = bed.ahead._link(region.reader)
    return bed.ahead._beside(link, region.reader, front).beside


def test_who_waits_for_other_requests_is_beside_it_and_who_waits_for_the_same_is_not(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    walker, rank, other = (bed.region(file, n, 7 + n) for n in range(3))
    bed.walk(walker, 0, 4 * MIB)
    (head,) = bed.ahead._of(file).heads.values()
    far = bed.ahead._of(file).fronts.touch(9, 3000, 3001, bed.now, bed.ahead.measured())[0]
    bed.ahead.step(bed.now)
    misses(bed, rank, head.front)
    misses(bed, other, far)
    assert beside(bed, walker, head.front) == 0, "one waits at a time"
    monkeypatch.setattr(bed.ahead, "_waiting", lambda: 3.0)
    assert beside(bed, walker, head.front) == 1
    misses(bed, walker, head.front)
    assert beside(bed, walker) == 1, "its own is where the rank waits"
    assert beside(bed, rank, far) == 0, "and beside that is nobody's else"
    monkeypatch.setattr(bed.ahead, "_waiting", lambda: 1.5)
    assert beside(bed, walker, head.front) == 0.5
    bed.ahead.step(bed.now + 4 * LOOK_FIRST_NS)
    assert beside(bed, walker, head.front) == 0, "they have gone on"


def test_where_others_keep_the_link_busy_nothing_is_read_ahead(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bed.ahead, "_waiting", lambda: 4.0)
    monkeypatch.setattr(bed.ahead._traffic, "missed_beside", lambda pid, front: 3)
    bed.walk(bed.region(file), 0, 64 * MIB)
    assert bed.sent_bytes <= FREE_BYTES, "which is what measures the link"


def test_a_long_stream_may_have_more_under_way(bed: Bed, file: FileState) -> None:
    walker = bed.region(file)
    bed.walk(walker, 0, 64 * MIB)
    (head,) = bed.ahead._of(file).heads.values()
    assert depth_at(bed, walker, head.front) == 8 * MIB
    head.front.start = head.front.position - 8 * MIB // BLOCK
    young = depth_at(bed, walker, head.front)
    assert young == depth_at(bed, walker), "what lasts until the next is sent"
    head.front.start = head.front.position - (4 << 30) // BLOCK
    most = int(MAX_SECONDS * bed.ahead.measured().bandwidth_bytes_per_second)
    assert depth_at(bed, walker, head.front) == most
    bed.now += LATELY_NS
    assert depth_at(bed, walker, head.front) == young, "nobody goes on there"


@pytest.mark.parametrize("stops", [10, 26, 52, 100, 150])
def test_who_reads_on_and_stops_has_little_drawn_for_nothing(
    bed: Bed, file: FileState, stops: int
) -> None:
    """At any part of a file of 256 MiB: beyond a twentieth of what it has read no more than 4 MiB,
    though it does not end and the link has nothing else to do."""
    region = bed.region(file)
    bed.walk(region, 0, stops * MIB)
    bed.rest()
    drawn = max(end for _, end in bed.read())
    assert stops * MIB < drawn <= int(1.05 * stops * MIB) + FREE_BYTES


def test_who_rests_time_and_again_finds_as_much_as_it_reads_in_between(
    bed: Bed, file: FileState
) -> None:
    """It computes between what it reads. Twice it may be a node that was busy."""
    region = bed.region(file)
    bed.walk(region, 0, 24 * MIB)
    bed.rest()
    bed.walk(region, 24 * MIB, 40 * MIB)
    bed.rest()
    bed.walk(region, 40 * MIB, 64 * MIB)
    assert max(end for _, end in bed.read()) <= 72 * MIB
    bed.rest()
    bed.walk(region, 64 * MIB, 66 * MIB)
    bed.rest()
    assert 82 * MIB < max(end for _, end in bed.read()) <= 86 * MIB  # 16, and what lasts


def test_a_short_stream_does_not_wait_for_what_long_ones_have_under_way(
    bed: Bed, file: FileState
) -> None:
    """Which of them is sent is told by who is nearest: else who is late falls further behind."""
    first, second = bed.region(file), bed.region(file, 1, 8)
    bed.walk(first, 0, 64 * MIB)
    bed.walk(second, 128 * MIB, 132 * MIB)
    long, short = sorted(bed.ahead._of(file).heads.values(), key=lambda head: -head.front.length)
    bed.ahead._traffic.missed.clear()
    bed.ahead.step(bed.now)
    assert short.depth_of_all_bytes == long.depth_of_all_bytes == 8 * MIB
    misses(bed, second, short.front)
    assert short.depth_of_all_bytes > long.depth_of_all_bytes, "but beside its miss"


def test_a_rank_that_misses_beside_a_stream_waits_for_what_is_read_ahead_of_it(
    bed: Bed, file: FileState
) -> None:
    walker, beside, elsewhere = (bed.region(file, rank, 7 + rank) for rank in range(3))
    bed.walk(walker, 32 * MIB, 64 * MIB)
    front = next(iter(bed.ahead._of(file).heads))
    alone = depth_at(bed, walker, front)
    at = bed.ahead._of(file).fronts._begin(beside.reader.pid, 40 * MIB // BLOCK, 641, bed.now)
    misses(bed, beside, at)
    assert depth_at(bed, walker, front) == alone
    far = bed.ahead._of(file).fronts._begin(elsewhere.reader.pid, 16 * MIB // BLOCK, 257, bed.now)
    misses(bed, elsewhere, far)
    link = bed.ahead.measured()
    assert depth_at(bed, walker, front) == link.busy_bytes(0.0) + PIECE_BYTES


def test_who_misses_in_another_file_waits_for_itself_wherever_that_is(
    bed: Bed, shards: list[FileState]
) -> None:
    """Its place says nothing of a walk through this one."""
    walker, other = bed.region(shards[0]), bed.region(shards[2], 1, 8)
    bed.walk(walker, 0, 16 * MIB)
    front = next(iter(bed.ahead._of(shards[0]).heads))
    bed.touch(other, 8 * MIB)
    assert bed.ahead._traffic.missed[8].front.position * BLOCK < front.wanted * BLOCK
    link = bed.ahead.measured()
    assert depth_at(bed, walker, front) == link.busy_bytes(0.0) + PIECE_BYTES


def test_the_next_look_is_due_when_half_of_what_is_ahead_may_be_gone(
    bed: Bed, file: FileState
) -> None:
    region, still = bed.region(file), bed.region(file, 1, 8)
    assert bed.ahead.look_ns(region, bed.now) is None
    bed.walk(region, 0, 32 * MIB)
    (head,) = bed.ahead._of(file).heads.values()
    ahead = head.front.ahead * BLOCK
    expected = ahead / 2 / head.rate_bytes_per_second * 1e9
    assert bed.ahead.look_ns(region, bed.now) == pytest.approx(expected, rel=0.01)
    assert bed.ahead.look_ns(still, bed.now) is None
    assert bed.ahead.look_ns(region, bed.now + 1000 * MS) is None, "it stands"


# ---- what was for nothing -----------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path, bed: Bed, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FileState]]:
    monkeypatch.setitem(FILE_SYSTEMS, TMPFS, FileSystem("tmpfs"))
    names = [f"model-{number:05d}-of-00002.bin" for number in (1, 2)]
    files = [opened(tmp_path / name, 32 * MIB) for name in (*names, "labels.bin")]
    bed.core.table.files.update({one.key: one for one in files})
    yield files
    for one in files:
        one.close()


def test_the_file_that_follows_is_read_before_it_is_come_to(
    bed: Bed, shards: list[FileState]
) -> None:
    region = bed.region(shards[0])
    bed.walk(region, 0, 32 * MIB)
    before = bed.missing(shards[1])
    assert before < 24 * MIB
    bed.unmap(region)
    bed.misses = 0
    bed.walk(bed.region(shards[1]), 0, 32 * MIB)
    assert bed.misses < 4 and bed.ahead.account.lost < MIB


@pytest.mark.parametrize("ends", [False, True])
def test_one_that_nobody_comes_to_is_lost(bed: Bed, shards: list[FileState], ends: bool) -> None:
    region = bed.region(shards[0])
    bed.walk(region, 0, 32 * MIB)
    read = 32 * MIB - bed.missing(shards[1])
    bed.unmap(region)
    if ends:
        bed.core.mappings.left(region.reader.client)
    else:
        bed.walk(bed.region(shards[2]), 0, 32 * MIB)
    assert bed.ahead.account.lost >= read > 8 * MIB


def test_what_a_stream_has_left_unread_is_lost(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    bed.walk(region, 0, 32 * MIB)
    ahead = bed.ahead.account.open
    assert ahead > MIB
    bed.unmap(region)
    lost = bed.ahead.account.lost
    assert lost >= ahead - (MISS_BLOCKS + MISS_BLOCKS // 2) * BLOCK and bed.ahead.account.open == 0


def test_so_are_the_places_of_a_chain_that_breaks(bed: Bed, file: FileState) -> None:
    region = bed.region(file)
    for at in range(0, 128 * MIB, 2 * MIB):
        bed.touch(region, at)
    ahead = bed.ahead.account.open - 4 * MIB  # what has measured the link may be come to
    assert bed.ahead._of(file).processes[7].places
    before = bed.ahead.account.lost
    for at in (131 * MIB, 7 * MIB):
        bed.touch(region, at)
    assert not bed.ahead._of(file).processes[7].places
    assert bed.ahead.account.lost - before >= max(BLOCK, ahead)


def test_of_many_files_those_that_nobody_maps_are_forgotten(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 3)
    files = [opened(tmp_path / str(number), MIB) for number in range(8)]
    for number, one in enumerate(files):
        region = bed.region(one)
        bed.touch(region, 0)
        if number:
            bed.unmap(region)
    kept = list(bed.ahead._files)
    assert len(kept) == 3 and files[0].key in kept and files[7].key in kept
    for one in files:
        one.close()


# ---- storage that is near -----------------------------------------------------------------------


def test_who_is_as_fast_by_itself_as_its_storage_is_left_to_the_kernel(
    bed: Bed, file: FileState
) -> None:
    bed.latency_ns, bed.ns_a_byte = MS // 10, 1e9 / 3.5e9
    bed.walk(bed.region(file), 0, 200 * MIB, step=8 * MIB)
    assert bed.sent_bytes <= 8 * MIB, "which is what measures the link, and the first guess"
    assert file.path in str(bed.ledger.noted.all)


def test_who_was_fast_by_itself_is_read_ahead_of_where_storage_brings_more(
    bed: Bed, file: FileState
) -> None:
    bed.latency_ns, bed.ns_a_byte = MS // 10, 1e9 / 20e9
    bed.walk(bed.region(file), 0, 200 * MIB, step=2 * MIB)
    assert bed.sent_bytes > 100 * MIB


def test_a_pace_in_memory_tells_nothing_of_the_storage(bed: Bed, file: FileState) -> None:
    bed.of(file).add(0, 128 * MIB)
    region = bed.region(file)
    bed.walk(region, 0, 96 * MIB, step=8 * MIB)
    assert not bed.scheduler.device_of(file).plain.bytes_per_second
    bed.walk(region, 96 * MIB, 250 * MIB)
    assert bed.misses < 8


@pytest.mark.parametrize(
    ("sure", "latency", "pays"), [(True, 3e-3, True), (False, 3e-3, False), (False, 6e-3, True)]
)
def test_as_long_as_the_latency_is_in_doubt_nothing_is_read_that_only_it_makes_pay(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch,
    sure: bool, latency: float, pays: bool,
) -> None:  # fmt: skip
    """One block in eight is worth reading on only where each of them has waited for long."""
    monkeypatch.setattr(Meter, "is_sure", sure)
    monkeypatch.setattr(Meter, "link", Storage(300e6, latency))
    region = bed.region(file)
    bed.walk(region, 0, 4 * MIB)
    for at in range(4 * MIB, 60 * MIB, 8 * BLOCK):
        bed.touch(region, at, BLOCK)
    of, link = bed.ahead._of(file), bed.ahead._link(region.reader)
    (front,) = of.fronts.fronts
    _, least, _ = bed.ahead._window(of, front, region.reader, link)
    assert (least < 1) == pays


@pytest.mark.parametrize(("plain", "waits"), [(2.4e9, True), (2.6e9, False)])
def test_who_is_as_fast_as_a_disk_here_has_waited_for_nothing_before_a_link_is_known(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch, plain: float, waits: bool
) -> None:
    monkeypatch.setattr(Meter, "link", None)
    bed.scheduler.device_of(file).plain.note(plain, bed.now)
    link = bed.ahead._link(bed.region(file).reader)
    assert (link.in_order_seconds(SIZE) > 0) is waits


def test_of_what_is_to_be_read_again_eight_touched_runs_are_asked_about(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = bed.region(file)
    for at in range(0, 40 * BLOCK, 2 * BLOCK):
        bed.touch(region, at, BLOCK)
    asked: list[int] = []

    def resident(start: int, length: int) -> int:
        asked.append(start // BLOCK)
        return 0

    monkeypatch.setattr(file, "resident_bytes", resident)
    of = bed.ahead._of(file)
    of.fronts.flags[:40] = bytes([1, 0] * 20)
    assert bed.ahead._unless_there(of, region.reader, 0, 40) == (0, 40)
    assert asked == [0, *range(0, 16, 2)], "all of it, and the first of what was touched"
