# SPDX-License-Identifier: Apache-2.0
"""Reads exact ranges of a record file, by several threads."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError
from uffdprefetch.formats.error import FormatError as FormatError

#: Largest read: on Lustre larger ones bypass the cache (docs/facts.md).
READ_MAX_BYTES = 4 << 20
#: Concurrent small reads: on cold or remote storage they are latency-bound.
THREADS = 8
#: Number of ranges below which the caller's thread reads them.
_RANGES_WORTH_THREADS = 16


class RangeReader(Protocol):
    """A file of ``size_bytes`` with thread-safe reads of ranges."""

    size_bytes: int

    def read(self, offset: int, length: int) -> bytes:
        """[offset, +length); shorter only where the file ends. Raises OSError."""
        ...


class FileReader:
    """A RangeReader over a regular file, through a description of its own."""

    def __init__(self, path: str) -> None:
        """Raises UffdPrefetchError (exit 2) when it cannot be opened or is no regular file."""
        try:
            # O_NONBLOCK: a FIFO would wait for its writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            detail = error.strerror if isinstance(error, OSError) else str(error)
            raise UffdPrefetchError(f"cannot read {path}: {detail}", EXIT_USAGE) from None
        status = os.fstat(self._fd)
        self.size_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise UffdPrefetchError(f"cannot read {path}: it is no regular file", EXIT_USAGE)

    def stamp(self) -> tuple[int, int, int, int]:
        """Present device, inode, size in bytes and mtime in ns, to detect a change."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        while len(data) < length:
            more = os.pread(self._fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def page_runs(numbers: Array, page_bytes: int) -> Iterator[tuple[int, int]]:
    """Index ranges [a, b) of consecutive page numbers, each one read."""
    most = max(READ_MAX_BYTES // page_bytes, 1)
    breaks: Array = np.flatnonzero(np.diff(numbers) != 1) + 1
    for a, b in zip([0, *breaks.tolist()], [*breaks.tolist(), len(numbers)], strict=True):
        for at in range(a, b, most):
            yield at, min(at + most, b)


class PageReader:
    """Reads pages by number: sorted, adjacent ones merged, by a few threads."""

    def __init__(self, reader: RangeReader, page_bytes: int) -> None:
        self._reader = reader
        self._page_bytes = page_bytes
        self._pool: ThreadPoolExecutor | None = None

    def read(self, numbers: Array, out: Array) -> None:
        """Fill the rows of ``out``, shape (n, page_bytes), with the n pages in their given order.

        Raises FormatError where the file ends too soon, OSError.
        """
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        runs = list(page_runs(ascending, self._page_bytes))

        def take(part: list[tuple[int, int]]) -> None:
            for a, b in part:
                offset, length = int(ascending[a]) * self._page_bytes, (b - a) * self._page_bytes
                data = self._reader.read(offset, length)
                if len(data) != length:
                    raise FormatError("file cut short", offset + len(data), "it ends here")
                out[order[a:b]] = np.frombuffer(data, np.uint8).reshape(b - a, -1)

        if len(runs) < _RANGES_WORTH_THREADS:
            take(runs)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "uffdprefetch-index")
        share = -(-len(runs) // THREADS)
        parts = [runs[i : i + share] for i in range(0, len(runs), share)]
        for _ in self._pool.map(take, parts):
            pass

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
