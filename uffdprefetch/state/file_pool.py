# SPDX-License-Identifier: Apache-2.0
"""The node's pool (pool/) as those below it know it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.state.files import FileState
from uffdprefetch.state.opening import Opened

if TYPE_CHECKING:  # it brings numpy, which a service without a pool spares
    from uffdprefetch.state.pool_file import PoolFile


class PoolRoom(Protocol):
    """How much may be in it."""

    budget_bytes: int
    limited_by: Limit | None  # what makes it smaller than --budget

    def used_bytes(self) -> int:
        """What it holds."""

    def window_bytes(self, places: int, stream: bool = False) -> int:
        """What a reader may have ahead of it, of so many places at which files are read;
        ``stream``: at one of them."""


class FilePool(Protocol):
    """Where files have pages of the node's own."""

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

    def hush(self, file: FileState) -> None:
        """Begin no further read ahead of it: it is to leave."""
