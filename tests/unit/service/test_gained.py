# SPDX-License-Identifier: Apache-2.0
"""What a run gained: the states of its readers' threads, and when something can be said at all."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import wait_until

from tests.support.file_states import file_of
from uffdprefetch.base.clock import Clock
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.predict.gain import FileReads, ReadersTime
from uffdprefetch.predict.storage import BLOCK_BYTES, RequestCost
from uffdprefetch.predict.used import Used
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.sense import pagetables
from uffdprefetch.service import waits
from uffdprefetch.service.gained import Gained, gained
from uffdprefetch.service.waits import (
    AT_ONCE_NS,
    COST,
    EVERY_NS,
    MS,
    THREADS_MOST,
    Reading,
    Waits,
    thread_states,
)
from uffdprefetch.state.closed_book import reads_of
from uffdprefetch.state.files import FileState
from uffdprefetch.state.region_state import ScanState

MIB = 1 << 20
STORAGE = RequestCost(300e6, 1e-3, 3)


# ---- waits --------------------------------------------------------------------------------------


def read(samples: list[tuple[str, int]], every_ns: int = EVERY_NS) -> Reading:
    """A process that was seen in these states, and had touched something by then (0: nothing)."""
    reading = Reading()
    for number, (states, touched_ns) in enumerate(samples, start=1):
        reading.note(states, touched_ns, number * every_ns)
    return reading


def test_states_are_the_kernels() -> None:
    assert thread_states(os.getpid()).count("R") >= 1
    child = subprocess.Popen(["sleep", "100"])
    try:
        wait_until(lambda: thread_states(child.pid) == "S", "sleep to sleep")
    finally:
        child.kill()
        child.wait()
    assert thread_states(child.pid) == ""


def test_a_process_that_just_ends_may_list_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda _path: [])
    assert thread_states(os.getpid()) == ""


def test_who_waits_in_every_sample_has_waited_all_the_time() -> None:
    reading = read([("D", 0)] * 11)
    assert reading.begin_ns == EVERY_NS and reading.end_ns == 11 * EVERY_NS
    assert reading.waited_ns == reading.thread_ns == 10 * EVERY_NS


def test_who_computes_or_sleeps_has_not_waited() -> None:
    for state in "RS":
        reading = read([(state, n * EVERY_NS) for n in range(1, 12)])
        assert (reading.waited_ns, reading.thread_ns) == (0, 10 * EVERY_NS)


def test_of_threads_that_read_side_by_side_each_counts() -> None:
    reading = read([("DDSS", 0)] * 11)
    assert reading.thread_ns == reading.waited_thread_ns == 20 * EVERY_NS
    reading = read([("DR", 0)] * 11)
    assert reading.waited_thread_ns == pytest.approx(reading.thread_ns / 2)


def test_the_service_sleeping_is_no_wait_of_the_jobs() -> None:
    reading = read([("D", 0), ("D", 0)], every_ns=10_000 * MS)
    assert reading.waited_ns < 1000 * MS


def test_of_many_threads_some_stand_for_all() -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(3 * THREADS_MOST)]
    try:
        for thread in threads:
            thread.start()
        for turn in range(5):
            states = thread_states(os.getpid(), turn)
            count = len(os.listdir("/proc/self/task"))  # the suite's own, too
            assert abs(len(states) - count) < 4  # for so many one stands
            assert all(states.count(one) % 4 == 0 for one in states)
        wait_until(lambda: thread_states(os.getpid()).count("S") > 2 * THREADS_MOST, "them to wait")
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_round_over_many_processes_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_ns = now = 0
    sampled: list[int] = []

    def look(pid: int, turn: int) -> str:
        nonlocal cpu_ns
        cpu_ns += MS * 6 // 10
        sampled.append(pid)
        return "D"

    monkeypatch.setattr(waits, "thread_states", look)
    reader = SimpleNamespace(regions={1: SimpleNamespace(mapped_ns=0)}, seen_ns=0)
    clients: dict[int, Any] = {n: SimpleNamespace(pid=n, readers={0: reader}) for n in range(100)}
    ours = Waits(Clock(lambda: now, lambda: cpu_ns))
    rounds = 5
    while len(sampled) < rounds * len(clients):
        now, before = max(now, ours.due_ns), cpu_ns
        ours.step(clients)
        assert cpu_ns - before < AT_ONCE_NS + MS
        assert ours.due_ns >= now + COST * (cpu_ns - before)
    assert {sampled.count(pid) for pid in clients} == {rounds}
    watched = ours.watched()
    assert watched.thread_seconds > 0  # who always waits has waited all of its time
    assert watched.waited_seconds == pytest.approx(watched.thread_seconds)


def test_how_many_wait_side_by_side_is_of_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    now, states = 0, "D"
    monkeypatch.setattr(waits, "thread_states", lambda pid, turn: states)
    reader = SimpleNamespace(regions={1: SimpleNamespace(mapped_ns=0)}, seen_ns=0)
    clients: dict[int, Any] = {n: SimpleNamespace(pid=n, readers={0: reader}) for n in range(4)}
    ours = Waits(Clock(lambda: now, lambda: 0))

    def rounds(number: int) -> float:
        nonlocal now
        for _ in range(number):
            now = max(now + 1, ours.due_ns)
            ours.step(clients)
        return ours.side_by_side

    assert ours.side_by_side == 1.0
    assert rounds(20) == pytest.approx(4.0, rel=0.05)
    states = "R"
    assert rounds(20) == pytest.approx(4.0, rel=0.05), "who does not wait tells nothing"
    states = "DD"
    assert rounds(30) == pytest.approx(8.0, rel=0.05)


def test_waits_are_watched_from_the_mapping_on_to_the_last_touch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of half a second: a tenth of it lay before the first sample and behind the last one,
    and was told as saved."""
    now = 100 * MS
    monkeypatch.setattr(waits, "thread_states", lambda pid, turn: "D")
    region = SimpleNamespace(mapped_ns=now - 8 * MS)
    reader = SimpleNamespace(regions={1: region}, seen_ns=0)
    clients: dict[int, Any] = {1: SimpleNamespace(pid=1, readers={0: reader})}
    ours = Waits(Clock(lambda: now, lambda: 0))
    while now < 500 * MS:
        ours.step(clients)
        now = max(now + 1, ours.due_ns)
    reader.seen_ns = now + 5 * MS
    found = ours.watched()
    assert found.wall_seconds == pytest.approx((now + 5 * MS - region.mapped_ns) / 1e9, abs=0.001)
    assert found.waited_seconds == pytest.approx(found.wall_seconds)


def test_a_young_run_is_sampled_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = MS
    times: list[int] = []

    def look(_pid: int, _turn: int) -> str:
        times.append(now)
        return "R"

    monkeypatch.setattr(waits, "thread_states", look)
    reader = SimpleNamespace(regions={1: SimpleNamespace(mapped_ns=MS)}, seen_ns=0)
    clients: dict[int, Any] = {1: SimpleNamespace(pid=1, readers={0: reader})}
    ours = Waits(Clock(lambda: now, lambda: 0))
    while now < 4000 * MS:
        ours.step(clients)
        now = max(now + 1, ours.due_ns)
    each = [b - a for a, b in itertools.pairwise(times)]
    assert each[0] == 10 * MS and each == sorted(each) and each[-1] == 50 * MS
    # a thirty-second of the run that it stands for
    late = next(gap for at, gap in zip(times, each, strict=False) if at >= 960 * MS)
    assert 29 * MS < late < 33 * MS


@pytest.mark.parametrize("processes", [0, 1, 4])
def test_of_who_is_done_before_a_second_sample_what_was_counted_tells(
    monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """A job of 0.06 s in the pool: nothing was told of the 0.25 s that it had saved."""
    monkeypatch.setattr(waits, "thread_states", lambda pid, turn: "S")
    reader = SimpleNamespace(regions={1: SimpleNamespace(mapped_ns=0)}, seen_ns=7)
    clients: dict[int, Any] = {
        n: SimpleNamespace(pid=n, readers={0: reader}) for n in range(processes)
    }
    ours = Waits(Clock(lambda: EVERY_NS, lambda: 0))
    ours.step(clients)
    found = ours.watched(40 * MS)
    assert found.wall_seconds == pytest.approx(0.04 if processes else 0.0)
    assert found.thread_seconds == pytest.approx(0.04 * processes)
    assert found.waited_seconds == pytest.approx(0.04)


# ---- what can be said ---------------------------------------------------------------------------


def say(used: int, memory: int = 0, misses: int = 0, wall: float = 2.0, waited: float = 0.0,
        storage: RequestCost = STORAGE, before: int = 0, unused: int = 0) -> Gained:  # fmt: skip
    reads = [FileReads(Used(runs=used // BLOCK_BYTES), 128 << 10)] if used else []
    watched = ReadersTime(wall, wall, waited)
    return gained(reads, used, unused, memory, misses, before, watched, storage)


def test_what_was_read_before_anybody_looked_was_not_in_memory() -> None:
    assert say(0, memory=128 * MIB).gain == "in-memory"
    assert say(0, memory=128 * MIB, before=4 * MIB).gain == "in-memory"
    found = say(0, memory=128 * MIB, before=100 * MIB)
    assert (found.gain, found.saved_at_least_seconds) == ("just-read", None)
    assert say(128 * MIB, before=100 * MIB).gain == "saved"


def test_a_gain_is_told_as_what_waits_and_bytes_both_say() -> None:
    whole = 1024 * (1e-3 + (128 << 10) / 300e6)
    found = say(64 * MIB)
    assert found.saved_at_least_seconds == pytest.approx(whole, abs=1e-3)
    assert (found.gain, found.cost_seconds) == ("saved", 0.0)
    assert say(64 * MIB, waited=1.0).saved_at_least_seconds == pytest.approx(whole - 1, abs=1e-3)
    # more was read for nothing than was spared: it gains, by the waits, and is not told to
    wasted = say(64 * MIB, waited=1.0, unused=512 * MIB)
    assert (wasted.gain, wasted.saved_at_least_seconds, wasted.cost_seconds) == ("even", 0.0, 0.0)


def test_a_loss_is_told_as_far_as_bytes_for_nothing_account_for_the_waits() -> None:
    assert say(0, waited=2.0, unused=300_000_000).cost_seconds == pytest.approx(1.0)
    assert say(0, waited=0.5, unused=300_000_000).cost_seconds == pytest.approx(0.5)
    found = say(MIB, waited=2.0)
    assert (found.gain, found.cost_seconds) == ("even", 0.0)


@pytest.mark.parametrize(
    ("found", "gain", "seconds"),
    [
        (say(0), "nothing-read", None),
        (say(0, memory=64 * MIB), "in-memory", None),
        (say(MIB, memory=64 * MIB, misses=2), "in-memory", None),
        (say(0, memory=64 * MIB, unused=64 * MIB, waited=0.01), "cost", 0.0),
        (say(0, memory=64 * MIB, misses=400), "even", 0.0),
        (say(64 * MIB, storage=RequestCost()), "unknown", None),
        (say(64 * MIB, wall=0.0), "unknown", None),
    ],
)
def test_what_is_not_known_is_not_said(found: Gained, gain: str, seconds: float | None) -> None:
    assert (found.gain, found.saved_at_least_seconds) == (gain, seconds)


# ---- the books of a file ------------------------------------------------------------------------


def drawn(size_bytes: int, chance: random.Random) -> FileState:
    file = file_of(size_bytes)
    file.blocks.flags = bytearray(chance.choices(range(4), k=-(-size_bytes // BLOCK_BYTES)))
    return file


@pytest.mark.parametrize("seed", range(20))
def test_the_blocks_of_a_file_are_no_more_than_it(seed: int) -> None:
    chance = random.Random(seed)
    size_bytes = chance.randrange(1, 40 * BLOCK_BYTES)
    file = drawn(size_bytes, chance)
    file.blocks.flags = bytearray(max(1, one) for one in file.blocks.flags)
    assert sum(file.blocks.counts()) == size_bytes
    middle = chance.randrange(len(file.blocks.flags) + 1)
    parts = [file.blocks.counts(0, middle), file.blocks.counts(middle, len(file.blocks.flags))]
    assert tuple(map(sum, zip(*parts, strict=True))) == file.blocks.counts()


def test_books_tell_where_somebody_has_come_to_and_from_where() -> None:
    file = drawn(64 * BLOCK_BYTES, random.Random(1))
    file.blocks.flags = bytearray(64)
    file.blocks.mark_prefetched(8 * BLOCK_BYTES, 40 * BLOCK_BYTES)

    mine = IntervalSet()

    def comes(first: int, last: int) -> None:
        span = first * BLOCK_BYTES, last * BLOCK_BYTES
        file.blocks.tell_used(*span, *file.under_way, mine=mine)
        file.blocks.mark_used(*span)
        mine.add(*span)

    comes(0, 4)  # by itself
    comes(0, 4)  # which is no news
    comes(16, 17)
    comes(17, 20)
    file.blocks.used.looked(3_000_000)
    comes(12, 16)
    file.blocks.used.looked(1_000_000)
    comes(30, 34)
    comes(36, 37)
    used = file.blocks.used
    assert (used.demand_runs, used.demand_blocks) == (1, 4)
    assert (used.runs, used.back, used.passed) == (3, (4, 1_000_000), 3)
    assert list(used.went_on.values()) == [(3, 3_000_000)]
    assert used.ahead_blocks == 13


def test_who_comes_to_what_lies_beside_another_readers_place_comes_from_elsewhere() -> None:
    """Of ranks that take turns what of a record lay behind another rank's was no miss that did not
    happen, and nothing was told of 2 s."""
    file = drawn(64 * BLOCK_BYTES, random.Random(1))
    file.blocks.flags = bytearray(64)
    file.blocks.mark_prefetched(0, 64 * BLOCK_BYTES)
    ranks = [IntervalSet() for _ in range(4)]
    for record in range(16):
        span, mine = (record * 2 * BLOCK_BYTES, (record + 1) * 2 * BLOCK_BYTES), ranks[record % 4]
        file.blocks.tell_used(*span, mine=mine)
        file.blocks.mark_used(*span)
        mine.add(*span)
    used = file.blocks.used
    assert (used.runs, used.ahead_blocks) == (16, 32)


@pytest.mark.parametrize("seed", range(20))
def test_stretches_that_lie_apart_are_those_of_three_blocks_and_more(seed: int) -> None:
    file = drawn(200 * BLOCK_BYTES, random.Random(seed))
    runs = "".join("u" if one & 2 else " " for one in file.blocks.flags).split()
    file.blocks.used.runs = file.blocks.used.demand_runs = 100
    assert file.blocks.stretches_used() == sum(len(run) >= 3 for run in runs)
    file.blocks.used.runs, file.blocks.used.demand_runs = 1, 1
    assert file.blocks.stretches_used() == 2


def test_what_was_asked_for_again_is_no_less_brought() -> None:
    """Of slices read backward two thirds of what we had read counted as read by others."""
    file = file_of(8 * BLOCK_BYTES)
    file.blocks.mark_prefetched(0, 4 * BLOCK_BYTES)
    file.account.came(3 * BLOCK_BYTES, BLOCK_BYTES)
    assert reads_of(file).brought == 0.75
    for _ in range(9):
        file.account.came(0, 4 * BLOCK_BYTES)
    assert reads_of(file).brought == 0.75
    file.account.came(4 * BLOCK_BYTES, 0)  # it had left the memory
    assert reads_of(file).brought == 1.0


def test_own_is_what_was_not_read_ahead_and_is_not_under_way() -> None:
    file = file_of(8 * BLOCK_BYTES)
    file.blocks.mark_prefetched(2 * BLOCK_BYTES, 3 * BLOCK_BYTES)
    file.blocks.mark_used(0, 3 * BLOCK_BYTES)
    file.cache.in_flight.add(6 * BLOCK_BYTES, 7 * BLOCK_BYTES)
    own = [
        file.blocks.is_own(at * BLOCK_BYTES, (at + 1) * BLOCK_BYTES, *file.under_way)
        for at in range(8)
    ]
    assert own == [True, True, False, True, True, True, False, True]
    assert not file.blocks.is_own(BLOCK_BYTES, 3 * BLOCK_BYTES)


def test_what_the_first_look_at_a_mapping_finds_is_none_of_its_own_waits() -> None:
    """The service comes up a tenth of a second after its job; what was read by then counted as
    waited for meanwhile, and a quarter too much was told of who goes on in order."""
    file = file_of(64 * BLOCK_BYTES)
    region: Any = SimpleNamespace(
        file=file, scan=ScanState(), mode=ServingMode.PAGE_TABLES
    )  # fmt: skip
    pagetables.note_used(region, [(0, 9 * BLOCK_BYTES)])
    assert (file.blocks.used.demand_runs, file.blocks.used.demand_blocks) == (0, 0)
    region.scan.last_end_ns = 5
    region.scan.mapped.add(0, 9 * BLOCK_BYTES)
    pagetables.note_used(region, [(9 * BLOCK_BYTES, BLOCK_BYTES), (40 * BLOCK_BYTES, BLOCK_BYTES)])
    assert (file.blocks.used.demand_runs, file.blocks.used.demand_blocks) == (1, 2)


def test_of_a_request_that_is_done_in_part_the_rest_is_nobodys_own_miss() -> None:
    """Who is as fast as the link comes to what is there of a request of 1 MiB, and goes on into
    what is under way of it: every tenth block counted as read by himself."""
    file = drawn(8 * BLOCK_BYTES, random.Random(1))
    file.blocks.flags = bytearray(8)
    file.blocks.mark_prefetched(0, 2 * BLOCK_BYTES)
    file.cache.in_flight.add(2 * BLOCK_BYTES + 4096, 5 * BLOCK_BYTES)
    file.blocks.tell_used(0, 7 * BLOCK_BYTES, *file.under_way, mine=IntervalSet())
    assert (file.blocks.used.ahead_blocks, file.blocks.used.demand_blocks) == (5, 2)


def test_what_is_under_way_when_somebody_comes_is_not_his_own_miss() -> None:
    file = drawn(8 * BLOCK_BYTES, random.Random(1))
    file.blocks.flags = bytearray(8)
    file.cache.in_flight.add(0, 4 * BLOCK_BYTES)
    file.blocks.tell_used(0, BLOCK_BYTES, *file.under_way, mine=IntervalSet())
    file.blocks.tell_used(6 * BLOCK_BYTES, 7 * BLOCK_BYTES, *file.under_way, mine=IntervalSet())
    assert (file.blocks.used.ahead_blocks, file.blocks.used.demand_blocks) == (1, 1)


def test_every_field_is_a_key_of_the_summary() -> None:
    from uffdprefetch.protocol.summary import Totals

    assert set(Gained.__annotations__) <= set(Totals.__annotations__)
