# SPDX-License-Identifier: Apache-2.0
"""Network bandwidth between two nodes by MPI, and which rank is on which node."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from uffdprefetch.base.errors import UffdPrefetchError

MB = 1e6
MESSAGE_BYTES = 8 << 20
MESSAGES = 4
#: Environment variables in which launchers give the number of tasks.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def world(environ: Any) -> Any | None:
    """MPI.COMM_WORLD when a launcher started more than this process, None else.

    Raises UffdPrefetchError where MPI does not connect them: each would measure by itself, all at
    the same time.
    """
    tasks = max(
        [int(environ[name]) for name in SIZES if environ.get(name, "").isdigit()], default=1
    )
    if tasks <= 1:
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UffdPrefetchError(
            f"calibrate: one of {tasks} tasks, but without mpi4py ({error}): python3 -m pip "
            "install mpi4py, or start one task"
        ) from None
    if MPI.COMM_WORLD.Get_size() == 1:
        raise UffdPrefetchError(
            f"calibrate: one of {tasks} tasks, but mpi4py sees itself alone: it was built for "
            "another MPI than the launcher's"
        )
    return MPI.COMM_WORLD


def leaders(hosts: list[str]) -> list[int]:
    """The first rank of every host, in order."""
    return [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]


class LinkBenchmark:
    """Messages from rank ``source`` to rank ``target``. Collective."""

    def __init__(self, comm: Any, source: int, target: int) -> None:
        self.comm, self.source, self.target = comm, source, target
        self.buffer: np.ndarray = np.zeros(MESSAGE_BYTES, np.uint8)

    def run(self) -> float:
        """MB/s at the receiver, broadcast to all ranks."""
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
