# SPDX-License-Identifier: Apache-2.0
"""What a pool asks of, and tells, the other nodes that share with it (service/cluster.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from uffdprefetch.state.files import FileState


class OtherNodes(Protocol):
    """Files by their numbers in the pool."""

    def opened(self, file: FileState, number: int) -> None:
        """A file has become the pool's."""

    def closed(self, number: int, why: str | None = None) -> None:
        """It has changed, or left the pool, or others may not have it any more, and ``why``."""

    def reads_alike(self, number: int) -> bool:
        """Whether other nodes read the same of it."""

    def keeps(self, budget_bytes: int) -> int:
        """Of a budget of so many bytes, what is kept for other nodes at the most."""


class NoOthers:
    """See OtherNodes: there are none."""

    def opened(self, file: FileState, number: int) -> None:
        """Nobody is told."""

    def closed(self, number: int, why: str | None = None) -> None:
        """Nobody is told."""

    def reads_alike(self, number: int) -> bool:
        """None does."""
        return False

    def keeps(self, budget_bytes: int) -> int:
        """Nothing."""
        return 0
