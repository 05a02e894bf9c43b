# SPDX-License-Identifier: Apache-2.0
"""The files that the jobs of bench/harm.py read: tables, stores of records, vectors."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harm_files import generator

#: Columns of a table, and rows of what its library writes at once: 1.5 MiB of each column.
COLUMNS, BATCH_ROWS = 20, 196_608
RECORD_BYTES = 1000


# ---- tables ----------------------------------------------------------------------------------


def batches(size_bytes: int) -> Iterator[Any]:
    """Record batches of COLUMNS columns of 64-bit integers that make so many bytes."""
    import pyarrow as pa

    source = generator(130)
    for _ in range(max(2, size_bytes // (8 * COLUMNS * BATCH_ROWS))):
        values = source.integers(-1 << 40, 1 << 40, (COLUMNS, BATCH_ROWS))
        yield pa.record_batch(list(values), names=[f"c{number}" for number in range(COLUMNS)])


def make_columns(directory: Path, size_bytes: int) -> None:
    """An Arrow IPC file."""
    import pyarrow as pa

    schema = pa.schema([(f"c{number}", pa.int64()) for number in range(COLUMNS)])
    with (
        pa.OSFile(str(directory / "table.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for batch in batches(size_bytes):
            writer.write_batch(batch)


def make_parquet(directory: Path, size_bytes: int) -> None:
    """A Parquet file, neither compressed nor with dictionaries."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(f"c{number}", pa.int64()) for number in range(COLUMNS)])
    with pq.ParquetWriter(
        directory / "table.parquet", schema, compression="none", use_dictionary=False
    ) as writer:
        for batch in batches(size_bytes):
            writer.write_batch(batch)


def make_duckdb(directory: Path, size_bytes: int) -> None:
    """A database of one table."""
    import duckdb
    import pyarrow as pa

    with duckdb.connect(str(directory / "table.duckdb")) as database:
        for number, batch in enumerate(batches(size_bytes)):
            rows = pa.table(batch)  # noqa: F841 (DuckDB finds it by its name)
            how = "insert into t" if number else "create table t as"
            database.execute(f"{how} select * from rows")


# ---- stores of records -----------------------------------------------------------------------


def records(size_bytes: int, seed: int) -> Iterator[tuple[int, bytes]]:
    """Numbered records of RECORD_BYTES."""
    source = generator(seed)
    for number in range(max(100, size_bytes // RECORD_BYTES)):
        yield number, source.bytes(RECORD_BYTES)


def make_sqlite(directory: Path, size_bytes: int) -> None:
    """A table by its key."""
    database = sqlite3.connect(directory / "records.sqlite")
    database.execute("pragma journal_mode=off")
    database.execute("create table t (id integer primary key, v blob)")
    database.executemany("insert into t values (?, ?)", records(size_bytes, 140))
    database.commit()
    database.close()


def make_rocksdb(directory: Path, size_bytes: int) -> None:
    """Compacted, not compressed."""
    from rocksdict import DBCompressionType, Options, Rdict, WriteBatch

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    store = Rdict(str(directory / "records.rocksdb"), options)
    batch = WriteBatch(raw_mode=True)
    for number, value in records(size_bytes, 141):
        batch.put(b"%08d" % number, value)
        if len(batch) == 1000:
            store.write(batch)
            batch = WriteBatch(raw_mode=True)
    store.write(batch)
    store.flush()
    store.compact_range(None, None)
    store.close()


def make_git(directory: Path, size_bytes: int) -> None:
    """A repository whose pack has blobs of 16 to 112 KB, and a list of their names."""
    repository = directory / "repository.git"
    git = ("git", "-c", "core.compression=0", "-C", str(repository))
    subprocess.run(["git", "init", "-q", "--bare", str(repository)], check=True)
    source, names, made_bytes = generator(142), [], 0
    importer = subprocess.Popen([*git, "fast-import", "--quiet"], stdin=subprocess.PIPE)
    assert importer.stdin is not None
    while made_bytes < size_bytes:
        blob = source.bytes(source.integers(16_000, 112_000))
        importer.stdin.write(b"blob\ndata %d\n%s\n" % (len(blob), blob))
        names.append(hashlib.sha1(b"blob %d\0%s" % (len(blob), blob)).hexdigest())
        made_bytes += len(blob)
    importer.stdin.close()
    if importer.wait():
        raise RuntimeError("git fast-import failed")
    (directory / "names.txt").write_text("".join(f"{name}\n" for name in names))


def make_tantivy(directory: Path, size_bytes: int) -> None:
    """Documents of 1 KB of random words, stored, in one segment."""
    import tantivy

    (directory / "documents").mkdir()
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("body", stored=True)
    index = tantivy.Index(builder.build(), path=str(directory / "documents"))
    writer = index.writer(heap_size=256 << 20, num_threads=1)
    source = generator(143)
    words = np.array([source.bytes(4).hex() for _ in range(20_000)])
    (directory / "words.txt").write_text("\n".join(words))
    for _ in range(max(100, size_bytes // RECORD_BYTES)):
        body = " ".join(words[source.integers(len(words), size=RECORD_BYTES // 9)])
        writer.add_document(tantivy.Document(body=body))
    writer.commit()
    writer.wait_merging_threads()


# ---- vectors ---------------------------------------------------------------------------------


def vectors(size_bytes: int, dimensions: int, seed: int) -> Any:
    """Points at random, of 32-bit floats."""
    count = max(200, size_bytes // (4 * dimensions))
    return generator(seed).standard_normal((count, dimensions), dtype=np.float32)


def make_annoy(directory: Path, size_bytes: int) -> None:
    """Four trees over points of 256 dimensions."""
    from annoy import AnnoyIndex

    index = AnnoyIndex(256, "euclidean")
    index.set_seed(150)
    for number, point in enumerate(vectors(size_bytes, 256, 150)):
        index.add_item(number, point)
    index.build(4, n_jobs=1)
    index.save(str(directory / "points.annoy"))


def make_hnswlib(directory: Path, size_bytes: int) -> None:
    """A graph over points of 1024 dimensions. It is made in haste: it is only to be read."""
    import hnswlib

    points = vectors(size_bytes, 1024, 151)
    index = hnswlib.Index(space="l2", dim=1024)
    index.init_index(max_elements=len(points), M=4, ef_construction=8, random_seed=151)
    index.add_items(points, num_threads=1)
    index.save_index(str(directory / "points.hnsw"))


def make_usearch(directory: Path, size_bytes: int) -> None:
    """The same by USearch."""
    from usearch.index import Index

    points = vectors(size_bytes, 1024, 152)
    index = Index(ndim=1024, metric="l2sq", dtype="f32", connectivity=8, expansion_add=16)
    index.add(np.arange(len(points)), points, threads=1)
    index.save(str(directory / "points.usearch"))


KINDS: dict[str, Callable[[Path, int], None]] = {
    "columns": make_columns,
    "parquet": make_parquet,
    "duckdb": make_duckdb,
    "sqlite": make_sqlite,
    "rocksdb": make_rocksdb,
    "git": make_git,
    "tantivy": make_tantivy,
    "annoy": make_annoy,
    "hnswlib": make_hnswlib,
    "usearch": make_usearch,
}
