# SPDX-License-Identifier: Apache-2.0
"""An order before the index is there: from a few pages of an LMDB, against its records."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from conftest import warnings_fail
from record_files import Memory

from uffdprefetch.formats.lmdb import BRANCH, LEAF, META, open_index
from uffdprefetch.formats.lmdb_head import HeadReader, firsts_by_keys, unpadded
from uffdprefetch.formats.reader import FileReader, FormatError
from uffdprefetch.orders.provisional import ProvisionalOrder, provisional_order

pytestmark = warnings_fail
PAGE = 4096
RECORDS = 3000


def make(
    path: Path, keys: list[bytes], sizes: list[int], commit: int = 500, **options: Any
) -> Path:
    """Written in this order, so many records a transaction."""
    database = options.pop("database", None)
    settings = {"subdir": False, "map_size": 1 << 30, "lock": False, "sync": False, "max_dbs": 4}
    with lmdb.open(str(path), **settings) as env:
        opened = env.open_db(database, **options) if database or options else None
        for at in range(0, len(keys), commit):
            with env.begin(write=True, db=opened) as transaction:
                for key, size in zip(keys[at : at + commit], sizes[at : at + commit], strict=True):
                    transaction.put(key, bytes([size % 251]) * size)
    return path


def sizes(seed: int, least: int, most: int, records: int = RECORDS) -> list[int]:
    source = random.Random(seed)
    return [source.randint(least, most) for _ in range(records)]


def names(seed: int) -> list[bytes]:
    source = random.Random(seed)
    return [b"%08d_%s.JPEG" % (i, b"x" * source.randrange(20)) for i in range(RECORDS)]


def provisional(path: Path, records: Any, **limits: Any) -> ProvisionalOrder | None:
    with FileReader(str(path)) as reader:
        return provisional_order(reader, records, seconds=60, **limits)


def check_exact(path: Path, records: np.ndarray, found: ProvisionalOrder) -> None:
    """Each extent of the order is that of the index."""
    index, order = open_index(path), found.order
    which = records[order.item]
    assert (order.starts == index.offset[which]).all()
    assert (order.ends == index.offset[which] + index.length[which]).all()


def hashes() -> list[bytes]:
    source = random.Random(2)
    return [source.randbytes(16) for _ in range(RECORDS)]


KEYS: dict[str, Callable[[], list[bytes]]] = {
    "padded numbers": lambda: [b"%08d" % i for i in range(RECORDS)],
    "from 1": lambda: [b"%06d" % i for i in range(1, RECORDS + 1)],
    "numbers with names": lambda: names(1),
    "behind a prefix": lambda: [b"image-%09d" % i for i in range(1, RECORDS + 1)],
    "unpadded": lambda: [b"%d" % i for i in range(RECORDS)],
    "unpadded from 1": lambda: [b"%d" % i for i in range(1, RECORDS + 1)],
    "big-endian": lambda: [i.to_bytes(8, "big") for i in range(RECORDS)],
    "hashes in key order": lambda: sorted(hashes()),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("least, most", [(3085, 3085), (5000, 30_000), (10, 1500)])
def test_records_of_a_shuffled_order_are_where_the_index_says(
    tmp_path: Path, kind: str, least: int, most: int
) -> None:
    keys, values = KEYS[kind](), sizes(0, least, most)
    path = make(tmp_path / "data.mdb", keys, values, 10**9 if "hashes" in kind else 500)
    records = np.random.default_rng(3).permutation(RECORDS)
    found = provisional(path, records)
    if kind.startswith("hashes") and most < 2000:
        assert found is None  # leaves of uneven values are not alike
        return
    assert found is not None
    assert (found.exact, found.guessed, found.without) == (RECORDS, 0, 0)
    check_exact(path, records, found)


def test_keys_behind_the_records_do_no_harm(tmp_path: Path) -> None:
    keys = [b"%d" % i for i in range(RECORDS)] + [b"__keys__", b"__len__"]
    path = make(tmp_path / "data.mdb", keys, [*sizes(0, 3000, 9000), 200_000, 8])
    records = np.arange(RECORDS)
    found = provisional(path, records)
    assert found is not None and found.exact == RECORDS
    check_exact(path, records, found)


def test_the_one_named_database_is_used(tmp_path: Path) -> None:
    keys = [b"%08d" % i for i in range(RECORDS)]
    path = make(tmp_path / "data.mdb", keys, sizes(0, 3000, 9000), database=b"train")
    records = np.arange(0, RECORDS, 7)
    found = provisional(path, records)
    assert found is not None and found.exact == len(records)
    check_exact(path, records, found)


def test_only_tree_pages_are_read_and_no_more_than_allowed(tmp_path: Path) -> None:
    path = make(tmp_path / "data.mdb", KEYS["padded numbers"](), sizes(0, 3000, 30_000))
    memory = Memory(path.read_bytes())
    found = provisional_order(memory, np.random.default_rng(0).permutation(RECORDS), leaves_max=8)
    assert found is not None and found.leaves_read == 8
    pages = {
        page
        for offset, length in memory.reads
        for page in range(offset // PAGE, -(-(offset + length) // PAGE))
    }
    types = open_index(path).page_types()
    assert np.isin(types[list(pages)], (META, BRANCH, LEAF)).all()
    assert len(pages) < 8 + 12 + 2 + (types == BRANCH).sum() + 1


def test_the_first_records_of_the_order_are_the_exact_ones(tmp_path: Path) -> None:
    path = make(tmp_path / "data.mdb", KEYS["padded numbers"](), sizes(0, 5000, 30_000))
    records = np.random.default_rng(3).permutation(RECORDS)
    found = provisional(path, records, leaves_max=12)
    assert found is not None and found.leaves_read == 12 and found.without > 0
    index, order = open_index(path), found.order
    which = records[order.item]
    exact = (order.starts == index.offset[which]) & (
        order.ends == index.offset[which] + index.length[which]
    )
    assert exact.sum() >= found.exact
    whole = provisional(path, records[:4], leaves_max=4)  # a leaf each
    assert whole is not None and whole.exact == 4


@pytest.mark.parametrize("least, most", [(3085, 3085), (8000, 30_000)])
def test_what_is_not_read_is_covered_by_the_bounds_where_it_is_told(
    tmp_path: Path, least: int, most: int
) -> None:
    records = np.arange(RECORDS)
    path = make(tmp_path / "data.mdb", KEYS["padded numbers"](), sizes(0, least, most), 10**9)
    found = provisional(path, records, leaves_max=12)
    assert found is not None and found.exact < RECORDS
    index, order = open_index(path), found.order
    fetched = np.zeros(len(index.page_types()) + 1, bool)
    for start, end in zip(order.starts.tolist(), order.ends.tolist(), strict=True):
        fetched[start // PAGE : -(-end // PAGE)] = True
    which = records[order.item]
    ends = index.offset[which] + index.length[which] - 1
    assert fetched[index.offset[which] // PAGE].mean() > 0.95
    assert fetched[ends // PAGE].mean() > 0.95
    needed = np.unique(index.offset[which] // PAGE)
    assert found.guessed > 1000
    assert fetched.sum() < 1.6 * (index.length[which] // PAGE + 1).sum() + len(needed)


def test_of_a_long_order_the_beginning_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uffdprefetch.orders.provisional.ITEMS_MAX", 100)
    path = make(tmp_path / "data.mdb", KEYS["padded numbers"](), sizes(0, 3000, 9000))
    found = provisional(path, np.arange(RECORDS))
    assert found is not None and found.order.items == RECORDS
    assert found.order.item.tolist() == list(range(100))
    assert (found.exact, found.without) == (100, RECORDS - 100)


# ---- where nothing can be told ------------------------------------------------------------------


def test_keys_that_tell_nothing_and_leaves_that_differ_give_no_order(tmp_path: Path) -> None:
    path = make(tmp_path / "data.mdb", hashes(), [3085] * RECORDS)  # put in any order
    assert provisional(path, np.arange(RECORDS)) is None


def test_duplicates_give_no_order(tmp_path: Path) -> None:
    keys = [b"%04d" % (i // 3) for i in range(900)]
    path = make(tmp_path / "data.mdb", keys, list(range(1, 301)) * 3, dupsort=True, database=b"d")
    assert provisional(path, np.arange(10)) is None


def test_two_databases_give_no_order(tmp_path: Path) -> None:
    for name in (b"one", b"two"):
        make(tmp_path / "data.mdb", [b"%08d" % i for i in range(100)], [3085] * 100, database=name)
    assert provisional(tmp_path / "data.mdb", np.arange(10)) is None


@pytest.mark.parametrize("records", [[], [-1], [0, RECORDS]])
def test_records_that_are_not_there_give_no_order(tmp_path: Path, records: list[int]) -> None:
    path = make(tmp_path / "data.mdb", KEYS["padded numbers"](), [3085] * RECORDS)
    assert provisional(path, records) is None


def test_another_format_and_an_empty_database_give_no_order(tmp_path: Path) -> None:
    (tmp_path / "npy").write_bytes(b"\x93NUMPY" + bytes(10_000))
    assert provisional(tmp_path / "npy", [0]) is None
    (tmp_path / "none").write_bytes(b"")
    assert provisional(tmp_path / "none", [0]) is None
    assert provisional(make(tmp_path / "data.mdb", [], []), [0]) is None


def test_keys_whose_numbers_repeat_and_skip_are_not_believed(tmp_path: Path) -> None:
    keys = [b"%08d_a" % i for i in range(RECORDS)]
    keys.insert(501, b"%08d_b" % 500)
    del keys[2001]  # of number 2000
    path = make(tmp_path / "data.mdb", keys, [3085] * RECORDS)
    records = np.arange(RECORDS)
    found = provisional(path, records)
    if found is not None:  # the leaves are alike, too
        assert found.how == "leaves alike"
        check_exact(path, records, found)


def test_a_leaf_with_another_number_of_records_is_not_believed(tmp_path: Path) -> None:
    path = make(tmp_path / "data.mdb", KEYS["numbers with names"](), [3085] * RECORDS)
    with FileReader(str(path)) as reader:
        head = HeadReader(reader)
        leaves = head.leaves()
        assert leaves is not None
        leaves.firsts[3:6] += 1
        head.extents(leaves, np.array([0, 1, 7]))
        for wrong in (2, 5):
            with pytest.raises(FormatError, match="other number of records in a leaf"):
                head.extents(leaves, np.array([0, wrong]))
        head.close()


def test_unpadded_numbers_are_not_taken_for_padded_ones() -> None:
    keys = sorted(b"%d" % i for i in range(1000))
    at = keys.index(b"500")
    firsts = firsts_by_keys([b"500"], keys, (np.arange(1000) >= at).astype(int), 1000)
    assert firsts is not None and firsts.tolist() == [0, at, 1000] and at != 500


def test_a_file_cut_short_anywhere_gives_no_order_or_a_right_one(tmp_path: Path) -> None:
    path = make(tmp_path / "data.mdb", KEYS["padded numbers"](), sizes(0, 10, 6000))
    data, index = path.read_bytes(), open_index(path)
    source = random.Random(0)
    records = np.random.default_rng(1).permutation(RECORDS)[:300]
    cuts = [*range(0, 9000, 500), *(source.randrange(len(data)) for _ in range(60))]
    for cut in cuts:
        found = provisional_order(Memory(data[:cut]), records)
        if found is not None:
            which = records[found.order.item]
            right = found.order.starts == index.offset[which]
            assert right.sum() >= found.exact
            assert (found.order.ends <= len(data)).all()


@pytest.mark.slow
def test_damaged_files_neither_crash_nor_hang_nor_point_outside(tmp_path: Path) -> None:
    path = make(tmp_path / "data.mdb", KEYS["padded numbers"](), sizes(0, 10, 6000))
    data = path.read_bytes()
    types = open_index(path).page_types()
    tree = np.flatnonzero(np.isin(types, (META, BRANCH, LEAF)))
    source, records = random.Random(7), np.random.default_rng(1).permutation(RECORDS)[:300]
    told = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(source.randrange(1, 12)):
            page = int(
                source.choice(tree.tolist() if source.random() < 0.5 else tree[:20].tolist())
            )
            at = page * PAGE + source.choice([source.randrange(40), source.randrange(PAGE)])
            damaged[at] = source.choice([0, 1, 0x7F, 0xFF, source.randrange(256)])
        found = provisional_order(Memory(bytes(damaged)), records)
        if found is not None:
            told += 1
            assert (found.order.ends <= len(data) + PAGE).all()
    assert told > 20  # the others were seen to be damaged


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("number", [1, 2, 9, 10, 11, 99, 100, 101, 1234])
def test_unpadded_numbers_are_counted_as_text_sorts_them(least: int, number: int) -> None:
    keys = sorted(b"%d" % i for i in range(least, least + number))
    numbering = unpadded(least, number)
    assert [numbering(key) for key in keys] == list(range(number))
    wrong = (b"", b"00", b"1x", b"%d" % (least + number), b"-1")
    assert [numbering(key) for key in wrong] == [None] * 5
