# SPDX-License-Identifier: Apache-2.0
"""The report against a known truth: a model of the kernel (traces.py) says what really happened."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import warnings_fail
from traces import (
    MS,
    PAGE_BYTES,
    START_NS,
    Evict,
    Machine,
    Read,
    Reader,
    Sleep,
    Step,
    Unmap,
    Write,
    check_counts,
    extents,
    order,
    readers_of,
    records,
    report_of,
)

from uffdprefetch.trace.analyse import accesses as sensors
from uffdprefetch.trace.analyse import reader_report
from uffdprefetch.trace.analyse.stall import Stalls
from uffdprefetch.trace.file.events import NO_PAGE, Kind

pytestmark = warnings_fail

MIB = 1 << 20
VARYING = np.random.default_rng(3).integers(3, 49, 600).tolist()
SIZES = {"96 KiB": [24] * 320, "100 KiB": [25] * 320, "12-192 KiB": VARYING}


# ---- patterns, at 1 and 4 ranks -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("cache", ["cold", "cold, MADV_RANDOM", "warm"])
@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize(
    "pattern", ["consecutive", "stride 2", "stride 3", "stride 16", "random", "backward"]
)
def test_the_pattern_is_what_the_reader_did(
    pattern: str, sizes: str, cache: str, ranks: int
) -> None:
    where = extents(SIZES[sizes])
    machine = Machine(where[-1][1], cached=cache == "warm")
    machine.run(
        (
            machine.reader(rank, random_advice="RANDOM" in cache),
            records([where[i] for i in order(pattern, len(where), rank, ranks)]),
        )
        for rank in range(ranks)
    )
    report = report_of(machine)
    check_counts(machine, report)
    readers = readers_of(report)
    assert [reader["rank"] for reader in readers] == list(range(ranks))
    for reader in readers:
        found = reader["pattern"]
        assert len(reader["epochs"]) == 1
        assert reader["epochs"][0]["pattern"] == found["name"]
        if not pattern.startswith("stride"):
            assert found["name"] == pattern
            if pattern != "random":
                assert found["skipped_share"] < 0.02
            continue
        n = int(pattern.split()[1])
        few = sizes == "12-192 KiB" and n == 16  # 38 steps of varying size
        assert found["name"] in ("strided", "sequential") if few else found["name"] == "strided"
        # without an index, and where 64 KiB hide a record's end, it may not be told; never wrongly
        assert found["stride_records"] in (None, n)
        assert found["skipped_share"] == pytest.approx(1 - 1 / n, abs=0.1)
        if sizes != "12-192 KiB":
            assert found["stride_bytes"] == n * SIZES[sizes][0] * PAGE_BYTES
        if "RANDOM" in cache and ranks == 1:  # and nobody else's pages are mapped along
            assert reader["touched_pages"] == reader["touched_pages_least"]
        if "RANDOM" in cache and not few:
            assert found["stride_records"] == n  # each page faults: nothing is hidden
        if ranks > n or (sizes == "100 KiB" and n < 16):
            assert found["stride_records"] == n


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("cached", [False, True])
def test_twenty_three_faults_are_twenty_three(cached: bool, ranks: int) -> None:
    machine = Machine(ranks * 5000, cached=cached)
    machine.run(
        (machine.reader(rank), [rank * 5000 + i * 200 for i in range(23)]) for rank in range(ranks)
    )
    report = report_of(machine)
    check_counts(machine, report)
    for reader in readers_of(report):
        assert reader["faults"]["total"] == 23
        assert reader["touched_pages_least"] == 23
        assert reader["hit"] == {
            "share": 1.0 if cached else 0.0, "of": 23,
            "sensor": "faults that found their page in the cache, and nobody reading it",
        }  # fmt: skip


def test_who_waits_for_a_page_that_is_being_read_has_no_hit() -> None:
    """A reader of 3076 faults that waited for 1412 requests of the kernel's had 99.9 %."""
    reader: Any = SimpleNamespace(accesses=SimpleNamespace(sensor=np.full(10, sensors.BPF)))
    waits = Stalls(*(np.arange(4, dtype=np.int64) for _ in range(3)))
    assert reader_report._hit(reader, waits, "", 1)["share"] == 0.6
    assert reader_report._hit(reader, waits, "", 7)["share"] == 0.3


def test_records_smaller_than_a_window_are_said_to_be_below_the_resolution() -> None:
    machine = Machine(6144, cached=True)
    machine.run([(machine.reader(0), records(extents([3] * 2048)[::4]))])
    report = report_of(machine)
    check_counts(machine, report)
    (reader,) = readers_of(report)
    assert reader["pattern"]["stride_bytes"] in (None, 4 * 3 * PAGE_BYTES)
    assert reader["pattern"]["stride_records"] in (None, 4)
    assert "up to 64 KiB" in reader["pattern"]["sensor"]
    assert "64 KiB" in report["files"][0]["touched_sensor"]


def test_a_mapping_off_a_64_kib_boundary_changes_nothing() -> None:
    where = extents([24] * 300)
    machine = Machine(where[-1][1])
    machine.run([(machine.reader(0, shift=5), records(where[::3]))])
    report = report_of(machine)
    check_counts(machine, report)
    assert readers_of(report)[0]["pattern"]["stride_bytes"] == 3 * 24 * PAGE_BYTES


def test_a_page_is_found_by_its_address_where_the_range_does_not_tell() -> None:
    machine = Machine(4000, cached=True)
    machine.run([(machine.reader(0), [i * 100 + 7 for i in range(40)])])
    for row, event in enumerate(machine.rows):
        if event[6] == Kind.AROUND:
            machine.rows[row] = (*event[:8], NO_PAGE)
    (reader,) = readers_of(report_of(machine))
    assert reader["pattern"]["stride_bytes"] == 100 * PAGE_BYTES
    assert reader["first_offset_bytes"] == 7 * PAGE_BYTES
    # neither an address nor its place: the range is all that is known, and that is said
    machine.rows = [
        (*e[:3], 0, *e[4:]) if e[6] in (Kind.AROUND, Kind.MAP) else e for e in machine.rows
    ]
    (reader,) = readers_of(report_of(machine))
    assert "of some faults the page is not known" in reader["pattern"]["sensor"]


# ---- epochs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["consecutive", "stride 2", "random"])
@pytest.mark.parametrize("between", ["unmapped", "evicted"])
def test_two_epochs_and_what_is_read_again_are_counted(between: str, pattern: str) -> None:
    where = extents([24] * 200)
    machine = Machine(where[-1][1])
    which = [where[i] for i in order(pattern, 200, 0, 1)]

    def walk() -> Iterator[Step]:
        yield from records(which)
        yield Unmap() if between == "unmapped" else Evict()
        yield Sleep(20 * MS)
        yield from records(which)

    reader = machine.reader(0)
    machine.run([(reader, walk())])
    report = report_of(machine)
    check_counts(machine, report)
    (found,) = readers_of(report)
    first, second = found["epochs"]
    assert first["reread_pages"] == 0
    assert second["reread_pages"] == pytest.approx(second["touched_pages"], rel=0.01)
    assert second["touched_pages"] >= len(reader.touched)
    assert first["end_seconds"] <= second["start_seconds"]
    assert first["pattern"] == second["pattern"] == found["pattern"]["name"]
    file = report["files"][0]
    assert (file["evicted_bytes"] > 0) == (between == "evicted")
    assert (file["refilled_bytes"] > 0) == (between == "evicted")


def test_a_second_epoch_over_mapped_pages_is_not_invented_and_the_report_says_so() -> None:
    where = extents([24] * 200)
    machine = Machine(where[-1][1])
    machine.run([(machine.reader(0), [*records(where), Sleep(10 * MS), *records(where)])])
    (reader,) = readers_of(report_of(machine))
    assert len(reader["epochs"]) == 1
    assert "still mapped" in reader["epochs_sensor"]
    assert "still mapped" in reader["faults_sensor"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_that_are_new_in_each_epoch_are_epochs(shuffle: bool) -> None:
    where = extents([24] * 240)
    machine = Machine(where[-1][1])
    start = 10 * MS
    for epoch in range(3):
        rng = np.random.default_rng(epoch)
        at = rng.permutation(240) if shuffle else np.arange(240)
        workers = [
            machine.reader(0, pid=2000 + 10 * epoch + w, shift=3 * w, start_ns=start)
            for w in range(4)
        ]
        machine.run(
            (worker, records([where[i] for b in range(w, 24, 4) for i in at[b * 10 : b * 10 + 10]]))
            for w, worker in enumerate(workers)
        )
        start = max(w.now_ns for w in workers) - START_NS + 5 * MS
    report = report_of(machine)
    check_counts(machine, report)
    (reader,) = readers_of(report)
    assert len(reader["epochs"]) == 3
    assert [e["touched_pages"] for e in reader["epochs"]] == [where[-1][1]] * 3
    assert reader["pattern"]["name"] == ("random" if shuffle else "strided")
    assert reader["pattern"]["skipped_share"] == 0.0  # together they leave nothing out


# ---- several threads and processes --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_four_workers_in_order_are_not_random_together(kind: str) -> None:
    where = extents([24] * 240)
    machine = Machine(where[-1][1])
    workers = [
        machine.reader(0, pid=1000 if kind == "threads" else 1000 + w, tid=1000 + w)
        for w in range(4)
    ]
    machine.run((w, records(where[60 * i : 60 * i + 60])) for i, w in enumerate(workers))
    report = report_of(machine)
    check_counts(machine, report)
    (reader,) = readers_of(report)
    assert reader["pattern"]["name"] == "consecutive"
    assert reader["pattern"]["skipped_share"] == 0.0
    assert reader["pids"] == sorted({w.pid for w in workers})


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("last_first", [False, True])
def test_workers_that_take_turns_make_no_stride_of_their_places(
    kind: str, last_first: bool
) -> None:
    """Each goes on by 64 KiB in its part of the file, the one after the other: from fault to fault
    it goes up, or down, by a part."""
    machine, count, part = Machine(4096, cached=True), 8, 512
    workers = [
        machine.reader(0, pid=1000 if kind == "threads" else 1000 + w, tid=1000 + w)
        for w in range(count)
    ]
    for i, worker in enumerate(workers):
        worker.now_ns += 10_000 * (count - i if last_first else i)

    def walk(i: int) -> Iterator[Step]:
        for page in range(i * part, (i + 1) * part, 16):
            yield from range(page, page + 16)
            yield Sleep(MS)

    machine.run((worker, walk(i)) for i, worker in enumerate(workers))
    (reader,) = readers_of(report_of(machine))
    assert (reader["pattern"]["name"], reader["pattern"]["direction"]) == ("consecutive", 1)


@pytest.mark.parametrize("kind", ["one thread", "threads", "processes"])
def test_long_pieces_that_are_read_forwards_are_not_backward_whichever_comes_first(
    kind: str,
) -> None:
    """A queue of pieces of 4 MiB, from which the last one is taken first."""
    machine, piece = Machine(16384), 1024
    workers = [
        machine.reader(0, pid=1000 + w if kind == "processes" else 1000, tid=1000 + w)
        for w in range(1 if kind == "one thread" else 4)
    ]
    left = list(range(0, 16384, piece))

    def walk() -> Iterator[Step]:
        while left:
            start = left.pop()
            yield from range(start, start + piece)

    machine.run((worker, walk()) for worker in workers)
    (reader,) = readers_of(report_of(machine))
    assert (reader["pattern"]["name"], reader["pattern"]["direction"]) == ("consecutive", 1)
    assert reader["pattern"]["share"] > 0.9


def test_a_change_of_phase_is_mixed() -> None:
    where = extents([24] * 300)
    machine = Machine(where[-1][1])
    later = [where[i] for i in 150 + np.random.default_rng(1).permutation(150)]
    machine.run([(machine.reader(0), records([*where[:150], *later]))])
    report = report_of(machine)
    check_counts(machine, report)
    assert readers_of(report)[0]["pattern"]["name"] == "mixed"


# ---- read(2) ------------------------------------------------------------------------------------


def test_read_calls_are_accesses_too_and_exact() -> None:
    machine = Machine(7200)
    machine.run([(machine.reader(0), [Read(a, b - a) for a, b in extents([24] * 300)[::3]])])
    report = report_of(machine)
    (reader,) = readers_of(report)
    assert reader["pattern"]["name"] == "strided"
    assert reader["pattern"]["stride_records"] == 3
    assert reader["read_call_bytes"] == 100 * 24 * PAGE_BYTES
    assert reader["touched_pages"] == reader["touched_pages_least"] == 2400
    assert reader["faults"]["total"] == 0
    assert reader["hit"]["share"] is None
    assert report["files"][0]["fill_by"]["ranks"] == 2400 * PAGE_BYTES


# ---- iterations, phases, calls ------------------------------------------------------------------


def training(machine: Machine, file: int, batches: int, rank: int = 0) -> Iterator[Step]:
    where = extents([24] * batches * 16)
    for b in range(batches):
        yield from records(where[b * 16 : b * 16 + 16])
        yield Sleep(20 * MS)
        yield Write()


def test_iterations_have_their_period_and_their_stall() -> None:
    machine = Machine(24 * 16 * 30)
    reader = machine.reader(0)
    machine.run([(reader, training(machine, 1, 30))])
    (found,) = readers_of(report_of(machine))
    beat = found["iterations"]
    assert beat["count"] == 30
    assert 0.02 < beat["period_seconds"] < 0.03
    assert len(beat["seconds"]) == len(beat["start_seconds"]) == len(beat["stall_seconds"]) == 30
    assert sum(beat["stall_seconds"]) == pytest.approx(reader.stall_ns / 1e9)
    assert found["batch_bytes"] == pytest.approx(16 * 24 * PAGE_BYTES, rel=0.1)


def test_without_a_beat_there_are_no_iterations() -> None:
    machine = Machine(6000)
    machine.run([(machine.reader(0), range(6000))])
    (found,) = readers_of(report_of(machine))
    assert found["iterations"] is None
    assert found["batch_bytes"] is None


def test_training_and_testing_are_phases() -> None:
    machine = Machine(24 * 16 * 20, path="/data/train.lmdb/data.mdb")
    test = machine.add_file("/data/val.lmdb/data.mdb", 24 * 16 * 5)
    one, two = machine.reader(0), machine.reader(0, file=test)

    def hop(there: Reader, here: Reader) -> None:
        there.now_ns = here.now_ns + MS

    machine.run([(one, training(machine, 1, 10))])
    hop(two, one)
    machine.run([(two, records(extents([24] * 80), 1, 3 * MS))])
    hop(one, two)
    machine.run([(one, list(training(machine, 1, 20))[10 * (16 * 24 + 2) :])])
    report = report_of(machine)
    names = [p["name"] for p in report["phases"] if p["name"] in ("training", "testing")]
    assert names == ["training", "testing", "training"]
    middle = next(p for p in report["phases"] if p["name"] == "testing")
    assert middle["files"] == [test]
    assert "'val'" in middle["why"] and "0 of 20 write calls" in middle["why"]
    assert report["calls"]["write"] == 20
    assert report["calls"]["open"] == 0
