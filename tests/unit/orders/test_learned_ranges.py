# SPDX-License-Identifier: Apache-2.0
"""orders/learned_ranges.py and learned_plan.py: what is kept, under which name, and what is no
order."""

from __future__ import annotations

import json
import os
import random
from array import array
from pathlib import Path

import numpy as np
import pytest
from conftest import warnings_fail

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.orders import learned_plan, learned_ranges, plan_file
from uffdprefetch.orders.learned_ranges import document_path, name_of, names
from uffdprefetch.predict.first_touches import RankOf
from uffdprefetch.state.file_times import Times

pytestmark = warnings_fail

BLOCK = 64 << 10
BLOCKS = 40
SIZE = BLOCKS * BLOCK - 7
TIMES = Times(SIZE, 5, 6)
RANK = RankOf(3, 8)


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data"
    path.write_bytes(b"")
    os.truncate(path, SIZE)
    return str(path)


@pytest.fixture
def kept(tmp_path: Path) -> str:
    return str(tmp_path / "mine.ranges")


def order(seed: int = 1, count: int = BLOCKS) -> array[int]:
    starts = [block * BLOCK for block in random.Random(seed).sample(range(BLOCKS), count)]
    return array("q", [at for start in starts for at in (start, min(start + BLOCK, SIZE))])


def store(kept: str, data: str, spans: array[int] | None = None, rank: RankOf = RANK) -> str:
    name = name_of(data, TIMES, rank)
    learned_ranges.store(kept, name, data, spans if spans is not None else order())
    return name


def test_an_order_is_read_as_it_was_written(kept: str, data: str) -> None:
    name = store(kept, data)
    found = learned_plan.load(document_path(kept, name))
    assert (found.file, found.rank) == (data, RANK) and found.spans(SIZE) == order()
    assert names(kept) == [name]


def test_it_is_a_plan_file_with_its_numbers_beside(kept: str, data: str) -> None:
    name = store(kept, data)
    plan = plan_file.load(document_path(kept, name))
    told = plan.order(data, None, RANK.rank, 0)
    assert told is not None and told.starts.tolist() == order()[::2].tolist()
    assert plan.order(data, None, 4, 0) is None and plan.order(data, None, RANK.rank, 1) is None
    numbers = np.load(Path(kept, f"{name}.npy"))
    assert numbers.shape == (BLOCKS, 2) and numbers.dtype == np.int64


def test_it_is_for_its_users_eyes_alone_and_nothing_is_left_beside(kept: str, data: str) -> None:
    name = store(kept, data)
    assert os.stat(kept).st_mode & 0o777 == 0o700
    assert sorted(os.listdir(kept)) == [f"{name}.json", f"{name}.npy"]
    for one in os.listdir(kept):
        assert os.stat(Path(kept, one)).st_mode & 0o777 == 0o600
    assert learned_ranges.sizes(kept, name)[0] == sum(
        os.stat(Path(kept, one)).st_size for one in os.listdir(kept)
    )


def test_a_path_that_is_no_text_is_kept_as_it_is(kept: str, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(str(tmp_path)) + b"/\xff[a]*")
    Path(path).touch()
    assert learned_plan.load(document_path(kept, store(kept, path))).file == path


@pytest.mark.parametrize(
    "other",
    [
        ("/other", TIMES, RANK), ("/data", TIMES._replace(size_bytes=1), RANK),
        ("/data", TIMES._replace(mtime_ns=1), RANK), ("/data", TIMES._replace(ctime_ns=1), RANK),
        ("/data", TIMES, RankOf(4, 8)), ("/data", TIMES, RankOf(3, 4)),
    ],
    ids=["path", "size", "mtime", "ctime", "rank", "world"],
)  # fmt: skip
def test_another_file_rank_or_number_of_ranks_has_another_name(
    other: tuple[str, Times, RankOf],
) -> None:
    assert name_of(*other) != name_of("/data", TIMES, RANK)


# ---- what is no order ---------------------------------------------------------------------------


def change(kept: str, name: str, **entry: object) -> None:
    path = Path(document_path(kept, name))
    document = json.loads(path.read_text())
    document["files"][0].update(entry)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "entry",
    [
        {"unit": "records", "epochs": [{"ranks": {"3": [1, 2]}}]},
        {"epochs": []},
        {"epochs": [{"ranks": {"3": []}}, {"ranks": {"3": []}}]},
        {"epochs": [{"ranks": {"4": [[0, 1]]}}]},
        {"epochs": [{"ranks": {"*": [[0, 1]]}}]},
        {"epochs": [{"ranks": {"3": [[0, 1]], "4": [[0, 1]]}}]},
        {"epochs": [{"ranks": {"3": "/etc/passwd"}}]},
        {"epochs": [{"ranks": {"3": "fifo.npy"}}]},
        {"epochs": [{"ranks": {"3": [[5, 1]]}}]},
        {"epochs": [{"ranks": {"3": [[-1, 1 << 70]]}}]},
        {"file": "*"},
        {"file": 5},
        {"more": 1},
    ],
    ids=str,
)
def test_another_plan_is_none(kept: str, data: str, entry: dict[str, object]) -> None:
    name = store(kept, data)
    os.mkfifo(Path(kept, "fifo.npy"))
    change(kept, name, **entry)
    with pytest.raises(UffdPrefetchError) as raised:
        learned_plan.load(document_path(kept, name))
    assert raised.value.exit_code == 2 and "\n" not in raised.value.message


def test_a_range_beyond_the_file_or_more_ranges_than_blocks_are_refused(
    kept: str, data: str
) -> None:
    for spans in (array("q", [0, SIZE + 1]), array("q", [0, 1] * (BLOCKS + 1))):
        found = learned_plan.load(document_path(kept, store(kept, data, spans)))
        with pytest.raises(UffdPrefetchError):
            found.spans(SIZE)


def test_what_is_damaged_is_an_error_or_an_order_within_the_file(kept: str, data: str) -> None:
    name, chance = store(kept, data), random.Random(7)
    whole = {end: Path(kept, name + end).read_bytes() for end in (".json", ".npy")}
    for _ in range(300):
        end = chance.choice(list(whole))
        spoiled = bytearray(whole[end])
        if chance.random() < 0.5:
            del spoiled[chance.randrange(len(spoiled)) :]
        else:
            spoiled[chance.randrange(len(spoiled))] ^= 1 << chance.randrange(8)
        Path(kept, name + end).write_bytes(spoiled)
        try:
            spans = learned_plan.load(document_path(kept, name)).spans(SIZE)
        except UffdPrefetchError as error:
            assert "\n" not in error.message
        else:
            assert min(spans) >= 0 and max(spans) <= SIZE and len(spans) <= 2 * BLOCKS
        Path(kept, name + end).write_bytes(whole[end])


def test_a_large_document_is_not_read(kept: str, data: str) -> None:
    path = document_path(kept, store(kept, data))
    Path(path).write_text(" " * (1 << 20))
    with pytest.raises(UffdPrefetchError, match="no order that was learned"):
        learned_plan.load(path)


def test_other_files_in_a_directory_are_no_orders(kept: str, data: str) -> None:
    name = store(kept, data)
    for other in ("x.json", f"{name}.json.tmp", f".{name}.json", f"{name}0000000000.json"):
        Path(kept, other).write_text("{}")
    assert names(kept) == [name] and names(f"{kept}/none") == []


# ---- what goes ----------------------------------------------------------------------------------


def test_orders_in_older_versions_of_a_file_go_when_a_newer_one_is_written(
    kept: str, data: str
) -> None:
    times = [TIMES._replace(mtime_ns=ns) for ns in range(3)]
    ranks = [RankOf(0, 2), RankOf(1, 2)]
    for was in times:
        for rank in ranks:
            learned_ranges.store(kept, name_of(data, was, rank), data, order())
    newest = name_of(data, times[2], ranks[0])
    learned_ranges.tidy(kept, [newest])
    others = [name_of(data, was, ranks[1]) for was in times]
    assert names(kept) == sorted([newest, *others]), "of the rank that was written"


def test_of_too_many_orders_the_oldest_go(
    kept: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [store(kept, data, rank=RankOf(n, 9)) for n in range(9)]
    for age, name in enumerate(written):
        os.utime(document_path(kept, name), ns=(0, 10**9 * age))
    one, _ = learned_ranges.sizes(kept, written[0])
    monkeypatch.setattr(learned_ranges, "ORDERS_MAX", 6)
    learned_ranges.tidy(kept, [])
    assert names(kept) == sorted(written[3:])
    monkeypatch.setattr(learned_ranges, "BYTES_MAX", 4 * one)
    learned_ranges.tidy(kept, [])
    assert names(kept) == sorted(written[5:])
    assert len(os.listdir(kept)) == 8


def test_all_of_a_key_go_and_nothing_else(kept: str, data: str) -> None:
    store(kept, data)
    note = Path(kept, "note")
    note.write_text("mine")
    learned_ranges.remove_all(kept)
    assert os.listdir(kept) == ["note"]
    note.unlink()
    store(kept, data)
    learned_ranges.remove_all(kept)
    assert not os.path.exists(kept)


def test_what_an_order_has_not_is_put_behind_it() -> None:
    old = array("q", [BLOCK, 2 * BLOCK, 0, BLOCK])
    new = array("q", [5 * BLOCK, 6 * BLOCK, 0, 3 * BLOCK])
    joined = learned_plan.joined(old, new, SIZE)
    assert joined[:4] == old and joined[4:] == array(
        "q", [5 * BLOCK, 6 * BLOCK, 2 * BLOCK, 3 * BLOCK]
    )
