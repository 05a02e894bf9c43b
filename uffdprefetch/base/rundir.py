# SPDX-License-Identifier: Apache-2.0
"""The runtime directory: sockets, locks and logs of this user's services on this node.

Its parent may be world-writable (/tmp), so it is checked: a directory, no symbolic link, ours, mode
0700. Anything else is refused, never repaired: whoever could prepare it could also change it
between our repair and our use.
"""

from __future__ import annotations

import errno
import os
import stat

from uffdprefetch.base.cgroup import own_mark
from uffdprefetch.base.errors import EXIT_CANNOT, EXIT_OURS, UffdPrefetchError
from uffdprefetch.base.identity import file_name_safe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: sun_path has 108 bytes with the final zero (linux/un.h).
MAX_SOCKET_PATH_BYTES = 107
#: Hashed form of a socket's name: 16 digits for job, node and group, 8 for the node alone.
_DIGEST_CHARS = 24


def _candidates(environ: Mapping[str, str], uid: int) -> list[str]:
    """Candidate paths, best first; the first that can be made is used."""
    explicit = environ.get("UFFDPREFETCH_RUNDIR")
    if explicit:
        return [explicit]
    paths = []
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # On a compute node XDG_RUNTIME_DIR is often the login node's: only if it exists, and is ours
    # (`sudo`, `su` and setpriv keep another user's).
    if runtime.startswith("/") and _is_mine(runtime, uid):
        paths.append(os.path.join(runtime, "uffdprefetch"))
    # A batch script's TMPDIR need not exist on every node.
    for parent in dict.fromkeys((environ.get("TMPDIR") or "/tmp", "/tmp")):
        paths.append(os.path.join(parent, f"uffdprefetch-{uid}"))
    return paths


def _is_mine(path: str, uid: int) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == uid and os.access(path, os.W_OK)


def check(
    path: str, uid: int, what: str = "runtime directory", instead: str = "set UFFDPREFETCH_RUNDIR"
) -> None:
    """Raise UffdPrefetchError unless ``path`` is a directory of ``uid`` with mode 0700. ``what`` it
    is, and what to do ``instead``: for people."""

    def refuse(detail: str) -> UffdPrefetchError:
        return UffdPrefetchError(
            f"{what} {path} refused: {detail}; remove it or {instead}", EXIT_OURS
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
        mode = f"its mode is {stat.S_IMODE(status.st_mode):04o}, others may enter"
        raise UffdPrefetchError(
            f"{what} {path} refused: {mode}; chmod 700 it or {instead}", EXIT_OURS
        )


def runtime_directory(environ: Mapping[str, str] | None = None) -> str:
    """The checked runtime directory, made if missing (mode 0700).

    Raises UffdPrefetchError (exit 125) when none can be made, or trusted.
    """
    environ = os.environ if environ is None else environ
    uid = os.geteuid()
    failures = []
    refused: UffdPrefetchError | None = None
    for candidate in _candidates(environ, uid):
        path = os.path.abspath(candidate)
        try:
            # mkdir does not follow a link in the last component, and an existing one is checked;
            # the umask can only remove bits from 0700.
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            failures.append(f"{path}: {error.strerror}")
            continue
        try:
            check(path, uid)
        except UffdPrefetchError as error:
            refused = refused or error
            continue
        return path
    if refused:
        raise refused
    raise UffdPrefetchError(
        f"cannot make a runtime directory ({'; '.join(failures)});"
        " set UFFDPREFETCH_RUNDIR to a local directory of yours",
        EXIT_OURS,
    )


def why_unusable(directory: str, error: OSError) -> str:
    """The meaning of an error in the runtime directory (or elsewhere), with a remedy where the
    directory is full: of blocks, of files (inodes), or by the user's quota."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        name = errno.errorcode[error.errno]
        return (
            f"the runtime directory {directory} is full ({name}: {os.strerror(error.errno)}); make"
            " room there, or set UFFDPREFETCH_RUNDIR to another local directory of yours"
        )
    return str(error)


def existing_directories(environ: Mapping[str, str]) -> list[str]:
    """Our existing runtime directories, best first; none is made.

    One that must not be trusted is skipped, unless UFFDPREFETCH_RUNDIR names it: then
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

    KEY@NODE+MARK.sock: with the node's name, since TMPDIR may be shared by nodes, and the mark of
    the control group (cgroup.py; ours by default). A name that is too long is replaced by its hash.
    """
    node = os.uname().nodename if node is None else node
    group = own_mark() if group is None else group
    name = f"{key}@{file_name_safe(node)}+{group}"
    path = os.path.join(directory, f"{name}.sock")
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    path = os.path.join(directory, f"{_digest(name)[:16]}{_node_digest(node)}.sock")
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    raise UffdPrefetchError(
        f"runtime directory {directory} is too long for a socket path"
        f" ({MAX_SOCKET_PATH_BYTES} bytes); set UFFDPREFETCH_RUNDIR to a shorter one",
        EXIT_OURS,
    )


def lock_path(directory: str, key: str, group: str) -> str:
    """The path of a lock file that is called as the socket of socket_path() would be, on this node;
    it may be longer."""
    return os.path.join(directory, f"{key}@{file_name_safe(os.uname().nodename)}+{group}.sock")


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def _node_digest(node: str) -> str:
    return _digest(node)[:8]


def is_of_node(name: str, node: str | None = None) -> bool:
    """Whether a file's name is one of socket_path() on this node (or ``node``)."""
    node = os.uname().nodename if node is None else node
    stem, dot, _ = name.rpartition(".sock")
    key, at, rest = stem.rpartition("@")
    if at:
        return bool(dot and key) and rest.rpartition("+")[0] == file_name_safe(node)
    hashed = len(stem) == _DIGEST_CHARS and not stem.strip("0123456789abcdef")
    return bool(dot and hashed) and stem.endswith(_node_digest(node))
