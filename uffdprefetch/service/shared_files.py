# SPDX-License-Identifier: Apache-2.0
"""Which files of a node's pool other nodes have as well."""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from uffdprefetch.base import file_systems
from uffdprefetch.cluster import identity
from uffdprefetch.cluster.link import PoolNetwork
from uffdprefetch.native.net import FileId
from uffdprefetch.state.file_times import Times

if TYPE_CHECKING:
    from uffdprefetch.state.files import FileState
    from uffdprefetch.state.ledger import Ledger
    from uffdprefetch.state.opening import Opener

#: How long what is read ahead of a file waits until it is known whether other nodes have it: some
#: pages of it are read, and its servers are asked.
PENDING_MS = 500
#: Of files that are not shared, and why.
UNSHARED_FILES = 16


@dataclass
class _Shared:
    """What is known of one file of the pool."""

    path: str
    stamp: Times  # as of its opening: nothing in the pool is older
    fields: identity.Fields = field(default_factory=dict)
    identity: FileId | None = None  # None: not known yet, or none


class SharedFiles:
    """The pool's files, by number, and whether other nodes have the same."""

    def __init__(
        self, ledger: Ledger, opener: Opener, globs: Sequence[str], chunk_bytes: int,
        tell: Callable[..., None],
    ) -> None:  # fmt: skip
        """``tell``: to the convener, which compares."""
        self._ledger, self._opener, self._globs, self._tell = ledger, opener, globs, tell
        #: Messages count in chunks: who has others calls the same file by another name.
        self._units = {"chunk size (--huge-pages, --budget)": chunk_bytes}
        self._files: dict[int, _Shared] = {}  # as long as it is in the pool
        self._to_look_at: deque[Callable[[], bool]] = deque()  # when fewer are being looked at
        self.unshared: dict[str, str] = {}  # by path, why not
        self.link: PoolNetwork | None = None  # once there is one

    def __contains__(self, number: int) -> bool:
        return number in self._files

    @property
    def shared(self) -> list[tuple[int, str]]:
        """(number, path) of those that other nodes may have."""
        return [(n, one.path) for n, one in self._files.items() if one.identity is not None]

    def is_shared(self, number: int) -> bool:
        """Whether other nodes may have this one."""
        one = self._files.get(number)
        return one is not None and one.identity is not None

    def use(self, link: PoolNetwork) -> None:
        """The run's key has come: files that are known by now are shared."""
        self.link = link
        for number, one in self._files.items():
            if one.identity is not None:
                self._share(link, number, one)

    def housekeep(self) -> None:
        """Once a second: files that are still to be looked at."""
        while self._to_look_at and self._to_look_at[0]():
            self._to_look_at.popleft()

    def opened(self, file: FileState, number: int) -> None:
        """A file has become the pool's: find out whether other nodes have the same."""
        path, f_type, globs = file.path, file.opened.f_type, self._globs
        kind = file_systems.known(f_type)
        if kind.one_machine and not identity.is_named(path, globs):
            self._keep_to_itself(path, f"{kind.name} is a local file system")
            return
        one = self._files[number] = _Shared(path, file.guard.times)
        if self.link is not None:
            self.link.pending(number, PENDING_MS)
        fd = os.dup(file.opened.fd)

        def look() -> tuple[identity.Fields, Times] | str:
            try:
                return identity.fields(fd, path, f_type, globs), Times.of(fd)
            except identity.NotSharedError as error:
                return str(error)
            finally:
                os.close(fd)

        def then(found: tuple[identity.Fields, Times] | str | OSError) -> None:
            if self._files.get(number) is not one:
                return  # it has left the pool meanwhile
            if isinstance(found, OSError):
                found = f"{found.strerror}"
            elif not isinstance(found, str) and found[1] != one.stamp:
                found = "it has changed since it was opened"
            if isinstance(found, str):
                if self.link is not None:
                    self.link.pending(number, 0)
                self._ledger.degrade(f"not shared with other nodes: {found}", path)
                self._keep_to_itself(path, found)
                return
            one.fields = {**found[0], **self._units}
            one.identity = struct.unpack("<QQ", identity.identity(one.fields))
            if self.link is not None:
                self._share(self.link, number, one)
            self._tell(file=path, fields=one.fields)

        def begin() -> bool:
            if self._files.get(number) is not one:
                os.close(fd)  # it has left the pool meanwhile
                return True
            return self._opener.run(look, then)

        if not begin():
            self._to_look_at.append(begin)

    def _keep_to_itself(self, path: str, why: str) -> None:
        if len(self.unshared) < UNSHARED_FILES:
            self.unshared[path] = why

    @staticmethod
    def _share(link: PoolNetwork, number: int, one: _Shared) -> None:
        assert one.identity is not None
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            link.share(number, one.identity, one.stamp)

    def closed(self, number: int, why: str | None = None) -> None:
        """It has changed, or left the pool, or others may not have it any more, and ``why``."""
        one = self._files.pop(number, None)
        if one is not None and self.link is not None:
            self.link.unshare(number)
        if one is not None and one.identity is not None and why:
            self._ledger.degrade(f"not shared with other nodes any more: {why}", one.path)
