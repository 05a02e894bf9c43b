# SPDX-License-Identifier: Apache-2.0
"""What a program reads when it starts: which files, and which parts of them, over several runs.

The format (docs/learn.md) is written here. csrc/service/profile.c reads it, for the replay, and by
native/profiles.py for merging and showing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.native.net import checksum
from uffdprefetch.native.profiles import (
    PROFILE_ALL_PATHS_MAX,
    PROFILE_ALL_RANGES_MAX,
    PROFILE_BYTES_MAX,
    PROFILE_ENTRIES_MAX,
    PROFILE_RANGES_MAX,
    EntryKind,
    ProfileFlaw,
    profile_entries,
    profile_runs,
)
from uffdprefetch.predict.storage import BLOCK_BYTES

MAGIC, VERSION = b"UPLEARN1", 1
#: Of an entry: the last runs of which is kept whether they have seen it.
RUNS_KEPT = 8
#: What so many runs in a row have not seen is left out of what comes next.
UNSEEN_RUNS = 3
_KEPT = (1 << RUNS_KEPT) - 1
_PATH_BYTES_MAX = os.pathconf("/", "PC_PATH_MAX") - 1
_HEADER = struct.Struct("<8sIIQQII20x")
_FIXED = struct.Struct("<Iq")


@dataclass(frozen=True)
class StartEntry:
    """One path. Of a FILE: what it was (``f_type`` of statfs(2), size, mtime), by which it is
    known again, and which ``blocks`` of 64 KiB are wanted, as (first, count) in rising order; none:
    all of it. ``seen``: bit n: by the n-th last run."""

    kind: EntryKind
    path: str
    f_type: int = 0
    size_bytes: int = 0
    mtime_ns: int = 0
    blocks: tuple[tuple[int, int], ...] = ()
    seen: int = 1

    @property
    def wanted_bytes(self) -> int:
        """Of it, to be read."""
        if not self.blocks:
            return self.size_bytes
        whole = sum(count for _, count in self.blocks) * BLOCK_BYTES
        ends = (self.blocks[-1][0] + self.blocks[-1][1]) * BLOCK_BYTES
        return whole - max(0, ends - self.size_bytes)

    def is_same_file(self, other: StartEntry) -> bool:
        """Whether nobody has changed it meanwhile, as far as its status tells."""
        return (self.f_type, self.size_bytes, self.mtime_ns) == (
            other.f_type, other.size_bytes, other.mtime_ns,
        )  # fmt: skip


@dataclass(frozen=True)
class StartProfile:
    """``entries`` in the order in which a start comes to them, each (kind, path) once; merged from
    so many ``runs``."""

    entries: tuple[StartEntry, ...] = ()
    runs: int = 0

    @property
    def wanted_bytes(self) -> int:
        """To be read."""
        return sum(entry.wanted_bytes for entry in self.entries if entry.kind is EntryKind.FILE)

    def merged(self, run: Sequence[StartEntry], *, new_runs: int = 1) -> StartProfile:
        """With what was read, in whose order it then is, by one more run, or (``new_runs`` 0) by
        another node of the last one. What was changed since is as it was found now; what the last
        three runs have not seen goes."""
        old = {(entry.kind, entry.path): entry for entry in self.entries}
        found: dict[tuple[EntryKind, str], StartEntry] = {}
        for entry in run:
            key = entry.kind, entry.path
            if key not in found:
                found[key] = _joined(old.pop(key, None), entry, new_runs)
        unseen = (1 << UNSEEN_RUNS) - 1
        for key, entry in old.items():
            seen = entry.seen << new_runs & _KEPT
            if seen & unseen:
                found[key] = replace(entry, seen=seen)
        return StartProfile(tuple(found.values()), self.runs + new_runs)


def _joined(before: StartEntry | None, now: StartEntry, new_runs: int) -> StartEntry:
    if before is None or not before.is_same_file(now):
        return replace(now, seen=1)
    seen = (before.seen << new_runs | 1) & _KEPT
    # all of it is no blocks
    blocks = united([*before.blocks, *now.blocks]) if before.blocks and now.blocks else ()
    return replace(now, seen=seen, blocks=blocks)


def united(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(first, count), in rising order, where runs that touch or overlap are one."""
    found: list[list[int]] = []
    for first, count in sorted(runs):
        if found and first <= sum(found[-1]):
            found[-1][1] = max(found[-1][1], first + count - found[-1][0])
        else:
            found.append([first, count])
    return tuple((first, count) for first, count in found)


# ---- the format ---------------------------------------------------------------------------------


def encode(profile: StartProfile) -> bytes:
    """Its file. What cannot be written is left out: entries beyond the most that there may be, from
    the end, and paths that are not absolute, too long, or have a NUL in them."""
    parts: list[bytes] = []
    room, before, wanted = PROFILE_BYTES_MAX - _HEADER.size - 4, b"", 0
    paths_room, ranges_room = PROFILE_ALL_PATHS_MAX, PROFILE_ALL_RANGES_MAX
    for entry in profile.entries:
        path = os.fsencode(entry.path)
        if not path.startswith(b"/") or len(path) > _PATH_BYTES_MAX or b"\0" in path:
            continue
        if entry.kind is EntryKind.FILE and entry.size_bytes <= 0:
            continue
        data = _entry(entry, path, before)
        paths_room -= len(path)
        ranges_room -= len(_written_blocks(entry))
        if (
            len(data) > room
            or len(parts) == PROFILE_ENTRIES_MAX
            or min(paths_room, ranges_room) < 0
        ):
            break
        parts.append(data)
        room, before = room - len(data), path
        wanted += entry.wanted_bytes if entry.kind is EntryKind.FILE else 0
    body = b"".join(parts)
    header = _HEADER.pack(
        MAGIC, VERSION, len(parts), len(body), wanted, min(profile.runs, 0xFFFFFFFF), checksum(body)
    )
    return header + struct.pack("<I", checksum(header)) + body


def decode(data: bytes, name: str) -> StartProfile:
    """A profile, from its file, which is called ``name`` where that is none: UffdPrefetchError."""
    runs = profile_runs(data)
    if isinstance(runs, ProfileFlaw):
        raise UffdPrefetchError(f"{name}: {runs.value}")
    found: dict[tuple[EntryKind, str], StartEntry] = {}
    try:
        for raw in profile_entries(data):
            blocks = tuple(
                (offset // BLOCK_BYTES, -(-length // BLOCK_BYTES)) for offset, length in raw.ranges
            )
            entry = StartEntry(
                raw.kind, raw.path, raw.f_type, raw.size_bytes, raw.mtime_ns, blocks, raw.seen
            )
            found.setdefault((raw.kind, raw.path), entry)
    except ValueError as error:
        raise UffdPrefetchError(f"{name}: {error}") from None
    return StartProfile(tuple(found.values()), runs)


def _entry(entry: StartEntry, path: bytes, before: bytes) -> bytes:
    shared = _shared(path, before)
    found = bytearray((entry.kind.value, entry.seen & 0xFF))
    found += _number(shared) + _number(len(path) - shared) + path[shared:]
    if entry.kind is EntryKind.FILE:
        found += _FIXED.pack(entry.f_type, entry.mtime_ns) + _number(entry.size_bytes)
        blocks = _written_blocks(entry)
        found += _number(len(blocks))
        at = 0
        for first, count in blocks:
            found += _number(first - at) + _number(count)
            at = first + count
    return bytes(found)


def _written_blocks(entry: StartEntry) -> tuple[tuple[int, int], ...]:
    """None where there are too many: then all of it is wanted."""
    is_kept = entry.kind is EntryKind.FILE and len(entry.blocks) <= PROFILE_RANGES_MAX
    return entry.blocks if is_kept else ()


def _shared(path: bytes, before: bytes) -> int:
    """How many bytes both begin with."""
    at = 0
    for one, other in zip(path, before, strict=False):
        if one != other:
            break
        at += 1
    return at


def _number(value: int) -> bytes:
    """LEB128."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
