# SPDX-License-Identifier: Apache-2.0
"""What a job has read since it was started, as entries of its start profile, in the order of first
sight."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace

from uffdprefetch.base import file_systems
from uffdprefetch.base.units import MIB
from uffdprefetch.native.paths import KnownStatus, known_status
from uffdprefetch.native.profiles import PROFILE_ENTRIES_MAX, EntryKind
from uffdprefetch.orders.start_profile import StartEntry, united
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.service.program_pages import Runs

#: What is opened and not mapped is wanted as a whole up to this size: of a larger one it is not
#: known what was read, and only its name is asked for.
WHOLE_MOST_BYTES = 4 * MIB
#: What lies below is no storage.
_NO_STORAGE = ("/proc/", "/sys/", "/dev/")
Number = tuple[int, int]
"""Of a file: device, inode."""


@dataclass(frozen=True)
class _Known:
    """A name that was seen. Of a file, ``number``: what it was; ``is_mapped``: by whom it is, its
    pages tell what is wanted."""

    entry: StartEntry
    number: Number | None = None
    is_mapped: bool = False


class StartedFiles:
    """Of one job, on this node. Each name is asked for once, and waits for its file system: for a
    thread of its own."""

    def __init__(self, began_ns: int) -> None:
        """``began_ns``: since the epoch; a file that was changed later is none of the start's."""
        self._began_ns = began_ns
        self._known: dict[str, _Known | None] = {}  # None: of no use
        self._names: dict[Number, str] = {}  # the first one of each file
        self._directories: dict[str, bool] = {}  # whether on storage
        self._types: dict[int, int | None] = {}  # f_type of storage, by device
        #: Bytes that are wanted so far.
        self.wanted_bytes = 0

    @property
    def paths(self) -> int:
        """How many are known, those that are of no use with them."""
        return len(self._known)

    @property
    def is_full(self) -> bool:
        """Whether no profile holds more."""
        return len(self._known) >= PROFILE_ENTRIES_MAX

    # -------------------------------------------------------------- what was seen

    def opened(self, path: str, *, is_missing: bool = False) -> None:
        """A process has opened this, or (``is_missing``) has found that it is not there."""
        if path in self._known or self.is_full:
            return
        if is_missing:
            entry = StartEntry(EntryKind.STAT, path)
            self._known[path] = _Known(entry) if self._would_be_stored(path) else None
            return
        status = self._status(path)
        if status is None:
            self._known[path] = None
        elif stat.S_ISDIR(status.mode):
            self._directory(path)
        elif self._is_wanted(status):
            self._around(path)
            self._file(path, status)
        else:
            self._known[path] = None

    def mapped(self, path: str, runs: Runs) -> None:
        """A process has it mapped, and has these pages of it in its page table."""
        known = self._known.get(path)
        if known is None:
            if path in self._known or self.is_full:
                return
            status = self._status(path)
            if status is None or not self._is_wanted(status):
                self._known[path] = None
                return
            self._file(path, status, is_mapped=True)
            known = self._known[path]
        first = known and self._known.get(self._names.get(known.number or (0, 0), ""))
        if first:
            self._touched(first, runs)

    def _touched(self, known: _Known, runs: Runs) -> None:
        """Of a file, by its first name: what is wanted of it are these blocks, too."""
        if not runs and not known.is_mapped and known.entry.kind is EntryKind.FILE:
            return  # opened as well, and by its pages nothing is known
        entry = replace(known.entry, kind=EntryKind.FILE)
        end = -(-entry.size_bytes // BLOCK_BYTES)
        blocks = [
            (first, min(end, -(-(offset + length) // BLOCK_BYTES)) - first)
            for offset, length in runs
            if (first := offset // BLOCK_BYTES) < end
        ]
        before = entry.blocks if known.is_mapped else ()
        entry = replace(entry, blocks=united([*before, *blocks]))
        self.wanted_bytes -= _wanted_bytes(known)
        self._known[entry.path] = known = _Known(entry, known.number, is_mapped=True)
        self.wanted_bytes += _wanted_bytes(known)

    def _file(self, path: str, status: KnownStatus, *, is_mapped: bool = False) -> None:
        number, f_type = (status.device, status.inode), self._types[status.device]
        is_first = number not in self._names
        whole = is_first and 0 < status.size_bytes <= WHOLE_MOST_BYTES
        entry = StartEntry(
            EntryKind.FILE if whole else EntryKind.STAT, path, f_type or 0, status.size_bytes,
            status.mtime_ns,
        )  # fmt: skip
        self._names.setdefault(number, path)
        self._known[path] = known = _Known(entry, number, is_mapped and is_first)
        self.wanted_bytes += _wanted_bytes(known)

    def _directory(self, path: str) -> None:
        self._known.setdefault(path, _Known(StartEntry(EntryKind.DIRECTORY, path)))

    def _around(self, path: str) -> None:
        """What is asked for before it is opened. Its directory is listed; of what Python has made
        of a source (PEP 3147) the source's is, and the source itself is looked at."""
        directory, name = os.path.split(path)
        if not name.endswith(".pyc") or os.path.basename(directory) != "__pycache__":
            self._directory(directory)
            return
        directory = os.path.dirname(directory)
        self._directory(directory)
        source = os.path.join(directory, name.partition(".")[0] + ".py")
        self._known.setdefault(source, _Known(StartEntry(EntryKind.STAT, source)))

    # -------------------------------------------------------------- what it is

    def _is_wanted(self, status: KnownStatus) -> bool:
        return stat.S_ISREG(status.mode) and status.mtime_ns < self._began_ns

    def _status(self, path: str) -> KnownStatus | None:
        """None: it is not there, or not on storage."""
        if path.startswith(_NO_STORAGE):
            return None
        try:
            status = known_status(path)
            if status.device not in self._types:  # a request for each file system, not each file
                f_type = file_systems.type_of(path)
                in_memory = file_systems.known(f_type).in_memory
                self._types[status.device] = None if in_memory else f_type
        except (OSError, ValueError):
            return None
        return status if self._types[status.device] is not None else None

    def _would_be_stored(self, path: str) -> bool:
        """Of a name that is missing: by the directory that would have it, or one above. It is not
        asked for itself: what is not there costs a request each time."""
        missing = []
        while path != "/" and not path.startswith(_NO_STORAGE):
            path = os.path.dirname(path)
            if path not in self._directories and not os.path.lexists(path):
                missing.append(path)
                continue
            if path not in self._directories:
                self._directories[path] = self._status(path) is not None
            self._directories.update(dict.fromkeys(missing, self._directories[path]))
            return self._directories[path]
        return False

    # -------------------------------------------------------------- what comes of it

    def entries(self, is_left_out: Callable[[Number], bool]) -> list[StartEntry]:
        """In the order of first sight, without files that are left out. What is mapped and was not
        touched is asked for by its name alone."""
        found = []
        for known in self._known.values():
            if known is None or (known.number is not None and is_left_out(known.number)):
                continue
            entry = known.entry
            untouched = known.is_mapped and not entry.blocks
            if untouched or entry.kind is not EntryKind.FILE:
                kind = EntryKind.STAT if untouched else entry.kind
                entry = StartEntry(kind, entry.path)
            found.append(entry)
        return found


def _wanted_bytes(known: _Known) -> int:
    entry = known.entry
    if entry.kind is not EntryKind.FILE or (known.is_mapped and not entry.blocks):
        return 0
    return entry.wanted_bytes
