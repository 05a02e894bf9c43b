# SPDX-License-Identifier: Apache-2.0
"""One connection: a process of the job (its agent), or a launcher."""

from __future__ import annotations

import os
import socket
from functools import cached_property

from uffdprefetch.base.record import dataclass
from uffdprefetch.native import uffd
from uffdprefetch.native.uffd import PageTable
from uffdprefetch.protocol import wire
from uffdprefetch.state.agent_link import AgentLink
from uffdprefetch.state.files import Key
from uffdprefetch.state.pending import PendingMappings
from uffdprefetch.state.processes import Watched, ancestors
from uffdprefetch.state.reader import Reader, Region
from uffdprefetch.state.sightings import Sightings


class Client:
    """One process of the job, as its agent reports it. ``agent``: what that is told;
    ``sightings``: what /proc/PID/maps has shown."""

    def __init__(self, sock: socket.socket | None, hello: wire.Hello, pid: int) -> None:
        """``sock``: None for a process that is only observed and gets no commands."""
        self.agent = AgentLink(sock, pid)
        self.page_table = PageTable(pid)
        self.sightings = Sightings()
        self.watched = Watched(pid, ended=True)  # replaced by the ledger at hello
        self.hello, self.pid = hello, pid
        self.rank = max(0, hello.rank)  # 0 where no launcher has said
        self.pending = PendingMappings()
        self.regions: dict[int, Region] = {}
        self.readers: dict[Key, Reader] = {}
        self.ring = uffd.Ring()
        self.pool_slot = -1

    @property
    def world(self) -> int:
        """How many ranks there are; 0 where no launcher has said."""
        return max(0, self.hello.world)

    @property
    def observed(self) -> bool:
        """Whether it is only that: it has no agent."""
        return self.agent.sock is None

    @property
    def has_uffd(self) -> bool:
        """Whether something of ours can lie over its mappings."""
        return bool(self.hello.flags & wire.HELLO_UFFD)

    @cached_property
    def _ancestors(self) -> frozenset[int]:
        return frozenset(ancestors(self.pid))

    def descends_from(self, pid: int) -> bool:
        """Whether it is this process or one of its descendants."""
        return pid == self.pid or pid in self._ancestors

    def close(self) -> None:
        """Close the connection and its resources."""
        if self.observed:
            os.close(self.ring.fd)
        self.pending.forget()  # an opener's answer may still come
        self.agent.close()
        self.ring.close()
        self.page_table.close()


@dataclass
class Launcher:
    """A connected ``wrap``: keeps the service alive and requests the summary."""

    sock: socket.socket
    hello: wire.Hello
    pid: int
    job_pid: int = 0
    finished: bool = False

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()
