# SPDX-License-Identifier: Apache-2.0
"""What of a file is in the page cache, by system calls alone: for the doctor, the demonstration and
`compare`, which work where the C build failed. (The service asks by csrc/service/residency.c.)"""

from __future__ import annotations

import os

from uffdprefetch.native import syscalls as sc


class Residency:
    """How many pages of a range are cached, and by which sensor. Who neither owns nor may write the
    file is told nothing: cachestat(2) refuses with EPERM, and mincore(2) says "resident" of every
    page (mm/mincore.c, can_do_mincore)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        status = os.fstat(fd)
        writable = os.access(f"/proc/self/fd/{fd}", os.W_OK)
        self.trusted = os.geteuid() in (0, status.st_uid) or writable
        self.sensor = "mincore"
        self.refusal: OSError | None = None  # of cachestat
        try:
            sc.cachestat_pages(fd, 0, sc.PAGE_BYTES)
            self.sensor = "cachestat"
        except OSError as error:
            self.refusal = error

    @property
    def is_told(self) -> bool:
        """Whether what pages() says is so."""
        return self.trusted or self.sensor == "cachestat"

    def pages(self, offset: int, length: int) -> int:
        """Of a range that is not empty; ``offset``: a multiple of the page. Raises OSError."""
        probe = sc.cachestat_pages if self.sensor == "cachestat" else sc.mincore_pages
        return probe(self._fd, offset, length)


def resident_bytes_of(fd: int) -> int | None:
    """Bytes of a file in the page cache: whole pages, so up to its size rounded up. None where that
    is not told. Raises OSError."""
    size_bytes = os.fstat(fd).st_size
    if size_bytes == 0:
        return 0
    residency = Residency(fd)
    return residency.pages(0, size_bytes) * sc.PAGE_BYTES if residency.is_told else None


def resident_bytes(path: str | os.PathLike[str]) -> int | None:
    """The same of a path."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return resident_bytes_of(fd)
    finally:
        os.close(fd)
