# SPDX-License-Identifier: Apache-2.0
"""Start profiles as files: whole or not at all, and nobody else's business."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.start_key import SUFFIX
from uffdprefetch.native.profiles import PROFILE_BYTES_MAX
from uffdprefetch.orders.start_profile import StartProfile, decode, encode

#: What is being written ends so.
_BESIDE = ".tmp"
#: No writer takes so long for 16 MiB.
_LEFT_SECONDS = 3600


def load(path: str) -> StartProfile:
    """Raises OSError, and UffdPrefetchError where the file is no profile."""
    # what lies there may be anything, a FIFO for instance
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UffdPrefetchError(f"{path}: it is no file")
        with open(fd, "rb", closefd=False) as file:
            return decode(file.read(PROFILE_BYTES_MAX + 1), path)
    finally:
        os.close(fd)


def store(path: str, profile: StartProfile) -> None:
    """Put it in the place of what lies there, for its user's eyes alone. Raises OSError."""
    directory = os.path.dirname(path)
    os.makedirs(directory, 0o700, exist_ok=True)
    _sweep(directory)
    beside = os.path.join(directory, f".{os.urandom(12).hex()}{_BESIDE}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(beside, flags, 0o600), "wb") as file:
            file.write(encode(profile))
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _sweep(directory: str) -> None:
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


@dataclass(frozen=True)
class StoredProfile:
    """A file of a directory of profiles; ``profile``: None where ``flaw`` says why it is none."""

    key: str
    path: str
    bytes: int
    mtime_ns: int
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
    size = mtime_ns = 0
    try:
        status = os.stat(path)
        size, mtime_ns = status.st_size, status.st_mtime_ns
        return StoredProfile(key, path, size, mtime_ns, load(path))
    except UffdPrefetchError as error:
        return StoredProfile(key, path, size, mtime_ns, None, str(error).removeprefix(f"{path}: "))
    except OSError as error:
        return StoredProfile(key, path, size, mtime_ns, None, os.strerror(error.errno or 0))
