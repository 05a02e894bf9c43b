# SPDX-License-Identifier: Apache-2.0
"""Whole files in an order that is known: read by name ahead of the processes that follow it, which
are seen by what they open (readers/announced_files.py asks for that)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from uffdprefetch.base.file_systems import FileSystem
from uffdprefetch.base.procfs import from_here
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native.paths import HOLD_SECONDS, THREADS, PathDone
from uffdprefetch.orders.opens import OPENS_MAX
from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.sense.opens import DirectoryGone, NameOpened, Overflow

if TYPE_CHECKING:  # one brings numpy, which a service without orders spares
    from uffdprefetch.orders.file_order import FileOrder
    from uffdprefetch.protocol.snapshot import FollowedFiles
    from uffdprefetch.service.small_reads import Watching

#: Files ahead of a reader: who reads by several workers opens some of each's next batch, and as
#: many threads as hide a latency have several each.
AHEAD_FILES = 8 * THREADS
#: The same where they are held open for it (FileSystem.opens_held), or where that is not known yet,
#: until it has shown how fast it opens them: as many as it opens in half of the time for which they
#: are.
HELD_FILES = AHEAD_FILES // 2
#: Opens of late that tell how fast, at the least: a batch of each of some workers. Up to
#: AHEAD_FILES of them: who opens a batch at once, and then computes, is as fast as that makes it.
PACE_OPENS = 2 * THREADS
#: First group of files; those below are directories' keys (small_files.py).
FIRST_GROUP = 1 << 32


class _FollowedOrder:
    """An order of files that processes follow. ``group``: of its files (SmallReads); ``after``: the
    epoch before, while it is followed; ``wanted``: files that are to be asked for; ``keeps``:
    whether their mount keeps what is read, None: it is being found out; ``on``: its row, then."""

    def __init__(self, order: FileOrder, group: int, pid: int, watching: Watching) -> None:
        self.order, self.group, self._pid = order, group, pid
        self.after: _FollowedOrder | None = None
        self.wanted: deque[str] = deque()
        self._end = order.position  # of what was asked for, or is wanted
        self.keeps: bool | None = None
        self.on = FileSystem("unknown")
        self.is_probed = False
        self._watching = watching
        self._opened_ns = deque[int](maxlen=AHEAD_FILES)

    def path_of(self, name: str) -> str:
        """See NamesAhead."""
        return from_here(self._pid, name)

    def came(self, name: str, done: PathDone) -> None:
        """See NamesAhead."""
        if done.probe is None and self.keeps is not None:
            return
        if done.file is None or done.probe is None:
            self.is_probed = False
            if name in self.wanted:  # not there, or of no storage: by the next one
                self.wanted.remove(name)
            return
        self._watching.mounts.note(done.file.device, done.probe, os.path.dirname(name))
        self.on = done.probe.file_system
        self.keeps = self._watching.mounts.keeps(done.file.device)

    @property
    def left(self) -> int:
        """Files that its reader has yet to open."""
        return len(self.order) - self.order.position

    @property
    def _most(self) -> int:
        """Files that may be ahead of its reader, who goes on as in the epoch before."""
        if self.after is not None and not self.order.position:
            return self.after._most
        if self.keeps is not None and not self.on.opens_held:
            return AHEAD_FILES
        times = self._opened_ns
        if len(times) < PACE_OPENS:
            return HELD_FILES
        seconds = max(1, times[-1] - times[0]) / 1e9
        return max(THREADS, min(AHEAD_FILES, int(HOLD_SECONDS / 2 * (len(times) - 1) / seconds)))

    def opened(self, path: str, at_ns: int) -> bool:
        """A file was opened; whether it may be one of the next epoch."""
        before = self.order.position
        at = self.order.opened(path)
        if at is not None:
            self._opened_ns.append(at_ns)
            (name,) = self.order.order.paths(at, at + 1)  # the path itself may be another
            self._watching.reads.opened(self.group, name, is_guess=False)
        return (at is None or at < before) and self.left <= AHEAD_FILES

    def want(self) -> None:
        """What is to be ahead of the reader by now: of an order that has not begun what the epoch
        before it leaves room for."""
        position, most = self.order.position, self._most
        if self.after is not None and not position:
            most -= self.after.left
        if position > self._end:  # it has overtaken us
            self.wanted.clear()
            self._end = position
        end = min(len(self.order), position + most)
        if end > self._end:
            self.wanted.extend(self.order.ahead(self._end, end - self._end))
            self._end = end


@dataclass
class _Announcer:
    """A process that has announced orders, or for which a plan has some. ``asked``: directories
    that are watched, by their keys (None: one is being marked, 0: it was refused); ``keys``: the
    same by key; ``opened``: files; ``orders``: an epoch's behind that of the one before."""

    pid: int
    keys: dict[int, str] = field(default_factory=dict)
    asked: dict[str, int | None] = field(default_factory=dict)
    opened: deque[str] = field(default_factory=lambda: deque(maxlen=OPENS_MAX))
    orders: list[_FollowedOrder] = field(default_factory=list)
    has_lost: bool = False  # opens, since watch() was asked


class OrderedFiles:
    """See FileReaders. The service's thread calls everything here."""

    def __init__(self, watching: Callable[[], Watching | None]) -> None:
        """``watching``: made when it is asked for first; None: it cannot be."""
        self._make = watching
        self._processes: dict[int, _Announcer] = {}
        self._group = FIRST_GROUP

    def _announcer(self, peer: int) -> _Announcer:
        """Of whom something is watched: from now on step() is to be called."""
        return self._processes.setdefault(peer, _Announcer(peer))

    def watch(self, peer: int, directories: Sequence[str]) -> bool:
        """See FileReaders."""
        watching = self._make()
        if watching is None:
            return False
        process = self._announcer(peer)
        has_lost, process.has_lost = process.has_lost, False
        for directory in directories:
            self._mark(watching, process, directory)
        return not has_lost and all(process.asked.get(directory) for directory in directories)

    def _mark(self, watching: Watching, process: _Announcer, directory: str) -> bool:
        """Have a directory watched; whether it is, or cannot be."""
        if directory in process.asked:
            return process.asked[directory] is not None
        if len(process.asked) >= ENTRIES_MAX:
            return True

        def marked(key: int | OSError) -> None:
            is_gone = self._processes.get(process.pid) is not process
            if isinstance(key, OSError):
                process.asked[directory] = 0
                return
            if is_gone or key in process.keys:  # by another path
                watching.leave(key)
            process.asked[directory] = 0 if is_gone else key
            process.keys.setdefault(key, directory)

        try:
            path = from_here(process.pid, directory)
        except OSError:  # it has ended
            return False
        if watching.opener.run(lambda: watching.opens.mark(path), marked):
            process.asked[directory] = None
        return False

    def opened(self, peer: int) -> Sequence[str]:
        """See FileReaders."""
        process = self._processes.get(peer)
        return list(process.opened) if process is not None else []

    def follow(self, peer: int, order: FileOrder, after: FileOrder | None = None) -> None:
        """See FileReaders."""
        watching = self._make()
        if watching is None:
            return
        self._group += 1
        orders = self._announcer(peer).orders
        followed = _FollowedOrder(order, self._group, peer, watching)
        followed.after = next((one for one in orders if one.order is after), None)
        orders.append(followed)

    def forget(self, peer: int, orders: Sequence[FileOrder]) -> None:
        """See FileReaders."""
        process = self._processes.get(peer)
        watching = self._make() if process is not None else None
        if process is None or watching is None:
            return
        for followed in [one for one in process.orders if one.order in orders]:
            self._leave(watching, process, followed)
        process.opened.clear()
        if not process.orders:
            for key in process.keys:
                watching.leave(key)
            del self._processes[peer]

    @staticmethod
    def _leave(watching: Watching, process: _Announcer, followed: _FollowedOrder) -> None:
        process.orders.remove(followed)
        for later in process.orders:
            later.after = None if later.after is followed else later.after
        watching.reads.leave(followed.group, is_guess=False)

    @property
    def active(self) -> bool:
        """Whether step() is to be called."""
        return bool(self._processes)

    def live(self) -> list[FollowedFiles]:
        """For a watcher: orders that somebody has begun."""
        from uffdprefetch.protocol.snapshot import FollowedFiles  # most runs are not watched

        watching = self._make()
        if watching is None:
            return []
        found = []
        for process in self._processes.values():
            for one in process.orders:
                if one.order.position:
                    counts = watching.reads.counts_of(one.group)
                    files = len(one.order), one.order.position
                    found.append(FollowedFiles(process.pid, *files, counts.read, counts.used))
        return found

    # -------------------------------------------------------------- what is opened

    def step(
        self, watching: Watching, events: Iterable[NameOpened | DirectoryGone | Overflow]
    ) -> None:
        """What was opened since the last time; and what is wanted now."""
        processes = list(self._processes.values())
        for event in events:
            for process in processes:
                self._note(watching, process, event)
        for process in processes:
            for followed in list(process.orders):
                if _is_over(process, followed):
                    self._leave(watching, process, followed)
            for followed in process.orders:
                if followed.keeps is not False:
                    followed.want()
                    self._read(watching, process, followed)

    def _note(
        self, watching: Watching, process: _Announcer, event: NameOpened | DirectoryGone | Overflow
    ) -> None:
        if isinstance(event, Overflow):
            # what is compared with what was opened begins anew; an order's files were left out
            process.has_lost = True
            process.opened.clear()
        elif event.directory not in process.keys:
            return
        elif isinstance(event, DirectoryGone):
            del process.asked[process.keys.pop(event.directory)]
            watching.leave(event.directory)
        elif not (event.ours or event.is_dir):
            self._opened(process, f"{process.keys[event.directory]}/{event.name}", event.at_ns)

    @staticmethod
    def _opened(process: _Announcer, path: str, at_ns: int) -> None:
        process.opened.append(path)
        near_end: list[_FollowedOrder] = []
        for followed in process.orders:
            is_next = followed.after is None or followed.after in near_end
            if is_next and followed.opened(path, at_ns):
                near_end.append(followed)

    # -------------------------------------------------------------- what is wanted

    def _read(self, watching: Watching, process: _Announcer, followed: _FollowedOrder) -> None:
        for _ in range(len(followed.wanted)):
            path = followed.wanted.popleft()
            directory, name = os.path.split(path)
            # until it is marked nobody can tell whose open ours is
            is_ready = self._mark(watching, process, directory)
            probe = followed.keeps is None
            if not is_ready or (probe and followed.is_probed):
                followed.wanted.append(path)
                continue
            key = process.asked.get(directory)
            if key:
                watching.opens.expect(key, name)
            if not watching.reads.read(
                followed, followed.group, path, probe=probe, is_guess=False, on=followed.on
            ):
                if key:
                    watching.opens.unexpect(key, name)
                followed.wanted.appendleft(path)
                return
            if probe:  # its first page alone
                followed.is_probed = True
                followed.wanted.append(path)


def _is_over(process: _Announcer, followed: _FollowedOrder) -> bool:
    """Whether its last file was opened, or it was left near its end: the next epoch goes on."""
    if followed.left > AHEAD_FILES:
        return False
    later = [one.order.position for one in process.orders if one.after is followed]
    return followed.order.done or max(later, default=0) >= AHEAD_FILES
