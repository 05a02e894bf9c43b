# SPDX-License-Identifier: Apache-2.0
"""Who reads files by read(2), pread(2) and their kind: which, where, and how far they have come.

The looks are a C thread's (csrc/service/reads.c), the proof is predict/read_streams.py. Here the
files are told apart: regular ones, that nobody in the job has open for writing, and that are read
by the page cache. None of them is opened.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.record import dataclass
from uffdprefetch.native.reads import (
    LookCounts,
    ReadCall,
    Reads,
    ReadSensor,
    Sighting,
    descriptors,
    open_file,
)
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_NS
from uffdprefetch.predict.read_streams import ReadSighting, ReadStreams

Key = tuple[int, int]  # (device, inode)


class ReadSeen(NamedTuple):
    """A thread (tid 0: some thread of a process) has read [start, end) of a file since it was seen
    last, is at ``end``, and will read up to ``asked_end`` for sure; within the file, in bytes.
    ``size_bytes``: of the file, as far as the kernel knows it. ``proven``: as a part of a
    sequential stream; where that begins anew, ``start`` is another than the last ``end``.
    ``path``: as the job sees it, which may be another file here."""

    pid: int
    tid: int
    key: Key
    path: str
    fd: int
    size_bytes: int
    start: int
    end: int
    asked_end: int
    proven: bool
    at_ns: int
    waiting: bool

    @property
    def position(self) -> int:
        """Where it reads next, in bytes."""
        return self.end

    @property
    def link(self) -> str:
        """What to open for this file: ``key`` is to be compared then, as the descriptor may be
        another file's by now. With O_PATH first: the job may have put a FIFO there."""
        return f"/proc/{self.pid}/fd/{self.fd}"


class LeftAlone(Enum):
    """Why a file that is read is not followed; the value is for people, and for JSON."""

    DIRECT = "read past the page cache (O_DIRECT)"
    WRITTEN = "open for writing"
    UNCACHED = "its file system reads it past the page cache (FUSE with direct_io)"


#: The state of a thread that waits interruptibly: for an answer of FUSE's, and for no page.
_ASLEEP = ord("S")


class WaitShare(NamedTuple):
    """Of the time for which threads were seen waiting for a file system or running, the share of
    waiting, over so many looks."""

    looks: int
    share: float


@dataclass(frozen=True)
class _ReadFile:
    key: Key
    path: str
    size_bytes: int


@dataclass
class _Descriptor:
    """What a descriptor of a process stands for."""

    was: tuple[int, int, int]  # mount, inode, flags: another one by now where they differ
    file: _ReadFile | None
    asked_ns: int  # when it was asked whether anybody writes the file
    is_cached: bool = False  # a thread was seen waiting for a page of it


@dataclass
class _LookedAt:
    """Sums of a process at two times, and where it stands."""

    base: tuple[int, int, int] = (0, 0, 0)
    newer: tuple[int, int, int] = (0, 0, 0)
    newer_ns: int = 0


class ReadCalls:
    """Of one service."""

    def __init__(
        self,
        written: Callable[[Key], bool],
        *,
        event_fd: int | None = None,
        kept: int | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        """``written``: whether anybody in the job has this file open for writing; ``event_fd``: an
        eventfd that is incremented when something was seen, by default one of its own; ``kept``:
        how many descriptors of /proc may be kept open. Raises OSError."""
        self._written, self._clock = written, clock
        self._own_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if event_fd is None else -1
        self._event_fd = self._own_fd if event_fd is None else event_fd
        try:
            self._reads = Reads(self._event_fd, descriptors() if kept is None else kept)
        except OSError:
            self._close_own()
            raise
        self._streams = ReadStreams()
        self._processes: dict[int, _LookedAt] = {}
        self._descriptors: OrderedDict[tuple[int, int], _Descriptor] = OrderedDict()
        #: Files that are read and not followed, by path; bounded.
        self.left_alone: dict[str, LeftAlone] = {}

    def fileno(self) -> int:
        """Readable when something was seen, or a process has come to be seen by another sensor."""
        return self._event_fd

    def add(self, pid: int) -> None:
        """Look at a process, too. Raises OSError: ESRCH, ENOSPC (too many are looked at)."""
        if pid not in self._processes:
            self._reads.add(pid)
            self._processes[pid] = _LookedAt()

    def remove(self, pid: int) -> None:
        """It has ended, or is no longer of interest."""
        if self._processes.pop(pid, None) is not None:
            self._reads.remove(pid)
            self._streams.left(pid)
            for key in [key for key in self._descriptors if key[0] == pid]:
                del self._descriptors[key]

    def reap(self) -> list[ReadSeen]:
        """What was seen since the last call, in order."""
        if self._own_fd >= 0:
            try:
                os.eventfd_read(self._own_fd)
            except BlockingIOError:
                pass
        found = (self._seen(one) for one in self._reads.drain() if one.pid in self._processes)
        return [seen for seen in found if seen is not None]

    def _seen(self, sighting: Sighting) -> ReadSeen | None:
        file = self._file(sighting)
        if file is None or self._sleeps(sighting, file):
            return None
        waits = sighting.call != ReadCall.GOES_ON
        stretch = self._streams.saw(
            ReadSighting(
                (sighting.pid, sighting.tid), sighting.fd, file.key,
                sighting.offset if sighting.offset >= 0 else None,
                sighting.asked_bytes, sighting.rchar, sighting.at_ns,
            )
        )  # fmt: skip
        if stretch is None:
            return None
        if stretch.end > file.size_bytes:
            file = self._grown(sighting, file)
        start, end, asked_end = (
            min(at, file.size_bytes) for at in (stretch.start, stretch.end, stretch.asked_end)
        )
        return ReadSeen(
            sighting.pid, sighting.tid, file.key, file.path, sighting.fd, file.size_bytes,
            start, end, asked_end, stretch.proven, sighting.at_ns, waits,
        )  # fmt: skip

    # -------------------------------------------------------------- files

    def _sleeps(self, sighting: Sighting, file: _ReadFile) -> bool:
        """Whether a thread waits in a read for something else than the page cache: for its bytes
        themselves, or, for a moment, for what its file system knows of the file."""
        known = self._descriptors[sighting.pid, sighting.fd]
        if sighting.state != _ASLEEP:
            if not known.is_cached and self.left_alone.get(file.path) is LeftAlone.UNCACHED:
                del self.left_alone[file.path]
            known.is_cached = True
            return False
        if not known.is_cached:
            self._leave(file.path, LeftAlone.UNCACHED)
        return True

    def _file(self, sighting: Sighting) -> _ReadFile | None:
        """The file of a sighting, where it is to be followed."""
        number = sighting.pid, sighting.fd
        was = sighting.mount, sighting.inode, sighting.flags
        known = self._descriptors.get(number)
        if known is None or known.was != was or not sighting.inode:  # before 5.14 there is none
            known = _Descriptor(was, self._identify(sighting), 0)
            self._descriptors[number] = known
            if len(self._descriptors) > ENTRIES_MAX:
                self._descriptors.popitem(last=False)
        self._descriptors.move_to_end(number)
        if known.file is not None and sighting.at_ns - known.asked_ns > LATELY_NS:
            known.asked_ns = sighting.at_ns
            if self._written(known.file.key):
                self._leave(known.file.path, LeftAlone.WRITTEN)
                known.file = None
        return known.file

    def _identify(self, sighting: Sighting) -> _ReadFile | None:
        try:
            path = os.readlink(f"/proc/{sighting.pid}/fd/{sighting.fd}")
            if not path.startswith("/"):
                return None  # a pipe, a socket
            file = open_file(sighting.pid, sighting.fd)
        except OSError:
            return None  # closed by now
        if not stat.S_ISREG(file.mode):
            return None
        direct = sighting.flags & os.O_DIRECT
        if direct or sighting.flags & os.O_ACCMODE != os.O_RDONLY:
            self._leave(path, LeftAlone.DIRECT if direct else LeftAlone.WRITTEN)
            return None
        return _ReadFile((file.device, file.inode), path, file.size_bytes)

    def _grown(self, sighting: Sighting, file: _ReadFile) -> _ReadFile:
        """A file in which somebody has come past the end that was known."""
        known = self._descriptors[sighting.pid, sighting.fd]
        now = self._identify(sighting)
        if now is not None and now.key == file.key:
            known.file = file = now
        return file

    def _leave(self, path: str, why: LeftAlone) -> None:
        if path in self.left_alone or len(self.left_alone) < ENTRIES_MAX:
            self.left_alone[path] = why

    # -------------------------------------------------------------- processes

    def gate(self, pid: int) -> WaitShare:
        """How much of their time the threads of a process wait for a file system, during the last
        one or two times LATELY_NS. Raises OSError (ESRCH) of one that is not looked at."""
        now, process = self._reads.process(pid), self._processes[pid]
        sums, at_ns = (now.looks, now.waiting_ns, now.running_ns), self._clock.now_ns()
        if at_ns - process.newer_ns > LATELY_NS:
            process.base, process.newer, process.newer_ns = process.newer, sums, at_ns
        looks, waiting, running = (a - b for a, b in zip(sums, process.base, strict=True))
        return WaitShare(looks, waiting / (waiting + running) if waiting else 0.0)

    def sensor(self, pid: int) -> tuple[ReadSensor, str]:
        """By what a process is seen, and why not by the better one. Raises OSError (ESRCH)."""
        now = self._reads.process(pid)
        return ReadSensor(now.sensor), _reason(pid, -now.error) if now.error else ""

    def counts(self) -> LookCounts:
        """Of the looks: how many, what they cost, what was lost."""
        return self._reads.counts()

    def close(self) -> None:
        """End it."""
        self._reads.close()
        self._close_own()

    def _close_own(self) -> None:
        if self._own_fd >= 0:
            os.close(self._own_fd)
            self._own_fd = -1


def _reason(pid: int, error: int) -> str:
    """Why the system calls of a process are not shown, in words."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    try:
        owner = os.stat(f"/proc/{pid}/io").st_uid  # root's, where it is not dumpable
    except OSError:
        owner = -1
    if scope:
        return f"kernel.yama.ptrace_scope is {scope}"
    if owner not in (-1, os.geteuid()):
        return "it is another user's, or not dumpable (set-uid, PR_SET_DUMPABLE)"
    return os.strerror(error)
