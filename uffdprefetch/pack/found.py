# SPDX-License-Identifier: Apache-2.0
"""What the sources of a database have: files to be packed, and what is left out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from uffdprefetch.data.layout import PATH_BYTES_MAX, shown


@dataclass(frozen=True)
class Found:
    """A file of a source. ``path``: below the source; ``source``: the source's number. ``file``:
    what it is read from; or, from a tar, its bytes are ``data`` already."""

    path: bytes
    source: int
    file: bytes = b""
    data: bytes | None = None
    mtime_ns: int = 0

    @property
    def held_bytes(self) -> int:
        return 0 if self.data is None else len(self.data)


@dataclass
class LeftOut:
    """What is not packed. ``counted``: kinds that are never packed ("link"), how many; ``named``:
    how many files have been named one by one by ``say``, with the reason."""

    say: Callable[[str], None]
    counted: Counter[str] = field(default_factory=Counter)
    named: int = 0

    def name(self, path: bytes, why: str) -> None:
        self.named += 1
        self.say(f"left out: {shown(path)}: {why}")

    def count(self, kind: str) -> None:
        self.counted[kind] += 1

    def takes(self, path: bytes) -> bool:
        """Whether a path can be a key; if not it is named."""
        if len(path) <= PATH_BYTES_MAX:
            return True
        self.name(path, f"its path has {len(path)} bytes, more than {PATH_BYTES_MAX}")
        return False

    def summary(self) -> str:
        """ "3 links, 1 special file", or nothing."""
        return ", ".join(
            f"{number:,} {kind}{'s' if number > 1 else ''}"
            for kind, number in sorted(self.counted.items())
        )
