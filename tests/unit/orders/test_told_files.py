# SPDX-License-Identifier: Apache-2.0
"""orders/samples.py, where the data set tells in which files its samples lie: the orders of those
that are mapped, in the whole; of the others when they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from arrow_shards import write_shards
from conftest import warnings_fail

from uffdprefetch.formats.detect import open_index
from uffdprefetch.job import arrow_tables
from uffdprefetch.job.channel import SCHEMA, packed
from uffdprefetch.orders.announcement import AnnounceError, load
from uffdprefetch.orders.mapped_files import ResolveRequest
from uffdprefetch.orders.sample_search import TRIES_MAX
from uffdprefetch.orders.samples import SampleResolver
from uffdprefetch.predict.order.order import Order

pytestmark = warnings_fail

ROWS = (60, 0, 20)
N = sum(ROWS)
#: Of the announcing process, and of a worker that maps the files elsewhere.
PID, OTHER = 7, 8


def mapped(path: str) -> Any:
    """A table that maps a shard."""
    return pa.ipc.open_stream(pa.memory_map(path)).read_all()


def address_of(path: Path) -> tuple[int, int]:
    """Where this process maps a shard: (address, bytes)."""
    rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (where,) = [row[0] for row in rows if row[-1] == str(path)]
    low, high = (int(part, 16) for part in where.split("-"))
    return low, high - low


def no_files(order: Any, kept: bool) -> dict[str, Any]:
    raise AssertionError("it reads no whole files")


class Data:
    """A data set of shards, and an announcement of it in shuffled order."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards = write_shards(directory, ROWS, np.random.default_rng(1), (500, 900))
        self.samples = np.random.default_rng(2).permutation(N)[:-5]  # the last few are left out
        self.paths = [str(self.shards[0]), str(self.shards[2])]
        self.table = pa.concat_tables(map(mapped, self.paths))
        self.where = {i: address_of(path) for i, path in enumerate(self.shards) if ROWS[i]}
        self.columns: list[str] | None = None
        self.resolver = SampleResolver()

    def buffers(self) -> Any:
        """What the job's side says of the table."""
        table = SimpleNamespace(table=self.table, path=self.paths[0])
        with pytest.MonkeyPatch.context() as patch:
            library = SimpleNamespace(MemoryMappedTable=SimpleNamespace)
            patch.setitem(sys.modules, "datasets.table", library)
            found = arrow_tables.buffers(table, self.columns)
        assert found is not None and found.files == [self.paths[0]]
        return found.numbers

    def write(self) -> Any:
        part = {
            "what": "samples", "array": "s", "samples": N, "token": "t", "files": "f",
            "buffers": "w", "lists": [],
        }  # fmt: skip
        value = {
            "schema": SCHEMA, "pid": 7, "number": 1, "reader": "loader-1", "slot": 1,
            "items": len(self.samples), "parts": [part],
        }  # fmt: skip
        arrays = {
            "json": json.dumps(value).encode(),
            "s": self.samples.tobytes(),
            "f": packed(path.encode() for path in self.paths),
            "w": self.buffers().tobytes(),
        }
        for name, data in arrays.items():
            (self.directory / f"7-1.{name}").write_bytes(data)
        return load(str(self.directory), 7, 1)

    def regions(self, shard: int) -> list[list[int]]:
        """The mappings of both processes; of the one itself in two parts."""
        if shard not in self.where:
            return [[OTHER, 4096, 0, 4096]]
        address, length = self.where[shard]
        half = length // 2 // 4096 * 4096
        own = [(address, 0, half), (address + half, half, length - half)]
        return [[OTHER, 4096, 0, length], *([PID, *region] for region in own)]

    def orders(self, *mapped: int, resolved: tuple[int, ...] = ()) -> Any:
        """The answer when these shards are mapped; and the orders by shard."""
        stored: dict[str, Order] = {}

        def store(order: Order, path: str) -> dict[str, Any]:
            stored[path] = order
            return {}

        request = ResolveRequest(
            [{"path": str(self.shards[i]), "regions": self.regions(i)} for i in mapped],
            0,
            [(0, str(self.shards[i])) for i in resolved],
            PID,
        )
        answer = self.resolver.orders(self.write(), request, store, no_files)
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
        shard, row = (0, sample) if sample < ROWS[0] else (2, sample - ROWS[0])
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
    assert then[2].before.tolist() == both[2].before.tolist()
    assert first[0].before is None  # nothing is known of the other yet


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


def test_of_columns_that_a_sample_does_not_give_nothing_is_read(data: Data) -> None:
    everything = data.orders(0, 2)[1]
    data.columns = ["label"]
    labels = data.orders(0, 2)[1]
    for shard, order in labels.items():
        index = open_index(data.shards[shard])
        groups = np.array(index.facts["groups"])
        assert index.facts["columns"] == ["label", "data"]
        only = index.only(np.flatnonzero(groups == groups[0]).tolist())
        whole = everything[shard]
        for item in range(len(data.samples)):
            mine, all_of_it = order.item == item, whole.item == item
            assert mine.any() == all_of_it.any()
            if mine.any():
                sample = int(data.samples[item])
                row = sample if shard == 0 else sample - ROWS[0]
                starts, ends = only.extents([row])
                assert (order.starts[mine].tolist(), order.ends[mine].tolist()) == (
                    starts.tolist(), ends.tolist(),
                )  # fmt: skip
                assert (whole.ends - whole.starts)[all_of_it].sum() > 400 > (ends - starts).sum()


def test_what_was_made_of_a_table_is_read_where_its_buffers_are(data: Data) -> None:
    whole = data.orders(0, 2)[1]
    data.table = data.table.rename_columns(["number", "bytes"]).select(["bytes", "number"])
    assert same(data.orders(0, 2)[1], whole), "columns that were renamed and moved"
    data.table = data.table.set_column(
        1, "number", data.table.column("number").cast(pa.int32())
    )  # in memory since
    bytes_alone = data.orders(0, 2)[1]
    data.columns = ["bytes"]
    assert same(data.orders(0, 2)[1], bytes_alone) and not same(bytes_alone, whole)
    data.table = data.table.combine_chunks()
    assert data.orders(0, 2)[1] == {}, "all is in memory"


def test_rows_that_were_cut_off_are_counted(data: Data) -> None:
    whole = data.orders(0, 2)[1]
    data.table = pa.concat_tables([data.table.slice(7), data.table.slice(0, 7)])
    data.samples = (data.samples - 7) % N
    assert same(data.orders(0, 2)[1], whole)


def same(some: dict[int, Order], others: dict[int, Order]) -> bool:
    """Whether in each file each item reads the same."""
    return some.keys() == others.keys() and all(
        sorted(zip(some[i].item, some[i].starts, some[i].ends, strict=True))
        == sorted(zip(others[i].item, others[i].starts, others[i].ends, strict=True))
        for i in some
    )


def test_structs_and_lists_are_followed_field_by_field(data: Data, tmp_path: Path) -> None:
    path = tmp_path / "nested.arrow"
    images = [{"bytes": bytes(100 + i), "path": None if i % 2 else "x" * i} for i in range(N)]
    rows = pa.table(
        {"image": images, "box": [[1.0] * (i % 4) for i in range(N)],
         "pair": pa.array([[i, i] for i in range(N)], pa.list_(pa.int16(), 2))}
    )  # fmt: skip
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=N // 2)
    data.shards, data.paths = [path], [str(path)]
    data.table = mapped(str(path))
    data.where = {0: address_of(path)}
    index = open_index(path)
    (order,) = data.orders(0)[1].values()
    for item, sample in enumerate(data.samples.tolist()):
        mine = order.item == item
        starts, ends = index.extents([sample])
        found = zip(order.starts[mine].tolist(), order.ends[mine].tolist(), strict=True)
        assert sorted(found) == sorted(zip(starts.tolist(), ends.tolist(), strict=True))
    data.columns = ["image"]
    (images_alone,) = data.orders(0)[1].values()
    data.columns = None
    column = data.table.column("image")
    masked = [  # as the library casts a column to images
        pa.StructArray.from_arrays([c.field(0), c.field(1)], ["bytes", "path"], mask=c.is_null())
        for c in column.chunks
    ]
    data.table = pa.table({"image": pa.chunked_array(masked)})
    (cast,) = data.orders(0)[1].values()
    assert same({0: cast}, {0: images_alone})


def test_rows_that_a_file_lacks_are_a_finding(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = data.buffers()
    numbers[3] += 1
    monkeypatch.setattr(data, "buffers", lambda: numbers)
    answer, found = data.orders(0, 2)
    assert (answer["again"], answer["more"], found) == (False, False, {})
    (finding,) = answer["findings"]
    assert "has 50 records, not as many as are read of it: 51" in finding


def test_a_file_that_is_gone_is_as_one_that_is_not_mapped(data: Data) -> None:
    data.shards[0].unlink()
    answer, found = data.orders(0)
    assert (answer["again"], found, answer["findings"]) == (True, {}, [])


def test_a_mapping_of_another_process_tells_nothing(data: Data) -> None:
    del data.where[0]
    answer, found = data.orders(0, 2)
    assert set(found) == {2} and answer["more"]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_buffers_of_no_sample_are_refused(
    data: Data, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    for wrong in (-1, (1 << 63) - 1) if place else (-1,):
        numbers = data.buffers()
        numbers[place] = wrong
        monkeypatch.setattr(data, "buffers", lambda numbers=numbers: numbers)
        with pytest.raises(AnnounceError, match="a buffer that is none of 80 samples"):
            data.orders(0, 2)
        monkeypatch.undo()
