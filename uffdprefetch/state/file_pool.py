# SPDX-License-Identifier: Apache-2.0
"""The node's pool (pool/node_pool.py) as those below it know it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.predict.streams import Stream
from uffdprefetch.state.files import FileState
from uffdprefetch.state.opening import Opened

if TYPE_CHECKING:  # it brings numpy, which a service without a pool spares
    from uffdprefetch.state.pool_file import PoolFile


class FilePool(Protocol):
    """Where files have pages of the node's own."""

    budget_bytes: int
    limited_by: Limit | None  # what makes it smaller than --budget

    @property
    def pool(self) -> uffd_pool.Pool:
        """Its C side."""

    def open(self, file: FileState) -> PoolFile:
        """The file's part of the pool, made at its first mapping. Raises OSError."""

    def forget(self, file: FileState) -> bool:
        """Close the file and free its pages; False while in use."""

    def park(self, file: FileState) -> bool:
        """Close the file; its pages stay. False while in use."""

    def unpark(self, file: FileState, opened: Opened) -> None:
        """It is mapped again. Raises OSError."""

    def drop(self, file: FileState) -> None:
        """The file has changed: drop its pages."""

    def window_bytes(self, walk: bool = False) -> int:
        """What a reader may have ahead of it; ``walk``: at one place."""

    def note_places(self, streams: Iterable[tuple[FileState, Stream]]) -> None:
        """Count the distinct positions at which files are read."""

    def come_over(
        self, part: PoolFile | None, stream: Stream, start: int, end: int, forward: int
    ) -> tuple[int, int]:
        """What was read since the last touch, for a touch of [start, end)."""
