# SPDX-License-Identifier: Apache-2.0
"""Token files as Megatron-LM keeps them, and as much of megatron-core as a DataLoader needs to read
them: ``write_library()``. The arrays that lead to a sample are made and saved as there."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

LIBRARY = {
    "__init__.py": "",
    "core/__init__.py": "",
    "core/datasets/__init__.py": "",
    "core/datasets/indexed_dataset.py": """
import numpy
class _MMapBinReader:
    def __init__(self, path):
        self.memory = numpy.memmap(path, mode="r")
    def read(self, dtype, count, offset):
        return numpy.frombuffer(self.memory, dtype, count, offset)
class _IndexReader:
    def __init__(self, path):
        self.bin_buffer_mmap = numpy.memmap(path, mode="r")
        count, self.document_count = self.bin_buffer_mmap[18:34].view("<q").tolist()
        self.dtype, self.dtype_size = numpy.int32, 4
        self.sequence_lengths = numpy.frombuffer(self.bin_buffer_mmap, "<i4", count, 34)
        self.sequence_pointers = numpy.frombuffer(
            self.bin_buffer_mmap, "<i8", count, 34 + 4 * count)
class IndexedDataset:
    def __init__(self, prefix):
        self.path_prefix = prefix
        self.bin_reader, self.index = _MMapBinReader(prefix + ".bin"), _IndexReader(prefix + ".idx")
    def get(self, number, offset=0, length=None):
        most = self.index.sequence_lengths[number] - offset
        at = self.index.sequence_pointers[number] + 4 * offset
        return self.bin_reader.read(numpy.int32, most if length is None else length, int(at))
""",
    "core/datasets/gpt_dataset.py": """
import types
import numpy
from megatron.core.datasets.indexed_dataset import IndexedDataset
class GPTDataset:
    def __init__(self, prefix):
        self.dataset = IndexedDataset(prefix)
        self.config = types.SimpleNamespace(add_extra_token_to_sequence=1)
        for name in ("shuffle_index", "sample_index", "document_index"):
            setattr(self, name, numpy.load(f"{prefix}-{name}.npy", mmap_mode="r"))
    def __len__(self):
        return len(self.shuffle_index)
    def _query_document_sample_shuffle_indices(self, idx):
        idx = self.shuffle_index[idx]
        (first, begin), (last, end) = self.sample_index[idx], self.sample_index[idx + 1]
        if first == last:
            number = self.document_index[first]
            return self.dataset.get(number, int(begin), int(end - begin + 1))
        return numpy.concatenate([
            self.dataset.get(
                self.document_index[i], int(begin) if i == first else 0,
                int(end + 1) if i == last else None)
            for i in range(first, last + 1)])
    def __getitem__(self, idx):
        return {"tokens": self._query_document_sample_shuffle_indices(idx)}
""",
    "core/datasets/blended_dataset.py": """
class BlendedDataset:
    def __init__(self, datasets, dataset_index, dataset_sample_index):
        self.datasets = datasets
        self.dataset_index, self.dataset_sample_index = dataset_index, dataset_sample_index
    def __len__(self):
        return len(self.dataset_index)
    def __getitem__(self, idx):
        which = self.dataset_index[idx]
        return {"dataset_id": which, **self.datasets[which][self.dataset_sample_index[idx]]}
""",
}


def write_library(directory: Path) -> None:
    """A package ``megatron`` for scripts in ``directory``."""
    for name, source in LIBRARY.items():
        path = directory / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def write_tokens(
    prefix: Path, documents: int, most_tokens: int, sample_tokens: int, rng: np.random.Generator
) -> int:
    """Documents of 1 to ``most_tokens`` tokens of 32 bits, and the arrays of one epoch over them in
    shuffled order; the number of samples."""
    lengths = rng.integers(1, most_tokens, documents, endpoint=True)
    tokens: Any = rng.integers(0, 1 << 17, int(lengths.sum()), dtype=np.int32)
    tokens.tofile(prefix.with_suffix(".bin"))
    pointers = 4 * (np.cumsum(lengths) - lengths)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, documents, documents + 1)
    arrays = lengths.astype("<i4"), pointers.astype("<i8"), np.arange(documents + 1).astype("<i8")
    prefix.with_suffix(".idx").write_bytes(head + b"".join(each.tobytes() for each in arrays))
    order = rng.permutation(documents)
    ends = np.cumsum(lengths[order])
    samples = (int(lengths.sum()) - 1) // sample_tokens
    at = np.arange(samples + 1) * sample_tokens
    place = np.searchsorted(ends, at, "right")
    rows = np.stack([place, at - (ends - lengths[order])[place]], 1)
    np.save(f"{prefix}-document_index.npy", order.astype(np.int32))
    np.save(f"{prefix}-sample_index.npy", rows.astype(np.int32))
    np.save(f"{prefix}-shuffle_index.npy", rng.permutation(samples).astype(np.uint32))
    return samples
