# SPDX-License-Identifier: Apache-2.0
"""How far ahead: [Haderbache]'s fixed windows by its own example, and the bounds of what goes by
rate."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.base.config import Config
from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.predict import window
from uffdprefetch.predict.storage import Storage
from uffdprefetch.predict.streams import BOOST_MAX, Feedback, Stream
from uffdprefetch.warm.windows import Windows

MIB, GIB = 1 << 20, 1 << 30
PAGE = 4096
SIZE, DISTANCE, THRESHOLD = 50 * MIB, 8 * MIB, 0.75  # [Haderbache] section 4: its best setting


def stream_at(
    position: int, rate: float = 0.0, direction: int = 1, walked: int = 64 * MIB
) -> Stream:
    start = position - direction * walked
    stream = Stream(1, 0, 1, start, position, 1, 1, direction, active=True)
    stream.rate.bytes_per_second = rate
    return stream


def fixed_windows(
    file_bytes: int, start: int = 0, size: int = SIZE, threshold: float = THRESHOLD
) -> list[tuple[int, tuple[int, int]]]:
    """(checkpoint, window) for a reader that touches every checkpoint from ``start`` on."""
    first = -(-max(start, 1) // DISTANCE) * DISTANCE
    stream = stream_at(first)
    windows, last = [], None
    for checkpoint in range(first, file_bytes, DISTANCE):
        stream.advance(checkpoint, checkpoint + PAGE, checkpoint)
        asked = window.fixed(stream, last, file_bytes, size, threshold)
        if asked is not None:
            last = asked
            windows.append((checkpoint, (asked.start_bytes, asked.end_bytes)))
    return windows


# ---- fixed --------------------------------------------------------------------------------------


def test_the_papers_example() -> None:
    """The first checkpoint at 8 MiB triggers [8, 58); its threshold is at 45.5, so 48 triggers
    the next, which begins at 58 and not at 48; 16 to 40 MiB trigger nothing; and so on."""
    windows = fixed_windows(200 * MIB)
    assert [checkpoint // MIB for checkpoint, _ in windows] == [8, 48, 96, 152]
    starts = [start for _, (start, _) in windows]
    assert starts == [8 * MIB + PAGE + i * SIZE for i in range(4)]
    assert windows[-1][1][1] == 200 * MIB  # cut at the end of the file


def test_windows_do_not_overlap_and_leave_no_hole() -> None:
    for size in (20 * MIB, 33 * MIB, 50 * MIB, 100 * MIB):
        windows = [asked for _, asked in fixed_windows(GIB, size=size)]
        assert len(windows) > 5
        for (_, end), (start, _) in pairwise(windows):
            assert start == end
        assert windows[-1][1] == GIB


def test_a_reader_is_never_without_a_window_while_a_checkpoint_lies_behind_the_threshold() -> None:
    for checkpoint, (start, _) in fixed_windows(GIB)[1:]:
        assert checkpoint < start


def test_the_threshold_moves_the_trigger() -> None:
    early = fixed_windows(400 * MIB, threshold=0.25)
    late = fixed_windows(400 * MIB, threshold=1.0)
    assert early[1][0] == 24 * MIB  # first one at or past 8 + 12.5
    assert late[1][0] == 64 * MIB  # first one at or past 8 + 50: the reader waits for this one
    assert late[1][1][0] == 64 * MIB + PAGE  # and what it has passed is not fetched any more


def test_a_rank_that_starts_in_the_middle_begins_its_windows_there() -> None:
    (checkpoint, (start, end)), *_ = fixed_windows(GIB, start=300 * MIB)
    assert checkpoint == 304 * MIB
    assert (start, end) == (304 * MIB + PAGE, 304 * MIB + PAGE + SIZE)


def test_a_window_at_the_end_of_the_file_is_cut_and_none_follows() -> None:
    windows = fixed_windows(30 * MIB)
    assert [asked for _, asked in windows] == [(8 * MIB + PAGE, 30 * MIB)]


# ---- by the rate --------------------------------------------------------------------------------


def test_it_covers_rate_times_latency() -> None:
    """Little's law: what is read while one fetch is under way must already be there."""
    for rate in (10e6, 300e6, 2e9):
        for latency in (0.0, 0.001, 0.05):
            ahead = window.lookahead_bytes(rate, Storage(rate, latency), 1 << 40)
            assert ahead >= min(rate * latency, window.LOOKAHEAD_MAX_BYTES)


def test_a_faster_reader_gets_a_longer_window() -> None:
    storage = Storage(1e9, 0.001)
    slow, fast = (window.lookahead_bytes(r, storage, 1 << 40) for r in (1e6, 400e6))
    assert slow == window.LOOKAHEAD_MIN_BYTES < fast <= window.LOOKAHEAD_MAX_BYTES


def test_the_window_grows_at_once_when_late_and_shrinks_slowly() -> None:
    feedback = Feedback()
    storage = Storage(300e6, 0.001)

    def ahead() -> int:
        return window.lookahead_bytes(20e6, storage, 1 << 40, feedback.boost)

    calm = ahead()
    feedback.note(late=True)
    grown = ahead()
    assert grown > calm
    feedback.note(late=False)
    assert ahead() == grown  # one extent in time is no reason yet
    for _ in range(2000):
        feedback.note(late=False)
    assert ahead() == calm
    assert feedback.late_extents == 1


def test_lateness_cannot_grow_it_without_bound() -> None:
    feedback = Feedback()
    for _ in range(1000):
        feedback.note(late=True)
    assert feedback.boost == BOOST_MAX
    boosted = window.lookahead_bytes(300e6, Storage(1e9, 1.0), 1 << 40, feedback.boost)
    assert boosted == window.LOOKAHEAD_MAX_BYTES


@pytest.mark.parametrize("allowed", [0, MIB, 5 * MIB, 40 * MIB])
def test_it_is_bounded_by_the_bytes_that_are_allowed(allowed: int) -> None:
    feedback = Feedback()
    for _ in range(10):
        feedback.note(late=True)
    ahead = window.lookahead_bytes(2e9, Storage(2e9, 0.1), allowed, feedback.boost)
    assert ahead <= max(allowed, MIB)  # one extent at least: else nothing would ever be read


def test_fixed_windows_share_the_budget() -> None:
    config = Config.of(policy="fixed", size_bytes=50 * MIB, budget_bytes=100 * MIB)
    windows, sizes = Windows(config, None), []  # type: ignore[arg-type]
    for windows.places.all in (1, 2, 4, 1000):
        windows.begin_turn()
        sizes.append(windows.of(stream_at(0)).size_bytes)
    assert sizes == [50 * MIB, 50 * MIB, 25 * MIB, MIB]


@pytest.mark.parametrize(
    ("files", "said"), [(95 * MIB, False), (int(1.7 * GIB), True), (40 * GIB, True)]
)
def test_memory_that_leaves_room_for_all_there_is_to_read_is_no_limit(
    files: int, said: bool
) -> None:
    limits: Any = SimpleNamespace(ahead_bytes=lambda: (int(1.6 * GIB), Limit.MEMORY))
    scheduler: Any = SimpleNamespace(results=SimpleNamespace(prefetched_bytes=0))
    windows = Windows(Config.of(), scheduler, limits)
    assert windows.ask_memory(files) is said
    assert windows.ask_memory(files) is said, "the next time, too"
    limits.ahead_bytes = lambda: (4 * GIB, Limit.BUDGET)
    assert not windows.ask_memory(files)
