# SPDX-License-Identifier: Apache-2.0
"""service/summary.py: sums and shares that cannot contradict each other, whatever was counted."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from figures import RATIOS

from uffdprefetch.base.mounts import type_at
from uffdprefetch.base.units import MIB
from uffdprefetch.service import summary
from uffdprefetch.service.gained import Gained
from uffdprefetch.state.ledger import Ledger

BLOCK, PAGE = 64 << 10, 4096


def a_file(chance: random.Random) -> dict[str, Any]:
    """What is counted of a file by itself: bytes by results, blocks by page tables."""
    prefetched = chance.choice([0, 1, 4097, chance.randrange(1 << 40)])
    used, unused, demand = (
        chance.choice([0, 1, chance.randrange(1 << 16)]) * BLOCK for _ in range(3)
    )
    return {
        "prefetched_bytes": prefetched,
        "late_bytes": chance.randrange(prefetched + 1),
        "already_resident_bytes": chance.choice([0, chance.randrange(1 << 40)]),
        "prefetched_used_blocks_bytes": used,
        "prefetched_unused_blocks_bytes": unused,
        "demand_used_blocks_bytes": demand,
        "file_system": chance.choice(["ext4", "fuse"]),
        "path": f"/data/{chance.random()}",
        "served_by": chance.choice(["page_tables", "reads"]),
    }


def a_process(misses: int) -> Any:
    now = SimpleNamespace(major_faults=misses, read_call_bytes=0, storage_bytes=0)
    return SimpleNamespace(watched=SimpleNamespace(now=now, misses=misses))


def totals_of(
    files: list[dict[str, Any]], misses: list[int], followed: dict[str, Any] | None = None,
    read: dict[str, int] | None = None, pool_misses: int | None = None,
    jobs: tuple[int, int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """``read``: bytes that positions of descriptors show, by path; ``pool_misses``: touches that
    have waited for the pool, None: there was none; ``jobs``: what a launcher has told of its job,
    by read(2) and from storage."""
    ledger: Any = Ledger()
    if jobs is not None:
        ledger.jobs.finished(*jobs)
    ledger.jobs.files = lambda: [
        {"path": path, "read_bytes": bytes_} for path, bytes_ in (read or {}).items()
    ]
    ledger.processes.all = lambda: [a_process(count) for count in misses]
    gained = Gained("even", 0.0, 0.0, "", 0.0, "")
    pool = {"missing_faults": pool_misses, "stand_in_bytes": 0} if pool_misses is not None else None
    return vars(summary.totals(ledger, files, pool, followed, lambda figures: gained))


@pytest.mark.parametrize("seed", range(300))
def test_no_figure_contradicts_another(seed: int) -> None:
    chance = random.Random(seed)
    files = [a_file(chance) for _ in range(chance.randrange(4))]
    misses = [chance.choice([0, 1, 198, 10**6]) for _ in range(chance.randrange(3))]
    found = totals_of(files, misses)
    for name in RATIOS:
        assert found[name] is None or 0 <= found[name] <= 1
        assert found[name] is None or found[f"{name}_denominator_bytes"] > 0
    assert 0 <= found["used_bytes"] <= found["prefetched_bytes"]
    assert found["used_bytes"] + found["wasted_bytes"] == found["prefetched_bytes"]
    waited = any(f["demand_used_blocks_bytes"] for f in files if f["served_by"] == "reads")
    if found["coverage"] is not None and found["demand_misses"] is not None:
        assert (found["coverage"] == 1) == (not found["demand_misses"] and not waited)


def file_of(**bytes_: int) -> dict[str, Any]:
    names = (
        "prefetched_bytes", "late_bytes", "already_resident_bytes",
        "prefetched_used_blocks_bytes", "prefetched_unused_blocks_bytes",
        "demand_used_blocks_bytes",
    )  # fmt: skip
    plain = {"file_system": "ext4", "path": "/data", "served_by": "page_tables"}
    return {**dict.fromkeys(names, 0), **plain, **bytes_}


def test_of_a_file_in_memory_there_is_nothing_to_cover() -> None:
    """It was 16 % and 2 % of cached files without a miss."""
    cached = file_of(demand_used_blocks_bytes=1000 * BLOCK, already_resident_bytes=1000 * BLOCK)
    assert totals_of([cached], [0])["coverage"] is None
    partly = {**cached, "prefetched_bytes": 10 * BLOCK, "prefetched_used_blocks_bytes": 10 * BLOCK}
    assert totals_of([partly], [0])["coverage"] == 1


def test_without_a_descriptor_left_there_is_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(path: Path, **_: Any) -> str:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_text", none_left)
    assert totals_of([file_of(prefetched_bytes=MIB)], [1])["prefetched_bytes"] == MIB


def test_misses_are_never_covered_as_a_whole_and_cost_no_more_than_what_was_mapped() -> None:
    """It was 100 % with 198 misses."""
    read = file_of(prefetched_bytes=100 * BLOCK, prefetched_used_blocks_bytes=100 * BLOCK)
    assert totals_of([read], [198])["coverage"] == 100 * BLOCK / (100 * BLOCK + 198 * PAGE)
    more = {**read, "demand_used_blocks_bytes": 50 * BLOCK}
    assert totals_of([more], [10])["coverage"] == 100 / (100 + 20)
    assert totals_of([more], [30])["coverage"] == 100 / (100 + 50)


def test_what_the_kernels_readahead_has_brought_was_not_in_memory() -> None:
    """Of 95 MiB that were read by one miss, with a readahead of 8 MiB, 128 KiB were told."""
    read = file_of(demand_used_blocks_bytes=1520 * BLOCK)
    cold = totals_of([read], [1], jobs=(2 * MIB, 97 * MIB))
    assert (cold["coverage"], cold["coverage_denominator_bytes"]) == (0.0, 95 * MIB)
    libraries = totals_of([read], [1], jobs=(2 * MIB, 12 * MIB))
    assert libraries["coverage_denominator_bytes"] == 10 * MIB
    ahead = {**read, "prefetched_bytes": BLOCK, "prefetched_used_blocks_bytes": BLOCK}
    assert totals_of([ahead], [0], jobs=(0, 97 * MIB))["coverage"] == 1, "nobody missed"
    by_calls = totals_of([read], [1], jobs=(200 * MIB, 97 * MIB))
    assert by_calls["coverage_denominator_bytes"] == 128 << 10
    uncounted = totals_of([{**read, "file_system": "fuse"}], [1], jobs=(0, 97 * MIB))
    assert uncounted["coverage_denominator_bytes"] == 128 << 10


def test_what_the_jobs_own_faults_have_brought_is_covered_by_nobody() -> None:
    """Of the blocks that were read ahead a third was there already: it was 96 % of 1000 pieces, of
    which 533 were misses."""
    half = {"prefetched_used_blocks_bytes": 1000 * BLOCK, "prefetched_bytes": 400 * BLOCK}
    read = file_of(**half, already_resident_bytes=600 * BLOCK)
    assert totals_of([read], [300])["coverage"] == 400 / (400 + 600)
    assert totals_of([read], [100])["coverage"] == 400 / (400 + 200)
    assert totals_of([read], [0])["coverage"] == 1


def test_what_comes_back_from_the_disk_below_the_pool_was_kept_ahead() -> None:
    """Of 192 MiB, three times gone over by a pool of 64 MiB with `--spill`, 80 MiB were told."""
    read = {"prefetched_used_blocks_bytes": 100 * BLOCK, "prefetched_bytes": 100 * BLOCK}
    back = file_of(**read, already_resident_bytes=140 * BLOCK)
    assert totals_of([back], [0], pool_misses=0)["coverage"] == 1


def test_a_touch_that_waits_for_what_is_being_read_ahead_is_a_miss_and_not_kept_ahead() -> None:
    """Of a file of 192 MiB 191 of 196 MiB were told."""
    read = file_of(prefetched_used_blocks_bytes=99 * BLOCK, prefetched_bytes=99 * BLOCK)
    late = totals_of([{**read, "demand_used_blocks_bytes": BLOCK}], [0], pool_misses=160)
    assert late["coverage_denominator_bytes"] == 100 * BLOCK
    assert late["coverage"] == 0.9, "160 pages are ten blocks"
    assert totals_of([read], [0], pool_misses=10**6)["coverage"] == 0


def test_what_is_read_anew_in_each_epoch_covers_no_miss_of_another_file() -> None:
    read = {"prefetched_used_blocks_bytes": 100 * BLOCK, "demand_used_blocks_bytes": 50 * BLOCK}
    once = totals_of([file_of(**read, prefetched_bytes=100 * BLOCK)], [30])["coverage"]
    anew = totals_of([file_of(**read, prefetched_bytes=300 * BLOCK)], [30])["coverage"]
    assert once == anew == 100 / (100 + 50)


def test_faults_of_programs_are_no_misses_of_who_reads_a_page_of_each_block() -> None:
    pages = file_of(prefetched_used_blocks_bytes=1000 * BLOCK, prefetched_bytes=1000 * PAGE)
    assert totals_of([pages], [200])["coverage"] > 0.98


def test_the_agents_own_reads_are_none_of_the_job_s() -> None:
    pool = {"stand_in_bytes": 17 * BLOCK}
    assert summary._read_by_calls([18 * BLOCK, 2 * BLOCK], pool, None) == 3 * BLOCK
    assert summary._read_by_calls([18 * BLOCK], None, None) == 18 * BLOCK
    assert summary._read_by_calls([18 * BLOCK, None], pool, None) is None


def test_what_was_followed_is_not_unserved() -> None:
    followed = {"read_bytes": 5 * BLOCK}
    assert summary._read_by_calls([18 * BLOCK], None, followed) == 13 * BLOCK
    assert summary._read_by_calls([3 * BLOCK], None, followed) == 0, "rchar is told later"


def test_a_file_that_is_followed_is_not_named_as_unserved() -> None:
    files = [{**file_of(), "path": "/a", "served_by": "reads"}, {**file_of(), "path": "/b"}]
    found = totals_of(files, [], read={"/a": MIB, "/b": MIB, "/c": MIB})
    assert [file["path"] for file in found["unserved_read_files"]] == ["/b", "/c"]


def test_no_fault_counts_what_calls_have_waited_for() -> None:
    """A process that faults nowhere was covered as a whole."""
    brought = {"prefetched_bytes": 10 * BLOCK, "prefetched_used_blocks_bytes": 10 * BLOCK}
    by_calls = {**file_of(**brought, demand_used_blocks_bytes=10 * BLOCK), "served_by": "reads"}
    assert totals_of([by_calls], [0])["coverage"] == 0.5


def test_what_fuse_has_read_for_read_calls_is_not_known() -> None:
    """It counts into nobody's read_bytes; it was 0 of 192 MiB."""
    mountinfo = (
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 21 0:44 / /mnt/a\\040b rw - fuse.slowfs slowfs rw\n"
    )
    assert type_at("/mnt/a b/file", mountinfo) == type_at("/mnt/a b", mountinfo) == "fuse.slowfs"
    assert type_at("/mnt/a bc", mountinfo) == type_at("/", mountinfo) == "ext4"
    of_fuse, of_ext4 = ({**file_of(), "file_system": kind} for kind in ("fuse.slowfs", "ext4"))
    found = totals_of([of_fuse, of_ext4], [])
    assert found["storage_read_bytes"] is None and "fuse.slowfs" in found["storage_read_reason"]
    assert totals_of([of_ext4], [])["storage_read_bytes"] is not None


def test_nor_what_it_has_read_of_small_files() -> None:
    """It was 80 KiB of 27 MiB."""
    small = {"read_bytes": 0, "small_files": {"uncounted": ["FUSE"]}}
    found = totals_of([], [], small)
    assert found["storage_read_bytes"] is None
    assert found["storage_read_reason"] == "FUSE does not count into /proc/PID/io read_bytes"
    counted = totals_of([], [], {"read_bytes": 0, "small_files": {"uncounted": []}})
    assert counted["storage_read_bytes"] is not None


def test_that_a_thread_is_woken_is_a_part_of_its_wait_for_the_pool() -> None:
    """Of random records in the pool 0.1 s too much was told."""
    waits = SimpleNamespace(sum=5_000_000)
    assert summary._pool_waits_ns({"demand_wait_ns": waits, "missing_faults": 30}) == 8_000_000
    nobody = SimpleNamespace(sum=None)
    assert summary._pool_waits_ns({"demand_wait_ns": nobody, "missing_faults": 0}) == 0
