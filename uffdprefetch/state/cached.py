# SPDX-License-Identifier: Apache-2.0
"""Whether all of a file is in the page cache: then its readers need not be followed."""

from __future__ import annotations

from collections.abc import Callable

from uffdprefetch.base.clock import Clock

#: Least interval of queries, and their cost: at most one part in LOOK_COST of a core, as the kernel
#: visits every page of a cached file.
LOOK_NS = 250_000_000
LOOK_COST = 100
#: Query size: 256 MiB a cachestat(2) call, which takes 0.6 ms (docs/facts.md).
PIECE_BYTES = 256 << 20
#: CPU time of a query of the whole file above which it counts as not cached: a turn would be too
#: long.
TURN_NS = 5_000_000
_NEVER_NS = 1 << 62


class AllCached:
    """The answer for one file, by the last finished query."""

    def __init__(self, resident_bytes: Callable[[int, int], int | None], size_bytes: int) -> None:
        """``resident_bytes`` of (start, length): None where the kernel does not say."""
        self._resident_bytes, self._size_bytes = resident_bytes, size_bytes
        self._answer = False
        self._due_ns = 0

    def ask(self, clock: Clock) -> bool:
        """Whether all of it was there half a second ago or later. False where the kernel does not
        say, or the file is too large to be asked about."""
        if clock.now_ns() >= self._due_ns:
            self._look(clock)
        return self._answer

    def _look(self, clock: Clock) -> None:
        began, at, took_ns = clock.cpu_ns(), 0, 0
        while at < self._size_bytes and took_ns <= TURN_NS:
            length = min(PIECE_BYTES, self._size_bytes - at)
            if self._resident_bytes(at, length) != length:
                break
            at += length
            took_ns = clock.cpu_ns() - began
        self._answer = 0 < self._size_bytes == at
        if took_ns > TURN_NS and not self._answer:
            self._due_ns = _NEVER_NS
        else:
            self._due_ns = clock.now_ns() + max(LOOK_NS, LOOK_COST * took_ns)
