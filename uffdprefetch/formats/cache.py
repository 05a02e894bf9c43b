# SPDX-License-Identifier: Apache-2.0
"""Cache of indices, shared by a node's processes: files in the runtime directory, mapped by all.

``index/KEY.idx`` under the runtime directory (mode 0700), where KEY is a hash of the file's device,
inode, size and mtime and of the options. Its maker holds a lock; the others wait and map it. On any
error a process makes its own, never a wrong one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from uffdprefetch import __version__
from uffdprefetch.base import rundir
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.formats import stored
from uffdprefetch.formats.detect import data_file, open_index, read_steady
from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.reader import FileReader

DIRECTORY = "index"
#: Bytes of all files; the least recently used are removed. Often a tmpfs, so it is memory.
BUDGET_BYTES = 2 << 30
#: Wait for the maker, which may be slow or stopped; then a process makes its own.
WAIT_SECONDS = 600.0
_WAIT_STEP_SECONDS = 0.02
#: The index of a file modified this recently is not cached: another write may leave the same mtime
#: (clock tick; some file systems have whole seconds).
_FRESH_NS = 2_000_000_000
_LOCKS = 64


def open_cached(
    path: str | os.PathLike[str],
    wanted: str | None = None,
    options: FormatOptions | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    budget_bytes: int = BUDGET_BYTES,
    wait_seconds: float = WAIT_SECONDS,
) -> RecordIndex:
    """As detect.open_index(), shared by all processes of this user on this node.

    Raises as open_index(). With ``options.verify`` it is read again and not shared.
    """
    options = options or FormatOptions()
    if options.verify:
        return open_index(path, wanted, options)
    name = data_file(path)
    with FileReader(name) as reader:
        stamp = reader.stamp()
        key = _key(stamp, wanted, options)
        directory = _directory(environ)
        if directory is None or abs(time.time_ns() - stamp[3]) < _FRESH_NS:
            return read_steady(reader, name, wanted, options)
        target = os.path.join(directory, _name(key))
        found = _used(target, key)
        if found is not None:
            return found
        with _locked(directory, target, wait_seconds) as locked:
            found = _used(target, key)  # made by another while we waited
            if found is not None:
                return found
            index = read_steady(reader, name, wanted, options)
            if locked and _store(target, key, index, budget_bytes):
                # the shared pages instead of our own
                return stored.read(target, key) or index
            return index


def _key(
    stamp: tuple[int, int, int, int], wanted: str | None, options: FormatOptions
) -> dict[str, Any]:
    device, inode, size_bytes, mtime_ns = stamp
    return {
        "version": __version__,
        "device": device,
        "inode": inode,
        "size_bytes": size_bytes,
        "mtime_ns": mtime_ns,
        "wanted": wanted,
        "options": asdict(replace(options, verify=False)),
    }


def _name(key: Mapping[str, Any]) -> str:
    text = json.dumps(key, sort_keys=True).encode()
    return f"{hashlib.sha256(text).hexdigest()[:32]}.idx"


def _directory(environ: Mapping[str, str] | None) -> str | None:
    """The directory, made if missing; None when it cannot be made or trusted."""
    try:
        path = os.path.join(rundir.runtime_directory(environ), DIRECTORY)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        rundir.check(path, os.geteuid())
    except (OSError, UffdPrefetchError):
        return None
    return path


def _used(target: str, key: Mapping[str, Any]) -> RecordIndex | None:
    """The stored index, if valid; its mtime becomes the time of last use."""
    found = stored.read(target, key)
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(target, follow_symlinks=False)
    return found


# ---- one at a time ------------------------------------------------------------------------------


def _lock_file(directory: str, target: str) -> int:
    """A descriptor of an index's lock file. Several indices share one, so none is ever removed."""
    number = int(os.path.basename(target)[:8], 16) % _LOCKS
    path = os.path.join(directory, f"lock-{number}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def _locked(directory: str, target: str, wait_seconds: float) -> Iterator[bool]:
    """Hold the lock of an index; False: timed out, or no locks here."""
    try:
        fd = _lock_file(directory, target)
    except OSError:
        yield False
        return
    try:
        yield _lock(fd, wait_seconds)
    finally:
        os.close(fd)


def _lock(fd: int, wait_seconds: float) -> bool:
    end = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_WAIT_STEP_SECONDS)
        except OSError:
            return False


# ---- storing ------------------------------------------------------------------------------------


def _store(target: str, key: Mapping[str, Any], index: RecordIndex, budget_bytes: int) -> bool:
    """Store it under the lock of ``target``; returns success."""
    part = target.removesuffix(".idx") + ".part"
    try:
        room_bytes = budget_bytes - stored.file_bytes(key, index)
        if room_bytes < 0:
            return False
        _make_room(os.path.dirname(target), target, room_bytes)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)  # of a killed process
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(part, flags, 0o600)
        try:
            stored.write(fd, key, index)
        finally:
            os.close(fd)
        os.rename(part, target)
        return True
    except OSError:  # ENOSPC, most likely
        with contextlib.suppress(OSError):
            os.unlink(part)
        return False


def _make_room(directory: str, target: str, room_bytes: int) -> None:
    """Remove the least recently used ones, but for ``target``, until the rest fits."""
    found = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            if name.endswith(".part"):
                _remove_abandoned(directory, path)
            elif name.endswith(".idx") and path != target:
                status = os.lstat(path)
                found.append((status.st_mtime_ns, path, status.st_size))
    total_bytes = sum(size for _, _, size in found)
    for _, path, size in sorted(found):
        if total_bytes <= room_bytes:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)  # mappings of it stay valid
            total_bytes -= size


def _remove_abandoned(directory: str, part: str) -> None:
    """Remove a half-written one, unless its lock is held. Raises OSError."""
    fd = _lock_file(directory, part)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(part)
    finally:
        os.close(fd)
