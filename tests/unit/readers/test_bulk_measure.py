# SPDX-License-Identifier: Apache-2.0
"""readers/bulk.py: what is missing of a file, what the storage is measured to give, how much room
there is, and what is said of all that."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bulk_bed import BLOCK, LATENCY_NS, MIB, MS, NS_A_BYTE, SIZE, Bed, opened, until

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.pool.node_pool import PoolFile
from uffdprefetch.predict.bulk import MISS_BYTES, PROBE_LEAST_BYTES, RENT_SHARE
from uffdprefetch.readers import bulk as module
from uffdprefetch.readers.bulk import a_missing_piece
from uffdprefetch.readers.file_stream import missing_bytes
from uffdprefetch.state.files import FileState
from uffdprefetch.warm.limits import Limit

pytest_plugins = ("bulk_bed",)

KIB = 1 << 10

# ---- what is missing ----------------------------------------------------------------------------


def test_missing_is_what_the_kernel_has_not_cached(tmp_path: Path) -> None:
    path = tmp_path / "half"
    path.write_bytes(bytes(256 * KIB))
    with open(path, "r+b") as half:
        half.seek(768 * KIB)
        half.write(bytes(256 * KIB))
    file = opened(path)
    assert missing_bytes(file) == 512 * KIB
    assert missing_bytes(file, 128 * KIB) == 512 * KIB
    assert missing_bytes(file, 128 * KIB, 512 * KIB) == 256 * KIB
    assert missing_bytes(file, 64 * KIB, 192 * KIB) == 0
    assert missing_bytes(file, 512 * KIB, 640 * KIB) == 128 * KIB
    file.close()


def test_where_nobody_tells_what_is_cached_all_is_missing_but_what_we_have_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "foreign"
    path.touch()
    os.truncate(path, 10 * BLOCK - 100)
    file = opened(path)
    monkeypatch.setattr(uffd, "resident_bytes", lambda *_: (None, "not permitted"))
    file.mark_used(0, 10 * BLOCK)  # which may be the demand of its readers, long ago
    assert missing_bytes(file) == 10 * BLOCK - 100
    file.mark_prefetched(2 * BLOCK, 5 * BLOCK)
    assert missing_bytes(file) == 7 * BLOCK - 100
    assert missing_bytes(file, 4 * BLOCK, 8 * BLOCK) == 3 * BLOCK
    assert missing_bytes(file, 2 * BLOCK, 5 * BLOCK) == 0
    assert missing_bytes(file, 0, 3 * BLOCK) == 2 * BLOCK
    assert missing_bytes(file, 7 * BLOCK, 9 * BLOCK) == 2 * BLOCK
    file.mark_prefetched(0, 10 * BLOCK - 100)
    assert missing_bytes(file) == 0, "the last block is shorter"
    file.blocks = bytearray(10)
    file.mark_prefetched(0, 2 * BLOCK)  # read, and nobody has come yet
    assert missing_bytes(file, 0, 3 * BLOCK) == BLOCK
    file.close()


def test_of_a_file_in_the_pool_what_the_pool_does_not_hold_is_missing(tmp_path: Path) -> None:
    """The page cache has nothing of it, and need not."""
    path = tmp_path / "pooled"
    path.write_bytes(bytes(MIB - 100))
    file = opened(path)
    state: Any = np.zeros(16, np.uint8)
    state[[0, 1, 2, 9]] = uffd_pool.PRESENT
    state[3] = uffd_pool.PRESENT + 1  # on its way out, or in
    part: Any = SimpleNamespace(state=state, chunk_bytes=64 * KIB)
    assert missing_bytes(file, pooled=part) == 12 * 64 * KIB
    assert missing_bytes(file, 0, 192 * KIB, part) == 0
    assert missing_bytes(file, 128 * KIB, 320 * KIB, part) == 128 * KIB
    assert missing_bytes(file, 576 * KIB, 640 * KIB, part) == 0
    assert missing_bytes(file, 660 * KIB, 661 * KIB, part) == KIB, "of a chunk that is longer"
    assert missing_bytes(file, 960 * KIB, MIB - 100, part) == 64 * KIB - 100
    file.close()


@pytest.mark.parametrize("turn", range(3))
def test_a_piece_to_measure_with_is_found_if_an_eighth_is_missing(
    file: FileState, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    """Wherever it is: who reads at random leaves no region out, but another job may have."""
    bed = Bed(monkeypatch)
    for eighth in range(0, SIZE, SIZE // 8):
        there = bed.of(file.fd)
        there.add(0, SIZE)
        there.remove(eighth, eighth + SIZE // 8)
        at = a_missing_piece(file, turn)
        assert at is not None and at % MISS_BYTES == 0
        assert eighth <= at < eighth + SIZE // 8


def test_a_piece_to_measure_with_is_missing_as_a_whole_and_each_is_another(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    assert len({a_missing_piece(file, turn) for turn in range(16)}) == 16
    for at in range(0, SIZE, MISS_BYTES):
        bed.of(file.fd).add(at, at + BLOCK)
    assert a_missing_piece(file, 0) is None


# ---- the storage --------------------------------------------------------------------------------


def test_latency_is_that_of_a_single_read_and_bandwidth_that_of_a_stream(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    bed.crops(bed.region(file), 400)
    bed.rest()
    one_ns = LATENCY_NS + MISS_BYTES * NS_A_BYTE
    assert bed.said(file)["miss_seconds"] == pytest.approx(one_ns / 1e9, rel=0.01)
    expected = 1e9 / NS_A_BYTE
    assert bed.said(file)["bandwidth_bytes_per_second"] == pytest.approx(expected, rel=0.1)


def test_what_is_not_measured_is_told_as_unknown(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, budget_bytes=SIZE - 1)
    until(bed, file, "refused")
    assert bed.said(file)["miss_seconds"] is None
    assert bed.said(file)["bandwidth_bytes_per_second"] is None
    assert bed.bulk.describe(other.path) is None


def test_a_read_that_is_under_way_tells_nothing_yet(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service turns for other reasons, too."""
    bed = Bed(monkeypatch)
    until(bed, file, "measured")
    assert len(bed.sent) == 1 and bed.scheduler.under_way_bytes
    for _ in range(5):
        bed.now += 50_000
        bed.bulk.step(bed.now)
        bed.scheduler.pump(bed.now)
    assert bed.said(file)["miss_seconds"] is None and len(bed.sent) == 1


def test_where_windows_have_measured_the_bandwidth_single_reads_are_enough(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    bed.latency_ns, bed.scheduler.meter.bandwidth = 0, 300e6
    until(bed, file, "refused")
    assert bed.sent and max(length for _, length in bed.sent) <= MISS_BYTES
    assert bed.said(file)["bandwidth_bytes_per_second"] == 300e6


def test_what_the_measuring_reads_is_counted_and_what_windows_read_is_not(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    bed.latency_ns, file.prefetched_bytes = 0, 10 * MIB
    until(bed, file, "refused")
    read = sum(length for _, length in bed.sent)
    assert PROBE_LEAST_BYTES <= read <= PROBE_LEAST_BYTES + MIB, "misses have brought nothing"
    assert bed.said(file)["read_bytes"] == read


def test_while_it_does_not_pay_yet_it_is_judged_now_and_then(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What of a large file is cached takes the kernel a while to tell."""
    bed = Bed(monkeypatch)
    bed.crops(bed.region(file), 45)
    sent, before = len(bed.sent), len(bed.looked)
    bed.rest(500)
    assert bed.said(file)["state"] == "undecided" and len(bed.sent) == sent
    assert "random misses have cost" in bed.said(file)["why"]
    assert 1 <= bed.looked[before:].count((0, SIZE)) <= 26, "in half a second"


def test_a_stream_begins_when_misses_have_cost_a_share_of_it(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    monkeypatch.setattr(module, "JUDGE_NS", 1 * MS)
    region, touches = bed.region(file), 0
    while bed.bulk.describe(file.path) is None or bed.said(file)["state"] != "streamed":
        bed.crops(region, 1)
        touches += 1
        assert touches < 1000
    said = bed.said(file)
    stream_seconds = bed.missing(file) / said["bandwidth_bytes_per_second"]
    assert 1 <= touches * said["miss_seconds"] / (stream_seconds * RENT_SHARE) <= 1.2


def test_where_something_of_each_piece_is_cached_no_latency_is_measured_nor_made_up(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    for at in range(0, SIZE, MISS_BYTES):
        bed.of(file.fd).add(at, at + BLOCK)
    bed.crops(bed.region(file), 100)
    before = len(bed.looked)
    bed.rest(500)
    assert bed.said(file)["state"] in ("undecided", "measured")
    assert bed.said(file)["miss_seconds"] is None
    assert bed.said(file)["bandwidth_bytes_per_second"] is None and bed.sent == []
    assert bed.looked[before:].count((0, SIZE)) <= 50, "in half a second"
    assert bed.ledger.degradations == []


def test_a_single_read_is_not_taken_for_the_streams_beginning(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No piece to measure with is missing at first; then the kernel drops one."""
    bed, find = Bed(monkeypatch), module.a_missing_piece
    asked: list[int] = []

    def later(file: FileState, turn: int, pooled: PoolFile | None) -> int | None:
        asked.append(turn)
        return find(file, turn, pooled) if len(asked) > 1 else None

    monkeypatch.setattr(module, "a_missing_piece", later)
    bed.crops(bed.region(file), 200)
    bed.rest()
    assert len(asked) > 1
    assert 0 < bed.said(file)["bandwidth_bytes_per_second"] <= 1e9 / NS_A_BYTE


def test_measuring_ends_when_the_order_becomes_known(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    region = until(bed, file, "measured")
    bed.order(region, True)
    bed.rest()
    assert bed.said(file)["state"] == "undecided" and len(bed.sent) == 1
    assert "order" in bed.said(file)["why"]


@pytest.mark.parametrize("read_ahead", [None, 0])
def test_where_the_kernel_reads_nothing_around_a_miss_a_page_is_what_a_miss_brings(
    file: FileState, monkeypatch: pytest.MonkeyPatch, read_ahead: int | None
) -> None:
    """Then a stream pays where 128 KiB at once would cost no more than it."""
    bed = Bed(monkeypatch)
    bed.latency_ns = 0
    file.ahead_bytes = read_ahead
    bed.crops(bed.region(file), 800)
    bed.rest()
    assert bed.said(file)["state"] == "done" and not bed.missing(file)


def test_a_file_that_is_nearly_all_there_is_neither_measured_nor_streamed(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    bed.of(file.fd).add(2 * MIB, SIZE)
    bed.crops(bed.region(file), 400)
    bed.rest()
    assert bed.said(file)["state"] == "undecided" and bed.sent == []
    assert bed.said(file)["why"] == "2 MiB of it are not in memory"
    assert bed.ledger.degradations == []


# ---- room ---------------------------------------------------------------------------------------


def test_what_is_cached_already_needs_no_free_memory(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    monkeypatch.setattr(bed.limits, "ahead_bytes", lambda: (64 * MIB, Limit.MEMORY))
    bed.of(file.fd).add(0, 192 * MIB)
    bed.crops(bed.region(file), 400)
    bed.rest()
    assert bed.said(file)["state"] == "done" and bed.ledger.degradations == []


def test_the_budget_holds_for_what_is_cached_too(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, budget_bytes=SIZE - 1)
    monkeypatch.setattr(bed.limits, "ahead_bytes", lambda: (128 * MIB, Limit.MEMORY))
    bed.of(file.fd).add(0, 192 * MIB)
    until(bed, file, "refused")
    assert bed.sent == []


def test_a_file_that_nobody_maps_any_more_takes_no_room(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, budget_bytes=SIZE + SIZE // 2)
    bed.crops(bed.region(file), 1000)  # so many that its stream was worth its price
    bed.rest()
    file.attached = 0
    bed.crops(bed.region(other, pid=8), 400)
    bed.rest()
    assert (bed.said(file)["state"], bed.said(other)["state"]) == ("done", "done")


def test_a_file_that_is_not_streamed_takes_no_room(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, budget_bytes=SIZE)
    other.size_bytes += 1
    until(bed, other, "refused")
    bed.crops(bed.region(file, pid=8), 400)
    bed.rest()
    assert bed.said(file)["state"] == "done"


def a_pool(budget_bytes: int, limited_by: Limit | None) -> Any:
    """One that maps no more than what is touched."""
    return SimpleNamespace(
        budget_bytes=budget_bytes, limited_by=limited_by,
        pool=SimpleNamespace(used_bytes=lambda: 0),
        walked=lambda part, stream, start, end, forward: (start, end),
    )  # fmt: skip


def in_the_pool(bed: Bed, file: FileState, chunk_bytes: int = 64 * KIB) -> None:
    """Its part of a pool, of which the bed's workers are those of the pool."""

    def submit(number: int, _: int, start: int, length: int, due_ns: int) -> bool:
        return bed.submit(number, file.fd, start, length)

    pooled = SimpleNamespace(
        pool=SimpleNamespace(submit=submit), number=0, chunk_bytes=chunk_bytes,
        in_flight=IntervalSet(), absent=lambda start, end: bed.missing(file, start, end) > 0,
    )  # fmt: skip
    file.pooled = pooled  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("limited_by", "named"), [(None, "--budget"), (Limit.CGROUP, "cgroup memory limit")]
)
def test_a_file_in_the_pool_must_fit_in_the_pool(
    file: FileState, monkeypatch: pytest.MonkeyPatch, limited_by: Limit | None, named: str
) -> None:
    bed = Bed(monkeypatch)
    monkeypatch.setattr(bed.layout, "pool", a_pool(SIZE - MIB, limited_by))
    in_the_pool(bed, file)
    until(bed, file, "refused")
    (finding,) = bed.ledger.degradations
    assert f"256 MiB do not fit in 255 MiB ({named})" in finding and bed.sent == []


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    ("next_one", "advice"),
    [
        (Limit.BUDGET, "with --budget 256MiB it could be"),
        (Limit.CGROUP, "with a higher memory limit of the job (Slurm: --mem) it could be"),
        (Limit.MEMORY, "on a node with more free memory it could be"),
    ],
)
def test_a_larger_budget_is_advised_only_where_nothing_else_is_in_its_way(
    file: FileState, monkeypatch: pytest.MonkeyPatch, next_one: Limit, advice: str, pooled: bool
) -> None:
    """--budget 4GiB is the default: who has a smaller memory limit gains nothing by it."""
    asked = []

    def at(budget_bytes: int, resident_bytes: int | None = None) -> Limit:
        asked.append((budget_bytes, resident_bytes))
        return next_one

    bed = Bed(monkeypatch)
    monkeypatch.setattr(bed.limits, "at", at)
    monkeypatch.setattr(bed.limits, "ahead_bytes", lambda: (SIZE - MIB, Limit.BUDGET))
    if pooled:
        monkeypatch.setattr(bed.layout, "pool", a_pool(SIZE - MIB, None))
        in_the_pool(bed, file)
    else:
        bed.crops(bed.region(file), 400)
    until(bed, file, "refused")
    (finding,) = bed.ledger.degradations
    assert finding.endswith(f": not warmed; {advice}, a plan needs less")
    assert asked == [(SIZE, 0 if pooled else None)]


def test_two_files_that_fit_in_the_pool_only_singly(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    monkeypatch.setattr(bed.layout, "pool", a_pool(SIZE + SIZE // 2, None))
    for one in (file, other):
        in_the_pool(bed, one)
        bed.crops(bed.region(one, pid=7 + one.fd), 400)
        bed.rest()
    assert (bed.said(file)["state"], bed.said(other)["state"]) == ("done", "refused")
    (finding,) = bed.ledger.degradations
    assert "with --budget 512MiB it could be" in finding, "less is there already"


def test_a_file_beside_the_pool_need_not_fit_in_it(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is in the page cache, because the pool did not take it."""
    bed = Bed(monkeypatch)
    monkeypatch.setattr(bed.layout, "pool", a_pool(16 * MIB, "MemAvailable"))
    bed.crops(bed.region(file), 400)
    bed.rest()
    assert bed.said(file)["state"] == "done" and bed.ledger.degradations == []


def test_in_the_pool_a_miss_brings_a_chunk(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of half of what the kernel would read: the stream saves as much again."""
    bed = Bed(monkeypatch)
    bed.latency_ns = 0
    monkeypatch.setattr(bed.layout, "pool", a_pool(SIZE, ""))
    in_the_pool(bed, file, MISS_BYTES // 2)
    bed.crops(bed.region(file), 800)
    bed.rest()
    assert bed.said(file)["state"] == "done"


# ---- what is said -------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "who"), [([2], "rank 2 "), ([5, 1], "ranks 1, 5 ")])
def test_the_finding_names_the_file_its_ranks_and_the_budget_that_would_do(
    file: FileState, monkeypatch: pytest.MonkeyPatch, ranks: list[int], who: str
) -> None:
    bed = Bed(monkeypatch, budget_bytes=SIZE // 2)
    regions = [bed.region(file, rank, 10 + rank) for rank in ranks]
    for region in regions:  # of all it is known before one of them is judged
        bed.order(region, True)
        bed.crops(region, 100)
    for region in regions:
        bed.order(region, False)
    bed.rest(5)
    (finding,) = bed.ledger.degradations
    assert finding.startswith(f"{file.path}: {who}") and "--budget 256MiB" in finding
    assert bed.said(file)["ranks"] == sorted(ranks)
