# SPDX-License-Identifier: Apache-2.0
"""Whether a start profile still is of what its program reads when it starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders.start_profile import StartEntry, StartProfile

#: Of what is read ahead less than this part is used, twice in a row, or more than this part has
#: changed: then what is known is worth less than what it costs.
USED_LEAST = CHANGED_MOST = 0.5


class Replayed(NamedTuple):
    """What became of a profile's entries: how many were asked for, and how many were left out
    because they are not what they were."""

    entries: int
    changed: int


def learned(
    profile: StartProfile | None, run: Sequence[StartEntry], replayed: Replayed | None
) -> StartProfile:
    """What is kept of a run. ``profile``: what was known before it, as it was replayed (None: it
    was not). Where that does not fit any more only this run is kept."""
    known = profile or StartProfile()
    if replayed is not None and not fits(known, run, replayed):
        known = StartProfile()
    return known.merged(run)


def fits(profile: StartProfile, run: Iterable[StartEntry], replayed: Replayed) -> bool:
    """Whether what was replayed in this run was of use, in this one or in the one before."""
    if replayed.changed > CHANGED_MOST * replayed.entries:
        return False
    seen = {entry.path for entry in run}
    files = [entry for entry in profile.entries if entry.kind is EntryKind.FILE]
    now = [(entry.path in seen, entry) for entry in files]
    # those that were known then: bits above the lowest are of the runs before it
    before = [(bool(entry.seen & 1), entry) for entry in files if entry.seen >> 1]
    return _used(now) >= USED_LEAST or _used(before) >= USED_LEAST


def _used(files: Iterable[tuple[bool, StartEntry]]) -> float:
    """Which part of their bytes; 1 where there are none."""
    used = wanted = 0
    for is_used, entry in files:
        wanted += entry.wanted_bytes
        used += entry.wanted_bytes if is_used else 0
    return used / wanted if wanted else 1.0
