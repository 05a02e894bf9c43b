# SPDX-License-Identifier: Apache-2.0
"""Whether the nodes of a meeting have the same files open under the same paths."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from uffdprefetch.cluster import identity
from uffdprefetch.cluster.meeting import Meeting, numbers_in
from uffdprefetch.cluster.service_pipe import ServicePipe

#: Interval at which a node compares its shared files with its neighbour's of the same paths.
COMPARE_SECONDS = 5.0
#: Most files that a node tells of: all of them are written with each new one.
FILES_MAX = 1024


class FileComparison:
    """This node's shared files, compared with the next node's."""

    def __init__(self, meeting: Meeting, service: ServicePipe) -> None:
        self._meeting, self._service = meeting, service
        self._files: dict[str, identity.Fields] = {}
        self._untold = False  # the others have still to be told of some
        self._compared_since = 0.0
        self._differ: set[str] = set()

    def add(self, path: str, fields: identity.Fields) -> None:
        """A file that is shared."""
        if len(self._files) < FILES_MAX:
            self._files[path] = fields
            self._untold = True

    def turn(self, names: Sequence[str], now: float) -> None:
        """Tell which files are shared here, and look whether the next node has others."""
        if now - self._compared_since < COMPARE_SECONDS or not self._files:
            return
        self._compared_since = now
        own = self._meeting.node
        if self._untold:
            self._untold = False
            with contextlib.suppress(OSError):
                self._meeting.post(f"files-{own}", self._files)
        others = [node for node in numbers_in(names) if node != own]
        if not others:
            return
        one = next((node for node in others if node > own), others[0])
        theirs = self._meeting.note(f"files-{one}") or {}
        for path in self._files.keys() & theirs.keys() - self._differ:
            fields = identity.difference(self._files[path], theirs[path])
            if fields:
                self._differ.add(path)
                self._service.tell(differs=path, node=one, fields=fields)
