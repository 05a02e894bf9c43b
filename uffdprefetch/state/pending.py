# SPDX-License-Identifier: Apache-2.0
"""Mappings of a process whose file is being opened, and what the job has said of them by now."""

from __future__ import annotations

from uffdprefetch.protocol import wire
from uffdprefetch.state.reader import FIRST_OBSERVED

#: Statements kept of each: as many as its agent keeps (csrc/job/agent.h, UP_STATEMENTS).
STATEMENTS_MAX = 64


class PendingMappings:
    """By their numbers."""

    def __init__(self) -> None:
        self._opening: set[int] = set()
        self._said: dict[int, list[wire.Statement]] = {}

    def __contains__(self, region_id: int) -> bool:
        return region_id in self._opening

    def __len__(self) -> int:
        return len(self._opening)

    @property
    def by_agent(self) -> bool:
        """Whether an agent has told of one."""
        return any(number < FIRST_OBSERVED for number in self._opening)

    def add(self, region_id: int) -> None:
        """Its file is being opened from now on."""
        self._opening.add(region_id)

    def is_open(self, region_id: int) -> bool:
        """Its file is; False: the mapping has gone meanwhile."""
        waited = region_id in self._opening
        self._opening.discard(region_id)
        return waited

    def hear(self, said: wire.Statement) -> None:
        """The job has said something of one, or of what is none."""
        if said.region in self._opening:
            statements = self._said.setdefault(said.region, [])
            if len(statements) < STATEMENTS_MAX:
                statements.append(said)

    def said_of(self, region_id: int) -> list[wire.Statement]:
        """What was said of one that is managed from now on."""
        return self._said.pop(region_id, [])

    def drop(self, region_id: int) -> None:
        """It is gone, or refused."""
        self._opening.discard(region_id)
        self._said.pop(region_id, None)

    def forget(self) -> None:
        """The process is gone, and so is each of them."""
        self._opening.clear()
        self._said.clear()
