# SPDX-License-Identifier: Apache-2.0
"""The directory of the sockets, locks and logs of this user's services on this node.

It lies in a place where others may write (/tmp), so it is trusted only after a look: a directory,
not a symbolic link, ours, open to nobody else. Anything else is refused, never repaired: who could
prepare it can also change it between our repair and our use.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
from collections.abc import Mapping

from uffdprefetch.base.cgroup import own_mark
from uffdprefetch.base.errors import EXIT_CANNOT, EXIT_OURS, UffdPrefetchError
from uffdprefetch.base.identity import file_name_safe

#: sun_path holds 108 bytes with the final zero (linux/un.h).
MAX_SOCKET_PATH_BYTES = 107
#: The short form of a socket's name: 16 digits for job, node and group, 8 for the node alone.
_DIGEST = re.compile("[0-9a-f]{24}")


def _candidates(environ: Mapping[str, str], uid: int) -> list[str]:
    """Where it may lie, best first; the next one is taken where one cannot be made."""
    explicit = environ.get("UFFDPREFETCH_RUNDIR")
    if explicit:
        return [explicit]
    paths = []
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # On a compute node the variable often names the login node's directory: only if it is there,
    # and only if it is ours (`sudo`, `su` and setpriv keep another user's).
    if runtime.startswith("/") and _is_mine(runtime, uid):
        paths.append(os.path.join(runtime, "uffdprefetch"))
    # A TMPDIR that the batch script set need not exist on every node.
    for parent in dict.fromkeys((environ.get("TMPDIR") or "/tmp", "/tmp")):
        paths.append(os.path.join(parent, f"uffdprefetch-{uid}"))
    return paths


def _is_mine(path: str, uid: int) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == uid and os.access(path, os.W_OK)


def check(path: str, uid: int) -> None:
    """Raise UffdPrefetchError unless ``path`` is a directory of ``uid`` that nobody else enters."""

    def refuse(detail: str) -> UffdPrefetchError:
        return UffdPrefetchError(
            f"runtime directory {path} refused: {detail}; remove it or set UFFDPREFETCH_RUNDIR",
            EXIT_OURS,
        )

    try:
        status = os.lstat(path)
    except OSError as error:
        raise refuse(str(error.strerror)) from None
    if stat.S_ISLNK(status.st_mode):
        raise refuse("it is a symbolic link")
    if not stat.S_ISDIR(status.st_mode):
        raise refuse("it is not a directory")
    if status.st_uid != uid:
        raise refuse(f"it belongs to uid {status.st_uid}, we are {uid}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise refuse(f"its mode is {stat.S_IMODE(status.st_mode):04o}, others may enter")


def runtime_directory(environ: Mapping[str, str] | None = None) -> str:
    """The checked runtime directory, made if it was not there (mode 0700).

    Raises UffdPrefetchError (exit 125) when it cannot be made or must not be trusted.
    """
    environ = os.environ if environ is None else environ
    uid = os.geteuid()
    failures = []
    for candidate in _candidates(environ, uid):
        path = os.path.abspath(candidate)
        try:
            # mkdir does not follow a link in the last part, and what is there already is checked;
            # the umask can only take bits from 0700.
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            failures.append(f"{path}: {error.strerror}")
            continue
        check(path, uid)
        return path
    raise UffdPrefetchError(
        f"cannot make a runtime directory ({'; '.join(failures)});"
        " set UFFDPREFETCH_RUNDIR to a local directory of yours",
        EXIT_OURS,
    )


def existing_directories(environ: Mapping[str, str]) -> list[str]:
    """The runtime directories of ours that are there, best first; none is made.

    One that must not be trusted is passed over, unless UFFDPREFETCH_RUNDIR names it: then
    UffdPrefetchError (exit 1).
    """
    uid = os.geteuid()
    found = []
    for candidate in _candidates(environ, uid):
        path = os.path.abspath(candidate)
        if not os.path.lexists(path):
            continue
        try:
            check(path, uid)
        except UffdPrefetchError as error:
            if environ.get("UFFDPREFETCH_RUNDIR"):
                raise UffdPrefetchError(error.message, EXIT_CANNOT) from None
            continue
        found.append(path)
    return found


def socket_path(directory: str, key: str, node: str | None = None, group: str | None = None) -> str:
    """The path of the service's socket for a job's ``key``, at most 107 bytes long.

    The node's name is in it, since TMPDIR may lie on a file system that many nodes share, and the
    mark of the control group (cgroup.py; ours by default): KEY@NODE+MARK.sock. A name that is too
    long is replaced by its hash.
    """
    node = socket.gethostname() if node is None else node
    group = own_mark() if group is None else group
    name = f"{key}@{file_name_safe(node)}+{group}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:16] + _node_digest(node)
    for stem in (name, digest):
        path = os.path.join(directory, f"{stem}.sock")
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
    raise UffdPrefetchError(
        f"runtime directory {directory} is too long for a socket path"
        f" ({MAX_SOCKET_PATH_BYTES} bytes); set UFFDPREFETCH_RUNDIR to a shorter one",
        EXIT_OURS,
    )


def _node_digest(node: str) -> str:
    return hashlib.sha256(node.encode()).hexdigest()[:8]


def is_of_node(name: str, node: str | None = None) -> bool:
    """Whether a file's name is one that socket_path() makes on this node (or ``node``)."""
    node = socket.gethostname() if node is None else node
    stem, dot, _ = name.rpartition(".sock")
    key, at, rest = stem.rpartition("@")
    if at:
        return bool(dot and key) and rest.rpartition("+")[0] == file_name_safe(node)
    return bool(dot and _DIGEST.fullmatch(stem)) and stem.endswith(_node_digest(node))
