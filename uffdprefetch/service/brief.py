# SPDX-License-Identifier: Apache-2.0
"""Kinds of files that are mapped for moments, each once: the pool costs more than it brings there.

To map a file's part of the pool, and to answer each of its faults, takes a millisecond: of a job
that reads one place of each of 1,000 files it made 1.7 times plain's time (bench/harm.py). Files
like the last ones that went within moments are followed by page tables; as soon as one of them
stays, the next ones are the pool's again. Pure.
"""

from __future__ import annotations

import os

#: A mapping that lives for less has read some places of a file, or a small one.
BRIEF_NS = 20_000_000
#: So many in a row tell.
TELLING = 16
#: Directories and suffixes that are remembered.
KINDS_MAX = 1024


class BriefKinds:
    """Of a service."""

    def __init__(self) -> None:
        self._in_a_row: dict[tuple[str, str], int] = {}

    @staticmethod
    def _kind(path: str) -> tuple[str, str]:
        directory, name = os.path.split(path)
        return directory, os.path.splitext(name)[1]

    def note(self, path: str, lived_ns: int) -> None:
        """A mapping of a file has gone."""
        kind = self._kind(path)
        before = self._in_a_row.pop(kind, 0)
        self._in_a_row[kind] = before + 1 if lived_ns < BRIEF_NS else 0
        if len(self._in_a_row) > KINDS_MAX:
            del self._in_a_row[next(iter(self._in_a_row))]

    def has(self, path: str) -> bool:
        """Whether a file is likely to be mapped for a moment."""
        return self._in_a_row.get(self._kind(path), 0) >= TELLING
