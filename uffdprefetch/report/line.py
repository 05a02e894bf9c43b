# SPDX-License-Identifier: Apache-2.0
"""A line for people: its wordings from the longest to the shortest, and how it fits a terminal."""

from __future__ import annotations

import os

from uffdprefetch.base.record import record
from uffdprefetch.base.units import format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeAlias

    #: A line, or its wordings from the longest to the shortest: the first that fits is shown.
    Line: TypeAlias = "str | tuple[str, ...] | Named"

#: Least characters that a shortened path keeps.
_PATH_LEAST = 12


@record(frozen=True)
class Named:
    """A line that names a file. ``without``: the line that does not, for where there is no room for
    its name."""

    before: str
    path: str
    after: str
    without: str | None = None

    def fitted(self, width: int | None) -> str:
        """With the folders of its path that fit."""
        name = os.path.basename(self.path)
        room = len(self.path) if width is None else width - len(self.before) - len(self.after)
        folders = self.path[3 - room :] if room > len(name) + 3 else ""
        if len(self.path) <= room:
            part = self.path
        elif "/" in folders:
            part = f"...{folders[folders.index('/') :]}"
        elif len(name) <= max(room, _PATH_LEAST if self.without is None else 0):
            part = name
        elif self.without is not None:
            return self.without
        else:
            part = f"...{name[3 - max(_PATH_LEAST, room) :]}"
        return self.before + part + self.after


def fitted(line: Line, width: int | None) -> str:
    """The first of its texts that fits; of those that do not the last, for the terminal to wrap:
    cut short it would lack its end, which says why."""
    if isinstance(line, Named):
        return line.fitted(width)
    texts = (line,) if isinstance(line, str) else line
    return next((text for text in texts if width is None or len(text) <= width), texts[-1])


def seconds_of(summary: Mapping[str, Any]) -> float:
    """The job's, from start to exit; where its launcher has not told, the service's until then."""
    job = summary.get("job") or {}
    return float(job.get("seconds") or summary["wall_seconds"])


def part_of(part_bytes: int, whole_bytes: int) -> str:
    """`315 of 320 MiB`."""
    part, whole = format_size(part_bytes), format_size(whole_bytes)
    number, _, unit = part.partition(" ")
    return f"{number if unit == whole.partition(' ')[2] else part} of {whole}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share * 100:.0f} %"
