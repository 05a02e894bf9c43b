# SPDX-License-Identifier: Apache-2.0
"""What a node says of itself in the meeting: that it lives, and which generation it is in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from uffdprefetch.cluster.meeting import ALIVE_SECONDS, Meeting


class Presence:
    """This node's note, and what stands in it."""

    def __init__(self, meeting: Meeting, about: Mapping[str, str]) -> None:
        """``about``: what never changes: its host, its socket, its public half."""
        self._meeting, self._about = meeting, about
        self.joined = 0  # the generation of our transport; 0: none
        self.over = 0  # the last one that is over, as far as we know
        self.joined_since = self.waits_since = 0.0
        self._count = 0
        self._alive_since = 0.0

    def arrive(self) -> None:
        """Write the note, by whose count others see that this node lives."""
        self._count += 1
        with contextlib.suppress(OSError):  # a full file system: it may be taken for gone
            self._meeting.arrive(
                {**self._about, "beat": self._count, "joined": self.joined, "over": self.over}
            )

    def say_that_it_waits(self, now: float) -> None:
        """Every ALIVE_SECONDS: who shares is asked instead."""
        if not self.joined and now - self._alive_since > ALIVE_SECONDS:
            self._alive_since = now
            self.arrive()

    def join(self, generation: int, now: float) -> None:
        """A transport of this generation has come."""
        self.joined, self.joined_since = generation, now
        self.arrive()

    def leave(self, now: float) -> None:
        """It has gone: this node waits, and asks whoever still has one to begin anew."""
        self.over, self.joined = max(self.over, self.joined), 0
        self.waits_since = now
        self.arrive()
        with contextlib.suppress(OSError):
            self._meeting.post(f"again-{self._meeting.node}", {"over": self.over})

    def never_joined(self, generation: int) -> None:
        """A generation has ended in which no world came up."""
        self.over = generation
        self.arrive()

    def wait_anew(self, now: float) -> None:
        """All others have their time to say that they wait from now on."""
        self.waits_since = now
