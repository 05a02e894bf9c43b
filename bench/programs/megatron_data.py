# SPDX-License-Identifier: Apache-2.0
"""An epoch of two blended Megatron data sets (`.bin/.idx`), as its training loop reads them:
`megatron_data.py DIR [--workers N]`. The real component is the package megatron-core."""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from reading import Reading
from torch.utils.data import DataLoader

#: As of Llama 3: tokens of 32 bits, so 32 KiB a sample.
VOCABULARY, SEQUENCE_TOKENS = 128_256, 8192
BATCH = 32
SEED = 42


class Tokenizer:
    """What of a tokenizer the data set asks for."""

    vocab_size, eod, pad = VOCABULARY, 0, 1
    unique_identifiers = {"class": "none"}  # noqa: RUF012


def data_of(directory: Path, cache: str, samples: int) -> Any:
    """The blended training set."""
    prefixes = sorted(str(path.with_suffix("")) for path in directory.glob("*.bin"))
    config = GPTDatasetConfig(
        random_seed=SEED, sequence_length=SEQUENCE_TOKENS, path_to_cache=cache, split="1,0,0",
        blend=(prefixes, [1.0] * len(prefixes)), tokenizer=Tokenizer(),
        num_dataset_builder_threads=1, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, mid_level_dataset_surplus=0.0,
    )  # fmt: skip
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config)
    return builder.build()[0]


def collate(samples: Any) -> torch.Tensor:
    """The tokens alone: masks and positions are the same for all."""
    return torch.stack([sample["tokens"] for sample in samples])


def main() -> None:
    """One epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    file_bytes = sum(path.stat().st_size for path in args.directory.glob("*.bin"))
    samples = file_bytes // (4 * SEQUENCE_TOKENS) - 2
    with tempfile.TemporaryDirectory() as cache:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{cache}/group", rank=0, world_size=1
        )
        read(args.directory, cache, samples, args.workers)


def read(directory: Path, cache: str, samples: int, workers: int) -> None:
    """The measured part."""
    with Reading() as reading:
        data = data_of(directory, cache, samples)
        for batch in DataLoader(data, batch_size=BATCH, num_workers=workers, collate_fn=collate):
            reading.add_tensor(batch)


if __name__ == "__main__":
    main()
