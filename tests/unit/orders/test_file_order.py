# SPDX-License-Identifier: Apache-2.0
"""orders/file_order.py: which files come next, and how far a reader has come by what it opens."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from conftest import warnings_fail

from uffdprefetch.job.channel import packed
from uffdprefetch.orders import paths_file
from uffdprefetch.orders.file_order import (
    AROUND_FILES,
    LOST_FILES,
    REACH_FILES,
    FileOrder,
    PathColumn,
    PathOrder,
    of_items,
)
from uffdprefetch.orders.key_lists import KeyList

pytestmark = warnings_fail

N = 5000


def column(names: list[str], before: str = "", after: str = "") -> PathColumn:
    elements = KeyList.parse("names", "text", packed(map(os.fsencode, names)))
    return PathColumn(elements, os.fsencode(before), os.fsencode(after))


def order(names: list[str], **options: object) -> PathOrder:
    numbers = np.arange(len(names))
    made = of_items([column(names)], [numbers], numbers, len(names))
    return PathOrder(made.table, made.numbers, made.item, made.items, **options)  # type: ignore[arg-type]


NAMES = [f"/data/c{i % 7}/{i:05}.jpg" for i in range(N)]
SHUFFLED = random.Random(1).sample(NAMES, N)


def test_paths_are_an_element_with_what_comes_before_and_after_it() -> None:
    made = column(["a/1", "/b/2", "é\udc80"], "/root/", ".png").paths(np.arange(3))
    assert made == ["/root/a/1.png", "/b/2.png", "/root/é\udc80.png"]
    names = column(["a/1", "/b/2", "a/1", "a/2", "/root/a/2"], "/root/", ".png")
    for path in ("/root/a/1.png", "/b/2.png", "/root/a/2.png", "/root/a/3.png", "/root/a/1"):
        everywhere = names.paths(np.arange(len(names)))
        same = [i for i, each in enumerate(everywhere) if each == path]
        assert names.find(os.fsencode(path)).tolist() == same


def test_an_item_has_a_file_of_each_column() -> None:
    images, masks = column(["i0", "i1", "i2"], "/"), column(["m0", "m1", "m2"], "/")
    samples = np.array([2, 0])
    made = of_items([images, masks], [samples, samples], np.arange(2), 2)
    assert made.paths(0, 9) == ["/i2", "/m2", "/i0", "/m0"]
    assert [made.position(items) for items in (0, 1, 2)] == [0, 2, 4]
    reader = FileOrder(made, "told")
    assert [reader.opened(path) for path in ("/i2", "/m2")] == [0, 1]
    assert (reader.position, reader.items_read) == (2, 1)


def test_what_is_ahead_are_the_next_files_without_those_that_were_opened() -> None:
    reader = FileOrder(order(SHUFFLED), "told")
    assert reader.ahead(0, 3) == SHUFFLED[:3]
    assert reader.opened(SHUFFLED[1]) == 1
    assert (reader.position, reader.ahead(0, 3)) == (0, [SHUFFLED[0], SHUFFLED[2]])
    assert reader.opened(SHUFFLED[0]) == 0
    assert (reader.position, reader.ahead(reader.position, 2)) == (2, SHUFFLED[2:4])
    assert reader.ahead(N - 1, 5) == SHUFFLED[-1:] and reader.ahead(N, 5) == []


def test_a_reader_is_followed_to_its_end() -> None:
    reader = FileOrder(order(SHUFFLED), "told")
    for at, path in enumerate(SHUFFLED):
        assert (reader.opened(path), reader.position) == (at, at + 1)
    assert reader.done and reader.items_read == N
    assert reader.opened(SHUFFLED[-1]) == N - 1, "it is opened once more"
    assert reader.opened("/data/other") is None


def test_files_that_are_left_out_hold_nothing_up() -> None:
    reader = FileOrder(order(SHUFFLED), "told")
    for at in range(1, N, 2):
        assert reader.opened(SHUFFLED[at]) == at
    assert reader.position >= N - REACH_FILES - 1 and not reader.done
    reader.said(N)
    assert reader.done


def test_workers_open_several_batches_at_a_time() -> None:
    batch, workers = 32, 4
    reader = FileOrder(order(SHUFFLED), "told", ahead_items=batch * (workers * 2 + 1))
    positions = []
    for first in range(0, N - batch * workers, batch * workers):
        for at in range(batch):
            for worker in range(workers):
                place = first + worker * batch + at
                assert reader.opened(SHUFFLED[place]) == place
            positions.append(reader.position)
        reader.said(first + batch)
    assert positions == sorted(positions)
    assert positions[batch - 2] == batch - 1, "worker 0 has so many behind it"


def test_a_path_that_comes_twice_is_opened_at_the_earlier_place_first() -> None:
    reader = FileOrder(order(["/a", "/b", "/a", "/c"]), "told")
    assert [reader.opened(path) for path in ("/a", "/a", "/b", "/a")] == [0, 2, 1, 2]
    assert reader.position == 3


def test_what_lies_far_away_is_none_of_the_order() -> None:
    reader = FileOrder(order(SHUFFLED), "told")
    assert reader.opened(SHUFFLED[REACH_FILES + AROUND_FILES]) is None
    reader.said(3000)
    assert reader.opened(SHUFFLED[3010]) == 3010
    assert reader.opened(SHUFFLED[0]) is None


def test_a_reader_that_begins_elsewhere_is_found_there() -> None:
    """A job that resumes in the middle of an epoch; one in another order is found nowhere."""
    reader = FileOrder(order(SHUFFLED, aliases=[("/mnt/", "/")]), "told")
    for path in SHUFFLED[3000 : 3000 + LOST_FILES]:
        assert reader.opened("/mnt" + path) is None
    assert 3000 <= reader.position < 3000 + LOST_FILES
    assert reader.opened(SHUFFLED[3020]) == 3020
    other = FileOrder(order(SHUFFLED), "told")
    for path in random.Random(2).sample(NAMES, 300):
        other.opened(path)
    assert other.wrong and other.position < N // 2
    assert reader.wrong is None


def test_files_are_known_by_the_names_that_links_lead_to() -> None:
    reader = FileOrder(order(SHUFFLED, aliases=[("/mnt/fs/data/", "/data/")]), "told")
    assert reader.opened("/mnt/fs" + SHUFFLED[0]) == 0
    assert reader.opened("/mnt/gs" + SHUFFLED[1]) is None


@pytest.mark.parametrize(
    ("numbers", "item", "items"),
    [([0, 1], [0], 1), ([3], [0], 1), ([-1], [0], 1), ([0, 0], [1, 0], 2), ([0], [1], 1)],
)
def test_an_order_that_cannot_be_is_refused(
    numbers: list[int], item: list[int], items: int
) -> None:
    table = order(["/a", "/b", "/c"]).table
    with pytest.raises(ValueError):
        PathOrder(table, np.array(numbers), np.array(item), items)


def test_another_process_maps_it(tmp_path: Path) -> None:
    images, masks = column(["i0", "i1\udc80"], "/x/", ".png"), column(["m0", "m1"], "/")
    samples = np.array([1, 0, 1])
    made = of_items([images, masks], [samples, samples], np.array([0, 1, 3]), 5)
    made = PathOrder(made.table, made.numbers, made.item, made.items, [("/y/", "/x/")])
    table = paths_file.write_table(str(tmp_path / "t"), made.table, kept=True)
    layout = paths_file.write(str(tmp_path / "o"), made, table)
    for name in ("o2", "o3"):
        (tmp_path / name).write_bytes((tmp_path / "o").read_bytes())
        there = paths_file.read(str(tmp_path), {**layout, "name": name})
        assert there.paths(0, 9) == made.paths(0, 9) and there.items == 5
        assert there.item.tolist() == made.item.tolist()
        assert there.aliases == [("/y/", "/x/")]
    assert sorted(os.listdir(tmp_path)) == ["o", "t"]
    assert paths_file.read(str(tmp_path), {**layout, "table": {**table, "kept": False}}).items == 5
    assert not os.listdir(tmp_path)
    paths_file.write_table(str(tmp_path / "t"), made.table, kept=True)
    (tmp_path / "o").write_bytes(b"short")
    with pytest.raises(ValueError):
        paths_file.read(str(tmp_path), layout)
