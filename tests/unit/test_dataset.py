# SPDX-License-Identifier: Apache-2.0
"""The demonstration's data set: the same bytes everywhere, made whole or made anew."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from training import SEED, SIZE_BYTES

from uffdprefetch.demo import dataset

pytest_plugins = ("training",)


def test_the_same_seed_gives_the_same_bytes_on_any_machine(tmp_path: Path) -> None:
    manifest = dataset.make_dataset(tmp_path, 1 << 20, 3)
    assert manifest.records == 13
    assert manifest.record_bytes == 966400
    assert manifest.sha256 == "593d5ef9fc543d6bf900924ee7f061208864230cb358d8092cf7fd01b62179cb"


def test_the_manifest_says_what_is_there(database: Path, manifest: dataset.Manifest) -> None:
    assert manifest.file_bytes == (database / "data.mdb").stat().st_size
    assert abs(manifest.file_bytes - SIZE_BYTES) < dataset.LARGEST_RECORD_BYTES + (1 << 16)
    assert dataset.digest_of(database, range(manifest.records)) == manifest.sha256
    sizes = dataset.record_sizes(SIZE_BYTES, SEED)
    assert (len(sizes), sum(sizes)) == (manifest.records, manifest.record_bytes)
    assert all(12 << 10 <= size <= 192 << 10 for size in sizes)


def test_record_sizes_span_their_range() -> None:
    sizes = dataset.record_sizes(256 << 20, 0)
    assert min(sizes) < 13 << 10
    assert max(sizes) > 190 << 10


def test_a_made_data_set_is_used_again_and_another_is_made_anew(tmp_path: Path) -> None:
    first = dataset.make_dataset(tmp_path, 1 << 20, 1)
    file = tmp_path / dataset.DATABASE_NAME / "data.mdb"
    inode = file.stat().st_ino, file.stat().st_mtime_ns
    assert dataset.make_dataset(tmp_path, 1 << 20, 1) == first
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == inode
    other = dataset.make_dataset(tmp_path, 1 << 20, 2)
    assert other.sha256 != first.sha256
    assert dataset.read_manifest(tmp_path) == other


@pytest.mark.parametrize("damage", ["no manifest", "manifest of another program", "short file"])
def test_a_half_made_data_set_is_made_anew(tmp_path: Path, damage: str) -> None:
    first = dataset.make_dataset(tmp_path, 1 << 20, 1)
    manifest = tmp_path / dataset.MANIFEST_NAME
    file = tmp_path / dataset.DATABASE_NAME / "data.mdb"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "short file":
        os.truncate(file, 8192)
    else:
        manifest.write_text('{"schema": "another/1"}')
    assert dataset.make_dataset(tmp_path, 1 << 20, 1) == first
    records = range(first.records)
    assert dataset.digest_of(tmp_path / dataset.DATABASE_NAME, records) == first.sha256


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(dataset.DatasetError, match=r"cannot make a data set of 1048576 bytes"):
        dataset.make_dataset(tmp_path / "file" / "below", 1 << 20)


def test_the_index_names_each_records_place_in_the_file(
    made: tuple[Path, dataset.Manifest], database: Path
) -> None:
    extents = np.load(made[0] / dataset.INDEX_NAME)
    assert extents.shape == (made[1].records, 2)
    digest = hashlib.sha256()
    with open(database / "data.mdb", "rb") as file:
        for offset, length in extents.tolist():
            digest.update(os.pread(file.fileno(), length, offset))
    assert digest.hexdigest() == made[1].sha256
