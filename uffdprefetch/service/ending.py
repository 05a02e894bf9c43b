# SPDX-License-Identifier: Apache-2.0
"""When a service's run is over: nobody is connected any more, or it was asked to end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from uffdprefetch.base import spawn
from uffdprefetch.base.clock import MS
from uffdprefetch.service.freshness import Freshness
from uffdprefetch.service.peers import Peers

#: Nobody connected: how long to wait for the first client, and for another after the last. Where
#: the last launcher has said how its job ended, nobody is waited for.
FIRST_CLIENT_SECONDS = 30.0
LAST_CLIENT_SECONDS = 0.5
#: How often to look while nobody is, and while a launcher that has said good-bye waits.
EMPTY_NS, PARTING_NS = 100 * MS, 5 * MS


class Ending:
    """Of one run."""

    def __init__(self, starter: int, peers: Peers, freshness: Freshness) -> None:
        """``starter``: the pid of the launcher that started us."""
        self._starter, self._peers, self._freshness = starter, peers, freshness
        self._asked = 0  # how often: SIGTERM
        self._empty_since: float | None = time.monotonic()
        self.signal_fd = -1

    def heed_signals(self, poll: select.epoll) -> None:
        """Two signals mean something to us. SIGIO tells that somebody wants to write a leased file.
        SIGTERM asks us to end: where the job manager sends it to everybody, the job has it too and
        may be writing its last checkpoint, so we stay as long as somebody is connected, or until
        the second one. The others are the job's (spawn.shield)."""
        self.signal_fd, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        spawn.shield()
        signal.signal(signal.SIGIO, lambda *_: None)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        poll.register(self.signal_fd, select.EPOLLIN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked by serve()

    def _terminate(self, *_: object) -> None:
        self._asked += 1

    def signaled(self) -> None:
        """A signal has come."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.signal_fd, 64)

    def due_ns(self, now: int) -> int | None:
        """When to look again though nothing happens."""
        if self._peers.launchers.parting:
            return now + PARTING_NS
        return now + EMPTY_NS if self._empty_since is not None else None

    @property
    def has_come(self) -> bool:
        """Whether it is over; to be asked after each turn."""
        # a launcher that was killed while we started will not come
        has_come = self._peers.launchers.has_come(self._starter)
        awaited = not has_come and os.getppid() == self._starter
        over = self._peers.over and not awaited
        if self._asked > 1 or (over and self._freshness.may_end()):
            return True
        if not self._peers.none:
            if not self._peers.only_strangers:  # a watcher that comes again and again is no client
                self._empty_since = None
            return False
        if self._asked and not (awaited and self._peers.may_come):
            return True
        if self._empty_since is None:
            self._empty_since = time.monotonic()
        patience = FIRST_CLIENT_SECONDS if awaited else LAST_CLIENT_SECONDS
        if time.monotonic() - self._empty_since <= patience:
            return False
        if self._freshness.may_end():
            return True
        self._empty_since = time.monotonic()  # asked again then
        return False
