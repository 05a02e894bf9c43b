# SPDX-License-Identifier: Apache-2.0
"""What was seen of a process in /proc/PID/maps (service/observe.py)."""

from __future__ import annotations

from collections.abc import Collection

from uffdprefetch.base.record import dataclass, field


@dataclass
class Sightings:
    """Mappings by their addresses, regions by their numbers."""

    bypasses: bool = False  # it changes its mappings past the interposers: this alone tells
    is_static: bool = False  # its program is linked statically: nothing can be preloaded
    is_loaded: bool = False  # the preload is in it, and has had nothing to tell of
    refused: set[int] = field(default_factory=set)  # mappings that are not served
    _new: set[int] = field(default_factory=set)  # at the last look: mappings not told of ...
    _missing: set[int] = field(default_factory=set)  # ... regions that were not found

    def note_found(self, region_id: int) -> None:
        """A region is there."""
        self._missing.discard(region_id)

    def was_missing(self, region_id: int) -> bool:
        """Whether a region was not found at the last look either."""
        return region_id in self._missing

    def note_missing(self, region_id: int) -> None:
        """A region is not there: its agent tells, if it knows."""
        self._missing.add(region_id)

    def keep_only(self, mappings: Collection[int]) -> None:
        """All that are there now: of others nothing is kept."""
        self.refused &= set(mappings)

    def was_new(self, mapping: int) -> bool:
        """Whether a mapping was there at the last look, and nobody had told of it."""
        return mapping in self._new

    def note_new(self, mappings: set[int]) -> None:
        """Nobody has told of these, and an agent may be about to."""
        self._new = mappings
