# SPDX-License-Identifier: Apache-2.0
"""Opens that were seen before it is known what file each is of: a small file has its number only
when it is read."""

from __future__ import annotations

import time

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.file.events import empty

#: Opens that wait for their file's number, and small files whose number is kept for the next open.
WAITING_MAX = 65536
#: Time for which one waits: who opens a small file reads it at once.
WAIT_NS = 2_000_000_000

Key = tuple[int, int]  # kernel device, inode


class SeenOpens:
    """Of a recording. ``descriptors``: by (pid, fd), when it was opened, and as what."""

    def __init__(self) -> None:
        self.descriptors: dict[tuple[int, int], list[tuple[int, Key | None]]] = {}
        self._waiting: dict[Key, tuple[int, list[Array]]] = {}  # and until when
        self._numbers: dict[Key, int] = {}

    def note(self, key: Key, event: Array) -> Array:
        """A CALL of a file without a number: with that of a small file, or nothing for now."""
        number = self._numbers.get(key)
        if number is not None:
            event["file"] = number
            return event
        _, events = self._waiting.setdefault(key, (time.monotonic_ns() + WAIT_NS, []))
        events.append(event)
        return empty()

    def named(self, key: Key, number: int) -> list[Array]:
        """A file has a number now: its opens."""
        if len(self._numbers) < WAITING_MAX:
            self._numbers[key] = number
        _, events = self._waiting.pop(key, (0, []))
        for event in events:
            event["file"] = number
        return events

    def unnamed(self, at_the_end: bool = False) -> list[Array]:
        """Those that nobody has read in time (directories, what is not there in the page cache)."""
        found: list[Array] = []
        now = time.monotonic_ns()
        while self._waiting:
            key = next(iter(self._waiting))
            until, events = self._waiting[key]
            if not at_the_end and until > now and len(self._waiting) <= WAITING_MAX:
                break
            del self._waiting[key]
            found += events
        return found
