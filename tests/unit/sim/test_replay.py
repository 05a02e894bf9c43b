# SPDX-License-Identifier: Apache-2.0
"""sim/replay: closed forms, what memory keeps, what a trace wants, and the command."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import synthetic
from conftest import warnings_fail
from replayed_jobs import MIB, PAGE, SLOW, demand, run, straight, stream
from traces import without_index, written

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.cli import main
from uffdprefetch.predict import window
from uffdprefetch.report import replay as report
from uffdprefetch.sim.replay.auto import Auto, PoolAuto
from uffdprefetch.sim.replay.choices import Predicted, choices, command_line, predict
from uffdprefetch.sim.replay.demand import Demand, again, demand_of
from uffdprefetch.sim.replay.engine import Resident
from uffdprefetch.sim.replay.eviction import (
    CHUNK_PAGES,
    BeladyEviction,
    CyclicEviction,
    EvictionPolicy,
    LruEviction,
)
from uffdprefetch.sim.replay.link import StorageModel, StorageQueue
from uffdprefetch.sim.replay.policies import (
    InPool,
    Plain,
    Planned,
    PoolPlanned,
    ReplayWindows,
    measured,
)

pytestmark = warnings_fail

# ---- storage ------------------------------------------------------------------------------------


def test_transfers_queue_and_latencies_overlap() -> None:
    link = StorageQueue(StorageModel(1e6, 0.5))
    assert link.request(1_000_000, 10.0) == pytest.approx(11.5)
    assert link.request(1_000_000, 10.0) == pytest.approx(12.5)
    assert link.backlog(10.5) == pytest.approx(1.5) and link.backlog(99) == 0
    assert link.request(500_000, 20.0) == pytest.approx(21.0)
    assert (link.requests, link.read_bytes) == (3, 2_500_000)


def test_storage_is_found_from_calibrated_rates() -> None:
    made = StorageModel(300e6, 1e-3)
    rates = {
        request: {
            threads: min(300e6, threads * request / (1e-3 + request / 300e6))
            for threads in (1, 8, 64)
        }
        for request in (4096, 65536, MIB)
    }
    found = StorageModel.fitted(rates)
    assert found.bandwidth == pytest.approx(made.bandwidth)
    assert found.latency == pytest.approx(made.latency)
    with pytest.raises(ValueError, match="single thread"):
        StorageModel.fitted({4096: {8: 1e6}})


# ---- closed forms -------------------------------------------------------------------------------


def test_a_known_order_takes_the_transfer_or_the_computing() -> None:
    size = 4096 * PAGE
    reading = run(straight(), Planned())
    assert reading.seconds == pytest.approx(size / 100e6, rel=0.03)
    assert reading.read_bytes == reading.touched_bytes == size
    computing = run(straight(think=0.01), Planned())  # 256 accesses
    assert computing.seconds == pytest.approx(2.56, rel=0.01)
    assert computing.hits > 0.99 and computing.misses == 1


def test_plain_mmap_reads_around_and_one_window_ahead() -> None:
    # 128 KiB around the first miss, of which half lies before; then 128 KiB at each mark.
    result = run(straight(), Plain())
    assert result.read_bytes == 4096 * PAGE
    assert result.requests == pytest.approx(4096 / 32, abs=2)
    # Each window is asked for when the one before is begun: latency is hidden by no more than that.
    each = 131072 / 100e6 + 1e-3
    assert 128 * 131072 / 100e6 <= result.seconds <= 128 * each * 1.05


def test_random_reads_miss_one_by_one() -> None:
    order = np.random.default_rng(1).permutation(4096 // 64)[:40] * 64
    result = run(demand(stream(order.tolist(), 1, 0.0)), Plain())
    assert result.misses == 40
    assert result.seconds == pytest.approx(40 * (131072 / 100e6 + 1e-3), rel=0.02)
    assert result.stall_seconds == pytest.approx(result.seconds)


def test_windows_follow_a_stream_and_nothing_else() -> None:
    plain, windows = run(straight(), Plain()), run(straight(), ReplayWindows(4 * MIB, MIB))
    # of so near a storage two of the kernel's windows under way are enough
    assert windows.seconds < 1.01 * plain.seconds and windows.misses <= plain.misses
    assert windows.requests < plain.requests / 4
    assert windows.seconds < 4096 * PAGE / 100e6 * 1.1
    assert windows.read_bytes == 4096 * PAGE
    order = (np.random.default_rng(2).permutation(64) * 4096).tolist()
    jumps = demand(stream(order), pages=64 * 4096)
    assert run(jumps, ReplayWindows(4 * MIB)) == run(jumps, Plain())


def test_a_stream_that_is_seen_at_few_places_waits_for_its_next_window() -> None:
    # With 5 ms a request the kernel's readahead, one window ahead, is far too slow.
    wanted, storage = straight(16384, think=0.0008), StorageModel(100e6, 5e-3)
    results = [
        run(wanted, ReplayWindows(4 * MIB, distance), None, storage)
        for distance in (MIB, 4 * MIB, 16 * MIB)
    ]
    # Where a window ends before the next is asked for, the kernel's own readahead goes on.
    stalls = [result.stall_seconds for result in results]
    assert stalls[0] < stalls[1] < stalls[2]


def test_a_known_order_is_read_as_far_ahead_as_its_reader_is_quick() -> None:
    seen = measured(StorageModel(1e9, 1e-3))
    for think in (0.01, 0.001):
        policy = Planned()
        run(straight(1 << 16, think), policy, None, StorageModel(1e9, 1e-3))
        expected = window.ahead_at_rate(65536 / think, seen)
        assert policy.lookahead == [pytest.approx(expected, rel=0.05)]
    assert expected > window.ahead_at_rate(65536 / 0.01, seen)
    policy = Planned(allowed_bytes=3 * MIB)
    run(straight(1 << 16, 0.001), policy, None, StorageModel(1e9, 1e-3))
    assert policy.lookahead == [3 * MIB]


def test_a_window_is_read_in_requests() -> None:
    wanted = straight(16384, 0.001)
    many, few = (
        run(wanted, ReplayWindows(8 * MIB, MIB, request_bytes=size)).requests
        for size in (256 << 10, 2 * MIB)
    )
    # But for the beginning, which the kernel reads.
    assert many == pytest.approx(16384 * PAGE / (256 << 10), abs=20)
    assert few == pytest.approx(16384 * PAGE / (2 * MIB), abs=20)


def test_a_touch_in_a_pool_maps_a_quarter_of_what_was_come_over_up_to_what_is_there() -> None:
    wanted = straight(4096)
    policy, resident = InPool(128 * MIB), Resident(wanted)  # 2 MiB at once
    policy.begin(wanted, SLOW, resident)
    ready = resident.ready[0]
    ready[:2048], ready[2048:] = 1.0, 3.0
    touches = policy._answered(0, 0, 0, 2048, 2.0)
    assert touches[0] == (0, 0)
    for (page, _), (after, passed) in pairwise(touches):
        assert after - passed == page
        assert after - page == max(16, (page + 16) // 4 // 16 * 16) or after > 2032
    assert policy._answered(0, 0, 0, 2048, 2.0) == []
    ((page, _),) = policy._answered(0, 0, 2048, 2052, 2.0)
    assert page == 2048, "it is just coming"
    ((page, _),) = policy._answered(0, 0, 2052, 2070, 4.0)
    assert page == 2064
    assert not policy.mapped[0][0][2064 + 528 :].any()
    policy.on_evict(0, 16, 32)
    assert policy._answered(0, 0, 0, 48, 4.0) == [(16, 0)]


@pytest.mark.parametrize(
    ("budget", "pages", "missed"),
    [
        (MIB, CHUNK_PAGES, 64),
        (MIB, 2 * CHUNK_PAGES, 86),
        (128 * MIB, CHUNK_PAGES, 64),
        (128 * MIB, 2 * CHUNK_PAGES, 64),
    ],
)
def test_a_miss_at_a_new_place_in_a_pool_brings_two_chunks_where_most_went_on_or_all_fit(
    budget: int, pages: int, missed: int
) -> None:
    """After sixteen records of two chunks one of eight is asked again."""
    places = [(record * 37) % 64 * 8 * CHUNK_PAGES for record in range(64)]
    wanted = demand(stream(places, pages), pages=64 * 8 * CHUNK_PAGES)
    policy, resident = InPool(budget), Resident(wanted)
    policy.begin(wanted, SLOW, resident)
    misses = 0
    for access, place in enumerate(places):
        at = place
        while at < place + pages:
            _, first, end = policy.on_miss(0, access, 0, at, 0.0)
            assert first == at
            at, misses = end, misses + 1
    assert misses == missed


def test_ranks_share_what_is_read() -> None:
    both = demand(
        stream(list(range(0, 4096, 32)), 16), stream(list(range(16, 4096, 32)), 16, rank=1)
    )
    for policy in (Plain(), Auto(), ReplayWindows(4 * MIB), Planned()):
        assert run(both, policy).read_bytes == 4096 * PAGE


def test_nothing_is_read_ahead_before_a_thread_reads() -> None:
    late = demand(stream(list(range(0, 4096, 16)), 16))
    shifted = replace(late.streams[0], think_ns=np.r_[5_000_000_000, late.streams[0].think_ns[1:]])
    result = run(replace(late, streams=[shifted]), Planned())
    assert result.seconds == pytest.approx(5 + 4096 * PAGE / 100e6, rel=0.03)


# ---- memory -------------------------------------------------------------------------------------


def epochs(count: int, think: float = 0.0) -> Demand:
    whole = straight(think=think)
    return replace(whole, streams=[again(whole.streams[0], count)])


def test_half_of_memory_keeps_half_of_a_scan_but_not_by_lru() -> None:
    half = 2048 * PAGE
    wanted = epochs(4)
    size = 4096 * PAGE
    lru = run(wanted, PoolAuto(half), LruEviction(wanted, half))
    cyclic = run(wanted, PoolAuto(half), CyclicEviction(wanted, half))
    belady = run(wanted, PoolPlanned(64 * MIB, MIB), BeladyEviction(wanted, half))
    assert lru.read_bytes == 4 * size
    for result in (cyclic, belady):
        assert size + 3 * size / 2 <= result.read_bytes <= 1.1 * (size + 3 * size / 2)
        assert result.seconds < 0.8 * lru.seconds  # it reads 0.62 as much
    assert run(wanted, PoolAuto(64 * MIB)).read_bytes == size


@pytest.mark.parametrize("kind", [LruEviction, CyclicEviction, BeladyEviction])
def test_memory_is_never_more_than_it_is(kind: type[EvictionPolicy]) -> None:
    random = np.random.default_rng(3)
    order = (random.integers(0, 256, 600) * 16).tolist()
    wanted = demand(stream(order, 16))
    eviction = kind(wanted, 40 * CHUNK_PAGES * PAGE)
    most = []
    insert = eviction.on_insert
    eviction.on_insert = lambda c: (insert(c), most.append(len(eviction.resident)))[0]  # type: ignore
    run(wanted, PoolAuto(64 * MIB), eviction)
    assert max(most) == 40


def test_belady_misses_no_more_than_lru() -> None:
    random = np.random.default_rng(4)
    for _ in range(5):
        wanted = demand(stream((random.integers(0, 128, 500) * 16).tolist(), 16), pages=2048)
        results = {
            kind: run(wanted, PoolAuto(64 * MIB), kind(wanted, 30 * CHUNK_PAGES * PAGE))
            for kind in (LruEviction, BeladyEviction)
        }
        assert results[BeladyEviction].misses <= results[LruEviction].misses


def misses_of(kind: type[EvictionPolicy], order: list[int], room: int) -> int:
    """Of the textbook's LRU or MIN."""
    held: list[int] = []  # the one that was used last at the end
    misses = 0
    for i, chunk in enumerate(order):
        if chunk in held:
            held.remove(chunk)
        else:
            misses += 1
            if len(held) == room:
                rest = order[i:]
                away = [rest.index(one) if one in rest else len(order) for one in held]
                held.pop(0 if kind is LruEviction else away.index(max(away)))
        held.append(chunk)
    return misses


@pytest.mark.parametrize("kind", [LruEviction, BeladyEviction])
@pytest.mark.parametrize("seed", range(4))
def test_memory_misses_what_the_textbook_says(kind: type[EvictionPolicy], seed: int) -> None:
    # Even ones only: no miss goes on where the last one ended and brings more.
    order = [int(each) for each in np.random.default_rng(seed).integers(0, 60, 400) * 2]
    wanted = demand(stream([chunk * 16 for chunk in order], 16), pages=2048)
    room = 20 * CHUNK_PAGES * PAGE
    result = run(wanted, InPool(room), kind(wanted, room))
    assert result.misses == misses_of(kind, order, 20)
    assert result.read_bytes == result.misses * CHUNK_PAGES * PAGE


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [Plain, Auto, lambda: PoolAuto(64 * MIB), lambda: PoolPlanned(64 * MIB, MIB)]
)
@pytest.mark.parametrize("kind", [LruEviction, CyclicEviction, BeladyEviction])
@pytest.mark.parametrize("chunks", [1, 2, 16])
def test_more_threads_than_memory_come_to_their_end(
    make: type[Plain], kind: type[EvictionPolicy], chunks: int
) -> None:
    # Between a page's arrival and its thread's turn others push it out again.
    random = np.random.default_rng(6)
    many = [stream((random.integers(0, 256, 60) * 16).tolist(), 16, rank=r) for r in range(20)]
    wanted = demand(*many)
    result = run(wanted, make(), kind(wanted, chunks * CHUNK_PAGES * PAGE))
    assert np.isfinite(result.seconds) and result.touched_bytes == 20 * 60 * 16 * PAGE
    assert 0 <= result.hits < 1


@pytest.mark.parametrize(
    "make", [Plain, Auto, lambda: ReplayWindows(8 * MIB), lambda: Planned(8 * MIB)]
)
def test_nothing_is_read_faster_than_the_link_delivers(make: type[Plain]) -> None:
    random = np.random.default_rng(7)
    many = [stream((random.integers(0, 256, 80) * 16).tolist(), 16, rank=r) for r in range(8)]
    for wanted in (demand(*many), straight(think=0.001)):
        eviction = LruEviction(wanted, 4 * MIB)
        result = run(wanted, make(), eviction)
        # What was asked for at the end may still be on its way.
        assert result.read_bytes <= result.seconds * 100e6 + 2 * MIB


@pytest.mark.parametrize(
    "make", [Plain, Auto, lambda: ReplayWindows(4 * MIB), lambda: Planned(8 * MIB)]
)
def test_faster_storage_is_never_slower(make: type[Plain]) -> None:
    random = np.random.default_rng(5)
    order = (random.permutation(256) * 16).tolist()
    for wanted in (straight(think=0.001), demand(stream(order, 12, 0.001))):
        seconds = [
            run(wanted, make(), None, StorageModel(rate, late)).seconds
            for rate, late in ((50e6, 4e-3), (100e6, 2e-3), (400e6, 1e-3), (4e9, 1e-5))
        ]
        assert seconds == sorted(seconds, reverse=True)


# ---- what a trace wants -------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", synthetic.PATTERNS)
def test_a_trace_wants_the_records_that_were_read(pattern: str) -> None:
    trace = synthetic.make(pattern, ranks=2, records=200, epochs=1)
    found = demand_of(trace, open_index=without_index)
    assert {s.rank for s in found.streams} == {0, 1}
    sizes = np.random.default_rng(0).integers(3, 48, 200) * PAGE
    # Without an index what is touched behind a record's last fault is not known.
    assert sizes.sum() * 0.5 <= found.wanted_bytes <= (sizes.sum() + 64 * PAGE)
    for one in found.streams:
        assert (one.end > one.first).all() and (one.think_ns >= 0).all()
        total = int(one.think_ns.sum()) + one.tail_ns
        assert total <= found.seconds * 1e9 * (1 + 1e-9)
    assert 0 < found.stall_seconds < found.seconds


def test_recorded_epochs_can_be_gone_through_again() -> None:
    one = stream([0, 16, 32], 16, 0.5)
    twice = again(one, 2)
    assert twice.first.tolist() == [0, 16, 32, 0, 16, 32] and len(twice) == 6
    assert twice.think_ns.tolist() == [int(5e8)] * 6 and again(one, 1) is one


def test_a_file_that_grew_while_it_was_read_is_as_large_as_what_was_read() -> None:
    trace = synthetic.make("contiguous", ranks=2, records=50, epochs=1)
    trace.files = {number: replace(file, size_bytes=PAGE) for number, file in trace.files.items()}
    found = demand_of(trace, open_index=without_index)
    assert found.wanted_bytes > PAGE and run(found, Plain()).touched_bytes > PAGE


def test_a_trace_without_accesses_is_one_line() -> None:
    trace = synthetic.make("skip", ranks=1, records=10)
    trace.events = trace.events[:0]
    with pytest.raises(UffdPrefetchError, match="nothing to replay"):
        demand_of(trace, open_index=without_index)


# ---- choices and the command --------------------------------------------------------------------


def test_choices_are_commands_that_wrap_takes() -> None:
    every = choices([16 * MIB], [8 * MIB], None, [512 * MIB], 1 << 30)
    lines = {each.name: command_line(each, ["python", "a b.py"]) for each in every}
    assert lines["plain"] == "python 'a b.py'"
    assert lines["windows of 16MiB"] == (
        "uffdprefetch wrap --policy fixed --size 16MiB --distance 8MiB -- python 'a b.py'"
    )
    assert lines["wrap"] == "uffdprefetch wrap -- python 'a b.py'"
    assert lines["pool of 512MiB"] == (
        "uffdprefetch wrap --engine pool --budget 512MiB -- python 'a b.py'"
    )
    assert lines["pool of 512MiB, known order"] == (
        "uffdprefetch wrap --engine pool --budget 512MiB --plan PLAN -- python 'a b.py'"
    )
    outcomes = list(predict(straight(), SLOW, every))
    assert [each.choice.name for each in outcomes] == list(lines)


@pytest.mark.parametrize(
    ("seconds", "best", "rest"),
    [
        # plain, wrap, windows, known order, pool, pool with one
        ((10, 5, 5, 4, 6, 3), "pool of 1MiB, known order", "wrap"),
        ((10, 5, 4.7, 3.1, 6, 3), "known order", "windows of 1MiB"),
        ((10, 5, 4.8, 4.79, 4.78, 4.77), "wrap", "wrap"),
        ((5.2, 5.1, 5, 5, 5, 5), "plain", "plain"),
    ],
)
def test_of_what_is_as_quick_the_simplest_is_best(
    seconds: tuple[float, ...], best: str, rest: str
) -> None:
    every = choices([MIB], [8 * MIB], None, [MIB], 1 << 30)
    outcome = run(straight(64), Plain())
    predicted = [
        Predicted(choice, replace(outcome, seconds=took))
        for choice, took in zip(every, seconds, strict=True)
    ]
    lines = {choice.name: command_line(choice, ["job", "a b"]) for choice in every}
    assert report.best(predicted, straight(), needs_order=True) == lines[best]
    assert report.best(predicted, straight(), needs_order=False) == lines[rest]
    ordered = [one for one in predicted if one.choice.needs_order]
    assert report.best(ordered, straight(), needs_order=False) is None


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A trace file of two ranks that go through a file that is not there any more."""
    trace = synthetic.make("contiguous", ranks=2, records=300, epochs=1)
    return written(trace, tmp_path / "t.uptrace")


def test_the_command_ranks_choices_and_prints_the_best(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--replay", str(recorded), "--bandwidth", "100MB/s", "--latency", "1ms"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "uffdprefetch.replay/1"
    seconds = [row["seconds"] for row in found["choices"]]
    assert seconds == sorted(seconds) and len(seconds) == 10
    # Two contiguous ranks on storage of 1 ms: the kernel's readahead is not the quickest.
    assert found["choices"][0]["name"] != "plain"
    assert main(words) == 0
    text = capsys.readouterr().out
    assert f"best: {found['best']}\n" in text and "plain" in text
    assert found["best"] == found["best_without_order"]
    assert found["best"].startswith("uffdprefetch wrap")
    assert main([*words, "--only", "known order"]) == 0
    text = capsys.readouterr().out
    assert "--plan PLAN" in text and "PLAN says the order" in text
    picture = recorded.with_suffix(".png")
    assert (
        main([*words, "--distance", "1MiB,8MiB", "--only", "windows", "--png", str(picture)]) == 0
    )
    assert "windows of 50MiB, seen each 1MiB" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*words, "--only", "pool", "--budget", "8MiB,16MiB", "--size", "1MiB"]) == 0
    text = capsys.readouterr().out
    assert "pool of 8MiB " in text and "plain" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replay", "{trace}"], "of which storage?"),
        (["--replay", "{trace}", "--bandwidth", "1MB/s"], "of which storage?"),
        (["--replay", "{trace}", "paper5-1"], "has no [measured.file_system] of calibrate's"),
        (["--replay", "{trace}", "paper5-1", "--latency", "1ms"], "not both"),
        (["--replay", "/nonexistent", "--bandwidth", "1MB/s", "--latency", "1ms"], "cannot read"),
        (["--replay", "{trace}", "--bandwidth", "0MB/s", "--latency", "1ms"], "more than none"),
        (
            ["--replay", "{trace}", "--bandwidth", "1MB/s", "--latency", "1ms", "--size", "1"],
            "--size 1: at least 64KiB",
        ),
        (
            ["--replay", "{trace}", "--bandwidth", "1MB/s", "--latency", "1ms", "--epochs", "0"],
            "--epochs 0: from 1 on",
        ),
        (
            ["--replay", "{trace}", "--bandwidth", "1MB/s", "--latency", "1ms", "--only", "x"],
            "--only x: none of plain",
        ),
        (
            ["--replay", "{trace}", "--bandwidth", "1MB/s", "--latency", "1ms", "--memory", ""],
            "--memory '': nothing is given",
        ),
        (
            ["--replay", "{trace}", "--bandwidth", "1MB/s", "--latency", "1ms", "--budget", ""],
            "--budget '': nothing is given",
        ),
        (
            ["--replay", "{trace}", "--bandwidth", "1MB/s", "--latency", "1ms", "--size", "1MiB,"],
            "not a size: ''",
        ),
        (
            [
                "--replay",
                "{trace}",
                "--bandwidth",
                "1MB/s",
                "--latency",
                "1ms",
                "--only",
                "plain,staging",
            ],
            "--only staging: none of plain, wrap",
        ),
        (["--replay", "{pipe}", "--bandwidth", "1MB/s", "--latency", "1ms"], "is a pipe: give a"),
        (["--replay", "{trace}", "{pipe}"], "is a pipe: give a file"),
        (["--replay", "{folder}", "--bandwidth", "1MB/s", "--latency", "1ms"], "Is a directory"),
        (
            [
                "--replay",
                "{trace}",
                "--bandwidth",
                "1MB/s",
                "--latency",
                "1ms",
                "--png",
                "{folder}/no/x.png",
            ],
            "/no/x.png: No such file or directory",
        ),
        (
            [
                "--replay",
                "{trace}",
                "--bandwidth",
                "1MB/s",
                "--latency",
                "1ms",
                "--memory",
                "1GiB,2GiB",
            ],
            "--memory 1GiB,2GiB: one size",
        ),
        (["paper5-1", "--budget", "1GiB"], "--budget belongs to --replay"),
    ],
)
def test_what_cannot_be_is_one_line(
    recorded: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    pipe = recorded.parent / "pipe"
    os.mkfifo(pipe)
    filled = [word.format(trace=recorded, pipe=pipe, folder=recorded.parent) for word in words]
    assert main(["simulate", *filled]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_more_than_memory_holds_is_one_line(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--replay", str(recorded), "--bandwidth", "1MB/s", "--latency", "1ms"]
    assert main([*words, "--epochs", str(10**12)]) == 1  # numpy: more than an address space
    assert main([*words, "--epochs", str(10**25)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "uffdprefetch: simulate: needs more memory than there is (epochs: "
        "1,000,000,000,000, windows up to 128 MiB)"
    )
    assert len(lines) == 2
