# SPDX-License-Identifier: Apache-2.0
"""Between nodes, by MPI: one node's rank receives from another's. And who runs where."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from uffdprefetch.sim.measure.bounds import Budget

MB = 1e6
MESSAGE_BYTES = 8 << 20
MESSAGES = 4
#: What launchers put into the environment of the ranks that they start.
SIGNS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS")


def world(environ: Any) -> Any | None:
    """MPI.COMM_WORLD when a launcher started more than this process; None without one, or
    without mpi4py."""
    if not any(sign in environ for sign in SIGNS):
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.Get_size() > 1 else None


def leaders(hosts: list[str]) -> list[int]:
    """The first rank of every host, in order."""
    return [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]


class Link:
    """Messages from rank ``source`` to rank ``target``; all ranks make the same calls."""

    def __init__(self, comm: Any, source: int, target: int) -> None:
        self.comm, self.source, self.target = comm, source, target
        self.buffer: np.ndarray = np.zeros(MESSAGE_BYTES, np.uint8)

    def run(self, budget: Budget) -> float | None:
        """MB/s at the receiver, told to all ranks; None when the budget is used up."""
        go = self.comm.bcast(budget.take(MESSAGES * MESSAGE_BYTES), root=0)
        if not go:
            return None
        self.comm.Barrier()
        rank, rate = self.comm.Get_rank(), 0.0
        if rank == self.source:
            for _ in range(MESSAGES):
                self.comm.Send(self.buffer, dest=self.target)
        elif rank == self.target:
            began = time.monotonic()
            for _ in range(MESSAGES):
                self.comm.Recv(self.buffer, source=self.source)
            rate = MESSAGES * MESSAGE_BYTES / MB / max(1e-9, time.monotonic() - began)
        return float(self.comm.bcast(rate, root=self.target))
