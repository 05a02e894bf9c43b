# SPDX-License-Identifier: Apache-2.0
"""What small files are read ahead with (service/small_reads.py), where a test says what is marked,
what is opened, and what comes of a request."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from uffdprefetch.base.file_systems import FileSystem
from uffdprefetch.native.paths import FoundFile, Keeping, PathDone, PathRequest, PathState
from uffdprefetch.predict.storage import Account, Link
from uffdprefetch.service.small_reads import ReadBounds, SmallReads, Watching
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.warm.token_bucket import TokenBucket

DEVICE, MOST_BYTES, FILE_BYTES = 7, 16 << 20, 1000
LINK = Link(300e6, 1e-3)


class FileReader:
    """native/paths.PathReader: what was asked for ends when it is told to."""

    def __init__(self) -> None:
        self.asked: list[PathRequest] = []
        self.room: int | None = None
        self.withdrawn: list[int] = []
        self.released: list[tuple[int, int]] = []
        self.released_groups: list[int] = []
        self.file_system = FileSystem("any")  # a probe says so
        self._open: list[PathRequest] = []
        self._done: list[PathDone] = []

    def submit(self, request: PathRequest) -> bool:
        if self.room is not None and len(self._open) >= self.room:
            return False
        self.asked.append(request)
        self._open.append(request)
        return True

    def end(
        self, keeping: Keeping | None = None, missing: bool = False, waited: bool = True
    ) -> None:
        """Of all that is under way, what came: of a probe what the mount keeps."""
        under_way, self._open = self._open, []
        for one in under_way:
            probe: Any = self._probe(keeping) if one.probe and not missing else None
            state = PathState.FAILED if missing else PathState.DONE
            file = None if missing else FoundFile(DEVICE, one.id, FILE_BYTES, 0)
            read = 0 if missing else FILE_BYTES
            self._done.append(
                PathDone(one.id, one.group, state, 2 if missing else 0, file, read,
                         read if waited else 0, one.hold and not missing, 0, 0, 0, probe)
            )  # fmt: skip

    def _probe(self, keeping: Keeping | None) -> Any:
        return SimpleNamespace(keeping=keeping, file_system=self.file_system)

    def reap(self) -> list[PathDone]:
        done, self._done = self._done, []
        return done

    def withdraw(self, group: int) -> None:
        self.withdrawn.append(group)

    def release(self, id_: int, after_ns: int = 0) -> None:
        self.released.append((id_, after_ns))

    def release_group(self, group: int) -> None:
        self.released_groups.append(group)

    def close(self) -> None:
        """Nothing is open."""


class Later:
    """state/opening.Opener: when it is told to."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self.is_full = False

    @property
    def waiting(self) -> int:
        """How much."""
        return len(self._waiting)

    def run(self, work: Callable[[], Any], then: Callable[[Any], None]) -> bool:
        if self.is_full:
            return False

        def do() -> None:
            try:
                result = work()
            except OSError as error:
                result = error
            then(result)

        self._waiting.append(do)
        return True

    def end(self) -> None:
        """All that waits."""
        waiting, self._waiting = self._waiting, []
        for do in waiting:
            do()


class SmallReading:
    """One Watching, and below it ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = os.fspath(directory)
        self.reader, self.opener, self.ledger, self.account = (
            FileReader(), Later(), Ledger(), Account(),
        )  # fmt: skip
        self.bucket, self.allowed_bytes = TokenBucket(None, 0), 1 << 40
        self.bounds = ReadBounds(self.bucket, lambda: self.allowed_bytes)
        reader: Any = self.reader
        reads = SmallReads(reader, MOST_BYTES, self.account, lambda: LINK, self.bounds)
        self.opens_of: dict[str, int] = {}  # keys of marked directories
        self.refuses = False
        self.expected: list[tuple[int, str]] = []
        self.unmarked: list[int] = []  # by each who had it marked
        opens: Any = SimpleNamespace(
            mark=self._mark, unmark=self.unmarked.append, close=lambda: None,
            expect=lambda key, name: self.expected.append((key, name)),
            unexpect=lambda key, name: self.expected.remove((key, name)),
        )  # fmt: skip
        opener: Any = self.opener
        self.watching = Watching(opens, reads, opener, self.ledger)

    def _mark(self, directory: str) -> int:
        if self.refuses:
            raise OSError(28, "so many are watched")
        name = os.path.normpath(directory)
        return self.opens_of.setdefault(name, len(self.opens_of) + 1)
