# SPDX-License-Identifier: Apache-2.0
"""How far ahead of a walk to be: one Window of each in a turn, for all who ask."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from uffdprefetch.base.config import Config
from uffdprefetch.predict import checkpoints, window
from uffdprefetch.predict.rate import Feedback
from uffdprefetch.predict.streams import Stream
from uffdprefetch.predict.window import Window
from uffdprefetch.state.file_pool import FilePool
from uffdprefetch.warm.scheduler import Scheduler


@dataclass
class _Asked:
    """Of a walk: up to where, as whoever reads ahead of it tells, and what came of it."""

    frontier_bytes: int
    feedback: Feedback = field(default_factory=Feedback)


class Windows:
    """Of the walks of one service, whose thread calls everything here."""

    def __init__(self, config: Config, scheduler: Scheduler) -> None:
        self._config, self._scheduler = config, scheduler
        self.allowed_bytes = config.budget_bytes
        self.places = 1  # at which files are read: readers near each other share a window
        self.pool: FilePool | None = None
        self._asked: WeakKeyDictionary[Stream, _Asked] = WeakKeyDictionary()
        self._made: dict[tuple[Stream, bool], Window] = {}  # in this turn

    def begin_turn(self) -> None:
        """What has been seen, and measured, since the last one counts from now on."""
        self._made.clear()

    def of(self, walk: Stream, pooled: bool = False) -> Window:
        """A walk's window in this turn; ``pooled``: in the pool's memory."""
        found = self._made.get((walk, pooled))
        if found is None:
            found = self._made[walk, pooled] = self._make(walk, pooled)
        return found

    def _make(self, walk: Stream, pooled: bool) -> Window:
        share = self.allowed_bytes // self.places
        if self.pool and pooled:
            share = self.pool.window_bytes(walk=True)
        asked = self._asked.get(walk)
        if self._config.policy == "fixed":
            size_bytes = min(self._config.size_bytes, max(share, window.MIB))
        else:
            boost = asked.feedback.boost if asked is not None else 1.0
            rate, storage = walk.rate_bytes_per_second, self._scheduler.meter.storage
            size_bytes = window.lookahead_bytes(rate, storage, share, boost)
        step_bytes = checkpoints.distance_bytes(
            walk.rate_bytes_per_second, size_bytes, self._config.distance_bytes
        )
        frontier_bytes = asked.frontier_bytes if asked is not None else walk.position_bytes
        return Window(size_bytes, frontier_bytes, step_bytes)

    def asked(self, walk: Stream, frontier_bytes: int, feedback: Feedback) -> None:
        """Something is asked for ahead of a walk, up to there; what comes of it is told there."""
        self._asked[walk] = _Asked(frontier_bytes, feedback)
        for key in ((walk, False), (walk, True)):
            made = self._made.get(key)
            if made is not None:
                self._made[key] = replace(made, frontier_bytes=frontier_bytes)

    def ahead_bytes(self, walk: Stream) -> int:
        """What was asked for, and lies ahead of it."""
        asked = self._asked.get(walk)
        if asked is None:
            return 0
        return max(0, (asked.frontier_bytes - walk.position_bytes) * walk.direction)

    def late_extents(self, walk: Stream) -> int:
        """Of what was read ahead of it, what came too late."""
        asked = self._asked.get(walk)
        return asked.feedback.late_extents if asked is not None else 0
