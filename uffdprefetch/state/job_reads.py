# SPDX-License-Identifier: Apache-2.0
"""What jobs have read past us, by read(2), and from storage."""

from __future__ import annotations

from typing import Any

from uffdprefetch.base.record import dataclass, field

FILES_MAX = 256
#: Pairs of a process and a file that it was seen to read by read(2).
READ_MAX = 4096


@dataclass
class JobReads:
    """Bytes by each launcher's job that has ended: by read(2), and from block devices; None: not
    known. ``missed_blocks``: by rank, blocks of 64 KiB of followed files that were read by calls
    and not read ahead. ``replays``: what their launchers tell of those of their starts
    (protocol/replayed.py)."""

    read: list[int | None] = field(default_factory=list)
    storage: list[int | None] = field(default_factory=list)
    missed_blocks: dict[int, int] = field(default_factory=dict)
    replays: list[bytes] = field(default_factory=list)
    _positions: dict[tuple[int, str], int] = field(default_factory=dict)  # (pid, path) -> position

    def finished(self, read_call_bytes: int | None, storage_bytes: int | None) -> None:
        """A launcher's job has ended."""
        self.read.append(read_call_bytes)
        self.storage.append(storage_bytes)

    def missed(self, rank: int, blocks: int) -> None:
        """A rank has read so many blocks that were not there yet."""
        self.missed_blocks[rank] = self.missed_blocks.get(rank, 0) + blocks

    def by_calls(self, pid: int, path: str, position: int) -> None:
        """A process was seen at this offset of a file that it reads by read(2), in bytes."""
        if (pid, path) in self._positions or len(self._positions) < READ_MAX:
            self._positions[pid, path] = max(position, self._positions.get((pid, path), 0))

    def files(self) -> list[dict[str, Any]]:
        """For the summary: what was read by read(2) of which file, as far as it was seen."""
        files: dict[str, int] = {}
        for (_, path), position in self._positions.items():
            files[path] = files.get(path, 0) + position
        most = sorted(files.items(), key=lambda one: -one[1])[:FILES_MAX]
        return [{"path": path, "bytes": position} for path, position in most]
