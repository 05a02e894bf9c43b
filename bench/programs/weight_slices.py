# SPDX-License-Identifier: Apache-2.0
"""A checkpoint loaded by tensor-parallel ranks: `weight_slices.py DIR --ranks 8 [--prefetch]`.

Each rank is a process that goes through all shards and takes its slice of each tensor by
safetensors' get_slice: rows of those that are parallel by columns, columns of those that are
parallel by rows, small ones whole, as the layers of Megatron-LM, vLLM and SGLang do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from prefetcher import prefetch_beside
from reading import Reading
from safetensors import safe_open

#: Parallel by rows: each rank multiplies with some columns of these.
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


def part_of(name: str, tensor: Any, rank: int, ranks: int) -> Any:
    """A rank's slice of a tensor."""
    shape = tensor.get_shape()
    if len(shape) < 2:
        return tensor[:]
    axis = 1 if name.endswith(BY_COLUMNS) else 0
    part = shape[axis] // ranks
    chosen = slice(rank * part, (rank + 1) * part)
    return tensor[:, chosen] if axis else tensor[chosen]


def load(paths: list[Path], rank: int, ranks: int, start: Barrier, told: Any) -> None:
    """One rank: what its Reading tells goes to ``told``."""
    reading = Reading()
    start.wait()
    reading.begin()
    for path in paths:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (no dict)
                reading.add_tensor(part_of(name, shard.get_slice(name), rank, ranks))
    reading.end()
    told.put((rank, reading.line()))


def main() -> int:
    """Start the ranks, and tell of all of them in one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--prefetch", action="store_true", help="the peer of prefetcher.py")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # as torchrun has it with several ranks on a node
    paths = sorted(args.directory.glob("*.safetensors"))
    context = multiprocessing.get_context("fork")
    start, told = context.Barrier(args.ranks), context.Queue()
    ranks = [
        context.Process(target=load, args=(paths, rank, args.ranks, start, told))
        for rank in range(args.ranks)
    ]
    for process in ranks:
        process.start()
    if args.prefetch:
        prefetch_beside(paths)
    lines = [line for _, line in sorted((told.get() for _ in ranks), key=lambda one: one[0])]
    for process in ranks:
        process.join()
    begin_ns, end_ns = min(x["begin_ns"] for x in lines), max(x["end_ns"] for x in lines)
    every = {
        "seconds": (end_ns - begin_ns) / 1e9,
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "digest": "-".join(line["digest"] for line in lines),
        "bytes": sum(line["bytes"] for line in lines),
        "major_faults": sum(line["major_faults"] for line in lines),
    }
    print(json.dumps(every), flush=True)
    return max(process.exitcode or 0 for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
