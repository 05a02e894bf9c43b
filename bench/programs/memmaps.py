# SPDX-License-Identifier: Apache-2.0
"""An array of tokens by numpy.memmap: `memmaps.py DIR --reader batches|scan|copy-on-write`.

`batches` is nanoGPT's get_batch(): for each batch a new memmap, of which it takes blocks at random
places; here until as many blocks were taken as the file has pages, divided by two, so that a good
half of the pages is touched. `scan` goes through the array once; `copy-on-write` too, with
mode="c", in which others may write to it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from reading import Reading

BLOCK_TOKENS, BATCH_BLOCKS = 1024, 64
CHUNK_TOKENS = 1 << 20
PAGE_BYTES = 4096


def read_batches(path: Path, reading: Reading) -> None:
    """nanoGPT's loop."""
    generator = np.random.default_rng(1337)
    for _ in range(path.stat().st_size // PAGE_BYTES // 2 // BATCH_BLOCKS):
        data = np.memmap(path, dtype=np.uint16, mode="r")
        starts = generator.integers(len(data) - BLOCK_TOKENS, size=BATCH_BLOCKS)
        blocks = [data[start : start + BLOCK_TOKENS].astype(np.int64) for start in starts]
        reading.add(np.stack(blocks))


def read_all(path: Path, mode: str, reading: Reading) -> None:
    """From the begin to the end."""
    data = np.memmap(path, dtype=np.uint16, mode=mode)  # type: ignore[call-overload]
    for start in range(0, len(data), CHUNK_TOKENS):
        reading.add(data[start : start + CHUNK_TOKENS])


def main() -> None:
    """Read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--reader", choices=("batches", "scan", "copy-on-write"), required=True)
    args = parser.parse_args()
    path = args.directory / "train.bin"
    with Reading() as reading:
        if args.reader == "batches":
            read_batches(path, reading)
        else:
            read_all(path, "r" if args.reader == "scan" else "c", reading)


if __name__ == "__main__":
    main()
