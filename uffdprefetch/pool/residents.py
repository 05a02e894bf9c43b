# SPDX-License-Identifier: Apache-2.0
"""The pool's state in the terms of pool/eviction.py: resident blocks, and readers.

A block is a run of chunks, the unit of eviction.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.pool.eviction import BlockReader, Residents
from uffdprefetch.predict.randomness import NEAR_BYTES
from uffdprefetch.predict.streams import Stream
from uffdprefetch.state.files import FileState
from uffdprefetch.state.reader import Reader


def reader(of: Reader, stream: Stream, ahead_bytes: int, block_bytes: int) -> BlockReader:
    """A stream in the pool's memory, with its window, in blocks."""
    assert of.file.pooled is not None
    span = of.span
    return BlockReader(
        file=of.file.pooled.number,
        position=max(0, stream.position_bytes - 1) // block_bytes,
        direction=stream.direction,
        low=span.start_bytes // block_bytes,
        high=-(-span.end_bytes // block_bytes),
        ahead=-(-ahead_bytes // block_bytes),
        behind=max(1, NEAR_BYTES // block_bytes),
    )


def to_come(file: FileState, ahead_bytes: int, block_bytes: int) -> BlockReader:
    """A stream that will come to a file from its beginning on, with its window there, in blocks."""
    assert file.pooled is not None
    return BlockReader(
        file=file.pooled.number, position=0, direction=1, low=0,
        high=-(-file.size_bytes // block_bytes), ahead=-(-ahead_bytes // block_bytes),
    )  # fmt: skip


def resident_blocks(
    pooled: Mapping[int, FileState],
    chunks: int,
    spared: Mapping[int, npt.NDArray[np.bool_]] = MappingProxyType({}),
    spilled: Mapping[int, uffd_pool.DiskCopies] = MappingProxyType({}),
    writes: bool = False,
) -> Residents:
    """The blocks of ``chunks`` chunks with any resident chunk that is not held for other nodes, nor
    ``spared`` (masks of chunks), of all files by their numbers, in the order of files and blocks; a
    block's touch is the latest of its chunks'. ``spilled``: of which chunks the disk tier has
    copies; ``writes``: those for which it has a place will be written before they leave."""
    files: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
    blocks: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    touched: list[npt.NDArray[np.uint32]] = [np.empty(0, np.uint32)]
    copied: list[npt.NDArray[np.bool_]] = [np.empty(0, bool)]
    for number, file in pooled.items():
        assert file.pooled is not None
        books = file.pooled.books
        state, kept = np.asarray(books.state), np.asarray(books.kept)
        there = (state == uffd_pool.PRESENT) & (kept != uffd_pool.HELD)
        if number in spared:
            there &= ~spared[number]
        missing = -len(there) % chunks
        found = np.flatnonzero(np.pad(there, (0, missing)).reshape(-1, chunks).any(axis=1))
        times = np.pad(np.asarray(books.touched_ms), (0, missing)).reshape(-1, chunks).max(axis=1)
        files.append(np.full(len(found), number, np.int32))
        blocks.append(found.astype(np.int64))
        touched.append(times[found])
        if number in spilled:
            copies = spilled[number].places() if writes else spilled[number].mask()
            lacks = np.flatnonzero(there & ~copies) // chunks
            copied.append(~np.isin(found, lacks))
    block = np.concatenate(blocks)
    pinned: npt.NDArray[np.bool_] = np.zeros(len(block), bool)  # pinned chunks are skipped in C
    all_copied = np.concatenate(copied)
    return Residents(
        np.concatenate(files), block, np.concatenate(touched), pinned,
        all_copied if len(all_copied) == len(block) else None,
    )  # fmt: skip
