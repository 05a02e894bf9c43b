# SPDX-License-Identifier: Apache-2.0
"""A transport's side of the queues between it and its node's service (native/net.py)."""

from __future__ import annotations

import os
from collections import deque

from uffdprefetch.native.net import Message, NetRing


class ServiceQueue:
    """The service is told in the order in which things come."""

    def __init__(self, ring: NetRing, from_fd: int) -> None:
        """``from_fd``: is to count our messages."""
        self._ring, self._from_fd = ring, from_fd
        self._late: deque[Message] = deque()  # what the queue had no room for
        self._told = False  # it has messages that it was not woken for

    def tell(self, message: Message) -> None:
        """A message to it."""
        if self._late or not self._ring.put(message):
            self._late.append(message)
        self._told = True

    def flush(self) -> None:
        """Wake it, where there is something for it."""
        while self._late and self._ring.put(self._late[0]):
            self._late.popleft()
        if self._told:
            self._told = False
            os.eventfd_write(self._from_fd, 1)

    def take(self) -> Message | None:
        """Its next message."""
        return self._ring.take()

    def slot(self, number: int, length: int | None = None) -> memoryview:
        """See NetRing.slot()."""
        return self._ring.slot(number, length)
