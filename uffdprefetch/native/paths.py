# SPDX-License-Identifier: Apache-2.0
"""cffi binding of csrc/service/paths.c: threads that read files by name into the page cache.

What is asked for never makes the caller wait: names are opened, read and closed by the threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from uffdprefetch.base import file_systems
from uffdprefetch.base.file_systems import FileSystem
from uffdprefetch.native import uffd
from uffdprefetch.native.crews import Crews

_ffi: Any = uffd._ffi
_lib: Any = uffd._lib
_checked = uffd._checked

#: openat(2): the name is a path, absolute or from the service's working directory.
AT_FDCWD = -100
THREADS = 16
#: So long files are held open for jobs that will open them.
HOLD_SECONDS: int = _lib.UP_HOLD_SECONDS
#: So many of them: each is a descriptor ...
HELD_MOST = 1024
#: ... of which others have the most: files under management, sockets, directories.
HELD_SHARE = 4
RESULTS_AT_ONCE = 256


class PathState(Enum):
    """What came of a request. The value: for a summary."""

    DONE = "read"
    FAILED = "not to be opened or read"  # PathDone.error says why
    ANOTHER = "another file than was expected"
    NOT_REGULAR = "no regular file of any storage"
    EMPTY = "empty"
    WITHDRAWN = "withdrawn"


_STATES = {int(getattr(_lib, f"UP_PATH_{state.name}")): state for state in PathState}


class Keeping(Enum):
    """What the page cache keeps of a mount's files."""

    PAGES = "pages"
    WHILE_OPEN = "pages, until the file is opened again"
    NOTHING = "nothing"
    UNKNOWN = "unknown"


class Look(NamedTuple):
    """One call of a probe: how often the thread slept in it, and how long it took."""

    waits: int
    ns: int


class PathProbe(NamedTuple):
    """The calls of a probe, in their order: the first page, twice by one open and twice by another;
    then fstat(2). ``is_mappable``: whether it may be mapped MAP_SHARED. ``file_system``: where it
    lies."""

    cold: Look
    cold_again: Look
    reopened: Look
    reopened_again: Look
    status: Look
    is_mappable: bool
    file_system: FileSystem

    @property
    def cached_waits(self) -> int:
        """How often a read sleeps though its page is there: where the attributes are asked for at
        each."""
        return self.reopened_again.waits

    @property
    def keeping(self) -> Keeping:
        """What they say of the mount.

        A page that is there is read without a wait, unless the attributes are asked for at each
        read: then fstat(2) waits, too, and a read of data more often than a repeated one. Where
        the first one has not, the page was there before, or no page ever is: that is not known.
        """
        if not self.is_mappable or (self.cached_waits and not self.status.waits):
            return Keeping.NOTHING
        if self.reopened.waits > self.cached_waits:
            return Keeping.WHILE_OPEN
        if self.cached_waits and self.cold.waits <= self.cold_again.waits:
            return Keeping.UNKNOWN
        return Keeping.PAGES


class PathRequest(NamedTuple):
    """A file to read into the page cache.

    ``id``: of those that were not reaped, nobody else's. ``name``: a path (/proc/PID/fd/N is one),
    or relative to ``dir_fd``, which stays open until the request was reaped (close_directory()).
    ``group``: whatever is withdrawn at one time, a stream for instance. ``ranges``: (offset,
    length) in bytes, read one after the other; none: the whole file. ``most_bytes``: no more is
    read; 0: no limit. ``hold``: stays open after that until release(), for 5 s at most; only where
    the file system's row says that it helps (FileSystem.opens_held). ``method``: WARM_READAHEAD or
    WARM_PREAD (base/cache_call.py). ``expected``: device and inode of the file that is meant, 0:
    any; each device is read from by threads of its own. ``follow``: whether the name may be a
    symbolic link, which is followed in the service's own mount namespace. ``cached_waits``: of the
    mount (PathProbe). ``probe``: its first page only, to see what the page cache keeps of it: of a
    file that no one has open, since where an open drops the pages that one does, too.
    """

    id: int
    name: str | bytes
    group: int = 0
    dir_fd: int = AT_FDCWD
    ranges: Sequence[tuple[int, int]] = ()
    most_bytes: int = 0
    hold: bool = False
    method: int = uffd.WARM_READAHEAD
    expected: tuple[int, int] | None = None
    follow: bool = True
    cached_waits: int = 0
    probe: bool = False


class FoundFile(NamedTuple):
    """The file that the name stood for, as it was before it was read."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


class PathDone(NamedTuple):
    """What came of a request (csrc/service/helper.h, struct up_path_result).

    ``error``: errno, where it FAILED. ``file``: None where nothing could be opened. ``bytes``:
    read; ``waited_bytes`` of them from the first read on that had to wait: before it all was in the
    page cache. ``held``: it is still open. Times are of CLOCK_MONOTONIC, 0 where it did not come so
    far; ``opened_ns``: then it was open for reading. ``probe``: of a probe that is DONE.
    """

    id: int
    group: int
    state: PathState
    error: int
    file: FoundFile | None
    bytes: int
    waited_bytes: int
    held: bool
    begin_ns: int
    opened_ns: int
    end_ns: int
    probe: PathProbe | None

    @property
    def waited(self) -> bool:
        """Whether a part of it was not in the page cache."""
        return self.waited_bytes > 0


def _done(r: Any) -> PathDone:
    """Of a struct up_path_result."""
    state = _STATES[r.state]
    looks = [Look(int(r.look_waits[i]), int(r.look_ns[i])) for i in range(_lib.UP_LOOKS)]
    cold, cold_again, reopened, reopened_again, status = looks
    row = file_systems.known(int(r.file_system))
    probe = PathProbe(cold, cold_again, reopened, reopened_again, status, bool(r.mappable), row)
    return PathDone(
        id=int(r.id),
        group=int(r.group),
        state=state,
        error=int(r.error),
        file=FoundFile(*map(int, (r.device, r.inode, r.size_bytes, r.mtime_ns)))
        if r.inode
        else None,
        bytes=int(r.bytes),
        waited_bytes=int(r.waited_bytes),
        held=bool(r.held),
        begin_ns=int(r.begin_ns),
        opened_ns=int(r.opened_ns),
        end_ns=int(r.end_ns),
        probe=probe if state is PathState.DONE and status.ns else None,
    )


class KnownStatus(NamedTuple):
    """Of what a name stands for; ``mode``: of stat(2)."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    mode: int


def known_status(path: str) -> KnownStatus:
    """stat(2) of what somebody has just opened, from what the kernel knows: its file system is not
    asked again. Raises OSError."""
    status = _ffi.new("struct up_path_status *")
    _checked(_lib.up_path_known_status(os.fsencode(path), status), path)
    return KnownStatus(
        int(status.device), int(status.inode), int(status.size_bytes), int(status.mtime_ns),
        int(status.mode),
    )  # fmt: skip


class PathReader:
    """C threads that read files by name. No method waits for storage.

    Each device that is being read from has ``threads`` of its own: one whose server does not answer
    holds up nobody who reads elsewhere. Descriptors: two for each thread, and the held ones.
    """

    def __init__(self, threads: int = THREADS) -> None:
        """Threads are made when there is something to read. Raises OSError (EMFILE)."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if allowed == resource.RLIM_INFINITY:
            allowed = HELD_SHARE * HELD_MOST
        held_most = min(HELD_MOST, allowed // HELD_SHARE)
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

        def make() -> Any:
            pointer = _ffi.new("struct up_paths **")
            ret = _lib.up_paths_create(pointer, threads, held_most, self.fileno())
            _checked(ret, "reading threads")
            return pointer[0]

        self._crews = Crews(make)
        self._request = _ffi.new("struct up_path_request *")
        self._out = _ffi.new("struct up_path_result[]", RESULTS_AT_ONCE)
        self._directories: Counter[int] = Counter()  # requests by their dir_fd
        self._leaving: set[int] = set()  # of those, to be closed with the last

    def fileno(self) -> int:
        """An event descriptor that is readable when there is something to reap. Raises OSError
        (EBADF) once it is closed."""
        if self._event_fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._event_fd

    def submit(self, request: PathRequest) -> bool:
        """Queue it. False: the device's queue is full, there can be no threads for it, or too many
        others are being read from.

        Raises ValueError for a name with a zero byte in it, OverflowError for a number that is
        negative or too large.
        """
        name, r = os.fsencode(request.name), self._request
        if b"\0" in name:
            raise ValueError(f"the file name {name!r} has a zero byte in it")
        device, inode = request.expected or (0, 0)
        numbers = [number for one in request.ranges for number in one]
        r.id, r.group, r.device, r.inode = request.id, request.group, device, inode
        r.most_bytes, r.directory_fd = request.most_bytes, request.dir_fd
        r.kind = _lib.UP_PATH_PROBE if request.probe else _lib.UP_PATH_READ
        r.method, r.hold, r.follow = request.method, request.hold, request.follow
        r.cached_waits = request.cached_waits
        ranges, text = _ffi.new("uint64_t[]", numbers), _ffi.new("char[]", name)
        r.ranges, r.range, r.name = len(request.ranges), ranges, text
        if not self._crews.submit(device, lambda crew: int(_lib.up_paths_submit(crew, r))):
            return False
        if request.dir_fd >= 0:
            self._directories[request.dir_fd] += 1
        return True

    def withdraw(self, group: int) -> int:
        """Take back the requests of a group that no thread has begun: how many. They are reaped as
        WITHDRAWN."""
        return self._withdraw(_lib.UP_PATH_BY_GROUP, group)

    def withdraw_one(self, id_: int) -> bool:
        """Take back one request, as withdraw(). False: it was begun."""
        return self._withdraw(_lib.UP_PATH_BY_ID, id_) > 0

    def _withdraw(self, by: int, number: int) -> int:
        return sum(_lib.up_paths_withdraw(crew, by, number) for crew in self._crews.busy)

    def release(self, id_: int, after_ns: int = 0) -> None:
        """Hold the file of a request for so long and no more; if it has not been read yet, not at
        all."""
        self._release(_lib.UP_PATH_BY_ID, id_, after_ns)

    def release_group(self, group: int) -> None:
        """The same of all of a group, now."""
        self._release(_lib.UP_PATH_BY_GROUP, group, 0)

    def _release(self, by: int, number: int, after_ns: int) -> None:
        for crew in self._crews.all:
            _lib.up_paths_release(crew, by, number, after_ns)

    def close_directory(self, fd: int) -> None:
        """Close a directory's descriptor: now, or after the last request that is relative to it. No
        more such may come."""
        if self._directories[fd]:
            self._leaving.add(fd)
        else:
            del self._directories[fd]
            uffd.close_file(fd)

    def reap(self) -> list[PathDone]:
        """What is done since the last call, withdrawn requests included."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fileno(), 8)
        found: list[PathDone] = []

        def take(crew: Any) -> int:
            before = len(found)
            while n := int(_lib.up_paths_reap(crew, self._out, RESULTS_AT_ONCE)):
                for i in range(n):
                    found.append(_done(self._out[i]))
                    self._leave(int(self._out[i].directory_fd))
            return len(found) - before

        self._crews.reap(take)
        return found

    def _leave(self, dir_fd: int) -> None:
        """A request that was relative to it is over."""
        if dir_fd < 0:
            return
        self._directories[dir_fd] -= 1
        if not self._directories[dir_fd]:
            del self._directories[dir_fd]
            if dir_fd in self._leaving:
                self._leaving.remove(dir_fd)
                uffd.close_file(dir_fd)

    def cpu_seconds(self) -> float:
        """CPU time of the threads."""
        return sum(_lib.up_paths_cpu_ns(crew) for crew in self._crews.all) / 1e9

    def close(self) -> bool:
        """End the threads, close what is held, drop what was not reaped. False: some threads wait
        for storage; they, and fileno(), live until the process ends."""
        unfinished = [_lib.up_paths_destroy(crew) for crew in self._crews.dissolve()]
        if any(unfinished):
            return False
        for fd in self._leaving:
            uffd.close_file(fd)
        self._leaving.clear()
        self._directories.clear()
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1
        return True
