# SPDX-License-Identifier: Apache-2.0
"""The data set: an LMDB of random records, reproducible from its seed on any machine.

Layout of a data set directory:

records.lmdb/data.mdb   the LMDB; keys b"00000000", b"00000001", ..., appended in key order
records.index.npy       int64, shape (records, 2): offset in data.mdb and length of each value
records.json            the manifest; written last, so that a partial data set has none

Record sizes are 12 to 192 KiB, more small than large, as in an image data set: 12 + 180 u^1.6 KiB
with u uniform, mean about 81 KiB.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.job import KEY, data_file, get_record, mappings_of, open_database

SCHEMA = "uffdprefetch.dataset/1"
DATABASE_NAME = "records.lmdb"
INDEX_NAME = "records.index.npy"
MANIFEST_NAME = "records.json"

SMALLEST_RECORD_BYTES = 12 << 10
LARGEST_RECORD_BYTES = 192 << 10
_SKEW = 1.6
_PAGE_BYTES = 4096
_PAGE_HEADER_BYTES = 16  # LMDB's, before a value on its overflow pages
_RECORDS_PER_TRANSACTION = 256  # bounds LMDB's list of dirty pages


@dataclass(frozen=True)
class Manifest:
    """Describes a data set: enough to make it again, and to verify what was read.

    size_bytes: as requested; file_bytes: of data.mdb; record_bytes: sum over all values; sha256:
    over all values in key order.
    """

    schema: str
    size_bytes: int
    seed: int
    records: int
    record_bytes: int
    file_bytes: int
    sha256: str


class DatasetError(UffdPrefetchError):
    """The data set cannot be made or used: what and why, in one line."""


def _raw_bytes(generator: np.random.PCG64, size_bytes: int) -> bytes:
    """The next bytes of the generator's raw stream, which numpy guarantees to be stable."""
    words = generator.random_raw(-(-size_bytes // 8))
    return words.astype("<u8", copy=False).tobytes()[:size_bytes]


def record_sizes(size_bytes: int, seed: int) -> list[int]:
    """Sizes in bytes of the records that fill an LMDB of about `size_bytes`, in order."""
    generator = np.random.PCG64([seed, 1])
    sizes: list[int] = []
    filled_bytes = 0
    while True:
        for word in generator.random_raw(1024).tolist():
            # 53 bits to a float in [0, 1): exact on every platform; the power is rounded to a
            # multiple of 16 bytes to hide last-digit differences between libms
            uniform = (word >> 11) / (1 << 53)
            span = LARGEST_RECORD_BYTES - SMALLEST_RECORD_BYTES
            record_bytes = SMALLEST_RECORD_BYTES + round(span * uniform**_SKEW / 16) * 16
            pages = -(-(record_bytes + _PAGE_HEADER_BYTES) // _PAGE_BYTES)
            if sizes and filled_bytes + pages * _PAGE_BYTES > size_bytes:
                return sizes
            sizes.append(record_bytes)
            filled_bytes += pages * _PAGE_BYTES


def records_of(size_bytes: int, seed: int) -> Iterator[bytes]:
    """The record values in key order."""
    generator = np.random.PCG64([seed, 2])
    for record_bytes in record_sizes(size_bytes, seed):
        yield _raw_bytes(generator, record_bytes)


def read_manifest(directory: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of a complete data set in `directory`, None if there is none."""
    try:
        text = (Path(directory) / MANIFEST_NAME).read_text()
        fields = json.loads(text)
        if fields.get("schema") != SCHEMA:
            return None
        return Manifest(**fields)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def make_dataset(directory: str | os.PathLike[str], size_bytes: int, seed: int = 0) -> Manifest:
    """Make the data set in `directory`, or reuse an identical one.

    Args:
        directory: made if missing.
        size_bytes: of data.mdb, about (never more than 1 % above, one record at least).
        seed: of sizes and bytes.

    Raises:
        DatasetError: no room, or a file cannot be written.
    """
    directory = Path(directory)
    found = read_manifest(directory)
    database = directory / DATABASE_NAME
    if (
        found is not None
        and (found.size_bytes, found.seed) == (size_bytes, seed)
        and (directory / INDEX_NAME).exists()
        and _size_of(data_file(str(database))) == found.file_bytes
    ):
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(database, ignore_errors=True)
        return _write(directory, database, size_bytes, seed)
    except (OSError, lmdb.Error) as error:
        shutil.rmtree(database, ignore_errors=True)
        free_bytes = shutil.disk_usage(directory).free if directory.exists() else 0
        raise DatasetError(
            f"cannot make a data set of {size_bytes} bytes in {directory}: {error}; "
            f"{free_bytes} bytes are free there: use a smaller --size or another --work"
        ) from error


def _size_of(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return -1


def _write(directory: Path, database: Path, size_bytes: int, seed: int) -> Manifest:
    digest = hashlib.sha256()
    records = record_bytes = 0
    # sync=False: tmpfs needs none, and a data set without its manifest is made again anyway
    env = lmdb.open(str(database), map_size=size_bytes * 2 + (64 << 20), sync=False)
    try:
        values = records_of(size_bytes, seed)
        more = True
        while more:
            with env.begin(write=True) as txn:
                for _ in range(_RECORDS_PER_TRANSACTION):
                    value = next(values, None)
                    if value is None:
                        more = False
                        break
                    txn.put(KEY % records, value, append=True)
                    digest.update(value)
                    records += 1
                    record_bytes += len(value)
        env.sync(True)
    finally:
        env.close()
    np.save(directory / INDEX_NAME, record_extents(database))
    manifest = Manifest(
        schema=SCHEMA,
        size_bytes=size_bytes,
        seed=seed,
        records=records,
        record_bytes=record_bytes,
        file_bytes=_size_of(data_file(str(database))),
        sha256=digest.hexdigest(),
    )
    partial = directory / (MANIFEST_NAME + ".partial")
    partial.write_text(json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")
    partial.replace(directory / MANIFEST_NAME)
    return manifest


def record_extents(database: str | os.PathLike[str]) -> np.ndarray:
    """The extent of each value in data.mdb: int64, shape (records, 2), (offset, length) in bytes.

    From the values' addresses in a mapping.
    """
    path = str(database)
    env = open_database(path)
    try:
        maps = mappings_of(data_file(path))
        with env.begin(buffers=True) as txn:
            records = txn.stat()["entries"]
            extents: np.ndarray = np.empty((records, 2), dtype=np.int64)
            for record in range(records):
                value = get_record(txn, record)
                address = np.frombuffer(value, dtype=np.uint8).ctypes.data
                offset = next(
                    address - start + at for start, end, at in maps if start <= address < end
                )
                extents[record] = offset, len(value)
            return extents
    finally:
        env.close()


def digest_of(database: str | os.PathLike[str], order: Iterable[int]) -> str:
    """SHA-256 (hex) over the values of the record numbers in `order`, read from `database`.

    To be read from the source, beside the bed: the reference for a job's digest.
    """
    digest = hashlib.sha256()
    env = open_database(str(database))
    try:
        with env.begin(buffers=True) as txn:
            for record in order:
                digest.update(get_record(txn, record))
    finally:
        env.close()
    return digest.hexdigest()
