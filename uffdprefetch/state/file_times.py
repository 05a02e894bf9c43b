# SPDX-License-Identifier: Apache-2.0
"""File times that show that a file's content may have changed."""

from __future__ import annotations

import os
from typing import NamedTuple


class Times(NamedTuple):
    """Size and times of fstat(2), in bytes and ns."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, fd: int) -> Times:
        """Of an open file. Raises OSError."""
        st = os.fstat(fd)
        return cls(st.st_size, st.st_mtime_ns, st.st_ctime_ns)
