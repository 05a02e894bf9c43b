# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of storage, not of the page cache: random reads of a file by threads."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

import numpy as np

from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.native.uffd import resident_bytes
from uffdprefetch.sim.measure.barrier import seconds_from_barrier
from uffdprefetch.sim.measure.bounds import Budget

MB = 1e6
#: A run's target duration, and its least number of requests by each thread.
RUN_SECONDS = 0.15
RUN_REQUESTS = 4


class ReadBenchmark:
    """Random reads of ``path``, each offset at most once in a run.

    What is read is dropped from the page cache before and after; with ``direct`` (O_DIRECT) the
    cache is not used. ``fd``: of an unlinked file, owned by this; ``path`` then only serves in
    messages. Raises OSError.
    """

    def __init__(
        self, path: str, direct: bool = False, seed: int = 0, fd: int | None = None
    ) -> None:
        self.path = path
        if fd is not None:
            self.fd = fd
            if direct:
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        elif stat.S_ISREG(os.stat(path).st_mode):
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        else:
            raise usage_error(f"calibrate: {path} is no file: give one, or a directory")
        self.direct = direct
        self.size_bytes = os.fstat(self.fd).st_size
        if not direct:
            try:
                os.fdatasync(self.fd)  # dirty pages are not dropped
            except OSError:
                pass  # EROFS, EINVAL: no dirty pages of ours
            # The whole file: a part of a large folio is not dropped (mm/truncate.c).
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.random = np.random.default_rng(seed)
        self.orders: dict[int, list[int]] = {}
        self.rates: dict[tuple[int, int], float] = {}

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> ReadBenchmark:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _offsets(self, request_bytes: int, count: int) -> list[int]:
        """``count`` distinct offsets."""
        order = self.orders.get(request_bytes, [])
        if len(order) < count:
            order = self.random.permutation(self.size_bytes // request_bytes).tolist()
        self.orders[request_bytes] = order[count:]
        return [number * request_bytes for number in order[:count]]

    def _requests(self, threads: int, request_bytes: int) -> int:
        """Requests of each thread, so that a run takes RUN_SECONDS."""
        rate = self.rates.get((threads, request_bytes), 0.0)
        most = self.size_bytes // request_bytes // threads
        return max(
            1, min(most, max(RUN_REQUESTS, int(rate * MB * RUN_SECONDS / request_bytes / threads)))
        )

    def run(self, threads: int, request_bytes: int, budget: Budget) -> float | None:
        """MB/s of one run; None when the budget or the file is too small for it."""
        if self.size_bytes // request_bytes < threads:
            return None
        each = self._requests(threads, request_bytes)
        if not budget.take(threads * each * request_bytes):
            return None
        places = self._offsets(request_bytes, threads * each)
        offsets = [places[n * each : (n + 1) * each] for n in range(threads)]
        self._drop(offsets, request_bytes)
        self._check_cold(offsets[0][0], request_bytes)
        seconds = self._timed(offsets, request_bytes)
        self._drop(offsets, request_bytes)
        rate = threads * each * request_bytes / MB / seconds
        self.rates[threads, request_bytes] = rate
        return rate

    def _drop(self, offsets: list[list[int]], request_bytes: int) -> None:
        if self.direct:
            return
        for mine in offsets:
            for offset in mine:
                os.posix_fadvise(self.fd, offset, request_bytes, os.POSIX_FADV_DONTNEED)

    def _check_cold(self, offset: int, request_bytes: int) -> None:
        """Raises UffdPrefetchError where dropped pages stay: tmpfs, or the file is mapped."""
        if self.direct:
            return
        still_cached, _ = resident_bytes(self.fd, offset, request_bytes)
        if still_cached:
            raise UffdPrefetchError(
                f"calibrate: {self.path} stays in the page cache ({still_cached} bytes of "
                f"{request_bytes} after they were dropped): end what maps it, give a file that is "
                "not in tmpfs, or try --direct"
            )

    def _timed(self, offsets: list[list[int]], request_bytes: int) -> float:
        """Seconds from the common start to the last thread's last byte. Raises OSError."""

        def read(number: int) -> None:
            with mmap.mmap(-1, request_bytes) as buffer:  # aligned, as O_DIRECT needs it
                for offset in offsets[number]:
                    if os.preadv(self.fd, [buffer], offset) != request_bytes:
                        raise OSError(0, f"the file ended before {offset + request_bytes}")

        return seconds_from_barrier(len(offsets), read)
