# SPDX-License-Identifier: Apache-2.0
"""The files that the jobs of bench/reads.py read, beside those of bench/apps_files.py."""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from harm_files import KIB, MIB, generator, pages_of, planes, write_noise

#: Of a tree of small files: their sizes are spread evenly, and there are files for each directory.
SMALLEST, LARGEST, DIRECTORIES = 20 * KIB, 180 * KIB, 20
#: Archives that hold a tree.
SHARDS = 4
#: Of a Parquet file.
GROUP_BYTES, COLUMNS = 8 * MIB, 4


def make_zstd(directory: Path, size_bytes: int) -> None:
    """Random bytes, compressed: what is read is as much as what comes out."""
    write_noise(directory / "data.bin", pages_of(size_bytes), 31)
    words = ["zstd", "-q", "-1", "--rm", str(directory / "data.bin")]
    subprocess.run(words, check=True)


def make_grouped(directory: Path, size_bytes: int) -> None:
    """A Parquet file of 64-bit integers in row groups of 8 MiB, plain."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = GROUP_BYTES // (8 * COLUMNS)
    source = generator(121)
    schema = pa.schema([(f"c{number}", pa.int64()) for number in range(COLUMNS)])
    path = directory / "table.parquet"
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for _ in range(planes(size_bytes, GROUP_BYTES, 1)):
            values = source.integers(-1 << 40, 1 << 40, (COLUMNS, rows), dtype=np.int64)
            writer.write_table(pa.table([pa.array(one) for one in values], schema=schema))


def make_chunks(directory: Path, size_bytes: int) -> None:
    """An HDF5 data set in chunks of 1 MiB, not compressed."""
    import h5py
    import numpy as np

    count = planes(size_bytes, MIB, 1)
    with h5py.File(directory / "chunks.h5", "w") as file:
        data = file.create_dataset("x", (count, MIB), "u1", chunks=(1, MIB))
        for number in range(count):
            data[number] = np.frombuffer(generator(200 + number).bytes(MIB), np.uint8)


def make_tree(directory: Path, size_bytes: int) -> None:
    """Small files in directories, as of classes of images, which come in a shuffled order: as they
    are listed, as they sort, and as they were made (their inode numbers) are three orders."""
    source = generator(122)
    count = max(DIRECTORIES, size_bytes // ((SMALLEST + LARGEST) // 2))
    for number in range(DIRECTORIES):
        (directory / f"class-{number:02d}").mkdir()
    for number in source.permutation(count).tolist():
        size = int(source.integers(SMALLEST, LARGEST))
        name = f"class-{number % DIRECTORIES:02d}/image-{number:06d}.bin"
        (directory / name).write_bytes(source.bytes(size))


def make_shards(directory: Path, size_bytes: int) -> None:
    """The same files in four archives, of equally many directories, in the order of their names."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        make_tree(Path(scratch), size_bytes)
        classes = sorted(Path(scratch).iterdir())
        for number in range(SHARDS):
            with tarfile.open(directory / f"shard-{number:06d}.tar", "w") as archive:
                for path in classes[number * DIRECTORIES // SHARDS :][: DIRECTORIES // SHARDS]:
                    archive.add(path, path.name)


KINDS: dict[str, Callable[[Path, int], None]] = {
    "zstd": make_zstd,
    "grouped": make_grouped,
    "chunks": make_chunks,
    "tree": make_tree,
    "shards": make_shards,
}
