# SPDX-License-Identifier: Apache-2.0
"""Queries, one after the other, to a faiss IVF index that stays in its file: `vectors.py DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

import faiss
import numpy as np
from reading import Reading

#: Lists that a query looks at, and how many it finds.
PROBES, NEIGHBOURS = 8, 10


def main() -> None:
    """Ask."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--reads", type=int, default=200, help="queries")
    args = parser.parse_args()
    generator = np.random.default_rng(7)
    with Reading() as reading:
        index = faiss.read_index(str(args.directory / "vectors.faiss"), faiss.IO_FLAG_MMAP)
        index.nprobe = PROBES
        for _ in range(args.reads):
            query = generator.standard_normal((1, index.d), dtype=np.float32)
            distances, neighbours = index.search(query, NEIGHBOURS)
            reading.add(distances)
            reading.add(neighbours)


if __name__ == "__main__":
    main()
