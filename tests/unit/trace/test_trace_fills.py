# SPDX-License-Identifier: Apache-2.0
"""Who brought pages into the cache, what of it was used, and what one fault maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import warnings_fail
from traces import (
    MS,
    PAGE_BYTES,
    Machine,
    Read,
    readers_of,
    report_of,
    without_index,
)

from uffdprefetch.report import text
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.file.events import Kind, ReadaheadSite
from uffdprefetch.trace.file.trace_file import TracedProcess

pytestmark = warnings_fail

MIB = 1 << 20

# ---- who filled ---------------------------------------------------------------------------------


def test_fills_are_attributed_to_demand_readahead_service_and_others() -> None:
    machine = Machine(10_000)
    rank = machine.reader(0)
    machine.run([(rank, [100, 5000])])
    majors = rank.majors
    for pid, length in ((777, 40), (888, 50)):
        machine.rows.append(
            (rank.now_ns, 9000 * PAGE_BYTES, length * PAGE_BYTES, 10, pid, pid, Kind.FILL, 1, 1)
        )
    trace = machine.trace()
    trace.processes[777] = TracedProcess(777, role="service")
    by = analyse(trace, without_index)["files"][0]["fill_by"]
    assert by == {
        "ranks": majors * PAGE_BYTES,
        "kernel": (len(machine.filled) - majors) * PAGE_BYTES,
        "service": 40 * PAGE_BYTES,
        "others": 50 * PAGE_BYTES,
    }


def test_waiting_for_a_page_that_is_on_its_way_is_no_demand() -> None:
    machine = Machine(4000)
    rank = machine.reader(0)
    # the thread's own readahead, noted as one stretch of 10 ms; a fault within it is a minor one
    machine.event(rank, Kind.FILL, 0, 64 * PAGE_BYTES, value=10 * MS, aux=64)
    rank.now_ns += MS
    machine.event(rank, Kind.FAULT, 40 * PAGE_BYTES)
    by = report_of(machine)["files"][0]["fill_by"]
    assert (by["ranks"], by["kernel"]) == (0, 64 * PAGE_BYTES)


def test_a_read_call_demands_what_it_asks_for_and_no_readahead() -> None:
    machine = Machine(4000)
    rank = machine.reader(0)
    machine.event(rank, Kind.FILL, 0, 64 * PAGE_BYTES, value=1000, aux=64)
    for page in range(0, 64, 8):
        rank.now_ns += MS
        machine.event(rank, Kind.READ, page * PAGE_BYTES, 8 * PAGE_BYTES)
    by = report_of(machine)["files"][0]["fill_by"]
    assert (by["ranks"], by["kernel"]) == (8 * PAGE_BYTES, 56 * PAGE_BYTES)


def test_who_warms_without_a_name_is_our_service() -> None:
    machine = Machine(4000)
    rank = machine.reader(0)
    machine.rows.append((rank.now_ns, 0, MIB, MS, rank.pid, 777, Kind.WARM, 1, 0))
    machine.rows.append((rank.now_ns, 0, MIB, 10, 777, 777, Kind.FILL, 1, 1))
    by = report_of(machine)["files"][0]["fill_by"]
    assert by == {"ranks": 0, "kernel": 0, "service": MIB, "others": 0}


def test_useless_is_what_was_filled_and_never_mapped_since() -> None:
    machine = Machine(4000, readahead=32)
    # [84, 116) and [484, 516) are filled; 64 KiB of each are mapped with the fault
    machine.run([(machine.reader(0), [100, 500])])
    file = report_of(machine)["files"][0]
    mapped = {*range(96, 112), *range(496, 512)}
    assert file["filled_pages"] == 64
    assert file["useless_bytes"] == (64 - len(mapped & set(machine.filled))) * PAGE_BYTES
    assert file["useless_denominator_bytes"] == 64 * PAGE_BYTES
    assert file["useless_share"] == file["useless_bytes"] / (64 * PAGE_BYTES)
    assert file["extra_bytes"] == file["useless_bytes"]
    assert "lower bound" in file["useless_sensor"]


def test_what_a_fault_hides_of_what_was_used_is_a_bound() -> None:
    """One page of each 64 KiB: all of it is mapped with the fault, and perhaps used."""
    machine = Machine(1600, readahead=32)
    machine.run([(machine.reader(0), range(0, 1600, 16))])
    file = report_of(machine)["files"][0]
    filled = len(set(machine.filled))
    assert file["useless_bytes"] == (filled - 1600) * PAGE_BYTES == 0
    assert file["useless_most_bytes"] == (filled - 100) * PAGE_BYTES
    (line,) = [x for x in text.lines(report_of(machine), width=140) if "never used" in x]
    assert "never used 0 B to 5.86 MiB of 6.25 MiB" in line


def test_of_what_was_read_nothing_is_hidden() -> None:
    machine = Machine(1600)
    machine.run([(machine.reader(0), [Read(page, 16) for page in range(0, 1600, 16)])])
    file = report_of(machine)["files"][0]
    assert file["useless_bytes"] == file["useless_most_bytes"] == 0


def test_a_range_that_was_mapped_before_its_pages_came_does_not_use_them() -> None:
    machine = Machine(4000, readahead=2)
    rank = machine.reader(0, random_advice=True)
    # page 100 is there alone when 64 KiB around it are mapped; 101-111 come later, for nobody
    machine.run([(rank, [100])])
    rank.now_ns += 10 * MS
    machine.run([(rank, [104])])
    filler = machine.reader(1)
    filler.now_ns = rank.now_ns + MS
    machine._fill(filler, 105, 112)
    file = report_of(machine)["files"][0]
    assert file["useless_bytes"] == 7 * PAGE_BYTES


def test_readahead_decisions_are_counted_once_and_their_use_is_told() -> None:
    machine = Machine(6000)
    machine.run([(machine.reader(0), range(3000))])
    ahead = report_of(machine)["files"][0]["readahead"]
    decided = [e for e in machine.rows if e[6] == Kind.READAHEAD and e[8] >> 8 == 3]
    assert ahead["decisions"] == len(decided) == ahead["sync"] + ahead["async"]
    assert ahead["sync"] == 1 and ahead["async"] > 50
    assert ahead["bytes"] == sum(e[2] for e in decided)
    assert ahead["mean_bytes"] == pytest.approx(32 * PAGE_BYTES, rel=0.01)
    assert ahead["used_share"] > 0.97


def test_an_unbounded_within_an_order_is_the_same_decision() -> None:
    machine = Machine(6000)
    rank = machine.reader(0)
    for offset, how in ((0, 3), (0, 4), (32, 3), (40, 4), (200, 4)):
        rank.now_ns += 1000
        machine.event(rank, Kind.READAHEAD, offset * PAGE_BYTES, 32 * PAGE_BYTES, aux=how << 8)
    assert report_of(machine)["files"][0]["readahead"]["decisions"] == 3


# ---- large folios -------------------------------------------------------------------------------


def test_what_huge_pages_hide_is_not_taken_for_skipped() -> None:
    # Linux 6.18 maps a whole folio with a fault and tells of 64 KiB
    machine = Machine(20_000, cached=True)
    rank = machine.reader(0)
    pages = [*range(0, 2048, 16), *range(2048, 8192, 64), *range(8192, 20_000, 512)]
    for page in pages:
        rank.now_ns += 5000
        length = 512 if page >= 8192 else 16
        address = rank.base + page * PAGE_BYTES
        machine.event(rank, Kind.AROUND, page * PAGE_BYTES, length * PAGE_BYTES, address, 0)
    (reader,) = readers_of(report_of(machine))
    assert reader["pattern"]["name"] == "consecutive"
    assert reader["touched_pages"] == 20_000
    assert "up to 2 MiB" in reader["pattern"]["sensor"]


def in_folios(
    machine: Machine, how: list[tuple[int, int, int, ReadaheadSite]], pages: list[int]
) -> dict[str, Any]:
    """The reader that faults at these pages, where readahead has decided so before: (first page,
    pages, order, how) of each."""
    rank = machine.reader(0)
    for first, count, order, decided in how:
        rank.now_ns += 1000
        at = first * PAGE_BYTES, count * PAGE_BYTES
        machine.event(rank, Kind.READAHEAD, *at, aux=order | decided << 8)
        machine.event(rank, Kind.FILL, *at, aux=count >> order)
    for page in pages:
        rank.now_ns += 5000
        address = rank.base + page * PAGE_BYTES
        machine.event(rank, Kind.AROUND, page // 16 * 65536, 65536, address, page % 16)
    (reader,) = readers_of(report_of(machine))
    return reader


def test_a_backward_reader_of_large_folios_skips_nothing() -> None:
    """The kernel maps each with the fault of its last page."""
    machine = Machine(8192, cached=True)
    pages = [*range(8191, 4096, -16), *range(4095, 0, -64)]
    reader = in_folios(machine, [], pages)
    # of the last one nothing tells how large it was
    assert reader["pattern"]["name"] == "backward" and reader["touched_pages"] == 8192 - 48


def test_readahead_that_begins_within_a_folio_makes_small_ones_first() -> None:
    """page_cache_ra_order: as large as they may be, aligned, within what is to be read."""
    machine = Machine(8192, cached=True)
    decided = [(272, 1024, 9, ReadaheadSite.ORDER)]
    grown = [272, 288, 320, 384, 512, 1024, 1280]
    pages = [*range(0, 272, 16), *grown, *range(1296, 8192, 16)]
    reader = in_folios(machine, decided, pages)
    assert reader["pattern"]["name"] == "consecutive" and reader["touched_pages"] == 8192


def test_where_readahead_met_a_page_that_was_there_it_goes_on_page_by_page() -> None:
    machine = Machine(8192, cached=True)
    decided = [(0, 2048, 11, ReadaheadSite.ORDER), (0, 2048, 0, ReadaheadSite.UNBOUNDED),
               (2048, 2048, 9, ReadaheadSite.ORDER)]  # fmt: skip
    pages = [*range(0, 2048, 16), *range(2048, 4096, 512), *range(4096, 8192, 16)]
    reader = in_folios(machine, decided, pages)
    assert reader["pattern"]["name"] == "consecutive" and reader["touched_pages"] == 8192


def test_a_regular_stride_over_small_pages_is_no_huge_page() -> None:
    machine = Machine(40_000, cached=True)
    machine.run([(machine.reader(0), range(0, 40_000, 64))])
    (reader,) = readers_of(report_of(machine))
    assert reader["pattern"]["name"] == "strided"
    assert reader["pattern"]["stride_bytes"] == 64 * PAGE_BYTES


# ---- several nodes ------------------------------------------------------------------------------


def test_each_node_has_a_page_cache_of_its_own() -> None:
    one = Machine(3200)
    one.run([(one.reader(0), range(3200))])
    trace = one.trace()
    other = trace.events.copy()
    other["pid"] += 1 << 22
    other["tid"] += 1 << 22
    trace.events = np.concatenate([trace.events, other])
    trace.events = trace.events[np.argsort(trace.events["time_ns"], kind="stable")]
    trace.processes[1000 + (1 << 22)] = TracedProcess(1000 + (1 << 22), rank=1)
    report = analyse(trace, without_index)
    file = report["files"][0]
    assert file["fill_bytes"] == 2 * 3200 * PAGE_BYTES
    assert file["refilled_bytes"] == 0  # read once by each of them
    assert file["touched_pages"] == 3200
    assert [r["rank"] for r in report["readers"]] == [0, 1]


def test_a_major_fault_that_did_not_wait_uses_what_it_brought() -> None:
    # bpf/faults.c and cache.c note the page one after the other: the fill is the later one
    machine = Machine(4000)
    rank = machine.reader(0)
    for page in range(0, 4000, 100):
        rank.now_ns += MS
        machine.event(rank, Kind.FAULT, page * PAGE_BYTES)
        machine.event(rank, Kind.MAJOR, page * PAGE_BYTES, value=500, time_ns=rank.now_ns + 500)
        machine.event(rank, Kind.FILL, page * PAGE_BYTES, aux=1, time_ns=rank.now_ns + 700)
    file = report_of(machine)["files"][0]
    assert file["useless_bytes"] == 0
    assert file["fill_by"]["ranks"] == file["fill_bytes"] == 40 * PAGE_BYTES
