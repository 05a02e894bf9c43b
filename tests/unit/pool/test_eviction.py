# SPDX-License-Identifier: Apache-2.0
"""pool/eviction.py, belady.py and replay.py: against the optimum by exhaustive search, against the
rules written out plainly, and on the ways in which training jobs read."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from paths import BENCH

from uffdprefetch.pool.eviction import LRU, POLICIES, BlockReader, Cyclic, Policy, Residents
from uffdprefetch.sim.caches import tiers
from uffdprefetch.sim.evict_rules import EVICT

sys.path.insert(0, str(BENCH))

from belady import REACH, STRAYS, Belady
from pool_replay import Accesses, belady_hits, interleave, replay, scan, tier_hits

BLOCKS, CAPACITY, EPOCHS = 400, 200, 4
SEEDS = range(20)


def residents(
    rows: Sequence[tuple[int, int]],
    touched: Sequence[int] | None = None,
    pinned: Sequence[bool] | None = None,
) -> Residents:
    """A pool of (file, block) rows; touched in the order of the rows when not told."""
    return Residents(
        np.array([file for file, _ in rows], np.int32),
        np.array([block for _, block in rows], np.int64),
        np.array(range(1, len(rows) + 1) if touched is None else touched, np.uint32),
        np.array([False] * len(rows) if pinned is None else pinned, bool),
    )


def chosen(
    policy: Policy, pool: Residents, readers: Sequence[BlockReader], count: int
) -> list[tuple[int, int]]:
    """The victims as (file, block)."""
    rows = policy.victims(pool, readers, count)
    return [(int(pool.file[row]), int(pool.block[row])) for row in rows]


def on_file(number: int, blocks: np.ndarray) -> np.ndarray:
    return np.stack([np.full(len(blocks), number), blocks], axis=1)


def order(count: int) -> np.ndarray:
    return np.arange(count)


# ---- the optimum --------------------------------------------------------------------------------


def most_hits(blocks: tuple[int, ...], capacity: int) -> int:
    """The most hits of all ways to evict, by trying them all; what is asked for is brought in."""

    @cache
    def from_here(at: int, held: frozenset[int]) -> int:
        if at == len(blocks):
            return 0
        if blocks[at] in held:
            return 1 + from_here(at + 1, held)
        if len(held) < capacity:
            return from_here(at + 1, held | {blocks[at]})
        return max(from_here(at + 1, held - {out} | {blocks[at]}) for out in held)

    return from_here(0, frozenset())


@pytest.mark.parametrize("seed", SEEDS)
def test_belady_hits_as_much_as_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    blocks = tuple(rng.randrange(7) for _ in range(24))
    capacity = rng.randint(1, 5)
    best = most_hits(blocks, capacity)
    accesses = interleave([[np.array(blocks)]])
    assert belady_hits(np.array(blocks), capacity).sum() == best
    policy = lambda: Belady(accesses.futures())  # noqa: E731
    assert replay(accesses, capacity, policy, behind=0).sum() == best
    for other in (LRU, Cyclic):
        assert replay(accesses, capacity, other, behind=0).sum() <= best


@pytest.mark.parametrize("order", ["shuffled", "in order"])
def test_no_rule_of_two_tiers_beats_their_optimum(order: str) -> None:
    random = np.random.default_rng(3)
    walk = [random.permutation(400) if order == "shuffled" else np.arange(400) for _ in range(4)]
    accesses = interleave([walk])
    inside, below = tier_hits(accesses, 100, 260)
    assert inside.tolist() == belady_hits(accesses, 100).tolist() and (below >= 0).all()
    reads = 400 - inside - below
    assert reads[0] == 400 and (reads[1:] == 40).all()
    for evict in EVICT:
        found = tiers(accesses.block, np.ones(400), [100, 260], evict, [0, 400, 800, 1200])
        missed = (found.reshape(4, 400) == 0).sum(axis=1)
        assert missed.sum() >= reads.sum()
        assert ((found == 1).reshape(4, 400).sum(axis=1)).sum() <= inside.sum()
        if evict != "lru" and (evict != "cyclic" or order == "in order"):
            assert (missed[2:] <= 40 + 400 * 0.03).all(), evict


@pytest.mark.parametrize("seed", range(8))
def test_beladys_policy_reaches_the_optimum_of_a_long_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = [rng.zipf(1.3, 500) % 90 for _ in range(3)]
    accesses = interleave([blocks])
    best = belady_hits(accesses, 30)
    policy = lambda: Belady(accesses.futures())  # noqa: E731
    assert replay(accesses, 30, policy, behind=0).sum() == best.sum()
    assert belady_hits(accesses, 90).sum() == len(accesses) - len(np.unique(accesses.block))


# ---- the ways to read again and again -----------------------------------------------------------

PARTS = np.split(order(BLOCKS), 4)
RECORDS = order(BLOCKS // 3 // 4 * 12).reshape(-1, 4, 3)  # records of 3 blocks, to 4 in turn
TRAINING: dict[str, tuple[list[np.ndarray], list[int]]] = {
    "one reader": ([order(BLOCKS)], []),
    "backward": ([order(BLOCKS)[::-1]], []),
    "4 contiguous parts": (PARTS, []),
    "4 contiguous parts backward": ([part[::-1] for part in PARTS], []),
    "parts of different lengths": ([order(300), order(BLOCKS)[300:]], []),
    "4 skipping by one": ([order(BLOCKS)[rank::4] for rank in range(4)], []),
    "4 skipping by a record": ([RECORDS[:, rank].ravel() for rank in range(4)], []),
    "4 all over the whole file": ([order(BLOCKS)] * 4, []),
    "a laggard": ([order(BLOCKS)] * 4, [0, 0, 0, 30]),
    "one forward and one backward": ([order(BLOCKS), order(BLOCKS)[::-1]], []),
    "two files at once": ([on_file(0, order(200)), on_file(1, order(200))], []),
}


@pytest.mark.parametrize("mapped", [False, True], ids=["all uses seen", "first uses seen"])
@pytest.mark.parametrize("name", TRAINING)
def test_cyclic_comes_within_2_points_of_the_optimum(name: str, mapped: bool) -> None:
    walks, lags = TRAINING[name]
    accesses = interleave([[walk] * EPOCHS for walk in walks], lags)
    best = belady_hits(accesses, CAPACITY)
    hits = replay(accesses, CAPACITY, Cyclic, mapped=mapped)
    assert np.all(best - hits <= 0.02 * BLOCKS), (best, hits)


@pytest.mark.parametrize("name", sorted(set(TRAINING) - {"one forward and one backward"}))
def test_where_lru_hits_nothing_again_cyclic_hits_half(name: str) -> None:
    """Of a data set of twice the capacity: of each block's first use in an epoch, that is."""
    walks, lags = TRAINING[name]
    accesses = interleave([[walk] * EPOCHS for walk in walks], lags)
    accesses_of_one = accesses.per_epoch()
    used = len(np.unique(np.stack((accesses.file, accesses.block)), axis=1).T)
    misses = accesses_of_one - replay(accesses, CAPACITY, LRU)
    assert misses.tolist() == [used] * EPOCHS
    misses = accesses_of_one - replay(accesses, CAPACITY, Cyclic)
    assert misses[0] == used
    share = 1 - misses[1:] / used
    assert np.all(np.abs(share - CAPACITY / used) <= 0.02), share


@pytest.mark.parametrize("apart", [150, 200, 250])
def test_readers_half_a_file_apart_share_what_stays_as_well_as_can_be(apart: int) -> None:
    accesses = interleave([[order(BLOCKS)] * 6] * 2, [0, apart])
    best = belady_hits(accesses, CAPACITY)[:5]  # that there is no seventh, only the optimum knows
    hits = replay(accesses, CAPACITY, Cyclic)[:5]
    assert hits.sum() >= best.sum() - 0.02 * 5 * BLOCKS


def test_a_list_of_victims_made_in_advance_costs_at_most_its_length() -> None:
    accesses = scan(BLOCKS, EPOCHS)
    at_once = replay(accesses, CAPACITY, Cyclic)[1:]
    listed = replay(accesses, CAPACITY, Cyclic, ahead=8, batch=16)[1:]
    assert np.all(at_once - listed <= 16)


@pytest.mark.parametrize("mapped", [False, True], ids=["all uses seen", "first uses seen"])
@pytest.mark.parametrize("seed", range(4))
def test_of_a_shuffled_file_cyclic_keeps_a_fixed_part(seed: int, mapped: bool) -> None:
    rng = np.random.default_rng(seed)
    accesses = interleave([[rng.permutation(BLOCKS) for _ in range(EPOCHS)]])
    cyclic = replay(accesses, CAPACITY, Cyclic, mapped=mapped)[1:] / BLOCKS
    lru = replay(accesses, CAPACITY, LRU, mapped=mapped)[1:] / BLOCKS
    assert np.all(cyclic >= lru)
    assert np.all(cyclic >= CAPACITY / BLOCKS - 0.02)


def test_blocks_of_which_some_are_used_much_more_often_are_hit_as_by_lru() -> None:
    """As the engine sees it: what a reader has mapped does not fault, so what is used all the time
    is not what was touched last."""
    rng = np.random.default_rng(3)
    place = rng.permutation(BLOCKS)
    skewed = [place[np.minimum(BLOCKS - 1, (rng.pareto(1.0, 800) * 10).astype(int))]]
    accesses = interleave([skewed])
    cyclic, lru = (replay(accesses, 40, policy, mapped=True).sum() for policy in (Cyclic, LRU))
    assert cyclic >= lru


# ---- several files ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("validation", [40, 200])
def test_training_and_validation_both_keep_their_part(validation: int, ranks: int) -> None:
    """Each block of either is used once a cycle; the first cycles are for learning that."""
    walks = [
        [np.concatenate([on_file(0, train), on_file(1, valid)])] * 6
        for train, valid in zip(
            np.split(order(BLOCKS), ranks), np.split(order(validation), ranks), strict=True
        )
    ]
    accesses = interleave(walks)
    best = belady_hits(accesses, CAPACITY)
    hits = replay(accesses, CAPACITY, Cyclic)
    assert np.all(best[2:] - hits[2:] <= 0.02 * BLOCKS), (best, hits)
    assert replay(accesses, CAPACITY, LRU).sum() == 0


def test_many_files_read_one_after_the_other_are_as_one() -> None:
    shards = np.concatenate([on_file(shard, order(20)) for shard in range(20)])
    accesses = interleave([[shards] * EPOCHS])
    best = belady_hits(accesses, CAPACITY)
    hits = replay(accesses, CAPACITY, Cyclic)
    assert best[1] - hits[1] <= 20  # one file is thrown away before it is known to come back
    assert np.all(best[2:] - hits[2:] <= 0.02 * BLOCKS)
    assert replay(accesses, CAPACITY, LRU).sum() == 0


def test_a_file_that_was_read_once_makes_room() -> None:
    accesses = interleave([[on_file(0, order(CAPACITY))] + [on_file(1, order(BLOCKS))] * 3])
    best = belady_hits(accesses, CAPACITY)
    hits = replay(accesses, CAPACITY, Cyclic)
    assert np.all(best - hits <= 0.02 * BLOCKS)


def test_files_that_are_read_no_more_are_forgotten() -> None:
    one = np.concatenate([on_file(0, order(BLOCKS)), on_file(2, order(40))])
    accesses = interleave([[one] * 4 + [on_file(1, order(BLOCKS))] * 5])
    hits = replay(accesses, CAPACITY, Cyclic)
    assert hits[3] >= CAPACITY - 8
    assert np.all(hits[-2:] >= 0.48 * BLOCKS)


def test_what_lies_outside_a_part_that_is_read_now_makes_room_for_it() -> None:
    accesses = interleave([[order(BLOCKS)] * 2 + [order(BLOCKS)[100:300]] * 3])
    assert replay(accesses, CAPACITY, Cyclic)[3:].tolist() == [CAPACITY, CAPACITY]


def test_the_rest_of_a_file_that_came_back_is_not_kept_for_ever() -> None:
    rest = order(BLOCKS)[100:300]
    accesses = interleave([[order(BLOCKS), on_file(1, order(50)), rest, rest, rest]])
    assert replay(accesses, CAPACITY, Cyclic)[4] == CAPACITY


def test_a_file_all_of_which_is_mapped_is_kept_by_its_readers() -> None:
    """Its uses do not fault any more: that it has readers in each cycle tells of them."""
    cyclic = Cyclic()
    rows = [(0, block) for block in range(100)] + [(1, block) for block in range(10)]
    for now in range(1000, 9000, 1000):
        touched = [now + block for block in range(100)] + [900] * 10
        training = chosen(cyclic, residents(rows, touched), [BlockReader(0, 99, 1, 0, 400, 0)], 20)
        touched = [now + 900, *touched[1:]]
        cyclic.victims(residents(rows, touched), [BlockReader(1, 5, 1, 0, 10, 0)], 20)
    assert {file for file, _ in training} == {0}
    for now in range(9000, 13000, 1000):  # and that it has had none for long, of their end
        touched = [now + block for block in range(100)] + [900] * 10
        training = chosen(cyclic, residents(rows, touched), [BlockReader(0, 99, 1, 0, 400, 0)], 20)
    assert training[:10] == [(1, block) for block in range(10)]


def test_a_part_whose_reader_has_ended_first_stays() -> None:
    """The others go on for a while without it in each epoch."""
    short, long = order(BLOCKS)[:150], order(BLOCKS)[150:]
    accesses = interleave([[short] * 6, [long] * 6])
    alone = {(150, 400)}

    class EndsFirst(Cyclic):
        def victims(
            self, residents: Residents, readers: Sequence[BlockReader], count: int
        ) -> np.ndarray:
            live = readers
            if any(r.low == 150 and r.position >= 300 for r in readers):
                live = [r for r in readers if (r.low, r.high) in alone]
            return super().victims(residents, live, count)

    best = belady_hits(accesses, CAPACITY)
    hits = replay(accesses, CAPACITY, EndsFirst)
    assert np.all(best[3:] - hits[3:] <= 0.02 * BLOCKS), (best, hits)


# ---- the rules, written out plainly -------------------------------------------------------------


def spared(reader: BlockReader, file: int, block: int) -> bool:
    steps = (block - reader.position) * reader.direction
    return file == reader.file and -reader.behind <= steps <= reader.ahead


def steps_to(reader: BlockReader, file: int, block: int) -> int | None:
    if file != reader.file or not reader.low <= block < reader.high:
        return None
    return (block - reader.position) * reader.direction % (reader.high - reader.low)


def any_state(rng: random.Random, files: int) -> tuple[Residents, list[BlockReader]]:
    size = rng.choice([1, 5, 40, 150])
    universe = [(file, block) for file in range(files) for block in range(size)]
    rows = rng.sample(universe, rng.randint(1, len(universe)))
    readers = []
    for _ in range(rng.randint(0, 5)):
        low = rng.randrange(size)
        high = rng.randint(low + 1, size)
        position = rng.randint(low, high)
        direction, ahead, behind = rng.choice([1, -1]), rng.randint(0, 6), rng.randint(1, 3)
        file = rng.randrange(files)
        readers.append(BlockReader(file, position, direction, low, high, ahead, behind))
    touched = [rng.choice([0, 7, rng.randrange(1, 1000)]) for _ in rows]
    return residents(rows, touched, [rng.random() < 0.1 for _ in rows]), readers


def belady_for(pool: Residents, seed: int) -> Belady:
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(pool.block), (3, 50))
    both = np.stack((pool.file, pool.block), axis=1)
    return Belady({reader: both[picks[reader]] for reader in range(3)})


MAKERS: dict[str, Callable[[Residents, int], Policy]] = {
    "lru": lambda pool, seed: LRU(),
    "cyclic": lambda pool, seed: Cyclic(),
    "belady": belady_for,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_policy_spares_what_is_pinned_announced_or_just_behind(name: str, seed: int) -> None:
    pool, readers = any_state(random.Random(seed), files=3)
    policy = MAKERS[name](pool, seed)
    free = {
        row
        for row, (file, block) in enumerate(zip(pool.file, pool.block, strict=True))
        if not pool.pinned[row] and not any(spared(r, file, block) for r in readers)
    }
    for count in (0, 1, 4, len(pool.block), len(pool.block) + 100):
        rows = policy.victims(pool, readers, count).tolist()
        assert len(rows) == len(set(rows)) == min(count, len(free))
        assert set(rows) <= free


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_choice_depends_on_the_blocks_and_not_on_the_order_of_rows(
    name: str, seed: int
) -> None:
    rng = random.Random(seed)
    pool, readers = any_state(rng, files=3)
    mixed = np.array(rng.sample(range(len(pool.block)), len(pool.block)), np.intp)
    other = Residents(pool.file[mixed], pool.block[mixed], pool.touched[mixed], pool.pinned[mixed])
    backwards = readers[::-1]
    policies = [MAKERS[name](pool, seed) for _ in range(3)]
    for count in (3, len(pool.block) // 2, len(pool.block)):
        first = chosen(policies[0], pool, readers, count)
        assert first == chosen(policies[1], pool, readers, count)
        assert first == chosen(policies[2], other, backwards, count)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_shorter_list_is_the_beginning_of_a_longer_one(name: str, seed: int) -> None:
    pool, readers = any_state(random.Random(seed), files=2)
    everything = MAKERS[name](pool, seed).victims(pool, readers, len(pool.block)).tolist()
    for count in (1, 2, 7, 20):
        policy = MAKERS[name](pool, seed)
        assert policy.victims(pool, readers, count).tolist() == everything[:count]


@pytest.mark.parametrize("seed", SEEDS)
def test_cyclic_takes_first_what_no_reader_is_going_to_then_the_farthest(seed: int) -> None:
    """One file, nothing known of earlier breaks; parts of it make the distances k-fold, which in
    one file changes nothing."""
    pool, readers = any_state(random.Random(seed), files=1)
    keys = []
    for block, touched, pinned in zip(
        pool.block.tolist(), pool.touched.tolist(), pool.pinned, strict=True
    ):
        if pinned or any(spared(r, 0, block) for r in readers):
            continue
        steps = [s for r in readers if (s := steps_to(r, 0, block)) is not None]
        keys.append((1, -min(steps), block) if steps else (0, -touched, block))
    expected = [(0, block) for _, _, block in sorted(keys)]
    assert chosen(Cyclic(), pool, readers, len(pool.block)) == expected


@pytest.mark.parametrize("files", [1, 2])
def test_of_a_large_pool_it_takes_the_farthest_too(files: int) -> None:
    rng = np.random.default_rng(files)
    count = 150_000
    numbers = rng.integers(0, files, count).astype(np.int32)
    blocks = rng.permutation(count).astype(np.int64)
    pool = Residents(numbers, blocks, np.ones(count, np.uint32), np.zeros(count, bool))
    readers = [BlockReader(file, 70_000 * file + 9, 1, 0, count, 100) for file in range(files)]
    steps = (blocks - (70_000 * numbers + 9)) % count
    steps[steps == count - 1] = 0  # just behind: spared
    expected = np.lexsort((blocks, numbers, -steps))[:500]
    assert Cyclic().victims(pool, readers, 500).tolist() == expected.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_lru_takes_the_least_recently_touched_and_the_untouched_last(seed: int) -> None:
    pool, readers = any_state(random.Random(seed), files=2)
    rows = zip(*(a.tolist() for a in (pool.file, pool.block, pool.touched)), strict=True)
    free = [
        (touched == 0, touched, file, block)
        for (file, block, touched), pinned in zip(rows, pool.pinned, strict=True)
        if not pinned and not any(spared(r, file, block) for r in readers)
    ]
    expected = [(file, block) for _, _, file, block in sorted(free)]
    assert chosen(LRU(), pool, readers, len(pool.block)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_belady_takes_first_what_is_never_used_again_then_the_farthest(seed: int) -> None:
    rng = random.Random(seed)
    plans = {reader: [(rng.randrange(2), rng.randrange(30)) for _ in range(60)] for reader in "ab"}
    policy = Belady({reader: np.array(plan) for reader, plan in plans.items()})
    at = {reader: rng.randrange(60) for reader in plans}
    for reader, index in at.items():
        for step in sorted(rng.sample(range(index + 1), min(3, index + 1))):
            policy.progress(reader, step)
        policy.progress(reader, index)
        policy.progress(reader, index // 2)  # a report that comes late
    pool, _ = any_state(rng, files=3)
    keys = []
    rows = zip(*(a.tolist() for a in (pool.file, pool.block, pool.touched)), strict=True)
    for (file, block, touched), pinned in zip(rows, pool.pinned, strict=True):
        uses = [
            plan[at[reader] :].index((file, block))
            for reader, plan in plans.items()
            if (file, block) in plan[at[reader] :]
        ]
        key = (1, 0, -min(uses)) if uses else (0, touched == 0, touched)
        if not pinned:
            keys.append((key, file, block))
    expected = [(file, block) for _, file, block in sorted(keys)]
    assert chosen(policy, pool, [], len(pool.block)) == expected


@pytest.mark.parametrize("name", MAKERS)
def test_where_all_is_pinned_there_is_no_victim(name: str) -> None:
    pool = residents([(0, block) for block in range(9)], pinned=[True] * 9)
    assert len(MAKERS[name](pool, 0).victims(pool, [], 4)) == 0


@pytest.mark.parametrize("name", MAKERS)
def test_an_empty_pool_has_no_victim(name: str) -> None:
    policy = MAKERS[name](residents([(0, 1)]), 0)
    assert len(policy.victims(residents([]), [BlockReader(0, 0, 1, 0, 9, 2)], 4)) == 0


def test_a_reader_at_the_end_of_its_range_is_at_its_beginning() -> None:
    pool = residents([(0, block) for block in range(10)])
    assert chosen(Cyclic(), pool, [BlockReader(0, 10, 1, 0, 10, 2)], 2) == [(0, 8), (0, 7)]
    assert chosen(Cyclic(), pool, [BlockReader(0, -1, -1, 0, 10, 2)], 2) == [(0, 1), (0, 2)]


def test_parts_of_one_file_count_for_what_they_read_together() -> None:
    """4 readers of 100 blocks each come back to a block after 400; a file of 150 that was read at
    random is used sooner."""
    cyclic = Cyclic()
    parts = [(0, 100 * part + step) for part in range(4) for step in range(100)]
    rest = [(1, block) for block in range(150)]
    readers = [
        BlockReader(0, 100 * part + 50, 1, 100 * part, 100 * part + 100, 3) for part in range(4)
    ]
    for now in (1000, 2000):  # touched with no reader: a file that is used again
        pool = residents(parts + rest, [5] * 400 + [now + block for block in range(150)])
        victims = chosen(cyclic, pool, readers, 100)
    assert {file for file, _ in victims} == {0}


def test_the_names_are_those_of_the_option() -> None:
    assert {name: make().name for name, make in POLICIES.items()} == {
        "cyclic": "cyclic",
        "lru": "lru",
    }


# ---- where a reader of a known future is --------------------------------------------------------

LONG = np.random.default_rng(5).permutation(20_000)
PLAN = on_file(0, np.concatenate([LONG, LONG[::-1]]))


def follower() -> Belady:
    return Belady({0: PLAN})


def same_as_at(policy: Belady, index: int) -> None:
    """The policy chooses as one that was told this place."""
    told = follower()
    told.progress(0, index)
    pool = residents([(0, int(block)) for block in LONG])
    assert chosen(policy, pool, [], len(LONG)) == chosen(told, pool, [], len(LONG))


def touch(policy: Belady, *indices: int) -> None:
    for index in indices:
        policy.touched(0, *PLAN[index].tolist())


def test_touches_move_a_reader_as_reports_do() -> None:
    policy = follower()
    touch(policy, *range(500))
    same_as_at(policy, 500)


def test_uses_that_were_not_seen_are_passed_over() -> None:
    policy = follower()
    touch(policy, *range(0, 5000, 97))
    same_as_at(policy, 4947 + 1 - 4947 % 97)


def test_touches_and_reports_out_of_order_change_nothing() -> None:
    policy = follower()
    touch(policy, 0, 2, 1, 5, 3, 4, 9, 8, 7, 6, 0, 2)
    policy.progress(0, 4)
    same_as_at(policy, 10)


def test_a_few_touches_far_away_are_accidents() -> None:
    policy = follower()
    touch(policy, *range(100))
    touch(policy, *range(9000, 9000 + STRAYS - 1))
    touch(policy, 100)
    touch(policy, *range(9000, 9000 + STRAYS - 1))
    same_as_at(policy, 101)
    scattered = [REACH * (3 + 2 * step) for step in range(STRAYS)]
    touch(policy, *scattered)
    same_as_at(policy, 101)


@pytest.mark.parametrize("where", [12_000, 3_000])
def test_a_reader_that_has_gone_elsewhere_is_followed(where: int) -> None:
    policy = follower()
    policy.progress(0, 8000)
    touch(policy, *range(where, where + STRAYS))
    same_as_at(policy, where + STRAYS)


def test_what_no_plan_knows_goes_first() -> None:
    policy = follower()
    pool = residents([(0, 5), (3, 1), (0, 10**6), (0, 6)])
    assert chosen(policy, pool, [], 2) == [(3, 1), (0, 10**6)]
    policy.touched(0, 9, 9)
    policy.touched(0, 0, 10**6)
    same_as_at(policy, 0)


def test_a_plan_that_has_ended_needs_nothing() -> None:
    policy = Belady({"a": on_file(0, order(10)), "b": on_file(0, order(5))})
    policy.progress("a", 99)
    policy.progress("b", 2)
    pool = residents([(0, block) for block in range(10)])
    assert chosen(policy, pool, [], 10) == [(0, block) for block in [0, 1, 5, 6, 7, 8, 9, 4, 3, 2]]


def test_without_any_plan_it_is_lru() -> None:
    pool = residents([(1, 4), (0, 7), (0, 2)], [30, 10, 20])
    assert chosen(Belady({}), pool, [], 3) == [(0, 7), (0, 2), (1, 4)]


# ---- replay itself ------------------------------------------------------------------------------


def test_readers_take_turns_and_wait_for_each_other_at_an_epochs_end() -> None:
    accesses = interleave([[order(2), order(2)], [order(3), order(3)]])
    steps = list(zip(accesses.reader, accesses.block, accesses.epoch, strict=True))
    once = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]
    assert steps == [(r, b, epoch) for epoch in (0, 1) for r, b in once]
    assert accesses.per_epoch().tolist() == [5, 5]
    assert accesses.futures()[1][:, 1].tolist() == [0, 1, 2, 0, 1, 2]


def test_hits_are_counted_in_the_epoch_of_their_reader() -> None:
    accesses = interleave([[order(4)] * 3] * 2, [0, 1])
    assert replay(accesses, 4, LRU).tolist() == belady_hits(accesses, 4).tolist() == [4, 8, 8]


def test_a_pool_that_may_evict_nothing_is_read_past() -> None:
    accesses = scan(10, 3)
    assert replay(accesses, 2, Cyclic, behind=10, ahead=10).tolist() == [0, 2, 2]


def test_the_policy_is_told_where_readers_walk_and_of_none_that_jumps() -> None:
    told: list[list[BlockReader]] = []

    class Listener(LRU):
        def victims(
            self, residents: Residents, readers: Sequence[BlockReader], count: int
        ) -> np.ndarray:
            told.append(list(readers))
            return super().victims(residents, readers, count)

    jumps = np.array([7, 3, 9, 1, 8, 2])
    walks = [[order(6) + 10, on_file(1, order(6)[::-1])], [jumps, jumps]]
    accesses: Accesses = interleave(walks)
    replay(accesses, 3, Listener, ahead=4, behind=2)
    for reader in {r for readers in told for r in readers}:
        forward = reader.file == 0
        assert (reader.direction, reader.low, reader.high) == (
            (1, 10, 16) if forward else (-1, 0, 6)
        )
        assert (reader.ahead, reader.behind) == (4, 2)
    assert {r.file for readers in told for r in readers} == {0, 1}
    assert all(len(readers) <= 1 for readers in told)


def test_a_reader_that_has_ended_is_told_of_no_more() -> None:
    told: list[int] = []

    class Listener(LRU):
        def victims(
            self, residents: Residents, readers: Sequence[BlockReader], count: int
        ) -> np.ndarray:
            told.append(len(readers))
            return super().victims(residents, readers, count)

    jumps = np.array([27, 23, 29, 21, 28, 22])
    replay(interleave([[order(3)], [jumps]]), 2, Listener)
    assert 1 in told and told[-1] == 0


def test_a_victim_that_was_used_after_it_was_listed_is_passed_over() -> None:
    accesses = interleave([[np.array([5, 1, 7, 2, 1, 8, 1])]])
    assert replay(accesses, 3, LRU, batch=2).tolist() == [2]


def test_the_use_of_what_is_mapped_is_not_seen_until_it_was_away() -> None:
    accesses = interleave([[np.array([0, 1, 0, 2, 0])]])
    assert replay(accesses, 2, LRU).tolist() == [2]
    assert replay(accesses, 2, LRU, mapped=True).tolist() == [1]
    again = interleave([[np.array([0, 1, 0, 2, 0, 3, 0])]])
    assert replay(again, 2, LRU, mapped=True).tolist() == [2]
