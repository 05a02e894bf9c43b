# SPDX-License-Identifier: Apache-2.0
"""sim/caches.py: evictions against slow and obvious ones, and Belady's bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from uffdprefetch.sim import caches


def slow(items: list[int], sizes: list[float], capacity: float, evict: str) -> list[bool]:
    """By the definitions, without any data structure."""
    kept: list[int] = []  # least recently used first
    found = []
    for at, item in enumerate(items):
        found.append(item in kept)
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
            if evict == "lru":
                victim = kept[0]
            elif evict == "belady":
                later = items[at + 1 :]
                victim = max(
                    kept, key=lambda k: (later.index(k) if k in later else caches.NEVER, -k)
                )
            else:
                end = max(items) + 1
                victim = max((k for k in kept if k != item), key=lambda k: (k - item) % end)
            kept.remove(victim)
    return found


@pytest.mark.parametrize("evict", sorted(caches.EVICT))
def test_hits_are_those_of_the_definition(evict: str) -> None:
    random = np.random.default_rng(5)
    for _ in range(60):
        items = random.integers(0, 12, random.integers(1, 80))
        sizes = random.integers(1, 4, 12).astype(float)
        capacity = float(random.integers(2, 14))
        got = caches.hits(items, sizes, capacity, evict)
        assert got.tolist() == slow(items.tolist(), sizes.tolist(), capacity, evict)


def test_belady_misses_least() -> None:
    random = np.random.default_rng(6)
    for _ in range(60):
        items = random.integers(0, 30, 400)
        sizes = np.ones(30)
        found = {each: caches.hits(items, sizes, 8.0, each).sum() for each in caches.EVICT}
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
    for evict in caches.EVICT:
        found = caches.hits(items, np.ones(4), 3.0, evict)
        assert found.tolist() == [False, False, True, True, True, False, True]


def test_numbers_below() -> None:
    random = np.random.default_rng(8)
    numbers = caches.Numbers(5000)
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
    numbers = caches.Numbers(end)
    assert numbers.below(end) == -1
    numbers.add(end - 1)
    numbers.add(0)
    assert numbers.below(end) == end - 1
    assert numbers.below(end - 1) == (0 if end > 1 else -1)
