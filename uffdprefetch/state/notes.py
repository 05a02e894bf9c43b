# SPDX-License-Identifier: Apache-2.0
"""What of a run works less well than it could, for people."""

from __future__ import annotations

from typing import NamedTuple

from uffdprefetch.base.record import dataclass, field

DEGRADATIONS_MAX = 32


class Note(NamedTuple):
    """What works less well than it could. ``path``: of what file, or none; ``is_mendable``: else
    nothing better is to be had; ``is_asked``: the user has asked for it, by an option."""

    text: str
    path: str = ""
    is_mendable: bool = True
    is_asked: bool = False

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.path}: {self.text}" if self.path else self.text


@dataclass
class Notes:
    """Of a run, each once. ``limits``: what the user should know of; ``left_alone``: what needs
    nothing of us."""

    limits: list[Note] = field(default_factory=list)
    left_alone: list[Note] = field(default_factory=list)

    @staticmethod
    def _add(note: Note, among: list[Note]) -> None:
        if note not in among and len(among) < DEGRADATIONS_MAX:
            among.append(note)

    def limit(self, note: Note) -> None:
        """One more limit."""
        self._add(note, self.limits)

    def leave(self, note: Note) -> None:
        """One more thing that is left alone."""
        self._add(note, self.left_alone)

    @property
    def all(self) -> list[Note]:
        """Limits first."""
        return [*self.limits, *self.left_alone][:DEGRADATIONS_MAX]
