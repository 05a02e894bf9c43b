# SPDX-License-Identifier: Apache-2.0
"""Files that processes of the job read by calls (read(2), pread(2) and the like): opened by the
service, too, and followed as mappings are, by sightings in the place of page tables."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable

from uffdprefetch.base.clock import MS
from uffdprefetch.base.record import dataclass
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_NS
from uffdprefetch.protocol import wire
from uffdprefetch.sense.read_calls import Key, ReadSeen
from uffdprefetch.service.job_tree import Exits
from uffdprefetch.service.kept_reads import KeptReads
from uffdprefetch.service.mappings import ManagedMappings
from uffdprefetch.service.read_touches import ReadTouches
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.opening import Opened, Opener
from uffdprefetch.state.reader import FIRST_OBSERVED, Region

#: First number of regions that are no mappings; those that were found in /proc are below.
FIRST_READ = FIRST_OBSERVED << 1
#: How often it is looked whether a file that nobody was seen to read is open still.
LOOK_NS = 250 * MS
Name = tuple[int, Key]
"""Of a file that a process has open: its pid, (device, inode)."""


@dataclass
class _Followed:
    """A file that a process reads by calls. ``link``: of its descriptor, as /proc shows it."""

    client: Client
    region: Region
    fd: int
    link: str
    seen_ns: int


class OpenedFiles:
    """Of all processes of the job on this node. The service's thread calls everything here."""

    def __init__(
        self, client_of: Callable[[int], Client | None], mappings: ManagedMappings,
        table: FileTable, opener: Opener, touches: ReadTouches, kept: KeptReads, exits: Exits,
    ) -> None:  # fmt: skip
        """``client_of``: the process of a pid; None: it has ended; ``exits``: which are told to
        watch whoever has a file followed."""
        self._client_of, self._mappings, self._table = client_of, mappings, table
        self._opener, self._touches, self._kept, self._exits = opener, touches, kept, exits
        self._followed: dict[Name, _Followed] = {}
        self._waiting: dict[Name, ReadSeen] = {}  # while their files are being opened
        self._left_alone: dict[Name, None] = {}
        self._regions = FIRST_READ
        self._look_ns = 0

    # -------------------------------------------------------------- what was seen

    def seen(self, reads: Iterable[ReadSeen]) -> None:
        """Of files that are not small: what was read of them, or is being read."""
        for one in reads:
            name = one.pid, one.key
            if name in self._left_alone:
                continue
            followed = self._followed.get(name)
            if followed is not None and followed.client.regions.get(followed.region.id) is None:
                self._leave(name, followed)  # its process, or its file, was given up
                followed = None
            if followed is None:
                self._open(name, one)
            else:
                self._note(followed, one)

    def _note(self, followed: _Followed, one: ReadSeen) -> None:
        followed.seen_ns, followed.fd, followed.link = one.at_ns, one.fd, one.path
        if self._kept.keeps(followed.region, one):
            self._touches.note(followed.region, one)
        else:
            self._leave((one.pid, one.key), followed, gains=False)

    # -------------------------------------------------------------- they come and go

    def _open(self, name: Name, one: ReadSeen) -> None:
        """Have the file opened that a process has open, by no name: that may mean another one."""
        if self._kept.gains_nothing(one.key) or not self._table.wants(one.path):
            self._leave_alone(name)
        elif name in self._waiting:
            self._waiting[name] = one
        elif len(self._waiting) < ENTRIES_MAX:
            self._waiting[name] = one  # first: where too many open, that is told at once
            self._opener.open(
                lambda: regular(one.pid, one.fd), lambda opened: self._opened(name, opened)
            )

    def _opened(self, name: Name, opened: Opened | OSError) -> None:
        one = self._waiting.pop(name, None)
        if isinstance(opened, OSError):
            if opened.errno in (errno.EACCES, errno.EPERM):
                self._leave_alone(name)
            return  # closed by now, or too many open at once: it may be seen again
        if one is None or (opened.status.st_dev, opened.status.st_ino) != one.key:
            opened.close()
            return
        file, client = self._admit(opened, one.pid), self._client_of(one.pid)
        if client is None:
            self._table.ended(one.pid)
            return
        if file is None:
            self._leave_alone(name)
            return
        self._exits.watch(one.pid)
        self._regions += 1
        device, inode, size, mtime_ns = file.key
        attach = wire.Attach(
            region=self._regions, flags=0, address=0, length_bytes=size, offset_bytes=0,
            device=device, inode=inode, size_bytes=size, mtime_ns=mtime_ns, map_flags=1, advice=0,
        )  # fmt: skip
        region = self._mappings.adopt(client, attach, file, wire.ServingMode.READS)
        self._touches.begin(client, region)
        self._followed[name] = followed = _Followed(client, region, one.fd, one.path, one.at_ns)
        self._note(followed, one)

    def _admit(self, opened: Opened, pid: int) -> FileState | None:
        try:
            return self._table.ahead(opened, pid)
        except (OSError, MemoryError, OverflowError):
            return None

    def _leave_alone(self, name: Name) -> None:
        self._left_alone[name] = None
        if len(self._left_alone) > ENTRIES_MAX:
            del self._left_alone[next(iter(self._left_alone))]

    def _leave(self, name: Name, followed: _Followed, *, gains: bool = True) -> None:
        """Nothing is read for it any more; ``gains``: not as it gains nothing by that."""
        self._touches.end(followed.region, gains=gains)
        self._kept.forget(followed.region)
        self._mappings.detached(followed.client, followed.region.id)
        del self._followed[name]

    def ended(self, pids: Iterable[int]) -> None:
        """These processes are gone: their files may be closed with the next look at the table."""
        gone = set(pids)
        for name, followed in list(self._followed.items()):
            if name[0] in gone:
                self._leave(name, followed)
        for name in [name for name in self._left_alone if name[0] in gone]:
            del self._left_alone[name]
        for pid in gone:
            self._exits.forget(pid)
            self._table.ended(pid)

    def step(self, now_ns: int) -> None:
        """Leave those that are closed."""
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + LOOK_NS
        for name, followed in list(self._followed.items()):
            quiet = now_ns - followed.seen_ns > LATELY_NS
            if quiet and not is_open(name[0], followed.fd, followed.link):
                self._leave(name, followed)


def is_open(pid: int, fd: int, link: str) -> bool:
    """Whether a process's descriptor is still the one that shows as ``link``."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}") == link
    except OSError:
        return False


def regular(pid: int, fd: int) -> int:
    """A descriptor (O_PATH) of the regular file that a process has open. Raises OSError: it is
    none, or closed by now. A pipe that is opened would take what its writer writes."""
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(found).st_mode):
            return found
        raise OSError(f"descriptor {fd} of process {pid} is no regular file")
    except OSError:
        uffd.close_file(found)
        raise
