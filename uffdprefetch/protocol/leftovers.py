# SPDX-License-Identifier: Apache-2.0
"""The files beside a service's socket: who holds them, and their removal when nobody does.

Whoever needs one of them by its name holds a lock (flock) on it or on the service's lock file, and
the kernel drops a lock with its holder, however that ends. So what can be locked is nobody's: the
service removes its files when it ends, the launcher what is left when the service was killed, and
the next service of the user on the node what is left when all of them were (docs/slurm.md).
"""

from __future__ import annotations

import fcntl
import os
import time

from uffdprefetch.base import claims
from uffdprefetch.job.messages import PLAN_SUFFIX as PLAN
from uffdprefetch.protocol.start_log import SUFFIX as STARTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: Held by the service as long as it serves: the election, and the socket and the plans' directory.
#: It inherits it from the launcher that starts it. Empty while it starts, then marked.
LOCK = ".lock"
#: Locks of the launcher that has started the recorder, and of the one that shows the live view.
TRACE, LIVE = ".trace", ".live"
LOG = ".log"
#: Of a cluster's convener: temporary files of the MPI that it starts, and the agent that replaces
#: ssh.
MPI, AGENT = ".mpi", ".rsh"
#: Of the replay of a start (launch/replay.py): beside a run's socket the lock of the launcher that
#: has replayed it, beside a key's name that of the replay itself.
REPLAY = ".replay"
#: The socket's name while its launcher looks whether it is in use (launch/service.py).
AWAY = ".away"
_SUFFIXES = (LOCK, AWAY, PLAN, TRACE, LIVE, LOG, MPI, AGENT, REPLAY, STARTS)
#: Age to which a log that is not empty is kept, to be read.
LOG_SECONDS = 24 * 3600.0


def hold(path: str) -> int | None:
    """The lock file ``path``, made where it is missing: its descriptor, locked; None when somebody
    else holds it. Raises OSError."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                os.ftruncate(fd, 0)  # the mark of a service that was killed
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the last holder has just removed it: this is not the one others see


def unlink(path: str) -> None:
    """Remove it, if it can be."""
    try:
        os.unlink(path)
    except OSError:
        pass


def release(path: str, fd: int) -> None:
    """Remove a lock file that we hold, and let it go."""
    unlink(path)
    os.close(fd)


def make_names(socket: str, plan: bool) -> None:
    """Remove what another service has left, and make the directory of announced orders (where
    ``plan``). For whoever has just got the lock. Raises OSError."""
    remove_plan(socket)
    for suffix in ("", AWAY, STARTS):
        unlink(socket + suffix)
    if plan:
        os.mkdir(socket + PLAN, 0o700)


def remove_plan(socket: str) -> None:
    """Remove the directory of announced orders, if it is there."""
    try:
        os.rmdir(socket + PLAN)
    except FileNotFoundError:
        pass
    except OSError:
        import shutil

        shutil.rmtree(socket + PLAN, ignore_errors=True)


def remove_names(socket: str, lock_fd: int) -> None:
    """Remove a service's names, its lock last. For whoever holds the lock."""
    remove_plan(socket)
    remove_mpi(socket)
    for suffix in ("", AWAY, STARTS):
        unlink(socket + suffix)
    release(socket + LOCK, lock_fd)


def remove_mpi(socket: str) -> None:
    """Remove what a convener that was killed has left."""
    unlink(socket + AGENT)
    if os.path.lexists(socket + MPI):
        import shutil

        shutil.rmtree(socket + MPI, ignore_errors=True)


def mark(fd: int) -> None:
    """Make an empty file one that is not: by its length alone, for which a full directory has
    room."""
    os.ftruncate(fd, 1)


def show_holder(lock_fd: int) -> None:
    """By the process that becomes the service, of the lock file that it holds: from now on F_GETLK
    tells its pid, each in their own PID namespace (csrc/job/ptracer.c). It must close no other
    descriptor of the file: that ends such a lock."""
    try:
        fcntl.lockf(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass  # a file system without locks of this kind: nobody is told


def say_ready(lock_fd: int) -> None:
    """By the service: from now on it answers whoever connects."""
    mark(lock_fd)


def is_starting(socket: str) -> bool:
    """Whether a service has the lock that has not said say_ready() yet: connections wait for it."""
    try:
        return os.stat(socket + LOCK).st_size == 0
    except OSError:
        return False


def _of_anybody(path: str) -> bool:
    """Whether a file is there and locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _worth_keeping(log: str) -> bool:
    try:
        status = os.stat(log)
    except OSError:
        return False
    return status.st_size > 0 and time.time() - status.st_mtime < LOG_SECONDS


def tidy(socket: str) -> bool:
    """Remove what is left beside ``socket``, unless a service serves there; whether none does."""
    try:
        lock_fd = hold(socket + LOCK)
    except OSError:
        return True  # the directory itself is gone, or is not to be written
    if lock_fd is None:
        return False
    for suffix in (TRACE, LIVE, REPLAY):
        if not _of_anybody(socket + suffix):
            unlink(socket + suffix)
    if not _worth_keeping(socket + LOG):
        unlink(socket + LOG)
    remove_names(socket, lock_fd)
    claims.tidy(os.path.dirname(socket))
    return True


def _socket_of(name: str) -> str | None:
    """The socket's name that a file's name begins with; None for what is none of these files."""
    for suffix in ("", *_SUFFIXES):
        if name.endswith(".sock" + suffix):
            return name[: len(name) - len(suffix)]
    return None


def sweep(own_socket: str, is_of_this_node: Callable[[str], bool]) -> None:
    """Remove what services and launchers of this node left beside ``own_socket`` that were killed.

    ``is_of_this_node`` tells by a socket's name: the directory may be one that nodes share, and
    another node's locks are not always seen.
    """
    directory, own = os.path.split(own_socket)
    try:
        found = {_socket_of(name) for name in os.listdir(directory)} - {None, own}
    except OSError:
        return
    for name in sorted(filter(None, found)):
        if is_of_this_node(name) and _is_litter(os.path.join(directory, name)):
            tidy(os.path.join(directory, name))
    claims.tidy(directory)


def _is_litter(socket: str) -> bool:
    """Whether more is there than a log that is kept."""
    names = [socket + suffix for suffix in ("", *_SUFFIXES) if suffix != LOG]
    return any(map(os.path.lexists, names)) or not _worth_keeping(socket + LOG)
