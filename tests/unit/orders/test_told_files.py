# SPDX-License-Identifier: Apache-2.0
"""orders/samples.py, where the data set tells in which files its samples lie: the orders of those
that are mapped, in the whole; of the others when they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrow_shards import write_shards
from conftest import warnings_fail

from uffdprefetch.formats.detect import open_index
from uffdprefetch.job.channel import SCHEMA, packed
from uffdprefetch.orders.announcement import AnnounceError, load
from uffdprefetch.orders.samples import TRIES_MAX, ResolveRequest, SampleResolver
from uffdprefetch.predict.order.cursor import Order

pytestmark = warnings_fail

ROWS = (30, 0, 20)
N = sum(ROWS)


class Data:
    """A data set of shards, and an announcement of it in shuffled order."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards = write_shards(directory, ROWS, np.random.default_rng(1), (500, 900))
        self.samples = np.random.default_rng(2).permutation(N)[:-5]  # the last few are left out
        self.paths = [str(self.shards[0]), str(self.shards[2])]
        self.rows = [(0, 0, 30, 0), (1, 30, 20, 0)]
        self.resolver = SampleResolver()

    def write(self) -> Any:
        part = {
            "what": "samples", "array": "s", "samples": N, "token": "t", "files": "f",
            "stretches": "w", "lists": [],
        }  # fmt: skip
        value = {
            "schema": SCHEMA, "pid": 7, "number": 1, "reader": "loader-1", "slot": 1,
            "items": len(self.samples), "parts": [part],
        }  # fmt: skip
        arrays = {
            "json": json.dumps(value).encode(),
            "s": self.samples.tobytes(),
            "f": packed(path.encode() for path in self.paths),
            "w": np.array(self.rows, np.int64).tobytes(),
        }
        for name, data in arrays.items():
            (self.directory / f"7-1.{name}").write_bytes(data)
        return load(str(self.directory), 7, 1)

    def orders(self, *mapped: int, resolved: tuple[int, ...] = ()) -> Any:
        """The answer when these shards are mapped; and the orders by shard."""
        stored: dict[str, Order] = {}

        def store(order: Order, path: str) -> dict[str, Any]:
            stored[path] = order
            return {}

        request = ResolveRequest(
            [{"path": str(self.shards[i]), "regions": []} for i in mapped],
            0,
            [(0, str(self.shards[i])) for i in resolved],
        )
        answer = self.resolver.orders(self.write(), request, store)
        return answer, {self.shards.index(Path(path)): each for path, each in stored.items()}


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(tmp_path)


def test_each_file_has_its_part_of_the_order_with_its_place_in_the_whole(data: Data) -> None:
    answer, found = data.orders(2, 0, 1)
    assert (answer["again"], answer["more"], answer["findings"]) == (False, False, [])
    assert [(each["part"], each["file"]) for each in answer["orders"]] == [(0, 1), (0, 0)]
    assert {each["how"] for each in answer["orders"]} == {
        "records as the data set tells, in 2 files"
    }
    assert set(found) == {0, 2}
    at, reads = 0, {0: [], 2: []}
    for item, sample in enumerate(data.samples.tolist()):
        shard, row = (0, sample) if sample < 30 else (2, sample - 30)
        for start, end in zip(*open_index(data.shards[shard]).extents([row]), strict=True):
            reads[shard].append((start, end, item, at))
            at += end - start
    for shard, order in found.items():
        assert (order.items, order.whole_bytes) == (len(data.samples), at)
        parts = (order.starts, order.ends, order.item, order.before)
        assert list(zip(*(part.tolist() for part in parts), strict=True)) == reads[shard]


def test_files_that_are_mapped_later_get_their_part_then(data: Data) -> None:
    answer, found = data.orders()
    assert (answer["again"], answer["orders"]) == (True, [])
    answer, first = data.orders(0)
    assert (answer["again"], answer["more"], set(first)) == (False, True, {0})
    answer, found = data.orders(0, resolved=(0,))
    assert (answer["again"], answer["more"], found) == (False, True, {})
    answer, then = data.orders(0, 2, resolved=(0,))
    assert (answer["again"], answer["more"], set(then)) == (False, False, {2})
    _, both = data.orders(0, 2)
    for order, whole in ((first[0], both[0]), (then[2], both[2])):
        assert order.before.tolist() == whole.before.tolist()  # whatever is mapped


def test_a_file_that_is_never_mapped_is_not_waited_for_without_end(data: Data) -> None:
    assert data.orders(0)[0]["more"]
    asked = [data.orders(0, resolved=(0,))[0]["more"] for _ in range(TRIES_MAX + 1)]
    assert asked == [True] * (TRIES_MAX - 1) + [False] * 2
    assert set(data.orders(0, 2, resolved=(0,))[1]) == {2}, "but when it is asked for"


def test_a_file_is_known_by_its_inode(data: Data, tmp_path: Path) -> None:
    link = tmp_path / "link.arrow"
    link.symlink_to(data.shards[0])
    data.paths[0] = str(link)
    assert set(data.orders(0, 2)[1]) == {0, 2}


def test_rows_that_a_file_lacks_are_a_finding(data: Data) -> None:
    data.rows[1] = (1, 30, 20, 5)
    answer, found = data.orders(0, 2)
    assert (answer["again"], answer["more"], found) == (False, False, {})
    (finding,) = answer["findings"]
    assert "has 20 records, not 2" in finding


def test_a_file_that_is_gone_is_a_finding(data: Data) -> None:
    data.shards[2].unlink()
    answer, found = data.orders(0)
    assert found == {} and "its order is not known" in answer["findings"][0]


def test_stretches_of_nowhere_are_refused(data: Data) -> None:
    data.rows[1] = (2, 30, 20, 0)
    with pytest.raises(AnnounceError, match="a stretch that is none of 2 files"):
        data.orders(0, 2)
