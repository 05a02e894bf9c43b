# SPDX-License-Identifier: Apache-2.0
"""orders/file_sequence.py: files one after the other are one to whatever asks for records; which of
a job's files may be such; and what is read of them is found out by what their readers map."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from conftest import warnings_fail
from mapping_readers import Readers, byte_keys, lmdb_index, plain_index

from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.places import OFFSET_MAX
from uffdprefetch.orders.file_sequence import FileSequence, sequences
from uffdprefetch.orders.mapping import HypothesisChoice, choose, hypotheses, in_each
from uffdprefetch.predict.order.order import Order

pytestmark = warnings_fail

KIB = 1 << 10


def sequence_of(*indices: RecordIndex) -> FileSequence:
    files = []
    for number, index in enumerate(indices):
        file: Any = Readers(index)
        file.path = f"/data/{number}.bin"
        files.append(file)
    return FileSequence.of(files, indices)


def plain(seed: int, count: int, most: int = 50 * KIB) -> RecordIndex:
    rng = random.Random(seed)
    return plain_index([rng.randint(1, most) for _ in range(count)])


def keyed(seed: int, keys: list[bytes]) -> RecordIndex:
    rng = random.Random(seed)
    return lmdb_index([(key, rng.randint(4 * KIB, 60 * KIB)) for key in keys])


def test_records_and_extents_are_those_of_the_files_one_after_the_other() -> None:
    indices = [plain(1, 20), plain(2, 1), plain(3, 30)]
    joined = sequence_of(*indices)
    index = joined.index
    assert len(index) == 51 and index.keys is None and index.exact
    numbers = np.random.default_rng(1).integers(0, 51, 200)
    starts, ends = index.extents(numbers)
    assert len(starts) == int(index.extent_counts(numbers).sum()) == 200
    for number, start, end in zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True):
        file, inner = (0, number) if number < 20 else (1, 0) if number == 20 else (2, number - 21)
        low, high = indices[file].extents([inner])
        base = int(joined.bases[file])
        assert (start - base, end - base) == (int(low[0]), int(high[0]))
    with pytest.raises(IndexError):
        index.extents([51])


def test_keys_of_all_files_are_found_where_they_are() -> None:
    one, two = keyed(1, [b"a", b"c", b"e"]), keyed(2, [b"b", b"c"])
    index = sequence_of(one, two).index
    assert index.keys is not None
    assert [index.key(i) for i in range(5)] == [b"a", b"c", b"e", b"b", b"c"]
    assert index.find(b"c").tolist() == [1, 4] and index.find(b"b").tolist() == [3]
    assert sequence_of(one, plain(1, 2)).index.keys is None


def test_an_order_is_cut_at_the_files_and_stays_one_order() -> None:
    joined = sequence_of(plain(1, 10), plain(2, 10), plain(3, 10))
    numbers = np.array([25, 3, 4, 29, 3])
    starts, ends = joined.index.extents(numbers)
    parts = joined.orders(Order(starts, ends, np.arange(5) + 1, 7))
    assert [number for number, _ in parts] == [0, 2]
    sizes = (ends - starts).tolist()
    first, last = (part for _, part in parts)
    assert (first.item.tolist(), last.item.tolist()) == ([2, 3, 5], [1, 4])
    assert first.items == last.items == 7
    assert first.before is not None and last.before is not None
    assert first.before.tolist() == [sum(sizes[:1]), sum(sizes[:2]), sum(sizes[:4])]
    assert last.before.tolist() == [0, sum(sizes[:3])]
    assert last.starts.tolist() == joined.files[2].index.extents([5, 9])[0].tolist()


def test_what_is_mapped_of_a_range_is_asked_of_the_files_that_it_is_in() -> None:
    joined = sequence_of(plain_index([8 * KIB]), plain_index([4 * KIB]))
    joined.files[1].read(np.array([0]))
    one, two = joined.bases.tolist()
    starts = np.array([one, two, one, one + 8 * KIB])
    ends = np.array([one + 8 * KIB, two + 4 * KIB, joined.index.file_bytes, two])
    total = joined.index.file_bytes
    assert joined.present(starts, ends).tolist() == [0, 1, 4 * KIB / total, 0]
    assert joined.index.file_bytes < OFFSET_MAX


# ---- which files --------------------------------------------------------------------------------


def test_files_side_by_side_that_have_the_data_sets_records_may_be_it() -> None:
    files = [(f"/train/part-{n}.npy", plain(n, n)) for n in (10, 9, 8)]
    files += [("/valid/part-1.npy", plain(1, 4)), ("/train/labels.bin", plain(2, 27))]
    assert sequences(files, 27) == [(2, 1, 0), (0, 1, 2)]  # by number, and as they were mapped
    assert sequences(files, 17) == [(2, 1), (1, 2)], "some of them: 8 and 9"
    assert sequences(files, 20) == [(2, 1, 0), (0, 1, 2)], "not all of their records"
    assert sequences(files, 28) == [], "there are fewer"
    assert sequences(files[:1], 10) == [], "a single one is no sequence"


def test_databases_with_keys_may_be_a_data_set_together_whatever_is_in_them() -> None:
    files = [(f"/train/{n}/data.mdb", keyed(n, [b"%d" % n])) for n in (2, 1)]
    assert sequences(files, 1000) == [(1, 0), (0, 1)]


# ---- found out ----------------------------------------------------------------------------------


def chosen(joined: FileSequence, lists: list[Any], truth: np.ndarray) -> HypothesisChoice:
    """After 200 samples have been read in shuffled order; ``truth``: the record of each sample."""
    samples = np.random.default_rng(3).permutation(len(truth))[:200]
    for number, file in enumerate(joined.files):
        first = int(joined.index.places.parts.first[number])
        its = truth[samples] - first
        file.read(its[(its >= 0) & (its < len(file.index))])
    more = in_each(joined.indices, len(truth))
    found = hypotheses(joined.index, len(truth), lists, samples, more)
    return choose(joined.index, found, samples, joined.present)


def test_records_in_sequence_are_proven_by_what_is_mapped_of_each_file() -> None:
    joined = sequence_of(plain(1, 900), plain(2, 700))
    choice = chosen(joined, [], np.arange(1600))
    assert [each.name for each in choice.hypotheses] == ["record number = sample number"]
    other = sequence_of(plain(2, 700), plain(1, 900))  # the same files in another order
    choice = chosen(other, [], np.append(np.arange(700, 1600), np.arange(700)))
    assert choice.decided and not choice.hypotheses


def test_keys_in_several_databases_are_proven_by_what_is_mapped_of_each() -> None:
    keys = [b"%08x" % random.Random(i).getrandbits(32) for i in range(1200)]
    joined = sequence_of(keyed(1, keys[:500]), keyed(2, keys[500:]))
    truth = np.array([int(joined.index.find(key)[0]) for key in keys])
    choice = chosen(joined, [byte_keys("keys", keys)], truth)
    assert [each.name for each in choice.hypotheses] == ["keys from .keys"]


@pytest.mark.parametrize("special", [[], [b"__len__"]])
def test_databases_one_after_the_other_whose_keys_say_nothing_go_by_their_records(
    special: list[bytes],
) -> None:
    keys = [b"%08x" % random.Random(i).getrandbits(32) for i in range(1200)]
    joined = sequence_of(keyed(1, keys[:500] + special), keyed(2, keys[500:] + special))
    records = [i for i in range(len(joined.index)) if joined.index.key(i) not in special]
    choice = chosen(joined, [], np.array(records))
    (name,) = [each.name for each in choice.hypotheses]
    assert name.startswith("record number = sample number")
    assert ("without __len__, __len__" in name) == bool(special)


@pytest.mark.parametrize("counts", [(700, 500), (600, 600), (90, 1000, 300)])
def test_databases_in_each_of_which_samples_are_counted_anew(counts: tuple[int, ...]) -> None:
    indices = [
        keyed(number, [b"%d" % i for i in range(count)] + [b"length"])
        for number, count in enumerate(counts)
    ]
    joined = sequence_of(*indices)
    firsts = joined.index.places.parts.first.tolist()
    truth = [
        first + int(index.find(b"%d" % i)[0])
        for first, index, count in zip(firsts, indices, counts, strict=False)
        for i in range(count)
    ]
    choice = chosen(joined, [], np.array(truth))
    assert [each.name for each in choice.hypotheses] == ["keys '%d', from 0, in each"]
    (each,) = choice.hypotheses
    samples = np.random.default_rng(5).integers(0, sum(counts), 100)
    records, which = each.records(samples)
    assert which.tolist() == list(range(100))
    assert records.tolist() == [truth[i] for i in samples.tolist()]
