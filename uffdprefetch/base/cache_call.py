# SPDX-License-Identifier: Apache-2.0
"""Chooses the call that fills a file's page cache: by file system type, else by a probe.

Types of which nothing is known are probed on the file itself (csrc/service/warm.c, probe), and
every choice is verified in use (Doubt): bytes requested against bytes that arrived.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from uffdprefetch.base.file_systems import PREAD, PROBE, READAHEAD, known
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.base.units import KIB, MIB

#: Largest request: the scheduler's extents are no longer.
CHUNK_MAX_BYTES = 4 * MIB
#: VM_READAHEAD_PAGES (include/linux/pagemap.h): what a readahead(2) always brings where it works.
CHUNK_LEAST_BYTES = 128 * KIB
CALLS = {READAHEAD: "readahead(2)", PREAD: "pread, FADV_RANDOM", PROBE: "not known yet"}


class Choice(NamedTuple):
    """A call, its request size, and the reason."""

    call: int
    chunk_bytes: int
    reason: str


def _with(call: int, chunk_bytes: int, why: str) -> Choice:
    return Choice(call, chunk_bytes, f"{CALLS[call]} of {chunk_bytes >> 10} KiB, {why}")


def choose(f_type: int, ahead_bytes: int | None, residency_known: bool) -> Choice:
    """The call for a file: by its type; else by a probe; where residency cannot be queried, so that
    a probe shows nothing, by read_ahead_kb. ``ahead_bytes``: its value, None where unknown;
    ``residency_known``: whether the kernel answers us. FADV_SEQUENTIAL, which goes with
    readahead(2), doubles what one call brings."""
    kind = known(f_type)
    unknown = "" if residency_known else "; its residency is not told to us"
    of_it = f"known of {kind.name}{unknown}"
    chunk = min(CHUNK_MAX_BYTES, max(CHUNK_LEAST_BYTES, 2 * (ahead_bytes or 0)))
    if kind.call == PREAD:
        return _with(PREAD, kind.unit_bytes, of_it)
    if kind.call == READAHEAD and ahead_bytes == 0:
        return _with(PREAD, CHUNK_MAX_BYTES, f"{kind.name}, but its read_ahead_kb is 0")
    if kind.call == READAHEAD and ahead_bytes:
        return _with(READAHEAD, chunk, of_it)
    if residency_known:
        return Choice(PROBE, CHUNK_LEAST_BYTES, "not probed yet")
    if ahead_bytes:
        return _with(READAHEAD, chunk, "by read_ahead_kb: its residency is not told to us")
    return _with(PREAD, CHUNK_MAX_BYTES, "its residency is not told to us")


def probed(call: int, chunk_bytes: int, ahead_bytes: int | None) -> Choice:
    """The choice after a probe, which may underestimate: part of its range may have been
    resident."""
    if call == READAHEAD:
        least = max(CHUNK_LEAST_BYTES, 2 * (ahead_bytes or 0))
        chunk_bytes = min(CHUNK_MAX_BYTES, max(chunk_bytes, least))
    return _with(call, chunk_bytes, "by probing")


# ---- verified in use ----------------------------------------------------------------------------

#: A choice is judged over this many requested bytes ...
DOUBT_BYTES = 32 * MIB
#: ... and wrong when less than this share arrived. Losing some is normal: FUSE drops readahead
#: under load (fs/fuse/file.c), and reclaim takes pages when memory is short.
DOUBT_SHARE = 0.25


@dataclass
class Doubt:
    """Bytes requested and arrived over the last DOUBT_BYTES of a file."""

    _last: deque[tuple[int, int]] = field(default_factory=deque)
    _asked: int = 0
    _arrived: int = 0

    def note(self, asked_bytes: int, arrived_bytes: int) -> tuple[int, int] | None:
        """Note an extent; (asked, arrived) when the call has failed by DOUBT_SHARE, after which it
        starts over, else None."""
        if not asked_bytes:
            return None
        self._last.append((asked_bytes, min(arrived_bytes, asked_bytes)))
        self._asked += asked_bytes
        self._arrived += self._last[-1][1]
        if self._asked < DOUBT_BYTES:
            return None
        if self._arrived < DOUBT_SHARE * self._asked:
            found = self._asked, self._arrived
            self.forget()
            return found
        while self._last and self._asked - self._last[0][0] >= DOUBT_BYTES:
            asked, arrived = self._last.popleft()
            self._asked -= asked
            self._arrived -= arrived
        return None

    def forget(self) -> None:
        """Start over: another call is used."""
        self._last.clear()
        self._asked = self._arrived = 0


def corrected(call: int, asked_bytes: int, arrived_bytes: int) -> Choice | None:
    """The choice after a call that failed: pread for readahead(2). None after pread: the cache does
    not keep what is read."""
    if call != READAHEAD:
        return None
    detail = f"readahead(2) brought {arrived_bytes >> 20} of {asked_bytes >> 20} MiB"
    return _with(PREAD, CHUNK_MAX_BYTES, f"since {detail}")
