# SPDX-License-Identifier: Apache-2.0
"""A shuffled epoch of a Hugging Face data set of two Arrow shards: `hf_loader.py DIR --way NAME`.

Ways: `loader` (a DataLoader shuffles, with --workers), `shuffle` (Dataset.shuffle(), whose indices
are a file of their own, read by a DataLoader in order), `iterable` (to_iterable_dataset() with its
shuffle buffer). An epoch gives each sample once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from reading import Reading
from torch.utils.data import DataLoader

BATCH = 32
SEED = 42
#: As in the library's guide; a buffer holds a tenth of the data set.
ITERABLE_SHARDS, BUFFER_SHARE = 64, 10


def collate(samples: Sequence[dict[str, Any]]) -> torch.Tensor:
    """The images of a batch in a row: one piece of shared memory for it."""
    return torch.cat(
        [torch.frombuffer(bytearray(sample["image"]), dtype=torch.uint8) for sample in samples]
    )


def batches_of(directory: Path, way: str, workers: int) -> Any:
    """The DataLoader."""
    data = datasets.load_from_disk(str(directory / "dataset"))
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "num_workers": workers,
        "collate_fn": collate,
        "generator": torch.Generator().manual_seed(SEED),
    }
    if way == "loader":
        return DataLoader(data, shuffle=True, **options)
    if way == "shuffle":
        return DataLoader(data.shuffle(seed=SEED), **options)
    stream = data.to_iterable_dataset(num_shards=ITERABLE_SHARDS)
    buffered = stream.shuffle(seed=SEED, buffer_size=len(data) // BUFFER_SHARE)
    return DataLoader(buffered, **options)


def main() -> None:
    """One epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--way", choices=("loader", "shuffle", "iterable"), default="loader")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    # Indices of shuffle() go to a temporary directory: the data set's own may not be written.
    datasets.disable_caching()
    datasets.disable_progress_bars()
    # As in a worker. Two threads of OpenMP on two cores wait busily for each other while anything
    # else computes: warm, an epoch of 0.6 s then took up to 17.
    torch.set_num_threads(1)
    with Reading() as reading:
        batches = batches_of(args.directory, args.way, args.workers)
        for batch in batches:
            reading.add_tensor(batch)
        del batches  # its workers end, and their faults count


if __name__ == "__main__":
    main()
