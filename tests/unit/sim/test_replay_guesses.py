# SPDX-License-Identifier: Apache-2.0
"""`--policy auto` on a replayed kernel: what it gains of walks, what a wrong guess costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import warnings_fail
from guess_bed import source
from replayed_jobs import MIB, PAGE, demand, run, straight, stream

from uffdprefetch.readers.ahead import Ahead
from uffdprefetch.sim.replay.auto import Auto
from uffdprefetch.sim.replay.demand import Demand
from uffdprefetch.sim.replay.link import StorageModel
from uffdprefetch.sim.replay.policies import Plain

pytestmark = warnings_fail

LINK = StorageModel(300e6, 1e-3)
RECORD = 16  # pages: 64 KiB


def ratios(wanted: Demand, storage: StorageModel = LINK) -> tuple[float, float]:
    """(time, bytes) over plain's."""
    plain = run(wanted, Plain(), storage=storage)
    ours = run(wanted, Auto(), storage=storage)
    return ours.seconds / plain.seconds, ours.read_bytes / plain.read_bytes


def walk(first: int, pages: int) -> list[int]:
    return list(range(first, first + pages, RECORD))


def test_a_long_stream_is_read_at_the_speed_of_the_link() -> None:
    pages = 128 * MIB // PAGE
    ours = run(straight(pages), Auto(), storage=LINK)
    assert ours.seconds < 1.1 * pages * PAGE / 300e6
    assert ours.read_bytes == pages * PAGE


def test_so_is_one_that_goes_backward() -> None:
    pages = 64 * MIB // PAGE
    time, bytes_ = ratios(demand(stream(walk(0, pages)[::-1], RECORD), pages=pages))
    assert time < 0.5 and bytes_ < 1.05


def test_two_of_twenty_columns_bring_no_others() -> None:
    """Row groups of 30 MiB with columns of 1.5 MiB."""
    places = [
        at
        for group in range(20)
        for column in (3, 11)
        for at in walk((group * 30 * MIB + column * 3 * MIB // 2) // PAGE, 384)
    ]
    time, bytes_ = ratios(demand(stream(places, RECORD), pages=600 * MIB // PAGE))
    assert time < 1.0 and bytes_ < 1.1


@pytest.mark.parametrize("step_kib", [512, 2048])
def test_a_page_in_each_step_is_all_that_is_read_of_it(step_kib: int) -> None:
    step = (step_kib << 10) // PAGE
    places = list(range(0, 800 * step, step))
    time, bytes_ = ratios(demand(stream(places, 1), pages=800 * step))
    assert time < 0.5 and bytes_ < 1.0


def test_records_with_gaps_that_cost_less_than_a_miss_are_read_with_the_gaps() -> None:
    places = [at for i in range(400) for at in walk(i * 4 * 48, 48)]
    time, bytes_ = ratios(demand(stream(places, RECORD), pages=400 * 4 * 48))
    assert time < 0.8 and bytes_ < 1.5


def test_a_few_random_places_cost_next_to_nothing() -> None:
    places = np.random.default_rng(4).integers(0, 600 * MIB // PAGE, 300).tolist()
    time, bytes_ = ratios(demand(stream(places, 1), pages=600 * MIB // PAGE))
    assert time < 1.05 and bytes_ < 1.15


def test_many_of_a_file_that_is_read_again_and_again_have_it_read_whole() -> None:
    pages = 64 * MIB // PAGE
    places = np.random.default_rng(4).integers(0, pages, 4000).tolist()
    time, bytes_ = ratios(demand(stream(places, 1), pages=pages))
    assert time < 0.65 and bytes_ < 1.3  # 0.81 where it is not


def test_streams_that_always_end_early_are_followed_no_further() -> None:
    chance = np.random.default_rng(4)
    places = [
        at
        for start in chance.integers(0, 1900 * MIB // PAGE, 200).tolist()
        for at in walk(start // RECORD * RECORD, 8 * RECORD)
    ]
    time, bytes_ = ratios(demand(stream(places, RECORD), pages=2000 * MIB // PAGE))
    assert time < 1.05 and bytes_ < 1.15


def test_a_stream_beside_a_random_reader_is_worth_it_for_both() -> None:
    pages = 600 * MIB // PAGE
    places = np.random.default_rng(4).integers(pages, 2 * pages, 300).tolist()
    both = demand(
        stream(walk(0, 200 * MIB // PAGE), RECORD), stream(places, 1, rank=1), pages=2 * pages
    )
    time, bytes_ = ratios(both)
    assert time < 1.05 and bytes_ < 1.2


def test_what_was_lost_is_bounded_by_what_is_free_and_what_was_saved() -> None:
    """A reader that goes on twice as far as it did, and never comes to the next window."""
    at, places = 0, list[int]()
    for i in range(200):
        length = RECORD << (i % 6)
        places += walk(at, length)
        at += length + 3 * MIB // PAGE // RECORD * RECORD + i % 7 * RECORD
    policy = Auto()
    run(demand(stream(places, RECORD), pages=at + RECORD), policy, storage=LINK)
    account = source(policy.node.core, Ahead).account
    # what is open is thought half lost, so twice that may be under way
    may_lose = 2 * (0.05 + 0.5 * account.saved_seconds) * 2 * 300e6
    assert account.lost <= may_lose
    assert account.asked == account.used + account.lost + account.open


def test_where_many_wait_side_by_side_less_is_guessed() -> None:
    """Their latencies overlap: a miss of one costs the job little."""
    chance = np.random.default_rng(4)
    places = [
        at
        for start in chance.integers(0, 900 * MIB // PAGE, 100).tolist()
        for at in walk(start // RECORD * RECORD, int(chance.integers(2, 30)) * RECORD)
    ]
    asked = list[int]()
    for waiting in (1.0, 16.0):
        policy = Auto()
        policy.begin = _waiting(policy, waiting)  # type: ignore[method-assign]
        run(demand(stream(places, RECORD), pages=1000 * MIB // PAGE), policy, storage=LINK)
        asked.append(source(policy.node.core, Ahead).account.asked)
    assert asked[1] < asked[0]


def _waiting(policy: Auto, number: float) -> Callable[..., None]:
    begin = policy.begin

    def begins(*args: Any) -> None:
        begin(*args)
        source(policy.node.core, Ahead)._waiting = lambda: number

    return begins
