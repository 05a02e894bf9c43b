# SPDX-License-Identifier: Apache-2.0
"""A job that asks for prefetching by itself: ``torch_explicit.py WORKERS``. As torch_job.py, with
samplers that are not torch's."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch_job import generators

import uffdprefetch.torch

SAMPLES = 30
WORKERS: dict[str, dict[str, Any]] = {
    "0": dict(num_workers=0),
    "fork": dict(num_workers=2, multiprocessing_context="fork"),
    "persistent": dict(num_workers=2, multiprocessing_context="fork", persistent_workers=True),
}


class Uncopyable(Dataset):
    """Sample i is i."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Drawing:
    """Draws from every kind of generator, counts its epochs, and is not torch's."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.epoch = dataset, 0
        self.generator = torch.Generator().manual_seed(5)
        self.rng = np.random.default_rng(6)

    def numbers(self) -> list[int]:
        """An epoch's."""
        self.epoch += 1
        base = torch.randperm(SAMPLES) + torch.randint(9, (1,), generator=self.generator)
        shift = int(np.random.randint(7)) + random.randrange(7) + int(self.rng.integers(7))
        return ((base + shift + self.epoch) % SAMPLES).tolist()

    def __len__(self) -> int:
        return SAMPLES


class Later(Drawing):
    """Draws with its first item."""

    def __iter__(self) -> Iterator[int]:
        yield from self.numbers()


class AtOnce(Drawing):
    """Draws when it is asked for an iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers())


class Batches(Drawing):
    """Batches of different sizes, drawn at once."""

    def __iter__(self) -> Iterator[Any]:
        numbers = self.numbers()
        return iter([numbers[:4], torch.tensor(numbers[4:7]), tuple(numbers[7:])])

    def __len__(self) -> int:
        return 3


def loaders() -> dict[str, dict[str, Any]]:
    """What a DataLoader is given beside workers."""
    data = Uncopyable()
    return {
        "later": dict(dataset=data, batch_size=4, sampler=Later(data)),
        "at once": dict(dataset=data, batch_size=4, sampler=AtOnce(data)),
        "no batches later": dict(dataset=data, batch_size=None, sampler=Later(data)),
        "no batches at once": dict(dataset=data, batch_size=None, sampler=AtOnce(data)),
        "batches": dict(dataset=data, batch_sampler=Batches(data)),
        "torch's": dict(dataset=data, batch_size=4, shuffle=True),
    }


def main(workers: str) -> None:
    """Two epochs of each."""
    torch.set_num_threads(1)
    seen = {}
    for name, given in loaders().items():
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        made = DataLoader(**given, **WORKERS[workers])
        loader = uffdprefetch.torch.prefetch(made, file="relative.lmdb")
        assert loader is made
        seen[name] = [
            {"order": [int(i) for batch in loader for i in torch.as_tensor(batch).reshape(-1)],
             "generators": generators()}
            for _ in range(2)
        ]  # fmt: skip
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
