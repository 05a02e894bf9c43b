# SPDX-License-Identifier: Apache-2.0
"""A file under management of which nothing is open."""

from __future__ import annotations

from uffdprefetch.state.file_call import FileCall
from uffdprefetch.state.files import BLOCK_BYTES, FileState


def file_of(size_bytes: int, path: str = "/data", inode: int = 0) -> FileState:
    """Nobody has read any of it."""
    file = FileState((0, inode, 0, 0), path, -1, -1, -1, size_bytes, FileCall(""))
    file.blocks = bytearray(-(-size_bytes // BLOCK_BYTES))
    return file
