# SPDX-License-Identifier: Apache-2.0
"""A part of a table or a store by the library that maps it: `stores.py DIR --reader NAME`.

A read is a column, a tensor, a row, a record, a range of records, or a query; there are --reads of
them.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from reading import Reading, read_as_told

#: Records of a range, and documents that a query fetches.
RANGE, FOUND = 400, 10
#: More than any file here, and less than any that holds records.
MAPPED_BYTES, SMALL_BYTES = 2_000_000_000, 1 << 20


def some_columns(reads: int) -> list[str]:
    """Of 20, apart from each other."""
    return [f"c{(3 + 7 * number) % 20}" for number in range(min(reads, 20))]


def places(seed: int, count: int, reads: int) -> list[int]:
    """So many of ``count``, at random."""
    return np.random.default_rng(seed).integers(0, count, reads).tolist()


# ---- tables ----------------------------------------------------------------------------------


def read_polars(directory: Path, reads: int, reading: Reading) -> None:
    """The sums of some columns of an Arrow file."""
    import polars as pl

    row = pl.scan_ipc(directory / "table.arrow").select(some_columns(reads)).sum().collect()
    reading.add(repr(row.rows()).encode())


def read_pyarrow(directory: Path, reads: int, reading: Reading) -> None:
    """The same by pyarrow, which says that it will need them."""
    import pyarrow as pa

    numbers = [int(name[1:]) for name in some_columns(reads)]
    options = pa.ipc.IpcReadOptions(included_fields=numbers)
    with (
        pa.memory_map(str(directory / "table.arrow")) as source,
        pa.ipc.open_file(source, options=options) as file,
    ):
        for number in range(file.num_record_batches):
            for column in file.get_batch(number).columns:
                reading.add(column.buffers()[1])


def read_parquet(directory: Path, reads: int, reading: Reading) -> None:
    """Some columns of a Parquet file, mapped."""
    import pyarrow.parquet as pq

    path = directory / "table.parquet"
    for column in pq.read_table(path, columns=some_columns(reads), memory_map=True).columns:
        for chunk in column.chunks:
            reading.add(chunk.buffers()[1])


def read_duckdb(directory: Path, reads: int, reading: Reading) -> None:
    """DuckDB reads by read(2)."""
    import duckdb

    with duckdb.connect(str(directory / "table.duckdb"), read_only=True) as database:
        sums = ", ".join(f"sum({name})" for name in some_columns(reads))
        reading.add(repr(database.execute(f"select {sums} from t").fetchall()).encode())


def read_safetensors(directory: Path, reads: int, reading: Reading) -> None:
    """Two of the nine tensors of each layer."""
    from safetensors import safe_open

    with safe_open(str(directory / "model.safetensors"), framework="np") as file:
        names = [name for name in file.keys() if "q_proj" in name or "v_proj" in name]  # noqa: SIM118
        for name in names[:reads]:
            reading.add(file.get_tensor(name))


def read_datasets(directory: Path, reads: int, reading: Reading) -> None:
    """Rows at random."""
    import datasets

    rows = datasets.load_from_disk(str(directory / "dataset"))
    for number in places(30, len(rows), reads):
        reading.add(rows[number]["image"])


# ---- stores of records -----------------------------------------------------------------------


def opened_sqlite(directory: Path) -> tuple[Any, int]:
    """The database, mapped, and how many records it has."""
    import sqlite3

    path = directory / "records.sqlite"
    database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    database.execute(f"pragma mmap_size={MAPPED_BYTES}")
    return database, database.execute("select max(id) from t").fetchone()[0]


def read_sqlite(directory: Path, reads: int, reading: Reading) -> None:
    """Records by their key."""
    database, most = opened_sqlite(directory)
    for number in places(31, most, reads):
        row = database.execute("select v from t where id = ?", (number,)).fetchone()
        reading.add(row[0])


def read_sqlite_ranges(directory: Path, reads: int, reading: Reading) -> None:
    """RANGE records each."""
    database, most = opened_sqlite(directory)
    for first in places(32, max(1, most - RANGE), reads):
        between = (first, first + RANGE - 1)
        for row in database.execute("select v from t where id between ? and ?", between):
            reading.add(row[0])


@contextlib.contextmanager
def linked(directory: Path) -> Iterator[str]:
    """A directory of links to the files of another one, which cannot be written, and of copies of
    small ones: these libraries want to write locks and settings there."""
    with tempfile.TemporaryDirectory(dir=".") as links:
        for path in directory.iterdir():
            if path.stat().st_size < SMALL_BYTES:
                shutil.copy(path, links)
            else:
                (Path(links) / path.name).symlink_to(path)
        yield links


def read_rocksdb(directory: Path, reads: int, reading: Reading) -> None:
    """Records by their key, of tables that are mapped."""
    from rocksdict import AccessType, Options, Rdict

    options = Options(raw_mode=True)
    options.set_allow_mmap_reads(True)
    with linked(directory / "records.rocksdb") as path:
        store = Rdict(path, options, access_type=AccessType.read_only())
        last = store.iter()
        last.seek_to_last()
        for number in places(33, int(last.key()) + 1, reads):
            reading.add(store[b"%08d" % number])


def read_git(directory: Path, reads: int, reading: Reading) -> None:
    """Blobs by `git cat-file`, which maps its packs."""
    names = (directory / "names.txt").read_text().split()
    wanted = "".join(f"{names[number]}\n" for number in places(34, len(names), reads))
    repository = str(directory / "repository.git")
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", repository, "cat-file", "--batch"],
        input=wanted.encode(), stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    reading.add(done.stdout)


def read_tantivy(directory: Path, reads: int, reading: Reading) -> None:
    """The documents that queries find."""
    import tantivy

    with linked(directory / "documents") as path:
        index = tantivy.Index.open(path)
        searcher = index.searcher()
        words = (directory / "words.txt").read_text().split()
        for number in places(35, len(words), reads):
            query = index.parse_query(words[number], ["body"])
            for _, address in searcher.search(query, FOUND).hits:
                reading.add(searcher.doc(address)["body"][0].encode())


# ---- vectors ---------------------------------------------------------------------------------


def queries(dimensions: int, reads: int) -> Any:
    """Points at random."""
    return np.random.default_rng(36).standard_normal((reads, dimensions), dtype=np.float32)


def read_annoy(directory: Path, reads: int, reading: Reading) -> None:
    """Neighbours by trees."""
    from annoy import AnnoyIndex

    index = AnnoyIndex(256, "euclidean")
    index.load(str(directory / "points.annoy"))
    for point in queries(256, reads):
        found = index.get_nns_by_vector(point.tolist(), FOUND, search_k=300)
        reading.add(np.array(found))


def read_hnswlib(directory: Path, reads: int, reading: Reading) -> None:
    """Neighbours by a graph that is read into memory by read(2)."""
    import hnswlib

    index = hnswlib.Index(space="l2", dim=1024)
    index.load_index(str(directory / "points.hnsw"))
    found, _ = index.knn_query(queries(1024, reads), k=FOUND, num_threads=1)
    reading.add(np.ascontiguousarray(found))


def read_usearch(directory: Path, reads: int, reading: Reading) -> None:
    """Neighbours by a graph that stays in its file."""
    from usearch.index import Index

    index = Index.restore(str(directory / "points.usearch"), view=True)
    for point in queries(1024, reads):
        reading.add(np.ascontiguousarray(index.search(point, FOUND, threads=1).keys))


READERS: dict[str, tuple[str, Callable[[Path, int, Reading], None]]] = {
    "polars": ("polars", read_polars),
    "pyarrow": ("pyarrow", read_pyarrow),
    "parquet": ("pyarrow.parquet", read_parquet),
    "duckdb": ("duckdb", read_duckdb),
    "safetensors": ("safetensors", read_safetensors),
    "datasets": ("datasets", read_datasets),
    "sqlite": ("sqlite3", read_sqlite),
    "sqlite-ranges": ("sqlite3", read_sqlite_ranges),
    "rocksdb": ("rocksdict", read_rocksdb),
    "git": ("subprocess", read_git),
    "tantivy": ("tantivy", read_tantivy),
    "annoy": ("annoy", read_annoy),
    "hnswlib": ("hnswlib", read_hnswlib),
    "usearch": ("usearch.index", read_usearch),
}


if __name__ == "__main__":
    read_as_told(READERS)
