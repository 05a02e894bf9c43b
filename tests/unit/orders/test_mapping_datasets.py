# SPDX-License-Identifier: Apache-2.0
"""Data sets as their users write them, read in this process: what is chosen by this process's own
page tables is what the data sets ask their databases for."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mapping_readers import byte_keys, ints, texts

pytest.importorskip("torch")
from lmdb_datasets import KINDS, LmdbDataset, keys_read, make_hashed
from torch.utils.data import DataLoader, get_worker_info

from uffdprefetch.formats.detect import open_index
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.native import uffd
from uffdprefetch.orders.mapping import HypothesisChoice, KeyList, choose, hypotheses

pytestmark = pytest.mark.torch

N = 800
SIZES = (2000, 60_000)
PAGE = 4096

CHOSEN = {
    "formatted": ["keys 'image-%09d', from 1"],
    "pickled": ["keys from .keys"],
    "hashed": ["keys from sha1 of .paths"],
    "unpadded": ["keys '%d', from 0"],
    "npy": ["record number = sample number"],
    "arrow": ["record number = sample number"],
}


def lists_of(dataset: Any) -> list[KeyList]:
    """Its attributes that are lists, as a hook in the job finds them."""
    found = []
    for name, value in vars(dataset).items():
        if isinstance(value, list) and isinstance(value[0], bytes):
            found.append(byte_keys(name, value))
        elif isinstance(value, list) and isinstance(value[0], str):
            found.append(texts(name, value))
        elif isinstance(value, list) and isinstance(value[0], int):
            found.append(ints(name, value))
    return found


class OwnPages:
    """What this process has mapped of a file, by its page table."""

    def __init__(self, path: Path) -> None:
        self.mapped = np.zeros(-(-path.stat().st_size // PAGE), bool)
        fd = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            for line in Path("/proc/self/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5] == str(path):
                    self._add(fd, fields[0], int(fields[2], 16))
        finally:
            os.close(fd)

    def _add(self, fd: int, addresses: str, offset: int) -> None:
        first, end = (int(each, 16) for each in addresses.split("-"))
        at = first
        while at < end:
            runs, at_next = uffd.touched_runs(fd, at, end - at)
            for address, length in runs:
                page = (address - first + offset) // PAGE
                self.mapped[page : page + length // PAGE] = True
            if at_next <= at:
                break
            at = at_next

    def present(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        before = np.concatenate([[0], np.cumsum(self.mapped)])
        low, high = starts // PAGE, -(-ends // PAGE)
        return (before[high] - before[low]) / np.maximum(high - low, 1)


def opened(name: str, path: Path) -> tuple[Any, RecordIndex, Path]:
    """The data set, not yet opened, as a worker gets it."""
    kind = KINDS[name]
    kind.make(path / name, N, np.random.default_rng(1), SIZES)
    dataset = pickle.loads(pickle.dumps(kind.dataset(path / name)))
    file = path / name / kind.file
    forget(file)
    return dataset, open_index(file), file


def forget(file: Path) -> None:
    """Out of the page cache, as far as it goes: what has just been written is there in huge pages,
    which are mapped as a whole."""
    gc.collect()  # what the constructor had mapped
    fd = os.open(file, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def truth(dataset: Any, index: RecordIndex, samples: np.ndarray) -> list[set[int]]:
    """The records of each sample, by what it asks its database for."""
    if not isinstance(dataset, LmdbDataset):
        return [{sample} for sample in samples.tolist()]
    return [
        {int(record) for key in keys_read(dataset, sample) for record in index.find(key)}
        for sample in samples.tolist()
    ]


def chosen(
    dataset: Any, index: RecordIndex, file: Path, order: np.ndarray, seen: int
) -> HypothesisChoice:
    for sample in order[:seen].tolist():
        dataset[sample]
    found = hypotheses(index, len(dataset), lists_of(dataset), order)
    return choose(index, found, order[:seen], OwnPages(file).present, file.name)


@pytest.mark.parametrize("name", KINDS)
def test_the_records_of_a_data_set_are_known_after_some_samples(name: str, tmp_path: Path) -> None:
    dataset, index, file = opened(name, tmp_path)
    order = np.random.default_rng(2).permutation(N)
    choice = chosen(dataset, index, file, order, 100)
    assert choice.decided, choice.why
    assert [each.name for each in choice.hypotheses] == CHOSEN[name]
    wanted = truth(dataset, index, np.arange(N))
    said: list[set[int]] = [set() for _ in range(N)]
    for each in choice.hypotheses:
        records, which = each.records(np.arange(N))
        for record, sample in zip(records.tolist(), which.tolist(), strict=True):
            said[sample].add(record)
    if name == "formatted":
        # all labels are in the same few pages: what they show is no proof, and needs no plan
        wanted = [{r for r in records if index.key(r).startswith(b"image")} for records in wanted]  # type: ignore[union-attr]
    assert said == wanted


def test_without_the_list_nothing_is_chosen(tmp_path: Path) -> None:
    dataset, index, file = opened("pickled", tmp_path)
    order = np.random.default_rng(2).permutation(N)
    for sample in order[:100].tolist():
        dataset[sample]
    found = hypotheses(index, N, [], order)
    choice = choose(index, found, order[:100], OwnPages(file).present, file.name)
    assert not choice.hypotheses


@pytest.mark.parametrize("hash", ["md5", "sha256"])
def test_other_hashes_are_known_too(hash: str, tmp_path: Path) -> None:
    make_hashed(tmp_path / "d", N, np.random.default_rng(3), SIZES, hash)
    dataset = KINDS["hashed"].dataset(tmp_path / "d")
    dataset.hash = hash
    file = tmp_path / "d" / "data.mdb"
    forget(file)
    order = np.random.default_rng(2).permutation(N)
    choice = chosen(dataset, open_index(file), file, order, 100)
    assert [each.name for each in choice.hypotheses] == [f"keys from {hash} of .paths"]


@pytest.mark.parametrize("name", KINDS)
def test_the_data_sets_are_what_a_data_loader_takes(name: str, tmp_path: Path) -> None:
    dataset, _, _ = opened(name, tmp_path)
    assert get_worker_info() is None
    read = [x for batch in DataLoader(dataset, batch_size=32) for x in batch[0].tolist()]
    assert len(read) == N and read == [dataset[i][0] for i in range(N)]
