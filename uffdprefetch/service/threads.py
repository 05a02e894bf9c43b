# SPDX-License-Identifier: Apache-2.0
"""What works beside the service's loop, and wakes it by one event: threads that read (C), that open
files, that look at memory, and that record a start."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from uffdprefetch.base.errors import EXIT_NO_ROOM
from uffdprefetch.native import uffd
from uffdprefetch.native.memory import Pressure
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opener

if TYPE_CHECKING:
    from uffdprefetch.pool.node_pool import NodePool
    from uffdprefetch.service.learning import Learning

WORKERS = 16


class Threads:
    """Of one service."""

    def __init__(self, keeps_copies: bool, pools: bool) -> None:
        """``keeps_copies``: see Config; ``pools``: whether a pool is asked for. Raises OSError."""
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.workers = uffd.Workers(WORKERS, self.wake_fd)
        self.opener = Opener(self.wake_fd, for_children=keeps_copies, for_pool=pools)
        self.learning: Learning | None = None
        self._pressure: Pressure | None = None
        self._pool: NodePool | None = None

    def watch_memory(self, pool: NodePool | None, ledger: Ledger) -> None:
        """From now on what is left of memory is looked at; before anything is read into ours."""
        self._pool = pool
        try:
            pressure = Pressure(pool.pool.pointer if pool is not None else None, EXIT_NO_ROOM)
        except OSError as error:  # the pool's size is still looked at once a second
            ledger.degrade(f"memory is looked at once a second only: {error}")
            return
        self._pressure = pressure
        if pool is not None:
            pool.size.watched_by(pressure)

    def woke(self) -> None:
        """One of them has."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 8)

    def cpu_seconds(self) -> float:
        """Of those that read."""
        ours = self.workers.cpu_seconds()
        return ours + (self._pool.pool.cpu_seconds() if self._pool is not None else 0.0)

    def end_watch(self) -> None:
        """Memory is looked at no more."""
        if self._pressure is not None:
            self._pressure.stop()
