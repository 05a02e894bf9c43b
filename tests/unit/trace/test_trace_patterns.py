# SPDX-License-Identifier: Apache-2.0
"""Patterns, epochs, iterations and stalls as pure functions: page numbers in, names out."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import warnings_fail

from uffdprefetch.base.ranges import union
from uffdprefetch.trace.analyse.epochs import epochs
from uffdprefetch.trace.analyse.iterations import starts_of
from uffdprefetch.trace.analyse.patterns import combine, describe
from uffdprefetch.trace.analyse.pieces import Pieces
from uffdprefetch.trace.analyse.runs import AccessStream, below_resolution, runs_of
from uffdprefetch.trace.analyse.stall import stalls
from uffdprefetch.trace.analyse.streams import StreamPattern, classify
from uffdprefetch.trace.analyse.strides import common_divisor
from uffdprefetch.trace.file.events import EVENT, Kind

pytestmark = warnings_fail

RNG = np.random.default_rng(7)


def pages(*page: int | np.ndarray, window: int = 1) -> AccessStream:
    """Accesses that each map ``window`` pages (a multiple of it), the page being exact."""
    at = np.concatenate([np.atleast_1d(np.asarray(p, np.int64)) for p in page])
    low = at // window * window
    return AccessStream(at, low, at + 1, low + window)


def runs(starts: np.ndarray, length: int) -> np.ndarray:
    """Each start, and the ``length`` - 1 pages after it."""
    return (np.asarray(starts)[:, None] + np.arange(length)).ravel()


# ---- names --------------------------------------------------------------------------------------


def test_each_where_the_last_ended_is_consecutive() -> None:
    pattern = describe(pages(np.arange(1000)))
    assert (pattern.name, pattern.direction, pattern.share) == ("consecutive", 1, 1.0)
    assert len(pattern.runs) == 1


def test_a_window_that_fault_around_mapped_is_no_gap() -> None:
    assert describe(pages(np.arange(0, 16000, 16), window=16)).name == "consecutive"


@pytest.mark.parametrize("n", [2, 3, 16])
def test_a_constant_step_is_a_stride(n: int) -> None:
    pattern = describe(pages(runs(np.arange(200) * 24 * n, 24)))
    assert (pattern.name, pattern.stride.pages) == ("strided", 24 * n)
    assert pattern.skipped == pytest.approx(1 - 1 / n, abs=0.01)


def test_a_step_that_is_no_whole_page_is_a_stride_of_its_mean() -> None:
    pattern = describe(pages(np.arange(400) * 300_000 // 4096))
    assert pattern.name == "strided"
    assert pattern.stride.pages == pytest.approx(300_000 / 4096, rel=1e-3)


def test_each_at_a_higher_offset_without_a_step_is_sequential() -> None:
    pattern = describe(pages(np.cumsum(RNG.geometric(0.05, 600) + 1)))
    assert (pattern.name, pattern.stride.pages, pattern.stride.records) == (
        "sequential",
        None,
        None,
    )


def test_records_of_varying_size_left_out_by_number_are_a_stride_in_records() -> None:
    ends = np.cumsum(RNG.integers(20, 60, 900))
    starts = np.r_[0, ends[:-1]]
    pattern = describe(
        pages(*[np.arange(a, b) for a, b in zip(starts[::3], ends[::3], strict=True)])
    )
    assert (pattern.name, pattern.stride.pages, pattern.stride.records) == ("strided", None, 3)


def test_records_left_out_by_chance_are_no_stride() -> None:
    ends = np.cumsum(RNG.integers(20, 60, 900))
    starts = np.r_[0, ends[:-1]]
    some = RNG.random(900) < 1 / 3
    pattern = describe(
        pages(*[np.arange(a, b) for a, b in zip(starts[some], ends[some], strict=True)])
    )
    assert (pattern.name, pattern.stride.records) == ("sequential", None)


@pytest.mark.parametrize("order", ["pages", "records"])
def test_downwards_is_backward(order: str) -> None:
    at = np.arange(2000)[::-1] if order == "pages" else runs(np.arange(80)[::-1] * 25, 25)
    pattern = describe(pages(at))
    assert (pattern.name, pattern.direction) == ("backward", -1)


def test_downwards_with_a_constant_gap_is_a_stride_downwards() -> None:
    pattern = describe(pages(runs(np.arange(80)[::-1] * 100, 25)))
    assert (pattern.name, pattern.direction, pattern.stride.pages) == ("strided", -1, 100)


@pytest.mark.parametrize("length", [1, 25, 400])
def test_a_shuffle_is_random_however_long_its_records(length: int) -> None:
    pattern = describe(pages(runs(RNG.permutation(60) * length, length)))
    assert (pattern.name, pattern.direction) == ("random", 0)


def test_too_few_accesses_have_no_name() -> None:
    assert describe(pages(5, 6, 7)).name == "unknown"
    assert describe(pages(np.zeros(0, np.int64))).name == "unknown"


def test_tree_pages_between_records_do_not_destroy_a_pattern() -> None:
    at = runs(np.arange(300) * 72, 24)
    visits = np.sort(RNG.choice(len(at), 12, replace=False))
    pattern = describe(pages(np.insert(at, visits, RNG.integers(0, 10**6, 12))))
    assert (pattern.name, pattern.stride.pages) == ("strided", 72)
    visits = np.sort(RNG.choice(5000, 8, replace=False))
    consecutive = np.insert(np.arange(5000), visits, RNG.integers(0, 10**6, 8))
    assert describe(pages(consecutive)).name == "consecutive"


def test_visits_between_short_records_are_taken_out() -> None:
    at = runs(np.arange(300) * 24, 8)
    visits = np.arange(10, len(at), 20)
    pattern = describe(pages(np.insert(at, visits, RNG.integers(0, 10**6, len(visits)))))
    assert (pattern.name, pattern.stride.pages) == ("strided", 24)


def test_what_a_visit_mapped_is_passed_without_a_fault_and_not_left_out() -> None:
    windows = np.arange(0, 640, 16)
    order = np.r_[0, 472, windows[(windows > 0) & (windows != 464)]]
    assert describe(pages(order, window=16)).name == "consecutive"


@pytest.mark.parametrize("step", [1, 48])
def test_streams_that_begin_again_keep_their_name(step: int) -> None:
    pattern = classify(pages(np.tile(runs(np.arange(50) * 24 * step, 24), 3)))
    assert pattern.name == ("consecutive" if step == 1 else "strided")
    assert pattern.direction == 1


def test_a_hole_of_one_page_is_bridged_only_where_checkpoints_lie() -> None:
    at = np.delete(np.arange(20_000), np.arange(100, 20_000, 40))
    assert describe(pages(at), slack=1).name == "consecutive"
    assert describe(pages(at), slack=0).name != "consecutive"


# ---- records ------------------------------------------------------------------------------------


def test_records_of_an_index_tell_a_stride_below_the_resolution() -> None:
    # 12 KiB records, each third one read: a fault per 64 KiB shows some of them
    touched = runs(np.arange(3000) * 9, 3)
    window = touched // 16
    first = touched[np.r_[True, window[1:] != window[:-1]]]
    stream = pages(first, window=16)
    pattern = describe(AccessStream(stream.page, stream.low, stream.sure, stream.high, first // 3))
    assert (pattern.name, pattern.stride.records, pattern.stride.indexed) == ("strided", 3, True)


def test_pages_without_a_record_are_left_out_of_the_pattern() -> None:
    at = runs(np.arange(200) * 48, 24)
    record = at // 24
    tree = np.arange(0, 400, 9)
    at, record = np.insert(at, tree, 10**6 - tree), np.insert(record, tree, -1)
    pattern = describe(AccessStream(at, at, at + 1, at + 1, record))
    assert (pattern.name, pattern.stride.records) == ("strided", 2)


def test_the_largest_divisor_survives_a_few_odd_steps() -> None:
    jumps = np.r_[np.full(60, 12), np.full(30, 36), np.full(5, 7)]
    assert common_divisor(jumps)[0] == 12


# ---- phases -------------------------------------------------------------------------------------


def test_a_change_of_phase_is_mixed_and_the_phases_are_named() -> None:
    pattern = describe(pages(np.arange(500), 500 + RNG.permutation(1500)[:500]))
    assert pattern.name == "mixed"
    assert [part.name for _, _, part in pattern.parts] == ["consecutive", "random"]
    assert abs(pattern.parts[0][1] - 500) <= 8


def test_a_phase_of_few_faults_counts_by_its_pages() -> None:
    # read in order, 500 pages are 32 faults; at random, 500 pages are 500
    order = pages(np.arange(0, 512, 16), window=16)
    random = pages(512 + RNG.permutation(8000)[:500], window=1)
    both = AccessStream(
        *(np.r_[getattr(order, c), getattr(random, c)] for c in ("page", "low", "sure", "high"))
    )
    assert describe(both).name == "mixed"


def test_another_stride_is_another_phase() -> None:
    pattern = describe(pages(runs(np.arange(100) * 48, 24), 4800 + runs(np.arange(100) * 192, 24)))
    assert pattern.name == "mixed"


@pytest.mark.parametrize("kind", ["consecutive", "strided", "random", "backward", "varying"])
def test_a_stream_of_one_kind_has_no_phases(kind: str) -> None:
    sizes = RNG.integers(3, 49, 600)
    ends = np.cumsum(sizes)
    at = {
        "consecutive": np.arange(9000),
        "strided": runs(np.arange(400) * 72, 24),
        "random": runs(RNG.permutation(400) * 24, 24),
        "backward": np.arange(9000)[::-1],
        "varying": np.concatenate(
            [np.arange(e - s, e) for s, e in zip(sizes, ends, strict=True)][::2]
        ),
    }[kind]
    assert describe(pages(at)).name != "mixed"


# ---- several processes --------------------------------------------------------------------------


def test_workers_that_each_read_in_order_are_not_random_together() -> None:
    found = [describe(pages(np.arange(w * 1000, (w + 1) * 1000))) for w in range(4)]
    pattern = combine(found)
    assert (pattern.name, pattern.accesses) == ("consecutive", 4000)


def test_a_small_odd_process_does_not_outvote_the_others() -> None:
    odd = describe(pages(RNG.permutation(40)))
    assert combine([odd, describe(pages(np.arange(4000)))]).name == "consecutive"


def test_strides_of_several_are_told_only_where_they_agree() -> None:
    a, b = (describe(pages(runs(np.arange(100) * step, 24))) for step in (48, 96))
    assert combine([a, a]).stride.pages == 48
    assert combine([a, b]).stride.pages is None
    assert combine([]).name == "unknown"


# ---- resolution ---------------------------------------------------------------------------------


def test_small_gaps_are_below_the_resolution_and_exact_accesses_never() -> None:
    at = np.arange(300) * 20
    assert below_resolution(runs_of(pages(at, window=16)))
    assert not below_resolution(runs_of(pages(at, window=1)))
    assert not below_resolution(runs_of(pages(np.arange(300) * 64, window=16)))


# ---- epochs -------------------------------------------------------------------------------------


def one_pid(page: np.ndarray) -> list[int]:
    return epochs(page, np.full(len(page), 9, np.uint32))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_epochs_in_order_begin_where_the_stream_falls_back(count: int) -> None:
    assert one_pid(np.tile(np.arange(400) * 3, count)) == [400 * i for i in range(count)]


def test_shuffled_epochs_begin_where_pages_come_again() -> None:
    page = np.concatenate([RNG.permutation(500) for _ in range(3)])
    found = one_pid(page)
    assert len(found) == 3
    assert all(abs(a - b) <= 10 for a, b in zip(found, [0, 500, 1000], strict=True))


def test_a_shuffle_with_replacement_has_one_epoch() -> None:
    assert one_pid(RNG.integers(0, 500, 2000)) == [0]


def test_a_stream_that_begins_in_the_middle_and_wraps_is_one_epoch() -> None:
    assert one_pid(np.r_[np.arange(500, 1000), np.arange(500)]) == [0]


def test_a_look_at_the_root_of_a_tree_is_no_epoch() -> None:
    assert one_pid(np.insert(np.arange(100, 2000), [400, 900, 1500], 1)) == [0]


def test_two_readers_in_step_begin_anew_where_both_fall_back() -> None:
    # each 64 KiB is visited twice in an epoch, and the pages that fault are others in the next one
    base = np.arange(0, 8000, 16)
    epoch = np.stack([base, np.maximum(0, base - 640) + 3], axis=1).ravel()
    found = one_pid(np.r_[epoch, epoch + 7])
    assert len(found) == 2 and abs(found[1] - len(epoch)) <= 90


def test_new_workers_are_a_new_epoch_whatever_they_read() -> None:
    page = RNG.integers(0, 10**6, 1200)
    pid = np.concatenate([RNG.integers(10 * e, 10 * e + 4, 400) for e in range(3)])
    assert epochs(page, pid) == [0, 400, 800]


# ---- iterations ---------------------------------------------------------------------------------


def beat(batches: int, accesses: int, within_ns: int, between_ns: int, jitter: float) -> np.ndarray:
    pause = np.full(batches * accesses, within_ns)
    pause[::accesses] += between_ns
    return np.cumsum((pause * RNG.normal(1, jitter, len(pause)).clip(0.5)).astype(np.int64))


def test_pauses_between_batches_delimit_iterations() -> None:
    time_ns = beat(30, 20, 50_000, 20_000_000, 0.1)
    first = starts_of(time_ns, time_ns)
    assert first is not None
    assert first.tolist() == list(range(0, 600, 20))


def test_a_wait_for_storage_is_no_pause() -> None:
    time_ns = beat(30, 20, 50_000, 20_000_000, 0.1)
    # every access waits 5 ms: the next one comes that much later
    slow = time_ns + np.arange(600) * 5_000_000
    first = starts_of(slow, slow + 5_000_000)
    assert first is not None and len(first) == 30


@pytest.mark.parametrize("kind", ["steady", "exponential", "few"])
def test_no_clear_beat_is_no_iteration(kind: str) -> None:
    gaps = {
        "steady": RNG.normal(10**6, 10**5, 500),
        "exponential": RNG.exponential(10**6, 500),
        "few": np.full(6, 10**6),
    }[kind]
    time_ns = np.cumsum(gaps.astype(np.int64))
    assert starts_of(time_ns, time_ns) is None


# ---- stalls -------------------------------------------------------------------------------------


def stall_events(*rows: tuple[int, Kind, int, int, int]) -> np.ndarray:
    """(end, kind, ns, tid, page)"""
    return np.array(
        [(end, page * 4096, 4096, ns, 7, tid, kind, 1, 0) for end, kind, ns, tid, page in rows],
        EVENT,
    )


def test_a_sleep_within_a_major_fault_is_not_counted_twice() -> None:
    found = stalls(
        stall_events((900, Kind.WAIT, 700, 1, 5), (1000, Kind.MAJOR, 900, 1, 5)), 0, 4096
    )
    assert found.took_ns.tolist() == [900]


def test_a_sleep_in_a_minor_fault_counts() -> None:
    found = stalls(
        stall_events(
            (500, Kind.WAIT, 300, 1, 5),
            (900, Kind.WAIT, 700, 2, 8),  # another thread, in that time
            (2000, Kind.MAJOR, 900, 1, 6),
        ),
        0,
        4096,
    )
    assert sorted(found.took_ns.tolist()) == [300, 700, 900]
    assert found.seconds() == pytest.approx(1900e-9)
    # two threads stalled at the same time: 200-900 and 1100-2000
    assert found.seconds_of_run() == pytest.approx(1600e-9)


def test_stalls_are_told_by_place() -> None:
    found = stalls(stall_events((10, Kind.MAJOR, 4, 1, 0), (30, Kind.MAJOR, 6, 1, 6400)), 0, 4096)
    bins = found.by_offset(4096)
    assert [round(s * 1e9) for _, s in bins] == [4, 6]
    assert bins[0][0] == 0 and 6300 * 4096 <= bins[1][0] <= 6400 * 4096
    assert stalls(stall_events(), 0, 4096).by_offset(4096) == []


# ---- pieces -------------------------------------------------------------------------------------


def test_pieces_are_united_as_their_ranges_are() -> None:
    start = RNG.integers(0, 500, 200)
    end = start + RNG.integers(0, 9, 200)
    for mine, plain in zip(Pieces([start, end]).union(start, end), union(start, end), strict=True):
        assert mine.tolist() == plain.tolist()


def test_a_stream_keeps_its_counts_when_it_is_classified() -> None:
    pattern: StreamPattern = classify(pages(np.arange(100)))
    assert (pattern.accesses, pattern.pages) == (100, 100)
