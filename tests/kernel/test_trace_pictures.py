# SPDX-License-Identifier: Apache-2.0
"""What is drawn of a trace: marks, cells, series, captions; pure, no browser."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import synthetic

from uffdprefetch.report import captions, pack
from uffdprefetch.report.html import json_for_script, render
from uffdprefetch.trace.analyse import density, marks, series
from uffdprefetch.trace.analyse.pictures import MARKS_WITHOUT_GRID, pictures
from uffdprefetch.trace.analyse.ranks import NOBODY
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.file.events import EVENT, FAULT_AFTER_AROUND, NO_PAGE, Kind
from uffdprefetch.trace.file.sensors import BY_BPF, Sensor, entry
from uffdprefetch.trace.file.trace_file import Trace, TracedFile, TracedProcess
from uffdprefetch.trace.record.overview import Overview

pytestmark = pytest.mark.browser

MS = 1_000_000


def trace_of(*rows: tuple[Any, ...], service: int | None = None) -> Trace:
    """A trace of (time_ns, offset, length, value, pid, tid, kind, file, aux)."""
    trace = Trace(meta={"started_ns": 0}, events=np.array(list(rows), EVENT))
    trace.files = {1: TracedFile(1, "/f", 1 << 20)}
    trace.processes = {10: TracedProcess(10, rank=0), 11: TracedProcess(11, rank=1)}
    if service is not None:
        trace.processes[service] = TracedProcess(service, role="service")
    return trace


def only(trace: Trace, kind: str) -> marks.MarkStream:
    (stream,) = (s for s in marks.collect(trace) if s.kind == kind)
    return stream


# ---- marks --------------------------------------------------------------------------------------


def test_a_fault_is_one_access_however_many_events_tell_of_it() -> None:
    trace = trace_of(
        (1 * MS, 65536, 65536, 0, 10, 10, Kind.AROUND, 1, 3),
        (1 * MS + 900, 77824, 4096, 0, 10, 10, Kind.FAULT, 1, FAULT_AFTER_AROUND),
        (3 * MS, 65536, 65536, 0, 10, 10, Kind.MAPPED, 1, 3),
        (5 * MS, 200704, 4096, 0, 10, 10, Kind.FAULT, 1, 0),
    )
    demand = [s for s in marks.collect(trace) if s.layer == "demand"]
    assert {s.kind: len(s) for s in demand} == {"around": 1, "fault": 1}


def test_fault_around_is_entered_at_the_page_that_was_touched() -> None:
    trace = trace_of(
        (1 * MS, 65536, 65536, 0, 10, 10, Kind.AROUND, 1, 3),
        (2 * MS, 131072, 65536, 0, 10, 10, Kind.AROUND, 1, NO_PAGE),
    )
    around = only(trace, "around")
    assert around.offset.tolist() == [65536 + 3 * 4096, 131072]
    assert around.before.tolist() == [3 * 4096, 0]


def test_a_miss_stands_where_it_began_and_lasts_as_long_as_it_was_waited_for() -> None:
    trace = trace_of((5 * MS, 8192, 4096, 2 * MS, 10, 10, Kind.MAJOR, 1, 0))
    major = only(trace, "major")
    assert (major.start_ns[0], major.duration_ns[0]) == (3 * MS, 2 * MS)


def test_a_wait_within_a_major_fault_is_no_miss_of_its_own_but_any_other_is_late() -> None:
    trace = trace_of(
        (5 * MS - 100, 8192, 4096, 1 * MS, 10, 10, Kind.WAIT, 1, 0),
        (5 * MS, 8192, 4096, 2 * MS, 10, 10, Kind.MAJOR, 1, 0),
        (5 * MS, 8192, 4096, 1 * MS, 11, 11, Kind.WAIT, 1, 0),  # another thread
        (9 * MS, 8192, 4096, 1 * MS, 10, 10, Kind.WAIT, 1, 0),  # after it
    )
    late = [s for s in marks.collect(trace) if s.kind == "late"]
    assert {s.rank: s.start_ns.tolist() for s in late} == {0: [8 * MS], 1: [4 * MS]}


def test_what_lay_ready_lasts_until_its_first_use_and_no_later_one() -> None:
    trace = trace_of(
        (1 * MS, 0, 262144, 500_000, 10, 99, Kind.WARM, 1, 0),
        (7 * MS, 0, 65536, 0, 10, 10, Kind.AROUND, 1, 0),
        (9 * MS, 131072, 65536, 0, 10, 10, Kind.AROUND, 1, 0),
        (2 * MS, 524288, 262144, 500_000, 10, 99, Kind.WARM, 1, 0),  # never used
    )
    assert only(trace, "warm").duration_ns.tolist() == [6 * MS, 500_000]


def test_a_fill_that_a_miss_waits_for_is_readahead_until_the_miss_ends() -> None:
    trace = trace_of(
        (1 * MS, 0, 131072, 10_000, 10, 10, Kind.FILL, 1, 32),
        (1 * MS, 4096 * 100, 4096, 0, 10, 10, Kind.FILL, 1, 1),  # the missed page alone: no band
        (2 * MS, 0, 4096, 2 * MS, 10, 10, Kind.MAJOR, 1, 0),
    )
    kernel = only(trace, "kernel")
    assert len(kernel) == 1 and kernel.duration_ns[0] == 1 * MS


def test_fills_are_told_apart_by_who_brought_them() -> None:
    rows = [(i * MS, i << 17, 131072, 0, pid, pid, Kind.FILL, 1, 32)
            for i, pid in enumerate((10, 77, 500), 1)]  # fmt: skip
    kinds = {s.kind: s.rank for s in marks.collect(trace_of(*rows, service=77))}
    assert kinds == {"kernel": 0, "warm": NOBODY, "other": NOBODY}


def test_reads_of_our_service_are_no_ranks_accesses() -> None:
    rows = [
        (1 * MS, 0, 65536, 0, 99, 99, Kind.READ, 1, 0),
        (1 * MS, 0, 65536, 0, 10, 10, Kind.READ, 1, 0),
        (2 * MS, 0, 65536, 0, 10, 99, Kind.WARM, 1, 0),
    ]
    assert [s.rank for s in marks.collect(trace_of(*rows)) if s.kind == "read"] == [0]


def test_page_tables_count_only_where_the_kernel_tells_nothing() -> None:
    seen = (4 * MS, 0, 65536, 3 * MS, 10, 10, Kind.SEEN, 1, 0)
    fault = (5 * MS, 0, 4096, 0, 10, 10, Kind.FAULT, 1, 0)
    alone = only(trace_of(seen), "seen")
    assert (alone.start_ns[0], alone.duration_ns[0]) == (1 * MS, 3 * MS)
    assert [s.kind for s in marks.collect(trace_of(seen, fault))] == ["fault"]


# ---- cells and series ---------------------------------------------------------------------------


def test_a_cell_counts_the_marks_whose_ranges_meet_it() -> None:
    size, span = 512 << 20, 1024 * MS  # a row is 1 MiB, a column 1 ms
    trace = trace_of(
        (3 * MS, 0, 4096, 0, 10, 10, Kind.FAULT, 1, 0),
        (3 * MS, 4096, 4096, 0, 10, 10, Kind.FAULT, 1, 0),
        (5 * MS, (1 << 20) - 4096, 8192, 0, 10, 10, Kind.READ, 1, 0),
        (7 * MS, 2 << 20, 2 << 20, 2 * MS, 10, 99, Kind.WARM, 1, 0),
    )
    found = density.grid(map(density.Boxes.of, marks.collect(trace)), span, {1: size})
    cells = {c.kind: {(int(i) // 512, int(i) % 512): int(n)
             for i, n in zip(c.index, c.count, strict=True)} for c in found.cells}  # fmt: skip
    assert cells["fault"] == {(3, 0): 2}
    assert cells["read"] == {(5, 0): 1, (5, 1): 1}
    assert cells["warm"] == {(x, y): 1 for x in (7, 8, 9) for y in (2, 3)}


def test_a_grid_is_coarsened_until_it_is_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = marks.collect(synthetic.make("shuffled", records=2000))
    span, size = 10**10, {1: 1 << 28}
    fine = density.grid(map(density.Boxes.of, streams), span, size)
    monkeypatch.setattr(density, "CELLS_MAX", fine.filled // 3)
    coarse = density.grid(map(density.Boxes.of, streams), span, size)
    assert coarse.filled <= fine.filled // 3 and coarse.columns < fine.columns
    for a, b in zip(fine.cells, coarse.cells, strict=True):
        assert a.count.sum() == b.count.sum()


def test_intervals_are_divided_over_their_bins_and_nothing_is_lost() -> None:
    start, end = np.array([0.5, 2.0, 3.2]), np.array([2.5, 2.0, 3.4])
    rows = series.spread(start, end, np.array([4.0, 1.0, 1.0]), 4.0, 4)
    assert rows == pytest.approx([1.0, 2.0, 2.0, 1.0])


def test_stall_is_the_share_of_a_bins_time() -> None:
    trace = trace_of((3000 * MS, 0, 4096, 2000 * MS, 11, 11, Kind.MAJOR, 1, 0),
                     (4000 * MS, 0, 4096, 0, 10, 10, Kind.FAULT, 1, 0))  # fmt: skip
    found = pictures(trace, {})["series"]
    assert found["stall_share"][0].sum() == 0
    assert found["stall_share"][1].max() == pytest.approx(1)
    assert found["stall_share"][1].sum() * found["bin_seconds"] == pytest.approx(2.0)


def test_what_no_event_tells_of_is_none_and_not_zero() -> None:
    found = pictures(trace_of((1 * MS, 0, 4096, 9, 10, 10, Kind.TOUCH, 1, 0)), {})["series"]
    assert found["accesses"] is None and found["misses"] is None and found["stall_share"] is None
    assert found["bytes_per_second"] == {}


def test_each_kind_of_call_keeps_dots_of_every_moment() -> None:
    rows = [(t * MS, 0, 1, 0, 10, 10, Kind.CALL, 0, 5) for t in range(1, 40_001)]
    rows.append((40_000 * MS, 0, 1, 0, 10, 10, Kind.CALL, 0, 1))
    write, opened = sorted(pictures(trace_of(*rows), {})["calls"], key=lambda c: -c["count"])
    assert (write["count"], opened["count"]) == (40_000, 1)
    assert len(write["seconds"]) <= series.DOTS_PER_BIN * series.DOT_BINS
    assert np.diff(write["seconds"]).max() < 40 / 100


def test_after_the_single_events_the_overview_goes_on() -> None:
    trace = synthetic.make("contiguous", records=400)
    whole = pictures(trace, {})
    until_ns = int(whole["seconds"] * 0.4e9)
    cut = trace.events[trace.events["time_ns"] < synthetic.START_NS + until_ns]
    overview = Overview(synthetic.START_NS)
    overview.add(trace.events)
    short = Trace(trace.meta, cut, trace.files, trace.processes, overview.body())
    told = {"trace": {"seconds": whole["seconds"], "raw_until_seconds": until_ns / 1e9}}
    found = pictures(short, told)
    assert found["seconds"] == pytest.approx(whole["seconds"])
    late = found["grid"].columns * 0.5
    filled = {c.rank for c in found["grid"].cells if (c.index // found["grid"].rows > late).any()}
    assert filled >= {0, 1, 2, 3}
    for name in ("accesses", "misses"):
        bins = len(found["series"][name][0])
        after = slice(bins // 2, None)
        assert found["series"][name].sum() == pytest.approx(whole["series"][name].sum(), rel=0.03)
        assert found["series"][name][:, after].sum() == pytest.approx(
            whole["series"][name][:, after].sum(), rel=0.1, abs=3
        )


# ---- packing ------------------------------------------------------------------------------------


def test_a_small_trace_is_packed_exactly_and_whole() -> None:
    found = pack.windows(marks.collect(synthetic.make("skip", records=300)), 10**10)
    assert found["exact"] and found["step_ns"] == 100
    assert all(text for *_, text in found["windows"])


def test_what_finds_no_room_is_left_out_evenly_and_counted() -> None:
    streams = marks.collect(synthetic.make("shuffled", records=40_000, epochs=1))
    total = sum(map(len, streams))
    span = max(int(s.start_ns[-1]) for s in streams) + 1
    whole = pack.windows(streams, span)
    size = sum(len(text) for *_, text in whole["windows"])
    some = pack.windows(streams, span, size // 2)
    kept = [i for i, (*_, text) in enumerate(some["windows"]) if text]
    assert sum(len(text) for *_, text in some["windows"] if text) <= size // 2
    assert sum(n for _, _, n, _ in some["windows"]) == total
    assert 0 in kept and 0 < len(kept) < len(some["windows"])


def test_a_page_says_how_much_of_it_has_single_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack.windows, "__defaults__", (60_000,))
    monkeypatch.setattr(pack, "MARKS_PER_WINDOW", 2000)
    page = render(synthetic.make("shuffled", records=4000), {})
    assert "the others had no room in it" in page


# ---- captions and JSON --------------------------------------------------------------------------


def test_a_caption_names_what_its_picture_lacks_and_no_other_does() -> None:
    trace = synthetic.make("skip", records=60)
    report = analyse(trace)
    lack = entry([Sensor.CALLS], "no tracepoint", "CONFIG_FTRACE_SYSCALLS")
    report["trace"]["missing"] = [lack]
    found = captions.captions(report, pictures(trace, report))
    assert found["calls"]["lacks"] == [lack]
    assert found["map"]["lacks"] == [] and found["stall"]["lacks"] == []
    assert "system calls: no tracepoint" in found["calls"]["empty"]


def test_without_bpf_nothing_is_said_to_be_zero_or_not_to_have_happened() -> None:
    trace = trace_of((1 * MS, 0, 4096, 9, 10, 10, Kind.TOUCH, 1, 0))
    report = {"trace": {"source": "service", "missing": []}}
    (lack,) = captions.lacks_of_trace(report)
    found = captions.captions(report, pictures(trace, report))
    for name in ("hits", "bytes", "stall", "calls"):
        assert found[name]["lacks"] == [lack]
        assert "recorded without BPF" in found[name]["empty"]


@pytest.mark.parametrize("sensor", sorted(BY_BPF - {Sensor.BIRTHS}, key=str))
def test_every_sensor_that_can_be_missing_concerns_a_picture(sensor: Sensor) -> None:
    report = {"trace": {"missing": [entry([sensor], "x")]}}
    assert any(captions.lacks_of(name, report) for name in captions._CONCERNS)


def test_a_map_tells_of_the_sensors_its_marks_are_from() -> None:
    assert "page faults" in captions.map_text({"around"})
    assert "checkpoints" in captions.map_text({"touch"})
    assert "page tables" in captions.map_text({"seen"})
    assert "hatched" in captions.map_text({"around", "warm"})
    assert "Bands" not in captions.map_text({"around"})


def test_numbers_and_patterns_read_as_people_write_them() -> None:
    assert captions.number_ranges([3, 0, 1, 2, 5, 7, 8]) == "0-3, 5, 7-8"
    assert captions.pattern_text({"name": "strided", "stride_records": 2}) == (
        "strided, every 2nd record"
    )
    assert [captions.ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th",
    ]  # fmt: skip


def test_no_string_of_a_trace_can_end_its_script() -> None:
    hostile = "</script><img src=x onerror=alert(1)><!-- & \u2028 \ud800"
    text = json_for_script({"path": hostile, "nan": float("nan"), "n": np.int64(3)})
    assert not set("<>&") & set(text) and text.isascii()
    assert json.loads(text) == {"path": hostile, "nan": None, "n": 3}
    trace = synthetic.make("skip", records=40, path=hostile)
    page = render(trace, {"trace": {"command": [hostile]}})
    page.encode("utf-8")
    assert "<img" not in page and "@@" not in page


def test_few_marks_need_no_cells() -> None:
    found = pictures(synthetic.make("skip", records=300), {})
    assert found["marks"] < MARKS_WITHOUT_GRID and found["grid"] is None
