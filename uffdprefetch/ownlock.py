# SPDX-License-Identifier: Apache-2.0
"""The directory of the ranks' own LMDB lock files (`wrap --ownlock`; [Stanovnik] section 4.2).

csrc/job/lock.c makes the files: one for each rank and data file, for environments opened
read-only. All
launchers of a job and node share the directory; each holds a shared lock on a file in it, so that
the last one to leave knows, whatever became of the others and of the service.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref

from uffdprefetch.base import rundir
from uffdprefetch.base.config import LOCKS_VARIABLE
from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError

VARIABLE = LOCKS_VARIABLE
SUFFIX = ".locks"
_USERS = "users"
#: Attempts when others remove the directory between our mkdir and our lock.
_TRIES = 100


class OwnLocks:
    """A launcher's share of the directory; leave() gives it up."""

    def __init__(self, directory: str, users_fd: int) -> None:
        self.directory = directory
        # also when the interpreter ends: a launcher may fail after this and before its job
        self._leave = weakref.finalize(self, _leave, directory, users_fd)

    @classmethod
    def enter(cls, directory: str) -> OwnLocks:
        """Make the directory (mode 0700), or join its users.

        Raises UffdPrefetchError (125) when it cannot be made or must not be trusted.
        """
        _sweep(os.path.dirname(directory))
        for _ in range(_TRIES):
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
                rundir.check(directory, os.geteuid())
                fd = _hold(directory, fcntl.LOCK_SH)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UffdPrefetchError(
                    f"no directory for the ranks' lock files: {directory}: {error.strerror}",
                    EXIT_OURS,
                ) from None
            if fd is not None:
                return cls(directory, fd)
        raise UffdPrefetchError(f"somebody keeps removing {directory}", EXIT_OURS)

    def leave(self) -> None:
        """Give it up; the last one removes it."""
        self._leave()


def _leave(directory: str, users_fd: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(directory)
    os.close(users_fd)


def _hold(directory: str, how: int) -> int | None:
    """Open and lock the users' file; None when it was removed meanwhile. Raises OSError."""
    path = os.path.join(directory, _USERS)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, how)
        there, ours = os.stat(path), os.fstat(fd)
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
            return fd
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _remove(directory: str) -> None:
    """Remove the directory, whose users' file is locked, that file last. Raises OSError."""
    for name in sorted(os.listdir(directory), key=lambda name: name == _USERS):
        os.unlink(os.path.join(directory, name))
    os.rmdir(directory)


def _sweep(parent: str) -> None:
    """Remove directories left by killed launchers of this node."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            directory = os.path.join(parent, name)
            ours = name.endswith(SUFFIX) and rundir.is_of_node(name[: -len(SUFFIX)])
            if not ours or not os.path.exists(os.path.join(directory, _USERS)):
                continue
            with contextlib.suppress(OSError):
                fd = _hold(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if fd is not None:
                    with contextlib.suppress(OSError):
                        _remove(directory)
                    os.close(fd)
