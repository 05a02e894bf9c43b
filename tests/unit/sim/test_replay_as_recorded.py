# SPDX-License-Identifier: Apache-2.0
"""sim/replay against what it replays: a recorded run takes as long again, or nothing is advised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import warnings_fail
from replayed_jobs import MIB, PAGE, SLOW, demand, run, stream
from traces import MS, Machine, Read, Sleep, without_index, written

from uffdprefetch.cli import main
from uffdprefetch.sim.replay.choices import check
from uffdprefetch.sim.replay.demand import Demand, demand_of
from uffdprefetch.sim.replay.engine import ReplayPolicy
from uffdprefetch.sim.replay.eviction import LruEviction
from uffdprefetch.sim.replay.link import StorageModel
from uffdprefetch.sim.replay.policies import InPool, Plain, Planned, ReplayWindows
from uffdprefetch.trace.file.events import Kind

pytestmark = warnings_fail

PAGES = 4096
#: What the machine of traces.py has: nothing but a latency.
LATENCY = StorageModel(1e13, 1e-3)


def walk(order: list[int], random_advice: bool = False) -> Machine:
    machine = Machine(PAGES)
    machine.run([(machine.reader(0, random_advice=random_advice), order)])
    return machine


def recorded(machine: Machine) -> Demand:
    return demand_of(machine.trace(tail_ns=0), open_index=without_index)


FORWARD, BACKWARD = list(range(PAGES)), list(range(PAGES))[::-1]
SHUFFLED = np.random.default_rng(1).permutation(PAGES).tolist()


@pytest.mark.parametrize("order", [FORWARD, BACKWARD, SHUFFLED])
def test_a_miss_under_madv_random_brings_its_page_alone(order: list[int]) -> None:
    wanted = recorded(walk(order, random_advice=True))
    assert wanted.misses == PAGES
    found = check(wanted, LATENCY)
    assert found.agrees and found.outcome.misses == PAGES
    assert found.outcome.read_bytes == PAGES * PAGE
    assert found.outcome.seconds == pytest.approx(wanted.seconds, rel=0.01)


def test_a_reader_that_turns_to_single_pages_does_so_in_the_replay() -> None:
    """As the kernel gives readahead up after many misses (mmap_miss, mm/filemap.c)."""
    machine = Machine(PAGES)
    rank = machine.reader(0)
    far = list(range(0, PAGES // 2, 64))
    machine.run([(rank, far)])
    rank.random_advice = True
    machine.run([(rank, list(range(PAGES // 2, PAGES)))])
    found = run(recorded(machine), Plain(), None, LATENCY)
    assert found.misses == rank.majors
    assert found.read_bytes == len(machine.filled) * PAGE


def test_what_one_fill_brought_for_several_misses_is_shared_among_them() -> None:
    """The recorder joins pages that a thread brings one after the other (bpf/cache.c)."""
    machine = walk(FORWARD, random_advice=True)
    trace = machine.trace(tail_ns=0)
    fills = trace.events["kind"] == Kind.FILL
    joined = trace.events[fills][::16].copy()
    joined["length"], joined["aux"], joined["value"] = 16 * PAGE, 16, 15 * MS
    events = np.concatenate([trace.events[~fills], joined])
    trace.events = events[np.argsort(events["time_ns"], kind="stable")]
    found = run(demand_of(trace, open_index=without_index), Plain(), None, LATENCY)
    assert found.misses == PAGES


def test_a_backward_reader_wants_all_that_it_passed() -> None:
    wanted = recorded(walk(BACKWARD))
    # where readahead came before it, what is mapped ends with the last fault
    assert wanted.wanted_bytes >= (PAGES - 32) * PAGE
    found = check(wanted, LATENCY)
    assert found.agrees and found.outcome.misses == wanted.misses
    known = run(wanted, Planned(), None, SLOW)
    assert known.read_bytes >= (PAGES - 32) * PAGE
    assert known.seconds >= (PAGES - 32) * PAGE / SLOW.bandwidth


def test_a_reader_that_passes_the_marks_by_misses_each_window() -> None:
    """One page of each 64 KiB: the mark of a window, after which the kernel would read on, lies
    between."""
    machine = walk(list(range(0, PAGES, 16)))
    assert machine.readers[0].majors == PAGES // 16 - 1
    found = check(recorded(machine), LATENCY)
    assert found.agrees and found.outcome.misses == pytest.approx(PAGES // 16, abs=2)


def test_a_mark_counts_before_its_page_is_there() -> None:
    """So two windows are under way: the one that is waited for, and the next one."""
    pages, storage = 4096, StorageModel(1e9, 5e-3)
    found = run(demand(stream(list(range(0, pages, 16)), 16), pages=pages), Plain(), None, storage)
    each = 5e-3 + 131072 / 1e9
    assert found.seconds == pytest.approx(pages / 32 * each / 2, rel=0.05)


@pytest.mark.parametrize(
    "make", [Plain, lambda: ReplayWindows(4 * MIB), Planned, lambda: InPool(MIB)]
)
@pytest.mark.parametrize("down", [False, True])
def test_each_page_is_touched_once_whichever_way(make: type[ReplayPolicy], down: bool) -> None:
    first = list(range(0, PAGES, 64))
    wanted = demand(stream(first[::-1] if down else first, 64, down=down))
    for eviction in (None, LruEviction(wanted, 8 * MIB)):
        found = run(wanted, make(), eviction)
        assert found.touched_bytes == PAGES * PAGE
        assert found.misses <= PAGES // 8  # what a miss has brought is not missed again


def test_a_chunk_counts_once_an_access_whichever_way_it_is_touched() -> None:
    # two pages a miss, so that each chunk is touched in parts
    wanted = demand(stream([64, 0], 64, down=True, brings=(1, 1)), pages=128)
    counted: list[tuple[int, int]] = []
    eviction = LruEviction(wanted, MIB)
    access = eviction.access
    eviction.access = lambda f, a, b: (counted.append((a, b)), access(f, a, b))[1]  # type: ignore
    run(wanted, Plain(), eviction)
    chunks = [chunk for a, b in counted for chunk in range(a // 16, -(-b // 16))]
    assert chunks == [7, 6, 5, 4, 3, 2, 1, 0]


# ---- what is advised ----------------------------------------------------------------------------


def replayed(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, object]:
    words = ["simulate", "--replay", str(path), "--bandwidth", "10GB/s", *more]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    return capsys.readouterr().out, document


@pytest.mark.parametrize("more", [(), ("--epochs", "3"), ("--memory", "4MiB"), ("--only", "wrap")])
def test_what_is_replayed_as_it_was_recorded_is_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    path = written(walk(FORWARD, random_advice=True).trace(tail_ns=0), tmp_path / "t")
    text, found = replayed(path, capsys, "--latency", "1ms", *more)
    assert isinstance(found, dict)
    assert found["agrees"] and found["best"] and f"best: {found['best']}\n" in text
    assert "hits: of the bytes that are touched, those that are in memory by then\n" in text
    assert found["replayed_seconds"] == pytest.approx(found["recorded_seconds"], rel=0.05)


@pytest.mark.parametrize("latency", ["0.1ms", "1.3ms"])
def test_nothing_is_advised_where_the_replay_takes_another_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], latency: str
) -> None:
    path = written(walk(FORWARD, random_advice=True).trace(tail_ns=0), tmp_path / "t")
    text, found = replayed(path, capsys, "--latency", latency)
    assert isinstance(found, dict)
    assert not found["agrees"] and found["best"] is found["best_without_order"] is None
    assert len(found["choices"]) > 5  # what it would take is told all the same
    assert "best" not in text and "nothing is recommended" in text
    assert f"{found['recorded_seconds']:.2f} s" in text
    assert f"{found['replayed_seconds']:.2f} s" in text
    assert "a miss took 1.00 ms" in text and f"of this storage {latency[:3]}0 ms" in text


def test_nothing_is_advised_to_a_job_of_read_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(PAGES, cached=True)
    steps = [step for page in range(0, PAGES, 64) for step in (Read(page, 64), Sleep(100 * MS))]
    machine.run([(machine.reader(0), steps)])
    text, found = replayed(
        written(machine.trace(tail_ns=0), tmp_path / "t"), capsys, "--latency", "0.1ms"
    )
    assert isinstance(found, dict)
    assert found["agrees"] and not found["is_mapped"] and found["best"] is None
    assert found["read_call_share"] == 1.0
    assert "read(2)" in text and "best" not in text
