# SPDX-License-Identifier: Apache-2.0
"""formats/places, keys: records from bytes and back, against counting byte by byte."""

from __future__ import annotations

import random

import numpy as np
import pytest

from uffdprefetch.formats.index import RecordIndex, describe, rebuild
from uffdprefetch.formats.keys import Keys
from uffdprefetch.formats.places import (
    Column,
    Listed,
    Parts,
    RecordPlaces,
    Strided,
    one_part,
    small_lengths,
)


def some_places(source: random.Random) -> RecordPlaces:
    """Parts with strides of bits and bytes, pieces that are not in every part, and a list."""
    counts = [source.choice([0, 1, 3, 20]) for _ in range(source.randrange(1, 5))]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    at, regions = 5, {}
    shapes = source.sample([(1, 0), (3, 0), (8, 0), (32, 4), (24, 0), (0, 9), (0, 0)], 3)
    starts, lengths = np.zeros(sum(counts), np.int64), np.zeros(sum(counts), np.int64)
    order = list(range(len(counts)))
    source.shuffle(order)  # parts need not be in the file's order
    for part in order:
        for number, (bits, extra) in enumerate(shapes):
            missing = source.random() < 0.2
            regions[part, number] = -1 if missing else at
            at += 0 if missing else -(-counts[part] * bits // 8) + extra + source.randrange(4)
        for record in range(int(first[part]), int(first[part + 1])):
            starts[record], lengths[record] = at, source.choice([0, 1, 7])
            at += int(lengths[record]) + source.choice([0, 2])
    columns: list[Column] = [
        Strided(
            bits,
            np.array([regions[part, number] for part in range(len(counts))], np.int64),
            np.full(len(counts), extra, np.int64),
        )
        for number, (bits, extra) in enumerate(shapes)
    ]
    columns.insert(source.randrange(4), Listed(starts, small_lengths(lengths)))
    return RecordPlaces(Parts(first), columns)


def holders(places: RecordPlaces) -> dict[int, set[int]]:
    """byte -> records, one extent at a time."""
    found: dict[int, set[int]] = {}
    for record in range(len(places)):
        starts, ends = places.extents(record)
        for a, b in zip(starts.tolist(), ends.tolist(), strict=True):
            for byte in range(a, b):
                found.setdefault(byte, set()).add(record)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_records_and_bytes_agree_both_ways(seed: int) -> None:
    source = random.Random(seed)
    places = some_places(source)
    held = holders(places)
    end = max(held, default=0) + 4
    at = places.records_at(np.arange(-3, end))
    for byte, record in zip(range(-3, end), at.tolist(), strict=True):
        assert record in held.get(byte, {-1}), byte
    for _ in range(40):
        ranges = [
            (a := source.randrange(-5, end), a + source.choice([-2, 0, 1, 2, 30, 500]))
            for _ in range(source.choice([0, 1, 2, 9]))
        ]
        expected = {r for a, b in ranges for byte in range(a, b) for r in held.get(byte, ())}
        starts, ends = np.array(ranges, np.int64).reshape(-1, 2).T
        assert places.records_in(starts, ends).tolist() == sorted(expected)
        assert places.count_in(starts, ends) == len(expected)
    assert places.covered_bytes() == len(held)


@pytest.mark.parametrize("seed", range(60))
def test_the_first_and_the_last_record_of_ranges(seed: int) -> None:
    source = random.Random(seed)
    places = some_places(source)
    columns = [holders(RecordPlaces(places.parts, [column])) for column in places.columns]
    end = max((byte for held in columns for byte in held), default=0) + 4
    starts = np.array([source.randrange(end) for _ in range(200)])
    ends = starts + np.array([source.choice([1, 2, 30, 500]) for _ in range(200)])
    first, last = places.bounds_in(starts, ends)
    for i, (a, b) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        expected = (-1, -1)
        for held in columns:  # the last one that has any
            there = [held[byte] for byte in range(a, b) if byte in held]
            if there:
                expected = min(there[0]), max(there[-1])
        assert (first[i], last[i]) == expected


@pytest.mark.parametrize("seed", range(20))
def test_extents_of_many_are_those_of_each(seed: int) -> None:
    source = random.Random(seed)
    places = some_places(source)
    if not len(places):
        return
    wanted = [source.randrange(len(places)) for _ in range(30)]
    starts, ends = places.extents(np.array(wanted))
    single = [places.extents(record) for record in wanted]
    assert starts.tolist() == [a for one, _ in single for a in one.tolist()]
    assert ends.tolist() == [b for _, one in single for b in one.tolist()]
    assert places.extent_counts(wanted).tolist() == [len(one) for one, _ in single]
    sizes, counts = places.sizes()
    each = [int((b - a).sum()) for a, b in (places.extents(r) for r in range(len(places)))]
    assert sorted(np.repeat(sizes, counts).tolist()) == sorted(each)


@pytest.mark.parametrize("record", [-1, 3, 1 << 40])
def test_a_record_that_is_not_there_is_refused(record: int) -> None:
    places = RecordPlaces(one_part(3), [Listed(np.zeros(3, np.int64), np.ones(3, np.uint32))])
    with pytest.raises(IndexError, match="there are 3"):
        places.extents(record)
    assert places.extents([])[0].tolist() == []


def test_regular_records_cost_nothing_however_many() -> None:
    records = 10**12
    places = RecordPlaces(one_part(records), [Strided(8 << 10, np.array([128]), np.array([0]))])
    starts, ends = places.extents([0, records - 1])
    assert starts.tolist() == [128, 128 + (records - 1) * 1024]
    assert (ends - starts).tolist() == [1024, 1024]
    assert places.records_at(np.array([127, 128, 128 + records * 1024])).tolist() == [-1, 0, -1]
    assert places.records_in([1000], [1200]).tolist() == [0, 1]
    assert sum(array.nbytes for array in places.arrays().values()) < 100


def test_bytes_that_neighbours_share_count_once() -> None:
    """The offsets of lists in lists, and bits: each record ends where the next one has begun."""
    places = RecordPlaces(
        one_part(3), [Listed(np.array([10, 14, 18]), np.array([8, 8, 5], np.uint32))]
    )
    assert places.covered_bytes() == 13
    assert places.records_in([14], [15]).tolist() == [0, 1]


def test_lengths_take_eight_bytes_only_where_they_must() -> None:
    assert small_lengths(np.array([0, (1 << 32) - 1])).dtype == np.uint32
    assert small_lengths(np.array([0, 1 << 32])).dtype == np.int64


# ---- keys ---------------------------------------------------------------------------------------


def keys_of(words: list[bytes], *ranges: tuple[int, int, bool]) -> Keys:
    lengths = np.array([len(word) for word in words], np.uint16)
    offsets = np.cumsum(lengths, dtype=np.int64) - lengths
    return Keys(offsets, lengths, np.frombuffer(b"".join(words), np.uint8), ranges)


@pytest.mark.parametrize("ascending", [True, False])
def test_every_key_is_found_with_all_its_records(ascending: bool) -> None:
    source = random.Random(1)
    words = [source.randbytes(source.randrange(4)) for _ in range(500)]
    if ascending:
        words.sort()
    keys = keys_of([*words, b"a", b"b"], (0, 500, ascending), (500, 502, True))
    words += [b"a", b"b"]
    for word in {*words, b"absent", b"\xff" * 9, b"b\0"}:
        assert keys.find(word).tolist() == [i for i, one in enumerate(words) if one == word]


def test_keys_in_an_order_of_their_own_are_found_too() -> None:
    """A comparison function of the program's own is not in the file: the range claims to ascend."""
    words = [b"%d" % number for number in range(300, 0, -1)]
    keys = keys_of(words, (0, 300, True))
    assert all(keys.find(word).tolist() == [i] for i, word in enumerate(words))
    assert keys.find(b"301").tolist() == []
    # halving meets the middle of these first
    keys = keys_of([b"9"] * 5 + [b"5"] * 9 + [b"1"], (0, 15, True))
    assert keys.find(b"5").tolist() == list(range(5, 14))


def test_an_index_survives_its_description() -> None:
    import json

    places = some_places(random.Random(3))
    words = [b"%05d" % i for i in range(len(places))]
    index = RecordIndex(
        "x", 1 << 33, places, keys_of(words, (0, len(places), True)), "batch",
        {"header": 5}, {"a": [1, None]}, {"flags": np.arange(len(places), dtype=np.uint8)},
    )  # fmt: skip
    again = rebuild(json.loads(json.dumps(describe(index))), index.arrays())
    assert describe(again) == describe(index)
    assert {name: a.tolist() for name, a in again.arrays().items()} == {
        name: a.tolist() for name, a in index.arrays().items()
    }
    assert again.find(b"00001").tolist() == [1]
    assert again.index_bytes() == index.index_bytes() > 0
    assert not again.exact
