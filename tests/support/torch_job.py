# SPDX-License-Identifier: Apache-2.0
"""A training job that tells all it saw: ``torch_job.py WORKERS [SAMPLER...]``.

JSON on standard output: for each sampler and epoch the samples that were read, in order, a digest
of torch's, numpy's and random's generators after it, and each step's loss to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

SAMPLES = 41
EPOCHS = 2


class Samples(Dataset):
    """Sample i leads to features that depend on i, on where it is and on all generators."""

    def __init__(self, leaf: int, samples: int) -> None:
        self.leaf, self.samples = leaf, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return torch.utils.data.default_collate([self[i] for i in index])
        noise = torch.rand(3) + float(np.random.rand()) + random.random()
        return noise * 0.01 + torch.tensor([1.0, int(index) / 7, self.leaf]), (
            self.leaf,
            int(index),
        )


class ManyAtOnce(Samples):
    """Fetches a batch with one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset):
    """Chooses its samples itself."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Samples(0, 7)[i] for i in range(7))


class Backwards(Sampler):
    """Not torch's, so unknown."""

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(torch.randperm(SAMPLES).tolist()))

    def __len__(self) -> int:
        return SAMPLES


class Quiet(RandomSampler):
    """Torch's iteration under another name."""


def seeded(seed: int) -> torch.Generator:
    """A generator of the job's own."""
    return torch.Generator().manual_seed(seed)


def pair(batch: list[Any]) -> Any:
    """A collate function of the job's."""
    return torch.utils.data.default_collate(batch)


def loaders() -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    """By name: a data set and what its DataLoader is given beside workers."""
    whole = Samples(0, SAMPLES)
    weights = [1.0 + i % 5 for i in range(SAMPLES)]
    parts = ConcatDataset([Samples(0, 10), Samples(1, 20), Samples(2, 11)])
    nested = Subset(ConcatDataset([Subset(parts, list(range(40, 4, -1))), Samples(3, 9)]),
                    np.random.default_rng(5).permutation(45))  # fmt: skip
    g, n = seeded, SAMPLES
    return {
        "sequential": lambda: (whole, dict(batch_size=4)),
        "shuffle": lambda: (whole, dict(batch_size=4, shuffle=True)),
        "shuffle drop_last": lambda: (whole, dict(batch_size=4, shuffle=True, drop_last=True)),
        "shuffle generator": lambda: (whole, dict(batch_size=4, shuffle=True, generator=g(3))),
        "random own": lambda: (whole, dict(batch_size=4, sampler=RandomSampler(
            whole, generator=g(4)))),
        "random derived": lambda: (whole, dict(batch_size=4, sampler=Quiet(whole))),
        "random fewer": lambda: (whole, dict(batch_size=4, sampler=RandomSampler(
            whole, num_samples=9))),
        "random more": lambda: (whole, dict(batch_size=4, sampler=RandomSampler(
            whole, num_samples=3 * n + 5))),
        "replacement": lambda: (whole, dict(batch_size=4, sampler=RandomSampler(
            whole, replacement=True, num_samples=2 * n + 5))),
        "replacement generator": lambda: (whole, dict(batch_size=4, generator=g(1),
            sampler=RandomSampler(whole, replacement=True, generator=g(2)))),
        "subset random": lambda: (whole, dict(batch_size=4, sampler=SubsetRandomSampler(
            range(0, n, 2)))),
        "subset random tensor": lambda: (whole, dict(batch_size=4, sampler=SubsetRandomSampler(
            torch.arange(5, n), generator=g(9)))),
        "weighted": lambda: (whole, dict(batch_size=4, sampler=WeightedRandomSampler(
            weights, 2 * n))),
        "weighted once": lambda: (whole, dict(batch_size=4, sampler=WeightedRandomSampler(
            weights, 30, replacement=False, generator=g(6)))),
        "distributed": lambda: (whole, dict(batch_size=4, sampler=DistributedSampler(
            whole, num_replicas=3, rank=1, seed=2))),
        "distributed plain": lambda: (whole, dict(batch_size=4, sampler=DistributedSampler(
            whole, num_replicas=4, rank=3, shuffle=False, drop_last=True))),
        "batch sampler": lambda: (whole, dict(batch_sampler=BatchSampler(
            RandomSampler(whole), 5, drop_last=True))),
        "batches of a list": lambda: (whole, dict(batch_sampler=BatchSampler(
            [5, 3, 40, 5, 0], 2, drop_last=False))),
        "no batches": lambda: (whole, dict(batch_size=None, shuffle=True)),
        "no batches distributed": lambda: (whole, dict(batch_size=None, sampler=DistributedSampler(
            whole, num_replicas=2, rank=0))),
        "whole batches": lambda: (whole, dict(batch_size=None, sampler=BatchSampler(
            SequentialSampler(whole), 6, drop_last=False))),
        "many at once": lambda: (ManyAtOnce(0, n), dict(batch_size=4, shuffle=True)),
        "collate": lambda: (whole, dict(batch_size=4, shuffle=True, collate_fn=pair)),
        "subset": lambda: (Subset(whole, [7, 1, 9, 40]), dict(batch_size=3, shuffle=True)),
        "concat": lambda: (parts, dict(batch_size=4, shuffle=True)),
        "nested": lambda: (nested, dict(batch_size=4, shuffle=True)),
        "unknown": lambda: (whole, dict(batch_size=4, sampler=Backwards())),
        "iterable": lambda: (Stream(), dict(batch_size=4)),
    }  # fmt: skip


WORKERS: dict[str, dict[str, Any]] = {
    "0": dict(num_workers=0),
    "fork": dict(num_workers=2, multiprocessing_context="fork", pin_memory=True),
    "persistent": dict(num_workers=2, multiprocessing_context="fork", persistent_workers=True,
                       prefetch_factor=1),
    "spawn": dict(num_workers=2, multiprocessing_context="spawn", prefetch_factor=3),
    "spawn persistent": dict(num_workers=2, multiprocessing_context="spawn",
                             persistent_workers=True),
    "forkserver": dict(num_workers=2, multiprocessing_context="forkserver"),
}  # fmt: skip


def generators() -> str:
    """A digest of the state of all global generators."""
    state = (torch.get_rng_state().numpy().tobytes(), np.random.get_state(), random.getstate())
    return hashlib.sha256(pickle.dumps(state)).hexdigest()


def epoch(loader: DataLoader, model: torch.nn.Linear, optimizer: Any) -> dict[str, Any]:
    """Train an epoch: what was seen."""
    order: list[tuple[int, int]] = []
    losses = []
    for features, (leaves, indices) in loader:
        places = (leaves, indices) if torch.is_tensor(indices) else ([leaves], [indices])
        order += [(int(leaf), int(index)) for leaf, index in zip(*places, strict=True)]
        loss = (model(features) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss).hex())
    return {"order": order, "losses": losses, "generators": generators()}


def train(name: str, workers: str) -> list[dict[str, Any]]:
    """What EPOCHS epochs with this sampler and these workers saw."""
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    dataset, given = loaders()[name]()
    loader = DataLoader(dataset, **given, **WORKERS[workers])
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    epochs = []
    for number in range(EPOCHS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(number)
        epochs.append(epoch(loader, model, optimizer))
    return epochs


def main(workers: str, names: list[str]) -> None:
    """Train with each sampler."""
    torch.set_num_threads(1)
    torch.multiprocessing.set_forkserver_preload(["torch"])
    seen = {name: train(name, workers) for name in names or list(loaders())}
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
