# SPDX-License-Identifier: Apache-2.0
"""Which names are opened in the directories that are marked, whoever opens them.

By fanotify(7) in its form without privileges; where that cannot mark a directory, by inotify(7).
Both tell of open(2) and its kind, on every file system and through every mount, and cost whoever
opens 1 us. Neither tells an unprivileged listener whose open it is: fanotify tells it its own apart
from all others, with inotify its own are counted off by what it says that it will open (expect()).

A directory that is opened, to be listed, is the earliest sign of where a program that walks a tree
goes next. inotify tells of it by its name in its parent; fanotify by its own handle, which says
nothing of a directory that is not marked (fs/notify/fanotify/fanotify.c, fanotify_dfid_inode()). So
where names of subdirectories are wanted, inotify tells of that directory.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from uffdprefetch.base.claims import Claims, place
from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.record import dataclass
from uffdprefetch.native import opens as native
from uffdprefetch.predict.bounds import ENTRIES_MAX

#: Part of what the kernel allows a user's processes together that one service takes: the editor and
#: the file manager have theirs, and several jobs run on a node.
LIMIT_PART = 8
_LIMITS = {
    "fanotify": Path("/proc/sys/fs/fanotify/max_user_marks"),
    "inotify": Path("/proc/sys/fs/inotify/max_user_watches"),
}
#: Errors of a mark that say nothing against inotify's: the file system has no handles, or has no
#: number by which fanotify tells it apart.
_NOT_BY_FANOTIFY = (
    *(errno.ENODEV, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM),
    *(errno.EOVERFLOW, errno.ENOSPC),
)


class NameOpened(NamedTuple):
    """``name`` was opened in a directory; '': the directory itself was. ``ours``: by this process.
    ``pid``: whose open it was; 0: that is not told. ``at_ns``: when it was read from the queue."""

    directory: int
    name: str
    is_dir: bool
    ours: bool
    pid: int
    at_ns: int


class DirectoryGone(NamedTuple):
    """A directory was removed, or its file system unmounted: its key is no more. (fanotify says
    nothing of that.)"""

    directory: int


class Overflow(NamedTuple):
    """The queue was full, and opens were lost: no order of them holds on."""

    at_ns: int


@dataclass
class _Mark:
    """``path``: where the directory was, from here. ``sensor``, ``identity``: which one tells of
    it, and by what. ``users``: calls of mark() less those of unmark(); ``is_settled``: no thread is
    marking it, or unmarking it."""

    path: str
    status: os.stat_result
    sensor: str = ""
    identity: int = 0
    users: int = 1
    is_settled: bool = False

    @property
    def number(self) -> int:
        """By which services claim it."""
        return place(self.status.st_dev, self.status.st_ino)

    def open(self) -> int:
        """A descriptor of it, O_PATH. Raises OSError (ESTALE: another one is there by now)."""
        fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if not os.path.samestat(os.fstat(fd), self.status):
            os.close(fd)
            raise OSError(errno.ESTALE, "another directory has its name", self.path)
        return fd


class Opens:
    """Marks on directories, and the opens in them.

    mark(), unmark() and open() may ask a file system's server: they are for a thread that may wait.
    The other methods wait for nothing.
    """

    def __init__(
        self,
        rundir: str,
        clock: Clock = CLOCK,
        fanotify: Callable[[], native.Fanotify] = native.Fanotify,
        limit: Callable[[str], int] | None = None,
    ) -> None:
        """``rundir``: where this user's services tell each other what they watch. Raises OSError:
        neither sensor can be had, or nothing can be locked there."""
        self._clock = clock
        self.reason = ""  # why it is not fanotify
        self._limit = limit
        self._lock = threading.Condition()  # of what follows; told of marks that are settled
        self._marks: dict[int, _Mark] = {}
        self._keys: dict[tuple[str, int], int] = {}
        self._expected: dict[tuple[int, str], int] = {}
        self._next = 1
        self._groups: dict[str, native.Fanotify | native.Inotify] = {}
        self._claims = Claims(rundir)
        self._epoll = select.epoll()
        try:
            try:
                self._add_group("fanotify", fanotify())
            except OSError as error:
                self.reason = str(error.strerror)
                self._add_group("inotify", native.Inotify())
        except BaseException:
            self.close()
            raise

    def _add_group(self, sensor: str, group: native.Fanotify | native.Inotify) -> None:
        self._groups[sensor] = group
        self._epoll.register(group.fd, select.EPOLLIN)

    @property
    def sensor(self) -> str:
        """'fanotify', or 'inotify', and then ``reason`` says why."""
        return "fanotify" if "fanotify" in self._groups else "inotify"

    def fileno(self) -> int:
        """Readable when there is something to read()."""
        return self._epoll.fileno()

    def mark(self, directory: int | str, subdirectories: bool = False) -> int:
        """Tell of opens in a directory, from now on: its key. ``directory``: a path, or any kind of
        descriptor, which is not kept: a mark does not keep a file system from being unmounted.
        ``subdirectories``: of theirs by their names, too. One that is marked has the key that it
        had, and is told of as it was, until unmark() was called as often.

        Raises OSError, whose strerror is for people: another service of this user watches it
        (EBUSY), as many are marked as may be (ENOSPC), or the kernel refuses (EACCES, ENOENT).
        """
        path = f"/proc/self/fd/{directory}" if isinstance(directory, int) else directory
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mark = _Mark(os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd))
            # in another mount namespace: unmarked by fanotify it could not be
            is_here = _is_at(mark.path, mark.status)
            if not is_here and isinstance(directory, str):
                mark.path = directory
            return self._mark(fd, mark, is_here and not subdirectories)
        finally:
            os.close(fd)

    def _mark(self, fd: int, mark: _Mark, by_fanotify: bool) -> int:
        with self._lock:
            while (found := self._known(mark.status)) is not None:
                key, known = found
                if known.is_settled:
                    known.users += 1
                    return key
                self._lock.wait()
            limit = self._limit or kernels_limit
            most = min(ENTRIES_MAX, limit(self.sensor) // LIMIT_PART)
            if len(self._marks) >= most:
                raise OSError(errno.ENOSPC, f"{most} directories are watched")
            if not self._claims.take(mark.number):
                raise OSError(errno.EBUSY, "another service of this user watches it")
            key, self._next = self._next, self._next + 1
            self._marks[key] = mark
        try:
            if not by_fanotify or not self._by_fanotify(fd, key, mark):
                self._by_inotify(fd, key, mark)
        except BaseException:
            with self._lock:
                self._drop(key)
            raise
        with self._lock:
            mark.is_settled = True
            self._lock.notify_all()
        return key

    def _known(self, status: os.stat_result) -> tuple[int, _Mark] | None:
        """The mark of a directory. Under the lock. Raises OSError: close() was called."""
        self._still_open()
        same = (one for one in self._marks.items() if os.path.samestat(one[1].status, status))
        return next(same, None)

    def _by_fanotify(self, fd: int, key: int, mark: _Mark) -> bool:
        """Whether it can be. Events may come before its call has returned."""
        fanotify = self._groups.get("fanotify")
        if not isinstance(fanotify, native.Fanotify):
            return False
        try:
            identity = fanotify.identify(fd)
            with self._lock:
                mark.sensor, mark.identity = "fanotify", identity
                self._keys["fanotify", identity] = key
            fanotify.mark(fd)
        except OSError as error:
            with self._lock:
                self._keys.pop((mark.sensor, mark.identity), None)
            if error.errno not in _NOT_BY_FANOTIFY:
                raise
            return False
        return True

    def _by_inotify(self, fd: int, key: int, mark: _Mark) -> None:
        with self._lock:
            self._still_open()
            if "inotify" not in self._groups:
                self._add_group("inotify", native.Inotify())
            inotify = self._groups["inotify"]
            assert isinstance(inotify, native.Inotify)
            mark.sensor, mark.identity = "inotify", inotify.mark(fd)
            self._keys["inotify", mark.identity] = key

    def _still_open(self) -> None:
        """close() may come while a thread waits for a server."""
        if self._epoll.closed:
            raise OSError(errno.EBADF, "nothing is watched any more")

    def _drop(self, key: int) -> None:
        """Under the lock."""
        mark = self._marks.pop(key, None)
        if mark is not None:
            self._hush(key, mark)
            self._claims.give(mark.number)
            self._lock.notify_all()

    def _hush(self, key: int, mark: _Mark) -> None:
        """What still comes of it is nobody's. Under the lock."""
        self._keys.pop((mark.sensor, mark.identity), None)
        for expected in [one for one in self._expected if one[0] == key]:
            del self._expected[expected]

    def open(self, key: int) -> int:
        """A new descriptor of a marked directory, O_PATH. Raises KeyError, OSError: it is no longer
        where it was, or was seen through a process that has ended."""
        return self._marks[key].open()

    def told_by(self, key: int) -> str:
        """The sensor that tells of a directory. Raises KeyError."""
        return self._marks[key].sensor

    def unmark(self, key: int) -> None:
        """Whoever called mark() wants it no more: with the last of them it is told of no more. What
        is gone already is no error. (It may ask the server, as mark(). One that was renamed keeps
        fanotify's mark, whose events nobody gets to see.)"""
        with self._lock:
            mark = self._marks.get(key)
            if mark is None or not mark.is_settled:
                return
            mark.users -= 1
            if mark.users:
                return
            # who marks it again meanwhile waits: this would take away the new mark
            mark.is_settled = False
            self._hush(key, mark)
            group = self._groups[mark.sensor]
        try:
            if isinstance(group, native.Inotify):
                group.unmark(mark.identity)
                return
            fd = mark.open()
            try:
                group.unmark(fd)
            finally:
                os.close(fd)
        except OSError:
            pass  # the mark went with the directory
        finally:
            with self._lock:
                self._drop(key)

    def expect(self, key: int, name: str) -> None:
        """This process is about to open ``name``: inotify's next such open is ours. (It tells one
        of the job's just before or after that as the same one.)"""
        with self._lock:
            mark = self._marks.get(key)
            if mark is None or mark.sensor != "inotify":
                return
            if len(self._expected) >= ENTRIES_MAX:
                self._expected.pop(next(iter(self._expected)))
            self._expected[key, name] = self._expected.get((key, name), 0) + 1

    def unexpect(self, key: int, name: str) -> None:
        """The open that was expected has failed."""
        with self._lock:
            self._counted_off(key, name)

    def _counted_off(self, key: int, name: str) -> bool:
        number = self._expected.pop((key, name), 0)
        if number > 1:
            self._expected[key, name] = number - 1
        return number > 0

    def read(self) -> list[NameOpened | DirectoryGone | Overflow]:
        """What has happened, in its order. Raises OSError."""
        found: list[NameOpened | DirectoryGone | Overflow] = []
        with self._lock:  # mark() may add one
            # inotify's first: a directory is listed before its files are opened
            groups = sorted(self._groups.items(), reverse=True)
        for sensor, group in groups:
            # what is left then is there in the next turn
            while len(found) < ENTRIES_MAX and (events := group.read()):
                self._translate(sensor, events, found)
        return found

    def _translate(
        self,
        sensor: str,
        events: list[native.NameEvent],
        found: list[NameOpened | DirectoryGone | Overflow],
    ) -> None:
        now_ns, own = self._clock.now_ns(), os.getpid()
        with self._lock:
            for event in events:
                if event.kind == native.LOST:
                    self._expected.clear()  # which of them came is not known
                    found.append(Overflow(now_ns))
                    continue
                key = self._keys.get((sensor, event.directory))
                if key is None:
                    continue  # it was unmarked meanwhile
                if event.kind == native.GONE:
                    self._drop(key)
                    found.append(DirectoryGone(key))
                    continue
                ours = event.pid == own
                if sensor == "inotify":
                    ours = self._counted_off(key, event.name)
                found.append(
                    NameOpened(
                        key, event.name, event.kind == native.DIRECTORY, ours, event.pid, now_ns
                    )
                )

    def close(self) -> None:
        """Unmark all."""
        with self._lock:
            for group in self._groups.values():
                group.close()
            self._groups.clear()
            self._marks.clear()
            self._epoll.close()
            self._claims.close()
            self._lock.notify_all()


def _is_at(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)
    except OSError:
        return False


def kernels_limit(sensor: str) -> int:
    """How many directories a user's processes may mark together."""
    try:
        return int(_LIMITS[sensor].read_text())
    except (OSError, ValueError):
        return ENTRIES_MAX
