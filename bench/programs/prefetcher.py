# SPDX-License-Identifier: Apache-2.0
"""The prefetcher that loaders of model weights write by hand, as a peer of bench/apps.py.

As vLLM's (`safetensors_load_strategy="prefetch"`): threads beside the loader read the shards, each
thread a shard, in pieces of 16 MiB, and throw the bytes away: they are in the page cache then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 16 << 20
THREADS = 8


def read_through(path: Path) -> None:
    """Read a file from its begin to its end."""
    fd = os.open(path, os.O_RDONLY)
    piece = bytearray(PIECE_BYTES)
    try:
        while os.readv(fd, [piece]):
            pass
    finally:
        os.close(fd)


def prefetch_beside(paths: Sequence[Path]) -> None:
    """Begin to read the files; returns at once."""

    def run() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(read_through, paths):
                pass

    threading.Thread(target=run).start()
