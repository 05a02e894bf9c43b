# SPDX-License-Identifier: Apache-2.0
"""Whole files in an order that is known: read by name ahead of the processes that follow it, which
are seen by what they open (readers/announced_files.py asks for that)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from uffdprefetch.base.procfs import from_here
from uffdprefetch.native.paths import THREADS, Keeping, PathDone
from uffdprefetch.orders.opens import OPENS_MAX
from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.sense.opens import DirectoryGone, NameOpened, Overflow

if TYPE_CHECKING:  # one brings numpy, which a service without orders spares
    from uffdprefetch.orders.file_order import FileOrder
    from uffdprefetch.service.small_reads import Watching

#: Files ahead of a reader: who reads by several workers opens some of each's next batch, and as
#: many threads as hide a latency have several each.
AHEAD_FILES = 8 * THREADS
#: First group of files; those below are directories' keys (small_files.py).
FIRST_GROUP = 1 << 32


class _FollowedOrder:
    """An order of files that processes follow. ``group``: of its files (SmallReads); ``asked``: up
    to where they were asked for; ``keeps``: whether their mount keeps what is read, None: it is
    being found out."""

    def __init__(self, order: FileOrder, group: int, pid: int, watching: Watching) -> None:
        self.order, self.group, self._pid = order, group, pid
        self.asked = order.position
        self.keeps: bool | None = None
        self.is_probed = False
        self._watching = watching

    def path_of(self, name: str) -> str:
        """See NamesAhead."""
        return from_here(self._pid, name)

    def came(self, name: str, done: PathDone) -> None:
        """See NamesAhead."""
        if done.probe is None and self.keeps is not None:
            return
        keeping = done.probe.keeping if done.probe is not None else Keeping.NOTHING
        if done.file is None or done.probe is None:
            self.is_probed = False  # not there, or of no storage: by the next one
            return
        self._watching.mounts.note(done.file.device, keeping, os.path.dirname(name))
        self.keeps = self._watching.mounts.keeps(done.file.device)

    def next_paths(self) -> list[str]:
        """What is to be read now."""
        position = self.order.position
        self.asked = max(self.asked, position)
        end = min(len(self.order), position + AHEAD_FILES)
        if self.order.done or self.asked >= end or self.keeps is False:
            return []
        if self.keeps is None:
            paths = [] if self.is_probed else self.order.ahead(self.asked, 1)
            self.asked += 1 if paths else 0
            return paths
        paths, self.asked = self.order.ahead(self.asked, end - self.asked), end
        return paths


@dataclass
class _Announcer:
    """A process that has announced orders. ``keys``: of its watched directories, with their paths;
    ``asked``: directories that are watched, or being marked, or were refused; ``opened``: files."""

    pid: int
    keys: dict[int, str] = field(default_factory=dict)
    asked: dict[str, int | None] = field(default_factory=dict)
    opened: deque[str] = field(default_factory=lambda: deque(maxlen=OPENS_MAX))
    orders: list[_FollowedOrder] = field(default_factory=list)


class OrderedFiles:
    """See FileReaders. The service's thread calls everything here."""

    def __init__(self, watching: Callable[[], Watching | None]) -> None:
        """``watching``: made when it is asked for first; None: it cannot be."""
        self._make = watching
        self._processes: dict[int, _Announcer] = {}
        self._group = FIRST_GROUP

    def _announcer(self, peer: int) -> _Announcer:
        return self._processes.setdefault(peer, _Announcer(peer))

    def watch(self, peer: int, directories: Sequence[str]) -> bool:
        """See FileReaders."""
        watching, process = self._make(), self._announcer(peer)
        if watching is None:
            return False
        for directory in directories:
            self._mark(watching, process, directory)
        return all(process.asked.get(directory) for directory in directories)

    def _mark(self, watching: Watching, process: _Announcer, directory: str) -> None:
        if directory in process.asked or len(process.asked) >= ENTRIES_MAX:
            return

        def marked(key: int | OSError) -> None:
            if isinstance(key, OSError):
                return
            if self._processes.get(process.pid) is not process:
                watching.leave(key)
                return
            process.asked[directory] = key
            process.keys[key] = directory

        try:
            path = from_here(process.pid, directory)
        except OSError:  # it has ended
            return
        if watching.opener.run(lambda: watching.opens.mark(path), marked):
            process.asked[directory] = None

    def opened(self, peer: int) -> Sequence[str]:
        """See FileReaders."""
        return list(self._announcer(peer).opened)

    def follow(self, peer: int, order: FileOrder) -> None:
        """See FileReaders."""
        watching = self._make()
        if watching is None:
            return
        self._group += 1
        followed = _FollowedOrder(order, self._group, peer, watching)
        self._announcer(peer).orders.append(followed)

    def forget(self, peer: int, orders: Sequence[FileOrder]) -> None:
        """See FileReaders."""
        process, watching = self._processes.get(peer), self._make()
        if process is None or watching is None:
            return
        for followed in [one for one in process.orders if one.order in orders]:
            process.orders.remove(followed)
            watching.reads.leave(followed.group, is_guess=False)
        process.opened.clear()
        if not process.orders:
            for key in process.keys:
                watching.leave(key)
            del self._processes[peer]

    @property
    def active(self) -> bool:
        """Whether step() is to be called."""
        return bool(self._processes)

    def step(
        self, watching: Watching, events: Iterable[NameOpened | DirectoryGone | Overflow]
    ) -> None:
        """What was opened since the last time; and what is wanted now."""
        processes = list(self._processes.values())
        for event in events:
            if isinstance(event, NameOpened) and not (event.ours or event.is_dir):
                for process in processes:
                    directory = process.keys.get(event.directory)
                    if directory is not None:
                        self._opened(watching, process, os.path.join(directory, event.name))
        for process in processes:
            for followed in process.orders:
                self._ask(watching, process, followed)

    @staticmethod
    def _opened(watching: Watching, process: _Announcer, path: str) -> None:
        process.opened.append(path)
        for followed in process.orders:
            if followed.order.opened(path) is not None:
                watching.reads.opened(followed.group, path, is_guess=False)

    def _ask(self, watching: Watching, process: _Announcer, followed: _FollowedOrder) -> None:
        probe = followed.keeps is None
        for path in followed.next_paths():
            followed.is_probed = followed.is_probed or probe
            self._mark(watching, process, os.path.dirname(path))
            watching.reads.read(followed, followed.group, path, probe=probe, is_guess=False)
