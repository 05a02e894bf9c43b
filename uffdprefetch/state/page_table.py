# SPDX-License-Identifier: Apache-2.0
"""A process's page table, as /proc/PID/pagemap shows it."""

from __future__ import annotations

import os

from uffdprefetch.native import uffd


class PageTable:
    """Of one process."""

    def __init__(self, pid: int) -> None:
        self._fd, self.error = -1, ""
        try:
            self._fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.error = error.strerror or str(error)

    @property
    def is_readable(self) -> bool:
        """Whether it is; else ``error`` says why not."""
        return self._fd >= 0

    def runs(self, address: int, length: int) -> list[tuple[int, int]]:
        """Runs of pages present in it in [address, +length), as (address, bytes), in order; at most
        one call's (512 runs), none where it cannot be read."""
        if self._fd < 0:
            return []
        try:
            return uffd.touched_runs(self._fd, address, length)[0]
        except OSError:
            return []

    def close(self) -> None:
        """Look no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
