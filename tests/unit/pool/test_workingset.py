# SPDX-License-Identifier: Apache-2.0
"""pool/workingset.py: its rules, what they are worth on the ways in which files are read, and that
the pool spares what they find."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paths import BENCH
from small_pool import pool_of

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.pool.eviction import Cyclic
from uffdprefetch.pool.victims import without
from uffdprefetch.pool.workingset import (
    ACTIVE,
    LASTS_POOLS,
    NEAR_SHARE,
    Ghosts,
    refaulted,
    retire,
)
from uffdprefetch.predict.streams import FORGET_NS
from uffdprefetch.state.pool_file import PoolFile

sys.path.insert(0, str(BENCH))

from pool_replay import Accesses, belady_hits, interleave, replay, scan

MIB, CHUNK = 1 << 20, 64 << 10
BLOCKS = 400
SEEDS = range(3)
#: Pools of three quarters and of half of the file.
POOLS = (300, 200)


def misses(accesses: Accesses, capacity: int, learns: bool = True) -> np.ndarray:
    """Of each epoch, as the engine sees it: what a reader has mapped does not fault."""
    hits = replay(accesses, capacity, Cyclic, mapped=True, working_set=learns)
    return accesses.per_epoch() - hits


def gets(rng: np.random.Generator, hot: np.ndarray, count: int) -> np.ndarray:
    """Blocks of records looked up: nine in ten of a hot set."""
    everywhere = rng.integers(0, BLOCKS, count)
    return np.where(rng.random(count) < 0.9, rng.choice(hot, count), everywhere)


# ---- what it is worth ---------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", POOLS)
@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_scan_does_not_displace_a_hot_set(seed: int, share: float, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    hot = rng.permutation(BLOCKS)[: int(BLOCKS * share)]
    rounds = [walk for _ in range(6) for walk in (gets(rng, hot, 2000), np.arange(BLOCKS))]
    accesses = interleave([rounds])
    best = accesses.per_epoch() - belady_hits(accesses, capacity)
    found, usual = misses(accesses, capacity), misses(accesses, capacity, learns=False)
    assert found.sum() < 2 * best.sum() < usual.sum()
    later = found[6::2]  # look-ups, once the set is known: of what is not in it, and to prove it
    everywhere = 2000 * 0.1 * (BLOCKS - capacity) / (BLOCKS - len(hot))
    assert np.all(later <= 2.5 * everywhere), (later, everywhere)


def test_a_hot_set_that_has_changed_is_the_one_that_stays() -> None:
    rng = np.random.default_rng(4)
    rounds = []
    for hot in np.split(rng.permutation(BLOCKS)[:120], 3):
        for _ in range(4):
            rounds += [gets(rng, hot, 2000), np.arange(BLOCKS)]
    found = misses(interleave([rounds]), 200)[::2]
    first = found[3]
    assert np.all(found[[7, 11]] <= 1.5 * first), found


SCANS = {
    "one reader": scan(BLOCKS, 5),
    "backward": interleave([[np.arange(BLOCKS)[::-1]] * 5]),
    "4 parts": interleave([[part] * 5 for part in np.split(np.arange(BLOCKS), 4)]),
    "4 ranks side by side": interleave([[np.arange(BLOCKS)] * 5] * 4, [0, 1, 2, 30]),
    "every fourth": interleave([[np.arange(BLOCKS)[rank::4]] * 5 for rank in range(4)]),
}


@pytest.mark.parametrize("capacity", POOLS)
@pytest.mark.parametrize("name", SCANS)
def test_of_files_read_in_order_the_same_part_stays(name: str, capacity: int) -> None:
    found = misses(SCANS[name], capacity)
    assert found.tolist() == misses(SCANS[name], capacity, learns=False).tolist()


@pytest.mark.parametrize("capacity", POOLS)
@pytest.mark.parametrize("name", ["uniform", "an unknown order", "8 ranks, each in its own"])
def test_where_nothing_is_hot_it_costs_next_to_nothing(name: str, capacity: int) -> None:
    rng = np.random.default_rng(7)
    ranks = 8 if name.startswith("8") else 1
    accesses = interleave([
        [
            rng.integers(0, BLOCKS, BLOCKS) if name == "uniform" else rng.permutation(BLOCKS)
            for _ in range(5)
        ]
        for _ in range(ranks)
    ])  # fmt: skip
    usual = misses(accesses, capacity, learns=False).sum()
    assert misses(accesses, capacity).sum() <= 1.05 * usual


# ---- the rules ----------------------------------------------------------------------------------


def test_two_short_refaults_running_make_a_chunk_active() -> None:
    short = 800 // NEAR_SHARE
    assert refaulted(0, short, 800) < ACTIVE
    assert refaulted(refaulted(0, short, 800), short, 800) == ACTIVE
    assert refaulted(ACTIVE, 1, 800) == ACTIVE
    assert refaulted(1, short + 1, 800) == 0
    assert refaulted(ACTIVE, short + 1, 800) == 0
    assert refaulted(0, 1, 0) == 1, "a pool of next to nothing"


def books(left: list[int], refaults: int = ACTIVE, present: bool = True) -> Ghosts:
    n = len(left)
    return Ghosts(np.full(n, refaults, np.uint8), np.array(left, np.uint32), np.full(n, present))


def test_what_was_proven_long_ago_has_to_be_proven_once_more() -> None:
    file = books([1000, 1001, 1002])
    retire([file], 1001 + LASTS_POOLS * 50, 50)
    assert file.refaults.tolist() == [ACTIVE - 1, ACTIVE, ACTIVE]
    assert refaulted(int(file.refaults[0]), 1, 50) == ACTIVE


def test_the_number_of_evictions_may_wrap_round() -> None:
    file = books([2**32 - 5, 2**32 - 150])
    retire([file], 10, 50)
    assert file.refaults.tolist() == [ACTIVE, ACTIVE]
    retire([file], 90, 50)
    assert file.refaults.tolist() == [ACTIVE, ACTIVE - 1]


def test_of_too_much_the_longest_proven_is_ordinary_again() -> None:
    most = 80 - 80 // NEAR_SHARE
    one, two = books(list(range(1, 101, 2))), books(list(range(2, 101, 2)))
    gone, once = books([1, 2, 3], present=False), books([1, 2, 3], 1)
    retire([one, two, gone, once], 120, 80)
    kept = [*one.left[one.refaults == ACTIVE], *two.left[two.refaults == ACTIVE]]
    assert sorted(kept) == list(range(101 - most, 101))
    assert gone.refaults.tolist() == [ACTIVE] * 3 and once.refaults.tolist() == [1] * 3


# ---- in the pool --------------------------------------------------------------------------------


def hot_pool(*hot: int) -> tuple[Any, PoolFile, list[tuple[int, int, int]]]:
    """A pool of 64 chunks, some of which have come back soon twice."""
    pool, told = pool_of(4 * MIB, "cyclic")
    pool.victims._count = lambda: 64  # type: ignore[method-assign]
    part = pool.files.by_number[3].pooled
    assert part is not None
    part.faulted_ns = pool.victims._clock.now_ns()
    for chunk in hot * 2:
        pool.victims.refaulted(pool.files.by_number[3], chunk * CHUNK + 4096, 3)
    return pool, part, told


def chunks(told: list[tuple[int, int, int]]) -> set[int]:
    return {chunk for _, first, count in told for chunk in range(first, first + count)}


def test_active_chunks_are_no_victims_and_their_neighbours_are() -> None:
    pool, _, told = hot_pool(5, 6, 20)
    pool.victims.refaulted(pool.files.by_number[3], 9 * CHUNK, 3)  # once
    pool.victims.plan([])
    assert chunks(told) == set(range(64)) - {5, 6, 20}
    pool.victims._block_bytes = lambda wanted: 4 * CHUNK
    pool.victims.plan([])
    assert chunks(told) == set(range(64)) - {5, 6, 20}


def test_a_file_that_is_read_no_more_has_nothing_active() -> None:
    pool, part, told = hot_pool(5, 6, 20)
    part.faulted_ns -= FORGET_NS
    pool.victims.plan([])
    assert chunks(told) == set(range(64))


def test_a_known_order_says_more_than_what_came_back() -> None:
    pool, _, told = hot_pool(5, 6, 20)
    epochs = SimpleNamespace(
        future=lambda blocks, size: np.asarray(blocks, float),
        knows=lambda blocks, size: np.ones(len(blocks), bool),
    )
    order = SimpleNamespace(file=pool.files.by_number[3], epochs=epochs, rate_bytes_per_second=1.0)
    pool.victims._block_bytes = lambda wanted: CHUNK
    pool.victims.plan([], [order])
    assert chunks(told) == set(range(64))


def test_what_nobody_needs_is_active_no_more() -> None:
    pool, _, told = hot_pool(5, 6, 20)
    ranges = IntervalSet()
    ranges.add(4 * CHUNK, 6 * CHUNK)
    pool.victims.plan([], (), [(3, ranges)])
    assert chunks(told) == set(range(64)) - {6, 20}


def test_lru_to_compare_knows_nothing_of_it() -> None:
    pool, told = pool_of(4 * MIB, "lru")
    pool.victims.refaulted(pool.files.by_number[3], 0, 1)
    part = pool.files.by_number[3].pooled
    assert part is not None and not any(part.books.refaults)
    pool.victims.plan([])
    assert told


def test_runs_that_a_mask_does_not_have() -> None:
    mask = np.array([1, 0, 0, 1, 0, 1, 1, 0], bool)
    assert list(without(mask, 0, 8)) == [(1, 3), (4, 5), (7, 8)]
    assert list(without(mask, 1, 2)) == [(1, 3)] and list(without(mask, 5, 2)) == []
    assert list(without(None, 6, 4)) == [(6, 10)]
    assert list(without(mask, 6, 4)) == [(7, 8)], "the last block ends with the file"
