# SPDX-License-Identifier: Apache-2.0
"""Reports of traces in which sensors, processes or everything is missing; our service's sensors."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import warnings_fail
from traces import MS, PAGE_BYTES, START_NS, Machine, Reader, readers_of, report_of, without_index

from uffdprefetch.trace.analyse.ranks import Ranks
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.analyse.series import bytes_per_second
from uffdprefetch.trace.file.events import EVENT, Kind
from uffdprefetch.trace.file.sensors import Sensor, entry
from uffdprefetch.trace.file.trace_file import Trace, TracedFile, TracedProcess

pytestmark = [warnings_fail, pytest.mark.bpf]

MIB = 1 << 20


# ---- where little is known ----------------------------------------------------------------------


def test_an_empty_trace_has_a_report() -> None:
    report = analyse(Trace(meta={}))
    json.dumps(report, allow_nan=False)
    assert report["schema"] == "uffdprefetch.trace-report/1"
    assert report["files"] == report["readers"] == report["phases"] == []
    assert report["trace"]["truncated"]


def test_strangers_and_unknown_files_make_no_readers() -> None:
    events = np.array(
        [(START_NS + i, i * 65536, 65536, 0, 5, 5, Kind.AROUND, 1 + i % 2, 0) for i in range(50)],
        EVENT,
    )
    trace = Trace({"started_ns": START_NS}, events, {1: TracedFile(1, "/x", MIB)})
    report = analyse(trace, without_index)
    assert report["readers"] == []
    assert [file["id"] for file in report["files"]] == [1]
    assert report["files"][0]["touched_pages"] == 0


def test_offsets_that_no_file_has_are_left_out() -> None:
    machine = Machine(1000, cached=True)
    rank = machine.reader(0)
    machine.run([(rank, range(0, 1000, 16))])
    machine.event(rank, Kind.FAULT, (1 << 64) - 4096)
    (reader,) = readers_of(report_of(machine))
    assert reader["pattern"]["name"] == "consecutive"


def test_missing_sensors_are_null_and_passed_on() -> None:
    machine = Machine(3000)
    machine.run([(machine.reader(0), range(3000))])
    missing = [
        entry([sensor], "no tracepoint")
        for sensor in (Sensor.FILLS, Sensor.EVICTIONS, Sensor.BLOCK, Sensor.CALLS)
    ]
    machine.meta["missing"] = missing
    report = report_of(machine)
    file = report["files"][0]
    assert report["trace"]["missing"] == missing
    for name in ("filled_pages", "fill_bytes", "fill_by", "useless_bytes", "useless_share",
                 "extra_bytes", "evicted_bytes", "refilled_bytes"):  # fmt: skip
        assert file[name] is None
    assert report["calls"] is None and report["block"] is None


def test_block_requests_of_the_job_have_their_latency_and_those_of_others_are_apart() -> None:
    machine = Machine(100)
    rank = machine.reader(0)
    for ns in (1 * MS, 2 * MS, 3 * MS):
        machine.event(rank, Kind.BLOCK, 0, 131072, ns, file=0)
    stranger = replace(rank, pid=77, tid=77)  # of no process that the recording knows
    for _ in range(5):
        machine.event(stranger, Kind.BLOCK, 0, MIB, 900 * MS, file=0)
    trace = machine.trace()
    assert report_of(machine)["block"] == {
        "requests": 3,
        "bytes": 3 * 131072,
        "latency_p50_seconds": pytest.approx(0.002),
        "latency_p99_seconds": pytest.approx(0.003, rel=0.02),
        "others_requests": 5,
        "others_bytes": 5 * MIB,
    }
    rates = bytes_per_second(trace, Ranks(trace), trace.start_ns, 10**9, 100)
    assert rates["disks"].sum() / 100 == pytest.approx(3 * 131072)


# ---- our service --------------------------------------------------------------------------------


def seen(machine: Machine, rank: Reader, looks: list[list[int]]) -> None:
    """Each look into the page table finds these pages, and 64 KiB from each on."""
    for look in looks:
        rank.now_ns += 50 * MS
        for page in sorted(look):
            machine.event(rank, Kind.SEEN, page * PAGE_BYTES, 65536, 50 * MS)
    machine.meta["source"] = "service"


@pytest.mark.parametrize("name", ["consecutive", "random"])
def test_without_bpf_page_tables_tell_the_pattern_and_what_is_missing_is_said(name: str) -> None:
    machine = Machine(16 * 1000)
    rank = machine.reader(0)
    windows = np.arange(1000)
    if name == "random":
        windows = np.random.default_rng(2).permutation(windows)
    seen(machine, rank, [(w * 16).tolist() for w in np.split(windows, 50)])
    machine.event(rank, Kind.MAJORS, 0, 0, 12)
    machine.event(rank, Kind.TOUCH, 0, PAGE_BYTES, 9000)
    report = report_of(machine)
    (reader,) = readers_of(report)
    assert report["trace"]["source"] == "service"
    assert reader["pattern"]["name"] == name
    assert "page tables" in reader["pattern"]["sensor"]
    assert reader["faults"] == {"total": None, "minor": None, "major": 12}
    assert reader["stall_seconds"] is None and reader["stall_sensor"].startswith("n/a (")
    assert reader["hit"]["share"] is None and reader["hit"]["sensor"].startswith("n/a (")
    assert report["files"][0]["fill_by"] is None
    assert report["service"]["touch_wait_ns_p50"] == 9000


def test_checkpoints_alone_tell_a_direction_and_no_stride() -> None:
    machine = Machine(100_000)
    rank = machine.reader(0)
    for page in range(0, 100_000, 1024):
        rank.now_ns += MS
        machine.event(rank, Kind.TOUCH, page * PAGE_BYTES, PAGE_BYTES, 8000)
    machine.meta["source"] = "service"
    (reader,) = readers_of(report_of(machine))
    assert reader["pattern"]["name"] == "sequential"
    assert reader["pattern"]["stride_bytes"] is None
    assert "checkpoints" in reader["pattern"]["sensor"]


def test_checkpoints_leave_no_hole_in_what_bpf_saw() -> None:
    machine = Machine(16_000, cached=True)
    rank = machine.reader(0)
    for start in range(0, 16_000, 16):
        rank.now_ns += 5000
        page = start
        if start % 1024 == 0:
            # the recorder knows the fault's address only and takes it for a huge page's
            huge = start // 512 * 512 * PAGE_BYTES
            machine.event(rank, Kind.AROUND, huge, 2 * MIB, rank.base + start * PAGE_BYTES)
            machine.event(rank, Kind.TOUCH, start * PAGE_BYTES, PAGE_BYTES, 8000)
            rank.now_ns += 5000
            page += 1
        address = rank.base + page * PAGE_BYTES
        machine.event(rank, Kind.AROUND, start * PAGE_BYTES, 65536, address, page - start)
    report = report_of(machine)
    (reader,) = readers_of(report)
    assert report["trace"]["source"] == "bpf+service"
    assert reader["pattern"]["name"] == "consecutive"
    assert reader["faults"]["total"] == 1000
    assert "up to 64 KiB" in reader["pattern"]["sensor"]


def test_what_was_warmed_is_followed_to_its_use() -> None:
    machine = Machine(6000, cached=True)
    rank = machine.reader(0)
    for start, there in ((0, 5 * MS), (1000, 40 * MS)):
        machine.event(rank, Kind.WARM, start * PAGE_BYTES, 1000 * PAGE_BYTES, there, 400)
    rank.now_ns += 10 * MS
    machine.run([(rank, range(1500))])
    service = report_of(machine)["service"]
    assert service["warm_extents"] == 2
    assert service["warm_bytes"] == 2000 * PAGE_BYTES
    assert service["warm_cached_bytes"] == 800 * 1024
    assert service["warm_late_extents"] == 1  # the second one was still being read
    assert service["warm_used_share"] == pytest.approx(0.75, abs=0.01)


# ---- anything -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_whatever_events_there_are_make_a_report(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 800))
    events = np.zeros(n, EVENT)
    events["time_ns"] = np.sort(rng.integers(0, 10**10, n))
    events["kind"] = rng.choice([*Kind, 30], n)
    for name, most in (("offset", 1 << 34), ("length", 1 << 24), ("value", 1 << 48)):
        events[name] = rng.integers(0, most, n) >> rng.integers(0, 40, n)
    for name in ("pid", "tid"):
        events[name] = rng.integers(1, 9, n)
    events["file"] = rng.integers(0, 4, n)
    events["aux"] = rng.choice([0, 1, 3 << 8, 4 << 8, 9 | 3 << 8, 15, 1 << 31], n)
    trace = Trace(
        {"started_ns": int(rng.integers(0, 10**10)), "source": rng.choice(["bpf", "service"])},
        events,
        {i: TracedFile(i, f"/data/{i}.bin", int(rng.integers(0, 1 << 34))) for i in (1, 2)},
        {pid: TracedProcess(pid, rank=pid % 3) for pid in range(1, 7)},
    )
    json.dumps(analyse(trace, without_index), allow_nan=False)


# ---- eBPF, but no tracepoint for faults (kernels before 6.10) -----------------------------------


def test_faults_that_no_tracepoint_tells_of_are_not_measured_and_not_zero() -> None:
    machine = Machine(16 * 1000)
    rank = machine.reader(0)
    seen(machine, rank, [(w * 16).tolist() for w in np.split(np.arange(1000), 50)])
    machine.meta["source"] = "bpf+service"
    why = "no tracepoint filemap:mm_filemap_fault (about Linux 6.10)"
    machine.meta["missing"] = [entry([Sensor.FAULTS], why)]
    (reader,) = readers_of(report_of(machine))
    assert reader["faults"] is None
    assert reader["stall_seconds"] is None and reader["stalls"] is None
    assert reader["hit"]["share"] is None
    for name in ("faults_sensor", "stall_sensor"):
        assert reader[name] == f"n/a (faults are not told of: {why})"
    assert {(e["faults"], e["major"], e["stall_seconds"]) for e in reader["epochs"]} == {
        (None, None, None)
    }


def test_major_faults_that_proc_counted_stand_where_no_tracepoint_tells_of_faults() -> None:
    machine = Machine(16 * 100)
    rank = machine.reader(0)
    seen(machine, rank, [(w * 16).tolist() for w in np.split(np.arange(100), 10)])
    machine.event(rank, Kind.MAJORS, 0, 0, 3607)
    machine.meta["source"] = "bpf+service"
    machine.meta["missing"] = [entry([Sensor.FAULTS], "no tracepoint")]
    (reader,) = readers_of(report_of(machine))
    assert reader["faults"] == {"total": None, "minor": None, "major": 3607}
    assert reader["stall_seconds"] is None
