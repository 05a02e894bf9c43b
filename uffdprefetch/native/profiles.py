# SPDX-License-Identifier: Apache-2.0
"""cffi binding of csrc/service/profile.c, which reads start profiles (orders/start_profile.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

from uffdprefetch.native import uffd

_ffi: Any = uffd._ffi
_lib: Any = uffd._lib

PROFILE_BYTES_MAX: int = _lib.UP_PROFILE_BYTES_MAX
PROFILE_ENTRIES_MAX: int = _lib.UP_PROFILE_ENTRIES_MAX
PROFILE_RANGES_MAX: int = _lib.UP_PROFILE_RANGES_MAX
PROFILE_ALL_RANGES_MAX: int = _lib.UP_PROFILE_ALL_RANGES_MAX
PROFILE_ALL_PATHS_MAX: int = _lib.UP_PROFILE_ALL_PATHS_MAX


class ProfileFlaw(Enum):
    """Why a file is no profile. The value: for people."""

    NONE_SUCH = "it is no start profile"
    OTHER_VERSION = "it is of another version"
    DAMAGED = "it is damaged"
    TOO_LARGE = "it is larger than a start profile may be"


_FLAWS = {int(getattr(_lib, f"UP_PROFILE_{flaw.name}")): flaw for flaw in ProfileFlaw}


class EntryKind(Enum):
    """What is done with a path; the value is that of the format."""

    FILE = _lib.UP_PROFILE_FILE
    DIRECTORY = _lib.UP_PROFILE_DIRECTORY
    STAT = _lib.UP_PROFILE_STAT


class RawEntry(NamedTuple):
    """As csrc/service/helper.h, struct up_profile_entry, has it; ``ranges``: (offset, length)."""

    kind: EntryKind
    path: str
    seen: int
    f_type: int
    size_bytes: int
    mtime_ns: int
    ranges: tuple[tuple[int, int], ...]


def profile_runs(data: bytes) -> int | ProfileFlaw:
    """How many runs a profile comes of, or what is wrong with its header or its checksums."""
    profile, header = _opened(data)
    if profile is None:
        return _FLAWS[header.flaw]
    _lib.up_profile_close(profile)
    return int(header.runs)


def profile_entries(data: bytes) -> Iterator[RawEntry]:
    """The entries of a profile that is sound. Raises ValueError where one is malformed."""
    profile, header = _opened(data)
    if profile is None:
        raise ValueError(_FLAWS[header.flaw].value)
    entry = _ffi.new("struct up_profile_entry *")
    try:
        while (more := _lib.up_profile_next(profile, entry)) > 0:
            flat = _ffi.unpack(entry.range, 2 * entry.ranges) if entry.ranges else []
            yield RawEntry(
                EntryKind(entry.kind), os.fsdecode(_ffi.string(entry.path)), entry.seen,
                entry.f_type, entry.size_bytes, entry.mtime_ns,
                tuple(zip(flat[::2], flat[1::2], strict=True)),
            )  # fmt: skip
        if more < 0:
            raise ValueError(ProfileFlaw.DAMAGED.value)
    finally:
        _lib.up_profile_close(profile)


def _opened(data: bytes) -> tuple[Any, Any]:
    """The profile, which lives no longer than the bytes, and its header; None: see its flaw."""
    out, header = _ffi.new("struct up_profile **"), _ffi.new("struct up_profile_header *")
    ret = _lib.up_profile_open(out, _ffi.from_buffer(data), len(data), header)
    if ret < 0 and not header.flaw:
        raise MemoryError
    return (out[0] if ret == 0 else None), header
