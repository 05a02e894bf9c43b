# SPDX-License-Identifier: Apache-2.0
"""orders/plan_file.py: what a plan file may say, whose order it is, and the one line for each way
in
which it can be wrong."""

from __future__ import annotations

import base64
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from conftest import HANG_SECONDS, warnings_fail

from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError
from uffdprefetch.formats.detect import FORMATS, open_index
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.places import Listed, Parts, RecordPlaces, Strided
from uffdprefetch.orders import plan_file, stated
from uffdprefetch.orders.plan_file import ParsedPlan, load

pytestmark = [warnings_fail, pytest.mark.usefixtures("own_runtime_directory")]

SCHEMA = "uffdprefetch.plan/1"
RECORD = 1000
COUNT = 50


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """50 raw records of 1000 bytes after a header of 96."""
    path = tmp_path / "raw.bin"
    path.write_bytes(bytes(96 + COUNT * RECORD))
    return path


def entry(**changes: Any) -> dict[str, Any]:
    value: dict[str, Any] = {
        "file": "raw.bin", "unit": "records", "record_size": RECORD, "header_size": 96,
        "epochs": [{"ranks": {"*": [3, 1, 2]}}],
    }  # fmt: skip
    value |= changes
    return {name: each for name, each in value.items() if each is not None}


def written(directory: Path, *files: Any, text: str | bytes | None = None) -> str:
    path = directory / "plan.json"
    if text is None:
        text = json.dumps({"schema": SCHEMA, "files": list(files)})
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


PAGE = 4096


def extents(
    plan: ParsedPlan, path: Path, rank: int | None, epoch: int
) -> list[tuple[int, int]] | None:
    order = plan.order(str(path), None, rank, epoch)
    if order is None:
        return None
    return list(zip(order.starts.tolist(), order.ends.tolist(), strict=True))


def at(record: int) -> tuple[int, int]:
    return 96 + record * RECORD, 96 + (record + 1) * RECORD


# ---- what it may say ----------------------------------------------------------------------------


def test_orders_as_lists_ranges_and_arrays(data: Path) -> None:
    np.save(data.parent / "order.npy", np.array([7, 7, 0]))
    np.save(data.parent / "small.npy", np.array([9], np.uint16))
    ranks = {
        "0": [3, 1, 2], "1": {"range": [10, 13]}, "2": {"range": [5, 0, -2]},
        "3": "order.npy", "4": "small.npy", "5": [], "6": {"range": [4, 4]},
    }  # fmt: skip
    plan = load(written(data.parent, entry(epochs=[{"ranks": ranks}])))
    wanted = [[3, 1, 2], [10, 11, 12], [5, 3, 1], [7, 7, 0], [9], [], []]
    for rank, records in enumerate(wanted):
        assert extents(plan, data, rank, 0) == [at(record) for record in records]
    assert extents(plan, data, 7, 0) is None
    order = plan.order(str(data), None, 3, 0)
    assert order is not None and order.item.tolist() == [0, 1, 2]


def test_byte_ranges_need_no_format(data: Path) -> None:
    data.write_bytes(bytes(5000))
    np.save(data.parent / "b.npy", np.array([[0, 10], [4000, 5000]]))
    ranks = {"0": [[4999, 5000], [7, 7]], "1": "b.npy"}
    changes: dict[str, Any] = {"unit": "bytes", "record_size": None, "header_size": None}
    plan = load(written(data.parent, entry(epochs=[{"ranks": ranks}], **changes)))
    assert extents(plan, data, 0, 0) == [(4999, 5000), (7, 7)]
    assert extents(plan, data, 1, 0) == [(0, 10), (4000, 5000)]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for number in range(300):
            txn.put(b"%05d" % number, b"x" * (10 * number))
        txn.put(b"odd\xff", b"odd")
        txn.put("schlüssel".encode(), b"utf-8")
    return tmp_path / "db"


def test_keys_are_text_hex_or_base64(database: Path, tmp_path: Path) -> None:
    keys = [
        "00007", {"hex": b"odd\xff".hex()}, {"base64": base64.b64encode(b"00300"[:5]).decode()},
        "schlüssel", "00007",
    ]  # fmt: skip
    keys[2] = {"base64": base64.b64encode(b"00299").decode()}
    same = ["00299", "00000", "00007"]
    entry = {"file": "db", "unit": "keys", "epochs": [{"ranks": {"0": keys, "1": same}}]}
    plan = load(written(tmp_path, entry))
    path = database / "data.mdb"
    content = path.read_bytes()

    def read(rank: int) -> list[bytes]:
        found = extents(plan, path, rank, 0)
        assert found is not None
        return [content[a:b] for a, b in found if b - a != PAGE]

    assert read(0) == [b"x" * 70, b"odd", b"x" * 2990, b"utf-8", b"x" * 70]
    assert read(1) == [b"x" * 2990, b"", b"x" * 70]


def test_the_leaf_that_leads_to_a_value_comes_before_it_once(
    database: Path, tmp_path: Path
) -> None:
    entry = {"file": "db", "unit": "records", "epochs": [{"ranks": {"0": [299, 298, 0, 1, 299]}}]}
    plan = load(written(tmp_path, entry))
    path = database / "data.mdb"
    index = open_index(str(path))
    order = plan.order(str(path), None, 0, 0)
    assert order is not None
    leaf = int(index.columns["leaf_page"][299]) * PAGE
    assert int(index.columns["leaf_page"][298]) * PAGE == leaf  # record 0 is small: in its leaf
    values = [tuple(int(end) for (end,) in index.extents([record])) for record in (299, 298, 1)]
    found = list(zip(order.starts.tolist(), order.ends.tolist(), order.item.tolist(), strict=True))
    assert found[:3] == [(leaf, leaf + PAGE, 0), (*values[0], 0), (*values[1], 1)]
    assert found[-1] == (*values[0], 4)
    assert sum(end - start == PAGE for start, end, _ in found) == 1


def test_keys_of_one_length_are_found_as_one_by_one(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for number in range(300):
            txn.put(number.to_bytes(4, "little"), b"x" * number)  # zeros at the end of keys
    rng = random.Random(1)
    keys = [rng.randrange(300).to_bytes(4, "little") for _ in range(500)]
    ranks = {"0": [{"hex": key.hex()} for key in keys]}
    plan = load(written(tmp_path, {"file": "db", "unit": "keys", "epochs": [{"ranks": ranks}]}))
    found = extents(plan, tmp_path / "db" / "data.mdb", 0, 0)
    assert found is not None
    assert [b - a for a, b in found] == [int.from_bytes(key, "little") for key in keys]


def test_a_key_of_several_records_is_one_item_of_all_of_them(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24, max_dbs=1) as env:
        dup = env.open_db(b"duplicates", dupsort=True)
        with env.begin(write=True, db=dup) as txn:
            for value in (b"one", b"three", b"two"):
                txn.put(b"k", value)
            txn.put(b"l", b"last")
    ranks = {"*": ["l", "k"]}
    plan = load(written(tmp_path, {"file": "db", "unit": "keys", "epochs": [{"ranks": ranks}]}))
    order = plan.order(str(tmp_path / "db" / "data.mdb"), None, 0, 0)
    assert order is not None
    assert (order.items, order.item.tolist()) == (2, [0, 1, 1, 1])
    assert (order.ends - order.starts).tolist() == [4, 3, 5, 3]


def test_epochs_ranks_and_what_goes_on(data: Path) -> None:
    epochs = [
        {"ranks": {"0": [0], "*": [1]}},
        {"ranks": {"12": [2]}},
    ]  # fmt: skip
    plan = load(written(data.parent, entry(epochs=epochs)))
    ask = [(0, 0), (12, 0), (None, 0), (12, 1), (0, 1), (None, 1), (12, 2), (12, -1)]
    found = [extents(plan, data, rank, epoch) for rank, epoch in ask]
    assert found == [[at(0)], [at(1)], [at(1)], [at(2)], None, None, None, None]
    plan = load(written(data.parent, entry(epochs=epochs, repeat=True)))
    assert extents(plan, data, 12, 1000) == [at(2)]
    assert extents(plan, data, 0, 1000) is None


def test_which_file_is_meant(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    os.link(data, other)
    (tmp_path / "link.bin").symlink_to(data)
    plan = load(written(tmp_path, entry()))
    status = data.stat()
    assert extents(plan, tmp_path / "link.bin", 0, 0) is not None
    assert extents(plan, other, 0, 0) is None
    assert plan.file(str(other), (status.st_dev, status.st_ino)) is plan.files[0]
    assert plan.file(str(data), (status.st_dev, status.st_ino + 1)) is None
    assert plan.file("/nowhere", None) is None
    glob = load(written(tmp_path, entry(file="o*.b?n")))
    assert glob.files[0].data_files() == [str(other)]
    assert extents(glob, other, 0, 0) == [at(3), at(1), at(2)]
    assert extents(glob, data, 0, 0) is None
    named = tmp_path / "a[1].bin"
    os.link(data, named)
    assert extents(load(written(tmp_path, entry(file="a[1].bin"))), named, 0, 0) is not None


def test_the_index_is_made_once_and_again_when_the_file_changes(data: Path) -> None:
    made = []

    def index(entry: plan_file.FilePlan, path: str) -> RecordIndex | None:
        made.append(path)
        return entry.index(path)

    plan = ParsedPlan("", load(written(data.parent, entry())).files, index)
    for _ in range(3):
        assert extents(plan, data, 0, 0) is not None
    assert made == [str(data)]
    os.truncate(data, 96 + 3 * RECORD)
    with pytest.raises(UffdPrefetchError, match=r"record 3: the file has 3, from 0 on"):
        extents(plan, data, 0, 0)
    assert len(made) == 2


def test_records_in_several_pieces_and_records_packed_together() -> None:
    parts = Parts(np.array([0, 4], np.int64))
    zero = np.zeros(1, np.int64)
    column = Strided(8 * 10, np.array([100]), zero)
    listed = Listed(np.array([500, 510, 520, 530]), np.array([4, 0, 3, 2], np.uint32))
    index = RecordIndex("arrow", 1000, RecordPlaces(parts, [column, listed]))
    order = stated.of_records("here", np.array([2, 0]), index)
    assert order.starts.tolist() == [120, 520, 100, 500]
    assert order.ends.tolist() == [130, 523, 110, 504]
    assert order.item.tolist() == [0, 0, 1, 1]
    packed = Listed(np.array([0, 0, 0, 300]), np.array([300, 300, 300, 300], np.uint32))
    index = RecordIndex("arrow", 1000, RecordPlaces(parts, [packed]), granularity="batch")
    order = stated.of_records("here", np.array([0, 1, 3, 3, 2, 1]), index)
    assert (order.items, order.item.tolist()) == (6, [0, 2, 4])
    assert order.starts.tolist() == [0, 300, 0]


# ---- what it may not say ------------------------------------------------------------------------


def line(action: Callable[[], Any]) -> str:
    with pytest.raises(UffdPrefetchError) as caught:
        action()
    assert caught.value.exit_code == EXIT_USAGE
    message = caught.value.message
    assert "\n" not in message and len(message) < 500
    return message


def bad(rank: str, order: Any) -> dict[str, Any]:
    return {"epochs": [{"ranks": {"*": [0]}}, {"ranks": {"*": [0], rank: order}}]}


HERE = 'files[0].epochs[1].ranks["1"]'

WRONG: list[tuple[Any, str]] = [
    ({"file": 3}, "files[0].file: 3: text"),
    ({"file": ""}, "files[0].file: an empty text: text"),
    ({"file": "a\0b"}, "files[0].file: text: text"),
    ({"unit": "rows"}, "files[0].unit: 'rows': one of records, keys, bytes"),
    ({"unit": []}, "files[0].unit: a list: one of records, keys, bytes"),
    ({"repeat": 1}, "files[0].repeat: 1: true or false"),
    ({"epoch": []}, "files[0]: unknown key 'epoch', the nearest is 'epochs'"),
    ({"epochs": None}, "files[0]: no 'epochs'"),
    ({"epochs": []}, "files[0].epochs: an empty list: a list of one or more"),
    ({"epochs": {}}, "files[0].epochs: an object: a list of one or more"),
    ({"epochs": [[]]}, "files[0].epochs[0]: a list: an object with ranks"),
    ({"epochs": [{}]}, "files[0].epochs[0]: no 'ranks'"),
    ({"epochs": [{"ranks": {}}]}, "files[0].epochs[0].ranks: an object: an object with a rank"),
    ({"epochs": [{"ranks": [1]}]}, "files[0].epochs[0].ranks: a list: an object with a rank"),
    ({"format": "zip"}, f"files[0].format: 'zip': one of {', '.join(FORMATS)}"),
    ({"format": "lmdb"}, "files[0].record_size: of raw records, not of lmdb"),
    ({"format": "raw", "record_size": None, "header_size": None}, "files[0].format: raw records:"),
    ({"record_size": None}, "files[0].header_size: of raw records: give record_size too"),
    ({"record_size": 0}, "files[0].record_size: 0: a size, 1 or more bytes"),
    ({"record_size": "0"}, "files[0].record_size: 0: a size, 1 or more bytes"),
    ({"record_size": 1.5}, "files[0].record_size: 1.5: a size, 1 or more bytes"),
    ({"record_size": True}, "files[0].record_size: true: a size, 1 or more bytes"),
    ({"record_size": "4 x"}, "files[0].record_size: not a size: '4 x'"),
    ({"header_size": -1}, "files[0].header_size: -1: a size, 0 or more bytes"),
    (bad("01", [0]), 'files[0].epochs[1].ranks["01"]: a rank is a number as "0"'),
    (bad("-1", [0]), 'files[0].epochs[1].ranks["-1"]: a rank is a number as "0"'),
    (bad("٣", [0]), 'files[0].epochs[1].ranks["\\u0663"]: a rank is a number as "0"'),
    (bad("1", 7), HERE + ": 7: a list of record numbers"),
    (bad("1", None), HERE + ": null: a list of record numbers"),
    (bad("1", [0] * 17 + [-1]), HERE + "[17]: -1: a record's number, from 0"),
    (bad("1", [0, 2.0]), HERE + "[1]: 2.0: a record's number, from 0"),
    (bad("1", [True]), HERE + "[0]: true: a record's number, from 0"),
    (bad("1", [None]), HERE + "[0]: null: a record's number, from 0"),
    (bad("1", ["7"]), HERE + "[0]: text: a record's number, from 0"),
    (bad("1", [2**63]), HERE + "[0]: 9223372036854775808: a record's number, from 0"),
    (bad("1", [10**99]), HERE + "[0]: a number of 100 digits: a record's number, from 0"),
    (bad("1", {"rang": [1]}), HERE + ": unknown key 'rang', the nearest is 'range'"),
    (bad("1", {}), HERE + ": no 'range'"),
    (bad("1", {"range": 5}), HERE + ".range: 5: [start, stop] or [start, stop, step]"),
    (bad("1", {"range": [5]}), HERE + ".range: a list: [start, stop] or [start, stop, step]"),
    (bad("1", {"range": [0, "x"]}), HERE + ".range[1]: text: a whole number"),
    (bad("1", {"range": [0, 2**70]}), HERE + ".range[1]: 1180591620717411303424: a whole number"),
    (bad("1", {"range": [0, 9, 0]}), HERE + ".range[2]: a step of 0 goes nowhere"),
    (bad("1", {"range": [5, -5, -1]}), HERE + ".range: [5, -5, -1]: it goes below record 0"),
    (bad("1", {"range": [0, 10**9]}), HERE + ": 1,000,000,000 items: at most 67,108,864"),
    (bad("1", {"range": [0, 2**63 - 1]}), HERE + ": 9,223,372,036,854,775,807 items: at most"),
    (bad("1", "order.txt"), HERE + ": 'order.txt': the name of a .npy file, or a list"),
    (bad("1", "/tmp/order.npy"), HERE + ": '/tmp/order.npy': a file beside the plan file"),
    (bad("1", "../order.npy"), HERE + ": '../order.npy': a file beside the plan file"),
    (bad("1", "gone.npy"), HERE + ": cannot read {}/gone.npy: No such file or directory"),
    ({"unit": "keys"} | bad("1", "a.npy"), "files[0].epochs[0].ranks[\"*\"][0]: 0: an object"),
    ({"unit": "bytes"} | bad("1", [0]), "files[0].epochs[0].ranks[\"*\"][0]: 0: [start, end]"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_each_error_says_where_in_the_file(
    data: Path, changes: dict[str, Any], message: str
) -> None:
    value = entry() | changes
    value = {name: each for name, each in value.items() if each is not None}
    path = written(data.parent, value)
    wanted = message.replace("{}", str(data.parent))
    assert line(lambda: load(path)).startswith(f"{path}: {wanted}")


KEYS: list[tuple[Any, str]] = [
    ("a.npy", ": text: a list of keys"),
    ({"range": [0, 1]}, ": an object: a list of keys"),
    ([7], "[0]: 7: an object with hex, base64"),
    (["a", {}], "[1]: a key is text, "),
    (["a", {"hex": "00", "base64": ""}], "[1]: a key is text, "),
    (["a", {"hax": "00"}], "[1]: unknown key 'hax', the nearest is 'hex'"),
    ([{"hex": "0g"}], "[0].hex: '0g': no hex"),
    ([{"hex": 7}], "[0].hex: 7: text"),
    ([{"base64": "a"}], "[0].base64: 'a': no base64"),
    ([{"base64": "\u00e9"}], "[0].base64: 'é': no base64"),
]


@pytest.mark.parametrize(("order", "message"), KEYS)
def test_each_wrong_key_says_where(tmp_path: Path, order: Any, message: str) -> None:
    value = {"file": "db", "unit": "keys", "epochs": [{"ranks": {"0": order}}]}
    path = written(tmp_path, value)
    told = line(lambda: load(path))
    assert told.startswith(f'{path}: files[0].epochs[0].ranks["0"]{message}')


RANGES: list[tuple[Any, str]] = [
    ({"range": [0, 1]}, ": an object: a list of [start, end]"),
    ([[0, 1], 5], "[1]: 5: [start, end] in bytes, from 0"),
    ([[0, 1, 2]], "[0]: a list: [start, end] in bytes, from 0"),
    ([[0, -1]], "[0]: a list: [start, end] in bytes, from 0"),
    ([[0, True]], "[0]: a list: [start, end] in bytes, from 0"),
    ([[0, 1], [5, 4]], "[1]: [5, 4] is no range of bytes"),
]


@pytest.mark.parametrize(("order", "message"), RANGES)
def test_each_wrong_range_says_where(data: Path, order: Any, message: str) -> None:
    path = written(
        data.parent, {"file": "raw.bin", "unit": "bytes", "epochs": [{"ranks": {"0": order}}]}
    )
    assert line(lambda: load(path)).startswith(f'{path}: files[0].epochs[0].ranks["0"]{message}')


def test_what_only_the_data_file_can_tell(data: Path, database: Path) -> None:
    directory = data.parent

    def told(value: dict[str, Any], path: Path) -> str:
        plan = load(written(directory, value))
        return line(lambda: plan.order(str(path), None, 1, 2)).removeprefix(f"{plan.path}: ")

    epochs = [{"ranks": {"*": [0]}}] * 2 + [{"ranks": {"1": [*range(17), 50]}}]
    here = 'files[0].epochs[2].ranks["1"]'
    assert told(entry(epochs=epochs), data) == (
        here + "[17]: record 50: the file has 50, from 0 on"
    )
    np.save(directory / "o.npy", np.array([1, -5]))
    epochs[2] = {"ranks": {"1": "o.npy"}}
    assert told(entry(epochs=epochs), data) == here + "[1]: record -5: the file has 50, from 0 on"
    epochs[2] = {"ranks": {"1": {"range": [0, 100, 7]}}}
    assert told(entry(epochs=epochs), data) == here + "[8]: record 56: the file has 50, from 0 on"
    value = {"file": "raw.bin", "unit": "bytes", "repeat": True}
    value["epochs"] = [{"ranks": {"1": [[0, 9], [9, 60_000]]}}]
    assert told(value, data) == (
        'files[0].epochs[0].ranks["1"][1]: a range up to byte 60000: the file has 50096'
    )
    np.save(directory / "b.npy", np.array([[0, 9], [-9, 60]]))
    value["epochs"] = [{"ranks": {"1": "b.npy"}}]
    assert told(value, data) == ('files[0].epochs[0].ranks["1"][1]: [-9, 60] is no range of bytes')
    value = {"file": "db", "unit": "keys", "repeat": True, "epochs": [{"ranks": {"1": ["00001"]}}]}
    mdb = database / "data.mdb"
    for keys, text in (
        (["00001", "nope"], "[1]: no record has the key 'nope'"),
        (["00001", "00301"], "[1]: no record has the key '00301'"),
        ([{"hex": "ff"}], "[0]: no record has the key hex ff"),
        (["k" * 300], "[0]: no record has the key '" + "k" * 56 + "..."),
    ):
        value["epochs"] = [{"ranks": {"1": keys}}]
        assert told(value, mdb) == 'files[0].epochs[0].ranks["1"]' + text
    value = entry(unit="keys", epochs=[{"ranks": {"1": ["a"]}}], repeat=True)
    assert told(value, data) == (
        'files[0].epochs[0].ranks["1"]: keys: a file of format raw has none'
    )
    plan = load(written(directory, entry(file="none*.bin")))
    assert "files[0].file: no file is meant by" in line(plan.files[0].data_files)
    plan = load(written(directory, entry(file="gone.bin")))
    assert "files[0].file: cannot read" in line(plan.files[0].data_files)
    assert plan.order(str(data), None, 0, 0) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: no JSON"),
        ('{"schema":\n  }', "line 2, column 3: no JSON"),
        (b"\xff\xfe{", ""),
        (b'{"a": "\x80"}', "no UTF-8 text at byte 7"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 100_000, "Exceeds the limit"),
        ("[]", "a list: an object with schema, files, paths"),
        ("null", "null: an object with schema, files, paths"),
        ("NaN", "nan: an object with schema, files, paths"),
        ('{"files": []}', "no 'schema'"),
        ('{"schema": 1, "files": []}', "schema: no text, not 'uffdprefetch.plan/1'"),
        ('{"schema": "uffdprefetch.plan/2", "files": [1]}', "schema: 'uffdprefetch.plan/2', not"),
        ('{"schema": "uffdprefetch.plan/1", "files": []}', "files: an empty list"),
        ('{"schema": "uffdprefetch.plan/1", "files": [1]}', "files[0]: 1: an object with file"),
        ('{"schema": "uffdprefetch.plan/1", "file": [1]}', "unknown key 'file', the nearest is"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' stands twice in one object"),
    ],
)
def test_what_is_no_plan_at_all(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = written(tmp_path, text=text)
    assert line(lambda: load(path)).startswith(f"{path}: {message}")


def test_one_file_twice_is_wrong(data: Path) -> None:
    path = written(data.parent, entry(), entry(file="./raw.bin"))
    assert line(lambda: load(path)) == (
        f"{path}: files[1].file: './raw.bin' is what files[0] is about"
    )


# ---- hostile ------------------------------------------------------------------------------------


def test_arrays_that_are_none(data: Path) -> None:
    directory = data.parent
    path = written(directory, entry(epochs=[{"ranks": {"0": "o.npy"}}]))
    npy = directory / "o.npy"
    here = f'{path}: files[0].epochs[0].ranks["0"]: {npy}: '
    np.save(npy, np.array([1, "x"], object), allow_pickle=True)
    assert line(lambda: load(path)).startswith(here + "array of Python objects")
    np.save(npy, np.array([1.0, 2.0]))
    assert line(lambda: load(path)) == here + "an array of <f8, not of int64"
    np.save(npy, np.array([True]))
    assert line(lambda: load(path)) == here + "an array of |b1, not of int64"
    np.save(npy, np.zeros((3, 2), np.int64))
    assert line(lambda: load(path)) == here + "an array of shape (3, 2), not (n,)"
    np.save(npy, np.zeros((), np.int64))
    assert line(lambda: load(path)) == here + "an array of shape (), not (n,)"
    np.save(npy, np.array([2**64 - 1], np.uint64))
    plan = load(path)
    assert line(lambda: plan.order(str(data), None, 0, 0)) == here + "a number beyond 2^63-1"
    np.save(npy, np.zeros(9, np.int64))
    plan = load(path)
    os.truncate(npy, 130)
    assert line(lambda: plan.order(str(data), None, 0, 0)) == here + "it has become shorter"
    assert line(lambda: load(path)).startswith(here + "file cut short")
    npy.unlink()
    npy.symlink_to(npy.name)
    assert line(lambda: load(path)).endswith("o.npy: Too many levels of symbolic links")
    npy.unlink()
    os.mkfifo(npy)
    assert line(lambda: load(path)).endswith("it is no regular file")
    value = entry(unit="bytes", epochs=[{"ranks": {"0": "b.npy"}}], record_size=None)
    np.save(directory / "b.npy", np.zeros((4, 3), np.int64))
    path = written(directory, {n: v for n, v in value.items() if n != "header_size"})
    assert line(lambda: load(path)).endswith("b.npy: an array of shape (4, 3), not (n, 2)")


def test_a_plan_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "fifo").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "fifo")
    assert "Too many levels" in line(lambda: load(str(tmp_path / "loop")))
    assert "no regular file" in line(lambda: load(str(tmp_path / "fifo")))
    assert "no regular file" in line(lambda: load(str(tmp_path)))
    assert "No such file" in line(lambda: load(str(tmp_path / "gone")))
    with open(tmp_path / "big", "wb") as file:
        file.truncate(plan_file.FILE_MAX_BYTES + 1)
    assert "at most 33554432 can be read" in line(lambda: load(str(tmp_path / "big")))


#: A plan that would need more than this is refused before it has it.
MEMORY_BYTES = 3 << 30


def limited(code: str) -> subprocess.CompletedProcess[str]:
    """Run it where no more memory can be had than that."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        timeout=HANG_SECONDS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )  # fmt: skip


@pytest.mark.slow
def test_huge_orders_take_no_memory_before_they_are_refused(data: Path) -> None:
    directory = data.parent
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (%d,), }"
    count = 1 << 40
    text = (header % count).ljust(117) + b"\n"
    with open(directory / "o.npy", "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
        file.truncate(file.tell() + 8 * count)
    huge = "[" + "{}," * 10_000_000 + "0]"
    plans = [
        json.dumps({"schema": SCHEMA, "files": [entry(epochs=[{"ranks": {"0": order}}])]})
        for order in ("o.npy", {"range": [0, 1 << 62]})
    ]
    plans.append(f'{{"schema": "{SCHEMA}", "files": {huge}}}')
    for number, text_ in enumerate(plans):
        path = written(directory, text=text_)
        code = (
            "from uffdprefetch.orders.plan_file import load\n"
            "from uffdprefetch.base.errors import UffdPrefetchError\n"
            f"try: load({path!r})\n"
            "except UffdPrefetchError as e: print(e.message)"
        )
        done = limited(code)
        told = ("1,099,511,627,776 items", "4,611,686,018,427,387,904 items", "files[0]: no 'file'")
        assert told[number] in done.stdout, done.stderr


def damaged(rng: random.Random, value: Any) -> Any:
    """The same with one part of it replaced, left out, doubled or moved."""
    odd = [None, True, -1, 0, 1.5, 2**63, "", "x", [], {}, [[]], {"range": [0, 3]}, "o.npy", "*"]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        changed = dict(value)
        what = rng.random()
        if what < 0.1:
            del changed[name]
        elif what < 0.2:
            changed[name + rng.choice("sx ")] = changed.pop(name)
        else:
            changed[name] = damaged(rng, value[name])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], damaged(rng, value[at]), *value[at + (rng.random() < 0.9) :]]
    if type(value) is int and rng.random() < 0.5:
        return rng.randrange(60)
    return rng.choice(odd)


def test_damaged_plans_are_refused_in_one_line_or_read(data: Path) -> None:
    directory = data.parent
    np.save(directory / "o.npy", np.arange(9))
    epochs = [{"ranks": {"0": [1, 2, 3], "*": "o.npy"}}, {"ranks": {"1": {"range": [0, 9, 2]}}}]
    ranges = entry(unit="bytes", file="other", epochs=[{"ranks": {"0": [[0, 5], [7, 9]]}}])
    keys = entry(unit="keys", file="third", epochs=[{"ranks": {"0": ["a", {"hex": "00"}]}}])
    whole = {"schema": SCHEMA, "files": [entry(epochs=epochs, repeat=True), ranges, keys]}
    rng = random.Random(20)
    refused = read = 0
    for _ in range(3000):
        value = whole
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = damaged(rng, value)
        path = written(directory, text=json.dumps(value))
        try:
            plan = load(path)
            for rank in (0, 1):
                plan.order(str(data), None, rank, 0)
            read += 1
        except UffdPrefetchError as error:
            refused += 1
            assert error.exit_code == EXIT_USAGE
            assert path in error.message or str(directory) in error.message
            assert "\n" not in error.message and len(error.message) < 400
    assert refused > 1500 and read > 30


def test_plans_with_damaged_bytes_are_refused_in_one_line_or_read(data: Path) -> None:
    directory = data.parent
    text = json.dumps({"schema": SCHEMA, "files": [entry()]}).encode()
    rng = random.Random(21)
    refused = 0
    for _ in range(2000):
        raw = bytearray(text)
        for _ in range(rng.choice((1, 2, 8))):
            raw[rng.randrange(len(raw))] = rng.choice((rng.randrange(256), *b'{}[]",:0'))
        end = rng.choice((len(raw), rng.randrange(len(raw))))
        path = written(directory, text=bytes(raw[:end]))
        try:
            load(path)
        except UffdPrefetchError as error:
            refused += 1
            assert error.exit_code == EXIT_USAGE and "\n" not in error.message
    assert refused > 1200
