# SPDX-License-Identifier: Apache-2.0
"""Whether all of a file is in the page cache: then nothing need be known of who reads it."""

from __future__ import annotations

from collections.abc import Callable

from uffdprefetch.base.clock import Clock

#: The kernel is asked this often, and asking takes at most one part in so many of a core: of a file
#: that is there it looks at every page.
LOOK_NS = 250_000_000
LOOK_COST = 100
#: So much is asked about at a time, 0.1 to 1 ms, and nothing more in a turn of the service that has
#: taken so long: of a TiB that is there the answer comes after some minutes.
PIECE_BYTES = 256 << 20
TURN_NS = 2_000_000


class AllCached:
    """The answer for one file, which the last finished look gave."""

    def __init__(self, resident_bytes: Callable[[int, int], int | None], size_bytes: int) -> None:
        """``resident_bytes`` of (start, length): None where the kernel does not say."""
        self._resident_bytes, self._size_bytes = resident_bytes, size_bytes
        self._answer = False
        self._due_ns = 0
        self._at = 0  # where the present look goes on

    def ask(self, clock: Clock) -> bool:
        """Whether all of it was there a moment ago. False where the kernel does not say."""
        if clock.now_ns() >= self._due_ns:
            self._look(clock)
        return self._answer

    def _look(self, clock: Clock) -> None:
        began = clock.cpu_ns()
        there = self._size_bytes > 0
        while there and self._at < self._size_bytes:
            length = min(PIECE_BYTES, self._size_bytes - self._at)
            there = self._resident_bytes(self._at, length) == length
            self._at += length
            if clock.cpu_ns() - began > TURN_NS:
                break
        rest_ns = LOOK_COST * (clock.cpu_ns() - began)
        if not there or self._at >= self._size_bytes:
            self._answer, self._at = there, 0
            rest_ns = max(rest_ns, LOOK_NS)
        self._due_ns = clock.now_ns() + rest_ns
