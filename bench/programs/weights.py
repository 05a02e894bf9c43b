# SPDX-License-Identifier: Apache-2.0
"""Model weights of DIR, all tensors in their order: `weights.py DIR --reader NAME [--prefetch]`.

Readers: safetensors' load_file, its safe_open (get_tensor), its numpy face; `torch.load` of a
checkpoint of torch.save with mmap=True. Several shards are read one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from prefetcher import prefetch_beside
from reading import Reading

Reader = Callable[[Path, Reading], None]


def by_load_file() -> Reader:
    """safetensors.torch.load_file: a dict of tensors that lie in the mapped file."""
    from safetensors.torch import load_file

    def read(path: Path, reading: Reading) -> None:
        for tensor in load_file(path).values():
            reading.add_tensor(tensor)

    return read


def by_safe_open() -> Reader:
    """safetensors.safe_open, tensor by tensor, as vLLM and SGLang iterate over a shard."""
    import torch  # noqa: F401 (safe_open would import it when it is measured)
    from safetensors import safe_open

    def read(path: Path, reading: Reading) -> None:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (no dict)
                reading.add_tensor(shard.get_tensor(name))

    return read


def by_numpy() -> Reader:
    """safetensors' safe_open for numpy."""
    from safetensors import safe_open

    def read(path: Path, reading: Reading) -> None:
        with safe_open(path, framework="np") as shard:
            for name in shard.keys():  # noqa: SIM118 (no dict)
                reading.add(shard.get_tensor(name))

    return read


def by_torch_load() -> Reader:
    """torch.load(mmap=True): storages that lie in the mapped file."""
    import torch

    def read(path: Path, reading: Reading) -> None:
        for tensor in torch.load(path, mmap=True, weights_only=True).values():
            reading.add_tensor(tensor)

    return read


READERS = {
    "load_file": (by_load_file, "*.safetensors"),
    "safe_open": (by_safe_open, "*.safetensors"),
    "numpy": (by_numpy, "*.safetensors"),
    "torch.load": (by_torch_load, "*.pt"),
}


def main() -> None:
    """Read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--reader", choices=READERS, required=True)
    parser.add_argument("--prefetch", action="store_true", help="the peer of prefetcher.py")
    args = parser.parse_args()
    make, pattern = READERS[args.reader]
    read, paths = make(), sorted(args.directory.glob(pattern))
    with Reading() as reading:
        if args.prefetch:
            prefetch_beside(paths)
        for path in paths:
            read(path, reading)


if __name__ == "__main__":
    main()
