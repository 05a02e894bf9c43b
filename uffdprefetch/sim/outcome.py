# SPDX-License-Identifier: Apache-2.0
"""What a plan costs, in the terms that both regimes of execute.py and staged.py share. Pure.

Sources are numbered: 0 the file system, 1..J the node's own class j, J + 1..2 J another node's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from uffdprefetch.sim.model import System

PFS = 0
#: Samples of batches simulated in parallel: keeps the arrays below some 100 MB.
SIDE_BY_SIDE = 1 << 21


@dataclass
class Outcome:
    """A policy's cost. Sums over nodes are in ``*_mb``; seconds are of the whole run."""

    seconds: float = 0.0
    preload_seconds: float = 0.0
    compute_seconds: float = 0.0  # with every sample there at once
    #: (2 J + 1,) per source: MB read by all nodes, and its share of the stall seconds.
    read_mb: np.ndarray = field(default_factory=lambda: np.zeros(1))
    stall_seconds: np.ndarray = field(default_factory=lambda: np.zeros(1))
    fill_mb: float = 0.0  # read from the file system by preloading and by the classes' prefetchers
    useless_mb: float = 0.0  # read from the file system and never used
    consumed_mb: float = 0.0

    @property
    def stall(self) -> float:
        """Seconds in which training waited for samples, preloading included."""
        return self.seconds - self.compute_seconds

    @property
    def pfs_mb(self) -> float:
        """MB read from the file system."""
        return float(self.read_mb[PFS]) + self.fill_mb + self.useless_mb


def parts(order: np.ndarray) -> list[np.ndarray]:
    """Parts of an order of SIDE_BY_SIDE samples."""
    step = max(1, SIDE_BY_SIDE // max(1, order.shape[1] * order.shape[2]))
    return [order[at : at + step] for at in range(0, len(order), step)]


def fixed_costs(system: System, threads: int) -> np.ndarray:
    """(2 J + 1,) seconds a MB of each source but the file system (0), for each of ``threads``
    concurrent threads of a node."""
    classes = range(1, system.J + 1)
    own, others = ([cost(j, threads) for j in classes] for cost in (system.local, system.remote))
    return np.array([0.0, *own, *others])
