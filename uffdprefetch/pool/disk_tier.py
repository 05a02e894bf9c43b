# SPDX-License-Identifier: Apache-2.0
"""`--spill`: the disk to which goes what leaves the pool's memory (csrc/service/pool/spill.h).

Here: whether there is one, and how large it may be; the C side reads and writes.
"""

from __future__ import annotations

import contextlib
import errno
import os

from uffdprefetch.base import spill_place
from uffdprefetch.base.units import format_rate, format_size
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.protocol.snapshot import SpillState
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger

GOES = "what leaves the pool's memory is read again"


class DiskTier:
    """Of one pool."""

    def __init__(
        self, pool: uffd_pool.Pool, fd: int, directory: str, wanted: int | None, ledger: Ledger
    ) -> None:
        """``fd``: of its file, to ask how full the disk is; ``wanted``: its size as asked for."""
        self._pool, self._fd, self._directory, self._ledger = pool, fd, directory, ledger
        self._device, self._has_told = os.fstat(fd).st_dev, False
        free, total, used = spill_place.room_of(fd)
        allowed = spill_place.allowed_bytes(free, total, used)
        self._most = spill_place.default_bytes(free, allowed) if wanted is None else wanted
        limit = spill_place.limit_bytes()
        if limit < self._most:
            self._most = limit
            ledger.degrade(
                f"--spill {directory}: no file may be larger than {format_size(limit)} here "
                "(ulimit -f), and so is the tier"
            )

    def fit(self) -> None:
        """Once a second: as large as the disk has room for. When it has ended a line says so."""
        with contextlib.suppress(OSError):
            allowed = spill_place.allowed_bytes(*spill_place.room_of(self._fd))
            self._pool.fit_spill(min(allowed, self._most))
        counts = self._pool.spill_counts()
        if counts.ended:
            self._ledger.degrade(f"--spill {self._directory}: {_why(counts)}; {GOES}")

    def serves(self, file: FileState) -> bool:
        """Whether it may hold copies of this file: not of one that lies on the same disk, from
        which a copy comes no sooner."""
        if file.opened.status.st_dev != self._device:
            return True
        if not self._has_told:
            self._has_told = True
            self._ledger.degrade(
                f"--spill {self._directory}: {file.path} lies on the same disk, from which a copy "
                "comes no sooner: of files there none is made"
            )
        return False

    @property
    def has_room(self) -> bool:
        """Whether what leaves memory now can be written."""
        c = self._pool.spill_counts()
        return not c.full and not c.ended and c.used_bytes < c.size_bytes

    @property
    def writes(self) -> bool:
        """Whether anything is written still, be it beside copies that are there."""
        c = self._pool.spill_counts()
        return not c.full and not c.ended

    @property
    def is_full(self) -> bool:
        """Whether nothing is written any more, by an error of the disk."""
        return self._pool.spill_counts().full != 0

    @property
    def is_off(self) -> bool:
        """Whether it is not used any more."""
        return self._pool.spill_counts().ended != 0

    def free(self, number: int, size_bytes: int) -> int:
        """Copies of so much of a file go, by its number in the pool: bytes that are free."""
        return self._pool.free_spilled(number, size_bytes)

    def state(self) -> SpillState:
        """For both documents of a run."""
        c = self._pool.spill_counts()
        return SpillState(
            directory=self._directory,
            size_bytes=c.size_bytes,
            used_bytes=c.used_bytes,
            written_bytes=c.written_bytes,
            read_bytes=c.read_bytes,
            dropped_bytes=c.dropped_bytes,
            refused_bytes=c.refused_bytes,
            late_reads=c.late_reads,
            errors={
                errno.errorcode.get(number, str(number)): times
                for number, times in zip(c.error, c.errors, strict=True)
                if times
            },
            read_bytes_per_second=_rate(c.read_bytes, c.read_busy_ns),
            write_bytes_per_second=_rate(c.written_bytes, c.write_busy_ns),
            ended=_why(c),
        )

    def close(self) -> None:
        """The pool has ended: nothing holds the file any more."""
        os.close(self._fd)


def _rate(size_bytes: int, busy_ns: int) -> float | None:
    """Of one thread."""
    return size_bytes * 1e9 / busy_ns if busy_ns else None


def _why(c: uffd_pool.SpillCounts) -> str | None:
    if c.ended == errno.ETIME:
        disk, storage = format_rate(c.disk_rate), format_rate(c.storage_rate)
        return f"a read of it brings {disk}, one of the file system {storage}"
    if c.ended:
        return f"the disk failed {uffd_pool.SPILL_ERRORS_MOST} times in a minute"
    return f"nothing more is written: {os.strerror(c.full)}" if c.full else None


def begin(pool: uffd_pool.Pool, spill: str, ledger: Ledger) -> DiskTier | None:
    """The tier of ``--spill``, before the pool's first file; None, and a line why, where there can
    be none."""
    directory, wanted = spill_place.parse(spill)
    why = spill_place.why_not(directory)
    fd = own = -1
    try:
        if why is None:
            fd = spill_place.open_file(directory)
            own = os.dup(fd)
            tier = DiskTier(pool, own, directory, wanted, ledger)
            pool.spill(fd, 0, try_bytes=spill_place.TRIAL_BYTES)
            tier.fit()
            return tier
    except OSError as error:
        why = str(error.strerror)
        for one in (fd, own):
            if one >= 0:
                os.close(one)
    ledger.degrade(f"--spill {directory}: {why}; {GOES}")
    return None
