# SPDX-License-Identifier: Apache-2.0
"""Which files are in the node's pool, by their numbers there."""

from __future__ import annotations

import os

from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.pool.disk_tier import DiskTier
from uffdprefetch.pool.other_nodes import NoOthers, OtherNodes
from uffdprefetch.state.files import FileState
from uffdprefetch.state.opening import Opened
from uffdprefetch.state.pool_file import PoolFile


class PooledFiles:
    """The files of one pool. Other nodes are told which they are."""

    def __init__(
        self, pool: uffd_pool.Pool, chunk_bytes: int, disk: DiskTier | None = None
    ) -> None:
        """``disk``: to which what leaves memory goes."""
        self._pool, self._chunk_bytes, self._disk = pool, chunk_bytes, disk
        self.by_number: dict[int, FileState] = {}
        #: By the same numbers, of which chunks the disk has copies.
        self.spilled: dict[int, uffd_pool.DiskCopies] = {}
        self.others: OtherNodes = NoOthers()

    def open(self, file: FileState) -> PoolFile:
        """The file's part of the pool, made at its first mapping. Raises OSError."""
        if file.pooled is None:
            number, memfd = self._pool.add_file(
                file.opened.fd, file.size_bytes, file.call.unit_bytes, file.opened.was
            )
            if self._disk is not None and not self._disk.serves(file):
                self._pool.keep_from_disk(number)
            file.pooled = PoolFile(self._pool, number, memfd, self._chunk_bytes)
            self.by_number[number] = file
            if self._disk is not None and file.pooled.books.spilled is not None:
                self.spilled[number] = file.pooled.books.spilled
            self.others.opened(file, number)
        return file.pooled

    def forget(self, file: FileState) -> bool:
        """Free a file's memory; False while it is in use."""
        pooled = file.pooled
        if pooled is None:
            return True
        self.note_counts(file)
        if not self._pool.forget_file(pooled.number):
            return False
        self.others.closed(pooled.number)
        os.close(pooled.memfd)
        del self.by_number[pooled.number]
        self.spilled.pop(pooled.number, None)
        file.pooled = None
        return True

    def park(self, file: FileState) -> bool:
        """Close the file and keep its pages; False while it is mapped or read."""
        return file.pooled is None or self._pool.park_file(file.pooled.number)

    def unpark(self, file: FileState, opened: Opened) -> None:
        """It is mapped again. Raises OSError."""
        assert file.pooled is not None
        self._pool.unpark_file(file.pooled.number, opened.fd, opened.was)

    def drop(self, file: FileState, why: str | None = None) -> None:
        """The file has changed: drop its pages, which other nodes may not have either; mappings
        that cannot be notified read them again. ``why``, for people: it may have, and is served
        on."""
        if file.pooled is not None:
            self.others.closed(file.pooled.number, why)
            self._pool.drop_file(file.pooled.number)

    def sample(self, file: FileState, most: int) -> list[int]:
        """Pages to compare with the file: one of each resident 4 MiB, ``most`` at most,
        ascending."""
        if file.pooled is None:
            return []
        from uffdprefetch.pool.sampled_pages import sampled_pages

        spilled = self.spilled.get(file.pooled.number)
        return sampled_pages(file.pooled, file.size_bytes, most, spilled)

    def hush(self, file: FileState) -> None:
        """Begin no further read ahead of it: it is to leave."""
        if file.pooled is not None:
            self._pool.hush_file(file.pooled.number)

    def note_counts(self, file: FileState) -> None:
        """Take what the C side has counted of it."""
        if file.pooled is not None:
            file.account.note_pool(self._pool.file_counts(file.pooled.number))

    @property
    def size_bytes(self) -> int:
        """Of all of them together."""
        return sum(file.size_bytes for file in self.by_number.values())

    def forget_changed(self) -> None:
        """Free what nobody maps of files that have changed."""
        for file in list(self.by_number.values()):
            if file.guard.changed and not file.mappings.attached:
                self.forget(file)

    def close(self) -> None:
        """The pool has ended."""
        for file in self.by_number.values():
            if file.pooled is not None:
                os.close(file.pooled.memfd)
                file.pooled = None
