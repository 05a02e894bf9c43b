# SPDX-License-Identifier: Apache-2.0
"""Arrow data sets of several files as Hugging Face's library keeps them, made with pyarrow alone,
and as much of that library as a DataLoader needs to read them: ``write_library()``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

#: Rows of a batch in a shard.
BATCH_ROWS = 50

LIBRARY = {
    "__init__.py": "from datasets.arrow_dataset import Dataset\n",
    "table.py": """
import pyarrow as pa

class Table:
    def __init__(self, table):
        self.table = table
    num_rows = property(lambda self: self.table.num_rows)
    def column(self, number):
        return self.table.column(number)

class InMemoryTable(Table):
    pass

class MemoryMappedTable(Table):
    def __init__(self, table, path, replays=None):
        super().__init__(table)
        self.path, self.replays = path, replays or []
    @classmethod
    def from_file(cls, path, replays=None):
        table = pa.ipc.open_stream(pa.memory_map(path)).read_all()
        for name, arguments, named in replays or []:
            table = getattr(table, name)(*arguments, **named)
        return cls(table, path, replays)
    def __reduce__(self):
        return MemoryMappedTable.from_file, (self.path, self.replays)
    def slice(self, *arguments):
        replays = [*self.replays, ("slice", arguments, {})]
        return MemoryMappedTable(self.table.slice(*arguments), self.path, replays)

class ConcatenationTable(Table):
    def __init__(self, blocks):
        super().__init__(pa.concat_tables([row[0].table for row in blocks]))
        self.blocks = blocks
    def __reduce__(self):
        return ConcatenationTable, (self.blocks,)
""",
    "arrow_dataset.py": """
import pyarrow as pa
from datasets.table import ConcatenationTable, InMemoryTable, MemoryMappedTable

class Dataset:
    def __init__(self, data, indices=None):
        self._data, self._indices = data, indices
    @classmethod
    def of_files(cls, paths):
        return cls(ConcatenationTable([[MemoryMappedTable.from_file(path)] for path in paths]))
    def indexed(self, rows):
        table = pa.table({"indices": pa.array(rows, pa.uint64())})
        return Dataset(self._data, InMemoryTable(table))
    def __len__(self):
        return (self._indices or self._data).num_rows
    def __getitem__(self, number):
        if self._indices is not None:
            number = self._indices.column(0)[number].as_py()
        return {name: self._data.table[name][number].as_py() for name in ("data", "label")}
""",
}


def write_library(directory: Path) -> None:
    """A package ``datasets`` for scripts in ``directory``."""
    package = directory / "datasets"
    package.mkdir()
    for name, source in LIBRARY.items():
        (package / name).write_text(source)


def write_shards(
    directory: Path, rows: Sequence[int], rng: np.random.Generator, sizes: tuple[int, int]
) -> list[Path]:
    """Shards of so many rows, streams as that library writes them: ``data`` of ``sizes`` bytes, and
    ``label``, the row's number in the data set."""
    paths, label = [], 0
    schema = pa.schema([("label", pa.int64()), ("data", pa.binary())])
    for number, count in enumerate(rows):
        paths.append(directory / f"data-{number:05}-of-{len(rows):05}.arrow")
        with pa.OSFile(str(paths[-1]), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for first in range(0, count, BATCH_ROWS):
                some = min(BATCH_ROWS, count - first)
                data = [rng.bytes(int(rng.integers(*sizes))) for _ in range(some)]
                labels = range(label + first, label + first + some)
                writer.write_batch(pa.record_batch([pa.array(labels), pa.array(data)], schema))
        label += count
    return paths
