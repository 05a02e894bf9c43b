# SPDX-License-Identifier: Apache-2.0
"""What a transport needs of a network: buffers sent and received without waiting. Here: MPI.

Two-sided, non-blocking, from one thread. Nothing is ever cancelled: a buffer belongs to the network
until its request has completed, however late, and a peer that is silent keeps those that were for
it. UCX or NIXL can stand behind the same three methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview
Then = Callable[[], None]
ThenFrom = Callable[[int], None]  # of the rank that sent it


class FabricError(Exception):
    """The network has failed as a whole."""


class Fabric(Protocol):
    """Peers by rank, 0 to ``size`` - 1; this one is ``rank``."""

    rank: int
    size: int

    def send(self, peer: int, tag: int, data: Buffer, then: Then | None = None) -> None:
        """``data`` is not touched until ``then`` is called. Raises FabricError."""

    def receive(self, peer: int, tag: int, into: Buffer, then: Then) -> None:
        """The next message of this tag, no longer than ``into``. Raises FabricError."""

    def receive_any(self, tag: int, into: Buffer, then: ThenFrom) -> None:
        """The same, whoever sends it. Raises FabricError."""

    def poll(self) -> bool:
        """Call what was to be called of whatever has completed; whether something has. Raises
        FabricError."""


class MpiFabric:
    """One communicator of mpi4py, of whatever MPI that was built with."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        """``mpi``: mpi4py.MPI, initialized; errors are returned from now on, as far as the MPI
        does so."""
        self._mpi, self._comm = mpi, comm
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._requests: list[Any] = []
        self._then: list[
            tuple[ThenFrom | None, Buffer]
        ] = []  # and what must not be freed meanwhile

    def send(self, peer: int, tag: int, data: Buffer, then: Then | None = None) -> None:
        """See Fabric."""
        self._start(self._comm.Isend, data, peer, tag, _whoever(then) if then else None)

    def receive(self, peer: int, tag: int, into: Buffer, then: Then) -> None:
        """See Fabric."""
        self._start(self._comm.Irecv, into, peer, tag, _whoever(then))

    def receive_any(self, tag: int, into: Buffer, then: ThenFrom) -> None:
        """See Fabric."""
        self._start(self._comm.Irecv, into, self._mpi.ANY_SOURCE, tag, then)

    def _start(
        self, call: Callable[..., Any], data: Buffer, peer: int, tag: int, then: ThenFrom | None
    ) -> None:
        try:
            self._requests.append(call([data, self._mpi.BYTE], peer, tag))
        except self._mpi.Exception as error:
            raise FabricError(f"MPI: {error}") from None
        self._then.append((then, data))

    def poll(self) -> bool:
        """See Fabric."""
        if not self._requests:
            return False
        statuses: list[Any] = []
        try:
            done = self._mpi.Request.Testsome(self._requests, statuses)
        except self._mpi.Exception as error:
            raise FabricError(f"MPI: {error}") from None
        if not done:
            return False
        ready = [
            (self._then[i][0], status.Get_source())
            for i, status in zip(done, statuses, strict=False)
        ]
        gone = set(done)
        self._requests = [r for i, r in enumerate(self._requests) if i not in gone]
        self._then = [t for i, t in enumerate(self._then) if i not in gone]
        for then, source in ready:
            if then is not None:
                then(source)
        return True


def _whoever(then: Then) -> ThenFrom:
    return lambda _: then()
