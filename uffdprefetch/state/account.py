# SPDX-License-Identifier: Apache-2.0
"""What was read of a file, and by whom: bytes, for the summary and for who decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uffdprefetch.base.record import dataclass

if TYPE_CHECKING:
    from uffdprefetch.native.pool import FileCounts


def of_prefetched(prefetched_bytes: int, blocks_bytes: int, marked_bytes: int) -> int:
    """See FileAccount."""
    return round(prefetched_bytes * blocks_bytes / marked_bytes) if marked_bytes else 0


@dataclass
class FileAccount:
    """Of one file. ``streamed``: some of it was read for no stream (readers/file_stream.py);
    ``pool``: as the pool counts, when it was asked last."""

    prefetched_bytes: int = 0
    already_resident_bytes: int = 0
    late_bytes: int = 0
    streamed: bool = False
    pool: FileCounts | None = None

    @property
    def cold(self) -> bool:
        """Whether nothing of it was read ahead yet."""
        return not (self.prefetched_bytes or self.already_resident_bytes)

    def brought_share(self, marked_bytes: int) -> float:
        """Of blocks that are marked as read ahead, ``marked_bytes``, the part that was not there.
        What is asked for once more is there, and says nothing of that."""
        return min(1.0, self.prefetched_bytes / marked_bytes) if marked_bytes else 1.0

    def of_prefetched(self, blocks_bytes: int, marked_bytes: int) -> int:
        """Of what was prefetched, as much as ``blocks_bytes`` are of all blocks that are marked as
        read ahead: a block is marked for any part of it, and may have been read several times."""
        return of_prefetched(self.prefetched_bytes, blocks_bytes, marked_bytes)

    def came(self, brought: int, there: int) -> None:
        """Of what was asked for, so much was brought; the rest was there."""
        self.prefetched_bytes += brought
        self.already_resident_bytes += there

    def late(self, brought: int) -> None:
        """Its reader was there before it."""
        self.late_bytes += brought

    def stream(self) -> None:
        """Some of it is read for no stream from now on."""
        self.streamed = True

    def note_pool(self, counts: FileCounts) -> None:
        """What the pool says."""
        self.pool = counts
