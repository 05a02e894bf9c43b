# SPDX-License-Identifier: Apache-2.0
"""A file under management of which nothing is open."""

from __future__ import annotations

from uffdprefetch.state.file_call import FileCall
from uffdprefetch.state.files import FileState


class ClosedFile(FileState):
    """``there``: what the kernel says of any range of it, as FileState.resident_bytes()."""

    there: int | None = None

    def resident_bytes(self, start: int, length: int) -> int | None:
        """See FileState."""
        return self.there


def file_of(size_bytes: int, path: str = "/data", inode: int = 0) -> ClosedFile:
    """Nobody has read any of it, and nothing is known of its storage."""
    return ClosedFile((0, inode, size_bytes, 0), path, -1, -1, -1, size_bytes, FileCall(""))
