# SPDX-License-Identifier: Apache-2.0
"""What a packed database has, read by nothing that trusts it: damaged pages are told by the byte,
each entry has a checksum, each value its SHA-256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from types import TracebackType

from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError
from uffdprefetch.data import layout
from uffdprefetch.data.codec import Codec
from uffdprefetch.data.environment import close, environment
from uffdprefetch.data.layout import DamagedError, Entry, PackDescription
from uffdprefetch.formats import lmdb
from uffdprefetch.formats.reader import FileReader, FormatError


def has_begun(path: str) -> bool:
    """Whether a transaction of `pack` has ended there. Raises UffdPrefetchError (2) when that is no
    LMDB."""
    file = os.path.join(path, "data.mdb")
    if not os.path.exists(file) or not os.path.getsize(file):
        return False
    with FileReader(file) as reader:
        try:
            return lmdb.newest_meta(reader).txnid > 0
        except FormatError as error:
            raise error.of(file) from None


class Stored:
    """A packed database, open to be read; a context manager.

    ``entries``: of all files, by their numbers. Raises UffdPrefetchError (2) when it cannot be
    read, is none, or damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        file = os.path.join(path, "data.mdb")
        try:
            self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(path, error) from None
        try:
            index = lmdb.open_index(file)
            parts = {part.name: part for part in index.databases}
            if layout.META not in parts:
                what = f"{path}: an LMDB that `uffdprefetch pack` has not packed"
                raise UffdPrefetchError(what, EXIT_USAGE)
            self._index = index
            main, meta = parts[b""], parts[layout.META]
            self._record = {
                index.key(record): record for record in range(main.first, main.first + main.records)
            }
            if len(self._record) != main.records:
                raise DamagedError(f"{path}: damaged: a path is there twice")
            special: dict[bytes, bytes] = {}
            self.entries: dict[int, Entry] = {}
            for record in range(meta.first, meta.first + meta.records):
                key = index.key(record)
                found = layout.payload(key, self._bytes(record), path)
                number = layout.number_of(key)
                if number is None:
                    special[key] = found
                else:
                    self.entries[number] = Entry.decoded(found)
            self.description, self._codec = self._described(special)
        except BaseException:
            os.close(self._fd)
            raise

    def _described(self, special: dict[bytes, bytes]) -> tuple[PackDescription, Codec | None]:
        if not {layout.SOURCE, layout.DICTIONARY} <= special.keys():
            raise DamagedError(f"{self.path}: damaged: it has no description")
        description = PackDescription.decoded(special[layout.SOURCE], self.path)
        self.dictionary = special[layout.DICTIONARY]
        if description.complete:
            paths = layout.split(special.get(layout.PATHS, b""), self.path)
            if paths != [self.entries[number].path for number in sorted(self.entries)]:
                raise DamagedError(f"{self.path}: damaged: the list of its files is of others")
        level = description.level
        return description, None if level is None else Codec(level, self.dictionary)

    def in_order(self) -> Iterator[Entry]:
        """The entries in the order of packing."""
        for number in sorted(self.entries):
            yield self.entries[number]

    def unknown(self) -> list[bytes]:
        """Paths of values that no entry is of."""
        return sorted(self._record.keys() - {entry.path for entry in self.entries.values()})

    def check_lookups(self) -> None:
        """Look each path up as a program does, by liblmdb, whose way to a leaf is told by keys that
        nothing else depends on. Raises DamagedError."""
        env, _ = environment(self.path)
        try:
            with env.begin(buffers=True) as transaction:
                for key, record in self._record.items():
                    value = transaction.get(key)
                    if value is None or len(value) != self._index.length[record]:
                        what = f"{layout.shown(key)} is not found"
                        raise DamagedError(f"{self.path}: damaged: {what}")
        finally:
            close(self.path)

    def stored_bytes(self, entry: Entry) -> int:
        """Of its value as it is stored; 0 where there is none."""
        record = self._record.get(entry.path)
        return 0 if record is None else int(self._index.length[record])

    def value(self, entry: Entry) -> bytes:
        """The file's bytes, in any thread. Raises DamagedError, about the value alone."""
        record = self._record.get(entry.path)
        if record is None:
            raise DamagedError("its value is not there")
        value = self._bytes(record)
        if self._codec is not None:
            value = self._codec.decode(value)
        if hashlib.sha256(value).digest() != entry.sha256:
            raise DamagedError("its bytes are not those that were packed")
        return value

    def _bytes(self, record: int) -> bytes:
        at, left = int(self._index.offset[record]), int(self._index.length[record])
        pieces: list[bytes] = []
        try:
            while left:
                piece = os.pread(self._fd, left, at)
                if not piece:
                    raise DamagedError(f"{self.path}: damaged: it ends at byte {at}")
                pieces.append(piece)
                at, left = at + len(piece), left - len(piece)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        return b"".join(pieces)

    def __enter__(self) -> Stored:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)


def _unreadable(path: str, error: OSError) -> UffdPrefetchError:
    return UffdPrefetchError(f"cannot read {path}: {error.strerror}", EXIT_USAGE)
