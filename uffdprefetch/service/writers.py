# SPDX-License-Identifier: Apache-2.0
"""Who wants to write a file of which the service has the lease: it is given back everywhere, then
the writer is let in."""

from __future__ import annotations

from collections.abc import Callable

from uffdprefetch.base.clock import CLOCK, MS
from uffdprefetch.service.attachments import OPENED_FOR_WRITING
from uffdprefetch.service.mappings import ManagedMappings
from uffdprefetch.state.admission import FileTable
from uffdprefetch.state.files import FileState

#: A file given back: how long the agents have before a waiting writer is let in.
DETACH_NS = 1000 * MS


class Writers:
    """Those of a service's files."""

    def __init__(
        self, table: FileTable, mappings: ManagedMappings, let_in: Callable[[FileState], None]
    ) -> None:
        """``let_in``: told of a file that is about to be written."""
        self._table, self._mappings, self._let_in = table, mappings, let_in
        self._leaving: dict[int, tuple[FileState, int]] = {}

    @property
    def waiting(self) -> bool:
        """Whether one waits: the last agent has perhaps just told that it has left."""
        return bool(self._leaving)

    def look(self) -> None:
        """A broken lease: detach everywhere, then let the writer in."""
        now = CLOCK.now_ns()
        for file in self._table.files.values():
            if not file.guard.leased or not file.guard.lease_breaking(file.opened.fd):
                continue
            if file.guard.changed is None:
                self._mappings.give_up(file, OPENED_FOR_WRITING)
            self._leaving.setdefault(id(file), (file, now + DETACH_NS))
        for key, (file, deadline) in list(self._leaving.items()):
            if not file.mappings.attached or now >= deadline:
                self._let_in(file)
                file.guard.release_lease(file.opened.fd)
                del self._leaving[key]
