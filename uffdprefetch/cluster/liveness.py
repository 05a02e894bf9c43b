# SPDX-License-Identifier: Apache-2.0
"""Which of the other nodes of a meeting live, by their notes' counts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from uffdprefetch.cluster.meeting import GONE_SECONDS, Meeting

#: Time limit for nodes to notice a loss, else the next generation goes without them; and for a node
#: that shares to answer (it looks every CALM_SECONDS), else it counts as dead.
GATHER_SECONDS = 2.0


@dataclass
class _Doubted:
    """A node of which another one wants to know whether it lives: its count then, and when."""

    count: int
    at: float
    answered: bool = False


class Liveness:
    """Of the other nodes, as this one sees them."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._asked: dict[int, _Doubted] = {}
        self._beats: dict[int, tuple[int, float]] = {}  # of nodes that wait: (count, since when)
        self._is_again = False  # somebody has led in this directory before

    def begin(self) -> None:
        """Note whether a run of the same name was here."""
        self._is_again = self._meeting.note("generation") is not None

    def here(self, now: float) -> list[int]:
        """The nodes that are there, and not only their notes: where somebody has led before, those
        of dead ones are old."""
        if not self._is_again:
            return self._meeting.numbers()
        found = []
        for node in self._meeting.numbers():
            if self._meeting.is_fresh(node):
                found.append(node)
            else:
                self.answers(node, self._meeting.said(node) or {}, now)
        return found

    def waiting(self, node: int, over: int, now: float) -> dict[str, Any] | None:
        """The note of a waiting node that is alive, which it is as long as its count goes up:
        clocks are not compared. At first sight it counts only if it knows of our loss: that the
        generation ``over`` is over."""
        said = self._meeting.said(node)
        if said is None or said.get("joined"):
            return None
        count, theirs = int(said.get("beat", 0)), int(said.get("over", 0))
        last, since = self._beats.get(node, (None, now if theirs >= over else now - 1e9))
        if count != last:
            since = now if last is not None else since
            self._beats[node] = count, since
        return said if now - since < GONE_SECONDS else None

    def answers(self, node: int, said: Mapping[str, Any], now: float) -> bool:
        """Whether a node that says nothing by itself lives, as far as is known: it is asked, and
        has GATHER_SECONDS to say something."""
        count, one = int(said.get("beat", 0)), self._asked.get(node)
        if one is None or (one.answered and now - one.at > GONE_SECONDS):
            self._asked[node] = _Doubted(count, now)
            with contextlib.suppress(OSError):
                self._meeting.ask(node, str(self._meeting.node))
            return True
        one.answered = one.answered or count != one.count
        return one.answered or now - one.at < GATHER_SECONDS

    def forget_asked(self) -> None:
        """This node shares: nobody is in doubt."""
        self._asked = {}

    def forget_waiting(self) -> None:
        """This node waits: what others said before does not count."""
        self._beats = {}
