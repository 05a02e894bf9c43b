# SPDX-License-Identifier: Apache-2.0
"""The unlinked test file for measuring a directory."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time

from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.base.units import format_size
from uffdprefetch.native.uffd import resident_bytes

#: Name until it is unlinked, on file systems without O_TMPFILE.
PREFIX = ".uffdprefetch-calibrate-"
#: Share of the free space that may be used: others write there too.
PART_OF_FREE = 0.9
_PIECE = 8 << 20


def refuse_what_does_not_fit(folder: str, size_bytes: int) -> None:
    """Check the free space. Raises UffdPrefetchError (exit 2) and OSError."""
    free = shutil.disk_usage(folder).free
    if size_bytes > PART_OF_FREE * free:
        raise usage_error(
            f"--file-size: {format_size(size_bytes)} in {folder}, where {format_size(free)} are "
            f"free: at most {100 * PART_OF_FREE:.0f} % of that"
        )


def made(folder: str, size_bytes: int, least_bytes: int, seconds: float) -> int:
    """The descriptor of a new unlinked file of random bytes, which cannot outlive us. Writing ends
    after ``seconds`` once it has ``least_bytes``. Raises UffdPrefetchError."""
    until = time.monotonic() + seconds
    try:
        with tempfile.TemporaryFile(prefix=PREFIX, dir=folder) as file:
            for begin in range(0, size_bytes, _PIECE):
                if begin >= least_bytes and time.monotonic() >= until:
                    break
                # Random: zeros would be compressed away.
                file.write(os.urandom(min(_PIECE, size_bytes - begin)))
                file.flush()
                os.fdatasync(file.fileno())  # storage's time, not the page cache's
            return os.dup(file.fileno())
    except OSError as error:
        raise UffdPrefetchError(
            f"calibrate: cannot make a test file in {folder}: {error.strerror}: "
            "give another directory, or as PATH a large file there"
        ) from None


def in_memory(folder: str) -> bool:
    """Whether written pages cannot be dropped from the page cache, as in tmpfs.

    Raises UffdPrefetchError.
    """
    fd = made(folder, mmap.PAGESIZE, mmap.PAGESIZE, 0.0)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return bool(resident_bytes(fd, 0, mmap.PAGESIZE)[0])
    finally:
        os.close(fd)
