# SPDX-License-Identifier: Apache-2.0
"""The files that a job reads: put out of the page cache before a run, counted after it.

posix_fadvise(POSIX_FADV_DONTNEED) wants no more than that the file may be read. It leaves what
somebody has mapped, what is not written back yet, and all of a file system that is memory itself.
Whether it has done its work is asked of the kernel, or, of another user's file, of which the kernel
tells nothing, seen from a few reads of our own: a thread that reads a page that is not cached waits
for it, so its voluntary context switches (getrusage(2), ru_nvcsw) tell.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import resource
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from uffdprefetch.base import file_systems, procfs
from uffdprefetch.compare.figures import Why
from uffdprefetch.native import residency
from uffdprefetch.native.syscalls import PAGE_BYTES

#: Paths that are not dropped from the cache: programs, libraries and configuration where the FHS
#: has them; shared libraries and Python modules anywhere.
_PROGRAM = re.compile(
    r"/(usr/(local/)?)?(bin|sbin|lib(32|64|x32|exec)?)/.*|/(etc|proc|sys)/.*"
    r"|.*\.(so(\.[0-9]+)*|py|pyc)|.*/lib/python3[^/]*/.*|.*/pyvenv\.cfg"
)
#: Files below this size may be read unseen between two looks at a job (16 MiB take 16 ms at 1
#: GB/s), and `wrap` tells only of larger ones by default (--min-size). So with each that is seen,
#: those of its suffix in its folder are dropped, if that has at most NEIGHBOURS_MAX entries.
SMALL_BYTES, NEIGHBOURS_MAX = 16 << 20, 10_000
#: Time without progress after which dropping is given up, and the interval of looks. Readahead of a
#: reader that has just ended arrives after the drop; dirty pages go once they are written.
PATIENCE_SECONDS, LOOK_SECONDS = 1.0, 0.02
#: Sampled pages of files whose residency the kernel does not tell: of one file, and of all, to see
#: whether they are cold; of all, to estimate the cached share (to 3 %: 1/2 sqrt(1/256)).
PLACES_COLD, PLACES_COLD_ALL, PLACES_CACHED = 4, 64, 256
#: Most processes named that have a file mapped.
HOLDERS_MAX = 3


class Left(NamedTuple):
    """A file that did not become cold. ``left_bytes``: of it in the page cache; None: not known.
    ``holders``: processes that have it mapped, as far as they can be seen."""

    path: str
    size_bytes: int
    left_bytes: int | None
    why: Why
    holders: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "why": self.why.name.lower(), "holders": list(self.holders)}


class _Patience:
    """How long it is waited for something to become less."""

    def __init__(self) -> None:
        self._least: float = math.inf
        self._until = 0.0

    def is_over(self, now_left: float) -> bool:
        now = time.monotonic()
        if now_left < self._least:
            self._least, self._until = now_left, now + PATIENCE_SECONDS
        return now > self._until


class Cached(NamedTuple):
    """Bytes in the page cache."""

    total_bytes: int
    is_estimated: bool


def is_data(path: str) -> bool:
    """Whether a file by this name is none of a program."""
    return _PROGRAM.fullmatch(path) is None


class Files:
    """The files that a job was seen to read."""

    def __init__(
        self, named: Iterable[str] = (), counted: Callable[[int], None] = lambda files: None
    ) -> None:
        """``named``: see add_named(); ``counted`` is told how many files are found, dropped or
        looked at so far: of many, far away, each of these takes minutes."""
        self._counted = counted
        self._paths: dict[str, int] = {}  # to the size when it was added
        self._elsewhere: set[str] = set()
        self._folders: set[tuple[str, str]] = set()
        self.add_named(named)

    def add_named(self, named: Iterable[str]) -> None:
        """Add files, and of folders all files below them."""
        for name in named:
            if os.path.isdir(name):
                for folder, _, names in os.walk(name):
                    self._add_all(os.path.join(folder, one) for one in names)
            else:
                self._add_all([name])

    @property
    def paths(self) -> list[str]:
        """By path."""
        return sorted(self._paths)

    @property
    def size_bytes(self) -> int:
        """The size of all of them."""
        return sum(self._paths.values())

    def _add(self, path: str, begin: float = 0.0) -> bool:
        """Whether it is new, and older than that; what is no regular file, or empty, is left
        out."""
        try:
            status = os.stat(path)
        except OSError:
            return False
        if path in self._paths or not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        self._paths[path] = status.st_size
        return begin == 0.0 or status.st_ctime < begin

    def _add_all(self, paths: Iterable[str]) -> None:
        for path in map(os.path.abspath, paths):
            self._add(path)
            self._counted(len(self._paths))

    def saw(self, paths: Iterable[str], elsewhere: Iterable[str] = (), begin: float = 0.0) -> int:
        """A job has these. The bytes of those that were not known, though they were there at
        ``begin`` (seconds since the epoch), and not changed since. ``elsewhere``: those that were
        not there by their names when they were seen (another mount namespace)."""
        self._elsewhere.update(filter(is_data, elsewhere))
        found = 0
        for path in filter(is_data, paths):
            found += self._paths[path] if self._add(path, begin) else 0
            if 0 < self._paths.get(path, 0) < SMALL_BYTES:
                self._add_neighbours(path)
        return found

    def _add_neighbours(self, path: str) -> None:
        folder, suffix = os.path.dirname(path), os.path.splitext(path)[1]
        if not suffix or (folder, suffix) in self._folders:
            return
        self._folders.add((folder, suffix))
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(folder) if name.endswith(suffix)]
            if len(names) <= NEIGHBOURS_MAX:
                self._add_all(os.path.join(folder, name) for name in names)

    def drop(self) -> list[Left]:
        """Put all of them out of the page cache; those that are not out in the end."""
        left = {path: Left(path, 0, None, Why.ELSEWHERE) for path in self._elsewhere}
        todo, untold, patience = self.paths, list[str](), _Patience()
        while True:
            held, remains = list[str](), 0
            for count, path in enumerate(todo, 1):
                self._counted(count)
                found = _dropped(path, untold)
                left.pop(path, None)
                if found is not None:
                    left[path] = found
                    remains += found.left_bytes or 0
                    held += [path] if found.why is Why.HELD else []
            todo = held
            if not todo or patience.is_over(remains):
                break
            time.sleep(LOOK_SECONDS)
        for path in _not_cold(sorted(set(untold), key=lambda path: -self._paths[path])):
            left[path] = Left(path, self._paths[path], None, Why.HELD)
        holders = _holders([one.path for one in left.values() if one.why is Why.HELD])
        return [one._replace(holders=holders.get(one.path, ())) for one in left.values()]

    def cached(self, estimates: bool = True) -> Cached:
        """Cached bytes of the files on file systems that do not count reads by process;
        ``estimates``: also of those whose residency the kernel does not tell."""
        total, untold = 0, list[tuple[str, int]]()
        for count, path in enumerate(self._paths, 1):
            self._counted(count)
            if counts_reads(path):
                continue
            with contextlib.suppress(OSError):
                found = residency.resident_bytes(path)
                size_bytes = os.stat(path).st_size
                if found is None:
                    untold.append((path, size_bytes))
                else:
                    total += min(found, size_bytes)
        return Cached(total + (_estimated(untold) if estimates else 0), bool(untold))


def counts_reads(path: str) -> bool:
    """Whether the kernel counts what is read of a file for who reads it (/proc/PID/io)."""
    try:
        return file_systems.at(path).counts_reads is True
    except OSError:
        return False


def _dropped(path: str, untold: list[str]) -> Left | None:
    """Drop a file, once; what of it is left. Where the kernel does not tell it is added to
    ``untold``."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None  # the job's own, for a time
    except OSError:
        return Left(path, 0, None, Why.REFUSED)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        if file_systems.at(fd).in_memory:
            return Left(path, status.st_size, status.st_size, Why.IN_MEMORY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        left_bytes = residency.resident_bytes_of(fd)
        if left_bytes is None:
            untold.append(path)
        return Left(path, status.st_size, left_bytes, Why.HELD) if left_bytes else None
    except OSError:
        return Left(path, 0, None, Why.REFUSED)
    finally:
        os.close(fd)


# ---- what the kernel does not tell ---------------------------------------------------------------


def _read_without_a_wait(path: str, offsets: Iterable[int]) -> int:
    """At how many of these offsets a page of the file is cached; those are read, and dropped."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # each is a page by itself
        cached = 0
        for offset in offsets:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            os.pread(fd, 1, offset)
            cached += resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw == before
            os.posix_fadvise(fd, offset, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
        return cached
    finally:
        os.close(fd)


def _not_cold(paths: Sequence[str]) -> list[str]:
    """Those of which something was still cached when they were read."""
    found, patience = [], _Patience()
    for path in paths[: PLACES_COLD_ALL // PLACES_COLD]:
        with contextlib.suppress(OSError):
            size_bytes = os.stat(path).st_size
            while size_bytes:
                places = {size_bytes * k // PLACES_COLD for k in range(PLACES_COLD)}
                if not _read_without_a_wait(path, sorted(places)):
                    break
                if patience.is_over(0):  # of all of them
                    found.append(path)
                    break
                time.sleep(LOOK_SECONDS)
                _dropped(path, [])
    return found


def _estimated(files: Sequence[tuple[str, int]], chance: Callable[[int], int] | None = None) -> int:
    """Bytes of these that are cached, from PLACES_CACHED pages of them, drawn by chance."""
    total = sum(size_bytes for _, size_bytes in files)
    if total == 0:
        return 0
    draw = chance or random.Random(total).randrange
    places = sorted(draw(total) for _ in range(PLACES_CACHED))
    cached, begin = 0, 0
    for path, size_bytes in files:
        mine = [place - begin for place in places if begin <= place < begin + size_bytes]
        begin += size_bytes
        if mine:
            with contextlib.suppress(OSError):
                cached += _read_without_a_wait(path, mine)
    return total * cached // PLACES_CACHED


def _holders(paths: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """By path, the processes that have these files mapped, as far as they can be seen."""
    numbers = dict[tuple[str, str], str]()  # of inode and name: by what a file has mounts differ
    for path in paths:
        with contextlib.suppress(OSError):
            numbers[str(os.stat(path).st_ino), os.path.basename(path)] = path
    found = dict[str, list[int]]()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc") if numbers else ())):
        lines = (line.split(None, 5) for line in (procfs.maps_text(pid) or "").split("\n"))
        keys = {(words[4], os.path.basename(words[5])) for words in lines if len(words) == 6}
        for key in keys & numbers.keys():
            found.setdefault(numbers[key], []).append(pid)
    return {path: tuple(pids[:HOLDERS_MAX]) for path, pids in found.items()}
