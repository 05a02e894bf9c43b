# SPDX-License-Identifier: Apache-2.0
"""Start profiles as files: whole or not at all, and nobody else's business."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.start_key import SUFFIX
from uffdprefetch.native.profiles import PROFILE_BYTES_MAX
from uffdprefetch.orders.start_profile import StartProfile, decode, encode

#: Beside a profile KEY.upl: what starts so, in a line for people, KEY.txt; so much of it is read.
_OF, _OF_BYTES = ".txt", 4096
#: What is being written ends so.
_BESIDE = ".tmp"
#: No writer takes so long for 16 MiB.
_LEFT_SECONDS = 3600
#: The lock of a directory of profiles. Another writer has it for as long as a merge takes, 0.1 s;
#: one that holds it for longer has been stopped, or its node is lost.
_LOCK, _LOCKED_MOST_SECONDS, _LOOK_SECONDS = ".lock", 2.0, 0.02


def load(path: str) -> StartProfile:
    """Raises OSError, and UffdPrefetchError where the file is no profile."""
    return decode(_read(path, PROFILE_BYTES_MAX + 1), path)


def _read(path: str, most_bytes: int) -> bytes:
    """The beginning of a file, whose time of access stays: that tells when a replay has read it."""
    # what lies there may be anything, a FIFO for instance
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(path, flags | os.O_NOATIME)
    except PermissionError:  # it is not ours
        fd = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UffdPrefetchError(f"{path}: it is no file")
        with open(fd, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(fd)


def described(path: str) -> str:
    """What a profile is of, in a line; "": nobody has said."""
    try:
        text = _read(_beside(path), _OF_BYTES)
    except (OSError, UffdPrefetchError):
        return ""
    return os.fsdecode(text).partition("\n")[0]


def _beside(path: str) -> str:
    return path.removesuffix(SUFFIX) + _OF


def store(path: str, profile: StartProfile, of: str = "", mode: int = 0o600) -> None:
    """Put it in the place of what lies there, for its user's eyes alone, or with this ``mode``;
    ``of``: what starts so. Raises OSError."""
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    sweep(os.path.dirname(path))
    write_whole(path, (encode(profile),), mode)
    if of:
        with contextlib.suppress(OSError):  # for people alone
            write_whole(_beside(path), (os.fsencode(f"{of}\n"),), mode)


@contextlib.contextmanager
def only_writer(directory: str) -> Iterator[None]:
    """Of those that read what a profile is, and write what it becomes, one at a time; the kernel
    releases who dies. Where there are no locks, or one is held for too long, as without. For a
    thread of its own. Raises OSError where there is no such directory, and none can be made."""
    os.makedirs(directory, 0o700, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(directory, _LOCK), flags, 0o600)
    try:
        _lock(fd)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    until = time.monotonic() + _LOCKED_MOST_SECONDS
    while time.monotonic() < until:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_SECONDS)
        except OSError:  # ENOLCK, EOPNOTSUPP: this file system has none
            return
        else:
            return


def write_whole(path: str, parts: Iterable[bytes | array[int]], mode: int = 0o600) -> None:
    """A file, all of it or nothing. Raises OSError."""
    directory = os.path.dirname(path)
    beside = os.path.join(directory, f".{os.urandom(12).hex()}{_BESIDE}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(beside, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), mode)
            for part in parts:
                file.write(part)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def sweep(directory: str) -> None:
    """Remove what writers have left that were killed."""
    for name in os.listdir(directory):
        if name.startswith(".") and name.endswith(_BESIDE):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                if time.time() - os.stat(path).st_mtime > _LEFT_SECONDS:
                    os.unlink(path)


def remove(path: str) -> None:
    """Raises OSError."""
    os.unlink(path)
    with contextlib.suppress(OSError):
        os.unlink(_beside(path))


@dataclass(frozen=True)
class StoredProfile:
    """A file of a directory of profiles; ``profile``: None where ``flaw`` says why it is none.
    ``mtime_ns``: when it was written, after a start was recorded; ``used_ns``: when it was written
    or read last, as far as the file system keeps that; ``of``: see described()."""

    key: str
    path: str
    bytes: int
    mtime_ns: int
    used_ns: int
    of: str
    profile: StartProfile | None
    flaw: str = ""


def stored(directory: str) -> Iterator[StoredProfile]:
    """All that lie in a directory, by name; none where there is none. Raises OSError."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    for name in names:
        if name.endswith(SUFFIX) and not name.startswith("."):
            yield _stored(os.path.join(directory, name), name.removesuffix(SUFFIX))


def _stored(path: str, key: str) -> StoredProfile:
    size = mtime_ns = used_ns = 0
    profile, flaw = None, ""
    try:
        status = os.stat(path)
        size, mtime_ns = status.st_size, status.st_mtime_ns
        used_ns = max(mtime_ns, status.st_atime_ns)
        profile = load(path)
    except UffdPrefetchError as error:
        flaw = str(error).removeprefix(f"{path}: ")
    except OSError as error:
        flaw = os.strerror(error.errno or 0)
    return StoredProfile(key, path, size, mtime_ns, used_ns, described(path), profile, flaw)
