# SPDX-License-Identifier: Apache-2.0
"""Advice: each finding on a trace that has the trouble, and on one that has it not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import warnings_fail
from traces import MS, PAGE_BYTES, START_NS, Evict, Machine, Read, Sleep, Step, extents, records

from uffdprefetch.base.options import OPTIONS
from uffdprefetch.trace.analyse.advice import percent, ranks_text
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.file.events import Call, Kind

pytestmark = warnings_fail

MIB = 1 << 20
RECORDS = 600
WHERE = extents([24] * RECORDS)
PAGES = WHERE[-1][1]


def advice(machine: Machine) -> list[dict[str, Any]]:
    return analyse(machine.trace(), lambda *_: None)["findings"]


def titled(found: Iterable[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    return [finding for finding in found if words in finding["title"]]


def one(machine: Machine, words: str) -> dict[str, Any]:
    found = titled(advice(machine), words)
    assert len(found) == 1, [finding["title"] for finding in advice(machine)]
    return found[0]


def part(rank: int, ranks: int) -> list[tuple[int, int]]:
    return WHERE[rank * RECORDS // ranks : (rank + 1) * RECORDS // ranks]


def contiguous(ranks: int = 4, **how: Any) -> Machine:
    machine = Machine(PAGES, **how)
    machine.run((machine.reader(r), records(part(r, ranks), 8, 3 * MS)) for r in range(ranks))
    return machine


def skipping(ranks: int, n: int, **how: Any) -> Machine:
    machine = Machine(PAGES, **how)
    machine.run((machine.reader(r), records(WHERE[r::n])) for r in range(ranks))
    return machine


# ---- nothing to say -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("cached", [False, True])
def test_a_healthy_run_has_no_findings(cached: bool, ranks: int) -> None:
    # large readahead on fast storage: 0.2 waits of 0.2 ms per MiB
    assert advice(contiguous(ranks, cached=cached, readahead=2048, latency_ns=200_000)) == []


def test_ranks_that_skip_over_cached_pages_lose_nothing() -> None:
    assert advice(skipping(4, 4, cached=True)) == []


def test_a_shuffle_over_cached_pages_loses_nothing() -> None:
    machine = Machine(PAGES, cached=True)
    shuffled = np.random.default_rng(0).permutation(RECORDS)
    machine.run((machine.reader(r), records([WHERE[i] for i in shuffled[r::4]])) for r in range(4))
    assert advice(machine) == []


# ---- what it costs comes first ------------------------------------------------------------------


def test_the_most_costly_comes_first_and_each_has_its_number_and_remedy() -> None:
    machine = skipping(2, 16)
    machine.lost = 5
    found = advice(machine)
    costs = [finding["cost"] or 0.0 for finding in found]
    assert costs == sorted(costs, reverse=True)
    assert len(found) >= 2
    for finding in found:
        assert set(finding) == {
            "severity", "cost", "cost_text", "title", "detail", "remedy", "source", "rank", "file",
        }  # fmt: skip
        assert finding["severity"] in ("high", "medium", "low")
        assert finding["remedy"] and finding["source"]
        assert any(c.isdigit() for c in finding["title"] + finding["detail"])
        assert "\n" not in finding["title"] and len(finding["title"]) <= 120


def test_remedies_name_no_option_that_does_not_exist() -> None:
    known = {f"--{option.key}" for option in OPTIONS} | {"--ownlock", "--include", "--max-events"}
    machine = skipping(2, 16)
    lock = machine.add_file("/data/train.lmdb/lock.mdb", 2)
    for reader in list(machine.readers):
        machine.event(reader, Kind.MAP, 0, 8192, 1 << 40, file=lock)
    for finding in advice(machine):
        words = finding["remedy"].replace("`", " ").split()
        assert {w for w in words if w.startswith("--") and w != "--"} <= known


def total_stall(machine: Machine) -> float:
    return sum(r.stall_ns for r in machine.readers) / 1e9


@pytest.mark.parametrize("latency_ns", [MS, 20 * MS])
def test_no_second_of_stall_is_told_twice(latency_ns: int) -> None:
    """Ranks that skip, one that waits longest, pages that are read again, a late service."""
    machine = Machine(PAGES, latency_ns=latency_ns)
    shuffled = [WHERE[i] for i in np.random.default_rng(0).permutation(RECORDS)]
    steps = [records(WHERE[0::16]), records(shuffled), [*records(WHERE), Evict(), *records(WHERE)]]
    readers = [machine.reader(rank) for rank in range(len(steps))]
    for start in range(0, PAGES - 512, 512):
        machine.event(readers[0], Kind.WARM, start * PAGE_BYTES, 512 * PAGE_BYTES, 10**11)
    machine.run(zip(readers, steps, strict=True))
    found = advice(machine)
    costs = [finding["cost"] for finding in found if finding["cost"] is not None]
    assert len(costs) >= 4 and costs == sorted(costs, reverse=True)
    assert sum(costs) <= total_stall(machine) * (1 + 1e-9)
    shared = [finding["cost_text"] for finding in found if "other findings" in finding["cost_text"]]
    assert shared


# ---- files of one kind --------------------------------------------------------------------------


def sharded(walk: Callable[[int], Iterable[Step]], files: int = 16, **how: Any) -> Machine:
    """A rank that reads shard after shard."""
    machine = Machine(1024, path="/data/shard-00.bin", **how)
    numbers = [1, *(machine.add_file(f"/data/shard-{i:02}.bin", 1024) for i in range(1, files))]
    start_ns = 10 * MS
    for i, number in enumerate(numbers):
        machine.files[number].read_ahead_bytes = machine.readahead * PAGE_BYTES
        rank = machine.reader(0, file=number, start_ns=start_ns)
        machine.run([(rank, walk(i))])
        start_ns = rank.now_ns - START_NS + MS
    return machine


def shuffled_pages(seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(1024)[::2].tolist()


@pytest.mark.parametrize(
    ("walk", "how", "words"),
    [
        (lambda i: range(1024), {"marks": False}, "waits per MiB"),
        (lambda i: records(extents([24] * 42)[i % 4 :: 4]), {}, "skips"),
        (shuffled_pages, {"readahead": 1}, "in random order"),
    ],
)
def test_what_ails_many_files_of_one_kind_is_one_finding(
    walk: Callable[[int], Iterable[Step]], how: dict[str, Any], words: str
) -> None:
    machine = sharded(walk, **how)
    found = one(machine, words)
    assert "16 files like shard-00.bin" in found["title"] and found["file"] is None
    assert len(advice(machine)) == 1
    # files of another kind are told for themselves
    for number in range(9, 17):
        machine.files[number].path = f"/data/test-{number:02}.bin"
    titles = [finding["title"] for finding in titled(advice(machine), words)]
    assert sorted("8 files like test-09.bin" in title for title in titles) == [False, True]
    assert sorted("8 files like shard-00.bin" in title for title in titles) == [False, True]


# ---- skipping -----------------------------------------------------------------------------------


def test_skipping_names_the_records_left_out_and_what_is_read_for_nothing() -> None:
    machine = skipping(4, 16)
    finding = one(machine, "skip 15 of 16 records")
    file = analyse(machine.trace(), lambda *_: None)["files"][0]
    assert (
        f"ranks 0-3 skip 15 of 16 records of train.bin: {percent(file['useless_share'])}"
        in (finding["title"])
    )
    assert "contiguous" in finding["remedy"] and "Stanovnik" in finding["source"]
    assert finding["rank"] is None and finding["file"] == 1
    assert finding["severity"] in ("medium", "high")


def test_skipping_of_one_rank_is_that_ranks() -> None:
    machine = Machine(PAGES)
    machine.run(
        [(machine.reader(0), records(WHERE[:300:16])), (machine.reader(1), records(WHERE[300:]))]
    )
    assert one(machine, "rank 0 skips 93 % of the way")["rank"] == 0
    # the cause comes first; that rank 0 waits longer than the other is the same stall
    found = advice(machine)
    assert found[0]["title"].startswith("rank 0 skips")
    assert titled(found, "rank 0 stalls")[0]["cost"] <= found[0]["cost"]


def test_skipping_what_others_read_is_told_only_where_it_stalls() -> None:
    finding = one(skipping(4, 4), "skip 3 of 4 records")
    assert "read for another" in finding["detail"]
    assert not titled(advice(skipping(4, 4, latency_ns=1000)), "skip")


# ---- the kernel's readahead ---------------------------------------------------------------------


def test_little_readahead_on_slow_storage_is_counted_in_waits_per_mib() -> None:
    slow = contiguous(2, latency_ns=3 * MS, readahead=32, marks=False)
    finding = one(slow, "waits per MiB")
    assert "128 KiB at a time" in finding["title"]
    assert "uffdprefetch wrap" in finding["remedy"]


def test_large_readahead_is_no_finding() -> None:
    fine = contiguous(2, latency_ns=3 * MS, readahead=2048, marks=False)
    assert not titled(advice(fine), "waits per MiB")


def test_readahead_false_costs_its_faults() -> None:
    machine = Machine(PAGES, path="/data/train.lmdb/data.mdb")
    machine.run([(machine.reader(0, random_advice=True), records(WHERE))])
    finding = one(machine, "readahead=False costs")
    assert f"costs {PAGES} major faults" in finding["title"]
    assert "train.lmdb" in finding["title"]


def test_so_does_it_of_several_processes_and_backward() -> None:
    two = Machine(2 * PAGES)
    readers = [two.reader(0, pid=pid, random_advice=True) for pid in (1000, 1001)]
    two.run([(readers[0], range(PAGES)), (readers[1], range(PAGES, 2 * PAGES))])
    assert f"costs {2 * PAGES} major faults" in one(two, "MADV_RANDOM")["title"]
    back = Machine(PAGES)
    back.run([(back.reader(0, random_advice=True), range(PAGES - 1, -1, -1))])
    assert f"costs {PAGES} major faults" in one(back, "MADV_RANDOM")["title"]


def test_single_pages_that_are_wanted_are_no_finding() -> None:
    machine = Machine(40_000)
    machine.run([(machine.reader(0, random_advice=True), range(0, 40_000, 100))])
    assert not titled(advice(machine), "costs")


def test_a_page_here_and_there_that_had_to_be_read_again_is_no_advice_of_the_job_s() -> None:
    """The pages between were in memory: their readers went on in a row."""
    machine = Machine(40_000, cached=True)
    machine.cache[1] -= set(range(0, 40_000, 100))
    machine.readahead = 1
    machine.run([(machine.reader(0), range(40_000))])
    assert not titled(advice(machine), "costs")


# ---- order, memory ------------------------------------------------------------------------------


def test_a_shuffle_that_stalls_is_told() -> None:
    machine = Machine(PAGES)
    shuffled = np.random.default_rng(0).permutation(RECORDS)
    machine.run((machine.reader(r), records([WHERE[i] for i in shuffled[r::2]])) for r in range(2))
    finding = one(machine, "ranks 0-1 read train.bin in random order")
    assert finding["cost"] == pytest.approx(sum(r.stall_ns for r in machine.readers) / 1e9)


def test_evict_and_read_again_is_told_with_its_bytes() -> None:
    machine = Machine(PAGES)
    machine.run([(machine.reader(0), [*records(WHERE), Evict(), *records(WHERE)])])
    finding = one(machine, "more than once")
    assert f"{PAGES * PAGE_BYTES / MIB:.1f} MiB" in finding["title"]
    assert not titled(advice(contiguous(1)), "more than once")


# ---- read(2) ------------------------------------------------------------------------------------


def read_calls(machine: Machine, seconds: float) -> None:
    """All of a file by read(2), from storage, which takes this long."""
    rank, took_ns = machine.readers[0], int(seconds * 1e9 / 128)
    for page in range(0, 8192, 64):
        rank.now_ns += took_ns
        machine.run([(rank, [Read(page, 64)])])
        machine.event(rank, Kind.CALL, 0, 64 * PAGE_BYTES, took_ns, Call.READ | 5 << 8)
    rank.now_ns += MS


def test_what_a_job_waits_in_read_calls_is_its_finding() -> None:
    machine = Machine(8192)
    machine.reader(0)
    read_calls(machine, 2.23)
    found = advice(machine)[0]
    assert "read by read(2)" in found["title"] and found["severity"] == "high"
    assert found["cost"] == pytest.approx(2.23, rel=0.01) and "in read(2)" in found["cost_text"]


def test_read_calls_that_found_all_in_memory_cost_no_wait() -> None:
    machine = Machine(8192, cached=True)
    machine.reader(0)
    read_calls(machine, 2.23)
    found = one(machine, "read by read(2)")
    assert found["cost"] is None and found["severity"] == "low"


@pytest.mark.parametrize("wrapped", [False, True])
def test_read_calls_are_not_served_by_wrap(wrapped: bool) -> None:
    machine = Machine(8192)
    rank = machine.reader(0)
    machine.run([(rank, [Read(page, 64) for page in range(0, 8192, 64)])])
    if wrapped:
        machine.event(rank, Kind.TOUCH, 0)
    finding = one(machine, "read by read(2): 32 MiB")
    assert finding["severity"] == ("medium" if wrapped else "low")


@pytest.mark.parametrize("part", [1, 4])
def test_to_who_reads_at_random_by_calls_wrap_is_not_recommended(part: int) -> None:
    """Their next call is nobody's to know: it is no quicker (docs/reads.md)."""
    machine = Machine(16_384)
    pages = np.random.default_rng(0).permutation(np.arange(0, 16_384, 16))[: 1024 // part]
    machine.run([(machine.reader(0), [Read(int(page), 16) for page in pages])])
    found = one(machine, "read by read(2)")
    assert "wrap" not in found["remedy"] and "sort what is read" in found["remedy"]
    assert ("read it once before" in found["remedy"]) == (part == 1)


def test_to_who_leaves_gaps_by_calls_neither_but_to_who_takes_long_pieces() -> None:
    for step, follows in ((64, False), (2048, True)):
        machine = Machine(65_536)
        pieces = [Read(page, step // 2) for page in range(0, 65_536, step)]
        machine.run([(machine.reader(0), pieces)])
        assert ("wrap" in one(machine, "read by read(2)")["remedy"]) == follows


def test_what_is_in_memory_already_needs_no_remedy() -> None:
    machine = Machine(8192, cached=True)
    machine.run([(machine.reader(0), [Read(page, 64) for page in range(0, 8192, 64)])])
    assert "wrap" not in one(machine, "read by read(2)")["remedy"]


def test_of_what_the_service_has_read_nothing_else_is_recommended() -> None:
    """It was "high: read by read(2)", with another format as remedy."""
    machine = Machine(8192)
    machine.reader(0)
    bed = machine.reader(0, pid=77)
    machine.readers.remove(bed)
    for page in range(0, 8192, 256):
        machine.event(bed, Kind.WARM, page * PAGE_BYTES, 256 * PAGE_BYTES, value=3000 * MS)
        machine._fill(bed, page, page + 256)
    read_calls(machine, 2.23)
    machine.meta["wrapped"] = True
    assert not titled(advice(machine), "read by read(2)")
    late = one(machine, "extents were being read when a rank needed them")
    assert late["cost"] == pytest.approx(2.23, rel=0.01) and "in read(2)" in late["cost_text"]


def test_to_a_wrapped_run_wrap_is_not_recommended() -> None:
    """Of one that was served by small files alone, or not at all, no event of the service tells."""
    slow = contiguous(1, latency_ns=3 * MS, readahead=32, marks=False)
    assert advises_wrap(slow, "waits per MiB")
    slow.meta["wrapped"] = True
    assert not titled(advice(slow), "waits per MiB")
    calls = Machine(8192)
    calls.reader(0)
    read_calls(calls, 2.23)
    assert "`uffdprefetch wrap`" in one(calls, "read by read(2)")["remedy"]
    calls.meta["wrapped"] = True
    assert "the run's summary" in one(calls, "read by read(2)")["remedy"]


def test_a_service_that_only_watches_is_no_wrap() -> None:
    """`trace` without eBPF has one."""
    slow = contiguous(1, latency_ns=3 * MS, readahead=32, marks=False)
    slow.event(slow.readers[0], Kind.TOUCH, 0)
    slow.meta["wrapped"] = False
    assert advises_wrap(slow, "waits per MiB")


def test_a_few_read_calls_are_no_finding() -> None:
    machine = Machine(8192, cached=True)
    machine.run([(machine.reader(0), [Read(0, 256), *range(8192)])])
    assert advice(machine) == []


# ---- where wrap would harm, or do nothing --------------------------------------------------------


def advises_wrap(machine: Machine, words: str) -> bool:
    return "under `uffdprefetch wrap" in one(machine, words)["remedy"]


def in_random_order(part: int) -> Machine:
    """One of ``part`` records, in random order."""
    machine = Machine(PAGES)
    shuffled = np.random.default_rng(0).permutation(RECORDS)[::part]
    machine.run([(machine.reader(0), records([WHERE[i] for i in shuffled]))])
    return machine


def test_wrap_is_no_remedy_for_a_part_of_a_file_in_random_order() -> None:
    assert advises_wrap(in_random_order(1), "in random order")
    part = one(in_random_order(8), "in random order")
    assert "under `uffdprefetch wrap" not in part["remedy"] and "cat " not in part["remedy"]
    assert "read for nothing" in part["detail"]


def test_wrap_is_no_remedy_for_single_pages_far_apart() -> None:
    machine = Machine(40_000)
    machine.run([(machine.reader(r), range(r * 50, 40_000, 100)) for r in range(2)])
    assert "wrap" not in one(machine, "skip")["remedy"]
    assert advises_wrap_to_ranks_that_skip(skipping(4, 4))


def advises_wrap_to_ranks_that_skip(machine: Machine) -> bool:
    return advises_wrap(machine, "skip 3 of 4 records")


def test_wrap_is_no_remedy_where_the_job_waits_in_read_calls() -> None:
    slow = contiguous(1, latency_ns=3 * MS, readahead=32, marks=False)
    assert advises_wrap(slow, "waits per MiB")
    rank, log = slow.readers[0], slow.add_file("/data/log.bin", 8192)
    stall_ns = rank.stall_ns
    slow.event(rank, Kind.CALL, 0, 1 << 20, 2 * stall_ns, Call.READ | 5 << 8, file=log)
    assert not advises_wrap(slow, "waits per MiB")
    assert "read_ahead_kb" in one(slow, "waits per MiB")["remedy"]


# ---- ranks together -----------------------------------------------------------------------------


def batches(rank: int, ranks: int) -> Iterator[Step]:
    mine = part(rank, ranks)
    for i in range(0, len(mine), 16):
        yield from records(mine[i : i + 16])
        yield Sleep(20 * MS)


@pytest.mark.parametrize("stripe", [MIB, 12 * MIB, 512 * MIB])
def test_the_stripe_follows_the_batch_and_the_ranks(stripe: int) -> None:
    machine = Machine(PAGES, path="/lustre/set/data.mdb", cached=True)
    machine.files[1].stripe_bytes = stripe
    machine.run((machine.reader(r), batches(r, 4)) for r in range(4))
    # a batch is 16 x 96 KiB = 1.5 MiB, four ranks: 6 MiB
    found = titled(advice(machine), "stripes of")
    if stripe == 12 * MIB:
        assert not titled(advice(machine), "stripes of 6 MiB") and len(found) <= 1
    else:
        assert len(found) == 1
        assert "lfs setstripe -S 6M -c -1 /lustre/set" in found[0]["remedy"]
        assert "lfs migrate -S 6M" in found[0]["remedy"]
        assert "1.5 MiB x 4" in found[0]["title"]


def test_a_stripe_that_fits_and_one_that_is_not_known_are_no_findings() -> None:
    for stripe in (6 * MIB, None):
        machine = Machine(PAGES, cached=True)
        machine.files[1].stripe_bytes = stripe
        machine.run((machine.reader(r), batches(r, 4)) for r in range(4))
        assert advice(machine) == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_lock_file_is_shared_when_several_ranks_have_it(ranks: int) -> None:
    machine = contiguous(4, cached=True)
    lock = machine.add_file("/data/train.lmdb/lock.mdb", 2)
    for reader in machine.readers[:ranks]:
        machine.event(reader, Kind.CALL, 0, 5, 900, Call.OPEN | 5 << 8, file=lock)
    found = titled(advice(machine), "lock.mdb")
    if ranks == 1:
        assert not found
    else:
        assert "shared by 3 ranks" in found[0]["title"]
        assert "--ownlock" in found[0]["remedy"]


def test_a_rank_that_stalls_much_longer_is_named() -> None:
    machine = Machine(PAGES, latency_ns=20 * MS)
    machine.cache[1] = set(range(PAGES // 2, PAGES))
    machine.run((machine.reader(r), records(part(r, 2))) for r in range(2))
    finding = one(machine, "rank 0 stalls")
    assert finding["rank"] == 0
    assert not titled(advice(contiguous(4)), "stalls")


def test_a_rank_that_reads_much_more_is_named() -> None:
    machine = Machine(PAGES, cached=True)
    shares = [WHERE[:60], WHERE[60:120], WHERE[120:]]
    machine.run((machine.reader(r), records(share)) for r, share in enumerate(shares))
    assert one(machine, "rank 2 reads")["rank"] == 2


def test_ranks_that_each_read_everything_are_told() -> None:
    machine = Machine(PAGES, cached=True)
    machine.run((machine.reader(r), records(WHERE)) for r in range(4))
    finding = one(machine, "each of ranks 0-3 reads all of train.bin")
    assert "4.0 times" in finding["detail"]


def test_small_records_that_ranks_share_64_kib_of_are_not_read_by_all() -> None:
    small = extents([3] * 2400)
    for order in (np.arange(2400), np.random.default_rng(0).permutation(2400)):
        machine = Machine(7200, cached=True)
        machine.run((machine.reader(r), records([small[i] for i in order[r::4]])) for r in range(4))
        assert not titled(advice(machine), "reads all")


# ---- our own service ----------------------------------------------------------------------------


def warmed(used: int, took_ns: int) -> Machine:
    """Extents of 2 MiB, one asked for each 500 ms, a reader behind each of them."""
    machine = Machine(PAGES, cached=True)
    rank = machine.reader(0)
    for start in range(0, PAGES - 512, 512):
        machine.event(rank, Kind.WARM, start * PAGE_BYTES, 512 * PAGE_BYTES, took_ns)
        rank.now_ns += MS
        machine.run([(rank, range(start, min(used, start + 512)))])
        rank.now_ns += 500 * MS
    return machine


def test_prefetching_for_nothing_is_told() -> None:
    assert "not used" in one(warmed(PAGES // 4, 1), "prefetched")["title"]
    assert not titled(advice(warmed(PAGES, 1)), "prefetched")


def test_what_lay_in_memory_was_not_prefetched_for_nothing() -> None:
    machine = warmed(PAGES // 4, 1)
    rows = [list(row) for row in machine.rows]
    for row in rows:
        if row[6] == Kind.WARM:
            row[8] = row[2] >> 10  # KiB of it that were cached
    machine.rows = [tuple(row) for row in rows]
    assert not titled(advice(machine), "prefetched")


def test_prefetching_that_comes_late_from_idle_storage_is_told() -> None:
    late = one(warmed(PAGES, 100 * MS), "came late")
    assert "--budget" in late["remedy"]
    assert not titled(advice(warmed(PAGES, 1)), "came late")


def test_no_budget_helps_where_the_storage_gives_what_it_has() -> None:
    found = advice(warmed(PAGES, 510 * MS))
    assert not any("--budget" in finding["remedy"] for finding in found)
    limit = titled(found, "the storage gives less than the ranks take")
    assert len(limit) == 1 and "4.1" in limit[0]["detail"]  # 2 MiB in 0.5 s, MB/s


# ---- the trace itself ---------------------------------------------------------------------------


def test_lost_events_a_torn_file_and_an_early_end_are_told_and_weigh_little() -> None:
    machine = contiguous(1, cached=True)
    machine.lost = 1000
    trace = machine.trace()
    trace.truncated = "the last block, at byte 77, is not whole"
    assert trace.end is not None
    trace.end["raw_until_ns"] = int(trace.events["time_ns"][-1])
    found = analyse(trace, lambda *_: None)["findings"]
    assert [finding["severity"] for finding in found] == ["low"] * 3
    assert titled(found, "1000 events were lost")
    assert "byte 77" in titled(found, "does not reach")[0]["detail"]
    assert titled(found, "single events end")


# ---- words --------------------------------------------------------------------------------------


def test_ranks_and_percents_read_well() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2]) == "ranks 0-2"
    assert ranks_text([0, 2, 5]) == "ranks 0, 2, 5"
    assert ranks_text(range(0, 40, 2)).endswith("...")
    assert percent(0.9975) == "99 %"
    assert percent(1.0) == "100 %"
    assert percent(0.931) == "93 %"
    assert percent(0.004) == "0.4 %"
