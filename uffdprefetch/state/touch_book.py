# SPDX-License-Identifier: Apache-2.0
"""What all ranks have come to of their files, in which order, as page-table scans and the pool's
faults tell (predict/first_touches.py): in bounded space."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from uffdprefetch.predict.first_touches import FirstTouches, RankOf, RankTouches
from uffdprefetch.state.file_times import Times
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.guard import Guard
from uffdprefetch.state.ledger import FILES_MAX

#: A run of blocks: where it begins and ends, 64 bits each.
RUN_BYTES = 16
#: Runs of all ranks and files together: of a file of 1 TiB that is read in records of 64 KiB.
ROOM_BYTES = 256 << 20


@dataclass
class TouchedFile:
    """A file, as it was when it was opened first; ``guard`` says whether it has changed since."""

    path: str
    times: Times
    guard: Guard
    touches: FirstTouches


class TouchBook:
    """Of all files of a run; the service's thread calls everything here."""

    def __init__(self, room_bytes: int = ROOM_BYTES) -> None:
        self._room = room_bytes // RUN_BYTES
        self._files: dict[Key, TouchedFile] = {}

    def came(self, file: FileState, rank: RankOf, spans: Iterable[tuple[int, int]]) -> None:
        """A rank was in these [start, end) bytes of a file."""
        try:
            found = self._of(file)
            if found is None:
                return
            for start, end in spans:
                self._room -= found.touches.came(rank, start, end)
        except MemoryError:
            self._room = -1
        if self._room < 0:
            self.give_up(file, rank)

    def _of(self, file: FileState) -> TouchedFile | None:
        """None: there are too many. Raises MemoryError."""
        found = self._files.get(file.key)
        if found is None and len(self._files) < FILES_MAX:
            touches = FirstTouches(file.size_bytes)
            found = TouchedFile(file.path, file.guard.times, file.guard, touches)
            self._files[file.key] = found
        if found is not None:
            found.guard = file.guard  # it may have been closed, and opened again
        return found

    def give_up(self, file: FileState, rank: RankOf) -> None:
        """What a rank does with a file is not to be learned."""
        found = self._files.get(file.key)
        touches = found.touches.ranks.get(rank) if found is not None else None
        if touches is not None:
            self._room += touches.give_up()

    def is_given_up(self, file: FileState, rank: RankOf) -> bool:
        """Whether give_up() was called."""
        found = self._files.get(file.key)
        touches = found.touches.ranks.get(rank) if found is not None else None
        return touches is not None and touches.is_given_up

    def __iter__(self) -> Iterator[tuple[Key, TouchedFile, RankOf, RankTouches]]:
        """All of what is known of files that have not changed."""
        for key, file in self._files.items():
            if file.guard.changed is None:
                for rank, touches in file.touches.ranks.items():
                    if not touches.is_given_up:
                        yield key, file, rank, touches
