# SPDX-License-Identifier: Apache-2.0
"""cffi binding of csrc/service/compare.c: compares copies of a file's pages with the file.

Which pages and when: service/freshness.py.
"""

from __future__ import annotations

import array
from typing import Any, NamedTuple

from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd

_ffi: Any = uffd._ffi
_lib: Any = uffd._lib
_checked = uffd._checked

RESULTS_AT_ONCE = 64
READ: int = _lib.UP_COMPARE_READ
MAPPED: int = _lib.UP_COMPARE_MAPPED
POOL: int = _lib.UP_COMPARE_POOL


class Watch:
    """A file and the memfd with copies of its pages at the same offsets; ``memfd`` -1: none, or the
    pool has the copies. Raises OSError."""

    def __init__(self, fd: int, memfd: int, size_bytes: int) -> None:
        pointer = _ffi.new("struct up_watch **")
        _checked(_lib.up_watch_create(pointer, fd, memfd, size_bytes), "mapping of the file")
        self.pointer = pointer[0]

    def close(self) -> None:
        """Release it; descriptors and mappings are closed after the last round that uses them."""
        if self.pointer:
            _lib.up_watch_put(self.pointer)
            self.pointer = _ffi.NULL


class Result(NamedTuple):
    """Result of a round (csrc/service/helper.h, struct up_compare_result)."""

    id: int
    start_ns: int
    done_ns: int
    cpu_ns: int
    size_bytes: int
    first_differing: int
    mtime_ns: int
    ctime_ns: int
    compared: int
    differing: int
    rewritten: int
    reads: int
    unread: int
    stopped_at: int
    error: int


class Checker:
    """Comparing threads. ``event_fd`` counts finished rounds."""

    def __init__(self, threads: int, event_fd: int) -> None:
        pointer = _ffi.new("struct up_checker **")
        _checked(_lib.up_checker_create(pointer, threads, event_fd), "comparing threads")
        self._pointer = pointer[0]
        self._out = _ffi.new("struct up_compare_result[]", RESULTS_AT_ONCE)

    def submit(
        self,
        job_id: int,
        watch: Watch,
        how: int,
        pages: list[int],
        *,
        start: int = 0,
        reads_max: int,
        limit_ns: int,
        pool: uffd_pool.Pool | None = None,
        pool_file: int = -1,
    ) -> bool:
        """Queue one round over ascending ``pages``, all in the memfd. False: not accepted now."""
        job = _ffi.new("struct up_compare_job *")
        numbers = array.array("Q", pages)
        job.id, job.watch, job.how, job.pages = job_id, watch.pointer, how, len(pages)
        job.start, job.reads_max, job.limit_ns = start, reads_max, limit_ns
        job.pool = pool.pointer if pool else _ffi.NULL
        job.pool_file = pool_file
        job.page = _ffi.from_buffer("uint64_t[]", numbers)
        return int(_lib.up_checker_submit(self._pointer, job)) == 0

    def reap(self) -> list[Result]:
        """The rounds that have finished since the last call."""
        n = _lib.up_checker_reap(self._pointer, self._out, RESULTS_AT_ONCE)
        names = Result._fields
        return [Result(*(int(getattr(self._out[i], k)) for k in names)) for i in range(n)]

    def cpu_seconds(self) -> float:
        """CPU time of the threads."""
        return float(_lib.up_checker_cpu_ns(self._pointer)) / 1e9

    def close(self) -> bool:
        """End the threads. False: some block on storage; they, and a pool whose pages they compare,
        live until the process ends."""
        unfinished = _lib.up_checker_destroy(self._pointer)
        self._pointer = _ffi.NULL
        return not unfinished
