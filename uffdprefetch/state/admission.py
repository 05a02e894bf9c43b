# SPDX-License-Identifier: Apache-2.0
"""Admission of files: the table of open ones, and the reasons why a mapping is refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from typing import Protocol

from uffdprefetch.base import file_systems
from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.config import Config
from uffdprefetch.protocol import wire
from uffdprefetch.state.file_pool import FilePool
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opened, generation
from uffdprefetch.state.unserved import Reason, Refusal

MS = 1_000_000
#: An unmapped file stays open this long, since the next batch may map it again. With LOOK_NS and a
#: read in flight this is below one second, after which no unmapped file may be open.
IDLE_NS = 700 * MS
#: Interval of checks meanwhile: a deleted file that is open still takes space.
LOOK_NS = 50 * MS
#: Closed files whose checkpoint pages and pool pages are kept for the next epoch.
PARKED_MAX = 64
#: Files that have changed during the run and are remembered one by one: a job that rewrites more
#: has none of its files taken up again.
CHANGED_MAX = 4096


#: Nothing is mapped through one that cannot be read: the number is another description's by now.
REUSED = Refusal(Reason.ANOTHER_FILE, "its descriptor is another one by now")


def in_memory(file_system: str) -> Refusal:
    """Of a file that is in memory anyway."""
    return Refusal(Reason.IN_MEMORY, f"{file_system} is memory already")


def is_of_a_program(path: str) -> bool:
    """Whether a file belongs to a program, not to its data: of LMDB its lock, a library, of a Java
    VM its classes (JDK 9 and newer: lib/modules, and the archives of class data sharing)."""
    name = os.path.basename(path)
    java = name.endswith(".jsa") or path.endswith("/lib/modules")
    return name == "lock.mdb" or ".so" in name or java


class FileRequests(Protocol):
    """What is read of files (warm/scheduler.py), as far as who closes them has to know."""

    def forget_file(self, file: FileState) -> None:
        """Drop everything queued for a file."""

    def busy_with(self, file: FileState) -> bool:
        """Whether a worker still uses the file's descriptors."""


class FileTable:
    """The files under management, by (device, inode, size, mtime)."""

    def __init__(
        self, config: Config, scheduler: FileRequests, ledger: Ledger, clock: Clock = CLOCK,
        pool: FilePool | None = None,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._config = config
        self._scheduler = scheduler
        self._ledger = ledger
        self.files: dict[Key, FileState] = {}
        self.parked: dict[Key, FileState] = {}  # closed; reopened at their next mapping
        self.look_ns = self._all_ns = 0
        self._left: dict[Key, FileState] = {}  # since the last look
        self.waits = False  # call look() when a worker has ended
        self._changed: set[tuple[int, int] | str] = set()
        self.pool = pool

    @property
    def all(self) -> list[FileState]:
        """Those under management, and the ones that nobody maps now, which are closed."""
        return [*self.files.values(), *self.parked.values()]

    def known(self, a: wire.Attach, fd: int | None) -> FileState | None:
        """The file of a mapping, if it is managed; ``fd``: the mapped description."""
        file = self.files.get((a.device, a.inode, a.size_bytes, a.mtime_ns))
        if file is None:
            return None
        # Not asked where the file had no generation: a FUSE daemon may not answer.
        if (
            fd is not None
            and file.opened.generation is not None
            and generation(fd) != file.opened.generation
        ):
            return None  # its inode has been reused: see admit()
        file.mappings.wanted(opened=fd is not None)
        return file

    def admit(self, a: wire.Attach, opened: Opened) -> tuple[FileState | None, str, Refusal | None]:
        """(file, path, None) of a mapping, taking over ``opened``; (None, path, why) when it is
        refused. Raises OSError, MemoryError."""
        # mtime from our own open: the job's may be stale (no attribute revalidation).
        key = (a.device, a.inode, a.size_bytes, opened.status.st_mtime_ns)
        file = self.files.get(key)
        if file is not None:
            same = opened.generation == file.opened.generation
            opened.close()
            file.mappings.wanted(opened=True)
            if not same:
                why = Refusal(Reason.ANOTHER_FILE, "another file has its number now")
                return None, file.path, why
            return file, file.path, None
        with contextlib.ExitStack() as undo:
            undo.callback(opened.close)
            path = os.readlink(f"/proc/self/fd/{opened.fd}")
            unfit = self._unfit(key, opened, path)
            if opened.was is not None and a.mtime_ns != opened.was.mtime_ns:
                unfit = unfit or Refusal(Reason.CHANGED, "changed since it was mapped")
            if unfit:
                return None, path, unfit
            file = self._opened(key, opened, path)
            undo.pop_all()
        system = file_systems.known(file.opened.f_type)
        if system.in_memory:
            file.close()
            return None, path, in_memory(system.name)
        self.files[key] = file
        self.look_ns = self._clock.now_ns() + LOOK_NS  # it may be refused
        return file, path, None

    def ahead(self, opened: Opened, pid: int) -> FileState | None:
        """The file of a description that the service has opened of itself, since a process is about
        to need it, taking over ``opened``; None where it must not be served. As one that nobody
        maps it is closed after IDLE_NS. Raises OSError, MemoryError."""
        status = opened.status
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        file = self.files.get(key)
        with contextlib.ExitStack() as undo:
            undo.callback(opened.close)
            if file is not None:
                return file if opened.generation == file.opened.generation else None
            path = os.readlink(f"/proc/self/fd/{opened.fd}")
            small = status.st_size < self._config.files.min_size_bytes
            if small or self._unfit(key, opened, path):
                return None
            file = self._opened(key, opened, path)
            undo.pop_all()
        if file.guard.writer or file_systems.known(file.opened.f_type).in_memory:
            file.close()
            return None
        self.files[key] = file
        self.left(file, pid)
        return file

    def wants(self, path: str) -> bool:
        """Whether a file of this path may be served."""
        return self._config.files.wants(path) and not is_of_a_program(path)

    def _unfit(self, key: Key, opened: Opened, path: str) -> Refusal | None:
        """Why the description that was opened must not be served; None when it may."""
        fd, st = opened.fd, opened.status
        if not stat.S_ISREG(st.st_mode):
            return Refusal(Reason.ANOTHER_FILE, "it is no regular file")
        if (st.st_dev, st.st_ino) != key[:2]:
            return Refusal(Reason.ANOTHER_FILE, "its descriptor is another file's by now")
        if st.st_size != key[2]:
            return Refusal(Reason.CHANGED, "changed since it was mapped")
        # A description that was opened before the change reads the old file still; ours would bring
        # the new one's bytes to where it is mapped.
        if opened.was is not None and self.has_changed(path):
            return Refusal(Reason.CHANGED, "changed during the run")
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_PATH or flags & os.O_ACCMODE == os.O_WRONLY:
            return REUSED
        if not self._config.files.wants(path):
            return Refusal(Reason.EXCLUDED, "left out by --include or --exclude")
        if is_of_a_program(path):
            return Refusal(Reason.LIBRARY, "a lock file, a library or a run-time's own file")
        return None

    # -------------------------------------------------------------- changed files

    def note_changed(self, file: FileState) -> None:
        """It has been given back as changed: mappings of it that were made before then are never
        taken up again."""
        device, inode, *_ = file.key
        self._changed.add((device, inode))
        if file.opened.was is not None:  # its inode number may be the new file's
            self._changed.add(file.path)

    def has_changed(self, path: str, number: tuple[int, int] | None = None) -> bool:
        """Whether a mapping that was made no one knows when may be older than a change of the file:
        of its path, where pages go by path, or of its (device, inode)."""
        if len(self._changed) > CHANGED_MAX:
            return True
        return path in self._changed or number in self._changed

    # -------------------------------------------------------------- unmapped files

    def left(self, file: FileState, pid: int) -> None:
        """A mapping of the file in this process has ended."""
        file.mappings.last_pid = pid
        if not file.mappings.attached:
            file.mappings.idle_ns = self.look_ns = self._clock.now_ns()
            self._left[file.key] = file

    def ended(self, pid: int) -> None:
        """A process ends: the file that it was the last to map is closed as soon as possible, for
        whoever waits for the process in order to unmount or delete."""
        for file in self.files.values():
            if not file.mappings.attached and file.mappings.last_pid == pid:
                self.hurry(file)

    def hurry(self, file: FileState) -> None:
        """Close an unmapped file as soon as possible."""
        self.look_ns = self._clock.now_ns()
        file.mappings.idle_ns = self.look_ns - IDLE_NS
        self._left[file.key] = file

    def look(self, now: int) -> None:
        """Close unmapped files: a deleted one at once, others after IDLE_NS. One that a worker
        still reads waits for that (``waits``). Call again at ``look_ns`` (0: not needed).

        All are looked at every LOOK_NS, those that were left, or are to be closed, at once."""
        left, self._left = self._left, {}
        self.look_ns, self.waits = self._all_ns, False
        if now >= self._all_ns:
            self.look_ns, self._all_ns = 0, now + LOOK_NS
            left = self.files
        for file in [
            f for key, f in left.items() if self.files.get(key) is f and not f.mappings.attached
        ]:
            file.mappings.idle_ns = file.mappings.idle_ns or now
            deleted = file.deleted()
            if not deleted and now - file.mappings.idle_ns < IDLE_NS:
                self.look_ns = now + LOOK_NS
                continue
            file.mappings.resting = True
            self._scheduler.forget_file(file)
            busy = self._scheduler.busy_with(file)
            self.waits |= busy
            if busy:
                self._left[file.key] = file
            if not deleted and file.in_use():  # checkpoints in use: only we detect changes
                self.look_ns = now + LOOK_NS
                continue
            if busy and self.pool is not None:
                self.pool.hush(file)
            if busy or not self._out_of_the_pool(file, deleted):
                self.look_ns = now + LOOK_NS
                continue
            del self.files[file.key]
            if deleted:
                self._drop(file)
            else:
                file.park()
                self.parked[file.key] = file
        while len(self.parked) > PARKED_MAX:
            file = self.parked.pop(next(iter(self.parked)))
            self._out_of_the_pool(file, True)
            self._drop(file)

    def _drop(self, file: FileState) -> None:
        self._ledger.close_file(file)
        file.close()

    def _out_of_the_pool(self, file: FileState, for_good: bool) -> bool:
        """Have the pool close the file (``for_good``: free its pages too); False while in use."""
        if self.pool is None or file.pooled is None:
            return True
        return self.pool.forget(file) if for_good else self.pool.park(file)

    def _opened(self, key: Key, opened: Opened, path: str) -> FileState:
        """Raises OSError, MemoryError."""
        file = self._open_again(key, opened)
        return file or FileState.open(opened, path, takes_lease=self._config.keeps_copies)

    def _open_again(self, key: Key, opened: Opened) -> FileState | None:
        """Reopen a parked file. Raises OSError."""
        file = self.parked.get(key)
        if file is None:
            return None
        if file.pooled is not None and self.pool is not None:
            if file.guard.closed_ctime_ns != opened.status.st_ctime_ns:
                self.pool.forget(file)  # its pages may be outdated
            else:
                self.pool.unpark(file, opened)
        del self.parked[key]
        same = file.unpark(opened)
        if not same and file.pooled is not None and self.pool is not None:
            self.pool.drop(file)  # it was changed just now
        return file
