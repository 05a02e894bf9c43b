# SPDX-License-Identifier: Apache-2.0
"""A file under management of which nothing is open."""

from __future__ import annotations

import os

from uffdprefetch.state.file_call import FileCall
from uffdprefetch.state.files import FileState
from uffdprefetch.state.opening import Opened

NOTHING = Opened(-1, -1, -1, os.stat_result((0,) * 10), None, 0)


class ClosedFile(FileState):
    """``there``: what the kernel says of any range of it, as FileState.resident_bytes()."""

    there: int | None = None

    def resident_bytes(self, start: int, length: int) -> int | None:
        """See FileState."""
        return self.there


def file_of(size_bytes: int, path: str = "/data", inode: int = 0) -> ClosedFile:
    """Nobody has read any of it, and nothing is known of its storage."""
    return ClosedFile((0, inode, size_bytes, 0), path, NOTHING, size_bytes, FileCall(""))
