# SPDX-License-Identifier: Apache-2.0
"""What a run gained: the states of its readers' threads, and when something can be said at all."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import wait_until

from uffdprefetch.base.clock import Clock
from uffdprefetch.predict.gain import FileReads, Watched
from uffdprefetch.predict.window import Storage
from uffdprefetch.service import waits
from uffdprefetch.service.gained import MISSES_LEAST, OWN_SECONDS, Gained, gained
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
from uffdprefetch.state.files import BLOCK_BYTES, FileState

MIB = 1 << 20
READS = [FileReads(1000, 128 << 10, 1000)]
STORAGE = Storage(300e6, 1e-3)


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
    reader = SimpleNamespace(regions={1: None}, seen_ns=0)
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
    reader = SimpleNamespace(regions={1: None}, seen_ns=0)
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


# ---- what can be said ---------------------------------------------------------------------------


def say(used: int | None, memory: int = 0, misses: int = 0, wall: float = 1.0,
        storage: Storage = STORAGE, before: int = 0) -> Gained:  # fmt: skip
    return gained(
        READS if used else [], used, memory, misses, before, Watched(wall, wall, 0.0), storage
    )


def test_what_was_read_before_anybody_looked_was_not_in_memory() -> None:
    assert say(0, memory=128 * MIB).gain == "in-memory"
    assert say(0, memory=128 * MIB, before=4 * MIB).gain == "in-memory"
    found = say(0, memory=128 * MIB, before=100 * MIB)
    assert (found.gain, found.gained_seconds) == ("just-read", None)
    assert say(128 * MIB, before=100 * MIB).gain == "saved"


def test_what_is_saved_is_less_what_wrap_takes_itself() -> None:
    found = say(128 * MIB)
    assert (found.gain, found.spared_requests) == ("saved", 1000)
    took = 1e-3 + (128 << 10) / 300e6
    assert found.gained_seconds == pytest.approx(1000 * took - OWN_SECONDS, abs=1e-3)
    assert say(MIB, wall=99.0).gained_seconds is not None


def waiting(share: float, requests: int = 1000) -> Gained:
    """Readers that do nothing but wait, in order, this part of what they would have without us."""
    waited = share * requests * (1e-3 + (128 << 10) / 300e6) / 2
    watched = Watched(waited, waited, waited)
    reads = [FileReads(requests, 128 << 10, 0)]
    return gained(reads, requests << 17, 0, 0, 0, watched, Storage(300e6, 1e-3))


def test_a_gain_that_is_less_than_the_error_of_two_long_waits_is_not_known() -> None:
    assert waiting(0.1, requests=4000).gained_seconds == pytest.approx(2.4, abs=0.2)
    for share in (0.9, 1.0, 1.2):  # of nearly three seconds
        found = waiting(share, requests=4000)
        assert (found.gain, found.gained_seconds) == ("unknown", None)
    assert waiting(1.0, requests=400).gained_seconds == 0.0  # both so short that it was little


@pytest.mark.parametrize(
    ("found", "gain", "seconds"),
    [
        (say(0), "nothing-read", 0.0),
        (say(0, memory=64 * MIB), "in-memory", 0.0),
        (say(MIB, memory=64 * MIB, misses=2), "in-memory", 0.0),
        (say(0, memory=64 * MIB, misses=400), "not-used", 0.0),
        (say(None, memory=64 * MIB), "unknown", None),
        (say(64 * MIB, storage=Storage(0.0, 0.0)), "unknown", None),
        (say(64 * MIB, wall=0.0), "unknown", None),
    ],
)
def test_what_is_not_known_is_not_said(found: Gained, gain: str, seconds: float | None) -> None:
    assert (found.gain, found.gained_seconds) == (gain, seconds)


def test_a_request_takes_no_longer_than_misses_have_waited() -> None:
    slow, watched = Storage(300e6, 50e-3), Watched(1.0, 1.0, MISSES_LEAST * 1e-3)
    of_few = gained(READS, 128 * MIB, 0, MISSES_LEAST - 1, 0, watched, slow)
    found = gained(READS, 128 * MIB, 0, MISSES_LEAST, 0, watched, slow)
    assert found.gained_seconds is not None and of_few.gained_seconds is not None
    assert found.gained_seconds < 2.0 < 40.0 < of_few.gained_seconds


# ---- pieces of a file ---------------------------------------------------------------------------


def drawn(size_bytes: int, chance: random.Random) -> FileState:
    file = FileState((0, 0, 0, 0), "", -1, -1, -1, size_bytes, "")
    file.blocks = bytearray(chance.choices(range(4), k=-(-size_bytes // BLOCK_BYTES)))
    return file


@pytest.mark.parametrize("seed", range(20))
def test_pieces_with_something_used_are_counted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr("uffdprefetch.state.files.COUNTED_BLOCKS", chance.choice([8, 1 << 20]))
    file = drawn(chance.randrange(1, 300 * BLOCK_BYTES), chance)
    for piece_bytes in (4096, 65536, 128 << 10, MIB, 64 * MIB):
        if piece_bytes < BLOCK_BYTES:
            expected = file.blocks.count(3) * (BLOCK_BYTES // piece_bytes)
        else:
            step = piece_bytes // BLOCK_BYTES
            starts = range(0, len(file.blocks), step)
            expected = sum(3 in file.blocks[at : at + step] for at in starts)
        assert file.used_pieces(piece_bytes) == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_blocks_of_a_file_are_no_more_than_it(seed: int) -> None:
    chance = random.Random(seed)
    size_bytes = chance.randrange(1, 40 * BLOCK_BYTES)
    file = drawn(size_bytes, chance)
    file.blocks = bytearray(max(1, one) for one in file.blocks)
    assert sum(file.block_counts()) == size_bytes
    middle = chance.randrange(len(file.blocks) + 1)
    parts = [file.block_counts(0, middle), file.block_counts(middle, len(file.blocks))]
    assert tuple(map(sum, zip(*parts, strict=True))) == file.block_counts()


def test_every_field_is_a_key_of_the_summary() -> None:
    from uffdprefetch.protocol.summary import Totals

    assert {field.name for field in dataclasses.fields(Gained)} <= set(Totals.__annotations__)
