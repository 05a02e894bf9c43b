# SPDX-License-Identifier: Apache-2.0
"""sim/caches.py: evictions against slow and obvious ones, and Belady's bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from uffdprefetch.sim import caches
from uffdprefetch.sim.evict_rules import EVICT, Numbers


def slow(
    items: list[int], sizes: list[float], room: list[float], evict: str, epochs: list[int]
) -> list[int]:
    """By the definitions, without any data structure. ``room``: of memory, then of each disk."""
    kept: list[int] = []  # least recently used first
    copies: dict[int, int] = {}
    capacity, room, full = room[0], room[1:], False
    found = []
    for at, item in enumerate(items):
        end = min((first for first in epochs if first > at), default=len(items))

        def next_use(k: int, end: int = end, at: int = at) -> float:
            later = items[at + 1 : end]
            return at + 1 + later.index(k) if k in later else float("inf")

        keys = {
            "lru": lambda k: -kept.index(k),
            "newest": lambda k: kept.index(k),
            "belady": lambda k: (next_use(k, len(items)), -k),
            "planned": lambda k: (next_use(k), kept.index(k)),
            "cyclic": lambda k, item=item: (k - item) % (max(items) + 1),
        }
        found.append(1 if item in kept else copies.get(item, 0))
        if item in kept:
            kept.remove(item)
            kept.append(item)
            continue
        if sizes[item] > capacity:
            continue
        if evict == "belady" and item not in items[at + 1 :]:
            continue
        kept.append(item)
        while sum(sizes[k] for k in kept) > capacity:
            able = [k for k in kept if full and k in copies] or kept
            victim = max(able, key=keys[evict])
            used_again = evict != "belady" or victim in items[at + 1 :]
            if room and not full and victim not in copies and used_again:
                disk = next((j for j, free in enumerate(room) if sizes[victim] <= free), None)
                if disk is None:
                    full = True
                    continue
                room[disk] -= sizes[victim]
                copies[victim] = disk + 2
            kept.remove(victim)
    return found


@pytest.mark.parametrize("disks", [(), (6.0,), (0.0,), (3.0, 4.0), (100.0,)], ids=str)
@pytest.mark.parametrize("evict", sorted(EVICT))
def test_where_each_access_finds_its_item_is_by_the_definition(
    evict: str, disks: tuple[float, ...]
) -> None:
    random = np.random.default_rng(5)
    for _ in range(60):
        items = random.integers(0, 12, random.integers(1, 80))
        sizes = random.integers(1, 4, 12).astype(float)
        room = [float(random.integers(2, 14)), *disks]
        epochs = sorted({0, *random.integers(0, len(items), 3).tolist()})
        if sizes[np.unique(items)].sum() <= room[0]:
            continue  # all of it fits: nothing leaves
        got = caches.tiers(items, sizes, room, evict, epochs)
        assert got.tolist() == slow(items.tolist(), sizes.tolist(), room, evict, epochs)
        if not disks and evict != "planned":  # one epoch
            assert (caches.hits(items, sizes, room[0], evict) == (got > 0)).all()


def read_by_epoch(
    blocks: int, epochs: int, shares: list[float], evict: str, shuffled: bool = True
) -> list[float]:
    """Of the data, what is found nowhere in each epoch. ``shares`` of it: memory, disk."""
    random = np.random.default_rng(1)
    order = [random.permutation(blocks) if shuffled else np.arange(blocks) for _ in range(epochs)]
    room = [share * blocks for share in shares]
    starts = list(range(0, blocks * epochs, blocks))
    found = caches.tiers(np.concatenate(order), np.ones(blocks), room, evict, starts)
    return (found.reshape(epochs, blocks) == 0).mean(axis=1).tolist()


@pytest.mark.parametrize("evict", ["planned", "belady", "newest"])
def test_memory_and_a_disk_hold_different_parts(evict: str) -> None:
    """What neither can hold is read again, and little more: what has a copy leaves memory first."""
    reads = read_by_epoch(1000, 4, [0.25, 0.65], evict)
    assert reads[0] == 1.0 and all(0.09 < each < 0.13 for each in reads[2:]), reads
    reads = read_by_epoch(1000, 4, [0.25, 0.75], evict)
    assert reads[0] == 1.0 and reads[-1] < 0.01, reads
    assert read_by_epoch(1000, 3, [0.25, 0.75], "cyclic", shuffled=False)[1:] == [0.0, 0.0]


def test_a_disk_holds_nothing_that_memory_holds_all_of() -> None:
    found = caches.tiers(np.tile(np.arange(9), 3), np.ones(9), [9.0, 9.0], "lru")
    assert set(found[9:].tolist()) == {1}


def test_belady_misses_least() -> None:
    random = np.random.default_rng(6)
    for _ in range(60):
        items = random.integers(0, 30, 400)
        sizes = np.ones(30)
        found = {each: caches.hits(items, sizes, 8.0, each).sum() for each in EVICT}
        assert found["belady"] >= max(found["lru"], found["cyclic"])


def test_no_cache_of_three_items_beats_belady() -> None:
    # Every possible sequence of evictions, searched through.
    random = np.random.default_rng(7)
    for _ in range(15):
        items = random.integers(0, 6, 14).tolist()
        states = {frozenset(): 0}  # what is kept -> hits
        for item in items:
            after: dict[frozenset[int], int] = {}
            for kept, count in states.items():
                if item in kept:
                    choices = [(kept, count + 1)]
                else:
                    larger = kept | {item}
                    choices = [(kept, count)] + [
                        (frozenset(each), count)
                        for each in itertools.combinations(larger, min(3, len(larger)))
                    ]
                for state, hits in choices:
                    after[state] = max(hits, after.get(state, 0))
            states = after
        best = max(states.values())
        assert caches.hits(np.array(items), np.ones(6), 3.0, "belady").sum() == best


def test_a_cyclic_scan_keeps_its_part_where_lru_keeps_nothing() -> None:
    items = np.tile(np.arange(100), 5)
    sizes = np.ones(100)
    assert caches.hits(items, sizes, 60.0, "lru").sum() == 0
    for evict in ("cyclic", "belady"):
        assert caches.hits(items, sizes, 60.0, evict).reshape(5, 100)[1:].mean() >= 0.58


def test_what_fits_is_missed_once() -> None:
    items = np.array([3, 1, 3, 3, 1, 2, 2])
    for evict in EVICT:
        found = caches.hits(items, np.ones(4), 3.0, evict)
        assert found.tolist() == [False, False, True, True, True, False, True]


def test_numbers_below() -> None:
    random = np.random.default_rng(8)
    numbers = Numbers(5000)
    members: set[int] = set()
    for number in random.integers(0, 5000, 600).tolist():
        if number in members:
            numbers.remove(number)
            members.remove(number)
        else:
            numbers.add(number)
            members.add(number)
        asked = int(random.integers(0, 5001))
        assert numbers.below(asked) == max((m for m in members if m < asked), default=-1)


@pytest.mark.parametrize("end", [1, 63, 64, 65, 4095, 4096, 4097, 262143, 262144])
def test_the_greatest_number_below_the_end_is_the_last_one(end: int) -> None:
    numbers = Numbers(end)
    assert numbers.below(end) == -1
    numbers.add(end - 1)
    numbers.add(0)
    assert numbers.below(end) == end - 1
    assert numbers.below(end - 1) == (0 if end > 1 else -1)
