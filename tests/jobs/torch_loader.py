# SPDX-License-Identifier: Apache-2.0
"""A training loop's input side: torch's DataLoader over an LMDB or a memory-mapped array.

argv: lmdb|array, path, number of workers, fork|spawn. Prints the SHA-256 over all batches of both
epochs. The LMDB is opened in each worker at its first record, the array in the parent.
"""

from __future__ import annotations

import hashlib
import sys

import lmdb
import numpy
import torch
from torch.utils.data import DataLoader, Dataset

ROWS_PER_ITEM = 16


class Records(Dataset[torch.Tensor]):
    """One record of an LMDB per item; an environment does not survive a fork."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.env: lmdb.Environment | None = None
        with lmdb.open(path, readonly=True, lock=False) as env:
            self.length = env.stat()["entries"]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> torch.Tensor:
        if self.env is None:
            self.env = lmdb.open(self.path, readonly=True, lock=False, readahead=False)
        with self.env.begin(buffers=True) as txn:
            return torch.frombuffer(bytearray(txn.get(b"%08d" % item)), dtype=torch.uint8)


class Rows(Dataset[torch.Tensor]):
    """Some rows of a mapped array per item; workers that are forked inherit the mapping."""

    def __init__(self, path: str) -> None:
        self.array = numpy.load(path, mmap_mode="r").view(numpy.int64)

    def __len__(self) -> int:
        return len(self.array) // ROWS_PER_ITEM

    def __getitem__(self, item: int) -> torch.Tensor:
        rows = self.array[item * ROWS_PER_ITEM : (item + 1) * ROWS_PER_ITEM]
        return torch.from_numpy(numpy.array(rows)).flatten()


def main() -> None:
    kind, path, workers, method = sys.argv[1:]
    dataset = Records(path) if kind == "lmdb" else Rows(path)
    loader = DataLoader(
        dataset,
        batch_size=16,
        num_workers=int(workers),
        multiprocessing_context=method if int(workers) else None,
        persistent_workers=int(workers) > 0,
        collate_fn=torch.cat,  # records differ in length
    )
    digest = hashlib.sha256()
    for _ in range(2):
        for batch in loader:
            digest.update(memoryview(batch.numpy()))
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
