# SPDX-License-Identifier: Apache-2.0
"""LMDB environments that are read: one for each database and process.

py-lmdb opens a database once in a process, which counts what a forked child has of its parent, and
of which the child may not go on using it. So all data sets of a process share one, and a child
closes what it has inherited before it opens its own.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError, pip_install

from .layout import META

_lock = threading.Lock()
#: (device, inode) of the data file -> process that has opened it, environment, its database META.
_open: dict[tuple[int, int], tuple[int, Any, Any]] = {}
#: The data file of each path, as it was opened: whoever reads a record asks no server for it.
_files: dict[str, tuple[int, int]] = {}


def _renew_lock() -> None:
    """The parent's may be held by a thread that the child has not."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def library() -> Any:
    """py-lmdb. Raises UffdPrefetchError where it is missing."""
    try:
        import lmdb
    except ImportError:
        what = f"packed data sets need py-lmdb: {pip_install('lmdb')}"
        raise UffdPrefetchError(what) from None
    return lmdb


def environment(path: str) -> tuple[Any, Any]:
    """The environment of the packed database ``path`` in this process, and its database META.

    Raises UffdPrefetchError: 1 when it cannot be opened, 2 when it is no packed database.
    """
    with _lock:
        pid, env, meta = _open.get(_files.get(path, (-1, -1)), (0, None, None))
        if pid == os.getpid():
            return env, meta
    lmdb = library()
    key = _key(path)
    with _lock:
        _files[path] = key
        pid, env, meta = _open.get(key, (0, None, None))
        if pid == os.getpid():
            return env, meta
        if env is not None:
            del _open[key]
            env.close()
        try:
            env = lmdb.open(path, readonly=True, lock=False, max_dbs=1, max_spare_txns=16)
        except lmdb.Error as error:
            raise UffdPrefetchError(f"{path}: no LMDB that can be read: {error}", EXIT_USAGE) from (
                None
            )
        size, needed = os.stat(os.path.join(path, "data.mdb")).st_size, pages_bytes(env)
        if size < needed:  # a page that is not there would end the process (SIGBUS)
            env.close()
            raise UffdPrefetchError(
                f"{path}: cut off: {size} of {needed} bytes are there: copy or pack it again",
                EXIT_USAGE,
            )
        try:
            meta = env.open_db(META, create=False)
        except lmdb.Error:
            env.close()
            raise UffdPrefetchError(
                f"{path}: an LMDB that `uffdprefetch pack` has not packed", EXIT_USAGE
            ) from None
        _open[key] = os.getpid(), env, meta
        return env, meta


def pages_bytes(env: Any) -> int:
    """How large the file of an environment is with all pages that it may read."""
    return int((env.info()["last_pgno"] + 1) * env.stat()["psize"])


def look_again(path: str) -> None:
    """There may be another database at a path than when it was opened: the next environment() of
    it asks."""
    with _lock:
        _files.pop(path, None)


def close(path: str) -> None:
    """Close this process's environment of a database, if it has one: whoever reads opens it anew.
    No other thread may be reading."""
    with _lock:
        _, env, _ = _open.pop(_key(path), (0, None, None))
        if env is not None:
            env.close()


def _key(path: str) -> tuple[int, int]:
    try:
        status = os.stat(os.path.join(path, "data.mdb"))
    except OSError as error:
        raise UffdPrefetchError(f"cannot read {path}: {error.strerror}") from None
    return status.st_dev, status.st_ino
