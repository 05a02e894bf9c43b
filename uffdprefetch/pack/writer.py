# SPDX-License-Identifier: Apache-2.0
"""Writes a packed database: one writer, transactions of a bounded size.

What a transaction holds is on the disk when it ends (LMDB's default), so whatever ends the program
or the machine, the database is what it was after one of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable
from typing import Any

from uffdprefetch.base.errors import EXIT_CANNOT, EXIT_USAGE, UffdPrefetchError
from uffdprefetch.base.units import GIB, MIB
from uffdprefetch.data import layout
from uffdprefetch.data.environment import library, pages_bytes
from uffdprefetch.data.layout import Entry, PackDescription

#: Of one transaction: long writes for one fsync(), and no more than that is lost by a kill.
TRANSACTION_BYTES = 64 * MIB
#: Beside path and value: a file's nodes in both trees, and its objects here.
_ENTRY_BYTES = 512
#: From which errno LMDB makes EIO, where a write is cut short.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def data_file(path: str) -> str:
    return os.path.join(path, "data.mdb")


class PackWriter:
    """The one writer of the database ``path``. ``description``, ``dictionary``: what a new one is
    packed of, and what its values are compressed with; None: it is there, and goes on.

    Raises UffdPrefetchError: 1 when it cannot be written, 2 when another one writes it.
    """

    def __init__(
        self, path: str, description: PackDescription | None = None, dictionary: bytes = b""
    ) -> None:
        self.path = path
        self._lmdb = library()
        self._batch: list[tuple[int, Entry, bytes]] = []
        self._batch_bytes = 0
        #: The greatest key.
        self._last = b""
        #: Files that are in the database by now.
        self.written = 0
        try:
            os.makedirs(path, exist_ok=True)
            self._lock_fd = _locked(path)
            size_bytes = os.path.getsize(data_file(path))
            self._env = self._lmdb.open(
                path, map_size=size_bytes + GIB, max_dbs=1, lock=False, meminit=False, mode=0o644
            )
        except (OSError, self._lmdb.Error) as error:
            raise self._cannot(error, 0) from None
        self._meta: Any = None

        def change(transaction: Any) -> None:
            self._meta = self._env.open_db(layout.META, txn=transaction)
            if description is not None:
                self._put_meta(transaction, layout.SOURCE, description.encoded())
                self._put_meta(transaction, layout.DICTIONARY, dictionary)
            with transaction.cursor() as cursor:
                self._last = cursor.key() if cursor.last() else b""

        self._change(change, 0)

    def put(self, number: int, entry: Entry, value: bytes) -> None:
        """Take a file; it is in the database after flush(), or when a transaction is full."""
        self._batch.append((number, entry, value))
        self._batch_bytes += len(value) + len(entry.path) + _ENTRY_BYTES
        if self._batch_bytes >= TRANSACTION_BYTES:
            self.flush()

    def flush(self) -> None:
        """A transaction of all that was taken."""
        batch, size_bytes = self._batch, self._batch_bytes
        self._batch, self._batch_bytes = [], 0
        if batch:
            self._change(lambda transaction: self._put_all(transaction, batch), size_bytes)
            self.written += len(batch)

    def complete(self, description: PackDescription) -> None:
        """All files are there: the description, and the list of their paths."""
        self.flush()

        def change(transaction: Any) -> None:
            paths = list[bytes]()
            with transaction.cursor(self._meta) as cursor:
                for key, value in cursor:
                    if layout.number_of(key) is not None:
                        found = layout.payload(key, value, self.path)
                        paths.append(Entry.decoded(found).path)
            self._put_meta(transaction, layout.PATHS, layout.joined(paths))
            self._put_meta(transaction, layout.SOURCE, description.encoded())

        self._change(change, 0)

    def close(self) -> None:
        self._env.close()
        os.close(self._lock_fd)

    # ---- transactions

    def _put_all(self, transaction: Any, batch: list[tuple[int, Entry, bytes]]) -> None:
        for number, entry, value in batch:
            # in order: whole pages, not halves
            follows = entry.path > self._last
            transaction.put(entry.path, value, append=follows)
            if follows:
                self._last = entry.path
            self._put_meta(transaction, layout.number_key(number), entry.encoded())

    def _put_meta(self, transaction: Any, key: bytes, payload: bytes) -> None:
        transaction.put(key, layout.checked(key, payload), db=self._meta)

    def _change(self, change: Callable[[Any], None], size_bytes: int) -> None:
        """Make a change, of about ``size_bytes``, in a transaction of its own, in a map that is
        large enough."""
        last = self._last
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    change(transaction)
                # LMDB writes no page that a transaction has given back: who opens it looks for all
                if os.fstat(self._lock_fd).st_size < (needed := pages_bytes(self._env)):
                    os.ftruncate(self._lock_fd, needed)
                return
            except self._lmdb.MapFullError:
                self._last = last
                self._grow()
            except (self._lmdb.Error, OSError) as error:
                raise self._cannot(error, size_bytes) from None

    def _grow(self) -> None:
        try:
            self._env.set_mapsize(2 * self._env.info()["map_size"])
        except self._lmdb.Error as error:
            raise self._cannot(error, 0) from None

    # ---- errors

    def _cannot(self, error: Exception, size_bytes: int) -> UffdPrefetchError:
        why = error.strerror if isinstance(error, OSError) else str(error).partition(": ")[2]
        why = why or str(error)
        full = _no_room(self.path, max(size_bytes, TRANSACTION_BYTES))
        if full is not None:
            cure = "raise the limit (ulimit -f)" if full == errno.EFBIG else "make room"
            why = f"{os.strerror(full)}: {cure}, then --resume: what is in it stays"
        return UffdPrefetchError(f"cannot write {self.path}: {why}", EXIT_CANNOT)


def _no_room(path: str, size_bytes: int) -> int | None:
    """The errno by which so much does not fit behind the database: of a write that is cut short,
    LMDB tells that there was an error of the disk."""
    try:
        with tempfile.TemporaryFile(dir=path) as trial:
            os.posix_fallocate(trial.fileno(), os.path.getsize(data_file(path)), size_bytes)
    except OSError as error:
        return error.errno if error.errno in _FULL else None
    return None


def _locked(path: str) -> int:
    """The data file, locked for as long as it is open. Raises UffdPrefetchError (2) when another
    one has it."""
    fd = os.open(data_file(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UffdPrefetchError(f"{path}: another `pack` is writing it", EXIT_USAGE) from None
    except OSError:
        pass  # a file system without locks
    return fd
