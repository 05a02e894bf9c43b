# SPDX-License-Identifier: Apache-2.0
"""What the report makes of a file whose index can be had: which records were read, and in what
steps. Truth is a model of the kernel (traces.py) over real files."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from conftest import warnings_fail
from record_files import header, sparse
from traces import PAGE_BYTES, Machine, Read, Step, check_counts, order, readers_of

from uffdprefetch.formats.detect import open_index
from uffdprefetch.formats.lmdb import open_index as open_lmdb
from uffdprefetch.report import html, text
from uffdprefetch.trace.analyse.records import open_records
from uffdprefetch.trace.analyse.report import analyse

pytestmark = [warnings_fail, pytest.mark.usefixtures("own_runtime_directory")]

COUNT = 400
KIB = 1 << 10
PATTERNS = ["consecutive", "stride 2", "stride 3", "stride 16", "random"]


@dataclass(frozen=True)
class Records:
    """A file of COUNT records, [start, end) in bytes each."""

    path: Path
    name: str  # of its format in the report's words
    starts: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]

    def pages(self, record: int) -> range:
        start, end = int(self.starts[record]), int(self.ends[record])
        return range(start // PAGE_BYTES, -(-end // PAGE_BYTES))


def tfrecords(path: Path, sizes: list[int]) -> None:
    """A TFRecord file of holes: what says where records are, and no data."""
    pieces, at = {}, 0
    for size in sizes:
        pieces[at] = header(size)
        at += 16 + size
    sparse(path, at, pieces)


def npy(path: Path, records: int, record_bytes: int) -> None:
    shape = (records, record_bytes)
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape).flush()


@pytest.fixture(scope="module", params=["npy", "tfrecord", "arrow"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Records one behind the other, which share the pages at their ends."""
    path = tmp_path_factory.mktemp("packed") / f"records.{request.param}"
    sizes = np.random.default_rng(12).integers(12 * KIB, 192 * KIB, COUNT).tolist()
    if request.param == "npy":
        npy(path, COUNT, 99 * KIB + 100)
    elif request.param == "tfrecord":
        tfrecords(path, sizes)
    else:
        pa = pytest.importorskip("pyarrow")
        table = pa.table({"data": pa.array([bytes(size) for size in sizes], pa.large_binary())})
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    index = open_index(path)
    starts, ends = index.extents(np.arange(COUNT))
    if request.param == "arrow":  # offsets, data
        starts, ends = starts[1::2], ends[1::2]
    names = {"npy": ".npy", "tfrecord": "TFRecord", "arrow": "Arrow"}
    return Records(path, names[request.param], starts, ends)


def read_by(
    path: Path, walks: Sequence[Iterable[Step]], advice: bool = False, **how: Any
) -> tuple[Machine, dict[str, Any]]:
    """Ranks that read a real file, and the report."""
    size_bytes = path.stat().st_size
    machine = Machine(-(-size_bytes // PAGE_BYTES), path=str(path), **how)
    machine.run((machine.reader(r, random_advice=advice), walk) for r, walk in enumerate(walks))
    trace = machine.trace()
    trace.files[1].size_bytes = size_bytes  # the model knows whole pages
    report = analyse(trace)
    json.dumps(report, allow_nan=False)
    check_counts(machine, report)
    return machine, report


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("cache", ["cold", "cold, MADV_RANDOM", "warm"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_records_that_share_pages_are_told_apart(
    packed: Records, pattern: str, cache: str, ranks: int
) -> None:
    which = [order(pattern, COUNT, rank, ranks) for rank in range(ranks)]
    walks = [(page for record in mine for page in packed.pages(record)) for mine in which]
    _, report = read_by(packed.path, walks, "RANDOM" in cache, cached=cache == "warm")
    for reader in readers_of(report):
        found = reader["pattern"]
        if pattern.startswith("stride"):
            assert (found["name"], found["stride_records"]) == ("strided", int(pattern[7:])), found
            assert f"records from the {packed.name} index" in found["sensor"]
        else:
            assert found["name"] == pattern
    (file,) = report["files"]
    records, read = file["records"], len({record for mine in which for record in mine})
    assert file["lmdb"] is None and file["format"] == records["format"]
    assert records["records"] == COUNT
    assert 0.7 * read <= records["records_touched"] <= read <= records["records_mapped"] <= COUNT


def test_records_smaller_than_a_page_are_counted_and_not_told_apart(tmp_path: Path) -> None:
    """One page of three is touched: 40 records lie on each."""
    path = tmp_path / "tokens.npy"
    npy(path, 40_000, 100)
    _, report = read_by(path, [range(0, 900, 3)], advice=True)
    records = report["files"][0]["records"]
    assert records["records"] == 40_000
    assert records["records_touched"] == 300
    starts, ends = open_index(path).extents(np.arange(40_000))
    on_page = (starts // PAGE_BYTES % 3 == 0) | ((ends - 1) // PAGE_BYTES % 3 == 0)
    assert records["records_mapped"] == int((on_page & (starts < 898 * PAGE_BYTES)).sum())
    (reader,) = readers_of(report)
    assert "index" not in reader["pattern"]["sensor"]
    assert reader["pattern"]["stride_bytes"] == 3 * PAGE_BYTES


def test_read_calls_touch_all_the_records_between_their_ends(packed: Records) -> None:
    first, last = packed.pages(100), packed.pages(149)
    _, report = read_by(packed.path, [[Read(first.start, last.stop - first.start)]])
    records = report["files"][0]["records"]
    assert 48 <= records["records_touched"] <= 50 <= records["records_mapped"] <= 52


def test_of_records_that_were_compressed_together_none_is_surely_touched(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "packed.arrow"
    rows = [np.random.default_rng(i).bytes(20 * KIB) for i in range(40)]
    table = pa.table({"data": pa.array(rows, pa.large_binary())})
    how = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema, options=how) as to:
        to.write_table(table, max_chunksize=10)
    _, report = read_by(path, [range(3, 12)], advice=True)
    assert report["files"][0]["records"] == {
        "format": "arrow", "records": 40, "records_touched": None, "records_mapped": 10
    }  # fmt: skip
    assert "n/a to 10 of 40 records touched" in text.text(report, width=140)


def test_millions_of_records_cost_no_memory_but_the_index(tmp_path: Path) -> None:
    """A billion tokens of two bytes, all mapped, as a .npy of holes; nothing is made for each."""
    path = tmp_path / "tokens.npy"
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(10**9,))
    size_bytes = path.stat().st_size
    index = open_records(str(path), size_bytes, PAGE_BYTES)
    assert index is not None
    edges = np.array([0]), np.array([-(-size_bytes // PAGE_BYTES)])
    tracemalloc.start()
    try:
        told = index.report(edges, edges)["records"]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert told["records"] == told["records_mapped"] == 10**9
    assert peak_bytes < 1 << 20


def test_what_the_page_and_the_text_say_of_records(packed: Records) -> None:
    machine, report = read_by(packed.path, [packed.pages(5)], advice=True)
    assert f"1 to {report['files'][0]['records']['records_mapped']} of 400 records touched" in (
        text.text(report, width=140)
    )
    (said,) = re.findall(r'"record_bytes":([0-9.]+)', html.render(machine.trace(), report))
    assert float(said) == pytest.approx(packed.path.stat().st_size / COUNT, rel=1e-3)


# ---- LMDB ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lmdb_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lmdb")
    rng = np.random.default_rng(11)
    with lmdb.open(str(path), map_size=1 << 30) as env, env.begin(write=True) as txn:
        for i in range(400):
            txn.put(b"%08d" % i, bytes(int(rng.integers(12 << 10, 192 << 10))), append=True)
    return path / "data.mdb"


def lmdb_machine(path: Path, which: list[list[int]], **how: Any) -> Machine:
    """Ranks that read these records of a real file: leaf, then the value's pages."""
    index = open_lmdb(path)
    pages = path.stat().st_size // PAGE_BYTES
    machine = Machine(pages, path=str(path), **how)

    def walk(mine: list[int]) -> Iterator[Step]:
        yield from (0, 1)
        for i in mine:
            yield int(index.leaf_page[i])
            start, length = int(index.offset[i]), int(index.length[i])
            yield from range(start // PAGE_BYTES, (start + length - 1) // PAGE_BYTES + 1)

    machine.run((machine.reader(r), walk(mine)) for r, mine in enumerate(which))
    return machine


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("pattern", ["consecutive", "stride 2", "stride 3", "stride 16", "random"])
def test_the_index_tells_the_stride_in_records_of_varying_size(
    lmdb_file: Path, pattern: str, ranks: int
) -> None:
    machine = lmdb_machine(lmdb_file, [order(pattern, 400, r, ranks) for r in range(ranks)])
    report = analyse(machine.trace())
    json.dumps(report, allow_nan=False)
    check_counts(machine, report)
    for reader in readers_of(report):
        found = reader["pattern"]
        if not pattern.startswith("stride"):
            assert found["name"] == pattern
            continue
        assert (found["name"], found["stride_records"]) == ("strided", int(pattern.split()[1]))
        assert "LMDB index" in found["sensor"]


def test_lmdb_pages_and_records_are_counted_by_type(lmdb_file: Path) -> None:
    machine = lmdb_machine(lmdb_file, [list(range(0, 400, 4))])
    (file,) = analyse(machine.trace())["files"]
    assert file["format"] == "lmdb"
    found = file["lmdb"]
    assert found["records"] == 400
    assert found["records_touched"] <= 100 <= found["records_mapped"]
    assert found["records_touched"] >= 90
    assert found["pages"]["meta"] == {"file": 2, "touched": 2}
    assert found["pages"]["leaf"]["touched"] <= found["pages"]["leaf"]["file"]
    assert sum(kind["file"] for kind in found["pages"].values()) == file["pages"]
    assert file["records"] is None


def test_a_file_that_is_no_longer_what_was_read_has_no_index(
    tmp_path: Path, lmdb_file: Path
) -> None:
    size = lmdb_file.stat().st_size
    assert open_records(str(lmdb_file), size, PAGE_BYTES) is not None
    assert open_records(str(lmdb_file), size + 4096, PAGE_BYTES) is None
    assert open_records(str(tmp_path / "none"), size, PAGE_BYTES) is None
    other = tmp_path / "other"
    other.write_bytes(bytes(8192))
    assert open_records(str(other), 8192, PAGE_BYTES) is None
    torn = tmp_path / "torn"
    torn.write_bytes(lmdb_file.read_bytes()[:20_000])
    assert open_records(str(torn), 20_000, PAGE_BYTES) is None
