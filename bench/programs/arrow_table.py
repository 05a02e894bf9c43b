# SPDX-License-Identifier: Apache-2.0
"""A table of an Arrow IPC file, all of it: `arrow_table.py DIR --reader pyarrow|polars`."""

from __future__ import annotations

import argparse
from pathlib import Path

from reading import Reading


def read_by_pyarrow(path: Path, reading: Reading) -> None:
    """memory_map, record batch by record batch, buffer by buffer."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
        for number in range(file.num_record_batches):
            for column in file.get_batch(number).columns:
                for buffer in column.buffers():
                    if buffer is not None:
                        reading.add(buffer)


def read_by_polars(path: Path, reading: Reading) -> None:
    """A lazy scan: the sum, the least and the greatest of every column."""
    import polars as pl

    every = pl.all()
    chosen = (every.sum().name.suffix("+"), every.min().name.suffix("-"), every.max())
    row = pl.scan_ipc(path).select(*chosen).collect()
    reading.add(repr(row.rows()).encode())


def main() -> None:
    """Read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--reader", choices=("pyarrow", "polars"), required=True)
    args = parser.parse_args()
    read = read_by_pyarrow if args.reader == "pyarrow" else read_by_polars
    __import__(args.reader)
    with Reading() as reading:
        read(args.directory / "table.arrow", reading)


if __name__ == "__main__":
    main()
