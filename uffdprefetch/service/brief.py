# SPDX-License-Identifier: Apache-2.0
"""Kinds of files that are mapped for moments: what it costs to follow a mapping is more than it
brings there.

To map a file's part of the pool, and to answer each of its faults, takes a millisecond; to tell of
a mapping, to open its file and to look into its page table before it goes a fifth of that: of a
job that reads one place of each of 1,000 files it made 1.33 and 1.13 times plain's time
(bench/harm.py). So files like the last ones that went within moments are followed by page tables
as soon as they are mapped (Brief.KNOWN); and where many of them, each mapped once, were followed
in vain, most are not told of at all (Brief.UNTOLD). As soon as one of them stays, is mapped again,
or something is gained, the next ones are told of; when some have stayed, they are followed as
before: one alone may have met a busy node. Pure.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from uffdprefetch.protocol.wire import Brief

#: A mapping that lives for less has read some places of a file, or a small one.
BRIEF_NS = 20_000_000
#: So many tell, and so many in a row that nothing was gained for: until then they take a few
#: milliseconds, and what their readers do, in what order they come to files, is known. With one
#: that stays those before it count half, and no more than so many do.
TELLING, IN_VAIN = 16, 64
#: Directories and suffixes that are remembered.
KINDS_MAX = 1024


class Lately(NamedTuple):
    """The last mappings of a kind: how many have gone within moments, and how many of these, in a
    row, were followed in vain."""

    brief: int = 0
    in_vain: int = 0


class BriefKinds:
    """Of a service."""

    def __init__(self) -> None:
        self._lately: dict[tuple[str, str], Lately] = {}

    @staticmethod
    def _kind(path: str) -> tuple[str, str]:
        directory, name = os.path.split(path)
        return directory, os.path.splitext(name)[1]

    def note(self, path: str, lived_ns: int, in_vain: bool) -> None:
        """A mapping of a file has gone; ``in_vain``: it was the file's only one, and nothing that
        was read ahead was used."""
        kind = self._kind(path)
        row = self._lately.pop(kind, Lately())
        if lived_ns < BRIEF_NS:
            row = Lately(min(row.brief + 1, IN_VAIN), row.in_vain + 1)
        else:
            row = Lately(row.brief // 2, row.in_vain // 2)
        self._lately[kind] = row._replace(in_vain=min(row.in_vain, IN_VAIN) if in_vain else 0)
        if len(self._lately) > KINDS_MAX:
            del self._lately[next(iter(self._lately))]

    def of(self, path: str) -> Brief:
        """Whether a file is likely to be mapped for a moment."""
        found = self._lately.get(self._kind(path), Lately())
        if found.brief < TELLING:
            return Brief.NO
        return Brief.KNOWN if found.in_vain < IN_VAIN else Brief.UNTOLD
