# SPDX-License-Identifier: Apache-2.0
"""How the files of a run are served, and how well the best of them is followed."""

from __future__ import annotations

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.protocol import wire
from uffdprefetch.state.files import FileState
from uffdprefetch.state.unserved import Coarse

FILES_MAX = 256
#: How a file is served, by the names of wire.ServingMode, the best first.
_BEST = ("pool", "checkpoints", "page_tables", "reads")


@dataclass
class ServingBook:
    """By paths. ``rung``: the run's sensor tier, the best of its mappings, and why it is no better;
    ``lifts``: doctor may know how to reach that, ``remedy``: what else would. ``coarse``: why a
    file is followed less closely than it could be."""

    modes: dict[str, str] = field(default_factory=dict)
    coarse: dict[str, str] = field(default_factory=dict)
    rung: int | None = None
    reason: str = "no mapping was managed"
    lifts: bool = True
    remedy: str | None = None
    _is_coarse: bool = False  # less closely than it could be

    def served(self, file: FileState, mode: wire.ServingMode) -> None:
        """A mapping of the file is served so; of several the best is told."""
        before = self.modes.get(file.path)
        if before is None or _BEST.index(mode.name.lower()) < _BEST.index(before):
            self.modes[file.path] = mode.name.lower()

    def unserved(self, file: FileState) -> None:
        """No mapping of it is served as was noted; the next one tells."""
        self.modes.pop(file.path, None)

    def note_coarse(self, file: FileState, reason: str) -> None:
        """It is followed less closely than it could be."""
        if file.path in self.coarse or len(self.coarse) < FILES_MAX:
            self.coarse[file.path] = reason

    def reached(self, rung: int, reason: str, coarse: Coarse | None) -> None:
        """A mapping is followed on this tier."""
        is_coarse = coarse is not None
        if self.rung is None or (rung, is_coarse) < (self.rung, self._is_coarse):
            self.rung, self.reason, self._is_coarse = rung, reason, is_coarse
            self.lifts = coarse is Coarse.NO_USERFAULTFD
            self.remedy = coarse.remedy if coarse is not None else None
