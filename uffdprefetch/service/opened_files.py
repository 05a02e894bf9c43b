# SPDX-License-Identifier: Apache-2.0
"""Files that processes of the job read by calls (read(2), pread(2) and the like): opened by the
service, too, and followed as mappings are, by sightings in the place of page tables."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from uffdprefetch.base.clock import CLOCK, MS, Clock
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_NS
from uffdprefetch.predict.storage import BLOCK_BYTES, MISS_BYTES
from uffdprefetch.protocol import wire
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.sense.pagetable_scan import tell_seen
from uffdprefetch.sense.read_calls import ReadSeen
from uffdprefetch.service.job_tree import Exits
from uffdprefetch.service.mappings import ManagedMappings
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opened, Opener
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import FIRST_OBSERVED, Region
from uffdprefetch.warm.consumer import FileConsumer, PrefetchRange
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.windows import Windows

#: First number of regions that are no mappings; those that were found in /proc are below.
FIRST_READ = FIRST_OBSERVED << 1
#: How often it is looked whether a file that nobody was seen to read is open still.
LOOK_NS = 250 * MS
#: A reader that waits so many times in a row where all was there gains nothing by it: memory is too
#: short to keep it, or nobody says what is kept.
VAIN = 8
#: So many looks in a row at which what had just been read was not kept: the job drops it
#: (POSIX_FADV_DONTNEED, RWF_DONTCACHE), or its file system keeps nothing (FUSE with direct_io).
DROPPED = 2
#: ... and of so many files of a file system it is the file system.
VAIN_FILES = 2

Number = tuple[int, int]


@dataclass
class _Followed:
    """A file that a process reads by calls. ``link``: of its descriptor, as /proc shows it;
    ``calls``: by thread, who has the rest of its call read, and where that ends; ``there``: by
    thread, [start, end) of what was read ahead of it and had come by a time; ``vain``: see VAIN;
    ``dropped``: see DROPPED."""

    client: Client
    region: Region
    fd: int
    link: str
    seen_ns: int
    calls: dict[int, tuple[FileConsumer, int]] = field(default_factory=dict)
    there: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    vain: int = 0
    dropped: int = 0
    gains: bool = True


class OpenedFiles:
    """Of all processes of the job on this node. The service's thread calls everything here."""

    def __init__(
        self, client_of: Callable[[int], Client | None], mappings: ManagedMappings,
        table: FileTable, opener: Opener, arbiter: Arbiter, scheduler: Scheduler,
        windows: Windows, ledger: Ledger, publisher: EventPublisher, exits: Exits,
        clock: Clock = CLOCK,
    ) -> None:  # fmt: skip
        """``client_of``: the process of a pid; None: it has ended; ``exits``: which are told to
        watch whoever has a file followed."""
        self._client_of, self._mappings, self._table = client_of, mappings, table
        self._opener, self._arbiter, self._scheduler = opener, arbiter, scheduler
        self._windows, self._ledger, self._publisher = windows, ledger, publisher
        self._exits, self._clock = exits, clock
        self._followed: dict[tuple[int, Number], _Followed] = {}
        self._waiting: dict[tuple[int, Number], ReadSeen] = {}  # while their files are being opened
        self._left_alone: dict[tuple[int, Number], None] = {}
        self._in_vain: dict[int, set[int]] = {}  # by device, inodes: see VAIN, VAIN_FILES
        self._regions = FIRST_READ
        self._look_ns = 0
        self.read_bytes = 0  # by calls that were followed

    # -------------------------------------------------------------- what was seen

    def seen(self, reads: Iterable[ReadSeen]) -> None:
        """Of files that are not small: what was read of them, or is being read."""
        for one in reads:
            name = one.pid, one.key
            if name in self._left_alone:
                continue
            followed = self._followed.get(name)
            if followed is not None and followed.client.regions.get(followed.region.id) is None:
                del self._followed[name]  # its process, or its file, was given up
                followed = None
            if followed is None:
                self._open(name, one)
            else:
                self._note(followed, one)

    def _note(self, followed: _Followed, one: ReadSeen) -> None:
        region = followed.region
        followed.seen_ns, followed.fd, followed.link = one.at_ns, one.fd, one.path
        size = region.file.size_bytes
        start, end = one.start, min(one.end, size)
        if not one.proven and one.waiting:  # where it is, and what that brings
            end = min(max(end, min(one.asked_end, start + MISS_BYTES)), size)
        if self._is_dropped(followed, one) or (one.waiting and self._is_vain(followed, one)):
            self._give_up(followed, one)
            return
        if start < end:
            self._touched(region, start, end, one.at_ns)
        self._ask_rest(followed, one)

    def _touched(self, region: Region, start: int, end: int, at_ns: int) -> None:
        """[start, end) was read: now, be it for the first time or not."""
        batch = Batch(region, at_ns)

        def tell(low: int, high: int) -> None:
            batch.found.append((low, high))
            if self._publisher.active:
                tell_seen(self._publisher, region, low, high, at_ns)

        region.scan.mapped.remove(start, end)
        clusters = pagetables.note_found(region, start, end, [(start, end - start)], tell)
        since_ns = region.scan.last_end_ns or region.scan.news_ns
        region.file.blocks.used.looked(max(0, at_ns - since_ns))
        region.scan.last_end_ns = region.scan.news_ns = at_ns
        batch.touches += [
            Observation(low, high, at_ns, new=True, told=False) for low, high in clusters
        ]
        self.read_bytes += end - start
        self._arbiter.observe(batch)

    def _ask_rest(self, followed: _Followed, one: ReadSeen) -> None:
        """A call under way asks for more than the kernel reads ahead: that is no guess."""
        region = followed.region
        consumer, _ = followed.calls.get(one.tid, (None, 0))
        file = region.file
        end = min(one.asked_end, file.size_bytes)
        ahead = file.call.ahead_bytes
        if not one.waiting or end - one.position <= (MISS_BYTES if ahead is None else ahead):
            if consumer is not None:
                self._scheduler.forget(consumer)
                del followed.calls[one.tid]
            return
        if consumer is None:
            consumer = FileConsumer(region.reader.rank, one.pid)
        followed.calls[one.tid] = consumer, end
        consumer.position_bytes = one.position
        each, _ = self._windows.share_bytes(file)
        end = min(end, one.position + each)
        for low, high in file.cache.in_flight.missing(one.position, end):
            self._arbiter.want(consumer, PrefetchRange(file, low, high))

    def _is_vain(self, followed: _Followed, one: ReadSeen) -> bool:
        """Whether it waits for what was there already, again and again."""
        file = followed.region.file
        end = min(max(one.asked_end, one.position + 1), file.size_bytes)
        low, high, since_ns = followed.there.pop(one.tid, (0, 0, 0))
        until = self._come(file, one.position)
        followed.there[one.tid] = one.position, until, self._clock.now_ns()
        if len(followed.there) > ENTRIES_MAX:
            del followed.there[next(iter(followed.there))]
        if one.asked_end <= one.position:
            return False  # of how much is not known: that may not have come
        if until < end:
            followed.vain = 0
        elif low <= one.position and end <= high and one.at_ns > since_ns:
            followed.vain += 1
        return followed.vain >= VAIN

    def _is_dropped(self, followed: _Followed, one: ReadSeen) -> bool:
        """Whether the end of what it has read since the last look, or the beginning of what was
        read ahead of it and has come, is not kept, again and again."""
        file, at = followed.region.file, one.position
        low, high = max(one.start, at - BLOCK_BYTES), min(at + BLOCK_BYTES, self._come(file, at))
        found = [file.resident_bytes(a, b - a) for a, b in ((low, at), (at, high)) if a < b]
        if found and None not in found:
            followed.dropped = 0 if all(found) else followed.dropped + 1
        return followed.dropped >= DROPPED

    def _give_up(self, followed: _Followed, one: ReadSeen) -> None:
        """It gains nothing by what is read ahead of it."""
        device, inode = one.key
        self._in_vain.setdefault(device, set()).add(inode)
        self._ledger.leave_alone(
            "left to the kernel: what is read of it is not kept (its job drops it, its file system"
            " keeps nothing, or memory is too short)", followed.region.file.path,
        )  # fmt: skip
        followed.gains = False
        self._leave((one.pid, one.key), followed)

    @staticmethod
    def _come(file: FileState, at: int) -> int:
        """Up to where what is read from ``at`` on was read ahead, and has come: lately, as what did
        in an earlier epoch may be gone again."""
        gaps = file.cache.recent.missing(at, file.size_bytes)
        return gaps[0][0] if gaps else file.size_bytes

    def _gains_nothing(self, key: Number) -> bool:
        """Whether what is read ahead of a file is not there when it is needed."""
        inodes = self._in_vain.get(key[0], ())
        return key[1] in inodes or len(inodes) >= VAIN_FILES

    # -------------------------------------------------------------- they come and go

    def _open(self, name: tuple[int, Number], one: ReadSeen) -> None:
        """Have the file opened that a process has open, by no name: that may mean another one."""
        if self._gains_nothing(one.key) or not self._table.wants(one.path):
            self._leave_alone(name)
            return
        if name not in self._waiting and len(self._waiting) < ENTRIES_MAX:
            self._opener.open(
                lambda: regular(one.pid, one.fd), lambda opened: self._opened(name, opened)
            )
        self._waiting[name] = one

    def _opened(self, name: tuple[int, Number], opened: Opened | OSError) -> None:
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
        self._ledger.serving.served(file, region.verdict)
        self._publisher.region(client, region)
        self._followed[name] = followed = _Followed(client, region, one.fd, one.path, one.at_ns)
        self._note(followed, one)

    def _admit(self, opened: Opened, pid: int) -> FileState | None:
        try:
            return self._table.ahead(opened, pid)
        except (OSError, MemoryError, OverflowError):
            return None

    def _leave_alone(self, name: tuple[int, Number]) -> None:
        self._left_alone[name] = None
        if len(self._left_alone) > ENTRIES_MAX:
            del self._left_alone[next(iter(self._left_alone))]

    def _leave(self, name: tuple[int, Number], followed: _Followed) -> None:
        """Nothing is read for it any more."""
        for consumer, end in followed.calls.values():
            self._scheduler.forget(consumer)
            if followed.gains:  # nobody saw the end of that call; but a call has one
                rest = consumer.position_bytes, end - consumer.position_bytes
                pagetables.note_used(followed.region, [rest])
                self.read_bytes += rest[1]
        self._mappings.detached(followed.client, followed.region.id)
        del self._followed[name]

    def ended(self, pids: Iterable[int]) -> None:
        """These processes are gone."""
        gone = set(pids)
        for name, followed in list(self._followed.items()):
            if name[0] in gone:
                self._leave(name, followed)
        for name in [name for name in self._left_alone if name[0] in gone]:
            del self._left_alone[name]
        for pid in gone:
            self._exits.forget(pid)
            self._table.ended(pid)
        self._table.look(self._clock.now_ns())

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
