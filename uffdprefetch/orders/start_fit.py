# SPDX-License-Identifier: Apache-2.0
"""Whether a start profile still is of what its program reads when it starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders.start_profile import StartEntry, StartProfile

#: Of what is read ahead less than this part is used, twice in a row, or more than this part has
#: changed: then what is known is worth less than what it costs.
USED_LEAST = CHANGED_MOST = 0.5


def learned(
    profile: StartProfile | None, run: Sequence[StartEntry], *, is_joined: bool = False
) -> StartProfile:
    """What is kept of a run. ``profile``: what was known before it; None: nothing. Where that does
    not fit any more only this run is kept. ``is_joined``: another node has put this very run into
    it, and has judged it."""
    if profile is not None and is_joined:
        return profile.merged(run, new_runs=0)
    known = profile if profile is not None and fits(profile, run) else StartProfile()
    return known.merged(run)


def fits(profile: StartProfile, run: Iterable[StartEntry]) -> bool:
    """Whether what was known was of use in this run, or in the one before."""
    seen = {entry.path: entry for entry in run}
    files = [entry for entry in profile.entries if entry.kind is EntryKind.FILE]
    changed = [
        entry for entry in files
        if entry.path in seen
        and seen[entry.path].kind is EntryKind.FILE
        and not entry.is_same_file(seen[entry.path])
    ]  # fmt: skip
    if len(changed) > CHANGED_MOST * len(files):
        return False
    now = [(entry.path in seen, entry) for entry in files]
    # those that were known then: bits above the lowest are of the runs before it
    before = [(bool(entry.seen & 1), entry) for entry in files if entry.seen >> 1]
    return _used(now) >= USED_LEAST or _used(before) >= USED_LEAST


def used_files(profile: StartProfile, run: Iterable[StartEntry]) -> int:
    """How many files of what was known a run has opened."""
    seen = {entry.path for entry in run}
    return sum(entry.kind is EntryKind.FILE and entry.path in seen for entry in profile.entries)


def _used(files: Iterable[tuple[bool, StartEntry]]) -> float:
    """Which part of their bytes; 1 where there are none."""
    used = wanted = 0
    for is_used, entry in files:
        wanted += entry.wanted_bytes
        used += entry.wanted_bytes if is_used else 0
    return used / wanted if wanted else 1.0
